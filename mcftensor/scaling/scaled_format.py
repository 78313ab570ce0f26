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
from mcftensor.scaling.exponents import floor_log2, times_any_power

TOPS: dict[torch.dtype, int] = {
    torch.float32: 60,  # so that float32 holds products
    torch.bfloat16: 60,
    torch.float16: 14,
    torch.float8_e4m3fn: 7,
    torch.float8_e5m2: 14,
}
"""The largest exponent of data: data is below 2^(top + 1), so that it does not overflow."""

_HALF_AND_TAIL = cast(TailFormat, fp16i8.nearest)
"""The format of data with an integer tail, without the scale."""


def _significand_bits(dtype: torch.dtype) -> int:
    """Return the significand bits of a machine float."""
    return 1 - floor_log2(torch.finfo(dtype).eps)


class _Exponent(Component):
    """The exponent: one number for the whole tensor."""

    @property
    def is_shared(self) -> bool:
        """True: all elements share the exponent."""
        return True

    def shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of a 0-d tensor."""
        return torch.Size()


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class ScaledFormat(Format):
    """Low-precision data times 2^s, with one integer s for each tensor; `scaled` makes these.

    Attributes:
        tail: the dtype of the tail, or None. The tail of a scaled expansion is stored times
            2^precision, so that it is as large as the leading term: it has all its bits wherever
            the leading term is normal. An int8 tail continues the bits of a float16.
        rounding: how numbers written into tensors of this format are rounded.
        top: exponent of the largest number for which data has room.
    """

    tail: torch.dtype | None
    dtype: torch.dtype = None  # type: ignore[assignment]  # the data's; read often, so no property
    top: int
    arithmetic = "rules"
    shared = frozenset()  # blocks share nothing; the exponent belongs to the whole tensor

    def __new__(
        cls,
        dtype: torch.dtype,
        tail: torch.dtype | None = None,
        rounding: Rounding = "nearest",
    ) -> ScaledFormat:
        """Return a new format, and register it."""
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

    @functools.cached_property
    def precision(self) -> int:
        """Significand bits of a number."""
        stored = [self.dtype] if self.tail is None else [self.dtype, self.tail]
        return sum(8 if x == torch.int8 else _significand_bits(x) for x in stored)

    @functools.cached_property
    def lead(self) -> ScaledFormat:
        """The format of the leading term, rounded to nearest, in which products are computed."""
        return of_dtype(self.dtype)

    @property
    def result(self) -> ScaledFormat:
        """The leading term's format: arithmetic drops tails."""
        return self.lead

    @property
    def gradient(self) -> ScaledFormat:
        """The leading term's format: gradients have their scale."""
        return self.lead

    def with_rounding(self, rounding: Rounding) -> ScaledFormat:
        """Return the format of the same data with another rounding, if `scaled` has it."""
        return cast(ScaledFormat, Format.from_name(_name_of(self.dtype, self.tail, rounding)))

    @functools.cached_property
    def nearest(self) -> ScaledFormat:
        """The same format with rounding to nearest, for results."""
        return of_dtype(self.dtype, self.tail)

    @property
    def of_gradients(self) -> None:
        """None: gradients are already scaled."""
        return None

    @property
    def of_sums(self) -> ScaledFormat:
        """Two terms for sums of 16-bit gradients, else this format."""
        is_single = self.dtype.itemsize == 2 and self.tail is None
        return of_dtype(self.dtype, self.dtype) if is_single else self

    @property
    def of_states(self) -> ScaledFormat:
        """The format of new tensors like this one; only weights have an integer tail."""
        return self.lead if self.tail == torch.int8 else self.nearest

    # ---------------------------------------------------------------------------------- the codec

    def decode(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Return the numbers in float64; numbers below 2^-1022 become zero."""
        *parts, exponent = stored
        return [times_any_power(self.load(parts, torch.float64), exponent)]

    def leading(self, stored: Sequence[Tensor]) -> Tensor:
        """Return the numbers of the leading term."""
        (number,) = self.lead.decode([stored[0], stored[-1]])
        return number

    def about(self, stored: Sequence[Tensor]) -> str:
        """Return the exponent as text."""
        return f", exponent={stored[-1].item()}"

    def to_file(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Return the data as integers of its bits, with the other components.

        Data without its exponent is not a number, and no other program should take it for weights.
        """
        data, *others = stored
        return [data.view(PATTERNS[data.dtype.itemsize]), *others]

    def from_file(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Return integers from a file as data."""
        patterns, *others = stored
        return [patterns.view(self.dtype), *others]

    def store(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return numbers, already divided by 2^s, as data; each term is rounded to nearest, once.

        E4M3 and E5M2 saturate: numbers that are too large and infinities become the largest number.
        """
        if self.dtype in FP8:
            most = torch.finfo(self.dtype).max
            return (x.clamp(-most, most).to(self.dtype),)
        if self.rounding == "stochastic":
            x = _dithered(x, self.precision)
        if self.tail == torch.int8:
            return tuple(_HALF_AND_TAIL.encode(Sum([x]), None))
        leading = round_to(x, self.dtype)
        if leading is x:
            leading = x.clone()
        if self.tail is None:
            return (leading,)
        rest = (x - leading.to(x.dtype)) * 2.0 ** _significand_bits(self.dtype)
        return leading, round_to(torch.nan_to_num(rest, 0.0, 0.0, 0.0), self.dtype)

    def load(self, parts: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return data in `dtype`: exact, except for a tail below the precision of `dtype`."""
        if len(parts) == 1:
            return parts[0].to(dtype)
        if self.tail == torch.int8:
            return _HALF_AND_TAIL.decode(parts)[0].to(dtype)
        leading = parts[0].to(dtype)
        return leading + parts[1].to(dtype) * 2.0 ** -_significand_bits(self.dtype)


def _name_of(dtype: torch.dtype, tail: torch.dtype | None, rounding: Rounding) -> str:
    base = str(dtype).removeprefix("torch.")
    if tail is not None:
        base = BASES[dtype].name + ("i8" if tail == torch.int8 else "x2")
    return f"scaled({base}{'' if rounding == 'nearest' else ', ' + rounding})"


def _dithered(x: Tensor, precision: int) -> Tensor:
    """Round x stochastically: add random bits below the precision, and cut them off."""
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
for _dtype in TOPS:  # registered, since files name them
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
    """Return the format of low-precision data times one power of two for each tensor.

    Operations carry the scales along. So the data stays near 1, where float16 and the 8-bit floats
    have their precision, for numbers of any size.

    Args:
        base: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32; or an expansion,
            `mcf.fp16x2` or `mcf.bf16x2`, which then has all its bits over the whole range.
        tail: 8 for float16 weights with 19 bits: an integer of 8 bits continues the float16.
            Products use the float16 alone; updates change all bits. States made like such a weight
            are plain scaled float16.
        rounding: how numbers written to a tensor of this format are rounded. `"stochastic"` is for
            parameters of float16 or bfloat16: steps that are too small for them survive in the
            mean. It draws from PyTorch's generator. States and results of operations are rounded to
            nearest. Data below the normal range, 2^-14 of float16, is rounded to nearest too.

    Raises:
        TypeError: `base` is another object.
        ValueError: the format has no such tail or rounding.

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
    """Return the format of a result of operands in these formats."""
    first = formats[0]
    if all(format is first for format in formats):
        return first.nearest if keep_tails else first.lead
    dtypes = {format.dtype for format in formats}
    if wide := dtypes - set(FP8):
        dtype = functools.reduce(torch.promote_types, wide)
    else:
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float16
    tails = {format.tail for format in formats}
    tail = tails.pop() if keep_tails and len(tails) == 1 else None
    return of_dtype(dtype, tail)
