"""Programs in C++: one loop over all elements of all tensors of a call.

bfloat16 and float16 numbers are computed with as float values that hold them exactly, and rounded
on the bit pattern. The compiler may neither contract nor reorder: see `compiler.FLAGS`.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from mcftensor.kernels.program import Instruction, Place, Program

# dtype: (type to compute with, type in memory)
_TYPES = {
    torch.bfloat16: ("float", "uint16_t"),
    torch.float16: ("float", "uint16_t"),
    torch.float32: ("float", "float"),
    torch.float64: ("double", "double"),
    torch.int16: ("int16_t", "int16_t"),
    torch.int32: ("int32_t", "int32_t"),
    torch.int64: ("int64_t", "int64_t"),
    torch.bool: ("bool", "bool"),
}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_UNSIGNED = {"int16_t": "uint16_t", "int32_t": "uint32_t", "int64_t": "uint64_t"}

PRELUDE = """\
using int16_t = __INT16_TYPE__;
using int32_t = __INT32_TYPE__;
using int64_t = __INT64_TYPE__;
using uint16_t = __UINT16_TYPE__;
using uint32_t = __UINT32_TYPE__;
using uint64_t = __UINT64_TYPE__;
#define INLINE static inline __attribute__((always_inline))

template <class To, class From>
INLINE To as(From x) {
  static_assert(sizeof(To) == sizeof(From), "a bit pattern in another type has the same size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

INLINE float bf16_value(uint16_t bits) { return as<float>(uint32_t(bits) << 16); }
INLINE uint16_t bf16_bits(float x) { return uint16_t(as<uint32_t>(x) >> 16); }
INLINE float to_bf16(float x) {
  uint32_t bits = as<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  return as<float>(rounded);  // of a NaN too, whose last bits `quiet` has cleared
}

INLINE float quiet(float x) { return x == x ? x : __builtin_nanf(""); }
INLINE double quiet(double x) { return x == x ? x : __builtin_nan(""); }

INLINE float fp16_value(uint16_t bits) {
  uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
  uint32_t normal = magnitude + (112u << 23);
  uint32_t special = normal + (112u << 23);
  uint32_t subnormal = as<uint32_t>(float(bits & 0x7fff) * 0x1p-24f);
  uint32_t value = magnitude >= (31u << 23) ? special : magnitude < (1u << 23) ? subnormal : normal;
  return as<float>(value | uint32_t(bits & 0x8000) << 16);
}
INLINE float to_fp16(float x) {
  uint32_t bits = as<uint32_t>(x);
  uint32_t magnitude = bits & 0x7fffffff;
  uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & 0xffffe000;
  uint32_t subnormal = as<uint32_t>((as<float>(magnitude) + 0.5f) - 0.5f);
  uint32_t value = magnitude < (113u << 23) ? subnormal : normal;
  value = value >= (143u << 23) ? 0x7f800000u : value;
  value = magnitude > 0x7f800000u ? 0x7fc00000u : value;
  return as<float>(value | (bits & 0x80000000));
}
INLINE uint16_t fp16_bits(float x) {
  uint32_t bits = as<uint32_t>(x);
  uint32_t magnitude = bits & 0x7fffffff;
  uint32_t normal = (magnitude - (112u << 23)) >> 13;
  uint32_t subnormal = uint32_t(int32_t(as<float>(magnitude) * 0x1p24f));
  uint32_t value = magnitude < (113u << 23) ? subnormal : normal;
  value = magnitude == 0x7f800000u ? 0x7c00u : magnitude > 0x7f800000u ? 0x7e00u : value;
  return uint16_t(value | (bits >> 16 & 0x8000));
}

INLINE bool sign(float x) { return as<uint32_t>(x) >> 31; }
INLINE bool sign(double x) { return as<uint64_t>(x) >> 63; }
INLINE float finite_or_zero(float x) {
  return (as<uint32_t>(x) & 0x7f800000u) == 0x7f800000u ? 0.0f : x;
}
INLINE double finite_or_zero(double x) {
  return (as<uint64_t>(x) & 0x7ff0000000000000u) == 0x7ff0000000000000u ? 0.0 : x;
}
INLINE float root(float x) { return __builtin_sqrtf(x); }
INLINE double root(double x) { return __builtin_sqrt(x); }
template <class T>
INLINE T greater(T x, T y) { return x != x ? x : y != y ? y : x > y ? x : y; }
template <class T>
INLINE T sign_of(T x) { return T((x > 0) - (x < 0)); }
template <class T, class Bits>
INLINE T next_after(T x, T towards) {
  Bits least = as<Bits>(towards) & (Bits(1) << (sizeof(Bits) * 8 - 1)) | 1;
  Bits bits = as<Bits>(x);
  T next = x == 0 ? as<T>(least) : as<T>((x < towards) == (x > 0) ? bits + 1 : bits - 1);
  return x != x || towards != towards ? x + towards : x == towards ? towards : next;
}
"""

_LOOP = """
static void run(const int64_t *row, const double *number, int64_t begin, int64_t end) {{
{names}
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {{
{body}
  }}
}}

extern "C" void launch(
    const int64_t *rows, const double *numbers, int64_t count, int64_t threads) {{
  constexpr int64_t words = {words}, scalars = {scalars};
  int64_t total = 0;
  for (int64_t r = 0; r < count; ++r) total += rows[r * words];
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t t = 0; t < threads; ++t) {{
    int64_t from = total * t / threads / 64 * 64;
    int64_t to = t + 1 == threads ? total : total * (t + 1) / threads / 64 * 64;
    for (int64_t r = 0, start = 0; r < count && start < to; ++r) {{
      const int64_t *row = rows + r * words;
      int64_t begin = from > start ? from - start : 0;
      int64_t end = to - start < row[0] ? to - start : row[0];
      if (begin < end) run(row, numbers + r * scalars, begin, end);
      start += row[0];
    }}
  }}
}}
"""


def source(program: Program) -> str:
    """The program as a translation unit with the function launch(rows, numbers, count, threads).

    A row describes one set of tensors by words of 64 bits: number of elements, addresses of
    vectors, addresses of outputs, integer scalars. `numbers` has as many rows, of other scalars.
    """
    signature = program.signature
    names, word = [], 1
    for kind, dtypes in (("in", signature.vectors), ("out", signature.outputs)):
        for i, dtype in enumerate(dtypes):
            memory = ("const " if kind == "in" else "") + _TYPES[dtype][1]
            names.append(f"  {memory} *{kind}{i} = ({memory} *)row[{word}];")
            word += 1
    scalars = 0
    for i, dtype in enumerate(signature.scalars):
        if dtype == torch.int64:
            names.append(f"  const int64_t scalar{i} = row[{word}];")
            word += 1
        else:
            names.append(f"  const double scalar{i} = quiet(number[{scalars}]);")
            scalars += 1
    lines = [_line(program, i, x) for i, x in enumerate(program.instructions)]
    for i, (place, dtype) in enumerate(zip(program.results, signature.outputs, strict=True)):
        value = f"v{place.index}"
        lines.append(
            f"out{i}[i] = {f'{_SHORT[dtype]}_bits({value})' if dtype.itemsize == 2 else value};"
        )
    body = "\n".join("    " + line for line in lines)
    loop = _LOOP.format(names="\n".join(names), body=body, words=word, scalars=scalars)
    return PRELUDE + loop


def _line(program: Program, number: int, x: Instruction) -> str:
    def dtype(operand: Any) -> torch.dtype:
        if isinstance(operand, Place):
            return program.instructions[operand.index].dtype
        return kind

    def text(operand: Any) -> str:
        return f"v{operand.index}" if isinstance(operand, Place) else _constant(operand, kind)

    places = [o for o in x.operands if isinstance(o, Place)]
    kind = x.dtype
    if x.name in ("eq", "ne", "lt", "le", "gt", "ge", "signbit"):
        kind = program.instructions[places[0].index].dtype
    type_ = _TYPES[x.dtype][0]
    return f"const {type_} v{number} = {_expression(x, [text(o) for o in x.operands], [dtype(o) for o in x.operands])};"


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip


def _expression(x: Instruction, operands: list[str], dtypes: list[torch.dtype]) -> str:
    type_ = _TYPES[x.dtype][0]
    if x.name == "vector":
        value = f"in{x.operands[0]}[i]"
        if x.dtype.itemsize == 2:
            return f"{_SHORT[x.dtype]}_value({value})"
        return f"quiet({value})" if x.dtype.is_floating_point else value
    if x.name == "scalar":
        return f"{type_}(scalar{x.operands[0]})"
    if x.name == "index":
        return "i"
    if x.name == "constant":
        return operands[0]
    if x.name == "where":
        return f"{operands[0]} ? {operands[1]} : {operands[2]}"
    if x.name == "to":
        if x.dtype in (torch.bfloat16, torch.float16) and dtypes[0] != x.dtype:
            return _rounded(f"float({operands[0]})", x.dtype)
        return f"{type_}({operands[0]})"
    if x.name == "bits":
        return _bits(operands[0], dtypes[0], x.dtype)
    if x.name == "signbit":
        return f"sign({operands[0]})"
    if x.name == "copysign":
        return f"__builtin_copysign{'' if type_ == 'double' else 'f'}({operands[0]}, {operands[1]})"
    if x.name == "abs":
        return f"__builtin_fabs{'' if type_ == 'double' else 'f'}({operands[0]})"
    if x.name == "not":
        return f"!{operands[0]}" if x.dtype == torch.bool else f"{type_}(~{operands[0]})"
    if x.name == "neg":
        return f"{type_}(-{operands[0]})"
    if x.name == "finite_or_zero":
        return f"finite_or_zero({operands[0]})"
    if x.name == "sqrt":
        return _rounded(f"root({operands[0]})", x.dtype)
    if x.name == "reciprocal":
        return _rounded(f"1 / {operands[0]}", x.dtype)
    if x.name == "maximum":
        return f"greater<{type_}>({operands[0]}, {operands[1]})"
    if x.name == "sign":
        return f"sign_of<{type_}>({operands[0]})"
    if x.name == "nextafter":
        return f"next_after<{type_}, {'uint64_t' if type_ == 'double' else 'uint32_t'}>({operands[0]}, {operands[1]})"
    if x.name == "rsub":
        return _rounded(f"{operands[1]} - {operands[0]}", x.dtype)
    if x.name in ("shift_left", "shift_right"):
        sign = "<<" if x.name == "shift_left" else ">>"
        return f"{type_}({operands[0]} {sign} {operands[1]})"
    infix = f"{operands[0]} {_INFIX[x.name]} {operands[1]}"
    if type_ in _UNSIGNED and x.name in ("add", "sub", "mul"):  # which wrap around
        unsigned = _UNSIGNED[type_]
        infix = f"{type_}({unsigned}({operands[0]}) {_INFIX[x.name]} {unsigned}({operands[1]}))"
    return _rounded(infix, x.dtype)


def _rounded(value: str, dtype: torch.dtype) -> str:
    return f"to_{_SHORT[dtype]}({value})" if dtype in (torch.bfloat16, torch.float16) else value


def _bits(value: str, source: torch.dtype, target: torch.dtype) -> str:
    if source.itemsize == 2 and source.is_floating_point:
        return f"int16_t({_SHORT[source]}_bits({value}))"
    if target.itemsize == 2 and target.is_floating_point:
        return f"{_SHORT[target]}_value(uint16_t({value}))"
    return f"as<{_TYPES[target][0]}>({value})"


def _constant(x: float | bool, dtype: torch.dtype) -> str:
    """A number in a dtype, as eager PyTorch would round it."""
    if dtype == torch.bool:
        return "true" if x else "false"
    if not dtype.is_floating_point:
        value = int(x)
        return (
            f"int64_t({value % 2**64}ull)"
            if dtype == torch.int64
            else f"{_TYPES[dtype][0]}({value})"
        )
    number = torch.tensor(x, dtype=torch.float64).to(dtype).item()
    if math.isfinite(number):
        return f"{float(number).hex()}{'' if dtype == torch.float64 else 'f'}"
    bits = struct.unpack("<Q", struct.pack("<d", number))[0]
    return f"{_TYPES[dtype][0]}(as<double>(uint64_t({bits}ull)))"
