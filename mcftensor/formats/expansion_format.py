"""Multi-component floats: unevaluated sums of floats of one type."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any, get_args

import torch

from mcftensor.arithmetic import networks
from mcftensor.arithmetic.base_types import BASES
from mcftensor.arithmetic.machine_numbers import Machine, Wide
from mcftensor.arithmetic.network_numbers import Network
from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Number, Numbers, Sum
from mcftensor.arithmetic.rounding import peel, quiet, round_to_terms
from mcftensor.formats.format import _REGISTRY, SUFFIXES, Component, Format, named

MAX_TERMS = 6
"""The largest number of terms: float64 evaluates as many of bfloat16, and near 1 the range of
float32 holds as many."""


class ExpansionFormat(Format):
    """Unevaluated sums of floats of one type; `Format(base, terms, rounding)` makes these."""

    arithmetic = "terms"
    base: torch.dtype
    terms: int
    _numbers: Numbers

    def __new__(
        cls, base: torch.dtype, terms: int, rounding: Rounding = "nearest"
    ) -> ExpansionFormat:
        """Return the one format of these parameters."""
        _check(base, terms, rounding)
        name = f"{BASES[base].name}x{terms:d}{SUFFIXES[rounding]}"
        if name in _REGISTRY:
            return _REGISTRY[name]  # type: ignore[return-value]
        self: ExpansionFormat = object.__new__(cls)
        self.name, self.base, self.terms, self.rounding = name, base, terms, rounding
        self.components = tuple(Component(f"term{i}", base) for i in range(terms))
        spare = self.takes_key  # networks compute one more term, to round it off by noise
        wide = self.wide
        self._numbers = Network(base, terms + spare) if wide is None else Machine(wide)
        return self.register()

    @property
    def numbers(self) -> Numbers:  # type: ignore[override]
        """The kind of numbers that arithmetic uses on this device."""
        return self._numbers.available()

    @property
    def numbers_of_steps(self) -> Numbers:
        """The kind of numbers that fused steps use.

        It is float32 also for two bfloat16 terms that are rounded stochastically: noise decides a
        sum of two float32 numbers, the leading term and the rest.
        """
        is_pair = (self.base, self.terms, self.rounding) == (torch.bfloat16, 2, "stochastic")
        return Machine(torch.float32) if is_pair else self.numbers

    @property
    def base_precision(self) -> int:
        """Significand bits p of one term, including the implicit one."""
        return BASES[self.base].precision

    @property
    def precision(self) -> int:
        """Significand bits of a number: `terms` times the bits of one term."""
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
        """Exponent e of the largest numbers; every finite number is below 2^(e+1)."""
        return BASES[self.base].max_exponent

    def extends(self, other: Format) -> bool:
        """Whether this format has terms of the same base, and at least as many."""
        if not isinstance(other, ExpansionFormat):
            return False
        return other.base == self.base and other.terms <= self.terms

    @property
    def full_precision_min(self) -> float:
        """Smallest magnitude at which a number is held to u^n for n terms.

        Below it, the last term becomes subnormal in the base, loses bits, and finally vanishes.
        """
        return 2.0 ** (self.min_exponent + (self.terms - 1) * self.base_precision)

    @property
    def exceeds_float64(self) -> bool:
        """Whether float64 rounds some numbers of this format: terms may lie further apart."""
        base, wide = BASES[self.base], BASES[torch.float64]
        reach = base.max_exponent - base.min_exponent + base.precision
        return self.terms > 1 and reach > wide.precision

    @property
    def wide(self) -> torch.dtype | None:
        """Machine dtype in which arithmetic of this format is evaluated and then split.

        None for bases of 32 and 64 bits and for more than three terms, which are evaluated by
        networks of error-free transformations.
        """
        if self.base.itemsize > 2 or self.terms > 3:
            return None
        in_float32 = self.terms == 2 and self.rounding == "nearest"
        return torch.float32 if in_float32 else torch.float64

    @property
    def result(self) -> ExpansionFormat:
        """This format: arithmetic gives expansions."""
        return self

    def sums_in(self, machine: torch.dtype) -> ExpansionFormat:
        """Return the format with terms of `machine` that holds a sum before it is rounded."""
        if machine == self.base:
            return ExpansionFormat(machine, self.terms + self.takes_key)
        return ExpansionFormat(
            machine, max(2, (self.precision + 8) // BASES[machine].precision + 1)
        )

    def doubled_in(self, machine: torch.dtype) -> ExpansionFormat:
        """Return the format with terms of `machine` and twice the bits, or the longest one."""
        terms = -(-2 * self.precision // BASES[machine].precision)
        return ExpansionFormat(machine, min(max(2, terms), MAX_TERMS))

    @functools.cached_property
    def of_gradients(self) -> Format:
        """The same terms, rounded to nearest."""
        return self.nearest

    @property
    def guarded(self) -> ExpansionFormat:
        """The format with one more term, rounded to nearest, or with the most terms there are."""
        most = _most_terms(self.base, "nearest")
        return ExpansionFormat(self.base, min(self.terms + 1, most))

    def with_rounding(self, rounding: Rounding) -> ExpansionFormat:
        """Return the format with the same terms and another rounding of the last one."""
        return ExpansionFormat(self.base, self.terms, rounding)

    def __repr__(self) -> str:
        if self in FORMATS:
            return f"mcf.{self.name}"
        rounding = f', rounding="{self.rounding}"' if self.takes_key else ""
        return f"mcf.Format({self.base}, {self.terms}{rounding})"

    def decode(self, stored: Floats) -> Floats:
        """Return the terms themselves."""
        return stored

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Return normalized terms."""
        leading, *tails = number.split(self.base, self.terms, noise)
        return [quiet(leading), *tails]

    def normalized(self, stored: Floats) -> tuple[Floats, int]:
        """Return normalized terms and the number of inconsistent elements.

        An element is inconsistent if a term is more than half an ulp of the term before it.
        """
        parts = [stored]
        if all(x.is_contiguous() and x.numel() > _BLOCK for x in stored):  # one pass over memory
            parts = list(zip(*(x.view(-1).split(_BLOCK) for x in stored), strict=True))
        found, misfits = zip(*map(_normalized, parts), strict=True)
        if all(map(operator.is_, found, parts)):
            return stored, 0
        return [torch.cat(x).view_as(stored[0]) for x in zip(*found, strict=True)], sum(misfits)

    def rounded(self, number: Number) -> tuple[Floats, Number]:
        """Return normalized terms of a number rounded to nearest, and their sum."""
        if not isinstance(number, Wide):
            return self.encode(number, None), number  # networks have rounded it already
        total = round_to_terms(number.value, self.base, self.terms)
        terms = peel(total, self.base, self.terms)
        return [quiet(terms[0]), *terms[1:]], Wide([x.to(total.dtype) for x in terms], total)


