"""Readings: the losses of one step, from the step on copies to the figures; and the intended
change of each state, with the share that was kept.

All sums are exact: counts, and accumulators of dot products (`sums/accumulators.py`). They are
rounded once, after those of all parameters and ranks have been added, so figures do not depend on
how elements are divided among ranks, blocks and threads.

A second moment that is frozen, or zero with a non-zero first moment, changes the length of updates,
and the loss need not show it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mcftensor.convert import as_expansion, as_plain
from mcftensor.kernels.program import PATTERNS
from mcftensor.kernels.without_float64 import PAIR
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
    """A step of one parameter on copies: exact sums over its elements, and the results."""

    place: Place
    sums: Tensor
    """int64: the columns below."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """The columns of states, by name."""
    fingerprints: dict[object, Tensor] = field(default_factory=dict)
    error: str | None = None


# The columns of a parameter: counts, the bits of the largest movement, and then accumulators of dot
# products.
_COUNTS = 7
_INTENDED, _LOST, _LOST_LEADING, _NUMEL, DIFFERS, FAILED, _LARGEST = range(_COUNTS)
_DOTS = 3
_UPDATE, _ALONG, _ALONG_LEADING = range(_DOTS)


def take_samples(
    original: Original, batch: list[Place], loss: Callable[[], Any] | None
) -> list[Sample]:
    """Take the coming step on copies of a batch of parameters at once.

    Parameters without a gradient are stepped with the others, and give no sample.
    """
    parameters = [place.parameter for place in batch]
    measured = [place for place in batch if place.parameter.grad is not None]
    failure = DIFFERS  # The real step is taken with the other parameters, and may be another.
    try:
        for place in measured:
            wide_type(place.parameter)
        after = original.step(parameters, same, loss)
        failure = FAILED
        wide = _wide_step(original, parameters, after, loss)
        with torch.no_grad():
            return [
                Sample(
                    place,
                    _sums(place.parameter, p, w),
                    _state_sums(original.states_of(place.parameter), state, other, p),
                    _fingerprints(p, state),
                )
                for place, (p, state), (w, other) in zip(batch, after, wide, strict=True)
                if place.parameter.grad is not None
            ]
    except Exception as error:  # noqa: BLE001 (a meter that fails must not stop the training)
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, CannotShadow):
            failure = FAILED
        else:
            reason = f"{type(error).__name__}: {reason}"
        return [
            Sample(place, _failed(place.parameter, failure), error=reason) for place in measured
        ]


def _failed(parameter: Tensor, failure: int) -> Tensor:
    sums = _empty(_COUNTS, _DOTS, parameter.device)
    sums[failure] = 1
    return sums


def _empty(counts: int, dots: int, device: torch.device) -> Tensor:
    return torch.zeros(counts + dots * SIZE, dtype=torch.int64, device=device)


def _row(counts: Sequence[Any], dots: Tensor) -> Tensor:
    """Return columns: counts, each a number or a tensor, and accumulators."""
    row = _empty(len(counts), dots.shape[1], dots.device)
    for i, count in enumerate(counts):
        row[i] = count
    row[len(counts) :] = dots.t().flatten()
    return row


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


# Elements whose intermediate tensors fit into the caches of a CPU together; on a GPU they only
# have to be few enough.
_CPU_BLOCK = 1 << 17
_BLOCK = 1 << 24


def _sums(before: Tensor, after: Tensor, wide: Tensor) -> Tensor:
    """Return the columns of a parameter, from the elements on this rank."""
    size = _CPU_BLOCK if before.device.type == "cpu" else _BLOCK
    blocks = zip(*(local(x).reshape(-1).split(size) for x in (before, after, wide)), strict=True)
    return _added(torch.stack([_block_sums(*block) for block in blocks]))


def _added(rows: Tensor) -> Tensor:
    """Return the columns of many rows together."""
    total = rows.sum(0)
    total[_LARGEST] = rows[:, _LARGEST].amax()
    return total


def _block_sums(before: Tensor, after: Tensor, wide: Tensor) -> Tensor:
    difference = wide - widened(before, before, "parameter")
    difference = torch.view_as_real(difference) if difference.is_complex() else difference
    wanted = sums_in(before)
    intended = as_plain(difference, wanted).flatten()
    is_intended = intended != 0
    moves, stays, stayed = [], [], is_intended
    for old, new in zip(_parts(before), _parts(after), strict=True):
        old, new = old.flatten().to(wanted), new.flatten().to(wanted)
        moves.append(new - old)
        stayed = stayed & ((new == old) | (torch.isnan(new) & torch.isnan(old)))
        stays.append(stayed)
    moved = sum(moves[1:], start=moves[0])
    counts = [is_intended.sum(), stayed.sum(), stays[0].sum(), before.numel(), 0, 0]
    dots = accumulate_dots(intended, (intended, moved, moves[0]))
    return _row([*counts, _bits_of_largest(moved)], dots)


def _bits_of_largest(x: Tensor) -> Tensor | int:
    """Return the bits of the largest magnitude, of NaN if there is one: these have an order."""
    if not x.numel():
        return 0
    largest = x.abs().amax()
    largest = torch.where(largest.isnan(), torch.nan, largest)
    return largest.view(PATTERNS[x.element_size()])


def _number_of(bits: int, dtype: torch.dtype) -> float:
    whole, real = ("q", "d") if dtype == torch.float64 else ("i", "f")
    return float(struct.unpack(real, struct.pack(whole, bits))[0])


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


def totals(samples: list[Sample], states: Mapping[Tensor, Any]) -> Tensor:
    """Return the columns of each sample after the real step, over all ranks with parts.

    The rows are on the CPU, as are those of states, which are replaced in the samples.
    """
    for sample in samples:
        p = sample.place.parameter
        real = _fingerprints(p, states.get(p, {})) if sample.fingerprints else {}
        for name in sample.fingerprints.keys() & real.keys():
            sample.sums[DIFFERS] += sample.fingerprints[name] != real[name]
    sharded: dict[Any, list[Sample]] = {}
    for sample in samples:
        placements = getattr(sample.place.parameter, "placements", ())
        dims = tuple(i for i, placed in enumerate(placements) if not placed.is_replicate())
        if dims:
            mesh = sample.place.parameter.device_mesh  # type: ignore[attr-defined]
            sharded.setdefault((mesh, dims), []).append(sample)
    for (mesh, dims), parts in sharded.items():
        rows = torch.stack([sample.sums for sample in parts])
        largest = rows[:, _LARGEST].clone()
        changes = torch.stack([*_state_rows(parts), _empty(_S_COUNTS, _S_DOTS, rows.device)])
        for dim in dims:
            group = mesh.get_group(dim)
            torch.distributed.all_reduce(rows, group=group)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
            torch.distributed.all_reduce(changes, group=group)
        rows[:, _LARGEST] = largest
        own = iter(changes)
        for sample, row in zip(parts, rows, strict=True):
            sample.sums = row
            sample.states = {name: next(own) for name in sample.states}
    device = samples[0].sums.device
    columns = _state_rows(samples)
    if columns:
        own = iter(torch.stack([x.to(device) for x in columns]).cpu())
        for sample in samples:
            sample.states = {name: next(own) for name in sample.states}
    return torch.stack([sample.sums.to(device) for sample in samples]).cpu()


def _state_rows(samples: Sequence[Sample]) -> list[Tensor]:
    return [x for sample in samples for x in sample.states.values()]


def readings(
    step: int,
    rows: Tensor,
    places: Sequence[Place],
    rates: Sequence[float | None],
    parts: Sequence[Sequence[int]],
) -> list[Reading]:
    """Return the figures of parts of the parameters, given as numbers of rows.

    Args:
        step: the number of the step.
        rows: the columns of parameters.
        places: the places of the parameters.
        rates: the learning rates of parameters.
        parts: for each reading, its rows.
    """
    largest = [
        (_number_of(bits, sums_in(place.parameter)), rate)
        for bits, place, rate in zip(rows[:, _LARGEST].tolist(), places, rates, strict=True)
    ]
    counts, dots, norms = _figures(rows, parts, _COUNTS, _DOTS)
    found = []
    for part, count, dot, norm in zip(parts, counts, dots, norms, strict=True):
        movements = [x / rate for x, rate in (largest[i] for i in part) if rate]
        intended = count[_INTENDED]
        found.append(
            Reading(
                step=step,
                edq=dot[_ALONG] / norm if norm else None,
                ratio=dot[_ALONG] / dot[_UPDATE] if dot[_UPDATE] else None,
                lost=count[_LOST] / intended if intended else None,
                ratio_leading=dot[_ALONG_LEADING] / dot[_UPDATE] if dot[_UPDATE] else None,
                lost_leading=count[_LOST_LEADING] / intended if intended else None,
                update_norm=norm,
                largest=max(movements) if movements and intended else None,
                numel=count[_NUMEL],
            )
        )
    return found


def _figures(
    rows: Tensor, parts: Sequence[Sequence[int]], counts: int, dots: int
) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Return counts, dot products and the root of the first of these, of each part of the rows."""
    totals = torch.stack([rows[list(part)].sum(0) for part in parts])
    accumulators = totals[:, counts:].view(-1, dots, SIZE).tolist()
    return (
        totals[:, :counts].tolist(),
        [[sum_as_float(x) for x in row] for row in accumulators],
        [norm_as_float(row[0]) for row in accumulators],
    )


