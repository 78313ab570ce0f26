"""Digests of tensors, and marked elements as gaps and codes.

A gap is the number of unmarked elements between two marked ones. Gaps are integers of 1 to 16 bits,
of the width with the fewest bytes. On the CPU, C++ code makes one or two passes over memory; on
other devices, and for few elements, PyTorch computes the same.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from mcftensor.kernels import cpu
from mcftensor.kernels.cpp import GRAIN
from mcftensor.kernels.cpu import OnDemand
from mcftensor.kernels.program import PATTERNS

WIDTHS = (1, 2, 4, 8, 16)
"""Possible widths of gaps in bits; each delta uses the one with the fewest bytes."""

# Elements at a multiple of which the bits of marks begin a word of 64.
_ALIGNED = 64

_PART = 1 << 20  # elements that PyTorch sums together

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it are spread evenly

SOURCE = (
    f"""\
constexpr unsigned long long GOLDEN = {_GOLDEN}ull;
"""
    + """\
#include <cstdint>
#include <cstring>

constexpr int64_t PART = 1 << 16;

template <class T>
static uint64_t digest(const T *x, int64_t n, int threads) {
  uint64_t total = 0;
  int64_t parts = (n + PART - 1) / PART;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total) if (threads > 1)
  for (int64_t part = 0; part < parts; ++part) {
    int64_t start = part * PART, count = n - start < PART ? n - start : PART;
    const T *p = x + start;
    uint64_t place = (2 * uint64_t(start) + 1) * GOLDEN;
    for (int64_t i = 0; i < count; ++i) {
      total += (uint32_t(place ^ place >> 32) | 1ull) * p[i];
      place += 2 * GOLDEN;
    }
  }
  return total;
}

// Calls a function with the index of each element that is marked.
template <class F>
static inline void each(const uint8_t *marks, int64_t bytes, F found) {
  for (int64_t at = 0; at < bytes; at += 8) {
    uint64_t word;
    memcpy(&word, marks + at, 8);
    for (; word; word &= word - 1) found(8 * at + __builtin_ctzll(word));
  }
}

static void count(const uint8_t *marks, int64_t bytes, int64_t *out) {
  int64_t last = -1;
  uint64_t marked = 0, by2 = 0, by4 = 0, by8 = 0, by16 = 0;
  each(marks, bytes, [&](int64_t i) {
    uint64_t gap = i - last - 1;
    last = i;
    ++marked;
    by2 += gap / 3;
    by4 += gap / 15;
    by8 += gap / 255;
    by16 += gap / 65535;
  });
  out[0] = marked;
  out[1] = last + 1;
  out[2] = marked + by2;
  out[3] = marked + by4;
  out[4] = marked + by8;
  out[5] = marked + by16;
}

template <class T>
static void gather(const uint8_t *marks, int64_t bytes, const T *x, T *codes) {
  each(marks, bytes, [&](int64_t i) { *codes++ = x[i]; });
}

template <int WIDTH>
static void write(const uint8_t *marks, int64_t bytes, uint8_t *gaps) {
  constexpr uint64_t TOP = (1ull << WIDTH) - 1;
  uint64_t held = 0;
  int filled = 0;
  int64_t last = -1;
  auto put = [&](uint64_t number) {
    held |= number << filled;
    filled += WIDTH;
    if (filled < 64) return;
    memcpy(gaps, &held, 8);
    gaps += 8;
    held = filled = 0;
  };
  each(marks, bytes, [&](int64_t i) {
    uint64_t gap = i - last - 1, passed = gap / TOP * WIDTH;
    last = i;
    if (filled + passed + WIDTH < 64) {  // all its numbers at once, without a choice for each
      held |= ((1ull << passed) - 1 | gap % TOP << passed) << filled;
      filled += passed + WIDTH;
      return;
    }
    for (; gap >= TOP; gap -= TOP) put(TOP);
    put(gap);
  });
  if (filled) held |= ~0ull << filled;
  memcpy(gaps, &held, (filled + 7) / 8);
}
template <>
void write<1>(const uint8_t *marks, int64_t bytes, uint8_t *gaps) {
  int64_t last = -1;
  for (int64_t at = bytes; at-- && last < 0;)
    if (marks[at]) last = at;
  for (int64_t at = 0; at <= last; ++at) gaps[at] = ~marks[at];
}