_BLOCK = 1 << 16


def _normalized(stored: Floats) -> tuple[Floats, int]:
    """`Format.normalized` of some elements; the same object if they are normalized."""
    fits, is_settled = torch.ones_like(stored[0], dtype=torch.bool), True
    for i, (a, b) in enumerate(itertools.pairwise(stored)):
        total = a + b
        if torch.equal(total, a):
            continue
        where = (total != a).nonzero(as_tuple=True)
        a, b = a[where], b[where]
        moved = total[where] - a  # by an ulp on a tie
        stays, is_tie = b == 0, b.isfinite() & (moved == b + b)
        fits[where] &= stays | is_tie
        if i + 2 < len(stored):  # a tie is normalized if the next term says that a is nearer
            stays |= is_tie & (stored[i + 2][where].sign() == -b.sign())
        is_settled &= bool(stays.all())
    if is_settled:
        return stored, 0
    terms = networks.replace_nonfinite(networks.distill(stored, len(stored)), stored[0])
    return terms, int(fits.numel() - fits.count_nonzero())


def of_floats(
    base: torch.dtype | None = None, terms: int | None = None, rounding: Rounding = "nearest"
) -> Format:
    """Return the format that `Format(base, terms, rounding)` gives."""
    if base == torch.bfloat16 and terms == 1 and rounding in SUFFIXES and rounding != "nearest":
        return named("bf16" + SUFFIXES[rounding])
    return ExpansionFormat(base, terms, rounding)  # type: ignore[arg-type]


def _check(base: Any, terms: Any, rounding: Any) -> None:
    if base not in BASES:
        raise TypeError(
            f"Format: base {base!r} is not a dtype that expansions are made of; "
            "use torch.bfloat16, float16, float32 or float64"
        )
    if rounding not in get_args(Rounding):
        raise ValueError(
            f"Format: rounding {rounding!r} given; it is 'nearest', 'stochastic' or 'balanced'"
        )
    most = _most_terms(base, rounding)
    if not (isinstance(terms, int) and 2 <= terms <= most):
        raise ValueError(
            f"Format: {terms!r} terms given; expansions of {BASES[base].name} with "
            f"{rounding} rounding have 2 to {most}"
        )


def _most_terms(base: torch.dtype, rounding: Rounding) -> int:
    return 3 if base == torch.float16 else MAX_TERMS - (rounding != "nearest")


for _base, _rounding in itertools.product(BASES, get_args(Rounding)):
    for _terms in range(2, _most_terms(_base, _rounding) + 1):
        ExpansionFormat(_base, _terms, _rounding)

bf16x2 = ExpansionFormat(torch.bfloat16, 2)
bf16x3 = ExpansionFormat(torch.bfloat16, 3)
fp16x2 = ExpansionFormat(torch.float16, 2)
fp32x2 = ExpansionFormat(torch.float32, 2)
fp32x3 = ExpansionFormat(torch.float32, 3)
fp64x2 = ExpansionFormat(torch.float64, 2)

FORMATS = (bf16x2, bf16x3, fp16x2, fp32x2, fp32x3, fp64x2)
"""The expansions with predefined names."""


Format._of_floats = staticmethod(of_floats)
