"""What `torch.amp.GradScaler` asks of gradients that are expansions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.registry import implements
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


@implements(aten._amp_foreach_non_finite_check_and_unscale_.default)  # GradScaler
def unscale_(func: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place, and note in `found_inf`, on its device, that one is infinite."""
    plain = [x for x in grads if not isinstance(x, MCFTensor)]
    if plain:
        func(plain, found_inf, inv_scale)
    for x in grads:
        if isinstance(x, MCFTensor):
            infinite = ~x.components[0].isfinite().all()
            found_inf.copy_(torch.maximum(found_inf, infinite.to(found_inf.dtype)))
            x.mul_(inv_scale)
