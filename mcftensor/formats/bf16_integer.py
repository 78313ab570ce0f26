"""float32 as a bfloat16 and an integer tail; models compute with the bfloat16.

A number has the bits of a float32, with the last ones rounded off if the tail is short. The leading
component is the nearest bfloat16, ties away from zero; the tail is the difference of the patterns.
All conversions use integer arithmetic, so subnormal numbers survive on processors that flush them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Sum
from mcftensor.arithmetic.rounding import quiet
from mcftensor.formats.format import SUFFIXES, Component, Format, named

_TAILS = {0: None, 8: torch.int8, 16: torch.int16}


class TailFormat(Format):
    """A bfloat16 with an integer tail of some bits.

    With 16 bits it holds every float32 pattern, except that NaNs are canonical. With 8 bits it has
    16 significant bits and the range of float32; all codes of the tail are used. Without a tail it
    is a bfloat16 whose rounding preserves the mean of small updates.

    These are storage formats: arithmetic out of place returns plain float32 tensors, PyTorch's own
    results, and arithmetic in place encodes them with one rounding.

    Source: NVIDIA's apex and Transformer Engine split float32 in the same way in their fused Adam.
    """

    bits: int

    def __new__(cls, bits: int, rounding: Rounding) -> TailFormat:
        """One that is to be registered."""
        self: TailFormat = object.__new__(cls)
        tail = _TAILS[bits]
        self.bits, self.rounding = bits, rounding
        self.name = _name_of(bits, rounding)
        self.components = (Component("leading", torch.bfloat16),)
        if tail is not None:
            self.components += (Component("tail", tail),)
        self.numbers = Machine(torch.float32)
        return self

    @property
    def precision(self) -> int:
        """Significand bits, including the tail."""
        return 8 + self.bits

    @property
    def is_exact(self) -> bool:
        """With 16 bits; NaNs are one."""
        return self.bits == 16

    def with_rounding(self, rounding: Rounding) -> Format:
        """The same components; what holds every float32 rounds to nearest alone."""
        if self.bits == 16:
            return super().with_rounding(rounding)
        return named(_name_of(self.bits, rounding))

    def decode(self, stored: Floats) -> Floats:
        """One float32."""
        bits = stored[0].view(torch.int16).to(torch.int32) << 16
        if self.bits:
            bits = bits + (stored[1].to(torch.int32) << (16 - self.bits))
        return (bits.view(torch.float32),)

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """The bits of a float32, rounded to as many as there are, in two parts."""
        x = number.to(torch.float32) if self.bits == 16 else number.to_odd()
        bits = quiet(x).view(torch.int32)
        lost = 16 - self.bits
        if lost:
            bits = bits + _half_or(noise, bits, lost)
        leading = (bits + 0x8000 if self.bits else bits) >> 16
        leading = leading.to(torch.int16).view(torch.bfloat16)
        tail = _TAILS[self.bits]  # whose bits are those that follow, whatever was carried
        return (leading,) if tail is None else (leading, (bits >> lost).to(tail))

    def normalized(self, stored: Floats) -> tuple[Floats, int]:
        """One NaN in the place of all. Any tail fits any leading component but zero, which with a
        negative one is the pattern of a NaN."""
        (x,) = self.decode(stored)
        is_nan = x.isnan()
        if not is_nan.any():
            return stored, 0
        misfits = int((is_nan & stored[0].isfinite()).count_nonzero())
        right = self.nearest.encode(Sum([torch.full_like(x, torch.nan)]), None)
        return [torch.where(is_nan, a, b) for a, b in zip(right, stored, strict=True)], misfits

    def __repr__(self) -> str:
        default = {0: None, 8: "balanced", 16: "nearest"}[self.bits]
        if self.rounding == default:
            return f"mcf.{self.name}"
        if self.bits == 0 and self.rounding == "nearest":
            return super().__repr__()
        if self.bits == 0:
            return f'mcf.Format(torch.bfloat16, 1, rounding="{self.rounding}")'
        return f'mcf.bf16i{self.bits}.with_rounding("{self.rounding}")'


def _half_or(noise: Noise | None, bits: Tensor, lost: int) -> Tensor:
    """Return the number to add before the last bits are cut off: half of their range, for ties to
    even, or noise."""
    if noise is not None:
        return noise.bits(lost)
    return ((bits >> lost) & 1) + ((1 << (lost - 1)) - 1)


def _name_of(bits: int, rounding: Rounding) -> str:
    if bits == 16:
        return "bf16i16"
    if bits == 8:
        suffixes: dict[Rounding, str] = {**SUFFIXES, "balanced": "", "nearest": "rn"}
        return f"bf16i8{suffixes[rounding]}"
    return "bf16" + (SUFFIXES[rounding] or "rn")


bf16i16 = TailFormat(16, "nearest").register()
bf16i8 = TailFormat(8, "balanced").register()

for _bits, _rounding in ((8, "nearest"), (8, "stochastic")):
    TailFormat(_bits, _rounding).register()  # type: ignore[arg-type]
for _rounding in SUFFIXES:
    TailFormat(0, _rounding).register()
