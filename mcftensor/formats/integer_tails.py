"""Floats of 16 bits with an integer tail: float32 as a bfloat16 or float16 and an integer.

A number is a pattern of 32 bits, whose last bits are rounded off if the tail is short: the bits of
a float32 for bfloat16, and the pattern of `float16_patterns.py` for float16. The leading component
is the nearest float of 16 bits, ties away from zero, and models compute with it. The tail is the
difference of the patterns, in units of the last place. Subnormal numbers survive on processors that
flush them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from mcftensor.arithmetic.base_types import BASES, NARROW
from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Sum
from mcftensor.arithmetic.rounding import quiet
from mcftensor.formats import float16_patterns
from mcftensor.formats.format import SUFFIXES, Component, Format, named
from mcftensor.kernels.program import PATTERNS

_TAILS = {0: None, 8: torch.int8, 16: torch.int16}
_BEYOND_HALF = 65520.0  # its nearest float16 is infinity


class TailFormat(Format):
    """A float of 16 bits with an integer tail of some bits.

    A bfloat16 with 16 bits holds every float32 pattern, except that NaNs are canonical. With 8 bits
    it has 16 significant bits and the range of float32; all codes of the tail are used. Without a
    tail it is a bfloat16 whose rounding preserves the mean of small updates.

    A float16 with 16 bits holds every float32 from 2^-17 to 65520, and multiples of 2^-40 below;
    with 8 bits it has 19 significant bits from 2^-14 on, and multiples of 2^-32 below. From 65520
    on the float16 is infinite: conversions refuse such numbers.

    These are storage formats: out-of-place arithmetic returns plain float32 tensors, the results of
    PyTorch's operators. In-place arithmetic encodes them with one rounding.

    Source: NVIDIA's apex and Transformer Engine split float32 in the same way in their fused Adam.
    """

    base: torch.dtype
    bits: int

    def __new__(cls, base: torch.dtype, bits: int, rounding: Rounding) -> TailFormat:
        """Return a format to be registered."""
        self: TailFormat = object.__new__(cls)
        tail = _TAILS[bits]
        self.base, self.bits, self.rounding = base, bits, rounding
        self.name = _name_of(base, bits, rounding)
        self.components = (Component("leading", base),)
        if tail is not None:
            self.components += (Component("tail", tail),)
        self.numbers = Machine(torch.float32)
        return self

    @property
    def precision(self) -> int:
        """Significand bits, including the tail; at most 24, as in a float32."""
        return min(BASES[self.base].precision + self.bits, 24)

    @property
    def is_exact(self) -> bool:
        """True for bfloat16 with 16 bits, which holds every float32; NaNs are canonical."""
        return self.bits == 16 and not self._is_half

    @property
    def _is_half(self) -> bool:
        return self.base == torch.float16

    @property
    def smallest(self) -> tuple[float, float]:
        """The smallest number with all its bits, and the smallest number above zero."""
        if not self._is_half:
            return super().smallest
        unit = 2.0 ** (float16_patterns.EXPONENT_OF_UNIT + 16 - self.bits)
        return unit * 2.0 ** (self.precision - 1), unit

    @property
    def largest(self) -> float:
        """The largest number whose leading component is finite."""
        if not self._is_half:
            return super().largest
        return _BEYOND_HALF - 2.0 ** (16 - self.precision)

    @property
    def of_states(self) -> Format:
        """`bf16i16` for float16, whose range ends above squares of gradients; else this format."""
        return named("bf16i16") if self._is_half else self

    def require(self, x: Tensor) -> None:
        """Raise ValueError for float16 if elements are beyond its range; not checked in graphs."""
        is_seen = not (torch.compiler.is_compiling() or x.is_meta or is_fake(x))
        if not (self._is_half and is_seen):
            return
        x = x.detach()
        beyond = int(((x.abs() > self.largest) & x.isfinite()).sum())
        if beyond:
            raise ValueError(
                f"{self.name} has the range of float16, and {beyond} of {x.numel()} elements of a "
                f"tensor of shape {tuple(x.shape)} are beyond it, which ends at {self.largest}; "
                f"use mcf.bf16i{self.bits}, which has the range of float32, or smaller numbers"
            )

    def with_rounding(self, rounding: Rounding) -> Format:
        """Return the format with another rounding; tails of 16 bits only round to nearest."""
        if self.bits == 16:
            return super().with_rounding(rounding)
        return named(_name_of(self.base, self.bits, rounding))

    def decode(self, stored: Floats) -> Floats:
        """Return one float32."""
        if self._is_half:
            bits = stored[0].view(torch.int16).to(torch.int32) << 16
        else:
            bits = stored[0].to(torch.float32).view(torch.int32)
        if self.bits:
            bits = bits + (stored[1].to(torch.int32) << (16 - self.bits))
        return (float16_patterns.float32_of(bits) if self._is_half else bits.view(torch.float32),)

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Return the pattern of a number, rounded once, as leading component and tail."""
        lost = 16 - self.bits
        if self._is_half:
            bits = float16_patterns.pattern_of(number, lost, noise)
        else:
            x = number.to_odd() if lost else number.to(torch.float32)
            bits = quiet(x).view(torch.int32)
        if lost:
            bits = bits + _half_or(noise, bits, lost)
        leading = (bits + 0x8000 if self.bits else bits) >> 16
        leading = leading.to(torch.int16).view(self.base)
        tail = _TAILS[self.bits]  # holds the following bits; a carry into the leading part cancels
        return (leading,) if tail is None else (leading, (bits >> lost).to(tail))

    def normalized(self, stored: Floats) -> tuple[Floats, int]:
        """Return components in canonical form, and the number of inconsistent elements.

        All NaNs are the same, and no bits lie beyond a float32's. Any tail fits any leading
        component except zero: with a negative tail, zero is the pattern of a NaN.
        """
        (x,) = self.decode(stored)
        if not (self._is_half or x.isnan().any()):
            return stored, 0
        right = self.nearest.encode(Sum([x]), None)
        if all(map(torch.equal, map(_bits_of, right), map(_bits_of, stored))):
            return stored, 0
        misfits = int((x.isnan() & stored[0].isfinite()).count_nonzero())
        return right, misfits

    def __repr__(self) -> str:
        default = {0: None, 8: "balanced", 16: "nearest"}[self.bits]
        if self.rounding == default:
            return f"mcf.{self.name}"
        if self.bits == 0 and self.rounding == "nearest":
            return super().__repr__()
        if self.bits == 0:
            return f'mcf.Format(torch.bfloat16, 1, rounding="{self.rounding}")'
        return f'mcf.{_stem_of(self.base, self.bits)}.with_rounding("{self.rounding}")'


