"""A mode in which every float64 tensor raises, those inside dispatch and in operators too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mcftensor as mcf

_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_PLAIN = (Tensor, torch.nn.Parameter)


class Float64Error(AssertionError):
    """A float64 tensor was made or read."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if not all(type(x) in _PLAIN for x in tensors):
            return NotImplemented  # it is carried out on components
        if func.namespace == "mcftensor":
            with self:
                return func._op_dk(_EXPLICIT, *args, **kwargs)
        result = func(*args, **kwargs)
        if any(x.dtype == torch.float64 for x in (*tensors, *_tensors(result))):
            raise Float64Error(str(func))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@contextlib.contextmanager
def no_float64() -> Iterator[None]:
    """`mcf.without_float64()`, and whatever makes or reads a float64 tensor raises."""
    with mcf.without_float64(), _Watch():
        yield
