"""Taking a tensor apart and rebuilding it, for compilers, pickles and copies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from mcftensor.formats import Format, movable
from mcftensor.tensor.addresses import without_addresses
from mcftensor.tensor.components import COMPONENTS, ComponentTensor, Role

# Attributes that are no user's: a pickle rebuilds them from the components.
_OWN = (
    *(*COMPONENTS, "_format", "_role", "_writes", "_first", "_factor", "_is_own", "_place"),
    *("_hooks", "_holder", "_shard_of", "_parameter", "_base_components", "_has_rules"),
    "__torch_function__",
)


def attributes_of_users(x: Tensor) -> dict[str, Any]:
    """Return what users have set on a tensor, as optimizers and models mark parameters."""
    return {name: value for name, value in x.__dict__.items() if name not in _OWN}


class PickledTensor(ComponentTensor):
    """The part of `MCFTensor` that takes it apart into components and text."""

    # Rebuilds a pickled tensor. Files contain the name of this function; `MCFTensor` defines it.
    _rebuilt: ClassVar[Callable[..., Any]]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, Role, int]]:
        self._is_own = False  # compiled code may write to it
        self._read()
        names = list(COMPONENTS[: len(self._format.components)])
        if self._writes is not None:
            names.append("_writes")
        return names, (self._format.name, self._role, self._first)

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        context: tuple[str, Role, int],
        outer_size: Any,
        outer_stride: Any,
    ) -> Any:
        name, role, first = context
        format = Format.from_name(name)
        components = [inner[n] for n in COMPONENTS[: len(format.components)]]
        return cls.of(components, format, role, writes=inner.get("_writes"), first=first)

    def _stable_hash_for_caching(self) -> str:
        # Compiled code contains the results of dispatch, which may differ in another release.
        version = sys.modules["mcftensor"].__version__
        parts = [(t.dtype, tuple(t.shape), t.stride(), str(t.device)) for t in self._read()]
        kind = f"{self._format.name} {self._role} {self._first}"
        return f"{version} {kind} {self.requires_grad} {parts}"

    def __setstate__(self, state: Any) -> None:
        """Restore the attributes that users gave this tensor."""
        if not isinstance(state, dict):
            super().__setstate__(state)  # the state of a tensor with storage: raises
        if any(name in _OWN for name in state):
            raise ValueError("MCFTensor: damaged components, format or role")
        self.__dict__.update(state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's own method would pickle the device apart from the components, where map_location
        # cannot change it.
        torch.utils.hooks.warn_if_has_hooks(self)
        state = attributes_of_users(self)
        # torch.save uses protocol 2 and copies the memory; other protocols may alias it.
        components = tuple(map(movable, self._read() if protocol == 2 else self.components))
        whole = (components, self._format.name, self._role, tuple(self.shape))
        flags = (self.requires_grad, self._is_param)
        counted = () if self._count is None else (self._count,)
        return self._rebuilt, (*whole, *flags, *counted), state or None

    def __copy__(self) -> ComponentTensor:
        """Return another tensor that aliases the same memory."""
        rebuild, arguments, state = self.__reduce_ex__(4)
        made: ComponentTensor = rebuild(*arguments)
        made.__dict__.update(state or {})
        made._factor, made._base_components = self._factor, self._base_components
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ComponentTensor:
        copied: ComponentTensor = without_addresses(lambda: torch.Tensor.__deepcopy__(self, memo))
        return copied
