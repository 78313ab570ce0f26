"""Hooks by which `fully_shard` gathers shards of storage formats.

FSDP gathers the others by their leading component; on one rank it copies them, which rounds, and
only of terms the leading one is the number rounded. It tests with `hasattr` before each all-gather
whether a shard has hooks.
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
    """A method that exists only while a condition holds, like `available_if` of scikit-learn."""

    def __init__(self, condition: Callable[[Any], bool], method: Callable[..., Any]) -> None:
        self.condition, self.method = condition, method

    def __get__(self, x: Any, owner: type | None = None) -> Any:
        if x is None:
            return self.method
        if not self.condition(x):
            raise AttributeError(f"{self.method.__name__}: this all-gather needs no hook")
        return self.method.__get__(x, owner)


def _available_if(condition: Callable[[Any], bool]) -> Callable[[Callable[..., Any]], Any]:
    return lambda method: _AvailableIf(condition, method)


def _is_stored(x: GatheredTensor) -> bool:
    return x._format.arithmetic == "numbers"


def _is_gathered(x: GatheredTensor) -> bool:
    """Return whether the next all-gather gathers this shard.

    After forward, FSDP can keep the plain parameter sharded over a smaller group. The module then
    holds that plain tensor, and FSDP gathers it instead.
    """
    if not _is_stored(x):
        return False
    module, name, identity = x._shard_of or (None, "", 0)
    held = None if module is None or identity != id(x) else module()
    parameter = None if held is None else held._parameters.get(name)
    return isinstance(getattr(parameter, "_local_tensor", x), ComponentTensor)


class GatheredTensor(ComponentTensor):
    """The part of `MCFTensor` that implements FSDP's all-gather hooks."""

    # The module of the sharded parameter, its name there, and the id of this shard. A copy gets
    # the attribute too, and is recognized by its different id.
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
        """Return the plain tensor to gather, padded to the number of rows of the longest shard.

        It is the compute tensor, or the decoded number if the model computes in a wider dtype.
        """
        for name, parameter in module._parameters.items():  # self may be a copy of the shard
            shard = getattr(parameter, "_local_tensor", None)
            if isinstance(shard, GatheredTensor):
                shard._shard_of = weakref.ref(module), name, id(shard)
        dtype = policy.param_dtype
        own = self.compute_tensor if dtype in (None, self._format.dtype) else self._collapsed(dtype)
        missing = -(-outer_size[0] // mesh.size()) - own.shape[0]
        if missing > 0 and own.shape[1:] == outer_size[1:]:
            own = F.pad(own, [*[0] * (2 * own.dim() - 1), missing])
        return (own,), None

    @_available_if(_is_stored)
    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Return the gathered tensor as the parameter. Later gathers write into it."""
        return (outputs[0], ()) if out is None else None
