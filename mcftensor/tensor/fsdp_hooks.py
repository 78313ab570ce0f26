"""The hooks by which `fully_shard` gathers shards that share scales.

FSDP gathers other formats by their leading component. It asks by `hasattr` whether a shard has
hooks, before each all-gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcftensor.tensor.components import ComponentTensor


class _AvailableIf:
    """A method of those tensors for which a condition holds, as `available_if` of scikit-learn."""

    def __init__(self, condition: Callable[[Any], bool], method: Callable[..., Any]) -> None:
        self.condition, self.method = condition, method

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is None:
            return self.method
        if not self.condition(x):
            raise AttributeError(f"{self.method.__name__}: what is gathered now needs no hook")
        return self.method.__get__(x, owner)


def _available_if(condition: Callable[[Any], bool]) -> Callable[[Callable[..., Any]], Any]:
    return lambda method: _AvailableIf(condition, method)


def _shares_scales(x: GatheredTensor) -> bool:
    return x._format.lends is not None


def _is_gathered(x: GatheredTensor) -> bool:
    """Whether the next all-gather is of the shard, and not of the plain part of the parameter that
    a smaller group keeps after forward: then the module holds that part in its place."""
    if not _shares_scales(x):
        return False
    module, name, identity = x._shard_of or (None, "", 0)
    held = None if module is None or identity != id(x) else module()
    parameter = None if held is None else held._parameters.get(name)
    return isinstance(getattr(parameter, "_local_tensor", x), ComponentTensor)


class GatheredTensor(ComponentTensor):
    """The part of `MCFTensor` that FSDP gathers."""

    # The module whose parameter it is a shard of, the name there, and its own identity: copies, to
    # which attributes go as they are, have another one.
    _shard_of: tuple[weakref.ref[torch.nn.Module], str, int] | None = None

    @_available_if(_is_gathered)
    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: Any,
        module: torch.nn.Module,
        policy: Any,
    ) -> tuple[tuple[Tensor, ...], None]:
        """What `fully_shard` gathers of a shard: what the model computes with, in rows as many as
        those of the longest shard; or the number, where it computes in a wider type."""
        for name, parameter in module._parameters.items():  # this may be a copy of an offloaded one
            shard = getattr(parameter, "_local_tensor", None)
            if isinstance(shard, GatheredTensor):
                shard._shard_of = weakref.ref(module), name, id(shard)
        dtype = policy.param_dtype
        own = self.lent if dtype in (None, self._format.dtype) else self._collapsed(dtype)
        missing = -(-outer_size[0] // mesh.size()) - own.shape[0]
        if missing > 0 and own.shape[1:] == outer_size[1:]:
            own = F.pad(own, [*[0] * (2 * own.dim() - 1), missing])
        return (own,), None

    @_available_if(_shares_scales)
    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """What was gathered lies where the parameter does, from the first time on."""
        return (outputs[0], ()) if out is None else None
