"""Elementwise functions run by eager PyTorch, in chunks that fit the caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels.block_scales import BLOCK_SIZE, shape_of_codes
from mcftensor.kernels.columns import Columns, Scalar, on_device
from mcftensor.kernels.program import Body

# Elements of a chunk: its intermediate tensors together fit into the caches of a CPU, and, on other
# devices, into memory.
CHUNK, CHUNK_ON_OTHERS = 1 << 16, 1 << 24


def run(body: Body, columns: Columns) -> None:
    """Run a function on vectors and scalars that have the same layout, writing to the outputs.

    It runs chunk by chunk, so that a CPU reads memory once, and other devices hold few intermediate
    results.
    """
    for call in columns:
        output = call.outputs[0][0]
        length = output.numel() * BLOCK_SIZE // call.per_block(len(call.vectors))
        size = CHUNK if output.device.type == "cpu" else CHUNK_ON_OTHERS
        if length <= size:
            run_whole(body, call)
            continue
        call = flat(call)
        width = BLOCK_SIZE if call.shared else 1
        for start in range(0, length, size):
            part = slice(start // width, (start + size) // width)
            vectors, outputs = ([[x[part]] for (x,) in y] for y in (call.vectors, call.outputs))
            chunk = dataclasses.replace(call, vectors=vectors, outputs=outputs)
            run_whole(body, chunk, start)


def flat(call: Columns) -> Columns:
    """Return a call on tensors of the same dense layout as a call on 1-d tensors.

    If blocks share components, the tensors have one row per block.
    """

    def seen(i: int, x: Tensor) -> Tensor:
        if not call.shared:
            return x.as_strided((x.numel(),), (1,))
        width = call.per_block(i)
        return x.as_strided((x.numel() // width, width), (width, 1))

    count = len(call.vectors)
    vectors = [[seen(i, x)] for i, (x,) in enumerate(call.vectors)]
    outputs = [[seen(count + i, x)] for i, (x,) in enumerate(call.outputs)]
    return dataclasses.replace(call, vectors=vectors, outputs=outputs)


def run_whole(body: Body, columns: Columns, start: int = 0) -> None:
    """Run a function on tensors of any layout; the first element has the index `start`."""
    for call in columns:
        outputs = [x for (x,) in call.outputs]
        index = torch.empty(0, device="cpu")
        if call.keys:
            index = indices(outputs[0], len(call.vectors) in call.packed) + start
        scalars = [_there(x, outputs[0].device) for (x,) in call.every_scalar()]
        results = body([x for (x,) in call.vectors], scalars, index)
        writes = map(_store, [outputs], [list(results)])
        done: list[Any] = [] if call.done is None else call.done
        done.extend(zip([outputs[0].numel()], writes, strict=True))  # no signal interrupts this


_store: Callable[..., None] = torch._foreach_copy_


def _there(x: Scalar, device: torch.device) -> Scalar:
    """Return a scalar on the device of the vectors.

    GPUs multiply by the reciprocal of a number of the host instead of dividing by it. Devices
    without float64 take numbers of the host only.
    """
    if device.type in ("cpu", "mps"):
        return x
    if isinstance(x, Tensor):
        return on_device(x, device)
    return torch.full((), x, dtype=torch.float64, device=device)


def indices(x: Tensor, is_packed: bool = False) -> Tensor:
    """Return the index of each element of a tensor, or of each code in packed bytes, in the order
    of its dimensions.
    """
    shape = shape_of_codes(x.shape) if is_packed else x.shape
    return torch.arange(shape.numel(), device=x.device).view(shape)
