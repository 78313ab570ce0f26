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


EQUIVALENT = [
    Equivalent(
        "arithmetic/eft.py",
        "two_prod",
        "comparison",
        "a.abs() >= b.abs()",
        "a.abs() > b.abs()",
        "Of two operands of one magnitude either can be scaled: all partial products are exact.",
    ),
    Equivalent(
        "arithmetic/eft.py",
        "split",
        "comparison",
        "a.abs() > torch.finfo(a.dtype).max * 2.0 ** (-(low_bits + 1))",
        "a.abs() >= torch.finfo(a.dtype).max * 2.0 ** (-(low_bits + 1))",
        "At the limit itself both branches are exact: scaling by a power of two changes no bit.",
    ),
]
