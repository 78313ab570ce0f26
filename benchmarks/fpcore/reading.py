"""FPCore as text: expressions in brackets, and the formulas among them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

Expression: TypeAlias = "str | Fraction | list[Expression]"
"""A symbol, a number, or an operator and its operands."""

TOKEN = re.compile(r'\s+|;[^\n]*|("(?:[^"\\]|\\.)*")|([()\[\]])|([^\s()\[\]";]+)')
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?\d+/\d+", re.IGNORECASE)


class Text(str):
    """A string in quotes, which is no symbol."""


@dataclass(frozen=True)
class Formula:
    """A formula of a suite.

    `arguments` are names, each with its length if it is a vector, else None.
    """

    name: str
    called: str | None
    arguments: list[tuple[str, int | None]]
    properties: dict[str, Any]
    body: Expression
    file: str


def tokens(text: str) -> Iterator[str]:
    """Brackets, strings, and symbols."""
    place = 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"not FPCore: {text[place : place + 40]!r}")
        place = match.end()
        if match[1]:
            yield Text(match[1][1:-1])
        elif match[2] or match[3]:
            yield match[2] or match[3]


def expressions(text: str) -> list[Expression]:
    """All expressions of a text; round and square brackets are the same."""
    stack: list[list[Expression]] = [[]]
    for token in tokens(text):
        if isinstance(token, Text):
            stack[-1].append(token)
        elif token in "([":
            stack.append([])
        elif token in ")]":
            if len(stack) == 1:
                raise ValueError("not FPCore: a bracket closes nothing")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(Fraction(token) if NUMBER.fullmatch(token) else token)
    if len(stack) > 1:
        raise ValueError("not FPCore: a bracket is open at the end")
    return stack[0]


def formula(core: Expression, file: str) -> Formula:
    """What `(FPCore name (arguments) properties body)` says; the name may be missing."""
    if not isinstance(core, list) or core[:1] != ["FPCore"]:
        raise ValueError(f"not an FPCore: {core!r}")
    rest = core[1:]
    called = rest.pop(0) if isinstance(rest[0], str) else None
    arguments: list[tuple[str, int | None]] = []
    for argument in rest.pop(0):  # type: ignore[union-attr]
        while isinstance(argument, list) and argument[0] == "!":
            argument = argument[-1]
        if isinstance(argument, list):
            arguments.append((str(argument[0]), int(argument[1])))  # type: ignore[arg-type]
        else:
            arguments.append((str(argument), None))
    properties = {}
    while isinstance(rest[0], str) and rest[0].startswith(":") and len(rest) > 1:
        properties[rest[0]] = rest[1]
        rest = rest[2:]
    (body,) = rest
    name = str(properties.get(":name", called or "without a name"))
    return Formula(name, None if called is None else str(called), arguments, properties, body, file)


def formulas(folder: Path) -> list[Formula]:
    """Those of all files of a folder, in order."""
    found = []
    for path in sorted(folder.rglob("*.fpcore")):
        file = str(path.relative_to(folder))
        found += [formula(core, file) for core in expressions(path.read_text())]
    return found
