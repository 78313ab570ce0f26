"""Formulas evaluated on many inputs at once, in numbers of any kind.

A *lane* is one of these inputs. Both branches of a condition are evaluated on all lanes, and each
lane takes its own; a loop goes on until no lane is left in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fpcore.reading import Expression, Formula

Mask: TypeAlias = npt.NDArray[np.bool_]

MOST_PASSES = 1100
"""Passes through a loop, after which the lanes that are left in it become NaN; if all are left, the
formula is given up."""

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
CONSTANTS = ("PI", "E", "INFINITY", "NAN")


class Unsupported(Exception):
    """A formula that cannot be judged, and why."""


class Numbers(Protocol):
    """A kind of numbers: each value is one of them on every lane."""

    lanes: int

    def constant(self, value: Fraction | str) -> Any:
        """A number, or a constant by its name, on all lanes."""

    def apply(self, operation: str, operands: Sequence[Any]) -> Any:
        """An operation on each lane."""

    def compare(self, operation: str, x: Any, y: Any) -> Mask:
        """A comparison on each lane."""

    def choose(self, mask: Mask, x: Any, y: Any) -> Any:
        """x on the lanes of a mask, y on the others."""


class Evaluation:
    """Of formulas, in one kind of numbers; `others` are formulas that they may call by name."""

    def __init__(self, numbers: Numbers, others: Mapping[str, Formula]) -> None:
        self.numbers = numbers
        self.others = others

    def of(self, e: Expression, scope: Mapping[str, Any], active: Mask | None = None) -> Any:
        """The value of an expression: a number, a mask, or a list of numbers for an array.

        Loops go on while one of the `active` lanes is left in them.
        """
        if active is None:
            active = np.ones(self.numbers.lanes, bool)
        if isinstance(e, Fraction):
            return self.numbers.constant(e)
        if isinstance(e, str):
            return self._symbol(e, scope)
        head, *rest = e
        special = getattr(self, SPECIAL.get(str(head), ""), None)
        if special is not None:
            return special(str(head), rest, scope, active)
        values = [self.of(x, scope, active) for x in rest]
        if head in COMPARISONS:
            return self._compared(str(head), values)
        if str(head) in self.others:
            other = self.others[str(head)]
            names = [name for name, _ in other.arguments]
            return self.of(other.body, dict(zip(names, values, strict=True)), active)
        return self.numbers.apply(str(head), values)

    def _symbol(self, name: str, scope: Mapping[str, Any]) -> Any:
        if name in scope:
            return scope[name]
        if name in ("TRUE", "FALSE"):
            return np.full(self.numbers.lanes, name == "TRUE")
        if name in CONSTANTS:
            return self.numbers.constant(name)
        raise Unsupported(f"{name} is not defined")

    def _compared(self, operation: str, values: Sequence[Any]) -> Mask:
        every = operation == "!="
        pairs = itertools.combinations(values, 2) if every else itertools.pairwise(values)
        found = [self.numbers.compare(operation, x, y) for x, y in pairs]
        return np.logical_and.reduce(found)

    def _logic(self, head: str, rest: Any, scope: Mapping[str, Any], active: Mask) -> Mask:
        masks = [self.of(x, scope, active) for x in rest]
        if head == "not":
            return ~masks[0]
        return (np.logical_and if head == "and" else np.logical_or).reduce(masks)

    def _last(self, head: str, rest: Any, scope: Mapping[str, Any], active: Mask) -> Any:
        """Precisions are those of the numbers, whatever a formula says."""
        return self.of(rest[-1], scope, active)

    def _array(self, head: str, rest: Any, scope: Mapping[str, Any], active: Mask) -> list[Any]:
        return [self.of(x, scope, active) for x in rest]

    def _ref(self, head: str, rest: Any, scope: Mapping[str, Any], active: Mask) -> Any:
        return self.of(rest[0], scope, active)[int(rest[1])]

    def _if(self, head: str, rest: Any, scope: Mapping[str, Any], active: Mask) -> Any:
        mask = self.of(rest[0], scope, active)
        yes, no = (
            self.of(x, scope, active & m) for x, m in zip(rest[1:], (mask, ~mask), strict=True)
        )
        return self._chosen(mask, yes, no)

    def _chosen(self, mask: Mask, x: Any, y: Any) -> Any:
        if isinstance(x, np.ndarray) and x.dtype == bool:
            return np.where(mask, x, y)
        return self.numbers.choose(mask, x, y)

    def _let(self, head: str, rest: Any, scope: Mapping[str, Any], active: Mask) -> Any:
        bindings, body = rest
        inner = dict(scope)
        for name, value in bindings:
            inner[name] = self.of(value, inner if head == "let*" else scope, active)
        return self.of(body, inner, active)

    def _while(self, head: str, rest: Any, scope: Mapping[str, Any], active: Mask) -> Any:
        condition, bindings, body = rest
        in_turn = head == "while*"
        inner = dict(scope)
        for name, start, _ in bindings:
            inner[name] = self.of(start, inner if in_turn else scope, active)
        for _ in range(MOST_PASSES):
            running = active & self.of(condition, inner, active)
            if not running.any():
                break
            state = dict(inner)
            for name, _, update in bindings:
                new = self.of(update, state if in_turn else inner, running)
                state[name] = self._chosen(running, new, inner[name])
            inner = state
        else:
            if running.all():
                raise Unsupported(f"a loop of more than {MOST_PASSES} passes")
        result, nan = self.of(body, inner, active), self.numbers.constant("NAN")
        if isinstance(result, list) and isinstance(body, list) and body[0] == "array":
            return [self._chosen(running, nan, x) for x in result]
        return self._chosen(running, nan, result)


SPECIAL = {
    "and": "_logic",
    "or": "_logic",
    "not": "_logic",
    "!": "_last",
    "cast": "_last",
    "array": "_array",
    "ref": "_ref",
    "if": "_if",
    "let": "_let",
    "let*": "_let",
    "while": "_while",
    "while*": "_while",
}
