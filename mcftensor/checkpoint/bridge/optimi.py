"""optimi: a bfloat16 or float16 weight, and the compensation of Kahan's sum as a state.

Layout: torch.optim's state dict, with `kahan_comp` of the weight's dtype and shape. The state is
None, or one byte, of parameters that are float32. Read: torch-optimi 0.3.3.

The sum of the two is the number, so they are an expansion of two terms. The moments are averages
that have been corrected for bias already, unlike those of torch.optim, and come as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.bridge.chunked import in_chunks
from mcftensor.checkpoint.bridge.entries import Entry, Group
from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.formats import PLAIN, Format
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.checks import normalized

KEY = "kahan_comp"


def master(weight: Entry, state: dict[str, Any], group: Group) -> tuple[Entry, dict[str, Any]]:
    """The sum of weight and compensation, and the other states."""
    rest = {key: x for key, x in state.items() if key != KEY}
    if "step" in group:
        rest.setdefault("step", float(group["step"]))
    compensation = state[KEY]
    if not isinstance(compensation, Entry) or compensation.format == PLAIN[torch.uint8]:
        return weight, rest
    if weight.format.dtype not in (torch.bfloat16, torch.float16) or (
        (compensation.format, compensation.shape) != (weight.format, weight.shape)
    ):
        raise CheckpointError(
            f"{KEY} of {weight.name} is of {compensation.format.name} and shape "
            f"{tuple(compensation.shape)}, and the weight of {weight.format.name} and shape "
            f"{tuple(weight.shape)}; it belongs to another parameter"
        )
    format = Format(weight.format.dtype, 2)

    def read() -> Tensor:
        def together(*terms: Tensor) -> Sequence[Tensor]:
            return normalized(terms, format)[0]

        parts = in_chunks(together, [weight.read(), compensation.read()], [format.dtype] * 2)
        return MCFTensor.of(parts, format)

    return Entry(weight.name, format, weight.shape, read), rest
