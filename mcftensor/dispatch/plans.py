"""How expansions carry out elementwise operations: as expressions of `elementwise.py`.

What an operation becomes depends on its name and on the kinds of its operands, of which there are
few; it is worked out once for each, and lists of thousands of tensors look it up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcftensor.deferred import LONGEST
from mcftensor.dispatch.operands import Number, longest_format, require_one_base, terms
from mcftensor.elementwise import Expression, Operand, arity, length, parsed, shifted
from mcftensor.formats import Format
from mcftensor.noise import key_for
from mcftensor.tensor import MCFTensor, Role

# An expression without formats, and its operands.
Plan = tuple[tuple[Any, ...], Sequence[Any]]


def _is_one(x: Any) -> bool:
    return isinstance(x, Number) and x == 1


def _add(x: Any, y: Any, alpha: Any = 1) -> Plan:
    if _is_one(alpha):
        return ("add", 0, 1), (x, y)
    return ("fma", 0, 1, 2), (y, alpha, x)


def _sub(x: Any, y: Any, alpha: Any = 1) -> Plan:
    if _is_one(alpha):
        return ("add", 0, ("neg", 1)), (x, y)
    return ("fma", 0, ("neg", 1), 2), (y, alpha, x)


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Plan:
    return _sub(y, x, alpha)


def _mul(x: Any, y: Any) -> Plan:
    return ("mul", 0, 1), (x, y)


def _div(x: Any, y: Any) -> Plan:
    return ("div", 0, 1), (x, y)


def _reciprocal(x: Any) -> Plan:
    return ("div", 0, 1), (1.0, x)


def _sqrt(x: Any) -> Plan:
    return ("sqrt", 0), (x,)


def _square(x: Any) -> Plan:
    return ("mul", 0, 0), (x,)


def _addcmul(x: Any, a: Any, b: Any, value: Any = 1) -> Plan:
    if _is_one(value):
        return ("fma", 0, 1, 2), (a, b, x)
    return ("addcmul", 0, 1, 2, 3), (x, a, b, value)


def _addcdiv(x: Any, a: Any, b: Any, value: Any = 1) -> Plan:
    return ("addcdiv", 0, 1, 2, 3), (x, a, b, value)


def _lerp(x: Any, end: Any, weight: Any) -> Plan:
    return ("lerp", 0, 1, 2), (x, end, weight)


# aten's name: how expansions carry it out. Operators that exist as name, name_ and name.out.
PLANS: dict[str, Callable[..., Plan]] = {
    "add": _add,  # every optimizer; residual connections of values
    "sub": _sub,
    "rsub": _rsub,  # 1 - x
    "mul": _mul,  # weight decay, decay of moments
    "div": _div,  # bias corrections
    "reciprocal": _reciprocal,
    "sqrt": _sqrt,  # Adam's denominator
    "square": _square,
    "addcmul": _addcmul,  # second moments
    "addcdiv": _addcdiv,  # Adam's update
    "lerp": _lerp,  # first moments
}


# --------------------------------------------------------------------------- kinds of operands


class _Expansion(NamedTuple):
    """The kind of an expansion."""

    base: torch.dtype
    terms: int
    rounding: str
    role: Role
    has_dims: bool
    deferred: str | None  # its expression


_PLAIN, _NUMBER, _ONE = "plain", "number", "one"
Kind = _Expansion | str


# By the identity of a format, which is kept beside the kind, and so stays what it is.
_EXPANSIONS: dict[tuple[Any, ...], tuple[Format, _Expansion]] = {}
_MOST_KINDS = 256


def kind_of(x: Any) -> Kind:
    """What a plan depends on of an operand; mostly the same object for the same kind."""
    if isinstance(x, MCFTensor):
        f, deferred, has_dims = x._format, x._deferred, x.dim() > 0
        text = None if deferred is None else deferred.expression
        key = (id(f), x._role, has_dims, text)
        found = _EXPANSIONS.get(key)
        if found is None:
            if len(_EXPANSIONS) >= _MOST_KINDS:  # formats that were copied or read from files
                _EXPANSIONS.clear()
            kind = _Expansion(f.base, f.terms, f.rounding, x._role, has_dims, text)
            found = _EXPANSIONS[key] = (f, kind)
        return found[1]
    if isinstance(x, Tensor):
        return _PLAIN
    return _ONE if _is_one(x) else _NUMBER


@dataclass(frozen=True)
class Prepared:
    """An operation, as far as the kinds of its operands say what it is."""

    expression: str
    order: tuple[int | float, ...]  # of the operands; a float stands for itself
    format: Format
    role: Role
    may_wait: bool


@dataclass(frozen=True)
class _Place:
    number: int


@functools.cache
def prepare(
    name: str, kinds: tuple[Kind, ...], keywords: tuple[str, ...], target: Format | None
) -> Prepared:
    """What an operation on operands of these kinds becomes, the last of them given by keywords;
    its result is written into a target of some format, or is new."""
    stand_ins = [1 if kind is _ONE else _Place(i) for i, kind in enumerate(kinds)]
    count = len(kinds) - len(keywords)
    named = dict(zip(keywords, stand_ins[count:], strict=True))
    plan, found = PLANS[name](*stand_ins[:count], **named)
    expansions = [kind for kind in kinds if isinstance(kind, _Expansion)]
    formats = [Format(x.base, x.terms, x.rounding) for x in expansions]  # type: ignore[arg-type]
    if target is None:
        format = longest_format(name, formats)
    else:
        require_one_base(name, [target, *formats])
        format = target
    role: Role = "parameter" if all(x.role == "parameter" for x in expansions) else "value"
    has_dims = any(x.has_dims for x in expansions)
    places: list[Expression] = []  # of the operands, or of their expressions
    read = 0
    for x in found:
        kind = kinds[x.number] if isinstance(x, _Place) else _ONE
        inner = kind.deferred if isinstance(kind, _Expansion) else None
        places.append(read if inner is None else shifted(parsed(inner), read))
        read += 1 if inner is None else arity(inner)
    expression = _in_format(plan, format.name, places)
    read_kinds = [kinds[x.number] for x in found if isinstance(x, _Place)]
    may_wait = (
        role == "value"
        and format.rounding == "nearest"
        and length(expression) < LONGEST
        and has_dims
        and all(
            kind.role == "value" and kind.has_dims
            if isinstance(kind, _Expansion)
            else kind is _NUMBER
            for kind in read_kinds
        )
    )
    order = tuple(x.number if isinstance(x, _Place) else float(x) for x in found)
    return Prepared(str(expression), order, format, role, may_wait)


def _in_format(plan: Any, format: str, places: Sequence[Expression]) -> Expression:
    """A plan whose operations round to a format, of the operands in these places."""
    if isinstance(plan, int):
        return places[plan]
    operation, *parts = plan
    return (operation, format, *(_in_format(part, format, places) for part in parts))


# ------------------------------------------------------------------------------------- tasks


@dataclass(slots=True)
class Task:
    """An operation in formats, and the terms of its operands."""

    prepared: Prepared
    operands: list[Operand]
    reads: list[Any]

    @classmethod
    def of(
        cls,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        target: Format | None = None,
    ) -> Task:
        """What an operation asks for; deferred operands become parts of its expression.

        Raises:
            ValueError: expansions of unlike bases; an operand that is no real dense tensor.
        """
        given = (*args, *kwargs.values())
        prepared = prepare(name, tuple(map(kind_of, given)), tuple(kwargs), target)
        reads = [given[i] if type(i) is int else i for i in prepared.order]
        operands: list[Operand] = []
        for x in reads:
            inner = x._deferred if isinstance(x, MCFTensor) else None
            if inner is None:
                operands.append((float(x),) if isinstance(x, (int, float)) else terms(x))
            else:
                inner.require_unchanged()
                operands += inner.operands
        return cls(prepared, operands, reads)

    @property
    def format(self) -> Format:
        """That of the result."""
        return self.prepared.format

    def may_wait(self) -> bool:
        """Whether the result may be deferred: a value of whole values and numbers."""
        if not self.prepared.may_wait or torch.is_grad_enabled():
            return False
        tensors = [x for x in self.reads if isinstance(x, MCFTensor)]
        return (
            not torch.is_inference_mode_enabled()
            and all(map(_is_whole, tensors))
            and all(x.shape == tensors[0].shape for x in tensors[1:])
        )

    def key(self) -> list[Tensor]:
        """A key, where the format rounds stochastically."""
        if self.format.rounding == "nearest":
            return []
        key = key_for(self.format, next(x.device for x in self.reads if isinstance(x, Tensor)))
        return [] if key is None else [key]


def _is_whole(x: MCFTensor) -> bool:
    """Whether a value is in memory of its own, outside of compilers.

    Tensors of inference mode do not tell when they are written to.
    """
    if x._deferred is not None:
        return True
    return type(x._term0) is Tensor and x.is_contiguous() and not x._term0.is_inference()
