"""Products with powers of two on all terms: exact, unless a term leaves the range of the base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, power_of_two
from mcftensor.dispatch.default_handler import compute, of_values
from mcftensor.dispatch.operands import selected
from mcftensor.dispatch.registry import implements
from mcftensor.passes import expansion
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


@implements(aten.ldexp.Tensor)  # torch.ldexp
@of_values
def ldexp(func: Any, x: Any, exponent: Any) -> Any:
    """Return x times a power of two with integer exponents."""
    if not isinstance(x, MCFTensor) or exponent.is_floating_point():
        return compute(func, x, exponent)
    return selected(_times_power(x._read(), exponent), x._format, "value", [x])


@implements(aten.frexp.Tensor)  # torch.frexp
@of_values
def frexp(func: Any, x: MCFTensor) -> Any:
    """Return values in [1/2, 1), or in (-1, -1/2], and the exponents of their powers of two."""
    leading, *tails = x._read()
    wide = torch.float32 if leading.dtype.itemsize == 2 else leading.dtype
    mantissa, exponent = torch.frexp(leading.to(wide))
    for tail in tails[:1]:  # the sign of all tails
        exponent = exponent - ((mantissa.abs() == 0.5) & (mantissa * tail < 0)).to(exponent.dtype)
    exponent = torch.where(torch.isfinite(leading), exponent, 0)
    return selected(_times_power([leading, *tails], -exponent), x._format, "value", [x]), exponent


def _times_power(terms: Sequence[Tensor], exponent: Tensor) -> list[Tensor]:
    """Multiply terms by powers of two, in five steps within the range of their base.

    Only one step rounds, since a full step from a subnormal number leads to zero.
    """
    base, wide = BASES[terms[0].dtype], torch.float64
    if terms[0].dtype.itemsize < 8:
        wide = torch.float32
    step = base.max_exponent - 1
    rest = exponent.clamp(-4 * step, 4 * step)
    full = torch.div(rest, step, rounding_mode="trunc")
    parts = [rest - full * step]
    parts += [torch.sign(full) * step * (full.abs() > i) for i in range(4)]
    for part in parts:
        power = power_of_two(part, wide).to(terms[0].dtype)
        terms = [x * power for x in terms]
    if len(terms) == 1:
        return list(terms)
    leading, *tails = expansion.renormalize(terms, len(terms))
    return [torch.where(leading == 0, terms[0], leading), *tails]  # the sign of a zero
