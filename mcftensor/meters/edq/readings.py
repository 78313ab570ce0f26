"""Readings: the losses of one step, from the step on copies to the figures; and the intended
change of each state, with the share that was kept.

All sums are exact: counts, and accumulators of dot products (`sums/accumulators.py`). They are
rounded once, after those of all parameters and ranks have been added, so figures do not depend on
how elements are divided among ranks, blocks and threads.

A second moment that is frozen, or zero with a non-zero first moment, changes the length of updates,
and the loss need not show it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mcftensor.convert import as_plain
from mcftensor.kernels.program import PATTERNS
from mcftensor.sums.accumulators import SIZE, accumulate_dots
from mcftensor.sums.correct_rounding import norm_as_float, sum_as_float
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import local
from mcftensor.training.shadow import (
    CannotShadow,
    Original,
    chooses_types,
    is_of_others,
    same,
    sums_in,
    wide_type,
    widened,
    widened_parameters,
)
from mcftensor.training.state_names import FIRST_MOMENTS, SECOND_MOMENTS
from mcftensor.training.step_warnings import raised_blocks, saturated_blocks


class Reading(TypedDict):
    """The losses of one step, in the model, a group or a parameter.

    Without an intended update, all figures except `update_norm` and `numel` are None. Without a
    learning rate, `largest` equals None."""

    step: int
    """Number of the step since the meter was attached, from 1 on."""
    edq: float | None
    """⟨Δ/‖Δ‖, Δ̂⟩, in the units of the parameters."""
    ratio: float | None
    """EDQ/‖Δ‖; 1.0 when nothing is lost."""
    lost: float | None
    """The share of elements that did not move, among those with a nonzero update."""
    ratio_leading: float | None
    """The ratio with the movement of leading terms alone."""
    lost_leading: float | None
    """The share whose leading term did not move."""
    update_norm: float
    """‖Δ‖, the length of the intended update."""
    largest: float | None
    """The largest movement of an element, in learning rates: an outlier among them tells of a
    second moment that is too small."""
    numel: int
    """Number of elements measured."""


class StateReading(TypedDict):
    """The share of the intended change of a state that one step kept, in the model or a parameter.

    Stochastic and balanced rounding preserve the mean of a state: there `ratio` is the share that
    is kept, and `lost` is large because few elements move at a time."""

    step: int
    """Number of the step since the meter was attached, from 1 on."""
    ratio: float | None
    """⟨Δ, Δ̂⟩/‖Δ‖² of the intended change and of that which the state made; 1.0 when nothing is
    lost."""
    lost: float | None
    """The share of elements that did not change, among those with a nonzero change."""
    zero: float | None
    """For a second moment, the share of zeros among elements with a nonzero first moment."""
    saturated: int
    """Blocks of elements with one scale of which a number is too large for the format, or is not
    finite. 0 in formats without such blocks."""
    raised: int
    """Blocks of a second moment with most elements raised to the smallest number of the format
    beside the largest one. 0 in formats where small elements round to zero."""
    numel: int
    """Number of elements measured."""


@dataclass(frozen=True)
class Place:
    """The name, group and tensor of a parameter."""

    name: str
    group: int
    parameter: Tensor


@dataclass
class Sample:
    """A step of one parameter on copies: exact sums over elements, and the results."""

    place: Place
    rows: dict[str | None, Tensor]
    """int64: the columns below, of each state by its name, and of the parameter by None."""
    fingerprints: dict[object, Tensor] = field(default_factory=dict)
    error: str | None = None

    @property
    def differs(self) -> bool:
        """Whether the real step was another, or may have been."""
        return bool(self.rows[None][_DIFFERS])

    @property
    def has_failed(self) -> bool:
        """Whether the step on copies failed on some rank."""
        return bool(self.rows[None][_FAILED])


# The columns: counts, the bits of the largest movement, and accumulators of dot products.
_INTENDED, _LOST, _LOST_LEADING, _NUMEL, _BESIDE, _ZERO = range(6)
_SATURATED, _RAISED, _DIFFERS, _FAILED, _LARGEST = range(6, 11)
_COUNTS, _DOTS = 11, 3
_UPDATE, _ALONG, _ALONG_LEADING = range(_DOTS)


def take_samples(
    original: Original, batch: list[Place], loss: Callable[[], Any] | None
) -> list[Sample]:
    """Take the coming step on copies of a batch of parameters at once.

    Parameters without a gradient are stepped with the others, and give no sample.
    """
    parameters = [place.parameter for place in batch]
    measured = [place for place in batch if place.parameter.grad is not None]
    failure = _DIFFERS  # The real step is taken with the other parameters, and may be another.
    try:
        for place in measured:
            wide_type(place.parameter)
        after = original.step(parameters, same, loss)
        failure = _FAILED
        wide = _wide_step(original, parameters, after, loss)
        with torch.no_grad():
            return [
                Sample(
                    place,
                    _rows(place.parameter, original.states_of(place.parameter), own, other),
                    _fingerprints(*own),
                )
                for place, own, other in zip(batch, after, wide, strict=True)
                if place.parameter.grad is not None
            ]
    except Exception as error:  # noqa: BLE001 (a meter that fails must not stop the training)
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, CannotShadow):
            failure = _FAILED
        else:
            reason = f"{type(error).__name__}: {reason}"
        failed = [_empty(place.parameter.device) for place in measured]
        for row in failed:
            row[failure] = 1
        return [
            Sample(place, {None: row}, error=reason)
            for place, row in zip(measured, failed, strict=True)
        ]


def _empty(device: torch.device) -> Tensor:
    return torch.zeros(_COUNTS + _DOTS * SIZE, dtype=torch.int64, device=device)


def _wide_step(
    original: Original,
    parameters: list[Tensor],
    after: list[tuple[Tensor, dict[str, Any]]],
    loss: Callable[[], Any] | None,
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Take the step in wide precision: with wide states, or else with those of the optimizer."""
    conversions = [widened, widened_parameters]
    if any(chooses_types(p, original.states_of(p)) for p in parameters):
        conversions.reverse()
    failure: RuntimeError | None = None
    for conversion in conversions:
        try:
            wide = original.step(parameters, conversion, loss)
        except RuntimeError as error:  # of dtypes that do not go together
            failure = failure or error
            continue
        if original.takes_float64 or all(map(_follows, parameters, after, wide)):
            return wide
    raise failure or CannotShadow("in float64 its step does nothing, or gives NaN")


