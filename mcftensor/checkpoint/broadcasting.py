"""State dicts that the first rank alone has: `broadcast_from_rank0` of PyTorch's StateDictOptions.

The other ranks wait for plain tensors, of the dtypes that the first one names. So terms travel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.checkpoint.state_dicts import as_terms, from_terms
from mcftensor.patches.distributed import around_broadcasts
from mcftensor.tensor.sharded import format_of, local


@contextlib.contextmanager
def _in_terms(
    given: dict[str, Any], own: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    if dist.get_rank() == 0:
        given = as_terms({name: _in_format_of(own.get(name), x) for name, x in given.items()})
    terms = as_terms(own)
    yield given, terms
    own.clear()
    own.update(from_terms(terms))


@torch.no_grad()
def _in_format_of(own: Any, x: Any) -> Any:
    """What the first rank has as what all ranks hold, rounded once where these differ."""
    if not (isinstance(own, Tensor) and isinstance(x, Tensor)) or format_of(own) == format_of(x):
        return x
    return local(own).new_empty(x.shape, device=x.device).copy_(x)


around_broadcasts.append(_in_terms)
