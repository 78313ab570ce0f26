"""Readings of states: what a step meant to do to each, and what was kept of it.

A second moment that stands still, or is zero beside a first moment that is not, changes the length
of updates, and a loss need not show it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from mcftensor.convert import as_plain
from mcftensor.tensor.dtensor import local
from mcftensor.training.saturation import saturated_blocks
from mcftensor.training.state_names import FIRST_MOMENTS, SECOND_MOMENTS


class StateReading(TypedDict):
    """What one step kept of the intended change of a state, in the model or of a parameter.

    A state rounded at random, or in a balanced way, keeps the mean: there `ratio` says what is
    kept, and `lost` is large because few elements move at a time.
    """

    step: int
    """Number of the step since the meter was attached, from 1 on."""
    ratio: float | None
    """⟨Δ, Δ̂⟩/‖Δ‖² of the intended change and of that which the state made; 1.0 when nothing is
    lost."""
    lost: float | None
    """Of the elements that were to change, the share that did not."""
    zero: float | None
    """Of a second moment: the share of zeros among elements whose first moment is not zero."""
    saturated: int
    """Blocks of elements with one scale of which a number is too large for the format, or is not
    finite. 0 in formats without such blocks."""
    numel: int
    """Number of elements measured."""


# The sums over elements of a state, of which a reading is made.
COLUMNS = 8
_INTENDED, _ALONG, _CHANGES, _LOST, _BESIDE, _ZERO, _SATURATED, _NUMEL = range(COLUMNS)


def state_sums(
    before: Mapping[str, Any], after: Mapping[str, Any], wide: Mapping[str, Any], like: Tensor
) -> dict[str, Tensor]:
    """The columns of each state that has the shape of its parameter, on this rank.

    A state that is not there before the step began at zero.
    """
    found: dict[str, Tensor] = {}
    first = next((after[name] for name in after if name in FIRST_MOMENTS), None)
    for name, x in after.items():
        if not _is_like(x, like) or not _is_like(wide.get(name), like):
            continue
        beside = first if name in SECOND_MOMENTS and _is_like(first, like) else None
        old = before.get(name)
        four = old if _is_like(old, like) else None, x, wide[name], beside
        parts = zip(*map(_parts, four), strict=False)  # nothing comes without end
        sums = [_part_sums(*part) for part in parts]
        empty = torch.zeros(COLUMNS, dtype=torch.float64, device=local(x).device)
        found[name] = torch.stack([empty, *sums]).sum(0)
        saturated = saturated_blocks(x)
        if saturated is not None:
            found[name][_SATURATED] = saturated
    return found


def state_reading(step: int, rows: list[list[float]]) -> StateReading:
    """The figures of a state of one or many parameters, from its columns."""
    total = [sum(column) for column in zip(*rows, strict=True)]
    return StateReading(
        step=step,
        ratio=total[_ALONG] / total[_INTENDED] if total[_INTENDED] else None,
        lost=total[_LOST] / total[_CHANGES] if total[_CHANGES] else None,
        zero=total[_ZERO] / total[_BESIDE] if total[_BESIDE] else None,
        saturated=int(total[_SATURATED]),
        numel=int(total[_NUMEL]),
    )


def _is_like(x: Any, like: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == like.shape and x.is_floating_point()


# Elements whose numbers in float64 fit into the caches of a CPU together.
_PART = 1 << 17


def _parts(x: Tensor | None) -> Iterator[Any]:
    """The numbers in float64, whole rows at a time; of nothing None, time and again."""
    if x is None:
        return itertools.repeat(None)
    own = local(x.detach())
    if not own.dim():
        return iter([as_plain(own, torch.float64).view(1)])
    rows = max(1, _PART // max(1, own.numel() // max(1, own.shape[0])))
    return (as_plain(part, torch.float64).flatten() for part in own.split(rows) if part.numel())


def _part_sums(before: Tensor | None, after: Tensor, wide: Tensor, beside: Tensor | None) -> Tensor:
    old = torch.zeros_like(after) if before is None else before
    intended, moved = wide - old, after - old
    changes = intended != 0
    sums = torch.zeros(COLUMNS, dtype=torch.float64, device=after.device)
    sums[_INTENDED] = intended @ intended
    sums[_ALONG] = intended @ moved
    sums[_CHANGES] = changes.sum()
    sums[_LOST] = (changes & (moved == 0)).sum()
    if beside is not None:
        sums[_BESIDE] = (beside != 0).sum()
        sums[_ZERO] = ((beside != 0) & (after == 0)).sum()
    sums[_NUMEL] = after.numel()
    return sums
