"""Formats of one byte: codes, and a scale that each block of 32 elements of a row shares.

What they are for is the states of optimizers. Numbers are read as float32 and rounded once when
they are written; all of it is arithmetic on the bits of a float32, so that every backend gives the
same. A tensor keeps beside them how often it was written to, for balanced rounding, and a factor.
"""

from __future__ import annotations

import functools
from abc import abstractmethod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Sum
from mcftensor.formats.format import SUFFIXES, Component, StoredFormat, named
from mcftensor.kernels.block_scales import block_max, shape_of_shared, spread

_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_LOST = 20  # bits of a float32's significand that its three in a code do not hold
_NO_NUMBER = 255  # as a scale
_MOST = 0x7F700000  # 1.875 * 2^127, the largest number of four bits
# The scale of second moments too large for the scales below it. Its last codes are no numbers.
_TOP, _INFINITE, _UNDEFINED = 254, 254, 255


class Scales(Component):
    """The scales: one for each block of a row, the exponent of a power of two, biased by 127
    (E8M0)."""

    @property
    def is_shared(self) -> bool:
        """It is."""
        return True

    def shape(self, shape: torch.Size) -> torch.Size:
        """A row for each of the tensor's.

        Raises:
            ValueError: of a tensor of less than two dimensions.
        """
        if len(shape) < 2:
            raise ValueError(
                f"a format of blocks stores tensors of rows, and this one has shape "
                f"{tuple(shape)}; use mcf.bf16i16 for vectors"
            )
        return shape_of_shared(shape)


class BlockFormat(StoredFormat):
    """A byte for each element, and one more for each block of 32 elements of a row.

    A row is all that one index of the first dimension leaves, so that parts along this dimension
    are cut without touching a block.
    """

    def __init__(self, stem: str, rounding: Rounding) -> None:
        codes, scales = Component("codes", torch.uint8), Scales("scales", torch.uint8)
        super().__init__(stem, rounding, codes, scales)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Of the numbers: the codes by themselves are none."""
        return torch.float32

    @property
    def precision(self) -> int:
        """Significand bits of a code."""
        return 4

    @property
    def of_gradients(self) -> None:
        """No parameter is in such a format."""

    def decode(self, stored: Floats) -> Floats:
        """One float32: what a code says, times the scale of its block."""
        codes, scales = stored
        return (self.read(codes.to(torch.int32)) * factors_of(scales, codes),)

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Codes rounded once, and the least scales with which the largest element has one."""
        x = number.to_odd()
        magnitude = x.view(torch.int32) & 0x7FFFFFFF
        scales = self.scale_of(block_max(self.sized(x, magnitude)))
        return self.written(x, magnitude, spread(scales, x), noise), scales.to(torch.uint8)

    @abstractmethod
    def read(self, codes: Tensor) -> Tensor:
        """What codes say before they are scaled, in float32."""

    @abstractmethod
    def sized(self, x: Tensor, magnitude: Tensor) -> Tensor:
        """The patterns of magnitudes of which the largest decides on the scale."""

    @abstractmethod
    def scale_of(self, largest: Tensor) -> Tensor:
        """The scale of a block whose largest pattern is given."""

    @abstractmethod
    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """The codes of numbers, whose magnitudes are given as patterns, under scales."""


class MXFP8(BlockFormat):
    """Signed: codes are E4M3, of 4 significant bits over 18 binades and zero; the elements of a
    block reach 448 times its scale.

    The scale is the least under which the largest element is not above 448, so that nothing
    saturates: the rule of NVIDIA's recipe rather than of the OCP specification, which rounds down.
    Only numbers above 1.875 * 2^127 do: float32 has no 2^128. Infinities and NaNs become the NaN
    that E4M3 has, and leave the rest of their block alone.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023;
    A. Mishra et al., "Recipes for Pre-training LLMs with MXFP8", 2025, arXiv:2506.08027.
    """

    def read(self, codes: Tensor) -> Tensor:
        """E4M3; below its normal numbers multiples of 2^-9."""
        magnitude = codes & 0x7F
        normal = ((magnitude << _LOST) + (120 << 23)).view(torch.float32)
        x = torch.where(magnitude < 8, magnitude.to(torch.float32) * 2.0**-9, normal)
        x = torch.where(magnitude == 0x7F, torch.nan, x)
        return x.copysign((codes << 24).view(torch.float32))

    def sized(self, x: Tensor, magnitude: Tensor) -> Tensor:
        """All that are finite."""
        return torch.where(magnitude < _INFINITY, magnitude, 0)

    def scale_of(self, largest: Tensor) -> Tensor:
        """2^ceil(log2(largest / 448)); 448 is 1.75 * 2^8."""
        above = (1 << 23) - 1 - (3 << 21)  # carries beyond 1.75
        exponent = ((largest + above) >> 23) - 8
        return exponent.maximum(torch.ones_like(exponent))

    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """The first bits of the magnitude over the scale."""
        unscaled = ((254 - scales) << 23).view(torch.float32)  # 2^127 at most, and normal
        held = torch.where(magnitude > _MOST, _MOST, magnitude).view(torch.float32)
        codes = _rounded(e4m3_patterns(held * unscaled, noise), noise)
        codes = codes | ((x.view(torch.int32) >> 24) & 0x80)
        return torch.where(magnitude < _INFINITY, codes, 0x7F).to(torch.uint8)


