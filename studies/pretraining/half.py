"""float16 on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mcftensor as mcf

HALF = torch.float16
_PRODUCTS = tuple(getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm"))


class FastHalf(TorchDispatchMode):
    """Products of plain float16 as those of float32, rounded: what a GPU does, and a CPU slowly."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        if func.overloadpacket in _PRODUCTS and args[-1].dtype == HALF:
            return func(*(leading(x).float() for x in args), **(kwargs or {})).to(HALF)
        return func(*args, **(kwargs or {}))


def leading(x: Any) -> Any:
    """The float16 that the model computes with, of a parameter with a tail."""
    return x.components[0] if isinstance(x, mcf.MCFTensor) else x
