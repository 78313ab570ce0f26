"""Exact sums of rows of floats by compiled code, in one pass over memory.

On GPUs it is a Triton kernel of the functions in `digit_body.py`. On CPUs it is C++ with vectors.

A chunk of 4096 terms stays in the cache. If its largest term is less than 2^45 times the last place
of the smallest, as mostly in float32 and bfloat16, sums in float64 are exact. Otherwise each term
is added to a large enough power of two: it becomes a multiple of the power's unit in the last
place, and the bit pattern of the sum counts these units. Patterns are added as integers. The exact
remainders of the terms are treated in the same way with a smaller power of two, until all are zero.
The sums of integers are added to the digits of the row's accumulator.

Source: S. M. Rump, T. Ogita, S. Oishi, "Accurate floating-point summation part I: faithful
rounding", SIAM J. Sci. Comput. 31(1), 2008 (the extraction); R. Neal, "Fast exact summation using
small and large superaccumulators", 2015 (digits in integers).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from mcftensor.kernels import cpu, cuda, execute, first_use
from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.cpp import GRAIN
from mcftensor.kernels.cpp_prelude import BITS
from mcftensor.kernels.digit_body import KINDS, add_eagerly, body_of_digits, signature_of_digits
from mcftensor.kernels.first_use import Arrangement, hard_numbers, hard_vectors
from mcftensor.kernels.program import Program
from mcftensor.kernels.without_float64 import has_float64

_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


class Finish(NamedTuple):
    """The last operation on a sum: divide it by `divisor` or take its square root, then round to
    `precision` bits and to multiples of 2^quantum."""

    divisor: int
    is_norm: bool
    precision: int
    quantum: int


SOURCE = (
    BITS
    + """\
constexpr int64_t CHUNK = 4096, LANES = 16;
constexpr int WIDTH = 31, MOST_DIGITS = 160;
constexpr int64_t MASK = (1ll << WIDTH) - 1, SIGNLESS = 0x7fffffffffffffffll;

template <class T, int COUNT>
struct Vector { typedef T type __attribute__((vector_size(sizeof(T) * COUNT))); };
using U = Vector<uint32_t, LANES>::type;
using H = Vector<uint16_t, LANES>::type;
using HalfF = Vector<float, LANES / 2>::type;
using D = Vector<double, LANES / 2>::type;
using L = Vector<int64_t, LANES / 2>::type;

