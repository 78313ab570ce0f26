"""Programs for usual numbers, which take fewer instructions, and what tells that numbers are usual.

Unusual are NaNs, infinities and tiny numbers, and in blocks numbers from 2^126 on, and negative
ones where they would count as infinite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mcftensor.kernels.program import Instruction, Place, Program, finished
from mcftensor.kernels.ranges import Range, decided, range_of
from mcftensor.kernels.short_splits import with_short_splits

_LARGE = 0x7F000000
"""The pattern of 2^127, from which on programs distinguish numbers."""

_LARGEST = 0x7E7FFFFF
"""The pattern of the last number before 2^126: blocks with larger ones are rare."""

# Operations on floats whose results are finite only if the operands are, and how many of these.
_TELLING = {
    **dict.fromkeys(("add", "sub", "mul", "neg", "abs", "sqrt", "fma", "to", "rest"), 3),
    **dict.fromkeys(("div", "copysign", "noised", "near"), 1),
}

_TO_INTEGER = ("to", torch.int32)


@dataclass
class Usual:
    """What tells usual elements and blocks of a program, by places.

    Attributes:
        maxima: integers of blocks, and the largest that is usual: maxima, and codes of scales.
        finite: floats that are neither infinite nor NaNs.
        rests: floats that are zero or at least 2^-124.
    """

    maxima: dict[int, int] = field(default_factory=dict)
    finite: list[int] = field(default_factory=list)
    rests: list[int] = field(default_factory=list)


def for_usual_numbers(program: Program) -> tuple[Program, Usual] | None:
    """Return the program for usual numbers, and what tells them.

    None if the maxima of blocks do not tell, or if usual numbers take as many instructions.
    """
    program = with_short_splits(program)
    limits: dict[int, int] = {}  # by the magnitudes whose maximum tells
    for x in program.instructions:
        place, limit = _limit(program, x)
        if _has_maximum(program, place):
            limits[place] = min(limit, _LARGEST)
    floats = {_of_magnitude(program, place): place for place in limits}
    signs = [x.operands[0] for x in program.instructions if x.name == "ge" and x.operands[1] == 0]
    positive = {place for place in floats if Place(place) in signs}
    new: list[Any] = []  # places, and known truth values
    kept: list[Instruction] = []
    ranges: dict[int, Range] = {}
    usual = Usual()
    for x in program.instructions:
        operands = tuple([new[o.index] if isinstance(o, Place) else o for o in x.operands])
        first = x.operands[0].index if isinstance(x.operands[0], Place) else -1
        if _limit(program, x)[0] in limits:
            new.append(True if x.name == "lt" else Place(len(kept)))
            if x.name == "minimum":
                kept.append(Instruction("assured", operands, x.dtype))
        elif x.name == "ge" and first in positive and x.operands[1] == 0:
            new.append(True)
        elif (x.name == "abs" and first in positive) or (
            x.name == "and" and _of_magnitude(program, len(new)) in positive
        ):
            new.append(operands[0])
        elif x.name == "where" and isinstance(operands[0], bool):
            new.append(operands[1 if operands[0] else 2])
        elif any(isinstance(o, bool) for o in operands) and (x.name, x.dtype) != _TO_INTEGER:
            return None
        elif x.name in ("quiet", "finite_or_zero"):
            new.append(operands[0])
            usual.finite.append(operands[0].index)
        else:
            if x.name == "rest":
                usual.rests.append(len(kept))
            y = dataclasses.replace(x, operands=operands)
            known = [limits[k] for k in limits if k < len(new) and new[k] == operands[0]]
            if x.name == "block_max" and known:  # bits with a sign are the largest, too
                y = dataclasses.replace(y, name="unsigned_max")
                usual.maxima[len(kept)] = known[0]
            scale = _scale_of_largest(y, kept, ranges)
            if scale is not None:
                usual.maxima[scale] = ranges[scale][1] - 1
                ranges[scale] = ranges[y.operands[0].index] = 0, usual.maxima[scale]
            result = decided(y, ranges)
            if result is None:
                range_ = range_of(y, ranges)
                if y.name == "unsigned_max":
                    range_ = 0, usual.maxima[len(kept)]
                if range_ is not None:
                    ranges[len(kept)] = range_
                    if range_[0] == range_[1]:
                        y = Instruction("constant", (int(range_[0]),), y.dtype)
                result = Place(len(kept))
                kept.append(y)
            new.append(result)
    told = [x for x in kept if x.name == "unsigned_max"]
    if len(kept) == len(new) or len(told) < len(limits):
        return None
    results = tuple([new[place.index] for place in program.results])
    numbers = [new[i].index for i in floats]
    return _finished(Program(program.signature, tuple(kept), results), usual, numbers)


def _finished(program: Program, usual: Usual, numbers: Sequence[int]) -> tuple[Program, Usual]:
    """Leave out instructions without a use, and tests that others imply."""
    places = [*usual.maxima, *usual.finite, *usual.rests, *numbers]
    needed = (*program.results, *map(Place, places))
    whole = finished(dataclasses.replace(program, results=needed), {})
    count = len(program.results)
    new = {old: x.index for old, x in zip(places, whole.results[count:], strict=True)}
    finite, told = _last_of([new[i] for i in usual.finite], whole.instructions)
    known = frozenset(told).union(new[i] for i in numbers)
    return (
        Program(program.signature, whole.instructions, whole.results[:count], known),
        Usual(
            {new[i]: limit for i, limit in usual.maxima.items()},
            finite,
            [new[i] for i in usual.rests],
        ),
    )


def _scale_of_largest(
    x: Instruction, instructions: Sequence[Instruction], ranges: Mapping[int, Range]
) -> int | None:
    """Return the place of a scale whose code is compared with the largest one, which is one of NaNs
    or infinities, or None.
    """
    if x.name != "eq" or not isinstance(x.operands[0], Place):
        return None
    (place, largest), scale = x.operands, x.operands[0].index
    if instructions[scale].name == "to":
        scale = instructions[scale].operands[0].index
    is_scale = instructions[scale].name == "shared" and instructions[scale].dtype == torch.uint8
    return scale if is_scale and largest == ranges.get(place.index, (0, 0))[1] else None


def _last_of(
    places: Sequence[int], instructions: Sequence[Instruction]
) -> tuple[list[int], set[int]]:
    """Return those floats that are finite only if all are, and all floats that then are finite."""
    last: list[int] = []
    told: set[int] = set()
    for i in reversed(range(len(instructions))):
        x = instructions[i]
        if i in places and i not in told:
            last.append(i)
            told.add(i)
        if i in told and x.dtype.is_floating_point:
            operands = x.operands[: _TELLING.get(x.name, 0)]
            if x.name == "where" and _is_sum(x, instructions):
                operands = x.operands[2:]
            told.update(o.index for o in operands if isinstance(o, Place))
    return last, told


def _is_sum(x: Instruction, instructions: Sequence[Instruction]) -> bool:
    """Whether a choice is a sum, but its first term if the second one is zero."""
    condition, first, total = x.operands
    if not all(isinstance(o, Place) for o in x.operands):
        return False
    zero, sum_ = instructions[condition.index], instructions[total.index]
    second = zero.operands[0]
    is_zero = (zero.name, zero.operands) == ("eq", (second, 0))
    return is_zero and sum_.name == "add" and set(sum_.operands) == {first, second}


def _of_magnitude(program: Program, place: int) -> int:
    """Return the place of the float whose bits without the sign an integer is, or -1."""
    x = program.instructions[place]
    if x.name != "and" or x.operands[1] != 0x7FFFFFFF:
        return -1
    bits = program.instructions[x.operands[0].index]
    is_float = bits.name == "bits" and program.instructions[bits.operands[0].index].dtype
    return bits.operands[0].index if is_float == torch.float32 else -1


def _limit(program: Program, x: Instruction) -> tuple[int, int]:
    """Return the place of a magnitude that x compares with a large one, and its largest value
    for which x is known; or -1 and 0."""
    if x.name not in ("lt", "minimum") or not isinstance(x.operands[0], Place):
        return -1, 0
    place, limit = x.operands
    if isinstance(limit, Place) and program.instructions[limit.index].name == "constant":
        (limit,) = program.instructions[limit.index].operands
    is_large = isinstance(limit, int) and limit >= _LARGE
    if not is_large or _of_magnitude(program, place.index) < 0:
        return -1, 0
    return place.index, limit - (x.name == "lt")


def _has_maximum(program: Program, place: int) -> bool:
    """Whether blocks have the maximum of a magnitude, or of a choice of it that is usual."""
    for x in program.instructions:
        if place >= 0 and x.name == "block_max":
            of = program.instructions[x.operands[0].index]
            if x.operands[0].index == place:
                return True
            if of.name == "where" and of.operands[1] == Place(place):
                condition = program.instructions[of.operands[0].index]
                of_float = Place(_of_magnitude(program, place))
                is_sign = condition.name == "ge" and condition.operands == (of_float, 0)
                return is_sign or _limit(program, condition)[0] == place
    return False