def _half_or(noise: Noise | None, bits: Tensor, lost: int) -> Tensor:
    """Return the number to add before the last bits are cut off.

    It is half of their range, with ties to even, or noise.
    """
    if noise is not None:
        return noise.bits(lost)
    return ((bits >> lost) & 1) + ((1 << (lost - 1)) - 1)


def _bits_of(x: Tensor) -> Tensor:
    return x.view(PATTERNS[x.dtype.itemsize])


def _stem_of(base: torch.dtype, bits: int) -> str:
    return BASES[base].name + (f"i{bits}" if bits else "")


def _name_of(base: torch.dtype, bits: int, rounding: Rounding) -> str:
    """Return the name; balanced is the default of 8-bit tails, other roundings are named."""
    suffixes: dict[Rounding, str] = {**SUFFIXES, "nearest": "rn"}
    if bits == 8:
        suffixes["balanced"] = ""
    return _stem_of(base, bits) + ("" if bits == 16 else suffixes[rounding])


for _base in NARROW:
    TailFormat(_base, 16, "nearest").register()
    for _rounding in SUFFIXES:
        TailFormat(_base, 8, _rounding).register()
for _rounding in SUFFIXES:
    TailFormat(torch.bfloat16, 0, _rounding).register()

bf16i16, bf16i8 = named("bf16i16"), named("bf16i8")
fp16i16, fp16i8 = named("fp16i16"), named("fp16i8")
