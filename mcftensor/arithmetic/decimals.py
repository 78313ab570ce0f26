"""Sums of floats as decimal numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction


def digits_of(precision: int) -> int:
    """Return how many significant decimal digits distinguish numbers of `precision` bits."""
    return math.ceil(precision * math.log10(2)) + 1


def decimal_of(terms: Sequence[float], digits: int) -> Decimal:
    """Return the sum rounded once to `digits` significant digits, ties to even.

    Infinities and NaN are returned unchanged.
    """
    if not math.isfinite(terms[0]) or not any(terms):
        return Decimal(terms[0])
    whole = sum(map(Fraction, terms), Fraction(0))
    return Context(prec=digits).divide(Decimal(whole.numerator), Decimal(whole.denominator))
