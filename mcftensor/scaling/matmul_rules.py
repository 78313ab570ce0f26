"""Rules of matrix products: sums of K products are divided by √K, rounded down to a power of two.

Data is multiplied in float32, and the product is rounded to data once. If the data of the factors
is below A and B, the product's is below A · B · √(2K): float16 overflows only where A · B · √(2K)
is above 65,504.
"""

from __future__ import annotations

from typing import Any

from mcftensor.scaling.exponents import half_log2, times_power
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, lead, number, product_of, sum_of


def _product_by(operator: Any, contracted: int, with_bias: Any = None) -> None:
    """Register a product that contracts dimension `contracted` of x, and its form with a bias."""

    @rule(operator)
    def product(x: Any, y: Any) -> Unrounded:
        a, b = lead(x), lead(y)
        half = half_log2(x.shape[contracted])
        data = operator(a.mantissa, b.mantissa)
        return Unrounded(times_power(data, -half), a.exponent + b.exponent + half)

    if with_bias is not None:

        @rule(with_bias)
        def added(bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Unrounded:
            return _with_bias(bias, product(x, y), beta, alpha)


_product_by(aten.mm, 1, aten.addmm)  # linear layers, forward and backward
_product_by(aten.bmm, 2, aten.baddbmm)  # attention in single steps
_product_by(aten.mv, 1)
_product_by(aten.dot, 0)


def _with_bias(bias: Any, made: Unrounded, beta: float, alpha: float) -> Unrounded:
    if alpha != 1:
        made = product_of(made, number(alpha))
    added = lead(bias) if beta == 1 else product_of(lead(bias), number(beta))
    return sum_of(made, added) if beta else made