class UE5M3(BlockFormat):
    """Unsigned, for second moments: 4 significant bits over 32 binades, and a zero that only zero
    is rounded to.

    Code c above 0 is (1 + (c & 7) / 8) * 2^((c >> 3) - 31) times the scale, the power of two at or
    below the largest element, or the next where that is above 1.875 times it. What is below the
    smallest code, 2^-31 of the largest element or so, is raised to it: an update never divides by
    the root of a zero that was none.

    A block with a number above 1.6e38, an infinity, a NaN or a negative number has the scale 2^127.
    Its finite numbers saturate at 1.625 * 2^127; code 254 is an infinity, and code 255 a NaN, which
    stands for a negative number too. No other element becomes one of these.
    """

    @property
    def largest(self) -> float:
        """The last codes of the largest scale are no numbers."""
        return 1.625 * 2.0**127

    def require(self, x: Tensor) -> None:
        """Nor may a number be negative, as far as one can see."""
        super().require(x)
        is_seen = not (torch.compiler.is_compiling() or x.is_meta or is_fake(x))
        if is_seen and bool((x < 0).any()):
            raise ValueError(
                f"{self.name} holds second moments, and {int((x < 0).sum())} of {x.numel()} "
                "elements are negative; use mcf.mxfp8"
            )

    def read(self, codes: Tensor) -> Tensor:
        """The code as the last bits of an exponent and the first of a significand."""
        x = ((codes << _LOST) + (96 << 23)).view(torch.float32)
        return torch.where(codes == 0, 0.0, x)

    def decode(self, stored: Floats) -> Floats:
        """A code times its scale; of the largest scale the last two codes are no numbers."""
        codes, scales = stored
        (x,) = super().decode(stored)
        is_special = (codes >= _INFINITE) & (spread(scales, codes) == _TOP)
        special = torch.where(codes == _INFINITE, torch.inf, torch.nan)
        return (torch.where(is_special, special, x),)

    def sized(self, x: Tensor, magnitude: Tensor) -> Tensor:
        """All; a negative number and a NaN count as one that is too large."""
        return torch.where(x >= 0, magnitude, _INFINITY)

    def scale_of(self, largest: Tensor) -> Tensor:
        """The exponent of the largest, or the next."""
        above = (1 << 23) - 1 - (7 << 20)  # carries beyond 1.875
        exponent = (largest + above) >> 23
        exponent = exponent.maximum(torch.ones_like(exponent))
        return torch.where(exponent > _TOP, _TOP, exponent)

    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """The pattern with another exponent is the code and what it lacks."""
        exponents = (254 - scales).maximum(torch.ones_like(scales))
        unscaled = (exponents << 23).view(torch.float32)
        y = x.abs() * unscaled
        is_top = scales == _TOP
        bits = y.view(torch.int32) - torch.where(is_top, 97 << 23, 96 << 23)
        codes = _rounded(bits if noise is None else _by_roots(bits), noise)
        codes = codes.maximum(torch.ones_like(codes))
        top = torch.where(codes < _INFINITE, codes, _INFINITE - 1)
        top = torch.where(x > 0, torch.where(magnitude < _INFINITY, top, _INFINITE), _UNDEFINED)
        codes = torch.where(is_top, top, codes)
        return torch.where(magnitude == 0, 0, codes).to(torch.uint8)


def factors_of(scales: Tensor, like: Tensor) -> Tensor:
    """The scale of each element of a tensor, as a float32."""
    shared = spread(scales, like).to(torch.int32)
    exponents = (shared << 23).maximum(torch.full_like(shared, 1 << 22))  # the last is 2^-127
    return torch.where(shared == _NO_NUMBER, _NAN, exponents).view(torch.float32)


def e4m3_patterns(y: Tensor, noise: Noise | None) -> Tensor:
    """Magnitudes as patterns of which the first bits are the code: of a normal number of E4M3 that
    of the float32, below them a multiple of 2^-29."""
    normal = y.view(torch.int32) - (120 << 23)
    least = 2.0**-6
    moved = y + least
    small = moved.view(torch.int32) - (121 << 23)
    if noise is None:  # whose ties are to be ties of the number: the sum is rounded to odd
        kept = moved - least
        small = (small - (kept > y).to(torch.int32)) | (kept != y).to(torch.int32)
    return torch.where(y < least, small, normal)


def _by_roots(bits: Tensor) -> Tensor:
    """Patterns whose last bits, by which noise rounds them up, are as far between the codes as the
    root is between the roots of the codes.

    Of a share t of the step between two codes, of which the step is a share h, that is
    t + t (1 - t) h / 4 but for O(h^2); h lies between 1/15 and 1/8.
    """
    t = (bits >> 5) & 0x7FFF
    steps = 16 - ((bits >> _LOST) & 7)  # 128 h, to 13 %
    return bits + ((((t * (0x8000 - t)) >> 10) * steps) >> 9)


def _rounded(bits: Tensor, noise: Noise | None) -> Tensor:
    """Patterns without their last bits, which are rounded off: ties to even, or by noise."""
    if noise is not None:
        return (bits + noise.bits(_LOST)) >> _LOST
    return (bits + ((bits >> _LOST) & 1) + ((1 << (_LOST - 1)) - 1)) >> _LOST


for _rounding in SUFFIXES:
    MXFP8("mxfp8", _rounding).register()
    UE5M3("ue5m3", _rounding).register()

mxfp8 = named("mxfp8")
ue5m3 = named("ue5m3")
