"""Transformer Engine's FusedAdam: bfloat16 weights, and master weights as a state.

Layout: torch.optim's state dict, with `master_param`: float32, or with `store_param_remainders`
int16, what the bits of the bfloat16 weight lack of those of float32. The split is that of
`bf16i16`. Steps are counted by the group. Read: Transformer Engine 2.20 (apex has the same split).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.bridge.chunked import CHUNK_SIZE, in_chunks
from mcftensor.checkpoint.bridge.entries import Entry, Group
from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.formats import PLAIN

KEY = "master_param"


def master(weight: Entry, state: dict[str, Any], group: Group) -> tuple[Entry, dict[str, Any]]:
    """The float32 master weight, and the other states."""
    rest = {key: x for key, x in state.items() if key != KEY}
    if "step" in group:
        rest.setdefault("step", float(group["step"]))
    return with_master(weight, state[KEY]), rest


def with_master(weight: Entry, part: Entry) -> Entry:
    """A float32 weight from its rounding, and itself or what the bits of the rounding lack."""
    is_remainder = part.format == PLAIN[torch.int16] and weight.format == PLAIN[torch.bfloat16]
    if not (is_remainder or part.format == PLAIN[torch.float32]) or part.shape != weight.shape:
        raise CheckpointError(
            f"the master weight of {weight.name} is of {part.format.name} and shape "
            f"{tuple(part.shape)}, and the weight of {weight.format.name} and shape "
            f"{tuple(weight.shape)}; it belongs to another parameter"
        )

    def read() -> Tensor:
        if is_remainder:
            return in_chunks(_joined, [weight.read(), part.read()], [torch.float32])[0]
        x = part.read()
        _require_rounding(weight, x)
        return x

    return Entry(weight.name, PLAIN[torch.float32], weight.shape, read)


def _joined(leading: Tensor, tail: Tensor) -> list[Tensor]:
    bits = (leading.view(torch.int16).to(torch.int32) << 16) + tail
    return [bits.view(torch.float32)]


def _require_rounding(weight: Entry, x: Tensor) -> None:
    """By it a master of another parameter of this shape is told, or one of another step."""
    differ = 0
    blocks = (y.reshape(-1).split(CHUNK_SIZE) for y in (x, weight.read()))
    for master, found in zip(*blocks, strict=True):
        rounded = master.to(weight.format.dtype)
        differ += int(((rounded != found) & ~(rounded.isnan() & found.isnan())).sum())
    if differ:
        raise CheckpointError(
            f"{differ} of {x.numel()} elements of {weight.name} are not their master weights "
            f"rounded to {weight.format.name}: these are of another parameter, or of another step"
        )
