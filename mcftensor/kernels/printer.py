"""Programs as lines of text: one walk over the instructions, for every language.

A language is a `Dialect`: a table of what it calls the operations and types. What all have in
common is here. Memory holds patterns, unsigned integers of each type's own size; one computes with
values, of the type that `COMPUTED` names. `<name>_value` and `<name>_bits`, functions of a
language's prelude, lead from one to the other, and `to_<name>` rounds a result to a type that is
narrower than the one computed with, or wraps it around. All NaNs become one, but for those whose
last bits are zero already, so that no rounding makes infinities of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mcftensor.kernels.program import (
    COMPUTED,
    Instruction,
    Place,
    Program,
    last_zeros,
    varying,
)

Key = str | tuple[str, torch.dtype]

_SHORT = 16  # bits of a float32 that a bfloat16 lacks

# Operations whose results a narrower type may not hold.
_INEXACT = {"add", "sub", "mul", "div", "sqrt", "to"}
_OVERFLOWING = _INEXACT | {"neg", "abs", "not", "shift_left"}  # of integers

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "shift_left": "<<", "shift_right": ">>",
}  # fmt: skip
# What languages write alike.
COMMON: dict[Key, str] = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in _INFIX.items()},
    "neg": "-{0}",
    "not": "~{0}",
    "copysign": "copysign({0}, {1})",
    "finite_or_zero": "finite_or_zero({0})",
    "quiet": "quiet({0})",
    "maximum": "greater({0}, {1})",
    "sign": "sign_of({0})",
    "signbit": "negative({0})",
}


@dataclass(frozen=True)
class Dialect:
    """How a language says what programs do.

    In the text of an operation `{0}`, `{1}`, ... are its operands and `{type}` the type of its
    result; other names are words of the `Copy` that is printed. Where an operation with the type of
    its operands is given, it goes before. Some types' patterns may be those of others as they come
    from memory.
    """

    types: Mapping[torch.dtype, str]
    operations: Mapping[Key, str]
    constant: Callable[[float, torch.dtype], str]
    assignment: str
    loaded: Mapping[torch.dtype, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Copy:
    """One copy of a program's lines. A language prints several where it computes on several sets of
    elements together.

    Attributes:
        suffix: the end of the names of values that vary from element to element.
        words: the words of a copy in the text of operations.
        sharing: the suffixes of the copies whose elements share a scale with those of this one.
    """

    suffix: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)
    sharing: Sequence[str] = ("",)


class Printer:
    """The lines of a program: `p3` is the pattern of instruction 3, and `v3` its value."""

    def __init__(self, program: Program, dialect: Dialect, copy: Copy | None = None) -> None:
        self.instructions = program.instructions
        self.dialect = dialect
        self.copy = copy or Copy()
        self.varies = varying(program.instructions)
        self._zeros = last_zeros(program.instructions)

    def lines(self, *, varying: bool) -> list[str]:
        """The lines of values that vary from element to element, or of the others."""
        return [
            self.dialect.assignment.format(name=name, value=value)
            for i, x in enumerate(self.instructions)
            if self.varies[i] == varying
            for name, value in self._values(i, x)
        ]

    def _name(self, kind: str, place: int, suffix: str | None = None) -> str:
        suffix = self.copy.suffix if suffix is None else suffix
        return f"{kind}{place}{suffix}" if self.varies[place] else f"{kind}{place}"

    def _values(self, place: int, x: Instruction) -> Iterator[tuple[str, str]]:
        pattern, value = self._name("p", place), self._name("v", place)
        if x.name not in ("vector", "shared", "bits"):
            yield value, self._value(x)
            return
        if x.name in ("vector", "shared"):
            yield pattern, self._operation(x.name, x.dtype, x.dtype, str(x.operands[0]))
        else:
            yield pattern, self.pattern(x.operands[0])
        name = name_of(x.dtype)
        if x.name != "bits":
            name = self.dialect.loaded.get(x.dtype, name)
        elif x.dtype == torch.float32 and self._zeros[place] >= _SHORT:
            name = "short"
        yield value, f"{name}_value({pattern})"

    def pattern(self, place: Place) -> str:
        """The bits of a result as memory holds them; those that were never computed with as they
        came, NaNs too."""
        x, name = self.instructions[place.index], name_of(self.instructions[place.index].dtype)
        if x.name in ("vector", "shared", "bits"):
            return self._name("p", place.index)
        if x.name == "to" and not x.dtype.is_floating_point:
            of = self.instructions[x.operands[0].index].dtype
            if COMPUTED[of] == COMPUTED[x.dtype] == torch.int32:  # of which memory has the last
                return f"{name}_bits({self._name('v', x.operands[0].index)})"
        return f"{name}_bits({self._name('v', place.index)})"

    def _value(self, x: Instruction) -> str:
        if x.name in ("scalar", "index"):
            return self._operation(x.name, x.dtype, x.dtype, str(x.operands[0]))
        if x.name == "constant":
            return self._text(x.operands[0], x.dtype)
        places = [o for o in x.operands if isinstance(o, Place)]
        of = self.instructions[places[0].index].dtype
        own = of if x.dtype == torch.bool else x.dtype
        operands = [self._text(o, own) for o in x.operands]
        if x.name == "block_max":
            of_each = [self._name("v", places[0].index, suffix) for suffix in self.copy.sharing]
            operands = [", ".join(of_each)]
        if x.name not in ("to", "narrow"):
            value = self._operation(x.name, own, x.dtype, *operands)
        elif COMPUTED[of] == COMPUTED[x.dtype]:
            value = operands[0]
        else:
            value = self._operation("to", of, x.dtype, *operands)
        held = _INEXACT if x.dtype.is_floating_point else _OVERFLOWING
        narrower = x.dtype.itemsize < COMPUTED[x.dtype].itemsize
        return f"to_{name_of(x.dtype)}({value})" if narrower and x.name in held else value

    def _operation(self, name: str, of: torch.dtype, dtype: torch.dtype, *operands: str) -> str:
        operations = self.dialect.operations
        text = operations.get((name, of)) or operations[name]
        type_ = self.dialect.types[COMPUTED[dtype]]
        return text.format(*operands, type=type_, **self.copy.words)

    def _text(self, operand: Any, dtype: torch.dtype) -> str:
        if isinstance(operand, Place):
            return self._name("v", operand.index)
        wide = dtype if dtype.is_floating_point else torch.int64
        # As eager PyTorch would round it, or wrap it around.
        return self.dialect.constant(
            torch.tensor(operand, dtype=wide, device="cpu").to(dtype).item(), dtype
        )


def name_of(dtype: torch.dtype) -> str:
    """Without the module."""
    return str(dtype).removeprefix("torch.")
