"""What an elementwise operation becomes, by its name and the kinds of its operands.

There are few kinds, and so this is worked out once for each; lists of thousands of tensors look it
up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcftensor.dispatch.operands import Number, longest_format, require_one_base
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels import Body, Signature
from mcftensor.passes.expressions import NUMBER, Expression, on_whole
from mcftensor.tensor.tensor import LiftedTensor, MCFTensor, Role

# An operation of `formulas.py`, and its operands.
Formula = tuple[str, Sequence[Any]]


def _is_one(x: Any) -> bool:
    return isinstance(x, Number) and x == 1


def _add(x: Any, y: Any, alpha: Any = 1) -> Formula:
    return ("add", (x, y)) if _is_one(alpha) else ("fma", (y, alpha, x))


def _sub(x: Any, y: Any, alpha: Any = 1) -> Formula:
    return ("sub", (x, y)) if _is_one(alpha) else ("fnma", (y, alpha, x))


def _addcmul(x: Any, a: Any, b: Any, value: Any = 1) -> Formula:
    return ("fma", (a, b, x)) if _is_one(value) else ("addcmul", (x, a, b, value))


# aten's name: how expansions carry it out. Operators that exist as name, name_ and name.out.
FORMULAS: dict[str, Callable[..., Formula]] = {
    "add": _add,  # every optimizer; residual connections of values
    "sub": _sub,
    "rsub": lambda x, y, alpha=1: _sub(y, x, alpha),  # 1 - x
    "mul": lambda x, y: ("mul", (x, y)),  # weight decay, decay of moments
    "div": lambda x, y: ("div", (x, y)),  # bias corrections
    "reciprocal": lambda x: ("div", (1.0, x)),
    "sqrt": lambda x: ("sqrt", (x,)),  # Adam's denominator
    "square": lambda x: ("square", (x,)),
    "addcmul": _addcmul,  # second moments
    "addcdiv": lambda x, a, b, value=1: ("addcdiv", (x, a, b, value)),  # Adam's update
    "lerp": lambda x, end, weight: ("lerp", (x, end, weight)),  # first moments
}


class Kind(NamedTuple):
    """What a plan depends on of an operand. Only expansions have a role."""

    format: Format
    role: Role | None = None
    has_dims: bool = False
    number: Literal["one", "other"] | None = None
    is_lifted: bool = False

    @property
    def stored(self) -> Format:
        """The format of what is read: a lifted tensor has no tails."""
        return PLAIN[self.format.dtype] if self.is_lifted else self.format


_NUMBER, _ONE = Kind(NUMBER, number="other"), Kind(NUMBER, number="one")


def kind_of(x: Any) -> Kind:
    """The kind of an operand."""
    if isinstance(x, MCFTensor):
        return Kind(x._format, x.acts_as, x.dim() > 0, is_lifted=type(x) is LiftedTensor)
    if isinstance(x, Tensor):
        return Kind(PLAIN[x.dtype])
    return _ONE if _is_one(x) else _NUMBER


_facts = attrgetter("_format", "_role")


def kinds_of(column: Sequence[Any]) -> list[Kind]:
    """The kinds of a column, one for all if they are seen to be alike."""
    return [kind_of(column[0])] if _look_alike(column) else list(map(kind_of, column))


def _look_alike(column: Sequence[Any]) -> bool:
    cls, *others = set(map(type, column))
    if others or torch.is_grad_enabled():
        return False
    if issubclass(cls, MCFTensor):
        return len(set(map(_facts, column))) == 1 and 0 not in map(Tensor.dim, column)
    if issubclass(cls, Tensor):
        return len({x.dtype for x in column}) == 1
    return 1 not in column


class Plan(NamedTuple):
    """An operation, as far as the kinds of its operands say what it is."""

    expression: Expression
    order: tuple[int | float, ...]
    """Of the operands; a float stands for itself."""
    role: Role
    on_whole: tuple[Body, Signature]
    """What runs on tensors of the result's shape and on numbers."""


class _Place(NamedTuple):
    number: int


@functools.lru_cache(maxsize=4096)
def plan(
    name: str, kinds: tuple[Kind, ...], keywords: tuple[str, ...], target: Format | None
) -> Plan:
    """What an operation on operands of these kinds becomes, the last of them given by keywords;
    its result is written into a target of some format, or is new.

    Raises:
        ValueError: expansions of unlike bases.
    """
    stand_ins = [1 if kind.number == "one" else _Place(i) for i, kind in enumerate(kinds)]
    count = len(kinds) - len(keywords)
    named = dict(zip(keywords, stand_ins[count:], strict=True))
    operation, found = FORMULAS[name](*stand_ins[:count], **named)
    own = [kind for kind in kinds if kind.role is not None]
    if target is None:
        format = longest_format(name, [x.format for x in own]).result
    else:
        require_one_base(name, [target, *(x.format for x in own)])
        format = target
    role: Role = "parameter" if all(x.role == "parameter" for x in own) else "value"
    read = [kinds[x.number] if isinstance(x, _Place) else _ONE for x in found]
    expression = Expression(operation, format)
    order = tuple(x.number if isinstance(x, _Place) else float(x) for x in found)
    flat = [(x.stored, x.number is not None) for x in read]
    return Plan(expression, order, role, on_whole(expression, flat))
