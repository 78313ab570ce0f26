"""Programs in C++: one loop over all elements of all tensors of a call.

Every value is a vector of lanes, of a type that compilers turn into the machine's own vectors, so
that nothing is left to automatic vectorization. bfloat16 and float16 numbers are computed with as
float32 values that hold them exactly, and rounded on the bit pattern; a truth value is an integer
of 32 or 64 bits, 0 or -1. Products and sums must not be contracted: see `compiler.FLAGS`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from mcftensor.kernels.program import Instruction, Place, Program, varying

# dtype: (type to compute with, type in memory)
_TYPES = {
    torch.bfloat16: ("F", "uint16_t"),
    torch.float16: ("F", "uint16_t"),
    torch.float32: ("F", "float"),
    torch.float64: ("D", "double"),
    torch.int16: ("I", "int16_t"),
    torch.int32: ("I", "int32_t"),
    torch.int64: ("L", "int64_t"),
}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_UNSIGNED = {"I": "U", "L": "UL"}
_BITS = {"F": "I", "D": "L", "I": "I", "L": "L"}

# Blocks of lanes computed together, line by line, since one alone mostly waits for its own results;
# and the longest program for which this is worth the time to compile.
_BLOCKS = 8
_LONGEST = 300

_PRELUDE = """\
using int16_t = __INT16_TYPE__;
using int32_t = __INT32_TYPE__;
using int64_t = __INT64_TYPE__;
using uint16_t = __UINT16_TYPE__;
using uint32_t = __UINT32_TYPE__;
using uint64_t = __UINT64_TYPE__;
#define INLINE static inline __attribute__((always_inline))
#define VECTOR(type) type __attribute__((vector_size(sizeof(type) * LANES)))

typedef VECTOR(uint16_t) H;
typedef VECTOR(float) F;
typedef VECTOR(double) D;
typedef VECTOR(int32_t) I;
typedef VECTOR(uint32_t) U;
typedef VECTOR(int64_t) L;
typedef VECTOR(uint64_t) UL;

