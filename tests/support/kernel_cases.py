"""The same elementwise work done by eager PyTorch, by C++ and by Triton's interpreter."""

import ctypes
import ctypes.util
import functools
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mcftensor as mcf
from mcftensor import kernels
from mcftensor.formats import PLAIN
from mcftensor.kernels import Body, Columns, cpu, cuda, eager, execute
from mcftensor.kernels.program import Program
from mcftensor.passes import expansion
from mcftensor.passes.expressions import Expression, Operand, carry_out, empty
from mcftensor.passes.format_conversion import decode_columns, encode_columns
from mcftensor.passes.term_traces import kernel
from mcftensor.passes.traces import EMPTY, NUMBERS, Operation, Trace, Variable

NAMES = [
    *("bf16x2", "bf16x3", "fp16x2", "fp32x2", "fp32x3", "fp64x2", "bf16x2sr", "fp32x2sr"),
    *("bf16x2br", "fp32x2br"),
]
FORMATS = [mcf.Format.from_name(name) for name in NAMES]
OPERATIONS = {
    "add": 2, "mul": 2, "div": 2, "sqrt": 1, "fma": 3, "addcmul": 4, "addcdiv": 4, "lerp": 3
}  # fmt: skip
# Programs long enough to be compiled by slow tests only.
LONG = [
    (name, operation)
    for name in ("fp32x3", "fp64x2", "fp32x2sr")
    for operation in ("addcmul", "addcdiv", "lerp")
] + [(name, operation) for name in ("bf16x2br", "fp32x2br") for operation in (*OPERATIONS,)[1:]]
CASES = [
    pytest.param(name, operation, marks=[pytest.mark.slow] * ((name, operation) in LONG))
    for name in NAMES
    for operation in OPERATIONS
]
PATTERNS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0]


def _reduced(tl: Any, combine: Any, x: Any, axis: int) -> Any:
    return tl.reduce(x, axis, combine)


@contextmanager
def way(name: str, *, is_tried: bool = False) -> Iterator[list[Program]]:
    """Within it functions run eagerly, in C++ or in Triton, and no part of them in another way;
    "rounding" is Triton for GPUs that round to bfloat16 by themselves. Triton's kernels are used
    untried, unless they are to be.

    Yields a list that Triton's programs are put into.
    """
    programs: list[Program] = []
    after = 1 if name == "cpp" else 1 << 60
    with pytest.MonkeyPatch.context() as patch:
        fresh = functools.lru_cache(maxsize=1024)(execute.kernel_of.__wrapped__)
        patch.setattr(execute, "kernel_of", fresh)
        patch.setattr(cpu, "LOOK_AFTER", after)
        patch.setattr(cpu, "BUILD_AFTER", after)
        if name != "eager":
            patch.setattr(eager, "run", _must_not_run)
        if name in ("triton", "rounding"):
            from triton.runtime import interpreter  # noqa: PLC0415

            launch = cuda.launch

            def spy(program: Program, *args: Any) -> bool:
                programs.append(program)
                return launch(program, *args)

            patch.setattr(execute, "TRITON_DEVICES", ["cpu"])
            patch.setattr(cuda, "launch", spy)
            if not is_tried:
                patch.setattr(execute.Kernel, "_is_right", lambda *args: True)
            patch.setenv("TRITON_INTERPRET", "1")
            # Triton's own functions are not interpreted where it was imported before.
            tl = import_module("triton.language")
            if not hasattr(interpreter, "_LangPatchScope"):  # Triton 3.5 leaves its changes
                base = tl.core.tensor_descriptor_base
                for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype, base):
                    for name_, found in list(vars(owner).items()):
                        if callable(found):
                            patch.setattr(owner, name_, found)
                for name_ in ("__bool__", "__index__"):
                    patch.setattr(tl.tensor, name_, None, raising=False)
            for name_, combine in (("sum", "_sum_combine"), ("min", "_elementwise_min")):
                patch.setattr(
                    tl, name_, functools.partial(_reduced, tl, getattr(tl.standard, combine))
                )
            if not hasattr(interpreter._interpreter, "fma_fp32"):  # Triton 3.6
                patch.setattr(interpreter.InterpreterBuilder, "create_fma", _fma)
            if name == "rounding":
                patch.setattr(cuda, "_rounds", lambda device: True)
                builder = interpreter.InterpreterBuilder
                patch.setattr(builder, "cast_impl", _as_on_gpus(builder.cast_impl))
            cuda._kernel.cache_clear()
        yield programs
        cuda._kernel.cache_clear()


