"""One trial of an optimizer: some steps over weights held in one way, on a set stream of gradients.

Gradients are bfloat16 numbers, so that weights of every type get the same ones. The oracle is the
same optimizer over float64 weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mcftensor as mcf

Held = mcf.Format | torch.dtype
Shapes = Sequence[tuple[int, ...]]

SHAPES: Shapes = ((8, 6), (5,))
MATRICES: Shapes = ((8, 6), (6, 4))
STEPS = 20


@dataclass(frozen=True)
class Way:
    """The storage of weights, and the other tensors that are expansions.

    Gradients are plain in training. The other switches help to find the cause of an error: weights
    in the role of values, so that norms use all terms; expansions for tensors that the optimizer
    creates from nothing; and for tensors that it rounds to the dtype of the weights.
    """

    held: Held
    gradients: bool = False
    values: bool = False
    states: bool = False
    casts: bool = False
    collage: str | None = None


class Weights(nn.Module):
    """Parameters held in some way, and their gradients."""

    def __init__(self, way: Way, shapes: Shapes) -> None:
        super().__init__()
        self.way = way
        self._generator = torch.Generator().manual_seed(0)
        starts = [(self._random(shape) / 2).bfloat16().double() for shape in shapes]
        self._targets = [0.3 * self._random(shape) for shape in shapes]
        held = [self.enter(start).requires_grad_() for start in starts]
        if way.values:
            self.tensors = held
        else:
            self.tensors = nn.ParameterList(nn.Parameter(x.detach()) for x in held)
        self._start = self._whole()

    def _random(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._generator, dtype=torch.float64)

    def enter(self, x: Tensor) -> Tensor:
        """A tensor as weights are held."""
        held = self.way.held
        return mcf.as_expansion(x, held) if isinstance(held, mcf.Format) else x.to(held, copy=True)

    def gradient(self, x: Tensor) -> Tensor:
        """A gradient as weights get it: of bfloat16 numbers."""
        x, held = x.bfloat16().double(), self.way.held
        if self.way.gradients or not isinstance(held, mcf.Format):
            return self.enter(x)
        return x.to(held.dtype)

    def draw(self) -> None:
        """Give every weight its next gradient: a fixed part, and noise."""
        for p, fixed in zip(self.tensors, self._targets, strict=True):
            p.grad = self.gradient(self._random(p.shape) + fixed)

    def loss(self) -> Tensor:
        """A loss whose gradients are the next ones."""
        self.draw()
        parts = []
        for p in self.tensors:
            parts.append((p * p.grad).sum())
            p.grad = None
        return torch.stack(parts).sum()

    def descend(self) -> Tensor:
        """Set the gradients of a quadratic bowl where the weights are, and return its value."""
        total = torch.zeros((), dtype=torch.float64)
        for p, target in zip(self.tensors, self._targets, strict=True):
            slope = torch.linspace(1, 4, p.numel(), dtype=torch.float64).view(p.shape)
            apart = mcf.as_plain(p.detach(), torch.float64) - target
            p.grad = self.gradient(slope * apart)
            total += (slope * apart.square()).sum() / 2
        return total

    def _whole(self) -> Tensor:
        wide = [mcf.as_plain(p.detach(), torch.float64).flatten() for p in self.tensors]
        return torch.cat(wide).clone()

    def moved(self) -> Tensor:
        """What all weights have moved by, in float64."""
        return self._whole() - self._start


def by_gradient(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    """A step on gradients that are there."""
    weights.draw()
    step()


def by_closure(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    """A step that asks for more gradients."""

    def closure() -> Tensor:
        weights.draw()
        return torch.ones(())

    weights.draw()
    step(closure)


def by_descent(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    """A step that asks for gradients where it likes."""
    step(weights.descend)


@dataclass(frozen=True)
class Subject:
    """An optimizer as it is tried: how it is made, and how it takes a step."""

    make: Callable[..., Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    shapes: Shapes = SHAPES
    drive: Callable[[Any, Weights, Callable[..., Any]], None] = by_gradient
    steps: int = STEPS


class _Lifted(TorchFunctionMode):
    """What an optimizer makes or rounds in 16 bits keeps its precision."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if type(result) is not Tensor or result.dtype != torch.bfloat16:
            return result
        if self.way.casts and func in (Tensor.to, Tensor.bfloat16, Tensor.type):
            return self._entered(args[0])
        if self.way.casts and func in (torch.full, torch.tensor):  # of a number
            return self._entered(func(*args, **kwargs | {"dtype": torch.float64}))
        if self.way.states and func in (
            torch.zeros,
            torch.ones,
            torch.full,
            torch.eye,
            torch.empty,
        ):
            return self._entered(result)
        return result

    def _entered(self, x: Tensor) -> Tensor:
        held = self.way.held
        return mcf.as_expansion(x, held) if isinstance(held, mcf.Format) else x.clone()


def displacement(subject: Subject, way: Way, *, compiled: bool = False) -> Tensor:
    """What weights move by in the steps of a subject, in float64."""
    weights = Weights(way, subject.shapes)
    torch.manual_seed(0)
    with _Lifted(way) if way.states or way.casts else contextlib.nullcontext():
        optimizer = subject.make(weights, **subject.keywords)
        if way.collage is not None:
            mcf.collage(optimizer, way.collage)
        if hasattr(optimizer, "train"):
            optimizer.train()
        step = torch.compile(optimizer.step) if compiled else getattr(optimizer, "step", None)
        for _ in range(subject.steps):
            subject.drive(optimizer, weights, step)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    return weights.moved()


def error(found: Tensor, exact: Tensor) -> float:
    """The relative error of a displacement."""
    return float((found - exact).norm() / exact.norm())
