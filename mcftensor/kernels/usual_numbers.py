"""Programs for usual numbers, which take fewer instructions, and what tells that numbers are usual.

Unusual are NaNs, infinities and tiny numbers, and in blocks numbers from 2^127 on, and negative
ones where they would count as infinite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mcftensor.kernels.program import Instruction, Place, Program
from mcftensor.kernels.short_splits import with_short_splits

_LARGE = 0x7F000000
"""The pattern of 2^127: blocks with larger numbers are rare."""

# Operations on floats whose results are finite only if the operands are, and how many of these.
_TELLING = {
    **dict.fromkeys(("add", "sub", "mul", "neg", "abs", "sqrt", "fma", "to", "rest"), 3),
    **dict.fromkeys(("div", "copysign", "noised", "near"), 1),
}


@dataclass
class Usual:
    """What tells usual elements and blocks of a program, by places.

    Attributes:
        maxima: integers of blocks, and the largest that is usual.
        finite: floats that are neither infinite nor NaNs.
        rests: floats that are zero or at least 2^-124.
        positive: floats without a sign.
    """

    maxima: dict[int, int] = field(default_factory=dict)
    finite: list[int] = field(default_factory=list)
    rests: list[int] = field(default_factory=list)
    positive: list[int] = field(default_factory=list)


def for_usual_numbers(program: Program) -> tuple[Program, Usual] | None:
    """Return the program for usual numbers, and what tells them.

    None if the maxima of blocks do not tell, or if usual numbers take as many instructions.
    """
    program = with_short_splits(program)
    limits: dict[int, int] = {}  # by the magnitudes whose maximum tells
    for x in program.instructions:
        place, limit = _limit(program, x)
        if _has_maximum(program, place):
            limits[place] = min(limit, limits.get(place, limit))
    floats = {_of_magnitude(program, place): place for place in limits}
    signs = [x.operands[0] for x in program.instructions if x.name == "ge" and x.operands[1] == 0]
    positive = {place for place in floats if Place(place) in signs}
    new: list[Any] = []
    kept: list[Instruction] = []
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
            usual.positive.append(operands[0].index)
        elif (x.name == "abs" and first in positive) or (
            x.name == "and" and _of_magnitude(program, len(new)) in positive
        ):
            new.append(operands[0])
        elif x.name == "where" and operands[0] is True:
            new.append(operands[1])
        elif any(o is True for o in operands):
            return None
        elif x.name in ("quiet", "finite_or_zero"):
            new.append(operands[0])
            usual.finite.append(operands[0].index)
        else:
            if x.name == "rest":
                usual.rests.append(len(kept))
            if x.name == "block_max":
                known = {k: limit for k, limit in limits.items() if k < len(new)}
                found = {len(kept): known[k] for k in known if new[k] == operands[0]}
                usual.maxima.update(found)
            new.append(Place(len(kept)))
            kept.append(dataclasses.replace(x, operands=operands))
    if len(kept) == len(new) or len(usual.maxima) < len(limits):
        return None
    usual.finite, told = _last_of(usual.finite, kept)
    results = tuple([new[place.index] for place in program.results])
    numbers = frozenset(told).union(new[i].index for i in floats)
    return Program(program.signature, tuple(kept), results, numbers), usual


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
    return (zero.name, zero.operands) == ("eq", (second, 0)) and (
        sum_.name,
        set(sum_.operands),
    ) == (
        "add",
        {first, second},
    )


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
