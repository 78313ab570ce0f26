"""Formats of one byte an element: codes, and a scale for each block of 32 elements of a row.

These formats store the states of optimizers. Numbers are decoded to float32 and rounded once when
they are encoded. All of it is arithmetic on the bits of a float32, so every backend gives the same
result. A tensor in such a format also stores a count of writes, for balanced rounding, and a
factor.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Sum
from mcftensor.formats.format import SUFFIXES, Component, StoredFormat, named
from mcftensor.kernels.block_scales import block_max, shape_of_shared, spread

_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_LOST = 20  # bits of a float32's significand beyond the three in a code
_NO_NUMBER = 255  # the scale NaN
_MOST = 0x7F700000  # 1.875 * 2^127, the largest number of four bits
# The largest scale, of blocks with numbers that are too large. Its last codes are special values.
_TOP = 254


def require_rows(shape: torch.Size) -> None:
    """Raise ValueError for the shape of a vector or a number, which has no rows."""
    if len(shape) < 2:
        raise ValueError(
            f"block formats store tensors of two or more dimensions, not of shape "
            f"{tuple(shape)}; use mcf.bf16i16 for vectors"
        )


class Scales(Component):
    """One scale for each block of a row: the biased exponent of a power of two (E8M0, bias 127)."""

    @property
    def is_shared(self) -> bool:
        """True: blocks share scales."""
        return True

    def shape(self, shape: torch.Size) -> torch.Size:
        """Return a shape with a row of scales for each row of the tensor.

        Raises:
            ValueError: the tensor has less than two dimensions.
        """
        require_rows(shape)
        return shape_of_shared(shape)


class BlockFormat(StoredFormat):
    """A byte for each element, and one more for each block of 32 elements of a row.

    A row is the elements of one index of the first dimension. So splits along this dimension never
    cut a block.
    """

    def __init__(self, stem: str, rounding: Rounding) -> None:
        codes, scales = Component("codes", torch.uint8), Scales("scales", torch.uint8)
        super().__init__(stem, rounding, codes, scales)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of decoded numbers: codes alone are not numbers."""
        return torch.float32

    @property
    def precision(self) -> int:
        """Significand bits of a code."""
        return 4

    @property
    def of_gradients(self) -> None:
        """None: parameters cannot have such a format."""

    def decode(self, stored: Floats) -> Floats:
        """Return one float32: the value of the code times the scale of its block."""
        codes, scales = stored
        return (self.read(codes.to(torch.int32), spread(scales, codes).to(torch.int32)),)

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Return codes, rounded once, and the smallest scales that fit the largest element."""
        x = number.to_odd()
        magnitude = x.view(torch.int32) & 0x7FFFFFFF
        scales = self.scale_of(self.sized(x, magnitude))
        codes = self.written(x, magnitude, spread(scales, x), noise)
        return codes, scales.to(self.components[1].dtype)

    @abstractmethod
    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the float32 values of codes under scales."""

    def sized(self, x: Tensor, magnitude: Tensor) -> Tensor:
        """Return patterns, the largest of which decides the scale of a block: those of finite
        numbers, and 0 for others."""
        return torch.where(magnitude < _INFINITY, magnitude, 0)

    @abstractmethod
    def scale_of(self, patterns: Tensor) -> Tensor:
        """Return the scale of each block of patterns."""

    @abstractmethod
    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """Return the codes of numbers under scales; `magnitude` holds the bits of |x|."""


