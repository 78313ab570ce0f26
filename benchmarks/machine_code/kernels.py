"""The kernels that training runs, caught while small tensors go through them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import mcftensor as mcf
from mcftensor.kernels import execute
from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.program import Program

SIDE, ROWS = 256, 4096
"""Of a matrix that is large enough for all operations to go through kernels."""


@dataclass(frozen=True)
class Kernel:
    """A program that goes over memory once.

    Attributes:
        name: the name of the operation.
        program: its instructions.
        prepare: given a number of rows of `SIDE` elements, a function that runs it on these; or
            None if other programs run with it.
    """

    name: str
    program: Program
    prepare: Callable[[int], Callable[[], Any]] | None

    @property
    def is_in_place(self) -> bool:
        """Whether it has read all memory that it writes; otherwise a CPU reads that memory too."""
        return len(self.program.signature.outputs) + 1 == len(self.program.signature.vectors)

    @property
    def read(self) -> float:
        """Bytes an element."""
        return self._bytes(0, len(self.program.signature.vectors))

    @property
    def written(self) -> float:
        """Bytes an element."""
        count = len(self.program.signature.vectors)
        return self._bytes(count, count + len(self.program.signature.outputs))

    def _bytes(self, start: int, stop: int) -> float:
        signature = self.program.signature
        sizes = [x.itemsize for x in (*signature.vectors, *signature.outputs)]
        return sum(
            sizes[i] / (BLOCK_SIZE if i in signature.shared else 1) for i in range(start, stop)
        )


def _step(
    make: Callable[..., Optimizer], mode: str, format: mcf.Format, **options: Any
) -> Callable[[int], Callable[[], Any]]:
    """A step of an optimizer over one matrix."""

    def prepare(rows: int) -> Callable[[], Any]:
        p = nn.Parameter(mcf.as_expansion(torch.randn(rows, SIDE), format))
        p.grad = torch.randn(rows, SIDE).to(p.dtype)
        optimizer = mcf.collage(make([p], **options), mode)
        optimizer.step()
        return optimizer.step

    return prepare


def _converted(rows: int) -> Callable[[], Any]:
    x = torch.randn(rows, SIDE)
    return lambda: mcf.as_expansion(x, mcf.bf16x2)


def _collapsed(rows: int) -> Callable[[], Any]:
    x = mcf.as_expansion(torch.randn(rows, SIDE), mcf.bf16x2)
    return lambda: mcf.as_plain(x, torch.float32)


def _product(rows: int) -> Callable[[], Any]:
    x, y = (mcf.as_expansion(torch.randn(rows, SIDE), mcf.bf16x2) for _ in range(2))

    @torch.no_grad()
    def run() -> Any:
        return (x * y).components  # type: ignore[attr-defined]

    return run


_FUSED = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
_LOOP = {"lr": 1e-3, "weight_decay": 0.1, "foreach": False}
_MOMENTUM = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "fused": True}

WORK: dict[str, Callable[[int], Callable[[], Any]]] = {
    "AdamW light": _step(AdamW, "light", mcf.bf16x2, **_FUSED),
    "AdamW plus": _step(AdamW, "plus", mcf.bf16x2, **_FUSED),
    "AdamW full": _step(AdamW, "full", mcf.bf16x2, **_FUSED),
    "AdamW exact": _step(AdamW, "full", mcf.bf16i16, **_FUSED),
    "AdamW compact": _step(AdamW, "compact", mcf.bf16i8, **_FUSED),
    "AdamW plus, bf16x3": _step(AdamW, "plus", mcf.bf16x3, **_FUSED),
    "AdamW plus, for-loop": _step(AdamW, "plus", mcf.bf16x2, **_LOOP),
    "SGD light": _step(SGD, "light", mcf.bf16x2, **_MOMENTUM),
    "SGD plus": _step(SGD, "plus", mcf.bf16x2, **_MOMENTUM),
    "product of bf16x2": _product,
    "float32 to bf16x2": _converted,
    "bf16x2 to float32": _collapsed,
}


def kernels() -> list[Kernel]:
    """All of them; of work that takes several programs the longest one, which is not timed."""
    found = []
    for name, prepare in WORK.items():
        run = prepare(ROWS)
        with caught() as programs:
            run()
        longest = max(programs, key=lambda program: len(program.instructions))
        found.append(Kernel(name, longest, prepare if len(programs) == 1 else None))
    return found


@contextlib.contextmanager
def caught() -> Iterator[list[Program]]:
    """The programs that run meanwhile."""
    programs: list[Program] = []
    original = execute.kernel_of

    def kernel_of(body: Any, signature: Any) -> execute.Kernel:
        kernel = original(body, signature)
        programs.append(kernel.program)
        return kernel

    execute.kernel_of = kernel_of  # type: ignore[assignment]
    try:
        yield programs
    finally:
        execute.kernel_of = original
