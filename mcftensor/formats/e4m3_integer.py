"""E4M3 with an integer tail under shared scales: weights whose first byte products take.

The codes and the scales are those of `mxfp8`: a sign and 7 bits of E4M3 for each element, a power
of two for each block of 32 elements of a row. The tail goes on where the code ends, so that code
and tail are one pattern of more significand bits, and the code is the nearest one to it.
"""

from __future__ import annotations

import functools

import torch

from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Sum
from mcftensor.arithmetic.rounding import quiet
from mcftensor.formats.block_codes import Scales, e4m3_patterns, factors_of
from mcftensor.formats.format import SUFFIXES, Component, Format, StoredFormat, named
from mcftensor.kernels.block_scales import block_max, spread

_INFINITY = 0x7F800000
_SPARE = 20  # bits of a float32's significand that a code has not
# Under the least scale, 2^-101, the last bit of the longest tail is 2^-126: all that is computed
# is a normal float32, on processors that flush others too.
_LEAST = 127 - 101


class ScaledTailFormat(StoredFormat):
    """E4M3 codes with integer tails of 8 or 16 bits, and a scale for each block of 32 of a row.

    12 or 20 significand bits over 14 binades below the largest of a block, and multiples of 2^-17
    or 2^-25 of the scale below. The scale is the least under which the largest number is not above
    448; numbers below 2^-126 are zero, what would be rounded to 2^128 saturates, and infinities and
    NaNs become NaNs. A model computes with code times scale, which a bfloat16 holds.

    These formats store numbers of two or more dimensions: a vector has no rows.

    Source: codes and scales are those of Open Compute Project, "OCP Microscaling Formats (MX)
    Specification", version 1.0, 2023.
    """

    lends = ("mxfp8", (0, 2))

    def __init__(self, bits: int, rounding: Rounding) -> None:
        self.bits = bits
        tail = Component("tail", {8: torch.int8, 16: torch.int16}[bits])
        codes, scales = Component("codes", torch.uint8), Scales("scales", torch.uint8)
        super().__init__(f"e4m3i{bits}", rounding, codes, tail, scales)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """That in which a model computes: the codes by themselves are no numbers."""
        return torch.bfloat16

    @property
    def of_states(self) -> Format:
        """float32: squares of gradients have twice their range, and a zero among them that was none
        would divide an update by epsilon."""
        return named("bf16i16")

    @property
    def precision(self) -> int:
        """Significand bits, those of the tail counted."""
        return 4 + self.bits

    @property
    def smallest(self) -> tuple[float, float]:
        """Under the least scale: the smallest normal E4M3, and the last bit of a tail."""
        scale = 2.0 ** (_LEAST - 127)
        return 2.0**-6 * scale, 2.0 ** -(9 + self.bits) * scale

    def decode(self, stored: Floats) -> Floats:
        """One float32: the pattern of code and tail, times the scale."""
        codes, tails, scales = stored
        codes = codes.to(torch.int32)
        own = codes & 0x7F
        pattern = (own << self.bits) + tails.to(torch.int32)
        small = pattern.to(torch.float32) * 2.0 ** -(9 + self.bits)
        normal = ((pattern << (_SPARE - self.bits)) + (120 << 23)).view(torch.float32)
        x = torch.where(pattern < (8 << self.bits), small, normal)
        x = torch.where(own == 0x7F, torch.nan, x)
        x = x * factors_of(scales, stored[0])
        return ((x.view(torch.int32) ^ ((codes & 0x80) << 24)).view(torch.float32),)

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """The pattern of a number over its scale, rounded once, in two parts."""
        bits = quiet(number.to_odd()).view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        magnitude = torch.where(magnitude < (1 << 23), 0, magnitude)
        lost = _SPARE - self.bits
        limit = _INFINITY - (1 << lost)  # what is above may be rounded to 2^128
        is_above = (magnitude > limit) & (magnitude < _INFINITY)
        magnitude = torch.where(is_above, limit, magnitude)
        largest = block_max(torch.where(magnitude <= limit, magnitude, 0))
        # 2^ceil(log2(largest / 448)); 448 is 1.75 * 2^8, and the sum carries beyond 1.75.
        scales = ((largest + ((1 << 23) - 1 - (3 << 21))) >> 23) - 8
        scales = scales.maximum(torch.full_like(scales, _LEAST))
        unscaled = ((254 - spread(scales, bits)) << 23).view(torch.float32)
        pattern = e4m3_patterns(magnitude.view(torch.float32) * unscaled, noise)
        half = ((pattern >> lost) & 1) + ((1 << (lost - 1)) - 1)
        pattern = (pattern + (half if noise is None else noise.bits(lost))) >> lost
        own = (pattern + (1 << (self.bits - 1))) >> self.bits
        is_finite = magnitude <= limit
        tails = torch.where(is_finite, pattern - (own << self.bits), 0)
        codes = torch.where(is_finite, own, 0x7F) | ((bits >> 24) & 0x80)
        return codes.to(torch.uint8), tails.to(self.components[1].dtype), scales.to(torch.uint8)

    def normalized(self, stored: Floats) -> tuple[Floats, int]:
        """NaNs without tails. Any tail fits any code but zero, which has no number below it."""
        codes, tails, scales = stored
        own = codes & 0x7F
        is_below, is_nan = (own == 0) & (tails < 0), (own == 0x7F) & (tails != 0)
        if not (is_below | is_nan).any():
            return stored, 0
        pattern = torch.where(is_below, -tails.to(torch.int32), 0)
        carried = (pattern + (1 << (self.bits - 1))) >> self.bits
        codes = torch.where(is_below, (codes ^ 0x80) | carried.to(torch.uint8), codes)
        rest = torch.where(is_nan, 0, pattern - (carried << self.bits)).to(tails.dtype)
        tails = torch.where(is_below | is_nan, rest, tails)
        return [codes, tails, scales], int(is_below.count_nonzero())


class LentFormat(Format):
    """What a parameter under shared scales lends where a view is not of its rows: the bfloat16 that
    a model computes with beside the number, neither of which can be written to."""

    name = "bf16lent"
    components = (Component("leading", torch.bfloat16), Component("number", torch.float32))

    def __init__(self) -> None:
        self.numbers = Machine(torch.float32)

    @property
    def of_states(self) -> Format:
        """One that holds the number, and is written to."""
        return named("bf16i16")

    def decode(self, stored: Floats) -> Floats:
        """The number."""
        return (stored[1],)

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Refused.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "this is a view across the rows of a parameter, of which 32 elements share a scale; it "
            "holds what the model computes with, and writing to it would not reach the parameter: "
            "write to the parameter itself, or to its rows"
        )


for _rounding in SUFFIXES:
    for _bits in (8, 16):
        ScaledTailFormat(_bits, _rounding).register()

e4m3i8 = named("e4m3i8")
e4m3i16 = named("e4m3i16")
lent = LentFormat().register()
