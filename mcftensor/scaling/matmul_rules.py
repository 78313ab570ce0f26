"""Rules of matrix products: sums of K products are divided by √K, rounded down to a power of two.

Products are taken of data in float32, and rounded to data once. With data below A and B, theirs is
below A · B · √(2K): float16 overflows only where A · B · √(2K) is above 65,504.
"""

from __future__ import annotations

from typing import Any

import torch

from mcftensor.scaling.exponents import half_log2, times_power
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, lead, number, product_of, sum_of


def _product(operator: Any, x: Any, y: Any, contracted: int) -> Unrounded:
    a, b = lead(x), lead(y)
    half = half_log2(contracted)
    data = operator(a.mantissa, b.mantissa)
    return Unrounded(times_power(data, -half), a.exponent + b.exponent + half)


@rule(aten.mm)
def _mm(x: Any, y: Any) -> Unrounded:
    """Linear layers, forward and backward."""
    return _product(torch.mm, x, y, x.shape[1])


@rule(aten.bmm)
def _bmm(x: Any, y: Any) -> Unrounded:
    """Attention that is written out."""
    return _product(torch.bmm, x, y, x.shape[2])


@rule(aten.mv)
def _mv(x: Any, y: Any) -> Unrounded:
    return _product(torch.mv, x, y, x.shape[1])


@rule(aten.dot)
def _dot(x: Any, y: Any) -> Unrounded:
    return _product(torch.dot, x, y, x.shape[0])


@rule(aten.addmm)
def _addmm(bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Unrounded:
    """Linear layers with a bias."""
    return _with_bias(bias, _mm(x, y), beta, alpha)


@rule(aten.baddbmm)
def _baddbmm(bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Unrounded:
    return _with_bias(bias, _bmm(x, y), beta, alpha)


def _with_bias(bias: Any, made: Unrounded, beta: float, alpha: float) -> Unrounded:
    if alpha != 1:
        made = product_of(made, number(alpha))
    added = lead(bias) if beta == 1 else product_of(lead(bias), number(beta))
    return sum_of(made, added) if beta else made
