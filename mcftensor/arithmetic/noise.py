"""Noise that decides, for each element, whether a number is rounded up or down.

Stochastic rounding draws one key for an operation from PyTorch's generator. The noise of an element
is a hash of the key and of the element's index. Balanced rounding draws nothing: at the t-th write
to its tensor, an element takes the t-th member of a sequence that fills the unit interval evenly
and starts at a different number for each element. Neither depends on memory layout or on the
division into blocks, and a compiled program has the same noise as an eager one.
"""

from __future__ import annotations

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
    """Draw a key from the generator that torch.manual_seed seeds, without synchronizing."""
    return torch.randint(2**63 - 1, (), device=device)


class Noise:
    """Numbers of 32 bits spread evenly over [0, 1), one for each element.

    `pattern` holds their bits in int32, in whose arithmetic all devices agree.
    """

    pattern: Tensor

    def uniform(self) -> Tensor:
        """Return the numbers in float64."""
        return (self.pattern.to(torch.int64) & 0xFFFFFFFF).to(torch.float64) * 2.0**-32

    def bits(self, count: int) -> Tensor:
        """Return the first `count` bits of the numbers, 1 to 31, as an int32 integer."""
        return shifted(self.pattern, 32 - count)

    def is_below(self, share: Tensor) -> Tensor:
        """Whether the first 31 bits of the numbers are below `share`, a nonnegative float32."""
        limit = share * 2.0**31
        whole = limit.to(torch.int64)
        return self.bits(31) < whole + (whole.to(torch.float32) < limit).to(torch.int64)


class Random(Noise):
    """Independent numbers: a hash of the key and of the last 32 bits of the index.

    Half of the key moves the index, and the other half is a factor of the hash, so that the numbers
    of two keys are unrelated even where they hash the same moved index. Streams 0 and 2, and 1 and
    3, share a hash, whose second half changes the first half of the later stream. So the first 16
    bits of the two are independent, which decide a rounding up to 2^-16 of a unit.

    Source: triple32 of C. Wellons, "Prospecting for hash functions", 2018, a permutation of the
    numbers of 32 bits; the factor replaces the first of its three.
    """

    def __init__(self, key: Tensor, index: Tensor, stream: int = 0) -> None:
        is_later, pair = divmod(stream, 2)
        key = key + signed(pair * 0x9E3779B97F4A7C15)
        factor = ((key >> 31).to(torch.int32) ^ signed(0xED5AD4BB, 32)) | 1
        z = index.to(torch.int32) + key.to(torch.int32)
        z = (z ^ shifted(z, 17)) * factor
        z = (z ^ shifted(z, 11)) * signed(0xAC4C1B51, 32)
        z = (z ^ shifted(z, 15)) * 0x31848BAB
        z = z ^ shifted(z, 14)
        self.pattern = z ^ z << 16 if is_later else z


class Balanced(Noise):
    """Multiples of an irrational number, modulo 1.

    The t-th write takes the t-th multiple, shifted by a start that differs between elements. Of T
    consecutive multiples, the share in an interval is off by O(log T / T), compared with
    1 / sqrt(T) for independent numbers. So a number that is written T times with the same remainder
    is rounded up as often as it should be, up to O(log T) times.

    Source: H. Niederreiter, "Random number generation and quasi-Monte Carlo methods", SIAM 1992,
    theorem 3.3. The starts are a hash of the index and the salt of the tensor (`write_counts.py`),
    with the constants of C. Wellons' lowbias32.
    """

    def __init__(self, key: Tensor, index: Tensor, stream: int = 0) -> None:
        z = index.to(torch.int32) + salt_of(key).to(torch.int32)
        z = (z ^ shifted(z, 16)) * 0x7FEB352D
        z = (z ^ shifted(z, 15)) * signed(0x846CA68B, 32)
        z = z ^ shifted(z, 16)
        self.pattern = z + (key * _STEPS[stream]).to(torch.int32)


# 2^32 times the fractional parts of the golden ratio, whose multiples are spread most evenly, and
# of the roots of 2, 3 and 7, for other results of the same step. No two have a rational relation.
# All are odd, so that each sequence has a period of 2^32 writes.
_STEPS = (0x9E3779B9, 0x6A09E667, 0xBB67AE85, 0xA54FF53B)


def noise_of(rounding: Rounding, key: Tensor, index: Tensor, stream: int = 0) -> Noise | None:
    """Return the noise of a rounding mode for elements of these indices, or None for "nearest".

    The key is a drawn key for "stochastic", and a write count for "balanced". Results that are
    written together take different streams.
    """
    if rounding == "nearest":
        return None
    return (Random if rounding == "stochastic" else Balanced)(key, index, stream)


def signed(n: int, bits: int = 64) -> int:
    """The last `bits` bits of n, as a signed integer like PyTorch's."""
    half = 1 << (bits - 1)
    return (n + half) % (2 * half) - half


def shifted(z: Tensor, places: int) -> Tensor:
    """z shifted right as an unsigned integer."""
    width = 8 * z.dtype.itemsize
    return (z >> places) & ((1 << (width - places)) - 1)
