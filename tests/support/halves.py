"""A format of a user's: float32 stored as its two halves of 16 bits.

The upper half is a bfloat16, cut off, with which models compute; the lower one is an integer.
"""

import torch

import mcftensor as mcf


class Halves(mcf.Format):
    """Every float32, in 4 bytes."""

    name = "halves"
    components = (
        mcf.Component("upper", torch.bfloat16),
        mcf.Component("lower", torch.int16),
    )
    numbers = mcf.formats.Machine(torch.float32)

    def decode(self, stored):
        upper, lower = stored
        bits = (upper.view(torch.int16).to(torch.int32) << 16) | (lower.to(torch.int32) & 0xFFFF)
        return (bits.view(torch.float32),)

    def encode(self, number, noise):
        bits = number.to(torch.float32).view(torch.int32)
        return (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


halves = Halves().register()
