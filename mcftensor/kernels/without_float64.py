"""Whether float64 is available: some devices lack it, and a program can rule it out."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


class _Contexts(threading.local):
    depth = 0


CONTEXTS = _Contexts()
"""The number of `without_float64` contexts that this thread is in, as `depth`."""


class without_float64(contextlib.ContextDecorator):
    """Context, also a decorator, in which the library makes no float64 tensor in this thread.

    Expansions that are otherwise evaluated in float64, `bf16x3` and bfloat16 with another rounding
    than to nearest, are evaluated by networks of two float32 terms. Exact products and roots of
    float32 use float32 alone, and Python numbers, which are float64, become three float32 terms.
    Devices without float64, such as Apple's MPS, always work in this way.

    *Error*: as `mcf.expansion` states for the format. `fp32x2` has the same bits as with float64 if
    products of terms are at least 2^-102 in size. Long sums are computed in pairs, with an error of
    3u² for each doubling of their length, relative to the sum of magnitudes.

    Raises:
        NotImplementedError: an operation in the context needs float64.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1.0, 3.0]), mcf.fp32x2)
        >>> with mcf.without_float64():
        ...     third = 1 / x
        >>> third
        MCFTensor([1.0000, 0.3333], format=fp32x2)
    """

    def __enter__(self) -> without_float64:
        CONTEXTS.depth += 1
        return self

    def __exit__(self, *args: Any) -> None:
        CONTEXTS.depth -= 1


# A function, because a KeyboardInterrupt may cut the end of a context manager.
def run_without_float64(function: Callable[[], R]) -> R:
    """Call a function in the context `without_float64`."""
    depth = CONTEXTS.depth
    try:
        CONTEXTS.depth = depth + 1
        return function()
    finally:
        CONTEXTS.depth = depth


def has_float64(device: torch.device | None = None) -> bool:
    """Whether to compute in float64: the context does not rule it out, and the device has it."""
    if CONTEXTS.depth:
        return False
    return device is None or device.type == "cpu" or _has_float64(device.type, device.index)


def widest(device: torch.device | None = None) -> torch.dtype:
    """Return float64, or float32 where float64 is not available."""
    return torch.float64 if has_float64(device) else torch.float32


@functools.lru_cache(maxsize=64)
def _has_float64(kind: str, index: int | None) -> bool:
    if kind == "xpu" and torch.xpu.is_available():
        return bool(getattr(torch.xpu.get_device_properties(index), "has_fp64", True))
    return kind != "mps"


def without(what: str) -> NotImplementedError:
    """Return the error of an operation that needs float64 where it is not available."""
    return NotImplementedError(
        f"{what} takes float64, which this device or mcf.without_float64() rules out: compute it "
        "on the CPU, outside of mcf.without_float64()"
    )


class Pieces(NamedTuple):
    """A Python number as normalized float32 terms: a number of 53 bits needs three."""

    high: Tensor
    low: Tensor
    rest: Tensor


def is_long_int(x: Any) -> bool:
    """Return whether a Python number is an int that float64 may not hold."""
    return isinstance(x, int) and not -(2**53) <= x <= 2**53


def terms_of_int(x: int, nearest: Callable[[float], float] = float) -> list[float]:
    """Return an int as a sum of three floats, each nearest to what the ones before it leave.

    Raises:
        OverflowError: an int beyond the range of float64.
    """
    terms = []
    for _ in range(3):
        terms.append(nearest(float(x)))
        if not math.isfinite(terms[-1]):
            return [terms[-1], 0.0, 0.0]
        x -= int(terms[-1])
    return terms


def pieces(x: float, device: torch.device | str = "cpu") -> Pieces:
    """Return a Python number as float32 terms. The first two are the nearest number of two."""
    if is_long_int(x):
        terms = terms_of_int(int(x), _nearest)
        return Pieces(*[torch.scalar_tensor(y, dtype=torch.float32, device=device) for y in terms])
    x = float(x)
    terms = [_nearest(x), 0.0, 0.0]
    if terms[0] and math.isfinite(terms[0]):  # a zero keeps its sign
        total = terms[0] + _nearest(x - terms[0])
        high = _nearest(total)
        terms = [high, total - high, x - total]
    return Pieces(*[torch.scalar_tensor(y, dtype=torch.float32, device=device) for y in terms])


def format_of_numbers(device: torch.device | None = None) -> str:
    """Return the format of all Python numbers, also of ints that float64 does not hold."""
    return "fp64x3" if has_float64(device) else "fp32x3"


PAIR = "fp32x2"
"""The format of values that are in float64 where it is available."""


_BITS, _SMALLEST_EXPONENT, _OVERFLOW = 24, -125, 2.0**128
"""The limits of float32, with exponents in the convention of `math.frexp`."""


def _nearest(x: float) -> float:
    """Return the nearest number of float32, in operations that compilers trace."""
    if x == 0 or not math.isfinite(x):
        return x
    unit = math.ldexp(1.0, max(math.frexp(x)[1], _SMALLEST_EXPONENT) - _BITS)
    nearest = math.copysign(round(x / unit) * unit, x)
    return nearest if abs(nearest) < _OVERFLOW else math.copysign(math.inf, x)
