"""Formats outside the package, one of each kind that a user may write; the contract runs on them.

A float tail, one of a wider type, an integer tail, three unlike components, codes under a shared
scale, and an integer tail under a shared scale.
"""

import torch

import mcftensor as mcf
from mcftensor.formats import Machine, Scales, block_max, spread


class FloatTail(mcf.Format):
    """A bfloat16 and a float8_e5m2, in units of the last place of the bfloat16: 12 bits."""

    name = "bf16f8"
    components = (
        mcf.formats.Component("leading", torch.bfloat16),
        mcf.formats.Component("tail", torch.float8_e5m2),
    )
    numbers = Machine(torch.float32)
    precision = 12
    smallest = (2.0**-126, 2.0**-149)
    largest = torch.finfo(torch.bfloat16).max

    def decode(self, stored):
        leading, tail = stored
        x = leading.to(torch.float32)
        total = x + tail.to(torch.float32) * self._unit(leading)
        return (torch.where(x.isfinite(), total, x),)

    def encode(self, number, noise):
        x = number.to_odd()
        leading = x.to(torch.bfloat16)
        rest = (x - leading.to(torch.float32)) / self._unit(leading)
        rest = torch.where(leading.isfinite(), rest, 0.0)
        return leading, rest.to(torch.float8_e5m2)

    def _unit(self, leading):
        exponent = (leading.view(torch.int16).to(torch.int32) & 0x7F80) << 16
        power = exponent.view(torch.float32)
        return (power * 2.0**-8).clamp(2.0**-134, 2.0**120)


class WideTail(mcf.Format):
    """A float32 and a bfloat16, of which numbers are float64: 32 bits."""

    name = "fp32bf16"
    components = (
        mcf.formats.Component("leading", torch.float32),
        mcf.formats.Component("tail", torch.bfloat16),
    )
    numbers = Machine(torch.float64)
    precision = 32
    smallest = (2.0**-101, 2.0**-149)
    largest = torch.finfo(torch.float32).max

    def decode(self, stored):
        leading, tail = (x.to(torch.float64) for x in stored)
        return (torch.where(leading.isfinite(), leading + tail, leading),)

    def encode(self, number, noise):
        x = number.to(torch.float64)
        leading = x.to(torch.float32)
        rest = (x - leading.to(torch.float64)).to(torch.bfloat16)
        return leading, torch.where(leading.isfinite(), rest, 0.0)


class Halves(mcf.Format):
    """Every float32 as its two halves of 16 bits; the upper one is cut off, not rounded."""

    name = "halves"
    components = (
        mcf.formats.Component("upper", torch.bfloat16),
        mcf.formats.Component("lower", torch.int16),
    )
    numbers = Machine(torch.float32)

    def decode(self, stored):
        upper, lower = stored
        bits = (upper.view(torch.int16).to(torch.int32) << 16) | (lower.to(torch.int32) & 0xFFFF)
        return (bits.view(torch.float32),)

    def encode(self, number, noise):
        bits = number.to(torch.float32).view(torch.int32)
        return (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


class Bytes(mcf.Format):
    """Every float32 as a bfloat16, cut off, and two integers of a byte."""

    name = "bf16i8i8"
    components = (
        mcf.formats.Component("leading", torch.bfloat16),
        mcf.formats.Component("middle", torch.int8),
        mcf.formats.Component("last", torch.int8),
    )
    numbers = Machine(torch.float32)

    def decode(self, stored):
        upper, middle, last = stored
        bits = upper.view(torch.int16).to(torch.int32) << 16
        bits = bits | ((middle.to(torch.int32) & 0xFF) << 8) | (last.to(torch.int32) & 0xFF)
        return (bits.view(torch.float32),)

    def encode(self, number, noise):
        bits = number.to(torch.float32).view(torch.int32)
        leading = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        return leading, (bits >> 8).to(torch.int8), bits.to(torch.int8)


class Int8Blocks(mcf.Format):
    """Integers of a byte times a power of two that 32 neighbours share: 7 bits of the largest."""

    name = "int8blocks"
    components = (mcf.formats.Component("codes", torch.int8), Scales("scales", torch.bfloat16))
    numbers = Machine(torch.float32)
    dtype = torch.float32
    precision = 7
    smallest = (2.0**-120, 2.0**-126)

    def decode(self, stored):
        codes, scales = stored
        x = codes.to(torch.float32) * spread(scales, codes).to(torch.float32)
        return (torch.where(codes == -128, torch.nan, x),)

    def encode(self, number, noise):
        x = number.to_odd()
        scales = _power_below(x, 64)
        codes = (x / spread(scales, x)).round().clamp(-127, 127)
        codes = torch.where(x.isfinite(), codes, -128.0)
        return codes.to(torch.int8), scales.to(torch.bfloat16)


class ScaledTail(mcf.Format):
    """A bfloat16 and an integer of a byte, in units that 32 neighbours share: 16 bits of the
    largest."""

    name = "bf16i8s"
    components = (
        mcf.formats.Component("leading", torch.bfloat16),
        mcf.formats.Component("tail", torch.int8),
        Scales("scales", torch.bfloat16),
    )
    numbers = Machine(torch.float32)
    precision = 15
    smallest = (2.0**-110, 2.0**-133)
    largest = torch.finfo(torch.bfloat16).max

    def decode(self, stored):
        leading, tail, scales = stored
        return (leading.to(torch.float32) + tail.to(torch.float32) * spread(scales, tail),)

    def encode(self, number, noise):
        x = number.to_odd()
        leading = x.to(torch.bfloat16)
        rest = x - leading.to(torch.float32)
        rest = torch.where(leading.isfinite(), rest, 0.0)
        scales = _power_below(rest, 64)
        tail = (rest / spread(scales, rest)).round().clamp(-127, 127)
        return leading, tail.to(torch.int8), scales.to(torch.bfloat16)


def _power_below(x, steps):
    """For each block the power of two of which its largest finite number is `steps` to twice as
    many."""
    size = torch.where(x.isfinite(), x.abs(), 0.0) * (0.5 * 128 / 127.5)
    power = block_max(size.view(torch.int32)) & 0x7F800000
    return (power.view(torch.float32) * (2.0 / steps)).clamp(2.0**-126, 2.0**121)


TOYS = [kind().register() for kind in (FloatTail, WideTail, Halves, Bytes, Int8Blocks, ScaledTail)]
halves = TOYS[2]