// Returns how many indices there are, and writes them, and one that is none after the last, where
// there is a place for them.
template <int WIDTH, bool IS_WRITTEN>
static int64_t read(const uint8_t *gaps, int64_t bytes, int64_t *indices) {
  constexpr uint64_t TOP = (1ull << WIDTH) - 1;
  constexpr int STEP = WIDTH < 8 ? 1 : WIDTH / 8;
  int64_t found = 0, at = 0;
  for (int64_t i = 0; i + STEP <= bytes; i += STEP) {
    uint64_t held = 0;
    memcpy(&held, gaps + i, STEP);
    for (int filled = 0; filled < 8 * STEP; filled += WIDTH) {
      uint64_t number = held >> filled & TOP;
      at += number;
      if (IS_WRITTEN) indices[found] = at;
      found += number != TOP;
      at += number != TOP;
    }
  }
  return found;
}
template <int WIDTH>
static int64_t read(const uint8_t *gaps, int64_t bytes, int64_t *indices) {
  if (!indices) return read<WIDTH, false>(gaps, bytes, indices);
  return read<WIDTH, true>(gaps, bytes, indices);
}

// Marks elements that differ, eight at a time: a product gathers the lowest bits of eight bytes.
template <class T>
static void compare(const T *x, const T *y, int64_t n, uint8_t *marks) {
  for (int64_t start = 0; start < n; start += 64) {
    uint8_t differ[64] = {};
    int64_t count = n - start < 64 ? n - start : 64;
    if (count == 64)
      for (int i = 0; i < 64; ++i) differ[i] = x[start + i] != y[start + i];
    else
      for (int i = 0; i < count; ++i) differ[i] = x[start + i] != y[start + i];
    for (int i = 0; i < 64; i += 8) {
      uint64_t eight;
      memcpy(&eight, differ + i, 8);
      marks[(start + i) / 8] |= eight * 0x0102040810204080ull >> 56;
    }
  }
}

template <class F>
static void for_size(int64_t size, F run) {
  if (size == 1) run(uint8_t{});
  else if (size == 2) run(uint16_t{});
  else if (size == 4) run(uint32_t{});
  else run(uint64_t{});
}

