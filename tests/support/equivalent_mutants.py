"""Mutants that compute the same as the module does, and therefore survive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """A mutant by its module, function, kind and source (of `ast.unparse`), and why it survives."""

    module: str
    function: str
    kind: str
    old: str
    new: str
    why: str


EQUIVALENT: list[Equivalent] = []
