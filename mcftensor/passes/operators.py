"""The table of elementwise operations with kernels, one row for each.

All uses of an operation follow from its row: the handlers of `add`, `add_`, `add` with `out=`,
`_foreach_add` and `_foreach_add_`, the deferred form in a step and its methods, and the operators
that stay opaque to compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Number = (int, float, torch.SymInt, torch.SymFloat)

# The name of an operation in `arithmetic/formulas.py`, and its operands.
Formula = tuple[str, Sequence[Any]]


class Operator(NamedTuple):
    """An operation of aten, with its forms `name_`, `name.out` and `_foreach_name`."""

    name: str
    operands: int
    """The number of positional operands."""
    formula: Callable[..., Formula]
    """The formula of its operands. A number may be given as 1, which saves an operation."""
    keyword: str | None = None
    """The name of a number passed by keyword; in list operations `value` may be the last positional
    argument."""
    symbol: str | None = None
    """The name of the Python operator."""


def _is_one(x: Any) -> bool:
    return isinstance(x, Number) and x == 1


def _add(x: Any, y: Any, alpha: Any = 1) -> Formula:
    return ("add", (x, y)) if _is_one(alpha) else ("fma", (y, alpha, x))


def _sub(x: Any, y: Any, alpha: Any = 1) -> Formula:
    return ("sub", (x, y)) if _is_one(alpha) else ("fnma", (y, alpha, x))


def _addcmul(x: Any, a: Any, b: Any, value: Any = 1) -> Formula:
    return ("fma", (a, b, x)) if _is_one(value) else ("addcmul", (x, a, b, value))


_ROWS = (
    # Every optimizer; residual connections of values.
    Operator("add", 2, _add, "alpha", symbol="add"),
    Operator("sub", 2, _sub, "alpha", symbol="sub"),
    # 1 - x
    Operator("rsub", 2, lambda x, y, alpha=1: _sub(y, x, alpha), "alpha"),
    # Weight decay, decay of moments.
    Operator("mul", 2, lambda x, y: ("mul", (x, y)), symbol="mul"),
    # Bias corrections.
    Operator("div", 2, lambda x, y: ("div", (x, y)), symbol="truediv"),
    Operator("reciprocal", 1, lambda x: ("div", (1.0, x))),
    # Adam's denominator.
    Operator("sqrt", 1, lambda x: ("sqrt", (x,))),
    Operator("square", 1, lambda x: ("square", (x,))),
    # Second moments.
    Operator("addcmul", 3, _addcmul, "value"),
    # Adam's update.
    Operator("addcdiv", 3, lambda x, a, b, value=1: ("addcdiv", (x, a, b, value)), "value"),
    # First moments.
    Operator("lerp", 3, lambda x, end, weight: ("lerp", (x, end, weight))),
)
OPERATORS = {row.name: row for row in _ROWS}
