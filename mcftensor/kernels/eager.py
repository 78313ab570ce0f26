"""Elementwise functions run by eager PyTorch, in chunks that fit into caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.columns import Columns, Scalar, on_device
from mcftensor.kernels.program import Body

# Elements of a chunk, whose intermediate tensors fit into the caches of a CPU together; and, on
# other devices, into memory.
CHUNK, CHUNK_ON_OTHERS = 1 << 16, 1 << 24


def run(body: Body, columns: Columns) -> None:
    """Write a function of vectors and scalars into outputs, whose elements all lie alike in memory.

    This is done chunk by chunk, so that a CPU reads memory once, and others hold little of it.
    """
    for call in columns:
        output = call.outputs[0][0]
        length = output.numel()
        size = CHUNK if output.device.type == "cpu" else CHUNK_ON_OTHERS
        if length <= size:
            run_whole(body, call)
            continue
        call = flat(call)
        width = BLOCK_SIZE if call.shared else 1
        for start in range(0, length, size):
            part = slice(start // width, (start + size) // width)
            vectors, outputs = ([[x[part]] for (x,) in y] for y in (call.vectors, call.outputs))
            chunk = Columns(vectors, call.scalars, outputs, call.keys, call.shared, call.done)
            run_whole(body, chunk, start)


def flat(call: Columns) -> Columns:
    """A call on tensors whose elements all lie alike in memory as one on tensors of one dimension;
    or of a row for each block that shares something, where that lies alike too."""

    def seen(i: int, x: Tensor) -> Tensor:
        if not call.shared:
            return x.as_strided((x.numel(),), (1,))
        width = 1 if i in call.shared else BLOCK_SIZE
        return x.as_strided((x.numel() // width, width), (width, 1))

    count = len(call.vectors)
    vectors = [[seen(i, x)] for i, (x,) in enumerate(call.vectors)]
    outputs = [[seen(count + i, x)] for i, (x,) in enumerate(call.outputs)]
    return Columns(vectors, call.scalars, outputs, call.keys, call.shared, call.done)


def run_whole(body: Body, columns: Columns, start: int = 0) -> None:
    """The same for tensors laid out in any way; the first element has the index `start`."""
    for call in columns:
        outputs = [x for (x,) in call.outputs]
        index = indices(outputs[0]) + start if call.keys else torch.empty(0, device="cpu")
        scalars = [_there(x, outputs[0].device) for (x,) in call.every_scalar()]
        results = body([x for (x,) in call.vectors], scalars, index)
        writes = map(torch._foreach_copy_, [outputs], [list(results)])
        done: list[Any] = [] if call.done is None else call.done
        done.extend(zip([outputs[0].numel()], writes, strict=True))  # which no signal interrupts


def _there(x: Scalar, device: torch.device) -> Scalar:
    """A scalar where the vectors are: GPUs multiply by the reciprocal of a number of the host
    instead of dividing by it. Devices without float64 take numbers of the host alone."""
    if device.type in ("cpu", "mps"):
        return x
    if isinstance(x, Tensor):
        return on_device(x, device)
    return torch.full((), x, dtype=torch.float64, device=device)


def indices(x: Tensor) -> Tensor:
    """The index of each element of a tensor, counted in the order of its dimensions."""
    return torch.arange(x.numel(), device=x.device).view(x.shape)
