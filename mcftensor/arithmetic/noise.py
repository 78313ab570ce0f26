"""The random numbers of stochastic rounding.

A key is drawn from PyTorch's generator once for an operation; the number of an element is a hash
of the key and of the element's index. So the numbers do not depend on how the elements are laid
out or divided into blocks, and a compiled program, which calls the same operators in the same
order, has those of an eager one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.kernels.opaque import opaque


@opaque(
    lambda device: torch.empty((), dtype=torch.int64, device=device),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def draw_key(device: torch.device) -> Tensor:
    """A key from the generator that torch.manual_seed seeds, without waiting for the device."""
    return torch.randint(2**63 - 1, (), device=device)


def uniform(key: Tensor, index: Tensor, stream: int = 0) -> Tensor:
    """Numbers in [0, 1) of 53 bits for the elements of these indices.

    Source: SplitMix64 of G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014.
    """
    z = (index + 1) * _signed(0x9E3779B97F4A7C15) + key + _signed(stream * 0x51B54A32D192ED03)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).to(torch.float64) * 2.0**-53


def _signed(n: int) -> int:
    """The last 64 bits of n, as PyTorch's integers hold them."""
    return (n + 2**63) % 2**64 - 2**63


def _shifted(z: Tensor, places: int) -> Tensor:
    """z shifted right as an unsigned number."""
    return (z >> places) & ((1 << (64 - places)) - 1)
