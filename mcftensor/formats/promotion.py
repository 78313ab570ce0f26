"""The format of results of operands in several formats."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mcftensor.formats.expansion_format import MAX_TERMS, ExpansionFormat
from mcftensor.formats.format import Format


@functools.lru_cache(maxsize=1024)
def require_one_base(name: str, formats: tuple[Format, ...]) -> None:
    """Raise ValueError for expansions of different bases."""
    if len({f.dtype for f in formats if f.arithmetic != "numbers"}) > 1:
        # Not a TypeError: Python's operators would hide its message.
        raise ValueError(
            f"{name}: expansions in {' and '.join(sorted({f.name for f in formats}))}, whose terms "
            "have different dtypes. Convert one: copy_() it into an expansion of the other, or "
            "mcf.as_expansion(x, format). Converting parameters does not convert the states of "
            "their optimizer, so create the optimizer again"
        )


def longest_format(name: str, formats: Sequence[Format]) -> Format:
    """Return the format of a result of operands in these formats.

    It has the most terms of any operand, and the first rounding that is not to nearest. The longest
    formats only round to nearest. A storage format counts as a plain tensor if other formats take
    part.

    Raises:
        ValueError: expansions of different bases.
    """
    first = formats[0]
    if all(f is first for f in formats):
        return first
    require_one_base(name, tuple(formats))
    of_terms = [f for f in formats if isinstance(f, ExpansionFormat)]
    if not of_terms:
        return max(formats, key=lambda f: f.precision)
    terms = max(f.terms for f in of_terms)
    roundings = [f.rounding for f in of_terms if f.takes_key and terms < MAX_TERMS]
    return Format(of_terms[0].base, terms, *roundings[:1])
