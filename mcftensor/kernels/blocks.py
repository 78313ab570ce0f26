"""Elementwise functions run by eager PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.kernels.columns import Columns
from mcftensor.kernels.program import Body

# Elements whose intermediate tensors fit into the caches of a CPU together.
BLOCK = 1 << 16


def run(body: Body, columns: Columns) -> None:
    """Write a function of vectors and scalars into outputs, whose elements all lie alike in memory.

    On a CPU this is done block by block, so that memory is read once.
    """
    for call in columns:
        output = call.outputs[0][0]
        length = output.numel()
        if output.device.type != "cpu" or length <= BLOCK:
            run_whole(body, call)
            continue
        vectors, outputs = (
            [x.as_strided((length,), (1,)) for (x,) in part]
            for part in (call.vectors, call.outputs)
        )
        for start in range(0, length, BLOCK):
            part = slice(start, start + BLOCK)
            block = Columns(
                [[x[part]] for x in vectors], call.scalars, [[x[part]] for x in outputs], call.keys
            )
            run_whole(body, block, start)


def run_whole(body: Body, columns: Columns, start: int = 0) -> None:
    """The same for tensors laid out in any way; the first element has the index `start`."""
    for call in columns:
        outputs = [x for (x,) in call.outputs]
        index = indices(outputs[0]) + start if call.keys else torch.empty(0)
        scalars = [x for (x,) in call.every_scalar()]
        results = body([x for (x,) in call.vectors], scalars, index)
        torch._foreach_copy_(outputs, list(results))  # by one call, which no signal interrupts


def indices(x: Tensor) -> Tensor:
    """The index of each element of a tensor, counted in the order of its dimensions."""
    return torch.arange(x.numel(), device=x.device).view(x.shape)