template <class V, class T>
INLINE V load(const T *p) {
  V x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <class V>
INLINE auto most(V x) {
  auto m = x[0];
  for (unsigned i = 1; i < sizeof x / sizeof m; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

INLINE U bits_of(const float *p) { return load<U>(p); }
INLINE U bits_of(const uint16_t *p) {
  return __builtin_convertvector(load<H>(p), U) << 16;
}
INLINE void widen(const float *p, D &a, D &b) {
  a = __builtin_convertvector(load<HalfF>(p), D);
  b = __builtin_convertvector(load<HalfF>(p + LANES / 2), D);
}
INLINE void widen(const uint16_t *p, D &a, D &b) {
  U both = bits_of(p);
  widen(reinterpret_cast<const float *>(&both), a, b);
}
INLINE void widen(const double *p, D &a, D &b) {
  a = load<D>(p);
  b = load<D>(p + LANES / 2);
}
// So many numbers twice, in any order.
INLINE void widen_twice(const float *p, D &a, D &b, D &c, D &d) {
  widen(p, a, b);
  widen(p + LANES, c, d);
}
INLINE void widen_twice(const uint16_t *p, D &a, D &b, D &c, D &d) {
  U both = load<U>(p), second = both & 0xffff0000u, first = both << 16;
  widen(reinterpret_cast<const float *>(&first), a, b);
  widen(reinterpret_cast<const float *>(&second), c, d);
}
INLINE double wide(float x) { return x; }
INLINE double wide(double x) { return x; }
INLINE double wide(uint16_t x) { return as<float>(uint32_t(x) << 16); }

INLINE double power(int exponent) { return as<double>(uint64_t(exponent + 1023) << 52); }
INLINE int exponent_of_normal(double x) { return int(as<uint64_t>(x) >> 52 & 2047) - 1023; }
INLINE int exponent_of(double x) {
  if (x < 0x1p-900) return exponent_of_normal(x * 0x1p200) - 200;
  return exponent_of_normal(x);
}

// The accumulator of one row, and where the grid begins.
struct Sum {
  int64_t digits[MOST_DIGITS] = {};
  int64_t plus = 0, minus = 0, nan = 0, minus_zeros = 0, others = 0;
  int lowest;
  explicit Sum(int lowest) : lowest(lowest) {}

  // value * 2^exponent
  void add(int64_t value, int exponent) {
    int place = exponent - lowest * WIDTH;
    __int128 shifted = (__int128)value << place % WIDTH;
    place /= WIDTH;
    digits[place] += int64_t(shifted) & MASK;
    digits[place + 1] += int64_t(shifted >> WIDTH) & MASK;
    digits[place + 2] += int64_t(shifted >> 2 * WIDTH);
  }
  // The same of magnitudes up to 2^106, one by one.
  void add_wide(unsigned __int128 magnitude, bool is_negative, int exponent) {
    int place = exponent - lowest * WIDTH, shift = place % WIDTH;
    for (place /= WIDTH; magnitude; ++place, magnitude >>= WIDTH) {
      uint64_t part = uint64_t(magnitude & MASK) << shift;
      int64_t low = part & MASK, high = part >> WIDTH;
      digits[place] += is_negative ? -low : low;
      if (high) digits[place + 1] += is_negative ? -high : high;
    }
  }
};

struct Parts {
  uint64_t significand;
  int exponent;
  explicit Parts(double x) {
    uint64_t bits = as<uint64_t>(x);
    int field = bits >> 52 & 2047;
    significand = (bits & ((1ull << 52) - 1)) | (uint64_t(field != 0) << 52);
    exponent = (field ? field : 1) - 1075;
    // Digits below the grid are zeros, which are not there.
    int zeros = significand ? __builtin_ctzll(significand) : 0;
    significand >>= zeros;
    exponent += zeros;
  }
};

// Any terms, one by one.
INLINE void add_each(Sum &sum, double x, double y) {
  bool is_finite = x - x == 0 && y - y == 0;
  if (is_finite && x != 0 && y != 0) {
    Parts a(x), b(y);
    bool is_negative = (x < 0) != (y < 0);
    sum.add_wide((unsigned __int128)a.significand * b.significand, is_negative,
                 a.exponent + b.exponent);
    ++sum.others;
    return;
  }
  double term = x * y;
  if (term != term) ++sum.nan;
  else if (term == 0 && as<int64_t>(term) < 0) ++sum.minus_zeros;
  else ++sum.others;
  sum.plus += term == __builtin_inf();
  sum.minus += term == -__builtin_inf();
}

// n numbers, all finite, below 2^exponent and multiples of 2^least. What is left of them is kept.
template <class T>
INLINE double level(Sum &sum, const T *x, double *left, int64_t n, int exponent) {
  double anchor = 1.5 * power(exponent + 2);
  L counted = {}, counted_too = {}, largest = {};
  for (int64_t i = 0; i < n; i += LANES) {
    D a, b;
    widen(x + i, a, b);
    D u = a + anchor, v = b + anchor;
    counted += as<L>(u);
    counted_too += as<L>(v);
    D r = a - (u - anchor), s = b - (v - anchor);
    __builtin_memcpy(left + i, &r, sizeof r);
    __builtin_memcpy(left + i + LANES / 2, &s, sizeof s);
    L p = as<L>(r) & SIGNLESS, q = as<L>(s) & SIGNLESS;
    p = p > q ? p : q;
    largest = p > largest ? p : largest;
  }
  counted += counted_too;
  uint64_t total = 0;
  for (int i = 0; i < LANES / 2; ++i) total += counted[i];
  sum.add(int64_t(total - uint64_t(n) * as<uint64_t>(anchor)), exponent - 50);
  return as<double>(most(largest));
}

// The level's exponent for numbers of at most this size.
INLINE int above(double largest, int least) {
  int exponent = exponent_of(largest) + 1;
  return exponent > least + 50 ? exponent : least + 50;
}

template <class T>
INLINE void levels(Sum &sum, const T *x, double *left, int64_t n, double largest, int least) {
  largest = level(sum, x, left, n, above(largest, least));
  while (largest) largest = level(sum, left, left, n, above(largest, least));
}

INLINE double largest_of(const double *x, int64_t n) {
  L largest = {}, too = {};
  for (int64_t i = 0; i < n; i += LANES) {
    L p = load<L>(x + i) & SIGNLESS, q = load<L>(x + i + LANES / 2) & SIGNLESS;
    largest = p > largest ? p : largest;
    too = q > too ? q : too;
  }
  largest = largest > too ? largest : too;
  return as<double>(most(largest));
}

INLINE bool is_level(double largest) { return largest < 0x1p1000; }  // and no NaN

INLINE bool add_chunk(Sum &sum, const double *x, double *left, int64_t n, int least) {
  double largest = largest_of(x, n);
  if (largest == 0 || !is_level(largest)) return false;
  levels(sum, x, left, n, largest, least);
  return true;
}

// The patterns of float32 and bfloat16 numbers without their signs.
INLINE U sizes_of(const float *p) { return load<U>(p) & 0x7fffffffu; }
INLINE H sizes_of(const uint16_t *p) { return load<H>(p) & uint16_t(0x7fff); }

// In one pass: the sums, and whether they are exact. They are if all numbers are multiples of a
// unit, which is a power of two, and below 2^45 units: each is a sum of at most 2^8 of them.
template <class T>
INLINE bool add_chunk(Sum &sum, const T *x, double *left, int64_t n, int least) {
  auto largest = sizes_of(x), smallest = largest;
  D a, b, c, d, s = {}, t = {}, u = {}, v = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    auto sizes = sizes_of(x + i), others = sizes_of(x + i + LANES);
    largest = sizes > largest ? sizes : largest;
    smallest = sizes < smallest ? sizes : smallest;
    largest = others > largest ? others : largest;
    smallest = others < smallest ? others : smallest;
    widen_twice(x + i, a, b, c, d);
    s += a;
    t += b;
    u += c;
    v += d;
  }
  if (i < n) {
    auto sizes = sizes_of(x + i);
    largest = sizes > largest ? sizes : largest;
    smallest = sizes < smallest ? sizes : smallest;
    widen(x + i, a, b);
    s += a;
    t += b;
  }
  smallest = ~smallest;
  using Size = decltype(most(largest));
  uint32_t high = most(largest), low = Size(~most(smallest));
  constexpr int SHORTER = sizeof(T) == 2 ? 16 : 0;
  if (high == 0 || high >= 0x7f800000u >> SHORTER) return false;
  if (low == 0) {  // zeros have no last place: less one, they are the largest
    smallest = ~(sizes_of(x) - 1);
    for (i = LANES; i < n; i += LANES) {
      auto before = ~(sizes_of(x + i) - 1);
      smallest = before > smallest ? before : smallest;
    }
    low = Size(~most(smallest));
  }
  float high_value = as<float>(high << SHORTER);
  int field = low << SHORTER >> 23, unit = (field ? field : 1) - 150 + SHORTER;
  if (unit < least) unit = least;  // of float16 in float32
  if (exponent_of(high_value) + 1 - unit > 45) {
    levels(sum, x, left, n, high_value, least);
    return true;
  }
  int64_t total = 0;
  const D parts[] = {s, t, u, v};
  for (D part : parts) {
    part *= power(-unit);
    for (int k = 0; k < LANES / 2; ++k) total += int64_t(part[k]);
  }
  sum.add(total, unit);
  return true;
}

INLINE bool add_products(Sum &sum, const double *x, const double *y, double *left, double *errors,
                         int64_t n, int) {
  L inexact = {};
  for (int64_t i = 0; i < n; i += LANES / 2) {
    D a = load<D>(x + i), b = load<D>(y + i), product = a * b, error;
    for (int k = 0; k < LANES / 2; ++k) error[k] = __builtin_fma(a[k], b[k], -product[k]);
    D size = as<D>(as<L>(product) & SIGNLESS);
    inexact |= (size < 0x1p-960) & (a != 0) & (b != 0);
    __builtin_memcpy(left + i, &product, sizeof product);
    __builtin_memcpy(errors + i, &error, sizeof error);
  }
  double largest = largest_of(left, n);
  for (int k = 0; k < LANES / 2; ++k)
    if (inexact[k]) return false;
  if (largest == 0 || !is_level(largest)) return false;
  levels(sum, left, left, n, largest, -1074);
  if (double most_error = largest_of(errors, n)) levels(sum, errors, errors, n, most_error, -1074);
  return true;
}
template <class T>
INLINE bool add_products(Sum &sum, const T *x, const T *y, double *left, double *, int64_t n,
                         int least) {
  for (int64_t i = 0; i < n; i += LANES) {
    D a, b, c, d;
    widen(x + i, a, b);
    widen(y + i, c, d);
    a *= c;
    b *= d;
    __builtin_memcpy(left + i, &a, sizeof a);
    __builtin_memcpy(left + i + LANES / 2, &b, sizeof b);
  }
  return add_chunk(sum, left, left, n, least);
}

template <class T>
INLINE void add_terms(Sum &sum, const T *x, const T *y, int64_t n, int least) {
  double left[CHUNK], errors[CHUNK];
  T padded[LANES] = {}, others[LANES] = {};
  while (n) {  // whole vectors; and what remains, after zeros
    int64_t size = n < LANES ? n : (n < CHUNK ? n : CHUNK) / LANES * LANES, whole = size;
    const T *a = x, *b = y;
    if (size < LANES) {
      __builtin_memcpy(padded, x, size * sizeof(T));
      a = padded;
      if (y) __builtin_memcpy(others, y, size * sizeof(T));
      b = y ? others : y;
      whole = LANES;
    }
    bool is_done = y ? add_products(sum, a, b, left, errors, whole, least)
                     : add_chunk(sum, a, left, whole, least);
    if (is_done) sum.others += size;
    else for (int64_t i = 0; i < size; ++i) add_each(sum, wide(a[i]), y ? wide(b[i]) : 1.0);
    x += size;
    if (y) y += size;
    n -= size;
  }
}

using Wide = unsigned __int128;

INLINE int bit_length(Wide x) {
  uint64_t high = uint64_t(x >> 64), low = uint64_t(x);
  return high ? 128 - __builtin_clzll(high) : low ? 64 - __builtin_clzll(low) : 0;
}
INLINE Wide root(Wide x) {  // of 123 or 124 bits, rounded down
  Wide r = Wide(__builtin_sqrt(double(x)));
  r = (r + x / r) / 2;
  while (r * r > x) --r;
  while ((r + 1) * (r + 1) <= x) ++r;
  return r;
}

// What an accumulator sums up to, divided by a number or its root, rounded once to so many bits and
// to multiples of 2^quantum.
static double rounded(int64_t *digits, const int64_t *counts, int count, int lowest,
                      int64_t divisor, bool is_norm, int precision, int quantum) {
  bool plus = counts[0], minus = counts[1], nan = counts[2];
  if (nan || (plus && minus)) return __builtin_nan("");
  if (plus || minus) return plus ? __builtin_inf() : -__builtin_inf();
  auto carried = [&](int64_t carry, int64_t flip) {
    for (int i = 0; i < count; ++i) {
      int64_t digit = (digits[i] ^ flip) + carry;
      digits[i] = digit & MASK;
      carry = digit >> WIDTH;
    }
    return carry;
  };
  bool is_negative = carried(0, 0) < 0;
  if (is_negative) carried(1, MASK);
  int first = count - 1;
  while (first >= 0 && !digits[first]) --first;
  if (first < 0) return counts[3] && !counts[4] ? -0.0 : 0.0;
  // 124 bits, and whether anything follows.
  auto digit = [&](int i) { return Wide(i < 0 ? 0 : digits[i]); };
  Wide leading = 0, next = digit(first - 4);
  for (int i = 0; i < 4; ++i) leading = leading << WIDTH | digit(first - i);
  int shift = 4 * WIDTH - bit_length(leading), exponent = (lowest + first - 3) * WIDTH - shift;
  leading = leading << shift | next >> (WIDTH - shift);
  bool rest = next << shift & MASK;
  for (int i = 0; i < first - 4; ++i) rest |= digits[i] != 0;
  if (is_norm) {
    rest |= exponent & leading & 1;
    leading >>= exponent & 1;
    exponent += exponent & 1;
    Wide square = leading;
    leading = root(square);
    rest |= leading * leading != square;
    exponent /= 2;
  } else {
    Wide dividend = leading;
    leading /= divisor;
    rest |= leading * divisor != dividend;
  }
  int dropped = bit_length(leading) - precision;
  if (dropped < quantum - exponent) dropped = quantum - exponent;
  if (dropped > 126) return is_negative ? -0.0 : 0.0;
  Wide kept = leading >> dropped, half = Wide(1) << (dropped - 1);
  Wide remainder = leading - (kept << dropped);
  kept += remainder > half || (remainder == half && (rest || kept & 1));
  double size = __builtin_ldexp(double(uint64_t(kept)), exponent + dropped);
  return is_negative ? -size : size;
}

// Where results go, and how sums become results; none where there is no place for them.
struct Finish {
  void *results;
  int64_t divisor;
  bool is_norm;
  int precision, quantum;
  int64_t kind;

  void write(int64_t row, int64_t *digits, const int64_t *counts, int count, int lowest) const {
    double x = rounded(digits, counts, count, lowest, divisor, is_norm, precision, quantum);
    if (kind == 0) ((float *)results)[row] = float(x);
    else if (kind == 1) ((double *)results)[row] = x;
    else ((uint16_t *)results)[row] = as<uint32_t>(float(x)) >> 16;
  }
};

// A row that one thread adds up whole is finished there; the others add to accumulators.
template <class T>
static void add_rows(const T *x, const T *y, int64_t *out, int64_t rows, int64_t length,
                     int64_t lowest, int64_t count, int least, int threads, const Finish &finish) {
  int64_t chunks = length ? (length + CHUNK - 1) / CHUNK : 1, units = rows * chunks;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int thread = 0; thread < threads; ++thread) {
    int64_t unit = units * thread / threads, end = units * (thread + 1) / threads;
    while (unit < end) {
      int64_t row = unit / chunks, first = unit % chunks;
      int64_t last = first + (end - unit) < chunks ? first + (end - unit) : chunks;
      int64_t start = first * CHUNK, stop = last * CHUNK < length ? last * CHUNK : length;
      Sum sum(lowest);
      const T *other = y ? y + row * length + start : y;
      add_terms(sum, x + row * length + start, other, stop - start, least);
      int64_t counts[] = {sum.plus, sum.minus, sum.nan, sum.minus_zeros, sum.others};
      unit += last - first;
      if (finish.results && last - first == chunks) {
        finish.write(row, sum.digits, counts, count, lowest);
        continue;
      }
      int64_t *to = out + row * (count + 5);
      for (int64_t i = 0; i < count + 5; ++i) {
        int64_t value = i < count ? sum.digits[i] : counts[i - count];
        if (value)
#pragma omp atomic
          to[i] += value;
      }
    }
  }
  if (!finish.results) return;
  for (int64_t thread = 1, done = -1; thread < threads; ++thread) {
    int64_t unit = units * thread / threads, row = unit / chunks;
    if (unit % chunks == 0 || row == done) continue;
    int64_t *digits = out + row * (count + 5);
    finish.write(row, digits, digits + count, count, lowest);
    done = row;
  }
}

extern "C" void launch(const int64_t *words, const double *, int64_t kind, int64_t threads) {
  int64_t *digits = (int64_t *)words[2], rows = words[3], lowest = words[5], count = words[6];
  Finish finish{(void *)words[8], words[9], words[10] != 0, int(words[11]), int(words[12]),
                words[13]};
  auto run = [&](auto x) {
    using T = decltype(x);
    add_rows((const T *)words[0], (const T *)words[1], digits, rows, words[4], lowest, count,
             words[7], threads, finish);
  };
  if (kind == 0) run(float{});
  else if (kind == 1) run(double{});
  else run(uint16_t{});
}
"""
)


# Terms of a row that a launch adds, so that digits stay below 2^62.
_MOST_IN_A_LAUNCH = 1 << 28


def add_rows(x: Tensor, y: Tensor | None, digits: Tensor, lowest: int, least: int) -> bool:
    """Add the terms of rows, or products of terms, to accumulators; return whether it was done.

    It is not done without compiled code, which on a CPU is compiled after some use.

    Args:
        x: floats of shape (rows, n).
        y: None, or a tensor of the dtype and shape of x.
        digits: int64, of shape (rows, positions + 5), contiguous.
        lowest: the first position.
        least: the exponent of the smallest term: all terms are multiples of 2^least.
    """
    if x.device.type in execute.TRITON_DEVICES:
        return _add_by_triton(x, y, digits, lowest)
    launch = _launch_for(x)
    if launch is None:
        return False
    _run(launch, x, y, digits.data_ptr(), lowest, digits.shape[1] - KINDS, least)
    return True


def _add_by_triton(x: Tensor, y: Tensor | None, digits: Tensor, lowest: int) -> bool:
    """Add terms by a Triton kernel; the sets of tensors of its launch are the rows."""
    if not (cuda.is_available() and x.numel() and x.data_ptr() and x.shape[1] <= _MOST_IN_A_LAUNCH):
        return False
    factors = [x.contiguous()] if y is None else [x.contiguous(), y.contiguous()]
    signature = signature_of_digits(x.dtype, len(factors))
    program = execute.kernel_of(body_of_digits(x.dtype, len(factors)), signature).program
    addresses = [
        [t.data_ptr() + i * t.stride(0) * t.element_size() for i in range(len(t))]
        for t in (*factors, digits)
    ]
    lengths = [x.shape[1]] * len(x)
    scalars = [[lowest], [digits.shape[1] - KINDS]]
    return cuda.launch(program, lengths, addresses, scalars, x.device, is_right_in_triton(program))


def is_right_in_triton(program: Program) -> Callable[[first_use.Launch, Arrangement], bool]:
    """Return the comparison of a launch with PyTorch's operators on a CPU, on hard terms."""
    dtype, factors = program.signature.vectors[0], len(program.signature.vectors)

    def is_right(launch: first_use.Launch, arrangement: Arrangement) -> bool:
        lowest, positions, lengths = -70, 139, [*first_use.LENGTHS]
        terms = [hard_vectors(dtype, i, BLOCK_SIZE, arrangement) for i in range(factors)]
        expected = torch.zeros(len(lengths), positions + KINDS, dtype=torch.int64, device="cpu")
        for row, *parts in zip(expected, *terms, strict=True):
            x, y = parts[0].cpu(), parts[1].cpu() if factors > 1 else None
            add_eagerly(row, x, y, lowest, positions, lambda counts: counts.sum())
        found = torch.zeros_like(expected).to(arrangement.device)
        addresses = [[t.data_ptr() for t in column] for column in (*terms, found.unbind())]
        launch(lengths, addresses, [[lowest], [positions]])
        return torch.equal(found.cpu(), expected)

    return is_right


def sums_of_rows(
    x: Tensor,
    y: Tensor | None,
    results: Tensor,
    lowest: int,
    positions: int,
    least: int,
    finish: Finish,
) -> bool:
    """Write the rounded results of rows; return whether it was done, as `add_rows` does.

    Args:
        x: floats of shape (rows, n).
        y: None, or a tensor of the dtype and shape of x.
        results: a contiguous tensor with one element for each row.
        lowest: the first position.
        positions: the number of positions.
        least: the exponent of the smallest term.
        finish: how sums become results.
    """
    launch = None if "cpu" in execute.TRITON_DEVICES else _launch_for(x)
    if launch is None:
        return False
    digits = None
    if _threads(x) > 1:  # threads may share a row
        digits = x.new_zeros(len(x), positions + 5, dtype=torch.int64)
    written = results if results.dtype in _KINDS else results.float()
    address = 0 if digits is None else digits.data_ptr()
    way = (written.data_ptr(), *finish, _KINDS[written.dtype])
    _run(launch, x, y, address, lowest, positions, least, way)
    if written is not results:
        results.copy_(written)
    return True


def _launch_for(x: Tensor) -> cpu.Launch | None:
    if x.device.type != "cpu" or x.data_ptr() == 0:
        return None
    if COMPILED.launch is None and not has_float64():  # with which it is compared
        return None
    return COMPILED.get(x.numel() + execute.OF_A_CALL)


def _threads(x: Tensor) -> int:
    return max(min(torch.get_num_threads(), x.numel() // GRAIN), 1)


def _run(
    launch: cpu.Launch,
    x: Tensor,
    y: Tensor | None,
    digits: int,
    lowest: int,
    positions: int,
    least: int,
    finish: Sequence[int] = (0,) * 6,
) -> None:
    if x.dtype == torch.float16:
        x, y = x.float(), None if y is None else y.float()
    x, y = x.contiguous(), None if y is None else y.contiguous()
    addresses = (x.data_ptr(), 0 if y is None else y.data_ptr(), digits)
    words = array("q", (*addresses, *x.shape, lowest, positions, least, *finish))
    launch(words.buffer_info()[0], 0, _KINDS[x.dtype], _threads(x))


def _is_right(launch: cpu.Launch) -> bool:
    """Whether compiled code gives the exact sums of hard terms, and counts special terms."""
    return all(
        _adds_exactly(launch, dtype, least, has_factors)
        for dtype, least in ((torch.float32, -149), (torch.float64, -1074), (torch.bfloat16, -133))
        for has_factors in (False, True)
    )


def _adds_exactly(launch: cpu.Launch, dtype: torch.dtype, least: int, has_factors: bool) -> bool:
    x, y = (hard_numbers(dtype, number, 512).double() for number in (0, 1))
    y = torch.where(y.isfinite(), y, 1) if has_factors else torch.ones_like(y)
    exact, special = Fraction(0), [0, 0, 0]
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if a - a == 0:
            exact += Fraction(a) * Fraction(b)
        else:
            special[0 if a * b > 0 else 1 if a * b < 0 else 2] += 1
    lowest, digits = -70, torch.zeros(1, 144, dtype=torch.int64, device="cpu")
    terms, factors = x.to(dtype).view(1, -1), y.to(dtype).view(1, -1) if has_factors else None
    least = 2 * least if has_factors else least
    _run(launch, terms, factors, digits.data_ptr(), lowest, 139, least)
    *places, plus, minus, nan, _, _ = digits[0].tolist()
    total = sum(digit << 31 * place for place, digit in enumerate(places))
    if total * Fraction(2) ** (31 * lowest) != exact or [plus, minus, nan] != special:
        return False
    result, is_finite = torch.empty(1, dtype=torch.float64, device="cpu"), x.isfinite().view(1, -1)
    finish = (result.data_ptr(), *Finish(1, False, 53, -1074), _KINDS[torch.float64])
    _run(launch, torch.where(is_finite, terms, 0), factors, 0, lowest, 139, least, finish)
    if abs(exact) >= 2**1024 - 2**970:
        return result.item() == (math.inf if exact > 0 else -math.inf)
    return result.item() == float(exact)


COMPILED = cpu.OnDemand(lambda: SOURCE, _is_right)
"""The compiled code of this process."""
