"""Numbers to take fingerprints with, the same in every release of torch and numpy.

They are made of raw integers of PCG64, in integers and in exact scaling, by nothing of the library.
"""

import math
import zlib
from functools import cache

import numpy as np
import torch
from torch import Tensor

import mcftensor as mcf
from mcftensor.formats import ExpansionFormat

DISTINCT = 3001
"""Numbers after which they repeat: a prime, and so at other places of a processor's vectors."""


def plain(dtype: torch.dtype, *shape: int, seed: str = "plain", wide: bool = True) -> Tensor:
    """Numbers near 1; if wide, also of all exponents, and special values."""
    if not dtype.is_floating_point:
        return (plain(torch.float64, *shape, seed=seed, wide=False) * 2**20).to(dtype)
    return _shaped(_terms(dtype, 1, seed, wide)[0], shape)


def terms(format: mcf.Format, *shape: int, seed: str, wide: bool = True) -> tuple[Tensor, ...]:
    """Normalized terms of a format: ties, one ulp beside of them, and far terms among them."""
    found = _terms(format.base, format.terms, seed, wide)
    return tuple(_shaped(t, shape) for t in found)


def number(format: mcf.Format, *shape: int, seed: str = "x", wide: bool = True) -> mcf.MCFTensor:
    """An expansion, or what is stored; where rounding is balanced, written to and with a salt."""
    if isinstance(format, ExpansionFormat):
        components = terms(format, *shape, seed=seed, wide=wide)
    else:
        components = _leading_and_tails(format, *shape, seed=seed, wide=wide)
    salt = zlib.crc32(seed.encode()) - 2**31
    count = torch.tensor((salt << 32) + 1000) if format.rounding == "balanced" else None
    return mcf.MCFTensor.of(components, format, writes=count)


def _leading_and_tails(
    format: mcf.Format, *shape: int, seed: str, wide: bool
) -> tuple[Tensor, ...]:
    """A float, and integers of any bits beside those that are a number but not zero."""
    leading = plain(format.dtype, *shape, seed=seed, wide=wide)
    random = _Random(f"{seed} tail", DISTINCT)
    tails = []
    for component in format.components[1:]:
        ends = torch.iinfo(component.dtype)
        tail = torch.from_numpy(random.integers(ends.min, ends.max + 1)).to(component.dtype)
        has_tail = leading.isfinite() & (leading != 0)
        tails.append(_shaped(tail, shape).masked_fill(~has_tail, 0))
    return leading, *tails


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    n = math.prod(shape)
    return x.repeat(-(-n // DISTINCT))[:n].view(shape)


@cache
def _terms(dtype: torch.dtype, count: int, seed: str, wide: bool) -> list[Tensor]:
    random = _Random(seed, DISTINCT)
    terms = [_leading(random, dtype, wide)]
    may_follow = np.full(DISTINCT, True)
    for _ in range(count - 1):
        following, is_tie = _next(random, terms[-1], dtype)
        terms.append(np.where(may_follow, following, 0.0))
        may_follow &= ~is_tie
    return [torch.from_numpy(t).to(dtype) for t in terms]


class _Random:
    def __init__(self, seed: str, n: int) -> None:
        self._bits = np.random.PCG64(zlib.crc32(seed.encode()))
        self.n = n

    def integers(self, low: int, high: int) -> np.ndarray:
        return low + ((self._bits.random_raw(self.n) >> 8) % (high - low)).astype(np.int64)

    def signs(self) -> np.ndarray:
        return self.integers(0, 2) * 2.0 - 1

    def significands(self, p: int) -> np.ndarray:
        """Half of any p bits, and half that are ties of something shorter or one ulp beside."""
        bits, kept = self.integers(1 << (p - 1), 1 << p), self.integers(0, p)
        beside = (bits >> kept << kept) + (1 << kept >> 1) + self.integers(-1, 2)
        bits = np.where(self.integers(0, 2), beside, bits)
        return np.clip(bits, 1 << (p - 1), (1 << p) - 1)


def _leading(random: _Random, dtype: torch.dtype, wide: bool) -> np.ndarray:
    p, smallest, largest = _precision(dtype)
    kinds = random.integers(0, 8) if wide else np.zeros(random.n)
    near, anywhere = random.integers(-6, 6), random.integers(smallest - p, largest + 1)
    x = _scaled(random.significands(p), np.where(kinds == 6, anywhere, near), dtype)
    info = torch.finfo(dtype)
    special = [0.0, 1.0, math.inf, math.nan, info.max, info.tiny, math.ldexp(info.tiny, 1 - p)]
    chosen = np.array(special)[random.integers(0, len(special))]
    return random.signs() * np.where(kinds == 7, chosen, x)


def _next(random: _Random, x: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """What may stand after these terms, and where it is a tie, which nothing may follow."""
    p, _, _ = _precision(dtype)
    fractions, exponents = np.frexp(np.where(np.isfinite(x), x, 0))
    is_power = np.abs(fractions) == 0.5  # closer to the next float towards zero
    kinds = random.integers(0, 8)
    is_tie = (kinds == 0) & (np.ldexp(fractions, p) % 2 == 0) & ~is_power
    is_close = (kinds <= 1) & ~is_tie
    signs = np.where(is_close & is_power, np.sign(fractions), random.signs())
    significands = np.where(is_close, (1 << p) - 1, random.significands(p))
    significands = np.where(is_tie, 1 << (p - 1), significands)
    gaps = 2 + random.integers(0, 4) + np.where(kinds == 2, random.integers(0, 30), 0)
    gaps = np.where(is_tie, 0, np.where(is_close, 1, gaps))
    result = _scaled(significands, exponents - 1 - p - gaps, dtype)
    is_zero = (fractions == 0) | (kinds == 3) | (result == 0)
    return np.where(is_zero, 0.0, signs * result), is_tie


def _precision(dtype: torch.dtype) -> tuple[int, int, int]:
    """Significand bits, and the exponents of the smallest and largest normal numbers."""
    info = torch.finfo(dtype)
    smallest, largest = (math.frexp(x)[1] - 1 for x in (info.tiny, info.max))
    return 2 - math.frexp(info.eps)[1], smallest, largest


def _scaled(significands: np.ndarray, exponents: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Integers of p bits as floats of these exponents, cut off among the subnormals."""
    p, smallest, _ = _precision(dtype)
    excess = np.clip(smallest - exponents, 0, p)
    return np.ldexp((significands >> excess).astype(np.float64), exponents + excess - p + 1)
