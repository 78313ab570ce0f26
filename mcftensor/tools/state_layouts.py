"""The formats and shapes of states that an optimizer has not made yet."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mcftensor.convert import as_expansion
from mcftensor.formats import PLAIN, Format, bytes_of
from mcftensor.patches.optimizers import plan_of
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import any_format_of, local, stored_format_of
from mcftensor.training.shadow import CannotShadow, plain_step, trial_of, trying

# Lengths of stand-ins, for the shortest dimension, the next, and so on. A length of a state that
# follows a dimension differs between the two, as no length does that is always the same.
_LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19), (3, 5, 7, 11, 13, 17, 19, 23)


@dataclass(frozen=True)
class TensorLayout:
    """The format and shape of a tensor."""

    format: Format
    shape: torch.Size
    counts_writes: bool = False
    is_exact: bool = True
    """Whether each length of the shape is known to follow from those of the parameter."""

    @staticmethod
    def of(x: Tensor) -> TensorLayout:
        """Return the layout of a tensor, or of this rank's shard of it."""
        x = local(x)
        counts_writes = isinstance(x, MCFTensor) and x.writes is not None
        return TensorLayout(stored_format_of(x), x.shape, counts_writes)

    @staticmethod
    def of_gradient(p: Tensor) -> TensorLayout:
        """Return the layout of the future gradient of a parameter."""
        format = any_format_of(p)
        return TensorLayout(format.gradient if format else PLAIN[p.dtype], local(p).shape)

    @property
    def bytes(self) -> int:
        """Bytes of all components, and of the count of writes."""
        return bytes_of(self.format.components, self.shape) + 8 * self.counts_writes


States = dict[str, TensorLayout]


def layouts(state: Any) -> States:
    """Return the layouts of the tensors of a state, by name."""
    named = state.items() if isinstance(state, dict) else [("state", state)]
    found: States = {}
    for name, value in named:
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        for i, x in enumerate(tensors):
            found[f"{name}.{i}" if len(tensors) > 1 else str(name)] = TensorLayout.of(x)
    return found


def predicted(optimizer: Optimizer) -> dict[Tensor, States]:
    """Predict the states that an optimizer creates for each parameter that requires grad.

    Two copies of the optimizer step over small tensors with the same number of dimensions, in the
    same order of lengths, but of two sizes. Lengths of states that differ between the two follow
    the parameter.

    Raises:
        CannotShadow: no step can be taken on copies; says why.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        if optimizer.state:  # one state for all parameters
            return {}
        raise CannotShadow("LBFGS keeps as many vectors as its history has, up to history_size")
    parameters = [
        (g, p)
        for g, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p.requires_grad
    ]
    keys = {p: (g, any_format_of(p) or p.dtype, _pattern(local(p).shape)) for g, p in parameters}
    kinds = list(dict.fromkeys(keys.values()))
    short, long = (_trial(optimizer, kinds, lengths) for lengths in _LENGTHS)
    made = dict(zip(kinds, zip(short, long, strict=True), strict=True))
    return {p: _of(local(p).shape, *made[keys[p]]) for _, p in parameters}


Kind = tuple[int, Any, tuple[int, ...]]
"""A group, a format or dtype, and a pattern of lengths."""


def _pattern(shape: torch.Size) -> tuple[int, ...]:
    """Return whether lengths are 0, 1, or above; the latter as ranks from 2 on."""
    ranks = {length: rank for rank, length in enumerate(sorted({x for x in shape if x > 1}), 2)}
    return tuple([ranks.get(length, length) for length in shape])


def _stand_in(pattern: tuple[int, ...], lengths: Sequence[int]) -> list[int]:
    return [x if x < 2 else lengths[x - 2] for x in pattern]


def _trial(optimizer: Optimizer, kinds: Sequence[Kind], lengths: Sequence[int]) -> list[States]:
    """Return the states of stand-ins, after two steps."""
    try:
        return _steps(optimizer, kinds, lengths, sparse=False)
    except CannotShadow:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):
            return _steps(optimizer, kinds, lengths, sparse=True)
        raise CannotShadow(f"its step raises {type(error).__name__}: {error}") from error


def _steps(
    optimizer: Optimizer, kinds: Sequence[Kind], lengths: Sequence[int], *, sparse: bool
) -> list[States]:
    plan = plan_of(optimizer)
    with trying():
        own = []
        for _, format, pattern in kinds:
            x = torch.rand(_stand_in(pattern, lengths), device="cpu")
            is_plain = isinstance(format, torch.dtype)
            own.append(nn.Parameter(x.to(format) if is_plain else as_expansion(x, format)))
        stand_ins: dict[int, list[Tensor]] = {g: [] for g in range(len(optimizer.param_groups))}
        for p, (g, *_) in zip(own, kinds, strict=True):
            stand_ins[g].append(p)
        trial = trial_of(optimizer, stand_ins)
        if plan is not None:
            trial.__dict__["_collage"] = plan
        for _ in range(2):
            for p in own:
                p.grad = _gradient(p, sparse=sparse)
            plain_step(trial)(trial)
        if plan is not None:
            plan.apply(trial)
    return [layouts(trial.state.get(p, {})) for p in own]


def _gradient(p: Tensor, *, sparse: bool) -> Tensor:
    gradient = torch.rand(p.shape, device="cpu")
    format = TensorLayout.of_gradient(p).format
    if format.rules is not None:
        return as_expansion(gradient, format)
    return gradient.to(p.dtype).to_sparse(1) if sparse else gradient.to(p.dtype)


def _of(shape: torch.Size, short: States, long: States) -> States:
    """Return the states of a parameter of a shape, from the states of its small substitutes."""
    pattern = _pattern(shape)
    stand_ins = [_stand_in(pattern, lengths) for lengths in _LENGTHS]
    # Products of adjacent dimensions, for both stand-ins and for the shape.
    ways = {
        tuple([prod(x[start:end]) for x in stand_ins]): prod(shape[start:end])
        for start, end in combinations(range(len(shape) + 1), 2)
    }
    found: States = {}
    for name, layout in short.items():
        other = long.get(name, layout)
        pairs = list(zip(layout.shape, other.shape, strict=False))
        lengths = [ways.get(pair, pair[0] if pair[0] == pair[1] else None) for pair in pairs]
        is_exact = None not in lengths and len(layout.shape) == len(other.shape)
        known = [x if x is not None else shape.numel() for x in lengths]
        found[name] = TensorLayout(layout.format, torch.Size(known), layout.counts_writes, is_exact)
    return found
