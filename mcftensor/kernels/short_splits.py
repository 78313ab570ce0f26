"""Splits of a float32 into two bfloat16 terms in fewer instructions, with the same bits.

They hold for numbers that are zero or not tiny, and finite (`usual_numbers.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from mcftensor.kernels.program import Instruction, Place, Program, finished

# How a number becomes two normalized bfloat16 terms, of which `first` is the first one as float32:
# the sum of two roundings is rounded again. See `arithmetic/rounding.py`. Names stand for numbers.
_ONCE = ("to", ("to", "number"))
_TOTAL = ("sub", _ONCE, ("to", ("to", ("finite_or_zero", ("sub", _ONCE, "number")))))
_REST = ("finite_or_zero", ("sub", _TOTAL, "first"))
# By noise: a rounded term and the rest, which noise rounds, have a sum that is rounded again.
_FIRST = ("to", ("add", "sum", 0.0))
_SUM = ("add", _ONCE, "second")
_SECOND = ("bits", ("and", ("add", ("bits", ("finite_or_zero", "rest")), "noise"), -(1 << 16)))

_OF_A_SPLIT = (torch.float32, torch.bfloat16, torch.int32)


def with_short_splits(program: Program) -> Program:
    """Return the program with splits of numbers that are not tiny.

    The first term is rounded with wider ties, and the second one is the rounded rest. Where noise
    rounds the rest, their sum is near the number, and is rounded to the last place of its binade.
    """
    new, users = list(program.instructions), program.users()
    for i in range(len(new)):
        _shorten(program, i, users, new)
        _shorten_with_noise(program, i, new)
    return finished(dataclasses.replace(program, instructions=tuple(new)), {})


def _shorten(program: Program, i: int, users: Sequence[set[int]], new: list[Instruction]) -> None:
    found: dict[str, Place] = {}
    is_rest = _is_like(program, Place(i), _REST, found)
    if not is_rest or any(k < 0 or new[k].name != "narrow" for k in users[i]):
        return
    (first,) = program.instructions[found["first"].index].operands
    if _is_like(program, first, ("to", _TOTAL), found):
        number, (difference,) = found["number"], new[i].operands
        new[first.index] = Instruction("leading", (number,), torch.bfloat16)
        new[difference.index] = Instruction("rest", (number, found["first"]), torch.float32)
        for k in users[i]:
            new[k] = dataclasses.replace(new[k], name="to")


def _shorten_with_noise(program: Program, i: int, new: list[Instruction]) -> None:
    found: dict[str, Place] = {}
    if (
        _is_like(program, Place(i), _FIRST, found)
        and _is_like(program, found["sum"], _SUM, found)
        and _is_like(program, found["second"], _SECOND, found)
    ):
        noised = Instruction("noised", (found["rest"], found["noise"]), torch.float32)
        new[found["second"].index] = noised
        new[i] = Instruction("near", (found["sum"], found["number"]), torch.bfloat16)


def _is_like(program: Program, place: Any, pattern: Any, found: dict[str, Place]) -> bool:
    """Whether an operand is computed like a pattern, whose names stand for values of 32 bits."""
    if not isinstance(place, Place):
        return bool(place == pattern)
    x = program.instructions[place.index]
    if isinstance(pattern, str):
        return x.dtype.itemsize == 4 and found.setdefault(pattern, place) == place
    if not isinstance(pattern, tuple) or x.name != pattern[0] or x.dtype not in _OF_A_SPLIT:
        return False
    parts = zip(x.operands, pattern[1:], strict=True)
    return all(_is_like(program, o, part, found) for o, part in parts)
