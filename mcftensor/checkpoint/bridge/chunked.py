"""Functions of elements over whole tensors, in chunks: beside operands and results little is
held."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK_SIZE = 1 << 16
"""Elements that are worked on at once."""


def in_chunks(
    function: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """What a function of elements gives of tensors of one shape, of such dtypes."""
    results = [torch.empty(operands[0].shape, dtype=dtype) for dtype in dtypes]
    places = [result.view(-1).split(CHUNK_SIZE) for result in results]
    blocks = zip(*(x.reshape(-1).split(CHUNK_SIZE) for x in operands), strict=True)
    for i, block in enumerate(blocks):
        for place, part in zip(places, function(*block), strict=True):
            place[i].copy_(part)
    return results
