"""Programs in Triton: one launch for all tensors of a call.

bfloat16 and float16 numbers are computed as float32 values. GPUs with an instruction that rounds to
bfloat16 use it; other GPUs, and Triton's interpreter, which truncates, round on the bit pattern.
Division and square roots are correctly rounded. The launch disables contraction of products and
sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.digit_body import BELOW, FIELD, KINDS, NOTHING
from mcftensor.kernels.printer import COMMON, Dialect, Printer, name_of
from mcftensor.kernels.program import COMPUTED, Program

# Elements per block of threads: `BLOCK` in Triton's code; `SHARING` is the size of scale blocks.
THREAD_BLOCK = 1024

# The largest number of threads of a block: with fewer than two elements a thread, loads are narrow.
MOST_THREADS = 512

# Numbers of instructions, those on float64 counted three times, beyond which eight, and then four,
# elements a thread do not fit into registers.
_HEAVY, _HEAVIEST = 500, 1200

_TYPES = {x: name_of(x) for x in COMPUTED.values()} | {torch.bool: "int1"}


def _constant(number: float, dtype: torch.dtype) -> str:
    spelled = number if math.isfinite(number) else f'float("{number}")'
    return f"tl.full((), {spelled}, tl.{_TYPES[COMPUTED[dtype]]})"


_DIALECT = Dialect(
    types=_TYPES,
    constant=_constant,
    assignment="{name} = {value}",
    operations=COMMON
    | {
        "vector": "(tl.load(in{0} + offsets) if WHOLE else "
        "tl.load(in{0} + offsets, mask=mask, other=0))",
        "packed": "unpacked(in{0}, offsets, mask)",
        "table": "{1}",
        "shared": "spread(in{0}, begin, length, BLOCK)",
        "block_max": "block_max({0}, BLOCK)",
        "scalar": "scalar{0}.to(tl.{type})",
        "index": "offsets",
        ("index", torch.int32): "offsets.to(tl.int32)",
        "to": "{0}.to(tl.{type})",
        "where": "tl.where({0}, {1}, {2})",
        "abs": "tl.abs({0})",
        "div": "quotient({0}, {1})",
        "sqrt": "root({0})",
        "fma": "tl.fma({0}, {1}, {2})",
        ("div", torch.float64): "{0} / {1}",
        ("sqrt", torch.float64): "tl.sqrt({0})",
        ("not", torch.bool): "{0} == 0",
    },
)

_PRELUDE = """\
import triton
import triton.language as tl


# Triton 3.5 flushes subnormal float32 numbers in `div_rn` and `sqrt_rn`. From float64 the results
# are rounded correctly too, since it has more than twice as many bits.
FLUSHES = tl.constexpr(triton.__version__.startswith("3.5."))


@triton.jit
def quotient(x, y):
    if FLUSHES:
        return (x.to(tl.float64) / y.to(tl.float64)).to(tl.float32)
    else:
        return tl.div_rn(x, y)


@triton.jit
def root(x):
    return tl.sqrt(x.to(tl.float64)).to(tl.float32) if FLUSHES else tl.sqrt_rn(x)


@triton.jit
def quiet(x):
    return tl.where(x == x, x, float("nan"))


@triton.jit
def stored(pointers, pattern, mask, WHOLE: tl.constexpr):
    pattern = tl.broadcast_to(pattern, mask.shape)
    if WHOLE:
        tl.store(pointers, pattern)
    else:
        tl.store(pointers, pattern, mask=mask)


