"""Tensors that have several names in a state dict, as tied weights have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from mcftensor.tensor import MCFTensor


def ties(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """For each name whose tensor is that of an earlier name, the first of these."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, x in state_dict.items():
        if isinstance(x, Tensor) and not is_lazy(x) and not x.is_meta and x.numel():
            earlier = first.setdefault(_memory(x), name)
            if earlier != name:
                found[name] = earlier
    return found


def _memory(x: Tensor) -> tuple[Any, ...]:
    terms = x.components if isinstance(x, MCFTensor) else (x,)
    return tuple((t.data_ptr(), t.device, t.dtype, t.shape, t.stride()) for t in terms)
