"""Exact arithmetic to hold the library against; it shares no code with it.

A machine number is an integer times a power of two. `integers` reads that integer from the bit
pattern, over one common power of two for a whole tensor, into a numpy array of Python integers:
sums and products of such arrays are exact, without a limit of size. `fractions` reads the same as
`fractions.Fraction`. An infinity reads as 2^(emax + 1), the number at which rounding overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Base:
    """A binary floating-point type: its numbers are n * 2^quantum with n of `precision` bits."""

    precision: int
    emin: int
    emax: int
    pattern: torch.dtype

    @property
    def quantum(self) -> int:
        """Exponent of the smallest subnormal."""
        return self.emin - self.precision + 1


BASES = {
    torch.bfloat16: Base(8, -126, 127, torch.int16),
    torch.float16: Base(11, -14, 15, torch.int16),
    torch.float32: Base(24, -126, 127, torch.int32),
    torch.float64: Base(53, -1022, 1023, torch.int64),
}


# -------------------------------------------------------------------------------------- reading


def fields(x: Tensor) -> tuple[Array, Array, Array]:
    """Sign bit, exponent field and fraction field of every number, as int64 arrays."""
    base = BASES[x.dtype]
    bits = x.detach().contiguous().view(base.pattern).numpy().astype(np.int64)
    fraction_bits = base.precision - 1
    field = (bits >> fraction_bits) & (2 * base.emax + 1)
    return bits < 0, field, bits & ((1 << fraction_bits) - 1)


def integers(x: Tensor, scale: int | None = None) -> Array:
    """The Python integers n with x = n * 2^-scale; by default the smallest scale that serves."""
    base = BASES[x.dtype]
    negative, field, fraction = fields(x)
    if ((field == 2 * base.emax + 1) & (fraction != 0)).any():
        raise ValueError("NaN is no number")
    normal = field > 0
    significand = fraction + (normal.astype(np.int64) << (base.precision - 1))
    significand = np.where(negative, -significand, significand)
    shift = np.maximum(field, 1) - 1 + (scale_of(x.dtype) if scale is None else scale)
    shift = shift - scale_of(x.dtype)
    if shift.size and shift.min() < 0:
        raise ValueError("the scale is too small")
    return np.asarray(np.left_shift(significand.astype(object), shift.astype(object)), object)


def scale_of(dtype: torch.dtype) -> int:
    """The scale at which every number of this type is an integer."""
    return -BASES[dtype].quantum


def total(terms: Sequence[Tensor], scale: int | None = None) -> Array:
    """The exact sum of tensors, as `integers`."""
    first, *rest = terms
    scale = scale_of(first.dtype) if scale is None else scale
    result = integers(first, scale)
    for term in rest:
        result = result + integers(term, scale)
    return np.asarray(result, object)


def fractions(x: Tensor) -> list[Fraction]:
    """The numbers of a tensor, flattened, as fractions."""
    scale = scale_of(x.dtype)
    return [Fraction(int(n), 1 << scale) for n in integers(x).ravel()]


def value(terms: Sequence[Tensor]) -> Fraction:
    """The exact sum of tensors of one element."""
    return sum((fractions(t)[0] for t in terms), Fraction(0))


# ------------------------------------------------------------------------------------- rounding


def round_fraction(x: Fraction, dtype: torch.dtype) -> Fraction:
    """x rounded to nearest even, with subnormals; what overflows becomes ±2^(emax + 1)."""
    base = BASES[dtype]
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** max(exponent - base.precision + 1, base.quantum)
    limit = Fraction(2) ** (base.emax + 1)
    return max(min(round(x / ulp) * ulp, limit), -limit)


def _round_integer(n: int, precision: int, drop: int, limit: int) -> int:
    m = abs(n)
    drop = max(drop, m.bit_length() - precision)
    if drop > 0:
        half = 1 << (drop - 1)
        kept, rest = m >> drop, m & ((1 << drop) - 1)
        m = (kept + (rest > half or (rest == half and kept & 1))) << drop
    m = min(m, limit)
    return -m if n < 0 else m


def round_integers(n: Array, dtype: torch.dtype, scale: int | None = None) -> Array:
    """n * 2^-scale rounded to nearest even in a type, over the same scale."""
    base = BASES[dtype]
    scale = scale_of(dtype) if scale is None else scale
    rounded = np.frompyfunc(
        lambda k: _round_integer(
            k, base.precision, base.quantum + scale, 1 << scale + base.emax + 1
        ),
        1,
        1,
    )
    return np.asarray(rounded(np.asarray(n, object)), object)


# ------------------------------------------------------------------------------------ judgement


def normalized(terms: Sequence[Tensor]) -> Array:
    """Where each term is the nearest, ties to even, to itself plus all that follow."""
    rest = integers(terms[-1])
    good = np.ones(rest.shape, bool)
    for term in reversed(terms[:-1]):
        here = integers(term)
        rest = rest + here
        good &= round_integers(rest, term.dtype) == here
    return good


def is_normalized(terms: Sequence[Tensor]) -> bool:
    """Whether all elements are normalized."""
    return bool(normalized(terms).all())


def ratio(error: Array, of: Array) -> Array:
    """|error / of| as floats; 0 / 0 is 0."""

    def one(e: int, o: int) -> float:
        if e == 0:
            return 0.0
        return float(Fraction(abs(e), abs(o))) if o else math.inf

    return np.asarray(np.frompyfunc(one, 2, 1)(error, of), float)


def units(error: Array, of: Array, result: Sequence[Tensor]) -> Array:
    """|error / of| in units of u^n, for a result of n terms."""
    return ratio(error, of) * 2.0 ** (BASES[result[0].dtype].precision * len(result))


# The relative errors of results, in units of u^n. Operands are sequences of terms.


def add_error(result: Sequence[Tensor], x: Sequence[Tensor], y: Sequence[Tensor]) -> Array:
    """From x + y."""
    scale = max(scale_of(t.dtype) for t in (*result, *x, *y))
    exact = total(x, scale) + total(y, scale)
    return units(total(result, scale) - exact, exact, result)


def mul_error(result: Sequence[Tensor], x: Sequence[Tensor], y: Sequence[Tensor]) -> Array:
    """From x y."""
    scale = scale_of(x[0].dtype) + scale_of(y[0].dtype)
    exact = total(x) * total(y)
    return units(total(result, scale) - exact, exact, result)


def div_error(result: Sequence[Tensor], x: Sequence[Tensor], y: Sequence[Tensor]) -> Array:
    """From result * y against x."""
    scale = scale_of(result[0].dtype) + scale_of(y[0].dtype)
    exact = total(x, scale)
    return units(total(result) * total(y) - exact, exact, result)


def fma_error(
    result: Sequence[Tensor], x: Sequence[Tensor], y: Sequence[Tensor], z: Sequence[Tensor]
) -> tuple[Array, Array]:
    """Relative to |x y| + |z|; and to the result itself, where x y and z have one sign."""
    scale = scale_of(x[0].dtype) + scale_of(y[0].dtype)
    product, addend = total(x) * total(y), total(z, scale)
    error = total(result, scale) - (product + addend)
    alike = product * addend >= 0
    return (
        units(error, abs(product) + abs(addend), result),
        units(error[alike], (product + addend)[alike], result),
    )


def sqrt_error(result: Sequence[Tensor], x: Sequence[Tensor]) -> Array:
    """From the square: with result^2 = x (1 + d), it is sqrt(1 + d) - 1 <= |d| (1 + |d|) / 2."""
    square = total(x) * (1 << scale_of(x[0].dtype))
    d = ratio(total(result) ** 2 - square, square)
    return np.asarray(d * (1 + d) / 2 * 2.0 ** (BASES[x[0].dtype].precision * len(result)), float)