template <class V, class T>
INLINE V all(T x) {
  V y;
  for (int k = 0; k < LANES; ++k) y[k] = x;
  return y;
}
template <class V>
INLINE V counted() {
  V y;
  for (int k = 0; k < LANES; ++k) y[k] = k;
  return y;
}
template <class To, class From>
INLINE To as(From x) {
  static_assert(sizeof(To) == sizeof(From), "a bit pattern in another type has the same size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
template <class To, class From>
INLINE To to(From x) { return __builtin_convertvector(x, To); }

template <class V, class T>
INLINE V load(const T *p, int n) {
  V x = {};
  __builtin_memcpy(&x, p, n * sizeof(T));
  return x;
}
template <class V, class T>
INLINE void store(T *p, V x, int n) { __builtin_memcpy(p, &x, n * sizeof(T)); }

INLINE F quiet(F x) { return x == x ? x : all<F>(__builtin_nanf("")); }
INLINE D quiet(D x) { return x == x ? x : all<D>(__builtin_nan("")); }

INLINE F bf16_value(U bits) { return as<F>(bits << 16); }
INLINE U bf16_bits(F x) { return as<U>(x) >> 16; }
INLINE F to_bf16(F x) {  // of a NaN too, whose last bits `quiet` has cleared
  U bits = as<U>(x);
  return as<F>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}

INLINE F fp16_value(U bits) {
  U magnitude = (bits & 0x7fff) << 13;
  U normal = magnitude + (112u << 23);
  U subnormal = as<U>(to<F>(bits & 0x7fff) * 0x1p-24f);
  U value = magnitude < (1u << 23) ? subnormal : normal;
  value = magnitude == (31u << 23) ? all<U>(0x7f800000u) : value;
  value = magnitude > (31u << 23) ? all<U>(0x7fc00000u) : value;  // quiet
  return as<F>(value | (bits & 0x8000) << 16);
}
INLINE F to_fp16(F x) {
  U bits = as<U>(x);
  U magnitude = bits & 0x7fffffff;
  U normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & 0xffffe000;
  U subnormal = as<U>((as<F>(magnitude) + 0.5f) - 0.5f);
  U value = magnitude < (113u << 23) ? subnormal : normal;
  value = value >= (143u << 23) ? all<U>(0x7f800000u) : value;
  value = magnitude > 0x7f800000u ? all<U>(0x7fc00000u) : value;
  return as<F>(value | (bits & 0x80000000));
}
INLINE U fp16_bits(F x) {
  U bits = as<U>(x);
  U magnitude = bits & 0x7fffffff;
  U normal = (magnitude - (112u << 23)) >> 13;
  U subnormal = as<U>(to<I>(as<F>(magnitude) * 0x1p24f));
  U value = magnitude < (113u << 23) ? subnormal : normal;
  value = magnitude == 0x7f800000u ? all<U>(0x7c00u) : value;
  value = magnitude > 0x7f800000u ? all<U>(0x7e00u) : value;
  return value | (bits >> 16 & 0x8000);
}

INLINE F magnitude(F x) { return as<F>(as<I>(x) & 0x7fffffff); }
INLINE D magnitude(D x) { return as<D>(as<L>(x) & 0x7fffffffffffffff); }
INLINE F finite_or_zero(F x) {
  return magnitude(x) < __builtin_inff() ? x : all<F>(0.0f);
}
INLINE D finite_or_zero(D x) {
  return magnitude(x) < __builtin_inf() ? x : all<D>(0.0);
}
INLINE F copysign(F x, F y) { return as<F>((as<U>(x) & 0x7fffffff) | (as<U>(y) & 0x80000000)); }
INLINE D copysign(D x, D y) {
  return as<D>((as<UL>(x) & 0x7fffffffffffffff) | (as<UL>(y) & 0x8000000000000000));
}
template <class V>
INLINE V greater(V x, V y) {
  V larger = x > y ? x : y;
  larger = y != y ? y : larger;
  return x != x ? x : larger;
}
INLINE F root(F x) {
  for (int k = 0; k < LANES; ++k) x[k] = __builtin_sqrtf(x[k]);
  return x;
}
INLINE D root(D x) {
  for (int k = 0; k < LANES; ++k) x[k] = __builtin_sqrt(x[k]);
  return x;
}
INLINE F fma(F x, F y, F z) {
  for (int k = 0; k < LANES; ++k) x[k] = __builtin_fmaf(x[k], y[k], z[k]);
  return x;
}
"""

_LOOP = """
static void run(
    const int64_t *word, const double *number, int64_t count, int64_t begin, int64_t end) {{
{names}
{before}
  auto block = [&](int64_t i, auto n) __attribute__((always_inline)) {{
{body}
  }};
  struct Whole {{ constexpr operator int() const {{ return LANES; }} }};
  constexpr Whole n;
  int64_t i = begin;
  for (; i + {blocks} * LANES <= end; i += {blocks} * LANES) {{
{interleaved}
  }}
  for (; i + LANES <= end; i += LANES) block(i, n);
  if (i < end) block(i, int(end - i));
}}

extern "C" void launch(
    const int64_t *words, const double *numbers, int64_t count, int64_t threads) {{
  int64_t total = 0;
  for (int64_t r = 0; r < count; ++r) total += words[r];
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t t = 0; t < threads; ++t) {{
    int64_t from = total * t / threads / 64 * 64;
    int64_t to = t + 1 == threads ? total : total * (t + 1) / threads / 64 * 64;
    for (int64_t r = 0, start = 0; r < count && start < to; ++r) {{
      int64_t begin = from > start ? from - start : 0;
      int64_t end = to - start < words[r] ? to - start : words[r];
      if (begin < end) run(words + r, numbers + r, count, begin, end);
      start += words[r];
    }}
  }}
}}
"""


def source(program: Program) -> str:
    """The program as a translation unit with the function launch(words, numbers, count, threads).

    `count` sets of tensors are described by columns of words of 64 bits: numbers of elements,
    addresses of vectors, addresses of outputs, integer scalars; `numbers` are columns of the other
    scalars.
    """
    signature = program.signature
    names, word, scalars = [], 1, 0
    for kind, dtypes in (("in", signature.vectors), ("out", signature.outputs)):
        for i, dtype in enumerate(dtypes):
            memory = ("const " if kind == "in" else "") + _TYPES[dtype][1]
            names.append(f"{memory} *{kind}{i} = ({memory} *)word[{word} * count];")
            word += 1
    for i, dtype in enumerate(signature.scalars):
        if dtype == torch.int64:
            names.append(f"const int64_t scalar{i} = word[{word} * count];")
            word += 1
        else:
            names.append(f"const double scalar{i} = number[{scalars} * count];")
            scalars += 1
    lines, varies = _Lines(program).lines(), varying(program.instructions)
    before = [line for line, inside in zip(lines, varies, strict=True) if not inside]
    body = list(itertools.compress(lines, varies))
    for i, (place, dtype) in enumerate(zip(program.results, signature.outputs, strict=True)):
        value = f"v{place.index}"
        if dtype in _SHORT:
            value = f"to<H>({_SHORT[dtype]}_bits({value}))"
        body.append(f"store(out{i} + i, {value}, n);")
    inside = itertools.compress(program.instructions, varies)
    blocks = _BLOCKS if len(program.instructions) <= _LONGEST else 1
    loop = _LOOP.format(
        names=_indented(names, 2),
        before=_indented(before, 2),
        body=_indented(body, 4),
        interleaved=_indented([_copied(x, k, varies) for x in body for k in range(blocks)], 4),
        blocks=blocks,
    )
    return (
        f"#define LANES {8 if any(x.dtype.itemsize == 8 for x in inside) else 16}\n{_PRELUDE}{loop}"
    )


def _copied(line: str, block: int, varies: Sequence[bool]) -> str:
    """A line of the body for one of the blocks that are computed together."""

    def renamed(name: re.Match[str]) -> str:
        return f"{name[0]}_{block}" if varies[int(name[1])] else name[0]

    return re.sub(r"\bi\b", f"(i + {block} * LANES)", re.sub(r"\bv(\d+)\b", renamed, line))


def _indented(lines: Sequence[str], places: int) -> str:
    return "\n".join(" " * places + line for line in lines)


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
_LOGIC = {"and": "&", "mul": "&", "or": "|", "xor": "^", "ne": "^", "eq": "=="}  # of truth values
_FUNCTIONS = {
    "abs": "magnitude",
    "copysign": "copysign",
    "finite_or_zero": "finite_or_zero",
    "fma": "fma",
    "maximum": "greater",
    "sqrt": "root",
}


class _Lines:
    """A line of C++ for each instruction."""

    def __init__(self, program: Program) -> None:
        self.instructions = program.instructions
        self.types: list[str] = []  # of vectors: F, D, I, L; truth values are I or L

    def lines(self) -> list[str]:
        lines = []
        for i, x in enumerate(self.instructions):
            type_, value = self._line(x)
            self.types.append(type_)
            lines.append(f"const {type_} v{i} = {value};")
        return lines

    def _line(self, x: Instruction) -> tuple[str, str]:
        places = [o for o in x.operands if isinstance(o, Place)]
        if x.dtype == torch.bool:
            return self._truth(x, places)
        type_ = _TYPES[x.dtype][0]
        return type_, self._value(x, type_, places)

    def _text(self, operand: Any, dtype: torch.dtype) -> str:
        return f"v{operand.index}" if isinstance(operand, Place) else _constant(operand, dtype)

    def _mask(self, place: Place, width: str) -> str:
        """A truth value as a vector of integers of a width."""
        own = self.types[place.index]
        return f"v{place.index}" if own == width else f"to<{width}>(v{place.index})"

    def _truth(self, x: Instruction, places: Sequence[Place]) -> tuple[str, str]:
        of = self.instructions[places[0].index].dtype
        if of == torch.bool:
            width = self.types[places[0].index]
            masks = [self._mask(place, width) for place in places]
            return width, f"~{masks[0]}" if x.name == "not" else f" {_LOGIC[x.name]} ".join(masks)
        width = _BITS[_TYPES[of][0]]
        operands = [self._text(o, of) for o in x.operands]
        if x.name == "signbit":
            return width, f"as<{width}>({operands[0]}) < 0"
        return width, f"{operands[0]} {_COMPARISONS[x.name]} {operands[1]}"

    def _value(self, x: Instruction, type_: str, places: Sequence[Place]) -> str:
        if x.name == "vector":
            return self._loaded(x.operands[0], x.dtype)
        if x.name == "scalar":
            value = f"all<{'L' if type_ == 'L' else 'D'}>(scalar{x.operands[0]})"
            return f"to<{type_}>(quiet({value}))" if x.dtype.is_floating_point else value
        if x.name == "index":
            return "counted<L>() + i"
        if x.name == "where":
            chosen = [self._text(o, x.dtype) for o in x.operands[1:]]
            return f"{self._mask(x.operands[0], _BITS[type_])} ? {chosen[0]} : {chosen[1]}"
        if x.name in _CONVERSIONS:
            of = self.instructions[places[0].index].dtype
            return _CONVERSIONS[x.name](f"v{places[0].index}", of, x.dtype)
        operands = [self._text(o, x.dtype) for o in x.operands]
        if x.name == "constant":
            return operands[0]
        if x.name in ("shift_left", "shift_right"):
            return f"{operands[0]} {'<<' if x.name == 'shift_left' else '>>'} {operands[1]}"
        if x.name in ("neg", "not"):
            return f"{'-' if x.name == 'neg' else '~'}{operands[0]}"
        if x.name == "sign":
            one, zero = _constant(1, x.dtype), _constant(0, x.dtype)
            (value,) = operands
            return f"({value} > 0 ? {one} : {zero}) - ({value} < 0 ? {one} : {zero})"
        if x.name in _FUNCTIONS:
            result = f"{_FUNCTIONS[x.name]}({', '.join(operands)})"
            return _rounded(result, x.dtype) if x.name == "sqrt" else result
        if x.name == "rsub":
            operands, name = operands[::-1], "sub"
        elif x.name == "reciprocal":
            operands, name = [_constant(1, x.dtype), operands[0]], "div"
        else:
            name = x.name
        if type_ in _UNSIGNED:  # which wrap around
            unsigned = _UNSIGNED[type_]
            first, second = (f"as<{unsigned}>({o})" for o in operands)
            return f"as<{type_}>({first} {_INFIX[name]} {second})"
        return _rounded(f"{operands[0]} {_INFIX[name]} {operands[1]}", x.dtype)

    def _loaded(self, number: int, dtype: torch.dtype) -> str:
        where = f"in{number} + i, n"
        if dtype in _SHORT:
            return f"{_SHORT[dtype]}_value(to<U>(load<H>({where})))"
        value = f"load<{_TYPES[dtype][0]}>({where})"
        return f"quiet({value})" if dtype.is_floating_point else value


def _rounded(value: str, dtype: torch.dtype) -> str:
    return f"to_{_SHORT[dtype]}({value})" if dtype in _SHORT else value


def _narrowed(value: str, source: torch.dtype, target: torch.dtype) -> str:
    types = _TYPES[source][0], _TYPES[target][0]
    return value if types[0] == types[1] else f"to<{types[1]}>({value})"


def _converted(value: str, source: torch.dtype, target: torch.dtype) -> str:
    return _rounded(_narrowed(value, source, target), target)


def _reinterpreted(value: str, source: torch.dtype, target: torch.dtype) -> str:
    if source in _SHORT:
        return f"as<I>({_SHORT[source]}_bits({value}) << 16) >> 16"
    if target in _SHORT:
        return f"{_SHORT[target]}_value(as<U>({value}) & 0xffff)"
    return f"as<{_TYPES[target][0]}>({value})"


_CONVERSIONS = {"to": _converted, "narrow": _narrowed, "bits": _reinterpreted}


def _constant(x: float, dtype: torch.dtype) -> str:
    """A number in a dtype, as eager PyTorch would round it."""
    type_ = _TYPES[dtype][0]
    if not dtype.is_floating_point:
        return f"all<{type_}>({int(x) % 2**64}ull)"
    number = torch.tensor(x, dtype=torch.float64).to(dtype).item()
    suffix = "" if type_ == "D" else "f"
    if math.isfinite(number):
        return f"all<{type_}>({float(number).hex()}{suffix})"
    special = f'nan{suffix}("")' if math.isnan(number) else f"inf{suffix}()"
    return f"all<{type_}>({'-' if number < 0 else ''}__builtin_{special})"
