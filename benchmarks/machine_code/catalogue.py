"""Every kernel that the library has for GPUs, by what asks for it: operations of all formats,
conversions, fused steps, the traces of PyTorch's optimizers, and exact sums."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import mcftensor as mcf
from machine_code.kernels import caught
from mcftensor.kernels import execute
from mcftensor.kernels.digit_body import body_of_digits, signature_of_digits
from mcftensor.kernels.program import Program

Work = Callable[[], Any]

SHAPE = (256, 256)
LARGE = (1024, 96)
"""Of conversions, which take smaller tensors in whole."""

TERMS = tuple(
    mcf.Format.from_name(name)
    for name in (
        *("bf16x2", "bf16x3", "fp16x2", "fp32x2", "fp32x3", "fp64x2"),
        *("bf16x2sr", "fp32x2sr", "bf16x2br"),
    )
)
STORED = tuple(
    mcf.Format.from_name(name)
    for name in (
        *("bf16i16", "bf16i8", "bf16i8rn", "bf16i8sr", "bf16br", "bf16sr"),
        *("mxfp8", "ue5m3", "e4m3i8", "e4m3i16", "fp16i16", "fp16i8"),
    )
)
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda x, y, z: x + y,
    "mul": lambda x, y, z: x * y,
    "div": lambda x, y, z: x / y,
    "sqrt": lambda x, y, z: x.sqrt(),
    "fma": mcf.fma,
    "addcmul": lambda x, y, z: x.addcmul(y, z, value=0.1),
    "addcdiv": lambda x, y, z: x.addcdiv(y, z, value=-0.01),
    "lerp": lambda x, y, z: x.lerp(y, 0.1),
}

# Fused optimizers with options that make their kernels the longest.
FUSED: dict[str, Callable[..., Optimizer]] = {
    "Adam": lambda p: Adam(p, amsgrad=True, weight_decay=0.1, fused=True),
    "AdamW": lambda p: AdamW(p, fused=True),
    "AdamW amsgrad": lambda p: AdamW(p, amsgrad=True, maximize=True, fused=True),
    "SGD": lambda p: SGD(p, 0.1, weight_decay=0.1, fused=True),
    "SGD nesterov": lambda p: SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1, fused=True),
    "Adagrad": lambda p: Adagrad(p, weight_decay=0.1, maximize=True, fused=True),
}
# The format of weights and the mode.
MIXTURES: tuple[tuple[str, str | None], ...] = (
    *(("bf16x2", mode) for mode in ("light", "plus", "full")),
    *((name, "plus") for name in ("bf16x3", "fp16x2", "fp32x2", "bf16x2sr", "bf16x2br")),
    *((name, None) for name in ("bf16i16", "bf16i8", "bf16br")),
    *((name, "compact") for name in ("bf16i8", "bf16i16", "e4m3i8", "e4m3i16")),
    *(("fp16i16", None), ("fp16i8", "compact")),
)
# Formats of weights whose changes are marked.
MARKED = ("bf16x2", "bf16i16", "bf16i8", "fp16i16")
# Optimizers of torch.optim whose operations become traces, by their for-loop path.
TRACED = ("AdamW", "NAdam", "RAdam", "RMSprop", "Adadelta")
IN_TRACES = ("bf16x2", "bf16x3", "fp32x2")
SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def catalogue(chosen: Iterable[tuple[str, Work]] | None = None) -> dict[str, Program]:
    """Return the programs of all work, or of the `chosen`, by name.

    A program of several kernels is named by the first of them.
    """
    found: dict[str, Program] = {}
    for name, run in work() if chosen is None else chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()  # the first step of a process records traces that later ones join
            torch.manual_seed(0)
            with caught() as programs:
                run()
        new = [x for x in dict.fromkeys(programs) if x not in found.values() and x.instructions]
        for i, program in enumerate(new):
            found[f"{name} ({i + 1})" if len(new) > 1 else name] = program
    return found


def group_of(name: str) -> str:
    """What asks for a kernel, and its format: conversions, sums, operations, steps or traces."""
    if " to " in name:
        return "conversions"
    if name.startswith("exact "):
        return "exact sums"
    asks, form, *_ = name.partition(" (")[0].split(", ")
    if " for-loop" in asks:
        return f"traces, {form}"
    return f"{'operations' if asks in OPERATIONS else 'fused steps'}, {form}"


def work() -> Iterator[tuple[str, Work]]:
    """What training asks of the library, in small."""
    yield from fused_steps()
    for weights in MARKED:
        yield f"AdamW marked, {weights}", _marked(FUSED["AdamW"], mcf.Format.from_name(weights))
    for format in TERMS:
        for name, operation in OPERATIONS.items():
            yield f"{name}, {format.name}", _operation(format, operation)
    for name in TRACED:
        for weights in IN_TRACES:
            make = _for_loop(getattr(torch.optim, name))
            yield f"{name} for-loop, {weights}", _steps(make, mcf.Format.from_name(weights), None)
    for dtype in SUMMED:
        for factors, name in ((1, "exact sum"), (2, "exact dot")):
            yield f"{name}, {str(dtype)[6:]}", _sum(dtype, factors)
    for format in (*TERMS, *STORED):
        yield f"float32 to {format.name}", _conversion(torch.float32, format)
        yield f"{format.name} to float32", _collapse(format, torch.float32)


def fused_steps() -> Iterator[tuple[str, Work]]:
    """The steps of fused optimizers in all mixtures."""
    for weights, mode in MIXTURES:
        for name, make in FUSED.items():
            if weights != "bf16x2" and name not in ("AdamW", "SGD nesterov"):
                continue
            label = ", ".join(filter(None, (name, weights, mode)))
            yield label, _steps(make, mcf.Format.from_name(weights), mode)


def _number(format: mcf.Format, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return mcf.as_expansion(torch.rand(shape) + 0.5, format)


def _operation(format: mcf.Format, operation: Callable[..., Tensor]) -> Work:
    def run() -> None:
        numbers = [_number(format) for _ in range(3)]
        _read(operation(*numbers))

    return run


@torch.no_grad()
def _read(x: Tensor) -> Any:
    return x.components if isinstance(x, mcf.MCFTensor) else x


def _conversion(dtype: torch.dtype, format: mcf.Format) -> Work:
    return lambda: mcf.as_expansion(torch.rand(LARGE).to(dtype), format)


def _collapse(format: mcf.Format, dtype: torch.dtype) -> Work:
    return lambda: mcf.as_plain(_number(format, LARGE), dtype)


def _sum(dtype: torch.dtype, factors: int) -> Work:
    """The kernel of sums or dot products, which a CPU computes by code of its own."""
    return lambda: execute.kernel_of(
        body_of_digits(dtype, factors), signature_of_digits(dtype, factors)
    )


def _steps(make: Callable[..., Optimizer], format: mcf.Format, mode: str | None) -> Work:
    def run() -> None:
        p = nn.Parameter(_number(format))
        optimizer = make([p])
        if mode is not None:
            mcf.collage(optimizer, mode)
        for _ in range(2):
            p.grad = torch.randn(SHAPE).to(p.dtype)
            optimizer.step()

    return run


def _marked(make: Callable[..., Optimizer], format: mcf.Format) -> Work:
    def run() -> None:
        p = nn.Parameter(_number(format))
        optimizer = make([p])
        p.grad = torch.randn(SHAPE).to(p.dtype)
        deltas = mcf.deltas(optimizer)
        optimizer.step()
        deltas.remove()

    return run


def _for_loop(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    return lambda p: kind(p, lr=1e-3, foreach=False)  # type: ignore[call-arg]
