"""Sums of floats as decimals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction


def digits_of(precision: int) -> int:
    """Significant decimal digits that tell numbers of some bits apart."""
    return math.ceil(precision * math.log10(2)) + 1


def decimal_of(terms: Sequence[float], digits: int) -> Decimal:
    """The sum, rounded once to significant digits, ties to even; infinities and NaN as they are."""
    if not math.isfinite(terms[0]) or not any(terms):
        return Decimal(terms[0])
    whole = sum(map(Fraction, terms), Fraction(0))
    return Context(prec=digits).divide(Decimal(whole.numerator), Decimal(whole.denominator))
