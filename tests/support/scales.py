"""Scaled tensors for tests, and what their numbers are, worked out without the library."""

import math
from fractions import Fraction

import torch
from torch import Tensor

import mcftensor as mcf

FP16 = mcf.scaling.scaled(torch.float16)
FORMATS = [
    FP16,
    mcf.scaling.scaled(torch.bfloat16),
    mcf.scaling.scaled(torch.float32),
    mcf.scaling.scaled(torch.float8_e4m3fn),
    mcf.scaling.scaled(torch.float8_e5m2),
    mcf.scaling.scaled(mcf.fp16x2),
    mcf.scaling.scaled(mcf.bf16x2),
    mcf.scaling.scaled(torch.float16, tail=8),
]
# Bits of the data, and the exponent of the smallest one that is not zero.
BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
BITS |= {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}
LEAST = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}
LEAST |= {torch.float8_e4m3fn: -9, torch.float8_e5m2: -16}


def at(data: Tensor, exponent: int, requires_grad: bool = False) -> mcf.MCFTensor:
    """data · 2^exponent, of any data that float16 holds."""
    s = torch.tensor(exponent, dtype=torch.int32)
    made = mcf.MCFTensor([data, s], mcf.scaling.scaled(data.dtype))
    return made.requires_grad_(requires_grad)


def normal(*shape: int, exponent: int = 0, seed: int = 0, dtype=torch.float16) -> mcf.MCFTensor:
    """Normal numbers times 2^exponent."""
    generator = torch.Generator().manual_seed(seed)
    return at(torch.randn(shape, generator=generator).to(dtype), exponent)


def is_scaled(x: object) -> bool:
    """Whether it is a tensor in a scaled format."""
    return type(x) is mcf.MCFTensor and isinstance(x.format, mcf.scaling.ScaledFormat)


def exact(x: Tensor) -> Tensor:
    """The numbers in float64: data times 2^s, by Python."""
    if not is_scaled(x):
        return x.detach().double()
    s = x.exponent.item()
    if s < -2000:
        assert not any(part.double().any() for part in x.components[:-1])
        return torch.zeros(x.shape, dtype=torch.float64)
    total = x.components[0].detach().double()
    if len(x.components) == 3:
        tail = x.components[1].detach()
        unit = _unit_behind(total, tail) if tail.dtype == torch.int8 else 2.0 ** -BITS[x.dtype]
        total = total + tail.double() * unit
    return total * 2.0**s


def _unit_behind(leading: Tensor, tail: Tensor) -> Tensor:
    """What an integer behind a float16 counts: 1/256 of the step to the next one, on its side."""
    mantissa, exponent = torch.frexp(leading)
    exponent = torch.where(leading == 0, -14, exponent - 1).clamp(min=-14).double()
    is_below_a_power = (mantissa.abs() == 0.5) & (tail < 0) & (exponent > -14)
    unit = torch.exp2(exponent - torch.where(is_below_a_power, 19, 18))
    return torch.where(torch.signbit(leading), -unit, unit)


def bits_of(format: mcf.scaling.ScaledFormat) -> int:
    """Significand bits of a number."""
    return BITS[format.dtype] + {torch.int8: 8}.get(format.tail, BITS.get(format.tail, 0))


def least_of(format: mcf.scaling.ScaledFormat) -> int:
    """The exponent of the smallest number that is not zero, unscaled."""
    return LEAST[format.dtype] + BITS[format.dtype] - bits_of(format)


def rms(x: mcf.MCFTensor) -> float:
    """Of the data."""
    return x.components[0].double().square().mean().sqrt().item()


def fraction(x: float) -> Fraction:
    return Fraction(x)


def floor_log2(x: float) -> int:
    return math.frexp(x)[1] - 1


def half(n: int) -> int:
    """floor(½ log2 n)."""
    return math.floor(0.5 * math.log2(n))


def assert_near(x: mcf.MCFTensor, expected: Tensor, slack: float | Tensor = 0.0) -> None:
    """x is what is expected, to half an ulp of its data, beside `slack` for sums in float32."""
    assert is_scaled(x)
    assert x.shape == expected.shape
    unit = 2.0 ** -BITS[x.dtype]
    least = 2.0 ** (LEAST[x.dtype] - 1 + x.exponent.item())
    bound = unit * expected.abs() * 1.001 + least + slack
    error = (exact(x) - expected).abs()
    assert bool((error <= bound).all()), f"{(error / bound).max().item()} times the bound"
