"""The formats of expansions: which machine float, how many terms."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

import torch

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_DTYPE = {short: dtype for dtype, short in _SHORT.items()}

# dtype: (significand bits p, smallest normal exponent, largest exponent)
_BASES = {
    torch.bfloat16: (8, -126, 127),
    torch.float16: (11, -14, 15),
    torch.float32: (24, -126, 127),
    torch.float64: (53, -1022, 1023),
}


Rounding = Literal["nearest", "stochastic"]

MAX_TERMS = 6
"""What float64 can evaluate of bfloat16, and what the range of float32 holds near 1."""


@dataclass(frozen=True)
class Format:
    """A multi-component float: an unevaluated sum of `terms` floats of type `base`.

    Two formats are equal when base, number of terms and rounding are.

    Args:
        base: dtype of every term: bfloat16, float16, float32 or float64.
        terms: number of terms, from 2 to 6; at most 3 for float16, whose range ends there, and at
            most 5 with stochastic rounding, which is evaluated with one term more.
        rounding: of the last term. `"nearest"`, ties to even; or `"stochastic"`, up or down with
            probabilities that leave no error in the mean, drawn from PyTorch's generator of the
            device. Updates too small for the format then survive in the mean. It applies to
            arithmetic and to conversions into the format; what an expansion meets in a comparison
            or a choice, and what is filled in or placed by an index, is rounded to nearest.

    Raises:
        TypeError: `base` is not one of the four dtypes.
        ValueError: `terms` or `rounding` is not one of those.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.Format(torch.bfloat16, 2) == mcf.bf16x2
        True
        >>> mcf.bf16x3.precision, mcf.bf16x3.bytes
        (24, 6)
        >>> mcf.Format(torch.bfloat16, 2, rounding="stochastic").name
        'bf16x2sr'
    """

    base: torch.dtype
    terms: int
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.base not in _BASES:
            raise TypeError(
                f"Format: base {self.base!r} is not a dtype that expansions are made of; "
                "use torch.bfloat16, float16, float32 or float64"
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"Format: rounding {self.rounding!r} given; it is 'nearest' or 'stochastic'"
            )
        most = 3 if self.base == torch.float16 else MAX_TERMS - (self.rounding == "stochastic")
        if not (isinstance(self.terms, int) and 2 <= self.terms <= most):
            raise ValueError(
                f"Format: {self.terms!r} terms given; expansions of {_SHORT[self.base]} with "
                f"{self.rounding} rounding have 2 to {most}"
            )

    @property
    def name(self) -> str:
        """Short name, such as `"bf16x2"`; `Format.from_name` is its inverse."""
        suffix = "sr" if self.rounding == "stochastic" else ""
        return f"{_SHORT[self.base]}x{self.terms}{suffix}"

    @property
    def base_precision(self) -> int:
        """Significand bits p of one term, the implicit one counted."""
        return _BASES[self.base][0]

    @property
    def precision(self) -> int:
        """Significand bits of the whole, `terms` times those of one term."""
        return self.terms * self.base_precision

    @property
    def u(self) -> float:
        """Unit roundoff of the base, 2^-p. Error bounds are stated in powers of it."""
        return 2.0**-self.base_precision

    @property
    def min_exponent(self) -> int:
        """Exponent e of the smallest normal number 2^e of the base."""
        return _BASES[self.base][1]

    @property
    def max_exponent(self) -> int:
        """Exponent e of the largest numbers: every finite one is below 2^(e+1)."""
        return _BASES[self.base][2]

    @property
    def full_precision_min(self) -> float:
        """Smallest magnitude at which a number is held to u^n for n terms.

        Below it the last term falls among the subnormals of the base, loses bits, and at last
        vanishes.
        """
        return 2.0 ** (self.min_exponent + (self.terms - 1) * self.base_precision)

    @property
    def bytes(self) -> int:
        """Bytes per element, all terms together."""
        return self.terms * self.base.itemsize

    @property
    def wide(self) -> torch.dtype | None:
        """Machine dtype in which arithmetic of this format is evaluated and then split.

        None for bases of 32 and 64 bits and for more than three terms: there, networks of
        error-free transformations work.
        """
        if self.base.itemsize > 2 or self.terms > 3:
            return None
        in_float32 = self.terms == 2 and self.rounding == "nearest"
        return torch.float32 if in_float32 else torch.float64

    @property
    def nearest(self) -> Format:
        """The same format, rounded to nearest."""
        return self if self.rounding == "nearest" else Format(self.base, self.terms)

    @staticmethod
    @functools.cache
    def from_name(name: str) -> Format:
        """The format of a short name such as `"bf16x2"` or, rounded stochastically, `"bf16x2sr"`.

        Raises:
            ValueError: the name is not of the form base, x, number of terms.
        """
        match = re.fullmatch(r"(bf16|fp16|fp32|fp64)x(\d+)(sr)?", name)
        if match is None:
            raise ValueError(
                f"Format: {name!r} is not the name of a format; names look like 'bf16x2': "
                "bf16, fp16, fp32 or fp64, an x, and the number of terms"
            )
        return Format(_DTYPE[match[1]], int(match[2]), "stochastic" if match[3] else "nearest")

    def __repr__(self) -> str:
        if self in FORMATS:
            return f"mcf.{self.name}"
        rounding = ', rounding="stochastic"' if self.rounding == "stochastic" else ""
        return f"mcf.Format({self.base}, {self.terms}{rounding})"


bf16x2 = Format(torch.bfloat16, 2)
bf16x3 = Format(torch.bfloat16, 3)
fp16x2 = Format(torch.float16, 2)
fp32x2 = Format(torch.float32, 2)
fp32x3 = Format(torch.float32, 3)
fp64x2 = Format(torch.float64, 2)

FORMATS = (bf16x2, bf16x3, fp16x2, fp32x2, fp32x3, fp64x2)
"""The formats that have a name of their own."""


def default_format(shape: torch.Size) -> Format:
    """The format a tensor of this shape gets when none is asked for.

    `bf16x3` for at most one dimension longer than 1, else `bf16x2`: norm weights live near 1,
    where two terms lose much of a small update, and such tensors are small.
    """
    return bf16x3 if sum(length > 1 for length in shape) <= 1 else bf16x2


def require_format(format: object, where: str) -> Format:
    """`format` itself if it is a Format, else a TypeError that names the caller `where`."""
    if isinstance(format, Format):
        return format
    known = ", ".join(f"mcf.{f.name}" for f in FORMATS)
    raise TypeError(
        f"{where}: {format!r} is not a format; give one of {known}, or build one with mcf.Format"
    )
