"""E4M3 codes with an integer tail under shared scales: weights whose first byte enters products.

Codes and scales are the same as in `mxfp8`: a sign and 7 bits of E4M3 for each element, and a power
of two for each block of 32 elements of a row. The tail continues the code: code and tail are one
pattern of more significant bits, and the code is the nearest code to it.
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
_SPARE = 20  # bits of a float32's significand beyond the three in a code
# Under the smallest scale, 2^-101, the last bit of the longest tail is 2^-126. So all intermediate
# results are normal float32 numbers, on processors that flush subnormal ones too.
_LEAST = 127 - 101


class ScaledTailFormat(StoredFormat):
    """E4M3 codes with integer tails of 8 or 16 bits, and a scale for each block of 32 of a row.

    They have 12 or 20 significant bits over 14 binades below the largest element of a block, and
    multiples of 2^-17 or 2^-25 of the scale below. The scale is the smallest under which the
    largest number is at most 448. Numbers below 2^-126 become zero, numbers that would round to
    2^128 saturate, and infinities and NaNs become NaNs. A model computes with code times scale,
    which a bfloat16 holds exactly.

    These formats store tensors of two or more dimensions: a vector has no rows.

    Source: codes and scales are those of Open Compute Project, "OCP Microscaling Formats (MX)
    Specification", version 1.0, 2023.
    """

    computes_as = ("mxfp8", (0, 2))

    def __init__(self, bits: int, rounding: Rounding) -> None:
        self.bits = bits
        tail = Component("tail", {8: torch.int8, 16: torch.int16}[bits])
        codes, scales = Component("codes", torch.uint8), Scales("scales", torch.uint8)
        super().__init__(f"e4m3i{bits}", rounding, codes, tail, scales)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which a model computes: the codes alone are not numbers."""
        return torch.bfloat16

    @property
    def of_states(self) -> Format:
        """A format with the range of float32.

        Squares of gradients have twice the range of gradients, and a square rounded to zero would
        make an update divide by epsilon alone.
        """
        return named("bf16i16")

    @property
    def precision(self) -> int:
        """Significand bits, including the tail."""
        return 4 + self.bits

    @property
    def smallest(self) -> tuple[float, float]:
        """Under the smallest scale: the smallest normal E4M3 number, and the last bit of a tail."""
        scale = 2.0 ** (_LEAST - 127)
        return 2.0**-6 * scale, 2.0 ** -(9 + self.bits) * scale

    def decode(self, stored: Floats) -> Floats:
        """Return one float32: the pattern of code and tail, times the scale."""
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
        """Return the pattern of a number over its scale, rounded once, as code and tail."""
        bits = quiet(number.to_odd()).view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        magnitude = torch.where(magnitude < (1 << 23), 0, magnitude)
        lost = _SPARE - self.bits
        limit = _INFINITY - (1 << lost)  # larger numbers could be rounded to 2^128
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
        """Return components in canonical form, and the number of inconsistent elements.

        NaNs have no tail. Any tail fits any code except zero, which has no number below it.
        """
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


class ComputeViewFormat(Format):
    """The format of views across the rows of a parameter with shared scales.

    Such a view holds the bfloat16 that a model computes with, and the number as float32. Neither
    can be written to.
    """

    name = "bf16lent"
    components = (Component("leading", torch.bfloat16), Component("number", torch.float32))

    def __init__(self) -> None:
        self.numbers = Machine(torch.float32)

    @property
    def of_states(self) -> Format:
        """A writable format that holds the number."""
        return named("bf16i16")

    def decode(self, stored: Floats) -> Floats:
        """Return the number."""
        return (stored[1],)

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Raise an error: a view across rows cannot be written to.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "this view crosses the rows of a parameter, whose blocks of 32 elements share a scale. "
            "It holds decoded numbers, and writing to it would not change the parameter: write to "
            "the parameter itself, or to its rows"
        )


for _rounding in SUFFIXES:
    for _bits in (8, 16):
        ScaledTailFormat(_bits, _rounding).register()

e4m3i8 = named("e4m3i8")
e4m3i16 = named("e4m3i16")
compute_view = ComputeViewFormat().register()
