"""Functions of logits and of their rows, in the memory of a chunk.

These are operators of PyTorch's, into which compilers do not look.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mcftensor import kernels
from mcftensor.kernels import Columns
from mcftensor.kernels.custom_ops import opaque
from mcftensor.reproducible.softmax_terms import body_of, count_body
from mcftensor.reproducible.vocabularies import Vocabulary
from mcftensor.sums.accumulators import accumulate
from mcftensor.sums.correct_rounding import rounded_sum
from mcftensor.sums.digits import grid_of

# Elements of a chunk, on a CPU and on other devices.
CHUNK, CHUNK_ON_OTHERS = 1 << 18, 1 << 24

# Columns of a chunk from which each of its rows is a call with scalars of its own; the values of
# shorter rows are repeated for each element.
LONG = 1 << 12

Chunk = tuple[list[Tensor], list[Tensor]]


@opaque(lambda x, most, places: most.new_empty(most.shape, dtype=torch.int64), lays_out=True)
def logit_counts(x: Tensor, most: Tensor, places: int) -> Tensor:
    """The sums of e^(x - most) along the last dimension, as multiples of 2^-places.

    `most` is float64 and of the shape of `x` without the last dimension.
    """
    sums = torch.zeros(most.shape, dtype=torch.int64, device=x.device)
    for (part,), (largest, total) in _chunks([x], [most, sums]):
        counts = torch.empty(part.shape, dtype=torch.int64, device=x.device)
        _run(count_body(places), [part], [largest], counts)
        total += counts.sum(1)
    return sums


@opaque(lambda name, x, rows, dtype: x[0].new_empty(x[0].shape, dtype=dtype), lays_out=True)
def logit_map(name: str, x: Sequence[Tensor], rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A function of `softmax_terms`, of elements and of float64 values of rows."""
    result = torch.empty(x[0].shape, dtype=dtype, device=x[0].device)
    for (*parts, out), values in _chunks([*x, result], rows):
        _run(body_of(name, dtype), parts, values, out)
    return result


@opaque(lambda name, x, rows: x[0].new_empty(x[0].shape[:-1], dtype=torch.float64), lays_out=True)
def logit_sum(name: str, x: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """The exact sums of such a function along the last dimension, rounded to float64 once."""
    return _rounded(_digits(name, x, rows))


def divided_sum(
    name: str, x: Sequence[Tensor], rows: Sequence[Tensor], vocabulary: Vocabulary
) -> Tensor:
    """`logit_sum` over the parts of all processes, with the bits of the undivided sum."""
    if vocabulary.group is None:
        return logit_sum(name, x, rows)
    return _rounded(vocabulary.summed(_digits(name, x, rows)))


def _rounded(digits: Tensor) -> Tensor:
    return rounded_sum(digits.movedim(-1, 0), torch.float64, grid_of(torch.float64, 1))


def _digits(name: str, x: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Exact sums as integers, of one dimension more than rows."""
    grid = grid_of(torch.float64, 1)
    shape = (*x[0].shape[:-1], grid.count + 5)
    digits = torch.zeros(shape, dtype=torch.int64, device=x[0].device)
    for parts, (*values, total) in _chunks(x, [*rows, digits]):
        terms = torch.empty(parts[0].shape, dtype=torch.float64, device=x[0].device)
        _run(body_of(name, torch.float64), parts, values, terms)
        total += accumulate(terms, None, grid).t()
    return digits


def _run(body: kernels.Body, parts: list[Tensor], rows: list[Tensor], out: Tensor) -> None:
    parts = [part.contiguous() for part in parts]
    if out.device.type == "cpu" and out.shape[1] >= LONG:
        columns = Columns(
            [part.unbind() for part in parts], [row.tolist() for row in rows], [out.unbind()]
        )
    else:
        repeated = [row.unsqueeze(1).expand(out.shape).contiguous() for row in rows]
        columns = Columns([[x] for x in (*parts, *repeated)], [], [[out]])
    kernels.run(body, columns)


def _chunks(x: Sequence[Tensor], rows: Sequence[Tensor]) -> Iterator[Chunk]:
    """Views of elements, of two dimensions, and of what their rows have."""
    shape = x[0].shape
    if 0 in shape:
        return
    if len(shape) > 2 and not all(map(_has_rows, x)):
        for i in range(shape[0]):
            yield from _chunks([part[i] for part in x], [row[i] for row in rows])
        return
    dims = len(shape) - 1
    count = math.prod(shape[:-1])
    matrices = [part.view(count, shape[-1]) if dims != 1 else part for part in x]
    rows = [row.reshape(count, *row.shape[dims:]) for row in rows]
    size = CHUNK if x[0].device.type == "cpu" else CHUNK_ON_OTHERS
    width = min(shape[-1], size)
    height = max(size // width, 1)
    for top in range(0, count, height):
        for left in range(0, shape[-1], width):
            block = (slice(top, top + height), slice(left, left + width))
            yield [part[block] for part in matrices], [row[block[0]] for row in rows]


def _has_rows(x: Tensor) -> bool:
    """Whether all dimensions but the last can be seen as one."""
    sizes, strides = x.shape, x.stride()
    return all(strides[i] == sizes[i + 1] * strides[i + 1] for i in range(x.dim() - 2))
