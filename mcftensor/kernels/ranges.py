"""Ranges of integers in programs, and the choices that they decide."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mcftensor.kernels.program import Instruction

Range = tuple[int, int]
"""The least and the largest value."""

_INT32: Range = (-(1 << 31), (1 << 31) - 1)
_COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def range_of(x: Instruction, ranges: Mapping[int, Range]) -> Range | None:
    """Return the range of a result, given those of operands by their places; None if unknown."""
    if x.dtype == torch.uint8 and x.name != "to":
        return 0, 255
    known = [_of(o, ranges) for o in x.operands[-2:]]
    if x.dtype not in (torch.int32, torch.uint8) or not known:
        return None
    if x.name in ("and", "assured"):
        masks = [r[1] for r in known if r is not None and r[0] >= 0]
        return (0, min(masks)) if masks else None
    if known[0] is None or known[-1] is None:
        return None
    (a, b), (c, d) = known[0], known[-1]
    is_shift = c == d and 0 <= c < 32
    found: Range | None = {
        "to": (a, b),
        "constant": (a, b),
        "add": (a + c, b + d),
        "sub": (a - d, b - c),
        "shift_left": (a << c, b << c) if is_shift else None,
        "shift_right": (a >> c, b >> c) if is_shift else None,
        "minimum": (min(a, c), min(b, d)),
        "maximum": (max(a, c), max(b, d)),
        "where": (min(a, c), max(b, d)),
    }.get(x.name)
    return found if found is None or _INT32[0] <= found[0] <= found[1] <= _INT32[1] else None


def decided(x: Instruction, ranges: Mapping[int, Range]) -> Any:
    """Return the truth of a comparison, or the operand that a maximum or minimum is; None if ranges
    do not decide it.
    """
    if len(x.operands) != 2:
        return None
    first, second = [_of(o, ranges) for o in x.operands]
    if first is None or second is None:
        return None
    (a, b), (c, d) = first, second
    if x.name in _COMPARISONS:
        compare = _COMPARISONS[x.name]
        return compare(a, d) if compare(a, d) == compare(b, c) else None
    if x.name == "eq":
        return False if b < c or d < a else None
    if x.name in ("maximum", "minimum"):
        larger, smaller = x.operands if x.name == "maximum" else x.operands[::-1]
        return larger if a >= d else smaller if c >= b else None
    return None


def _of(x: Any, ranges: Mapping[int, Range]) -> Range | None:
    return (x, x) if isinstance(x, int) else ranges.get(getattr(x, "index", -1))
