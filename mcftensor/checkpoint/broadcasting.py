"""State dicts that the first rank alone has: `broadcast_from_rank0` of PyTorch's StateDictOptions.

The other ranks wait for plain tensors, of the dtypes that the first one names. So terms travel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.checkpoint.terms import as_terms, from_terms
from mcftensor.distributed import format_of, local


def broadcast_terms() -> None:
    """See to it, in a process that is one of several; elsewhere the import would take long."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.checkpoint import state_dict as module  # noqa: PLC0415

    if not hasattr(module._broadcast_state_dict, "__wrapped__"):
        module._broadcast_state_dict = _by_terms(module._broadcast_state_dict)


def _by_terms(broadcast: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(broadcast)
    def broadcast_state_dict(
        given: dict[str, Any], own: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if dist.get_rank() == 0:
            given = as_terms({name: _in_format_of(own.get(name), x) for name, x in given.items()})
        terms = as_terms(own)
        broadcast(given, terms, *args, **kwargs)
        own.clear()
        own.update(from_terms(terms))

    return broadcast_state_dict


@torch.no_grad()
def _in_format_of(own: Any, x: Any) -> Any:
    """What the first rank has as what all ranks hold, rounded once where these differ."""
    if not (isinstance(own, Tensor) and isinstance(x, Tensor)) or format_of(own) == format_of(x):
        return x
    return local(own).new_empty(x.shape, device=x.device).copy_(x)
