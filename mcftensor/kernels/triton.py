"""Programs in Triton: one launch for all tensors of a call.

bfloat16 and float16 numbers are computed with as float32 values that hold them exactly, and rounded
on the bit pattern, since Triton's interpreter truncates where GPUs round. Division and square roots
are the correctly rounded ones; products and sums are not contracted, for which the launch asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mcftensor.kernels.program import Instruction, Place, Program, varying

# Elements that a block of threads works on.
BLOCK = 1024

MOST_WARPS = 16

# Instructions after which eight elements a thread do not fit into registers, those on float64
# counted three times; and those after which four do not.
_HEAVY, _HEAVIEST = 500, 1200

# dtype: (type to compute with, type in memory)
_TYPES = {
    torch.bfloat16: ("float32", "uint16"),
    torch.float16: ("float32", "uint16"),
    torch.float32: ("float32", "float32"),
    torch.float64: ("float64", "float64"),
    torch.int16: ("int32", "int16"),
    torch.int32: ("int32", "int32"),
    torch.int64: ("int64", "int64"),
    torch.bool: ("int1", "int1"),
}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}

_PRELUDE = """\
import triton
import triton.language as tl


@triton.jit
def quiet(x):
    return tl.where(x == x, x, float("nan"))


@triton.jit
def bf16_value(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def to_bf16(x):
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    # The NaN that GPUs compute has all bits set, and would be rounded to a zero.
    return tl.where(x == x, nearest, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def fp16_value(bits):
    bits = bits.to(tl.uint32)
    magnitude = (bits & 0x7FFF) << 13
    normal = magnitude + (112 << 23)
    subnormal = ((bits & 0x7FFF).to(tl.int32).to(tl.float32) * 2.0**-24).to(tl.uint32, bitcast=True)
    value = tl.where(magnitude < (1 << 23), subnormal, normal)
    value = tl.where(magnitude == (31 << 23), 0x7F800000, value)
    value = tl.where(magnitude > (31 << 23), 0x7FC00000, value)  # quiet
    return (value | ((bits & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def to_fp16(x):
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0xFFF + ((size >> 13) & 1)) & 0xFFFFE000
    subnormal = ((size.to(tl.float32, bitcast=True) + 0.5) - 0.5).to(tl.uint32, bitcast=True)
    value = tl.where(size < (113 << 23), subnormal, normal)
    value = tl.where(value >= (143 << 23), 0x7F800000, value)
    value = tl.where(size > 0x7F800000, 0x7FC00000, value)
    return (value | (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def fp16_bits(x):
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size - (112 << 23)) >> 13
    small = tl.where(size < (113 << 23), size, 0).to(tl.float32, bitcast=True)
    value = tl.where(size < (113 << 23), (small * 2.0**24).to(tl.int32).to(tl.uint32), normal)
    value = tl.where(size == 0x7F800000, 0x7C00, value)
    value = tl.where(size > 0x7F800000, 0x7E00, value)
    return (value | ((bits >> 16) & 0x8000)).to(tl.uint16)


@triton.jit
def finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def copysign(x, y, bits: tl.constexpr, last: tl.constexpr):
    magnitude = tl.abs(x).to(bits, bitcast=True)
    sign = (y.to(bits, bitcast=True) >> last) << last
    return (magnitude | sign).to(x.dtype, bitcast=True)


@triton.jit
def greater(x, y):
    larger = tl.where(x > y, x, y)
    return tl.where(x != x, x, tl.where(y != y, y, larger))


@triton.jit
def sign_of(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
"""

_KERNEL = """

@triton.jit
def element(row, begin, length, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < length
{body}


@triton.jit
def kernel(rows, owners, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    row = rows + tl.load(owners + block).to(tl.int64) * {words}
    length = tl.load(row)
    begin = (block - tl.load(row + 1)) * BLOCK
    if begin + BLOCK <= length:
        element(row, begin, length, BLOCK, ALIGNED, True)
    else:
        element(row, begin, length, BLOCK, ALIGNED, False)


@triton.jit
def address(row, word: tl.constexpr, type_: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + word).to(tl.pointer_type(type_))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
"""


def warps(program: Program) -> int:
    """How many warps a block has: 4, of eight elements a thread, which are 16 bytes of bfloat16; or
    more, of fewer elements, for programs that would else spill registers, by what is known of
    their lengths."""
    count = len(program.instructions)
    doubles = sum(x.dtype == torch.float64 for x in program.instructions)
    if count > _HEAVIEST:
        return MOST_WARPS
    return 8 if count + 2 * doubles > _HEAVY else 4


def source(program: Program, on_device: Sequence[bool]) -> str:
    """The program as a module with a kernel of rows and of the row that owns each block.

    A row describes one set of tensors by words of 64 bits: number of elements, number of the first
    block, addresses of vectors and of outputs, and scalars: `on_device` says of which the address
    stands there, in place of their bits.
    """
    signature = program.signature
    lines, word = [], 2
    for kind, dtypes in (("in", signature.vectors), ("out", signature.outputs)):
        for i, dtype in enumerate(dtypes):
            lines.append(f"{kind}{i} = address(row, {word}, tl.{_TYPES[dtype][1]}, ALIGNED)")
            word += 1
    for i, (dtype, there) in enumerate(zip(signature.scalars, on_device, strict=True)):
        lines.append(f"scalar{i} = {_scalar(word, dtype, there)}")
        word += 1
    varies = varying(program.instructions)
    computed = [f"v{i} = {_line(program, x)}" for i, x in enumerate(program.instructions)]
    for inside in (False, True):
        lines += [line for line, flag in zip(computed, varies, strict=True) if flag == inside]
    for i, (place, dtype) in enumerate(zip(program.results, signature.outputs, strict=True)):
        value = f"v{place.index}"
        if not varies[place.index]:
            value = f"tl.full((BLOCK,), 0, {value}.dtype) + {value}"
        if dtype in _SHORT:
            value = f"{_SHORT[dtype]}_bits({value})"
        lines += [
            "if WHOLE:",
            f"    tl.store(out{i} + offsets, {value})",
            "else:",
            f"    tl.store(out{i} + offsets, {value}, mask=mask)",
        ]
    body = "\n".join("    " + line for line in lines)
    return _PRELUDE + _KERNEL.format(body=body, words=word)


def _scalar(word: int, dtype: torch.dtype, on_device: bool) -> str:
    if on_device:
        memory = _TYPES[dtype][1]
        value = f"tl.load(address(row, {word}, tl.{memory}, False))"
        if dtype in _SHORT:
            return f"{_SHORT[dtype]}_value({value})"
        return f"quiet({value})" if dtype.is_floating_point else value
    bits = f"tl.load(row + {word})"
    return bits if dtype == torch.int64 else f"quiet({bits}.to(tl.float64, bitcast=True))"


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "shift_left": "<<", "shift_right": ">>",
}  # fmt: skip
_FUNCTIONS = {
    "abs": "tl.abs",
    "finite_or_zero": "finite_or_zero",
    "fma": "tl.fma",
    "maximum": "greater",
    "sign": "sign_of",
}


def _line(program: Program, x: Instruction) -> str:
    places = [o for o in x.operands if isinstance(o, Place)]
    type_ = _TYPES[x.dtype][0]
    of = program.instructions[places[0].index].dtype if places else x.dtype
    if x.name == "vector":
        return _loaded(x.operands[0], x.dtype)
    if x.name == "scalar":
        value = f"scalar{x.operands[0]}"
        return value if x.dtype == torch.int64 else f"{value}.to(tl.{type_})"
    if x.name == "index":
        return "offsets"
    own = of if x.dtype == torch.bool else x.dtype
    operands = [f"v{o.index}" if isinstance(o, Place) else _constant(o, own) for o in x.operands]
    first, second = operands[0], operands[-1]
    if x.name == "constant":
        return first
    if x.name == "where":
        return f"tl.where({', '.join(operands)})"
    if x.name in _CONVERSIONS:
        return _CONVERSIONS[x.name](first, of, x.dtype)
    if x.name == "signbit":
        return f"{first}.to(tl.{_integer(of)}, bitcast=True) < 0"
    if x.name == "copysign":
        return f"copysign({first}, {second}, tl.u{_integer(x.dtype)}, {8 * _size(x.dtype) - 1})"
    if x.name == "not":
        return f"{first} == 0" if x.dtype == torch.bool else f"~{first}"
    if x.name == "neg":
        return f"-{first}"
    if x.name in _FUNCTIONS:
        return f"{_FUNCTIONS[x.name]}({', '.join(operands)})"
    if x.name == "sqrt":
        root = "tl.sqrt" if x.dtype == torch.float64 else "tl.sqrt_rn"
        return _rounded(f"{root}({first})", x.dtype)
    if x.name == "reciprocal":
        first, second, name = _constant(1, x.dtype), first, "div"
    elif x.name == "rsub":
        first, second, name = second, first, "sub"
    else:
        name = "and" if (x.name, x.dtype) == ("mul", torch.bool) else x.name
    if name == "div":
        quotient = (
            f"{first} / {second}" if x.dtype == torch.float64 else f"tl.div_rn({first}, {second})"
        )
        return _rounded(quotient, x.dtype)
    return _rounded(f"{first} {_INFIX[name]} {second}", x.dtype)


def _loaded(number: int, dtype: torch.dtype) -> str:
    place = f"in{number} + offsets"
    value = f"(tl.load({place}) if WHOLE else tl.load({place}, mask=mask, other=0))"
    if dtype in _SHORT:
        return f"{_SHORT[dtype]}_value({value})"
    return f"quiet({value})" if dtype.is_floating_point else f"{value}.to(tl.{_TYPES[dtype][0]})"


def _rounded(value: str, dtype: torch.dtype) -> str:
    return f"to_{_SHORT[dtype]}({value})" if dtype in _SHORT else value


def _narrowed(value: str, source: torch.dtype, target: torch.dtype) -> str:
    types = _TYPES[source][0], _TYPES[target][0]
    return value if types[0] == types[1] else f"{value}.to(tl.{types[1]})"


def _converted(value: str, source: torch.dtype, target: torch.dtype) -> str:
    value = _narrowed(value, source, target)
    return value if source == target else _rounded(value, target)


def _reinterpreted(value: str, source: torch.dtype, target: torch.dtype) -> str:
    if source in _SHORT:
        return f"{_SHORT[source]}_bits({value}).to(tl.int16, bitcast=True).to(tl.int32)"
    if target in _SHORT:
        return f"{_SHORT[target]}_value({value}.to(tl.int16).to(tl.uint16, bitcast=True))"
    return f"{value}.to(tl.{_TYPES[target][0]}, bitcast=True)"


_CONVERSIONS = {"to": _converted, "narrow": _narrowed, "bits": _reinterpreted}


def _size(dtype: torch.dtype) -> int:
    """Bytes of the type to compute with."""
    return max(dtype.itemsize, 4)


def _integer(dtype: torch.dtype) -> str:
    return f"int{8 * _size(dtype)}"


def _constant(x: float, dtype: torch.dtype) -> str:
    """A number in a dtype, as eager PyTorch would round it."""
    type_ = _TYPES[dtype][0]
    if not dtype.is_floating_point:
        return f"tl.full((), {int(x)}, tl.{type_})"
    number = torch.tensor(x, dtype=torch.float64).to(dtype).item()
    text = repr(number) if math.isfinite(number) else f'float("{number}")'
    return f"tl.full((), {text}, tl.{type_})"