def _follows(
    before: Tensor, after: tuple[Tensor, dict[str, Any]], wide: tuple[Tensor, dict[str, Any]]
) -> bool:
    """Whether a step in wide precision moves its parameter if one in the own precision does, and
    ends with finite numbers if that does. Kernels may ignore dtypes, or take them for others."""
    own, other = as_plain(local(after[0])), as_plain(local(wide[0]))
    is_still = bool((other == as_plain(local(before), other.dtype)).all())
    moves = bool((own != as_plain(local(before), own.dtype)).any())
    return not (is_still and moves) and not bool((own.isfinite() & ~other.isfinite()).any())


def _rows(
    parameter: Tensor,
    states: Mapping[str, Any],
    after: tuple[Tensor, Mapping[str, Any]],
    wide: tuple[Tensor, Mapping[str, Any]],
) -> dict[str | None, Tensor]:
    """Return the columns of a parameter, and of each state in its shape, on this rank.

    A state that is not there before the step began at zero.
    """

    def is_like(x: Any) -> bool:
        is_known = isinstance(x, Tensor) and not is_of_others(x)
        return is_known and x.shape == parameter.shape and x.is_floating_point()

    (p, own), (wide_p, others) = after, wide
    rows: dict[str | None, Tensor] = {None: _sums("parameter", parameter, parameter, p, wide_p)}
    first = next((own[name] for name in own if name in FIRST_MOMENTS), None)
    for name, x in own.items():
        if is_like(x) and is_like(others.get(name)):
            before = states[name] if is_like(states.get(name)) else torch.zeros_like(x)
            beside = first if name in SECOND_MOMENTS and is_like(first) else None
            row = _sums(name, parameter, before, x, others[name], beside)
            for column, blocks in (_SATURATED, saturated_blocks(x)), (_RAISED, raised_blocks(x)):
                if blocks is not None:
                    row[column] = blocks
            rows[name] = row
    return rows


