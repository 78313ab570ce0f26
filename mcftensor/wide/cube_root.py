"""The cube root on guarded expansions: a polynomial, Halley's method, then a term a step."""

from __future__ import annotations

import torch

from mcftensor.arithmetic.base_types import BASES
from mcftensor.wide.exponentials import one
from mcftensor.wide.guarded import (
    Terms,
    exponent_of,
    finish,
    gathered,
    mul,
    neg,
    scaled,
    size_of,
    sub,
    times,
    to_integer,
    where,
)

_FIRST = (0.497878, 0.713062, -0.265975, 0.060854, -0.005487)
"""A polynomial with a relative error of 2^-9 on [1/2, 4]. Halley's method cubes the error."""


def cube_root(x: Terms) -> Terms:
    """The cube root, with the sign of x."""
    terms, leading = len(x), x[0]
    m, base = terms + 1, BASES[leading.dtype]
    is_ordinary = torch.isfinite(leading) & (leading != 0)
    size = where(is_ordinary, size_of(x), one(leading))
    lift = base.max_exponent // 12  # of the root, for numbers near the smallest
    is_tiny = size[0] < 2.0 ** (base.precision - base.max_exponent)
    size = where(is_tiny, times(size, 8.0**lift), size)
    k, _ = to_integer(exponent_of(size[0]) * (1 / 3))
    size = scaled(size, -3.0 * k)
    root = torch.zeros_like(leading)
    for c in reversed(_FIRST):
        root = root * size[0] + c
    for _ in range(2):
        cube = root * root * root
        root = root * ((cube + 2 * size[0]) / (2 * cube + size[0]))
    slope = 3 * root * root
    value: Terms = (root,)
    for _ in range(terms):
        rest = sub(size, mul(mul(value, value, m), value, m), m)
        value = gathered([*value, rest[0] / slope], len(value) + 1)
    value = scaled(value, k - torch.where(is_tiny, float(lift), 0.0))
    value = where(leading < 0, neg(value), value)
    return finish(value, terms, torch.where(is_ordinary, value[0], leading))