extern "C" void launch(const int64_t *words, const double *, int64_t kind, int64_t threads) {
  const uint8_t *bytes = (const uint8_t *)words[0];
  int64_t size = words[1], *out = (int64_t *)words[2];
  if (kind == 0) {
    for_size(words[3], [&](auto code) {
      using T = decltype(code);
      *out = digest((const T *)bytes, size, threads);
    });
  } else if (kind == 1) {
    count(bytes, size, out);
  } else if (kind == 2) {
    uint8_t *gaps = (uint8_t *)words[2];
    if (words[6] == 1) write<1>(bytes, size, gaps);
    else if (words[6] == 2) write<2>(bytes, size, gaps);
    else if (words[6] == 4) write<4>(bytes, size, gaps);
    else if (words[6] == 8) write<8>(bytes, size, gaps);
    else write<16>(bytes, size, gaps);
    for_size(words[3], [&](auto code) {
      using T = decltype(code);
      gather(bytes, size, (const T *)words[4], (T *)words[5]);
    });
  } else if (kind == 3) {
    for_size(words[3], [&](auto code) {
      using T = decltype(code);
      compare((const T *)bytes, (const T *)words[4], size, (uint8_t *)words[2]);
    });
  } else {
    int64_t *indices = (int64_t *)words[4];
    if (words[3] == 1) *out = read<1>(bytes, size, indices);
    else if (words[3] == 2) *out = read<2>(bytes, size, indices);
    else if (words[3] == 4) *out = read<4>(bytes, size, indices);
    else if (words[3] == 8) *out = read<8>(bytes, size, indices);
    else *out = read<16>(bytes, size, indices);
  }
}
"""
)

_DIGEST, _COUNT, _WRITE, _COMPARE, _READ = range(5)


def digest_of(x: Tensor) -> int:
    """Return the digest of a flat tensor: the sum of key i times code i, modulo 2^64.

    Keys are odd numbers of 32 bits, without a pattern between neighbours: codes that change by
    small amounts in several places, as weights do, would otherwise often leave the sum unchanged.
    Digests of parts, and of changes, add up to the digest of the whole, in any order. The hash is
    by Carter and Wegman (Universal classes of hash functions, 1979), with public keys.
    """
    launch = _launch_for(x)
    return _digest(x) if launch is None else _compiled_digest(launch, x)


def digest_of_change(indices: Tensor, old: Tensor, new: Tensor) -> int:
    """Return the difference of digests that a change of elements makes.

    Shapes: (n,), and elements before and after of shape (n,).
    """
    change = _unsigned(new) - _unsigned(old)
    return int((change * _keys(indices)).sum()) % 2**64


def _keys(indices: Tensor) -> Tensor:
    """Return the keys of indices."""
    places = (2 * indices + 1) * (_GOLDEN - 2**64)  # int64 wraps as unsigned numbers do
    return (places ^ places >> 32) & (2**32 - 1) | 1


def _digest(x: Tensor) -> int:
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(x), _PART):
        codes = _unsigned(x[start : start + _PART])
        total += (codes * _keys(torch.arange(start, start + len(codes), device=x.device))).sum()
    return int(total) % 2**64


def _unsigned(x: Tensor) -> Tensor:
    """Return the bits of elements as unsigned integers in int64, where 64-bit patterns wrap."""
    bits, pattern = 8 * x.element_size(), x.view(PATTERNS[x.element_size()])
    return pattern.to(torch.int64) if bits == 64 else pattern.to(torch.int64) & (2**bits - 1)


def bits_for(x: Tensor) -> Tensor:
    """Return cleared marks of a tensor, a bit for each element; i % 8 of byte i // 8."""
    size = -(-x.numel() // _ALIGNED) * _ALIGNED // 8
    return torch.zeros(size, dtype=torch.uint8, device=x.device)


def changed_elements(x: Tensor, y: Tensor) -> Tensor:
    """Return a flat mask of the elements that differ in their bits, of tensors of one dtype."""
    pattern = PATTERNS[x.element_size()]
    return (x.view(pattern) != y.view(pattern)).reshape(-1)


def packed_bits(changed: Tensor) -> Tensor:
    """Return a mask as bits, the first element in the lowest bit of the first byte.

    Shapes: (n,) to (ceil(n / 8),).
    """
    whole = torch.nn.functional.pad(changed.to(torch.uint8), (0, -len(changed) % 8))
    places = torch.arange(8, dtype=torch.uint8, device=changed.device)
    return (whole.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def unpacked_bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes, the lowest of each byte first.

    Shapes: (n,) to (8 n,).
    """
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).flatten()


def coded_changes(bits: Tensor, x: Tensor) -> tuple[int, Tensor, Tensor] | None:
    """Return the marked elements of a flat tensor as gaps between them and codes.

    The largest integer of a width, t, skips t elements. A smaller one skips as many, and the next
    element is marked. The lowest bits of a byte come first; unused bits are ones.

    Returns:
        The width in bits, the bytes of the gaps, and the codes; None if no element is marked.

    Shapes: bits of `bits_for(x)` and (n,) to (bytes,) and (marked,).
    """
    launch = _launch_for(x)
    return _changes(bits, x) if launch is None else _compiled_changes(launch, bits, x)


def _changes(bits: Tensor, x: Tensor) -> tuple[int, Tensor, Tensor] | None:
    indices = unpacked_bits(bits).nonzero().view(-1)
    if not len(indices):
        return None
    before = torch.cat([indices.new_full((1,), -1), indices[:-1]])
    gaps = indices - before - 1
    sizes = {w: int((gaps // (2**w - 1) + 1).sum()) for w in WIDTHS}
    width = _shortest(sizes)
    top = 2**width - 1
    ends = (gaps // top + 1).cumsum(0)
    numbers = torch.full((sizes[width],), top, dtype=torch.int32, device=indices.device)
    numbers[ends - 1] = (gaps % top).to(torch.int32)
    places = torch.arange(width, dtype=torch.int32, device=indices.device)
    coded = (numbers[:, None] >> places & 1).flatten()
    coded = torch.nn.functional.pad(coded, (0, -len(coded) % 8), value=1)
    return width, packed_bits(coded), x[indices]


def _shortest(numbers: dict[int, int]) -> int:
    """Return the width with the fewest bytes, given the count of integers for each width."""
    return min(WIDTHS, key=lambda w: -(-w * numbers[w] // 8))


def mark_changes(bits: Tensor, x: Tensor, old: Tensor) -> None:
    """Mark the elements of a flat tensor that differ in their bits from a contiguous older copy."""
    launch = _launch_for(x)
    if launch is None:
        packed = packed_bits(changed_elements(x, old))
        bits[: len(packed)] |= packed
    else:
        _run_compare(launch, bits, x, old)


def indices_of(coded: Tensor, width: int) -> Tensor:
    """Return the indices of elements from the gaps of `coded_changes`."""
    launch = _launch_for(coded)
    return _indices(coded, width) if launch is None else _compiled_indices(launch, coded, width)


def _indices(coded: Tensor, width: int) -> Tensor:
    bits = unpacked_bits(coded).to(torch.int64)
    bits = bits[: len(bits) // width * width].view(-1, width)
    numbers = (bits << torch.arange(width, device=coded.device)).sum(1)
    is_end = numbers < 2**width - 1
    return (numbers + is_end).cumsum(0)[is_end] - 1


# ------------------------------------------------------------------------------------- compiled


def _launch_for(x: Tensor) -> cpu.Launch | None:
    if x.device.type != "cpu" or not x.is_contiguous() or x.data_ptr() == 0:
        return None
    return COMPILED.get(len(x))


def _compiled_digest(launch: cpu.Launch, x: Tensor) -> int:
    threads = max(min(torch.get_num_threads(), len(x) // GRAIN), 1)
    found = array("q", (0,))
    place = found.buffer_info()[0]
    _run(launch, _DIGEST, x.data_ptr(), len(x), place, x.element_size(), threads=threads)
    return found[0] % 2**64


def _compiled_changes(
    launch: cpu.Launch, bits: Tensor, x: Tensor
) -> tuple[int, Tensor, Tensor] | None:
    found = array("q", (0,) * (1 + len(WIDTHS)))
    _run(launch, _COUNT, bits.data_ptr(), len(bits), found.buffer_info()[0])
    count, *sizes = found
    if not count:
        return None
    numbers = dict(zip(WIDTHS, sizes, strict=True))
    width = _shortest(numbers)
    gaps = bits.new_empty(-(-width * numbers[width] // 8))
    codes = x.new_empty(count)
    places = (x.element_size(), x.data_ptr(), codes.data_ptr(), width)
    _run(launch, _WRITE, bits.data_ptr(), len(bits), gaps.data_ptr(), *places)
    return width, gaps, codes


def _run_compare(launch: cpu.Launch, bits: Tensor, x: Tensor, old: Tensor) -> None:
    places = (x.element_size(), old.data_ptr())
    _run(launch, _COMPARE, x.data_ptr(), len(x), bits.data_ptr(), *places)


def _compiled_indices(launch: cpu.Launch, coded: Tensor, width: int) -> Tensor:
    found = array("q", (0,))
    place = found.buffer_info()[0]
    _run(launch, _READ, coded.data_ptr(), len(coded), place, width, 0)
    indices = coded.new_empty(found[0] + 1, dtype=torch.int64)
    _run(launch, _READ, coded.data_ptr(), len(coded), place, width, indices.data_ptr())
    return indices[:-1]


def _run(launch: cpu.Launch, kind: int, *words: int, threads: int = 1) -> None:
    held = array("q", words)
    launch(held.buffer_info()[0], 0, kind, threads)


def _is_right(launch: cpu.Launch) -> bool:
    """Return whether compiled code agrees with PyTorch, for no marks, some and all."""
    generator = torch.Generator().manual_seed(0)
    for size, dtype in PATTERNS.items():
        x = torch.randint(0, 256, (size * 3001,), generator=generator, device="cpu")
        x = x.to(torch.uint8).view(dtype)
        if _compiled_digest(launch, x) != _digest(x):
            return False
        for most in (0, 1, 20, 300, 700, 950, 1000):  # thousandths that are marked
            bits = bits_for(x)
            marked = torch.randint(0, 1000, (len(x),), generator=generator, device="cpu") < most
            _run_compare(launch, bits, x, torch.where(marked, x ^ 1, x))
            if not torch.equal(bits[: -(-len(x) // 8)], packed_bits(marked)):
                return False
            got, expected = _compiled_changes(launch, bits, x), _changes(bits, x)
            if got is None or expected is None:
                if got is not expected:
                    return False
                continue
            (width, gaps, codes), (own, *tensors) = got, expected
            if width != own or not all(map(torch.equal, (gaps, codes), tensors)):
                return False
            if not torch.equal(_compiled_indices(launch, gaps, width), _indices(gaps, width)):
                return False
    return True


COMPILED = OnDemand(lambda: SOURCE, _is_right)
"""The compiled code of this process."""
