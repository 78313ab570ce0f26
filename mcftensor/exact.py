"""Conversions between exact numbers and expansions, and exact sums of plain tensors."""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mcftensor import wings
from mcftensor.arithmetic.base_types import BASES
from mcftensor.arithmetic.decimals import decimal_of, digits_of
from mcftensor.formats import (
    ExpansionFormat,
    Format,
    fp64x2,
    require_expansion_format,
    require_format,
)
from mcftensor.passes import expansion
from mcftensor.tensor import MCFTensor

if TYPE_CHECKING:
    from mcftensor.reproducible import cumsum, dot, mean, norm, sum

__all__ = [
    "cumsum",
    "dot",
    "from_exact",
    "mean",
    "norm",
    "sum",
    "to_decimal",
    "to_fraction",
]

__getattr__ = wings.names_of_wings(
    __name__, dict.fromkeys(("cumsum", "dot", "mean", "norm", "sum"), "reproducible")
)

Exact: TypeAlias = int | float | str | Fraction | Decimal
Nested: TypeAlias = Exact | Sequence["Nested"]


def from_exact(
    values: Nested, format: Format | str, *, device: str | torch.device | None = None
) -> MCFTensor:
    """Convert numbers of any precision to an expansion, each rounded once to its format.

    Args:
        values: a number or nested lists of numbers. A number is a `fractions.Fraction`, a
            `decimal.Decimal`, a string such as `"0.1"` or `"1/3"`, an int or a float.
        format: the format of the result, or its name.
        device: the device of the result.

    Returns:
        An expansion of the shape of the nested lists.

    *Error*: half an ulp of the last term: the first term is the number rounded to the base, each
    next one the remainder, rounded. In a scaled format, the error of the nearest float64 and of one
    rounding to the data.

    *Special values*: infinities, NaN and the sign of a zero are kept. Numbers that overflow the
    base become infinite.

    Raises:
        TypeError: `format` is not a Format, or a value is not a number.
        ValueError: a string is not a number, or nested lists differ in length.

    Examples:
        >>> import mcftensor as mcf
        >>> x = mcf.exact.from_exact(["0.1", "1/3"], mcf.fp32x2)
        >>> x.components[0]
        tensor([0.1000, 0.3333])
        >>> mcf.exact.to_fraction(mcf.exact.from_exact("0.1", mcf.bf16x2))
        Fraction(209715, 2097152)
    """
    format = require_format(format, "from_exact", with_rules=True)
    if format.rules is not None:
        expansion_of_all = from_exact(values, fp64x2, device=device)
        return format.rules.convert(expansion_of_all.components[0], format)
    format = require_expansion_format(format, "from_exact")
    numbers = np.array(values, dtype=object)
    if numbers.ndim and any(isinstance(x, (list, tuple)) for x in numbers.flat):
        raise ValueError("from_exact: the nested lists have different lengths")
    columns = [_terms(x, format) for x in numbers.flat]
    terms = [
        torch.tensor(column, dtype=format.base, device="cpu").view(numbers.shape).to(device)
        for column in (zip(*columns, strict=True) if columns else [[]] * format.terms)
    ]
    leading, *tails = expansion.renormalize(terms)
    leading = torch.where(leading == 0, terms[0], leading)  # the sign of a zero
    return MCFTensor.of([leading, *tails], format)


def to_fraction(x: Tensor) -> Any:
    """Return the exact values of a tensor as fractions.

    Args:
        x: an expansion, or a plain floating tensor.

    Returns:
        A `fractions.Fraction` for a 0-d tensor, else nested lists of them.

    Raises:
        TypeError: `x` is not a real floating tensor.
        ValueError: `x` holds infinities or NaN, which are not fractions.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.exact.to_fraction(mcf.as_expansion(torch.tensor([0.5, 3.0]), mcf.bf16x2))
        [Fraction(1, 2), Fraction(3, 1)]
    """
    terms = _decoded("to_fraction", x)
    if not all(bool(torch.isfinite(term).all()) for term in terms):
        raise ValueError(
            f"to_fraction: the tensor of shape {tuple(x.shape)} holds infinities or NaN, which "
            "are not fractions"
        )
    return _each(lambda numbers: builtins.sum(map(Fraction, numbers), Fraction(0)), terms, x.shape)


