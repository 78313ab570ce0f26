"""Rules that many operators share: on data, in float32, or proportional to a gradient.

Each function registers operators with a rule that calls them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import Exponent
from mcftensor.scaling.rule_table import rule
from mcftensor.scaling.scaled import is_scaled
from mcftensor.scaling.scaled_numbers import Placing, Unrounded, number


def on_data(*operators: Any, keeps_tails: bool = False) -> None:
    """Register operators that are proportional to their first operand.

    They are applied to its data. Floating results have its exponent.
    """

    @rule(*operators, keeps_tails=keeps_tails, takes_operator=True)
    def compute(operator: Any, x: Any, *how: Any, **also: Any) -> Any:
        a = number(x)
        return unrounded(operator(a.mantissa, *how, **also), a.exponent)


def in_float32(*operators: Any, placing: Placing) -> None:
    """Register nonlinear operators: they are applied to numbers in float32, at a scale of 1."""

    @rule(*operators, takes_operator=True)
    def compute(operator: Any, *args: Any, **also: Any) -> Any:
        return unrounded(operator(*map(plain_operand, args), **also), 0, placing)


def by_gradient(*operators: Any, placing: Placing = "by rule") -> None:
    """Register backward operators, applied to a gradient's data and the others' numbers."""

    @rule(*operators, takes_operator=True)
    def backward(operator: Any, gradient: Any, *args: Any, **also: Any) -> Any:
        g = number(gradient)
        made = operator(g.mantissa, *map(plain_operand, args), **also)
        return unrounded(made, g.exponent, placing)


def plain_operand(x: Any) -> Any:
    """Return an operand in float32; indices and masks unchanged."""
    if is_scaled(x):
        return number(x).plain()
    is_float = isinstance(x, Tensor) and x.is_floating_point()
    return x.to(torch.float32) if is_float else x


def unrounded(made: Any, exponent: Exponent, placing: Placing = "by rule") -> Any:
    """Return results as numbers with an exponent; indices and masks unchanged."""
    if isinstance(made, tuple):
        return tuple(unrounded(x, exponent, placing) for x in made)
    return Unrounded(made, exponent, placing) if made.is_floating_point() else made