# Elements whose intermediate tensors fit into the caches of a CPU together; on a GPU they only
# have to be few enough.
_CPU_BLOCK = 1 << 17
_BLOCK = 1 << 24


def _sums(
    name: str,
    parameter: Tensor,
    before: Tensor,
    after: Tensor,
    wide: Tensor,
    beside: Tensor | None = None,
) -> Tensor:
    """Return the columns of a parameter or state, from the elements on this rank.

    For a second moment, `beside` is the first one.
    """
    own = local(after)
    size = _CPU_BLOCK if own.device.type == "cpu" else _BLOCK
    rows = max(1, size // math.prod(own.shape[1:])) if own.numel() else 1

    def blocks(x: Tensor | None) -> Iterable[Tensor | None]:
        if x is None:
            return itertools.repeat(None)
        x = local(x.detach())
        return x.split(rows) if x.dim() else [x]  # elements of a row may share a scale

    parts = zip(*map(blocks, (before, after, wide, beside)), strict=False)
    found = [_block_sums(name, parameter, *part) for part in parts if own.numel()]
    columns = torch.stack([_empty(own.device), *found])
    total = columns.sum(0)
    total[_LARGEST] = columns[:, _LARGEST].amax()
    return total


def _block_sums(
    name: str,
    parameter: Tensor,
    before: Tensor,
    after: Tensor,
    wide: Tensor,
    beside: Tensor | None,
) -> Tensor:
    wanted = sums_in(parameter)
    difference = widened(wide, parameter, name) - widened(before, parameter, name)
    difference = torch.view_as_real(difference) if difference.is_complex() else difference
    intended = as_plain(difference, wanted).flatten()
    is_intended = intended != 0
    olds, news = _terms(before, wanted), _terms(after, wanted)
    # The formats differ where this step has converted the state.
    pairs = list(itertools.zip_longest(olds, news, fillvalue=torch.zeros_like(intended)))
    moved = sum((new - old for old, new in pairs[1:]), start=pairs[0][1] - pairs[0][0])
    stayed = functools.reduce(operator.and_, itertools.starmap(_are_same, pairs))
    moves, stays = [moved], [stayed]
    if name == "parameter" and isinstance(after, MCFTensor):
        ends: Any = before, after
        old, new = (x.compute_tensor.flatten().to(wanted) for x in ends)
        moves.append(new - old)
        stays.append(_are_same(old, new))
    row = _empty(intended.device)
    row[_INTENDED], row[_NUMEL] = is_intended.sum(), after.numel()
    row[_LOST] = (is_intended & stays[0]).sum()
    row[_LOST_LEADING] = (is_intended & stays[-1]).sum()
    largest = moved.abs().amax()
    largest = torch.where(largest.isnan(), torch.nan, largest)
    row[_LARGEST] = largest.view(PATTERNS[largest.element_size()])  # patterns have an order
    if beside is not None:
        is_beside = ~_are_zero(_terms(beside, wanted))
        row[_BESIDE], row[_ZERO] = is_beside.sum(), (is_beside & _are_zero(news)).sum()
    dots = accumulate_dots(intended, (intended, *moves))
    row[_COUNTS:] = torch.cat([dots[:, i] for i in (0, 1, -1)])  # a list as an index is copied
    return row


def _terms(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return floats whose sum is the number."""
    terms = x.format.decode(x._read()) if isinstance(x, MCFTensor) else _components(x)
    return [t.flatten().to(dtype) for t in terms]


def _are_same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _are_zero(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(operator.and_, [t == 0 for t in terms])


def _components(x: Tensor) -> tuple[Tensor, ...]:
    if isinstance(x, MCFTensor):
        return x._read()
    if is_of_others(x):
        inner, _ = x.__tensor_flatten__()
        return tuple(t for name in inner for t in _components(getattr(x, name)))
    return (torch.view_as_real(x) if x.is_complex() else x,)


def _fingerprints(parameter: Tensor, state: Mapping[str, Any]) -> dict[object, Tensor]:
    """Return the sums of the bit patterns of a parameter and its states, term by term.

    Tensors that differ have others, by all odds.
    """
    found: dict[object, Tensor] = {}
    for name, value in [(None, parameter), *state.items()]:
        for i, x in enumerate(tree_leaves(value)):
            if isinstance(x, Tensor) and x.layout == torch.strided:
                terms = _components(local(x))
                for j, t in enumerate(terms):
                    bits = t.detach().view(PATTERNS[t.element_size()])
                    found[name, i, j, len(terms)] = bits.sum(dtype=torch.int64)
    return found


def record_differences(samples: Sequence[Sample], states: Mapping[Tensor, Any]) -> None:
    """Record in samples where parameters and states differ after the real step."""
    for sample in samples:
        p = sample.place.parameter
        real = _fingerprints(p, states.get(p, {})) if sample.fingerprints else {}
        for name in sample.fingerprints.keys() & real.keys():
            sample.rows[None][_DIFFERS] += sample.fingerprints[name] != real[name]


def totals(chosen: Sequence[tuple[Sample, str | None]]) -> None:
    """Add some rows of samples over all ranks with parts, and bring them to the CPU."""
    by_ranks: dict[tuple[Any, ...], list[tuple[Sample, str | None]]] = {}
    for sample, name in chosen:
        p: Any = sample.place.parameter
        placements = getattr(p, "placements", ())
        dims = tuple(i for i, placed in enumerate(placements) if not placed.is_replicate())
        mesh = p.device_mesh if dims else None
        by_ranks.setdefault((mesh, dims, None if dims else p.device), []).append((sample, name))
    for (mesh, dims, _), own in by_ranks.items():
        rows = torch.stack([sample.rows[name] for sample, name in own])
        largest = rows[:, _LARGEST].clone()
        for dim in dims:
            group = mesh.get_group(dim)
            torch.distributed.all_reduce(rows, group=group)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        rows[:, _LARGEST] = largest
        for (sample, name), row in zip(own, rows.cpu(), strict=True):
            sample.rows[name] = row


def parameter_reading(
    step: int, samples: Sequence[Sample], rates: Sequence[float | None]
) -> Reading:
    """Return the figures of some parameters, given the learning rates of groups."""
    count, dots = _figures([sample.rows[None] for sample in samples])
    dot, norm = list(map(sum_as_float, dots)), norm_as_float(dots[_UPDATE])
    movements = [
        _largest(sample) / rate for sample in samples if (rate := rates[sample.place.group])
    ]
    intended, square = count[_INTENDED], dot[_UPDATE]
    return Reading(
        step=step,
        edq=dot[_ALONG] / norm if norm else None,
        ratio=dot[_ALONG] / square if square else None,
        lost=count[_LOST] / intended if intended else None,
        ratio_leading=dot[_ALONG_LEADING] / square if square else None,
        lost_leading=count[_LOST_LEADING] / intended if intended else None,
        update_norm=norm,
        largest=max(movements) if movements and intended else None,
        numel=count[_NUMEL],
    )


def _largest(sample: Sample) -> float:
    dtype = sums_in(sample.place.parameter)
    bits = sample.rows[None][_LARGEST].to(PATTERNS[dtype.itemsize])
    return bits.view(dtype).item()


def state_reading(step: int, rows: Sequence[Tensor]) -> StateReading:
    """Return the figures of a state of some parameters."""
    count, dots = _figures(rows)
    dot = list(map(sum_as_float, dots))
    return StateReading(
        step=step,
        ratio=dot[_ALONG] / dot[_UPDATE] if dot[_UPDATE] else None,
        lost=count[_LOST] / count[_INTENDED] if count[_INTENDED] else None,
        zero=count[_ZERO] / count[_BESIDE] if count[_BESIDE] else None,
        saturated=count[_SATURATED],
        raised=count[_RAISED],
        numel=count[_NUMEL],
    )


def _figures(rows: Sequence[Tensor]) -> tuple[list[int], list[list[int]]]:
    """Return the counts and the accumulators of rows together."""
    total = sum(rows, start=_empty(torch.device("cpu")))
    return total[:_COUNTS].tolist(), total[_COUNTS:].view(_DOTS, SIZE).tolist()
