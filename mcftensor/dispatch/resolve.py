"""Plans of elementwise operations, by the name of the operation and the kinds of its operands.

There are few kinds. Each plan is made once, and lists of thousands of tensors look it up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcftensor.formats import PLAIN, Format
from mcftensor.formats.promotion import longest_format, require_one_base
from mcftensor.kernels import Body, Signature
from mcftensor.passes.expressions import NUMBER, Expression, on_whole
from mcftensor.passes.operators import OPERATORS, Number
from mcftensor.tensor import GradientTensor, MCFTensor, Role


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """The properties of an operand that a plan depends on; `kind` makes one object of each.

    Only expansions have a role.
    """

    format: Format
    role: Role | None = None
    has_dims: bool = False
    number: Literal["one", "other"] | None = None
    is_gradient: bool = False

    @property
    def stored(self) -> Format:
        """Return the format to read: a gradient tensor has no tails."""
        return PLAIN[self.format.dtype] if self.is_gradient else self.format


kind = functools.lru_cache(maxsize=1024)(Kind)
_NUMBER, _ONE = kind(NUMBER, None, False, "other"), kind(NUMBER, None, False, "one")


def kind_of(x: Any) -> Kind:
    """Return the kind of an operand."""
    if isinstance(x, MCFTensor):
        return kind(x._format, x.acts_as, x.dim() > 0, None, isinstance(x, GradientTensor))
    if isinstance(x, Tensor):
        return kind(PLAIN[x.dtype], None, x.dim() > 0)
    return _ONE if isinstance(x, Number) and x == 1 else _NUMBER


_facts = attrgetter("_format", "_role")
_dtype = attrgetter("dtype")


def kinds_of(column: Sequence[Any]) -> list[Kind]:
    """Return the kinds of a column, a single one if all are found equal."""
    return [kind_of(column[0])] if _look_alike(column) else list(map(kind_of, column))


def _look_alike(column: Sequence[Any]) -> bool:
    if len(column) == 1:
        return True
    cls, *others = set(map(type, column))
    if others or torch.is_grad_enabled():
        return False
    if issubclass(cls, Tensor):
        facts = _facts if issubclass(cls, MCFTensor) else _dtype
        return len(set(map(facts, column))) == 1 and 0 not in map(Tensor.dim, column)
    return 1 not in column


class Plan(NamedTuple):
    """An operation on terms, resolved by the kinds of its operands."""

    expression: Expression
    order: tuple[int | float, ...]
    """The order of the operands; a float is a constant."""
    read: tuple[Kind, ...]
    """The kinds of the operands in that order."""
    role: Role
    on_whole: tuple[Body, Signature]
    """The kernel for tensors in the shape of the result. Tensors without dimensions are scalars,
    as numbers are."""


class _Place(NamedTuple):
    number: int


@functools.lru_cache(maxsize=4096)
def plan(
    name: str, kinds: tuple[Kind, ...], keywords: tuple[str, ...], target: Format | None
) -> Plan | None:
    """Return how an operation on operands of these kinds is carried out.

    The last operands are given by keywords. The result is new, or is written into a target of
    some format.

    Returns:
        The plan, or None if PyTorch's own operation carries it out: on numbers of storage
        formats, or on the leading terms of parameters.

    Raises:
        ValueError: expansions of unlike bases.
    """
    ours = [x for x in kinds if x.role is not None]
    formats = [x.format for x in ours]
    written = [] if target is None else [target]
    if target is None:
        are_values = any(x.role == "value" for x in ours)
        plain = [x.has_dims for x in kinds if x.role is None and x.number is None]
        if not ours or (not are_values and uses_leading([x.has_dims for x in ours], plain)):
            return None
    if all(x.arithmetic == "numbers" for x in [*formats, *written]) or any(
        x.shared for x in formats
    ):
        return None
    if target is None:
        format = longest_format(name, formats).result
    else:
        format = target
        require_one_base(name, (target, *formats))
    stand_ins = [1 if x.number == "one" else _Place(i) for i, x in enumerate(kinds)]
    count = len(kinds) - len(keywords)
    named = dict(zip(keywords, stand_ins[count:], strict=True))
    operation, found = OPERATORS[name].formula(*stand_ins[:count], **named)
    role: Role = "parameter" if all(x.role == "parameter" for x in ours) else "value"
    read = tuple(kinds[x.number] if isinstance(x, _Place) else _ONE for x in found)
    expression = Expression(operation, format)
    order = tuple(x.number if isinstance(x, _Place) else float(x) for x in found)
    flat = [(x.stored, not x.has_dims) for x in read]
    return Plan(expression, order, read, role, on_whole(expression, flat))


def uses_leading(ours: Iterable[bool], plain: Iterable[bool]) -> bool:
    """Return whether an operation uses leading components: it does if all expansions are
    parameters and a plain tensor is among its operands.

    A 0-d plain tensor counts as a number if the expansions have dimensions.

    Args:
        ours: whether each expansion has dimensions.
        plain: whether each plain tensor has dimensions.
    """
    least = any(ours)
    return any(has_dims >= least for has_dims in plain)