def _as_on_gpus(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Conversions of Triton's interpreter as GPUs have them: to bfloat16 and float16 they round to
    nearest, ties to even, and every NaN becomes the one whose bits are all set.

    PTX ISA, "cvt": for .f16 and .bf16 it is canonical, 0x7FFF.
    """

    def convert(self: Any, source: Any, target: Any) -> Any:
        kinds = [str(x.scalar) for x in (source.dtype, target)]
        x = np.array(source.data)
        if kinds == ["fp32", "bf16"]:
            bits = x.view(np.uint32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            x = np.where(np.isnan(x), 0x7FFF, nearest).astype(np.uint16)
        elif kinds == ["bf16", "fp32"]:
            x = (x.astype(np.uint32) << 16).view(np.float32)
        elif kinds == ["fp32", "fp16"]:
            bits = x.astype(np.float16).view(np.uint16)
            x = np.where(np.isnan(x), 0x7FFF, bits).astype(np.uint16).view(np.float16)
        else:
            return cast(self, source, target)
        return type(source)(x, target.scalar)

    return convert


def _fma(builder: object, *operands: Any) -> Any:
    """fma of Triton's interpreter, which in old releases rounds twice."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    number, function = {
        np.dtype(np.float32): (ctypes.c_float, library.fmaf),
        np.dtype(np.float64): (ctypes.c_double, library.fma),
    }[operands[0].data.dtype]
    function.argtypes, function.restype = [number] * 3, number
    data = np.vectorize(function, otypes=[operands[0].data.dtype])(*(x.data for x in operands))
    return type(operands[0])(data, operands[0].dtype.scalar)


def _must_not_run(*args: object) -> None:
    raise AssertionError("fell back to eager PyTorch")


def same(name: str, function: Callable[..., Sequence[Tensor]], *args: object) -> list[Tensor]:
    """Assert that a function gives the bits of eager PyTorch another way, and return its terms.

    It must leave its operands as they are.
    """
    with way("eager"):
        torch.manual_seed(1)
        expected = flat(function(*args))
    with way(name):
        torch.manual_seed(1)
        got = flat(function(*args))
    assert_same_bits(got, expected)
    return got


def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for x in tensors for t in getattr(x, "components", (x,))]


def assert_same_bits(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """One NaN is as good as another."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        alike = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
        assert alike.all(), (a[~alike][:4].tolist(), b[~alike][:4].tolist())


def patterns(dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers of random bits: subnormals, huge ones, and NaNs with all payloads among them."""
    integer = PATTERNS[dtype.itemsize]
    ends = torch.iinfo(integer)
    bits = torch.randint(ends.min, ends.max, shape, dtype=integer)
    exponents = torch.randint(8, shape)
    # One in eight has an exponent field of ones, one in eight of zeros.
    infinity = torch.tensor(float("inf"), dtype=dtype).view(integer)
    bits = torch.where(exponents == 0, bits | infinity, bits)
    return torch.where(exponents == 1, bits & ~infinity, bits).view(dtype)


def all_stored(name: str) -> list[Tensor]:
    """Components in a format: of the leading one all patterns, with any tail."""
    stored = [torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)]
    for component in mcf.Format.from_name(name).components[1:]:
        if component.dtype.is_floating_point:
            stored.append(patterns(component.dtype, 2**16))
        else:
            ends = torch.iinfo(component.dtype)
            stored.append(torch.randint(ends.min, ends.max + 1, (2**16,), dtype=component.dtype))
    return stored


def operand(format: mcf.Format, *shape: int) -> tuple[Tensor, ...]:
    """Terms of a format: normalized ones of all sizes, special values, any bits in any term."""
    finfo = torch.finfo(format.base)
    span = 20 if format.base == torch.float16 else 60
    x = torch.randn(shape, dtype=torch.float64)
    x = x * torch.exp2(torch.randint(-span, span, shape).double()).clamp(max=finfo.max / 8)
    edges = torch.tensor([*SPECIAL, finfo.max, finfo.tiny, finfo.tiny / 4, finfo.max / 2])
    chosen = edges.double()[torch.randint(len(edges), shape)]
    kind = torch.randint(8, shape)
    terms = expansion.expand(torch.where(kind == 0, chosen, x), format.nearest)
    return tuple(torch.where(kind == 1, patterns(t.dtype, *shape), t) for t in terms)


