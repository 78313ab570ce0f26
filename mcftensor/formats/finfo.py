"""The limits of a format, as `torch.finfo` gives the limits of a dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mcftensor.formats.expansion_format import ExpansionFormat
from mcftensor.formats.format import Format
from mcftensor.formats.requirements import require_format


@dataclass(frozen=True)
class FInfo:
    """The limits of a format, under the names of `torch.finfo`; `finfo` returns these objects.

    Attributes:
        dtype: name of the format.
        bits: bits of storage an element, all terms together.
        eps: twice the largest relative error of one rounding to nearest. Since each term but the
            first has its sign, it is u^n / 2^(n - 2) for n terms, 2^-16 for `bf16x2`. Numbers
            between 1 and 1 + eps exist: precision is not fixed, see `torch.nextafter`.
        max: the largest number whose terms have one sign, rounded to float64.
        min: -max.
        smallest_normal: the smallest number whose leading term has all its bits.
        full_precision_min: the smallest magnitude at which a number is held to u^n; eps holds
            from 2^(n - 1) times that. Below it, the last term is subnormal in the base. For
            numbers that share a scale, the magnitude is the largest of them.
        smallest_subnormal: the smallest number above 0.
        resolution: 10^-d, where d is the number of decimal digits that every number keeps.
    """

    dtype: str
    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    full_precision_min: float
    smallest_subnormal: float
    resolution: float

    @property
    def tiny(self) -> float:
        """Another name of `smallest_normal`."""
        return self.smallest_normal


def finfo(format: Format | str) -> FInfo:
    """Return the limits of a format, as `torch.finfo` does for a dtype.

    Raises:
        TypeError: `format` is not a Format.

    Examples:
        >>> import mcftensor as mcf
        >>> mcf.finfo(mcf.bf16x2).eps == 2.0**-16
        True
        >>> mcf.finfo(mcf.fp32x2).resolution
        1e-14
    """
    format = require_format(format, "finfo")
    if isinstance(format, ExpansionFormat):
        base = torch.finfo(format.base)
        eps = 4 * (format.u / 2) ** format.terms
        largest = math.fsum(base.max * (format.u / 2) ** i for i in range(format.terms))
        normal, full_precision_min = base.smallest_normal, format.full_precision_min
        smallest = base.smallest_normal * 2 * format.u
    else:  # storage formats: `precision` bits of a machine type
        eps, largest = 2.0 ** (1 - format.precision), format.largest
        normal, smallest = format.smallest
        full_precision_min = normal
    return FInfo(
        dtype=format.name,
        bits=int(8 * format.bytes),
        eps=eps,
        max=largest,
        min=-largest,
        smallest_normal=normal,
        full_precision_min=full_precision_min,
        smallest_subnormal=smallest,
        resolution=10.0 ** -math.floor(-math.log10(eps)),
    )
