"""Programs as lines of text: one walk over the instructions, for every language.

A language is a `Dialect`: a table of its names of operations and types. This module holds the
common part. Memory holds patterns, unsigned integers of each type's size. Programs compute with
values, of the types in `COMPUTED`. `<name>_value` and `<name>_bits`, functions of a language's
prelude, convert between patterns and values. `to_<name>` rounds a result to a narrower type, or
wraps it around. All NaNs become one, except those whose last bits are known to be zero, so that no
rounding turns a NaN into an infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mcftensor.kernels.program import (
    COMPUTED,
    READS,
    Instruction,
    Place,
    Program,
)

Key = str | tuple[str, torch.dtype]

_SHORT = 16  # bits by which a float32 is longer than a bfloat16
_INFINITY = 0x7F800000

# Operations whose results may not fit a narrower type.
_INEXACT = {"add", "sub", "mul", "div", "sqrt", "to"}
_OVERFLOWING = _INEXACT | {"neg", "abs", "not", "shift_left"}  # of integers

# Operations that do the work of two, by the last one's name.
_JOINED = {
    "and": "shift_logical", "shift_left": "shift_byte", "sub": "twice_less", "where": "zero_of_zero"
}  # fmt: skip

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "shift_left": "<<", "shift_right": ">>",
}  # fmt: skip
# Operations that all languages write in the same way.
COMMON: dict[Key, str] = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in _INFIX.items()},
    "neg": "-{0}",
    "not": "~{0}",
    "copysign": "copysign({0}, {1})",
    "finite_or_zero": "finite_or_zero({0})",
    "quiet": "quiet({0})",
    "assured": "{0}",
    "leading": "leading({0})",
    "rest": "{0} - {1}",
    "noised": "noised({0}, {1})",
    "near": "near({0}, {1})",
    "maximum": "greater({0}, {1})",
    "minimum": "lesser({0}, {1})",
    "sign": "sign_of({0})",
    "signbit": "negative({0})",
}


@dataclass(frozen=True)
class Dialect:
    """The spelling of operations and types in a language.

    In the text of an operation, `{0}`, `{1}`, ... are its operands and `{type}` is the type of its
    result; other names are words of the `Copy` that is printed. An entry for an operation with the
    type of its operands takes precedence. Some types' patterns may be loaded as other types. Counts
    of shifts are constants unless `counts` spells them.
    """

    types: Mapping[torch.dtype, str]
    operations: Mapping[Key, str]
    constant: Callable[[float, torch.dtype], str]
    assignment: str
    counts: Callable[[int], str] | None = None
    loaded: Mapping[torch.dtype, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Copy:
    """One copy of a program's lines.

    A language prints several copies to compute on several sets of elements together.

    Attributes:
        suffix: the end of the names of values that vary from element to element.
        words: the words of the copy in the text of operations.
        sharing: the suffixes of the copies whose elements share a scale with this copy's. Names of
            values of the block end in the first of them.
    """

    suffix: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)
    sharing: Sequence[str] = ("",)


class Printer:
    """The lines of a program: `p3` is the pattern of instruction 3, and `v3` its value."""

    def __init__(self, program: Program, dialect: Dialect, copy: Copy | None = None) -> None:
        self.program, self.instructions = program, program.instructions
        self.dialect = dialect
        self.copy = copy or Copy()
        self.varies, self._zeros = program.varies, program.last_zeros

    def lines(self, *, varying: bool) -> list[str]:
        """Return the lines of values that vary from element to element, or the other lines."""
        return [line for lines in self.lines_by_place(varying=varying).values() for line in lines]

    def lines_by_place(self, *, varying: bool) -> dict[int, list[str]]:
        """Return these lines by the places of their instructions."""
        return {
            i: [
                self.dialect.assignment.format(name=name, value=value)
                for name, value in self._values(i, x)
            ]
            for i, x in enumerate(self.instructions)
            if self.varies[i] == varying
        }

    def _name(self, kind: str, place: int, suffix: str | None = None) -> str:
        if self.program.per_block[place]:
            suffix = self.copy.sharing[0]
        elif suffix is None:
            suffix = self.copy.suffix
        return f"{kind}{place}{suffix}" if self.varies[place] else f"{kind}{place}"

    def value(self, place: int) -> str:
        """Return the name of the value of an instruction."""
        return self._name("v", place)

    def _values(self, place: int, x: Instruction) -> Iterator[tuple[str, str]]:
        pattern, value = self._name("p", place), self._name("v", place)
        if x.name not in (*READS, "bits"):
            yield value, self._value(x)
            return
        if x.name in READS:
            yield pattern, self._operation(x.name, x.dtype, x.dtype, str(x.operands[0]))
        else:
            yield pattern, self.pattern(x.operands[0])
        name = name_of(x.dtype)
        if x.name != "bits":
            name = self.dialect.loaded.get(x.dtype, name)
        if x.dtype == torch.float32 and self._is_any_nan(place, x):
            name = "short"
        yield value, f"{name}_value({pattern})"

    def _is_any_nan(self, place: int, x: Instruction) -> bool:
        """Whether a pattern needs no canonical NaN: it is none, its last bits are zeros, or no
        result tells."""
        if self.program.hides_nans[place]:
            return True
        if x.name != "bits":
            return False
        least, largest = self.program.ranges.get(x.operands[0].index, (-1, -1))
        return self._zeros[place] >= _SHORT or 0 <= least <= largest <= _INFINITY

    def pattern(self, place: Place) -> str:
        """Return the bits of a result as memory holds them.

        Values that no operation changed keep their bits, NaNs included.
        """
        x, name = self.instructions[place.index], name_of(self.instructions[place.index].dtype)
        if x.name in (*READS, "bits"):
            return self._name("p", place.index)
        if x.name == "to" and not x.dtype.is_floating_point:
            of = self.instructions[x.operands[0].index].dtype
            if COMPUTED[of] == COMPUTED[x.dtype] == torch.int32:  # memory holds the last bits
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
        if (joined := self._joined(x)) is not None:
            return joined
        operands = [self._text(o, own) for o in x.operands]
        if x.name in ("shift_left", "shift_right"):
            operands[1] = self._count(x.operands[1], own)
        if x.name in ("block_max", "unsigned_max"):
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

    def _joined(self, x: Instruction) -> str | None:
        """Return x and an instruction before it as one operation, if the language has that.

        Right shifts whose copies of the sign are cleared shift in zeros; bytes with a sign are
        extended and shifted at once; numbers are doubled and diminished at once, exactly; and the
        number of a code is zero if the code is.
        """
        name = _JOINED.get(x.name)
        if name not in self.dialect.operations or not isinstance(x.operands[0], Place):
            return None
        before, second = self.instructions[x.operands[0].index], x.operands[1]
        if name == "shift_logical" and before.name == "shift_right":
            (of, count), bits = before.operands, 8 * x.dtype.itemsize
            clears_signs = count in range(bits) and second == (1 << bits - count) - 1
            if clears_signs and x.dtype == COMPUTED[x.dtype]:
                operands = self._text(of, x.dtype), self._count(count, x.dtype)
                return self._operation(name, x.dtype, x.dtype, *operands)
        if name == "shift_byte" and before.name == "to" and second == 8:
            byte = self.instructions[before.operands[0].index]
            if (byte.name, byte.dtype, x.dtype) == ("vector", torch.int8, torch.int32):
                pattern = self._name("p", before.operands[0].index)
                return self._operation(name, x.dtype, x.dtype, pattern)
        if name == "zero_of_zero" and (before.name, before.operands[1:]) == ("eq", (0,)):
            code, zero = before.operands[0], self.instructions[second.index]
            is_code = self.program.ranges.get(code.index, (-1, -1))[0] >= 0
            if is_code and zero == Instruction("constant", (0.0,), torch.float32):
                operands = self._text(code, torch.int32), self._text(x.operands[2], x.dtype)
                return self._operation(name, x.dtype, x.dtype, *operands)
        is_doubled = before.name == "add" and before.operands[0] == before.operands[1]
        is_small = isinstance(second, float) and abs(second) <= 1  # infinities stay so
        if name == "twice_less" and is_doubled and is_small and x.dtype == torch.float32:
            operands = self._text(before.operands[0], x.dtype), self._text(second, x.dtype)
            return self._operation(name, x.dtype, x.dtype, *operands)
        return None

    def _operation(self, name: str, of: torch.dtype, dtype: torch.dtype, *operands: str) -> str:
        operations = self.dialect.operations
        text = operations.get((name, of)) or operations[name]
        type_ = self.dialect.types[COMPUTED[dtype]]
        return text.format(*operands, type=type_, **self.copy.words)

    def _count(self, operand: Any, dtype: torch.dtype) -> str:
        spell = self.dialect.counts
        return spell(operand) if spell and isinstance(operand, int) else self._text(operand, dtype)

    def _text(self, operand: Any, dtype: torch.dtype) -> str:
        if isinstance(operand, Place):
            return self._name("v", operand.index)
        wide = dtype if dtype.is_floating_point else torch.int64
        # Rounded or wrapped around as by eager PyTorch.
        return self.dialect.constant(
            torch.tensor(operand, dtype=wide, device="cpu").to(dtype).item(), dtype
        )


def lines_of(
    program: Program, dialect: Dialect, copies: Sequence[Copy]
) -> Iterator[dict[int, list[str]]]:
    """Yield the lines of varying values of each copy, by the places of their instructions.

    They are printed once, with marks for what differs.
    """
    words = {word: f"\1{word}\1" for word in copies[0].words}
    sharing = [f"\2{k}\2" for k in range(len(copies[0].sharing))]
    printer = Printer(program, dialect, Copy("\3", words, sharing))
    marked = printer.lines_by_place(varying=True)
    whole = "\4".join(map("\n".join, marked.values()))
    for copy in copies:
        text = whole.replace("\3", copy.suffix)
        for word, value in copy.words.items():
            text = text.replace(words[word], value)
        for mark, suffix in zip(sharing, copy.sharing, strict=True):
            text = text.replace(mark, suffix)
        yield dict(zip(marked, map(str.splitlines, text.split("\4")), strict=True))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