def expression(operation: str, format: mcf.Format) -> Expression:
    return Expression(operation, format)


def traced(format, length):
    """A trace such as a tape makes, of Adam, and what its variables begin with."""
    trace = EMPTY
    for variable in (
        *[Variable(format, "tensor")] * 3,
        *[NUMBERS] * 3,
        Variable(format, "nothing"),
    ):
        trace = trace.with_variable(variable)
    v, x, m, c, eps, value, denominator = range(7)
    for name, operands, target in (
        ("mul", (v, c), v),
        ("sqrt", (v,), denominator),
        ("div", (denominator, c), denominator),
        ("add", (denominator, eps), denominator),
        ("addcdiv", (x, m, denominator, value), x),
    ):
        trace = trace.then(Operation(name, format, operands, target))
    return trace, [operand(format, length) for _ in range(3)], [0.3, 1e-8, -1e-3]


def run_trace(
    trace: Trace, operands: Sequence[Sequence[Tensor]], numbers: Sequence[float]
) -> list[Tensor]:
    """What a trace writes to its variables."""
    body, signature = kernel(trace, trace.written)
    vectors = [[x] for terms in operands for x in terms]
    outputs = [[torch.empty_like(vectors[0][0], dtype=dtype)] for dtype in signature.outputs]
    kernels.run(body, Columns(vectors, [[x] for x in numbers], outputs))
    return [x for (x,) in outputs]


def run(expression: Expression, *operands: Sequence[Tensor]) -> list[Tensor]:
    """The terms of an expression, with a key where its rounding takes one."""
    return run_sets(expression, operands)


