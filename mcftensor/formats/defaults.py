"""The default formats of conversions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, NARROW
from mcftensor.formats.expansion_format import ExpansionFormat, bf16x2, bf16x3
from mcftensor.formats.format import Format
from mcftensor.formats.four_bits import FourBitFormat
from mcftensor.formats.integer_tails import bf16i16


def for_shape(format: Format, shape: torch.Size) -> Format:
    """Return the format of a tensor, given one for all.

    Vectors have no rows with scales, and an odd second dimension has no halves for packed codes.
    """
    if format.shared and is_vector(shape):
        return bf16i16
    return format.unpacked if isinstance(format, FourBitFormat) and shape[1] % 2 else format


_LARGE = 0.75
"""Root mean square of weights above which two terms are too coarse. It is above the root mean
square of any linear layer or convolution that PyTorch initializes, and below that of embeddings."""
_UPDATES = 2.0**14
"""The same bound in units of the learning rate: two terms of w lose updates below 2^-17 w, and an
eighth of the rate must survive."""

_SAMPLE = 1 << 20
"""The number of elements from which the size of a tensor is estimated."""

AVERAGES = frozenset({"running", "moving", "ema", "avg", "average", "averages"})
"""Words in names of buffers of averages, and two whole names, of PyTorch's quantizers."""
_EXTREMES = ("min_val", "max_val")


def is_vector(shape: torch.Size) -> bool:
    """Whether at most one dimension is longer than 1, as in gains and biases."""
    return sum(length > 1 for length in shape) <= 1


def default_format(shape: torch.Size) -> ExpansionFormat:
    """Return the format of a tensor of this shape if the caller names none.

    It is `bf16x3` for at most one dimension longer than 1, else `bf16x2`. Norm weights are near 1,
    where two terms lose much of a small update, and such tensors are small.
    """
    return bf16x3 if is_vector(shape) else bf16x2


def format_of_weights(x: Tensor, lr: float | None = None) -> ExpansionFormat:
    """Return `bf16x3` for vectors and for weights too large for their updates, else `bf16x2`.

    Vectors have at most one dimension longer than 1. Tensors without data, on the meta device, are
    judged by their shape.
    """
    by_shape = default_format(x.shape)
    if x.is_meta or type(x) not in (Tensor, torch.nn.Parameter) or not x.numel():
        return by_shape
    some = _some_of(x.detach()).cpu().float()  # what overflows is large, too
    size = float(torch.linalg.vector_norm(some)) / math.sqrt(some.numel())
    is_large = size > (_LARGE if lr is None else lr * _UPDATES)
    return bf16x3 if is_large else by_shape


def _some_of(x: Tensor) -> Tensor:
    """Return evenly spaced elements, without a copy of the others."""
    while x.numel() > _SAMPLE:
        longest = max(range(x.dim()), key=lambda dim: x.shape[dim])
        x = x[(slice(None),) * longest + (slice(None, None, 2),)]
    return x


def format_of_buffer(x: Tensor, base: torch.dtype) -> Format | None:
    """Return the format of float32 buffers with parameters of a base type, if they need one."""
    if x.dtype not in BASES or x.layout != torch.strided:
        return None
    if base == torch.bfloat16:
        return bf16i16
    if base in NARROW:
        return ExpansionFormat(base, 3)
    return ExpansionFormat(base, 2) if x.dtype.itemsize > base.itemsize else None


def is_average(name: str) -> bool:
    """Whether a buffer of this name is an average, which needs the precision of all components."""
    name = name.rpartition(".")[2]
    return name in _EXTREMES or not AVERAGES.isdisjoint(name.lower().split("_"))