def to_decimal(x: Tensor, digits: int | None = None) -> Any:
    """Return the values of a tensor as decimals, rounded once to significant digits, ties to even.

    Args:
        x: an expansion, or a plain floating tensor.
        digits: the number of significant digits; by default enough for the bits of the format, 33
            for `fp64x2`. A number with terms far apart has more bits; `to_fraction` is exact.

    Returns:
        A `decimal.Decimal` for a 0-d tensor, else nested lists of them.

    *Special values*: infinities, NaN and the sign of a zero are kept.

    Raises:
        TypeError: `x` is not a real floating tensor.
        ValueError: `digits` is below 1.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.exact.from_exact("1/3", mcf.fp64x2)
        >>> mcf.exact.to_decimal(x, 30)
        Decimal('0.333333333333333333333333333333')
        >>> mcf.exact.to_decimal(x * x, 5)
        Decimal('0.11111')
    """
    terms = _decoded("to_decimal", x)
    if digits is not None and digits < 1:
        raise ValueError(f"to_decimal: digits is {digits!r}; give 1 or more")
    if isinstance(x, MCFTensor):
        precision = x.format.precision
    else:
        precision = BASES[x.dtype].precision if x.dtype in BASES else 53
    count = digits_of(precision) if digits is None else digits
    return _each(lambda numbers: decimal_of(numbers, count), terms, x.shape)


def _decoded(name: str, x: Tensor) -> Sequence[Tensor]:
    """Return the floats whose sum is the tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {kind}; give an expansion or a real floating tensor")
    return x.format.decode(x.components) if isinstance(x, MCFTensor) else (x,)


def _each(function: Callable[[Sequence[float]], Any], terms: Sequence[Tensor], shape: Any) -> Any:
    """Apply a function to the terms of each number, and return nested lists."""
    columns = [term.reshape(-1).tolist() for term in terms]
    exact = np.empty(math.prod(shape), dtype=object)
    for i, numbers in enumerate(zip(*columns, strict=True)):
        exact[i] = function(numbers)
    return exact.reshape(tuple(shape)).tolist() if shape else exact[0]


def _terms(x: object, format: ExpansionFormat) -> list[float]:
    """Round a number to the base, then the remainder, and so on."""
    special = _special(x)
    terms = [] if special is None else [special]
    rest = _fraction(x) if special is None else Fraction(0)
    while len(terms) < format.terms:
        terms.append(_rounded(rest, format))
        rest = rest - Fraction(terms[-1]) if math.isfinite(terms[-1]) else Fraction(0)
    return terms


def _special(x: object) -> float | None:
    """Return infinities, NaN and zeros as floats, with their sign; None for other numbers.

    Decimals far beyond the range of float64 are infinities and zeros: as fractions, they would have
    as many digits as their exponents say.
    """
    try:
        number = float(x)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    if not isinstance(x, (str, Decimal)):
        is_zero = number == 0 and not _fraction(x)  # one too small for a float is no zero
        return number if is_zero or not math.isfinite(number) else None
    with contextlib.suppress(InvalidOperation):  # its exponent has more than 18 digits
        decimal = Decimal(x)
        if decimal.is_finite() and decimal and abs(decimal.adjusted()) < 500:
            return None
    return number


def _fraction(x: object) -> Fraction:
    if isinstance(x, bool) or not isinstance(x, (int, float, str, Fraction, Decimal, np.number)):
        raise TypeError(
            f"from_exact: {x!r} is no number; give Fraction, Decimal, int, float or a string"
        )
    try:
        return Fraction(x.item() if isinstance(x, np.number) else x)
    except ValueError:
        raise ValueError(
            f"from_exact: {x!r} is no number; strings look like '0.1' or '1/3'"
        ) from None


def _rounded(x: Fraction, format: ExpansionFormat) -> float:
    """Round to nearest in the base, ties to even; float64 holds the result."""
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, format.min_exponent) - format.base_precision + 1)
    result = round(x / quantum) * quantum
    if abs(result) >= Fraction(2) ** (format.max_exponent + 1):
        return math.inf if x > 0 else -math.inf
    return float(result)