def _components(x: Tensor) -> tuple[Tensor, ...]:
    if isinstance(x, MCFTensor):
        return x._read()
    if is_of_others(x):
        inner, _ = x.__tensor_flatten__()
        return tuple(t for name in inner for t in _components(getattr(x, name)))
    return (torch.view_as_real(x) if x.is_complex() else x,)


def _parts(x: Tensor) -> Sequence[Tensor]:
    """Return floats whose sum is the number; models compute with the first."""
    if not isinstance(x, MCFTensor) or x.format.arithmetic == "terms":
        return _components(x)
    return x.compute_tensor, x._collapsed(sums_in(x)) - x.compute_tensor


# ---------------------------------------------------------------------------------- states

# The columns of a state: counts, and then accumulators of dot products.
_S_COUNTS = 7
_CHANGES, _S_LOST, _BESIDE, _ZERO, _SATURATED, _RAISED, _S_NUMEL = range(_S_COUNTS)
_S_DOTS = 2
_S_INTENDED, _S_ALONG = range(_S_DOTS)


def _state_sums(
    before: Mapping[str, Any], after: Mapping[str, Any], wide: Mapping[str, Any], like: Tensor
) -> dict[str, Tensor]:
    """Return the columns of each state in the shape of its parameter, on this rank.

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
        parts = zip(*map(_rows, four), strict=False)  # nothing comes without end
        sums = [_row_sums(*part) for part in parts]
        empty = _empty(_S_COUNTS, _S_DOTS, local(x).device)
        found[name] = torch.stack([empty, *sums]).sum(0)
        saturated = saturated_blocks(x)
        if saturated is not None:
            found[name][_SATURATED] = saturated
        raised = raised_blocks(x)
        if raised is not None:
            found[name][_RAISED] = raised
    return found


def state_readings(
    step: int, rows: Sequence[Tensor], parts: Sequence[Sequence[int]]
) -> list[StateReading]:
    """Return the figures of parts of the states, given as numbers of rows of columns."""
    if not rows:
        return []
    counts, dots, _ = _figures(torch.stack(list(rows)), parts, _S_COUNTS, _S_DOTS)
    return [
        StateReading(
            step=step,
            ratio=dot[_S_ALONG] / dot[_S_INTENDED] if dot[_S_INTENDED] else None,
            lost=count[_S_LOST] / count[_CHANGES] if count[_CHANGES] else None,
            zero=count[_ZERO] / count[_BESIDE] if count[_BESIDE] else None,
            saturated=count[_SATURATED],
            raised=count[_RAISED],
            numel=count[_S_NUMEL],
        )
        for count, dot in zip(counts, dots, strict=True)
    ]


def _is_like(x: Any, like: Tensor) -> bool:
    if not isinstance(x, Tensor) or is_of_others(x):
        return False
    return x.shape == like.shape and x.is_floating_point()


def _rows(x: Tensor | None) -> Iterator[Any]:
    """Yield the numbers in float64, or in two float32 terms without it, whole rows at a time.

    For no tensor, yield None repeatedly.
    """
    if x is None:
        return itertools.repeat(None)
    own = local(x.detach())
    if not own.dim():
        return iter([_resolved(own).view(1)])
    rows = max(1, _CPU_BLOCK // max(1, own.numel() // max(1, own.shape[0])))
    return (_resolved(part).flatten() for part in own.split(rows) if part.numel())


def _resolved(x: Tensor) -> Tensor:
    wanted = sums_in(x)
    if wanted == torch.float64:
        return as_plain(x, wanted)
    return as_expansion(x, PAIR)


def _row_sums(before: Tensor | None, after: Tensor, wide: Tensor, beside: Tensor | None) -> Tensor:
    old = torch.zeros_like(after) if before is None else before
    wanted = sums_in(after)
    intended, moved = as_plain(wide - old, wanted), as_plain(after - old, wanted)
    changes = intended != 0
    is_beside = torch.zeros_like(changes) if beside is None else beside != 0
    counts = [
        changes.sum(),
        (changes & (moved == 0)).sum(),
        is_beside.sum(),
        (is_beside & (after == 0)).sum(),
        0,  # saturated and raised blocks, which are counted over whole states
        0,
        after.numel(),
    ]
    return _row(counts, accumulate_dots(intended, (intended, moved)))
