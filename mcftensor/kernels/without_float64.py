"""Whether float64 is there: some devices have none, and a program can ask to do without it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Depth(threading.local):
    count = 0


_DEPTH = _Depth()


class without_float64(contextlib.ContextDecorator):
    """Within it, in this thread, the library makes no float64 tensor.

    Expansions that are otherwise evaluated in float64, `bf16x3` and those of bfloat16 with other
    rounding than to nearest, are evaluated by networks of two float32 terms. Exact products and
    roots of float32 come from float32 alone, and numbers of Python, which are float64, enter as two
    float32 terms. On devices without float64, as Apple's MPS, this is so by itself. It is also a
    decorator.

    *Error*: that which `mcf.expansion` states for the format. `fp32x2` has the same bits as with
    float64, while products of terms are at least 2^-102 in size. Many numbers are summed in pairs,
    with an error of 3u² for each doubling of their count, relative to the sum of magnitudes.

    Raises:
        NotImplementedError: within it, an operation that has no other way than float64.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1.0, 3.0]), mcf.fp32x2)
        >>> with mcf.without_float64():
        ...     third = 1 / x
        >>> third
        MCFTensor([1.0000, 0.3333], format=fp32x2)
    """

    def __enter__(self) -> without_float64:
        _DEPTH.count += 1
        return self

    def __exit__(self, *args: Any) -> None:
        _DEPTH.count -= 1


def has_float64(device: torch.device | None = None) -> bool:
    """Whether to compute in float64: the program does not do without it, and the device has it."""
    if _DEPTH.count:
        return False
    return device is None or device.type == "cpu" or _has_float64(device.type, device.index)


@functools.lru_cache(maxsize=64)
def _has_float64(kind: str, index: int | None) -> bool:
    if kind == "xpu" and torch.xpu.is_available():
        return bool(getattr(torch.xpu.get_device_properties(index), "has_fp64", True))
    return kind != "mps"


def without(what: str) -> NotImplementedError:
    """The error of what takes float64 where there is none."""
    return NotImplementedError(
        f"{what} takes float64, which this device or mcf.without_float64() rules out: compute it "
        "on the CPU, outside of mcf.without_float64()"
    )


class Halves(NamedTuple):
    """A number of Python's as two float32 tensors, the nearest one and the nearest to the rest."""

    high: Tensor
    low: Tensor


def halves(x: float) -> Halves:
    """A number of Python's in float32 terms, which are normalized."""
    high = _nearest(x)
    if not math.isfinite(high):
        return Halves(_tensor(high), _tensor(0.0))
    total = high + _nearest(x - high)
    high = _nearest(total)
    return Halves(_tensor(high), _tensor(total - high))


HALVES = "fp32x2"
"""The format of a number in halves."""


def _tensor(x: float) -> Tensor:
    return torch.scalar_tensor(x, dtype=torch.float32, device="cpu")


def _nearest(x: float) -> float:
    return ctypes.c_float(x).value