def run_sets(expression: Expression, *sets: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The same for several sets of operands in one call."""
    takes_key = expression.format.takes_key
    keys = [torch.tensor(2**61 + 12345 + i) for i in range(len(sets))] if takes_key else []
    operands = [
        Operand(_format_of(rows[0]), list(zip(*rows, strict=True)))
        for rows in zip(*sets, strict=True)
    ]
    outputs = empty(expression.format, operands, len(sets))
    carry_out(expression, operands, outputs, keys)
    return [x for column in outputs for x in column]


def run_one(
    body: Body,
    vectors: Sequence[Tensor],
    scalars: Sequence[Tensor | float],
    outputs: Sequence[Tensor],
) -> None:
    """A single call of an elementwise function."""
    execute.run(body, Columns(*[[[x] for x in part] for part in (vectors, scalars, outputs)]))


def _format_of(terms: Sequence[Tensor]) -> mcf.Format:
    dtype = terms[0].dtype
    return PLAIN[dtype] if len(terms) == 1 else mcf.Format(dtype, len(terms))


needs_mprotect = pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="needs mprotect")


def guarded(x: Tensor, at_end: bool) -> Tensor:
    """A copy that ends, or begins, at a page which no process may touch."""
    size = x.numel() * x.itemsize
    pages = mmap.mmap(-1, (-(-size // mmap.PAGESIZE) + 1) * mmap.PAGESIZE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    page = len(pages) - mmap.PAGESIZE if at_end else 0
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(whole.data_ptr() + page), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    begin = page - size if at_end else mmap.PAGESIZE
    return whole[begin : begin + size].view(x.dtype).copy_(x)


# --------------------------------------------------------------------------------- fused steps

# Formats of a parameter and of its states.
MIXTURES = [
    ("bf16x2", "bf16x2"),
    ("bf16x2", torch.bfloat16),
    ("bf16x3", "bf16x2"),
    ("bf16x3", torch.float32),
    ("fp16x2", "fp16x2"),
    ("fp32x2", "fp32x2"),
    ("fp32x2", torch.float32),
    ("bf16x2sr", "bf16x2sr"),
    ("bf16x2sr", torch.bfloat16),
]
STORED_MIXTURES = [
    ("bf16i8", "bf16i8"),
    ("bf16br", "bf16br"),
    ("bf16i16", "bf16i16"),
    ("bf16x2br", "bf16x2br"),
    ("bf16i8", torch.float32),
    ("bf16i8sr", "bf16i8rn"),
    ("fp16i8", "fp16i8"),
    ("fp16i16", "fp16i16"),
]
SHAPES = [(257,), (7,), (16, 33), (1,), (64,), (65,), (130,), (40, 3), (1003,)]
STEPS = {
    "adam": {"weight_decay": 0.1},
    "adamw": {"amsgrad": True, "maximize": True, "scaled": True, "weight_decay": 0.1},
    "sgd": {"momentum": 0.0, "weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "dampening": 0.5, "nesterov": True, "scaled": True},
    "adagrad": {"weight_decay": 0.1, "maximize": True},
}


def mixtures(kind: str) -> list[tuple[str, str | torch.dtype]]:
    """Of the two longest kinds of steps all, of the others some."""
    return MIXTURES if kind in ("adamw", "momentum") else MIXTURES[::3]


def tensor(kind: str | torch.dtype, *shape: int, nonnegative: bool = False) -> Tensor:
    """An expansion, or a plain tensor, of random values and a few special ones."""
    x = torch.randn(shape, dtype=torch.float64)
    if nonnegative:
        x = x.square()
    else:
        special = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(len(SPECIAL), shape)]
        x = torch.where(torch.rand(shape) < 0.05, special, x)
    if isinstance(kind, torch.dtype):
        return x.to(kind)
    format = mcf.Format.from_name(kind)
    components = mcf.as_expansion(x, format.nearest).components
    balanced = format.rounding == "balanced"
    writes = torch.randint(2**62, ()) if balanced else None  # and a salt
    return mcf.MCFTensor.of(components, format, writes=writes)


# --------------------------------------------------------------------------------------- codecs

# Steps over what is stored, the long ones marked slow.
STORED_STEPS = [
    ("adamw", STORED_MIXTURES[:1]),
    *(pytest.param(kind, STORED_MIXTURES, marks=pytest.mark.slow) for kind in STEPS),
]
STORED = [
    *("bf16i16", "bf16i8", "bf16i8rn", "bf16i8sr", "bf16br", "bf16sr", "bf16x2br"),
    *("fp16i16", "fp16i8", "fp16i8rn", "fp16i8sr"),
]


def decoded(name: str, *stored: Tensor) -> list[Tensor]:
    """The numbers that components stand for."""
    numbers = torch.empty_like(stored[0], dtype=torch.float32)
    decode_columns(mcf.Format.from_name(name), [[x] for x in stored], [numbers])
    return [numbers]


def encoded(name: str, *numbers: Tensor) -> list[Tensor]:
    """The components of numbers, by keys where rounding takes such."""
    format = mcf.Format.from_name(name)
    made = [
        [torch.empty_like(x, dtype=component.dtype) for x in numbers]
        for component in format.components
    ]
    keys = [torch.tensor(2**61 + (i << 35) + 12345 * i) for i in range(len(numbers))]
    encode_columns(format, numbers, made, keys if format.takes_key else [])
    return [x for column in made for x in column]


def step(
    kind: str,
    formats: Sequence[tuple[str, str | torch.dtype]],
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    found_inf: float = 0.0,
    device: str = "cpu",
) -> list[Tensor]:
    """What torch's operator for a fused step leaves in parameters and states after two steps."""
    torch.manual_seed(2)
    options = {"weight_decay": 0.0, "maximize": False} | STEPS[kind]
    if options.pop("scaled", False):
        options["grad_scale"] = torch.tensor(128.0, device=device)
        options["found_inf"] = torch.tensor(found_inf, device=device)
    pairs = list(zip(formats, shapes, strict=False))
    params = [tensor(p, *shape).to(device) for (p, _), shape in pairs]
    states = [
        [
            tensor(s, *shape, nonnegative=i > 0 or kind == "adagrad").to(device)
            for (_, s), shape in pairs
        ]
        for i in range(3)
    ]
    counts = [torch.tensor(float(i), device=device) for i in range(len(params))]
    for first in (True, False):
        grads = [tensor(p.dtype, *p.shape).to(device) for p in params]
        if kind.startswith("adam"):
            options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8} | options
            operator = torch._fused_adamw_ if kind == "adamw" else torch._fused_adam_
            largest = states[2] if options["amsgrad"] else []
            counts = [count + 1 for count in counts]
            operator(params, grads, states[0], states[1], largest, counts, lr=0.01, **options)
        elif kind == "adagrad":
            counts = [count + 1 for count in counts]
            torch._fused_adagrad_(
                params, grads, states[0], counts, lr=0.01, lr_decay=0.1, eps=1e-8, **options
            )
        else:
            options = {"dampening": 0.0, "nesterov": False} | options
            buffers = states[0] if options["momentum"] else []
            torch._fused_sgd_(params, grads, buffers, lr=0.01, is_first_step=first, **options)
    return [*params, *(x for state in states for x in state)]
