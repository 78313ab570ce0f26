"""Scaled formats: low-precision data, and one power of two for the whole tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES
from mcftensor.arithmetic.noise import Rounding
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.arithmetic.rounding import round_to
from mcftensor.formats import Component, ExpansionFormat, Format, Machine, TailFormat, fp16i8
from mcftensor.kernels.program import PATTERNS
from mcftensor.scaling.exponents import times_any_power

TOPS: dict[torch.dtype, int] = {
    torch.float32: 60,  # so that float32 holds products
    torch.bfloat16: 60,
    torch.float16: 14,
    torch.float8_e4m3fn: 7,
    torch.float8_e5m2: 14,
}
"""Where the largest number is put at most: data is below 2^(top + 1), and does not overflow."""

_HALF_AND_TAIL = cast(TailFormat, fp16i8.nearest)
"""What data and an integer tail are, without the scale."""

PRECISIONS: dict[torch.dtype, int] = {
    torch.float32: 24,
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}


class _Exponent(Component):
    """One number for the whole tensor."""

    @property
    def is_shared(self) -> bool:
        """It is."""
        return True

    def shape(self, shape: torch.Size) -> torch.Size:
        """None."""
        return torch.Size()


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class ScaledFormat(Format):
    """Data of a small type times 2^s, with one integer s for each tensor; `scaled` makes these.

    Attributes:
        tail: the dtype of what follows the data, if anything does. That of a scaled expansion is
            stored times 2^precision, so that it is as large as the leading term: it has all its
            bits wherever that is a normal number. An int8 goes on where the bits of a float16 end.
        rounding: of what is written into tensors of this format.
        top: exponent of the largest number that data is given room for.
    """

    tail: torch.dtype | None
    dtype: torch.dtype = None  # type: ignore[assignment]  # that of the data, asked at every turn
    top: int
    arithmetic = "rules"
    shared = frozenset()  # blocks share nothing, and the exponent is the whole tensor's

    def __new__(
        cls,
        dtype: torch.dtype,
        tail: torch.dtype | None = None,
        rounding: Rounding = "nearest",
    ) -> ScaledFormat:
        """The one format of these."""
        self: ScaledFormat = object.__new__(cls)
        self.name = _name_of(dtype, tail, rounding)
        self.dtype, self.tail, self.rounding = dtype, tail, rounding
        self.top, self.numbers = TOPS[dtype], Machine(torch.float32)
        stored = [Component("data", dtype), *([] if tail is None else [Component("tail", tail)])]
        self.components = (*stored, _Exponent("exponent", torch.int32))
        return self.register()

    def __repr__(self) -> str:
        base = f"mcf.{BASES[self.dtype].name}x2" if self.tail == self.dtype else str(self.dtype)
        tail = ", tail=8" if self.tail == torch.int8 else ""
        how = "" if self.rounding == "nearest" else f", rounding={self.rounding!r}"
        return f"mcf.scaling.scaled({base}{tail}{how})"

    @property
    def precision(self) -> int:
        """Significand bits of a number."""
        return PRECISIONS[self.dtype] + self._bits_of_tail

    @property
    def _bits_of_tail(self) -> int:
        if self.tail is None:
            return 0
        return _HALF_AND_TAIL.bits if self.tail == torch.int8 else PRECISIONS[self.tail]

    @functools.cached_property
    def lead(self) -> ScaledFormat:
        """The format of the leading term alone, to nearest, in which products are taken."""
        return of_dtype(self.dtype)

    @property
    def result(self) -> ScaledFormat:
        """Arithmetic gives the leading term."""
        return self.lead

    @property
    def gradient(self) -> ScaledFormat:
        """Gradients have a scale of their own."""
        return self.lead

    def with_rounding(self, rounding: Rounding) -> ScaledFormat:
        """The same data, rounded in another way, if `scaled` has that."""
        return cast(ScaledFormat, Format.from_name(_name_of(self.dtype, self.tail, rounding)))

    @functools.cached_property
    def nearest(self) -> ScaledFormat:
        """The same format with rounding to nearest, for results."""
        return of_dtype(self.dtype, self.tail)

    @property
    def of_gradients(self) -> None:
        """Gradients are scaled already."""
        return None

    @property
    def of_sums(self) -> ScaledFormat:
        """Sums of gradients of 16 bits have two terms."""
        is_single = self.dtype.itemsize == 2 and self.tail is None
        return of_dtype(self.dtype, self.dtype) if is_single else self

    @property
    def of_states(self) -> ScaledFormat:
        """The format of new tensors like this one: only weights have an integer tail."""
        return self.lead if self.tail == torch.int8 else self.nearest

    # ---------------------------------------------------------------------------------- the codec

    def decode(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """The numbers in float64; what that cannot hold, below 2^-1022, becomes zero."""
        *parts, exponent = stored
        return [times_any_power(self.load(parts, torch.float64), exponent)]

    def leading(self, stored: Sequence[Tensor]) -> Tensor:
        """The numbers of the data alone."""
        (number,) = self.lead.decode([stored[0], stored[-1]])
        return number

    def about(self, stored: Sequence[Tensor]) -> str:
        """The exponent."""
        return f", exponent={stored[-1].item()}"

    def to_file(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Data without its exponent is no number: it is stored as the integers of its bits, so that
        no other program takes it for weights."""
        data, *others = stored
        return [data.view(PATTERNS[data.dtype.itemsize]), *others]

    def from_file(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Integers as data."""
        patterns, *others = stored
        return [patterns.view(self.dtype), *others]

    def store(self, x: Tensor) -> tuple[Tensor, ...]:
        """Numbers, already divided by 2^s, as data: each term is rounded to nearest, once.

        E4M3 and E5M2 saturate: what is too large becomes their largest number, and infinities too.
        """
        if self.dtype in FP8:
            most = torch.finfo(self.dtype).max
            return (x.clamp(-most, most).to(self.dtype),)
        if self.rounding == "stochastic":
            x = _dithered(x, PRECISIONS[self.dtype] + self._bits_of_tail)
        if self.tail == torch.int8:
            return tuple(_HALF_AND_TAIL.encode(Sum([x]), None))
        leading = round_to(x, self.dtype)
        if leading is x:
            leading = x.clone()
        if self.tail is None:
            return (leading,)
        rest = (x - leading.to(x.dtype)) * 2.0 ** PRECISIONS[self.dtype]
        return leading, round_to(torch.nan_to_num(rest, 0.0, 0.0, 0.0), self.dtype)

    def load(self, parts: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """Data as float32: exactly, but for a tail that lies further behind than that reaches."""
        if len(parts) == 1:
            return parts[0].to(dtype)
        if self.tail == torch.int8:
            return _HALF_AND_TAIL.decode(parts)[0].to(dtype)
        leading = parts[0].to(dtype)
        return leading + parts[1].to(dtype) * 2.0 ** -PRECISIONS[self.dtype]


def _name_of(dtype: torch.dtype, tail: torch.dtype | None, rounding: Rounding) -> str:
    base = str(dtype).removeprefix("torch.")
    if tail is not None:
        base = BASES[dtype].name + ("i8" if tail == torch.int8 else "x2")
    return f"scaled({base}{'' if rounding == 'nearest' else ', ' + rounding})"


def _dithered(x: Tensor, precision: int) -> Tensor:
    """x cut to some bits, after a random number below those has been added: right in the mean."""
    cut = 24 - precision
    bits = x.to(torch.float32).view(torch.int32)
    noise = torch.randint_like(bits, 1 << cut)
    rounded = (((bits + noise) >> cut) << cut).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


_one_object = functools.lru_cache(maxsize=None)(ScaledFormat)


def of_dtype(
    dtype: torch.dtype, tail: torch.dtype | None = None, rounding: Rounding = "nearest"
) -> ScaledFormat:
    """Return the format object for a dtype, a tail and a rounding."""
    return _one_object(dtype, tail, rounding)


_half, _brain = torch.float16, torch.bfloat16
for _dtype in TOPS:  # known by their names, in files
    of_dtype(_dtype)
for _tail in (_half, torch.int8):
    of_dtype(_half, _tail)
of_dtype(_brain, _brain)
of_dtype(_half, None, "stochastic")
of_dtype(_half, torch.int8, "stochastic")
of_dtype(_brain, None, "stochastic")


def scaled(
    base: torch.dtype | Format,
    *,
    tail: int = 0,
    rounding: Literal["nearest", "stochastic"] = "nearest",
) -> ScaledFormat:
    """The format of tensors whose data is of a small type, times one power of two for each tensor.

    Scales are carried through operations, so that data stays near 1, where float16 and the 8-bit
    floats have their precision, whatever the size of the numbers is.

    Args:
        base: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32; or an expansion,
            `mcf.fp16x2` or `mcf.bf16x2`, which then has all its bits over the whole range.
        tail: 8 for weights of float16 with 19 bits: an integer of 8 bits goes on where its own end.
            Products are those of the float16; updates reach all. States made like such a weight
            are plain scaled float16.
        rounding: of what is written to a tensor of this format. `"stochastic"` is for parameters of
            float16 or bfloat16: steps that are too small for these survive in the mean. It is drawn
            from PyTorch's generator, and states and what is computed are rounded to nearest. Data
            below the normal range, 2^-14 of float16, is rounded to nearest too.

    Raises:
        TypeError: something else.
        ValueError: a tail or a rounding that the format does not have.

    *Source*: P. Balanca et al., "Scalify: scale propagation for efficient low-precision LLM
    training", arXiv 2407.17353, 2024.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([3e-9, 5e-8]), mcf.scaling.scaled(torch.float16))
        >>> x
        MCFTensor([2.9995e-09, 5.0000e-08], format=scaled(float16), exponent=-25)
        >>> x.components[0]
        tensor([0.1006, 1.6777], dtype=torch.float16)
        >>> mcf.scaling.scaled(mcf.fp16x2).precision
        22
        >>> mcf.scaling.scaled(torch.float16, tail=8).precision
        19
    """
    if tail not in (0, 8) or (tail and base != torch.float16):
        raise ValueError(
            f"scaled: {base!r} with tail={tail!r}; torch.float16 has a tail of 8 bits, others none"
        )
    narrow = base in (torch.float16, torch.bfloat16)
    if rounding != "nearest" and not (rounding == "stochastic" and narrow):
        raise ValueError(
            f"scaled: {base!r} with rounding={rounding!r}; nearest is for all formats, stochastic "
            "for torch.float16 and torch.bfloat16"
        )
    if isinstance(base, torch.dtype) and base in TOPS:
        return of_dtype(base, torch.int8 if tail else None, rounding)
    if isinstance(base, ExpansionFormat) and base.terms == 2 and base.rounding == "nearest":
        dtype = base.components[0].dtype
        if dtype in (torch.float16, torch.bfloat16):
            return of_dtype(dtype, dtype)
    names = ", ".join(str(dtype) for dtype in TOPS)
    raise TypeError(f"scaled: got {base!r}; give one of {names}, mcf.fp16x2 or mcf.bf16x2")


def promoted(formats: Sequence[ScaledFormat], *, keep_tails: bool) -> ScaledFormat:
    """The format of what operands of these formats give."""
    first = formats[0]
    if all(format is first for format in formats):
        return first.nearest if keep_tails else first.lead
    dtypes = {format.dtype for format in formats}
    if len(dtypes) > 1:
        dtypes -= set(FP8) if not dtypes <= set(FP8) else set()
    dtype, *others = dtypes
    for other in others:
        both_small = {dtype, other} <= set(FP8)
        dtype = torch.float16 if both_small else torch.promote_types(dtype, other)
    tails = {format.tail for format in formats}
    tail = tails.pop() if keep_tails and len(tails) == 1 else None
    return of_dtype(dtype, tail)