class MXFP8(BlockFormat):
    """Signed E4M3 codes: 4 significant bits over 18 binades and zero, up to 448 times the scale.

    The scale is the smallest under which the largest element is at most 448, so that nothing
    saturates. This is the rule of NVIDIA's recipe; the OCP specification rounds the scale down.
    Only numbers above 1.875 * 2^127 saturate, since float32 has no 2^128. Infinities and NaNs
    become the NaN of E4M3, and do not affect the rest of their block.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023;
    A. Mishra et al., "Recipes for Pre-training LLMs with MXFP8", 2025, arXiv:2506.08027.
    """

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return E4M3 values under scales; subnormal ones are multiples of 2^-9."""
        magnitude = codes & 0x7F
        normal = (magnitude << _LOST) + (120 << 23)
        x = normal.view(torch.float32)
        small = (x + x - 2.0**-6).view(torch.int32)  # below the normal one for these codes alone
        bits = small.minimum(normal)
        bits = torch.where(magnitude == 0x7F, _NAN, bits)
        return (bits | ((codes & 0x80) << 24)).view(torch.float32) * _factors(scales)

    def scale_of(self, patterns: Tensor) -> Tensor:
        """Return 2^ceil(log2(largest / 448)); 448 is 1.75 * 2^8."""
        above = (1 << 23) - 1 - (3 << 21)  # carries beyond 1.75
        exponent = ((block_max(patterns) + above) >> 23) - 8
        return exponent.maximum(torch.ones_like(exponent))

    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """Return the sign and the first bits of the magnitude divided by the scale."""
        unscaled = ((254 - scales) << 23).view(torch.float32)  # 2^127 at most, and normal
        held = magnitude.minimum(torch.full_like(magnitude, _MOST)).view(torch.float32)
        codes = round_off(e4m3_patterns(held * unscaled, noise), noise)
        codes = codes | ((x.view(torch.int32) >> 24) & 0x80)
        return torch.where(magnitude < _INFINITY, codes, 0x7F).to(torch.uint8)


class SecondMoments(BlockFormat):
    """Unsigned codes that are zero for zero alone, and with two special values.

    Under the largest scale the last two codes are an infinity and a NaN.
    """

    infinite: ClassVar[int]
    """The code of an infinity; the next one is that of a NaN."""
    top: ClassVar[int] = _TOP
    """The largest scale, under which these codes are special."""

    def require(self, x: Tensor) -> None:
        """Raise ValueError for a tensor that cannot be stored, or has negative elements."""
        super().require(x)
        is_seen = not (torch.compiler.is_compiling() or x.is_meta or is_fake(x))
        if is_seen and bool((x < 0).any()):
            raise ValueError(
                f"{self.name} holds second moments, and {int((x < 0).sum())} of {x.numel()} "
                "elements are negative; use mcf.mxfp8"
            )

    def decode(self, stored: Floats) -> Floats:
        """Return codes times scales; the last two codes of the largest scale are special values."""
        codes, scales = stored
        (x,) = super().decode(stored)
        special = torch.where(codes == self.infinite, torch.inf, torch.nan)
        top = torch.where(codes >= self.infinite, special, x)
        return (torch.where(spread(scales, codes) == self.top, top, x),)

    def sized(self, x: Tensor, magnitude: Tensor) -> Tensor:
        """Return all patterns; negative numbers and NaNs count as infinite."""
        return torch.where(x >= 0, magnitude, _INFINITY)

    def with_special(self, codes: Tensor, x: Tensor, magnitude: Tensor, scales: Tensor) -> Tensor:
        """Return codes of numbers, given those of finite ones, with special values.

        The codes of numbers above zero are at least 1. That of zero may be any up to 1, and is 0.
        """
        infinite = self.infinite
        codes = codes.maximum(magnitude.minimum(torch.ones_like(magnitude)))
        top = torch.where(codes < infinite, codes, infinite - 1)
        top = torch.where(x > 0, torch.where(magnitude < _INFINITY, top, infinite), infinite + 1)
        top = torch.where(magnitude == 0, 0, top)
        return torch.where(scales == self.top, top, codes).to(torch.uint8)


class UE5M3(SecondMoments):
    """Unsigned codes for second moments: 4 significant bits over 32 binades, and zero.

    Code c above 0 is (1 + (c & 7) / 8) * 2^((c >> 3) - 31) times the scale. The scale is the power
    of two at or below the largest element, or the next one if the element is above 1.875 times
    it. Nonzero numbers below the smallest code, about 2^-31 of the largest element, are raised to
    it: only zero becomes zero, so an update never divides by the root of a second moment that was
    rounded to zero.

    A block with a number above 1.6e38, an infinity, a NaN or a negative number has the scale 2^127.
    Its finite numbers saturate at 1.625 * 2^127. Code 254 is an infinity. Code 255 is a NaN, and
    also stands for a negative number. No other element becomes one of these.
    """

    infinite = 254

    @property
    def largest(self) -> float:
        """1.625 * 2^127, since the last two codes of the largest scale are special values."""
        return 1.625 * 2.0**127

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the codes as bits of a float32: exponent and first bits of the significand."""
        x = ((codes << _LOST) + (96 << 23)).view(torch.float32)
        return torch.where(codes == 0, 0.0, x) * _factors(scales)

    def scale_of(self, patterns: Tensor) -> Tensor:
        """Return the exponent of the largest number, or the next one."""
        above = (1 << 23) - 1 - (7 << 20)  # carries beyond 1.875
        exponent = (block_max(patterns) + above) >> 23
        exponent = exponent.maximum(torch.ones_like(exponent))
        return torch.where(exponent > _TOP, _TOP, exponent)

    def written(self, x: Tensor, magnitude: Tensor, scales: Tensor, noise: Noise | None) -> Tensor:
        """Return the codes: the first bits of x over the scale, with the exponent of a code."""
        exponents = (254 - scales).maximum(torch.ones_like(scales))
        unscaled = (exponents << 23).view(torch.float32)
        y = x.abs() * unscaled
        bits = y.view(torch.int32) - (((scales == _TOP).to(torch.int32) + 96) << 23)
        codes = round_off(bits if noise is None else _by_roots(bits), noise)
        return self.with_special(codes, x, magnitude, scales)


