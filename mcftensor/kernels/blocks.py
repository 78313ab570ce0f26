"""Elementwise functions run by eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.kernels.program import Body
from mcftensor.noise import indices

# Elements whose intermediate tensors fit into the caches of a CPU together.
BLOCK = 1 << 16


def run(
    body: Body,
    vectors: Sequence[Tensor],
    scalars: Sequence[Tensor | float],
    outputs: Sequence[Tensor],
) -> None:
    """Write a function of vectors and scalars into outputs, whose elements all lie alike in memory.

    On a CPU this is done block by block, so that memory is read once.
    """
    length = outputs[0].numel()
    if outputs[0].device.type != "cpu" or length <= BLOCK:
        run_whole(body, vectors, scalars, outputs)
        return
    flat_vectors, flat_outputs = ([_flattened(x) for x in xs] for xs in (vectors, outputs))
    for start in range(0, length, BLOCK):
        part = slice(start, start + BLOCK)
        targets = [x[part] for x in flat_outputs]
        run_whole(body, [x[part] for x in flat_vectors], scalars, targets, start)


def run_whole(
    body: Body,
    vectors: Sequence[Tensor],
    scalars: Sequence[Tensor | float],
    outputs: Sequence[Tensor],
    start: int = 0,
) -> None:
    """The same for tensors laid out in any way; the first element has the index `start`."""
    # Only what draws random numbers asks for it, by a key.
    keyed = any(isinstance(x, Tensor) and x.dtype == torch.int64 for x in scalars)
    index = indices(outputs[0]) + start if keyed else torch.empty(0)
    for output, result in zip(outputs, body(vectors, scalars, index), strict=True):
        output.copy_(result)


def _flattened(x: Tensor) -> Tensor:
    """Dense elements in the order of memory."""
    return x.as_strided((x.numel(),), (1,))
