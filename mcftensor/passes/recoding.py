"""From one format to another, and out of all of them, with one rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.arithmetic.noise import draw_key, noise_of
from mcftensor.arithmetic.numbers import Sum
from mcftensor.arithmetic.rounding import collapse_terms
from mcftensor.formats import Format, named
from mcftensor.kernels.blocks import indices
from mcftensor.kernels.layout import empty_terms, template_of
from mcftensor.kernels.opaque import opaque


@opaque(lambda stored, source, format, key: named(format).empty_like(template_of(stored)))
def recode(stored: Sequence[Tensor], source: str, format: str, key: Tensor | None) -> list[Tensor]:
    """Components of one format as those of another."""
    f = named(format)
    noise = None if key is None else noise_of(f.rounding, key, indices(stored[0]))
    found = f.encode(Sum(named(source).decode(stored)), noise)
    return [x.clone() if any(x is y for y in stored) else x for x in found]


@opaque(lambda stored, source, dtype: empty_terms(stored, dtype, 1)[0])
def collapse(stored: Sequence[Tensor], source: str, dtype: torch.dtype) -> Tensor:
    """The numbers stored, as plain floats."""
    return collapse_terms(named(source).decode(stored), dtype)


def key_for(format: Format, device: torch.device) -> Tensor | None:
    """A key where the format rounds stochastically."""
    return draw_key(device) if format.rounding == "stochastic" else None