def factors_of(scales: Tensor, like: Tensor) -> Tensor:
    """Return the scale of each element of a tensor as a float32."""
    return _factors(spread(scales, like).to(torch.int32))


def _factors(scales: Tensor) -> Tensor:
    """Return biased exponents as float32 powers of two."""
    exponents = (scales << 23).maximum(torch.full_like(scales, 1 << 22))  # the last is 2^-127
    return torch.where(scales == _NO_NUMBER, _NAN, exponents).view(torch.float32)


def e4m3_patterns(y: Tensor, noise: Noise | None) -> Tensor:
    """Return magnitudes as patterns whose first bits are E4M3 codes.

    A normal number of E4M3 keeps the bits of its float32; below, the unit is 2^-29.
    """
    normal = y.view(torch.int32) - (120 << 23)
    least = 2.0**-6
    moved = y + least
    small = moved.view(torch.int32) - (121 << 23)
    if noise is None:  # round the sum to odd, so that ties are ties of the number
        kept = moved - least
        small = (small - (kept > y).to(torch.int32)) | (kept != y).to(torch.int32)
    return small.maximum(normal)  # the small one below the least normal number, else the other


def _by_roots(bits: Tensor) -> Tensor:
    """Replace the last bits of patterns by the position of the root between the codes' roots.

    Noise rounds up by these bits, so that roots are right in the mean. For a share t of the step
    between two codes, where the step is a share h of the lower code, the new share is
    t + t (1 - t) h / 4, up to O(h^2); h lies between 1/15 and 1/8.
    """
    t = (bits >> 5) & 0x7FFF
    steps = 16 - ((bits >> _LOST) & 7)  # 128 h, to 13 %
    return bits + ((((t * (0x8000 - t)) >> 10) * steps) >> 9)


def round_off(bits: Tensor, noise: Noise | None, lost: int = _LOST) -> Tensor:
    """Round off the last `lost` bits of patterns: ties to even, or by noise."""
    if noise is not None:
        return (bits + noise.bits(lost)) >> lost
    return (bits + ((bits >> lost) & 1) + ((1 << (lost - 1)) - 1)) >> lost


for _rounding in SUFFIXES:
    MXFP8("mxfp8", _rounding).register()
    UE5M3("ue5m3", _rounding).register()

mxfp8 = named("mxfp8")
ue5m3 = named("ue5m3")
