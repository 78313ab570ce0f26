"""Formats made of floats: expansions, and plain tensors as the formats of one float."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.bases import BASES, Base
from mcftensor.arithmetic.numbers import Floats, Number, Sum
from mcftensor.arithmetic.rounding import peel, round_to_terms
from mcftensor.arithmetic.terms import Network
from mcftensor.arithmetic.wide import Machine, Wide
from mcftensor.formats.format import Component, Format, Rounding, _of_floats

MAX_TERMS = 6
"""What float64 can evaluate of bfloat16, and what the range of float32 holds near 1."""


class PlainFormat(Format):
    """A plain tensor: one float, or whatever else a dtype holds."""

    is_plain = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self.components = (Component("values", dtype),)
        self.numbers = Machine(torch.float32 if dtype.itemsize <= 4 else torch.float64)

    @property
    def result(self) -> PlainFormat:
        """Itself."""
        return self

    def decode(self, stored: Floats) -> Floats:
        """Itself."""
        return stored

    def encode(self, number: Sum, noise: Tensor | None) -> Floats:
        """Rounded once."""
        return (number.to(self.dtype),)


class ExpansionFormat(Format):
    """Unevaluated sums of floats of one type; `Format(base, terms, rounding)` makes these."""

    base: torch.dtype
    terms: int

    def __new__(
        cls, base: torch.dtype, terms: int, rounding: Rounding = "nearest"
    ) -> ExpansionFormat:
        """The one format of these."""
        _check(base, terms, rounding)
        return _FORMATS[base, int(terms), rounding]

    @classmethod
    def _made(cls, base: Base, terms: int, rounding: Rounding) -> ExpansionFormat:
        self: ExpansionFormat = object.__new__(cls)
        self.name = f"{base.name}x{terms}{'sr' * (rounding == 'stochastic')}"
        self.base, self.terms, self.rounding = base.dtype, terms, rounding
        self.components = tuple(Component(f"term{i}", base.dtype) for i in range(terms))
        wide = self.wide
        spare = rounding == "stochastic"  # networks compute one term more, to round it off
        self.numbers = Network(base.dtype, terms + spare) if wide is None else Machine(wide)
        return self

    @property
    def base_precision(self) -> int:
        """Significand bits p of one term, the implicit one counted."""
        return BASES[self.base].precision

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
        return BASES[self.base].min_exponent

    @property
    def max_exponent(self) -> int:
        """Exponent e of the largest numbers: every finite one is below 2^(e+1)."""
        return BASES[self.base].max_exponent

    @property
    def full_precision_min(self) -> float:
        """Smallest magnitude at which a number is held to u^n for n terms.

        Below it the last term falls among the subnormals of the base, loses bits, and at last
        vanishes.
        """
        return 2.0 ** (self.min_exponent + (self.terms - 1) * self.base_precision)

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
    def result(self) -> ExpansionFormat:
        """Arithmetic gives expansions."""
        return self

    @property
    def nearest(self) -> ExpansionFormat:
        """The same format, rounded to nearest."""
        return _FORMATS[self.base, self.terms, "nearest"]

    def __repr__(self) -> str:
        if self in FORMATS:
            return f"mcf.{self.name}"
        rounding = ', rounding="stochastic"' if self.rounding == "stochastic" else ""
        return f"mcf.Format({self.base}, {self.terms}{rounding})"

    def decode(self, stored: Floats) -> Floats:
        """The terms themselves."""
        return stored

    def encode(self, number: Sum, noise: Tensor | None) -> Floats:
        """Normalized terms."""
        return number.split(self.base, self.terms, noise)

    def rounded(self, number: Number) -> Number:
        """A number rounded to nearest in this format, to go on with."""
        if not isinstance(number, Wide):
            return number  # networks have rounded it
        total = round_to_terms(number.value, self.base, self.terms)
        return Wide([x.to(total.dtype) for x in peel(total, self.base, self.terms)], total)


def _check(base: Any, terms: Any, rounding: Any) -> None:
    if base not in BASES:
        raise TypeError(
            f"Format: base {base!r} is not a dtype that expansions are made of; "
            "use torch.bfloat16, float16, float32 or float64"
        )
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"Format: rounding {rounding!r} given; it is 'nearest' or 'stochastic'")
    most = _most_terms(base, rounding)
    if not (isinstance(terms, int) and 2 <= terms <= most):
        raise ValueError(
            f"Format: {terms!r} terms given; expansions of {BASES[base].name} with "
            f"{rounding} rounding have 2 to {most}"
        )


def _most_terms(base: torch.dtype, rounding: Rounding) -> int:
    return 3 if base == torch.float16 else MAX_TERMS - (rounding == "stochastic")


_ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
_FORMATS = {
    (dtype, terms, rounding): ExpansionFormat._made(base, terms, rounding)
    for (dtype, base), rounding in itertools.product(BASES.items(), _ROUNDINGS)
    for terms in range(2, _most_terms(dtype, rounding) + 1)
}
PLAIN = {
    dtype: PlainFormat(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""Plain tensors as formats."""

for _format in (*_FORMATS.values(), *PLAIN.values()):
    _format.register()
_of_floats.append(ExpansionFormat)

bf16x2 = _FORMATS[torch.bfloat16, 2, "nearest"]
bf16x3 = _FORMATS[torch.bfloat16, 3, "nearest"]
fp16x2 = _FORMATS[torch.float16, 2, "nearest"]
fp32x2 = _FORMATS[torch.float32, 2, "nearest"]
fp32x3 = _FORMATS[torch.float32, 3, "nearest"]
fp64x2 = _FORMATS[torch.float64, 2, "nearest"]

FORMATS = (bf16x2, bf16x3, fp16x2, fp32x2, fp32x3, fp64x2)
"""The formats that have a name of their own."""


def default_format(shape: torch.Size) -> ExpansionFormat:
    """The format a tensor of this shape gets when none is asked for.

    `bf16x3` for at most one dimension longer than 1, else `bf16x2`: norm weights live near 1,
    where two terms lose much of a small update, and such tensors are small.
    """
    return bf16x3 if sum(length > 1 for length in shape) <= 1 else bf16x2


def require_format(format: object, where: str) -> Format:
    """`format` itself if it is a Format, else a TypeError that names the caller `where`."""
    if isinstance(format, Format) and not isinstance(format, PlainFormat):
        return format
    known = ", ".join(f"mcf.{f.name}" for f in FORMATS)
    raise TypeError(
        f"{where}: {format!r} is not a format; give one of {known}, or build one with mcf.Format"
    )


def require_expansion_format(format: object, where: str) -> ExpansionFormat:
    """The same for what works on terms alone."""
    if isinstance(require_format(format, where), ExpansionFormat):
        return format  # type: ignore[return-value]
    raise TypeError(f"{where}: {format!r} does not consist of terms")
