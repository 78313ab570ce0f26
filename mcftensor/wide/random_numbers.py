"""Random numbers in formats that no machine type holds, with all their bits.

Each term is drawn as an integer, so that a uniform number is exact. Other distributions are
functions of uniform numbers: logarithms, and the pairs of G. E. P. Box and M. E. Muller, "A note on
the generation of random normal deviates", Annals of Mathematical Statistics 29(2), 1958.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES
from mcftensor.dispatch.operands import value_of
from mcftensor.kernels.without_float64 import widest
from mcftensor.passes import expansion
from mcftensor.tensor import MCFTensor


def _drawn(x: MCFTensor, generator: torch.Generator | None) -> MCFTensor:
    """Return uniform numbers from 0 to below 1 in the format and shape of x."""
    bits, terms = BASES[x.dtype].precision, []
    for i in range(len(x.components)):
        whole = torch.randint(2**bits, x.shape, generator=generator, device=x.device)
        terms.append(whole.to(x.dtype) * 2.0 ** (-bits * (i + 1)))
    return MCFTensor.of(list(expansion.renormalize(terms)), x._format)


def _uniform(
    x: MCFTensor, low: float = 0, high: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return uniform numbers."""
    return _drawn(x, generator) * (high - low) + low


def _exponential(
    x: MCFTensor, rate: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return exponential numbers."""
    return torch.log1p(-_drawn(x, generator)) / -rate


def _geometric(x: MCFTensor, p: float, *, generator: torch.Generator | None = None) -> Tensor:
    """Return how often to try until the first success, of probability p."""
    times = _exponential(x, generator=generator) / -math.log1p(-p)
    return torch.ceil(times).clamp_min(1)


def _normal(
    x: MCFTensor, mean: float = 0, std: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return normal numbers."""
    size = torch.sqrt(2 * _exponential(x, generator=generator))
    return size * torch.cos(_drawn(x, generator) * (2 * math.pi)) * std + mean


def _log_normal(
    x: MCFTensor, mean: float = 1, std: float = 2, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return the exponentials of normal numbers."""
    return torch.exp(_normal(x, mean, std, generator=generator))


def _cauchy(
    x: MCFTensor, median: float = 0, sigma: float = 1, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return numbers of the Cauchy distribution."""
    return torch.tan((_drawn(x, generator) - 0.5) * math.pi) * sigma + median


def _normal_about(
    mean: Any, std: Any = 1, *size: Any, generator: torch.Generator | None = None
) -> Tensor:
    """Return a normal number for each mean and standard deviation."""
    if size:
        raise NotImplementedError("normal: into an expansion by x.normal_(mean, std)")
    return _normal(_blank(mean + std), generator=generator) * std + mean


def _drawn_with(x: MCFTensor, p: Any = None, *, generator: torch.Generator | None = None) -> Tensor:
    """Return ones with probability p, or with the probabilities x, else zeros."""
    if p is not None:
        return _bernoulli(x, p, generator=generator)
    return value_of((_drawn(x, generator) < x).to(x.dtype), x._format)


def _integers(
    x: MCFTensor,
    low: int,
    high: int | None = None,
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> MCFTensor:
    """Return whole numbers like x."""
    low, high = (0, low) if high is None else (low, high)
    whole = torch.randint(low, high, x.shape, generator=generator, device=x.device)
    return value_of(whole, x._format)


def _places(x: MCFTensor, *args: Any, **options: Any) -> Tensor:
    """Return places, drawn with probabilities in the machine type."""
    return torch.multinomial(x._collapsed(widest(x.device)), *args, **options)


def _bernoulli(x: MCFTensor, p: Any = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Return ones with probability p, else zeros."""
    plain = torch.empty_like(x.components[0]).bernoulli_(p, generator=generator)
    return MCFTensor.of([plain, *(torch.zeros_like(plain) for _ in x.components[1:])], x._format)


def _blank(x: MCFTensor, **options: Any) -> MCFTensor:
    """Return zeros like x."""
    return MCFTensor.of([torch.zeros_like(y, **options) for y in x.components], x._format)


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that draws numbers for a new tensor like x."""
    return lambda x, generator=None, **options: draw(_blank(x, **options), generator=generator)


ALGORITHMS: dict[str, Callable[..., Any]] = {
    "uniform_": _uniform,  # x.uniform_
    "exponential_": _exponential,  # x.exponential_
    "geometric_": _geometric,  # x.geometric_
    "normal_": _normal,  # x.normal_, nn.init
    "log_normal_": _log_normal,  # x.log_normal_
    "cauchy_": _cauchy,  # x.cauchy_
    "normal": _normal_about,  # torch.normal
    "bernoulli_": _bernoulli,  # x.bernoulli_
    "bernoulli": _drawn_with,  # torch.bernoulli
    "multinomial": _places,  # torch.multinomial
    "rand_like": _like(_uniform),  # torch.rand_like
    "randint_like": _integers,  # torch.randint_like
    "randn_like": _like(_normal),  # torch.randn_like
}
"""Algorithms by the names of aten operators."""
