"""What decides, element by element, whether a number is rounded up or down.

Stochastic rounding draws a key from PyTorch's generator once for an operation; the number of an
element is a hash of the key and of the element's index. Balanced rounding draws nothing: an element
takes, at the t-th write to its tensor, the t-th member of a sequence that fills the unit interval
evenly, from a place of its own on. Neither depends on how the elements are laid out or divided into
blocks, and a compiled program has the numbers of an eager one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from mcftensor.arithmetic.write_counts import salt_of
from mcftensor.kernels.custom_ops import opaque

Rounding = Literal["nearest", "stochastic", "balanced"]


@opaque(
    lambda device: torch.empty((), dtype=torch.int64, device=device),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def draw_key(device: torch.device) -> Tensor:
    """A key from the generator that torch.manual_seed seeds, without waiting for the device."""
    return torch.randint(2**63 - 1, (), device=device)


class Noise(ABC):
    """Numbers spread evenly over [0, 1), one for each element."""

    @abstractmethod
    def uniform(self) -> Tensor:
        """Themselves, in float64."""

    @abstractmethod
    def bits(self, count: int) -> Tensor:
        """Their first bits as an integer, an int32; 1 to 31 of them."""

    def is_below(self, share: Tensor) -> Tensor:
        """Whether their first 31 bits are below numbers of float32 that are not negative."""
        limit = share * 2.0**31
        whole = limit.to(torch.int64)
        return self.bits(31) < whole + (whole.to(torch.float32) < limit).to(torch.int64)


class Random(Noise):
    """Independent ones, of 53 bits.

    Source: SplitMix64 of G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014.
    """

    def __init__(self, key: Tensor, index: Tensor, stream: int = 0) -> None:
        z = (index + 1) * _signed(0x9E3779B97F4A7C15) + key + _signed(stream * 0x51B54A32D192ED03)
        z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
        z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
        self.pattern = z ^ _shifted(z, 31)

    def uniform(self) -> Tensor:
        """Of 53 bits."""
        return _shifted(self.pattern, 11).to(torch.float64) * 2.0**-53

    def bits(self, count: int) -> Tensor:
        """The first of the same 53."""
        return _shifted(self.pattern, 64 - count).to(torch.int32)


class Balanced(Noise):
    """The t-th of the multiples of an irrational number, modulo 1, from a place of each element on;
    of 32 bits.

    Of T consecutive ones the share that lies in an interval is off by O(log T / T), where it is by
    1 / sqrt(T) for independent ones. So a number that is written T times with the same remainder is
    rounded up as often as it should be, but for O(log T) times.

    Source: H. Niederreiter, "Random number generation and quasi-Monte Carlo methods", SIAM 1992,
    theorem 3.3. The places are a hash of the index and the salt of the tensor (`write_counts.py`),
    with the constants of C. Wellons' lowbias32.
    """

    def __init__(self, key: Tensor, index: Tensor, stream: int = 0) -> None:
        z = index.to(torch.int32) + salt_of(key).to(torch.int32)
        z = (z ^ _shifted(z, 16)) * 0x7FEB352D
        z = (z ^ _shifted(z, 15)) * _signed(0x846CA68B, 32)
        z = z ^ _shifted(z, 16)
        self.pattern = z + (key * _STEPS[stream]).to(torch.int32)

    def uniform(self) -> Tensor:
        """Of 32 bits."""
        return (self.pattern.to(torch.int64) & 0xFFFFFFFF).to(torch.float64) * 2.0**-32

    def bits(self, count: int) -> Tensor:
        """The first of the same 32."""
        return _shifted(self.pattern, 32 - count)


# Of 2^32, the fractional parts of the golden ratio, whose multiples are spread most evenly of all,
# and of the roots of 2, 3 and 7, for what one step writes beside it: no two have a rational
# relation. All are odd, so that they come back to where they were after 2^32 writes.
_STEPS = (0x9E3779B9, 0x6A09E667, 0xBB67AE85, 0xA54FF53B)


def noise_of(
    rounding: Rounding, key: Tensor | None, index: Tensor, stream: int = 0
) -> Noise | None:
    """What a rounding takes for the elements of these indices; nothing to the nearest.

    The key is one that was drawn, or says how often the tensor has been written to, and which it
    is. Streams are for results that are written together.
    """
    if key is None or rounding == "nearest":
        return None
    return (Random if rounding == "stochastic" else Balanced)(key, index, stream)


def _signed(n: int, bits: int = 64) -> int:
    """The last bits of n, as PyTorch's integers hold them."""
    half = 1 << (bits - 1)
    return (n + half) % (2 * half) - half


def _shifted(z: Tensor, places: int) -> Tensor:
    """z shifted right as an unsigned number."""
    width = 8 * z.dtype.itemsize
    return (z >> places) & ((1 << (width - places)) - 1)