@triton.jit
def short_value(bits):
    return bits.to(tl.uint32, bitcast=True).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_value(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def negative(x):
    if x.dtype.primitive_bitwidth == 64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def copysign(x, y):
    if x.dtype == tl.float64:
        bits = float64_bits(tl.abs(x)) | (float64_bits(y) >> 63 << 63)
    else:
        bits = float32_bits(tl.abs(x)) | (float32_bits(y) >> 31 << 31)
    return bits.to(x.dtype, bitcast=True)


@triton.jit
def greater(x, y):
    larger = tl.where(x > y, x, y)
    return tl.where(x != x, x, tl.where(y != y, y, larger))


@triton.jit
def lesser(x, y):
    return tl.where(x < y, x, y)


@triton.jit
def sign_of(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
"""

# By whether GPUs round to bfloat16: their NaN has all bits set, as has its bfloat16.
_BFLOAT16 = {
    True: """

@triton.jit
def bfloat16_bits(x):
    return (quiet(x).to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def to_bfloat16(x):
    return x.to(tl.bfloat16).to(tl.float32)
""",
    False: """

@triton.jit
def bfloat16_bits(x):
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def to_bfloat16(x):
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, nearest, 0x7FC00000).to(tl.float32, bitcast=True)
""",
}

# All other types.
_TYPE = """

@triton.jit
def {name}_value(bits):
    return {value}


@triton.jit
def {name}_bits(x):
    return {bits}


@triton.jit
def to_{name}(x):
    return x.to(tl.{own}).to(tl.{type})
"""

# Components that blocks share, for every element: read and written once per block, since on GPUs
# that count every address it is much of the work.
_SHARING = (
    f"""

SHARING = tl.constexpr({BLOCK_SIZE})
"""
    + """

@triton.jit
def larger(x, y):
    return tl.where(x > y, x, y)


@triton.jit
def largest(x, BLOCK: tl.constexpr):
    return tl.reduce(tl.reshape(x, (BLOCK // SHARING, SHARING)), 1, larger)


@triton.jit
def repeated(x, BLOCK: tl.constexpr):
    whole = tl.broadcast_to(tl.expand_dims(x, 1), (BLOCK // SHARING, SHARING))
    return tl.reshape(whole, (BLOCK,))


@triton.jit
def block_max(x, BLOCK: tl.constexpr):
    return repeated(largest(x, BLOCK), BLOCK)


@triton.jit
def spread(pointer, begin, length, BLOCK: tl.constexpr):
    blocks = begin // SHARING + tl.arange(0, BLOCK // SHARING)
    x = tl.load(pointer + blocks, mask=blocks * SHARING < length, other=0)
    return repeated(x, BLOCK)


@triton.jit
def unpacked(pointer, offsets, mask):
    byte = tl.load(pointer + offsets // 2, mask=mask, other=0)
    return (byte >> (offsets % 2 * 4).to(tl.uint8)) & 15


@triton.jit
def pack(pointer, pattern, begin, length, BLOCK: tl.constexpr):
    pairs = tl.reshape(pattern, (BLOCK // 2, 2)).to(tl.int32)
    places = begin // 2 + tl.arange(0, BLOCK // 2)
    byte = tl.sum(pairs << (tl.arange(0, 2) * 4)[None, :], 1)
    tl.store(pointer + places, byte.to(tl.uint8), mask=places * 2 < length)


@triton.jit
def stored_once(pointer, pattern, begin, length, BLOCK: tl.constexpr):
    blocks = begin // SHARING + tl.arange(0, BLOCK // SHARING)
    tl.store(pointer + blocks, largest(pattern, BLOCK), mask=blocks * SHARING < length)
"""
)

# Sums: each block adds its digits and counts to the accumulator of its tensors, by integer atomics,
# position by position of those that its terms have.
_ACCUMULATING = f"""

LAST = tl.constexpr(1 << 30)


@triton.jit
def next_place(place, here):
    return tl.min(tl.where(place > here, place, LAST), 0)


@triton.jit
def counted(out, positions, word, mask):
    words = tl.sum(tl.where(mask, word, 0), 0)
    for kind in tl.static_range({KINDS}):
        count = (words >> (kind * {FIELD})) & {2**FIELD - 1}
        tl.atomic_add(out + positions + kind, count, mask=count != 0, sem="relaxed")


@triton.jit
def added(out, positions, digits, place, here, which):
    total = tl.sum(tl.where(place == here, digits, 0), 0)
    position = here + (which - {BELOW})
    is_there = (total != 0) & (position >= 0) & (position < positions)
    tl.atomic_add(out + position, total, mask=is_there, sem="relaxed")
"""

_KERNEL = """

@triton.jit
def element(
    row, numbers, begin, length,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < length
{body}


@triton.jit
def kernel(rows, owners, numbers, STEP: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + block).to(tl.int64)
    row = rows + owner * {words}
    length = tl.load(row)
    begin = (block - tl.load(row + 1)) * BLOCK
    if begin + BLOCK <= length:
        element(row, numbers + owner * STEP, begin, length, BLOCK, ALIGNED, True)
    else:
        element(row, numbers + owner * STEP, begin, length, BLOCK, ALIGNED, False)


@triton.jit
def address(word, type_: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(word).to(tl.pointer_type(type_))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
"""


def warps(program: Program, lanes: int) -> int:
    """Return the number of warps of a block, for warps of `lanes` threads.

    A thread computes eight elements, which are 16 bytes of bfloat16. Long programs, which would
    spill registers, get two or four times as many threads.
    """
    count = len(program.instructions)
    doubles = sum(x.dtype == torch.float64 for x in program.instructions)
    if count > _HEAVIEST:
        return MOST_THREADS // lanes
    return (256 if count + 2 * doubles > _HEAVY else 128) // lanes


def source(program: Program, on_device: Sequence[bool], rounds: bool) -> str:
    """Return the program as a module with a kernel of rows, owners and numbers.

    A row describes one set of tensors by 64-bit words: number of elements, number of the first
    block, addresses of vectors and of outputs. `owners` has the row of each block. Scalars, of one
    row or of all, are words in `numbers`: addresses if `on_device` says so, else their bits.
    `rounds` says whether the device has an instruction that rounds to bfloat16.
    """
    signature = program.signature
    lines, word = [], 2
    written = signature.outputs[:1] if signature.accumulates else signature.outputs
    for kind, dtypes in (("in", signature.vectors), ("out", written)):
        for i, dtype in enumerate(dtypes):
            lines.append(f"{kind}{i} = address(row + {word}, {_memory(dtype)}, ALIGNED)")
            word += 1
    for i, (dtype, there) in enumerate(zip(signature.scalars, on_device, strict=True)):
        lines.append(f"scalar{i} = {_scalar(i, dtype, there)}")
    printer = Printer(program, _DIALECT)
    lines += printer.lines(varying=False) + printer.lines(varying=True)
    if signature.accumulates:
        lines += _accumulation([printer.pattern(place) for place in program.results])
    for i, place in enumerate(() if signature.accumulates else program.results):
        pattern = printer.pattern(place)
        if signature.shares(i):
            lines.append(f"stored_once(out{i}, {pattern}, begin, length, BLOCK)")
        elif len(signature.vectors) + i in signature.packed:
            lines.append(f"pack(out{i}, {pattern}, begin, length, BLOCK)")
        else:
            lines.append(f"stored(out{i} + offsets, {pattern}, mask, WHOLE)")
    body = "\n".join("    " + line for line in lines)
    types = [_BFLOAT16[rounds], *(_functions(x) for x in COMPUTED if x != torch.bfloat16)]
    sharing = [_SHARING] if signature.shared else []
    sharing += [_ACCUMULATING] if signature.accumulates else []
    return "".join([_PRELUDE, *types, *sharing, _KERNEL.format(body=body, words=word)])


def _accumulation(patterns: Sequence[str]) -> list[str]:
    """Return the lines that add the place, word and digits of terms to the accumulator `out0`."""
    place, word, *digits = [f"{x}.to(tl.int64, bitcast=True)" for x in patterns]
    return [
        "sums = out0.to(tl.pointer_type(tl.int64))",
        f"place = {place}",
        f"counted(sums, scalar1, {word}, mask)",
        *(f"digits{i} = {x}" for i, x in enumerate(digits)),
        f"here = next_place(place, {NOTHING})",
        "while here < LAST:",
        *(f"    added(sums, scalar1, digits{i}, place, here, {i})" for i in range(len(digits))),
        "    here = next_place(place, here)",
    ]


def _functions(dtype: torch.dtype) -> str:
    """Return the functions that convert between patterns and values of a type."""
    name, type_, memory = name_of(dtype), _TYPES[COMPUTED[dtype]], _memory(dtype)
    own = _TYPES.get(dtype, name)
    if dtype.is_floating_point:
        value = f"quiet(bits.to(tl.{own}, bitcast=True).to(tl.{type_}))"
        bits = f"x.to(tl.{own}).to({memory}, bitcast=True)"
        if dtype == torch.float16:
            bits = f"tl.where(x == x, {bits}, 0x7E00).to({memory})"
    else:
        value, bits = f"bits.to(tl.{own}).to(tl.{type_})", f"x.to({memory})"
    return _TYPE.format(name=name, own=own, type=type_, value=value, bits=bits)


def _memory(dtype: torch.dtype) -> str:
    return f"tl.uint{8 * dtype.itemsize}"


def _scalar(number: int, dtype: torch.dtype, on_device: bool) -> str:
    word = f"numbers + {number}"
    if on_device:
        return f"{name_of(dtype)}_value(tl.load(address({word}, {_memory(dtype)}, False)))"
    bits = f"tl.load({word})"
    return bits if dtype == torch.int64 else f"quiet({bits}.to(tl.float64, bitcast=True))"
