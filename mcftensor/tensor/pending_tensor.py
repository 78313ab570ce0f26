"""Plain tensors that the tape of a step is to make.

Arithmetic on formats that only store numbers gives plain tensors. Within a step such a result is
made when somebody asks for it, together with what is done to other tensors; from then on it is
a plain tensor, the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from mcftensor.formats import Format
    from mcftensor.tensor.tape import Strand

_without_function: Any = torch._C._disabled_torch_function_impl
_get_device = Tensor.device.__get__
_get_version: Any = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_count_uses: Any = torch._C.TensorBase._use_count  # type: ignore[attr-defined]

# What these say is known before the tensor is made.
_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_sparse", "is_meta")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.is_contiguous, torch.is_complex, torch.is_floating_point),
}


class PromisedTensor(torch.Tensor):
    """A tensor that the tape is to make or to write to."""

    _place: Any  # its strand and variable there
    _role: Any

    @classmethod
    def result(
        cls,
        shape: torch.Size,
        stride: Sequence[int],
        format: Format,
        device: torch.device,
        place: tuple[Strand, int],
    ) -> Any:
        """A tensor that the tape is to make."""
        made: PromisedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=format.dtype, device=device
        )
        made._place = place
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """As of any tensor; torch's own way to it goes by `__torch_function__`."""
        found: torch.device = _without_function(_get_device, (), (self,))
        return found


class PendingTensor(PromisedTensor):
    """A plain tensor that is yet to be made."""

    _plain: Tensor
    _role = None

    # What puts operations on the tape; `dispatch/defer.py` sets it.
    _shortcuts: ClassVar[dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]] = {}

    def _hold(self, components: Sequence[Tensor], *unused: Any, **flags: Any) -> None:
        (self._plain,) = components

    def give_memory(self) -> None:
        """Be without the memory of a result that has not been computed."""
        self.__dict__.pop("_plain", None)

    def leave_tape(self) -> None:
        """Become the plain tensor that has been made."""
        if "_plain" in self.__dict__:
            version = _without_function(_get_version, (), (self,))
            torch._C._autograd._unsafe_set_version_counter((self._plain,), (version,))
        self.__dict__.pop("_place", None)
        self.become()

    def become(self) -> None:
        """Change places with the plain tensor, unless something in C++ holds this one: then later.

        By one bytecode: Python handles signals between two.
        """
        plain = self.__dict__.get("_plain")
        if plain is not None and _without_function(_count_uses, (), (self,)) == 1:
            calls = [
                partial(torch._C._swap_tensor_impl, self, plain),
                partial(setattr, self, "__class__", Tensor),
                partial(self.__dict__.pop, "_plain"),
            ]
            list(map(partial.__call__, calls))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Put an operation on the tape, or have made what it is on."""
        kwargs = kwargs or {}
        shortcut = cls._shortcuts.get(func)
        if shortcut is not None:
            result = shortcut(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func in _KNOWN and args and "_plain" not in args[0].__dict__:
            return _without_function(func, types, args, kwargs)
        return _on_plain(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The same where torch's functions are called from C++."""
        return _on_plain(func, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:
        """As of any tensor; torch's own way to it goes by no protocol."""
        return resolved(self).as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return resolved(self).__reduce_ex__(protocol)


def resolved(x: Any) -> Any:
    """What has been made of a pending tensor; any other as it is."""
    if type(x) is not PendingTensor:
        return x
    place = x.__dict__.get("_place")
    if place is not None:
        place[0].run()
    if type(x) is PendingTensor:
        x.become()
    if type(x) is not PendingTensor:
        return x
    if "_plain" not in x.__dict__:
        shape = tuple(_without_function(Tensor.size, (), (x,)))
        raise RuntimeError(
            f"a tensor of shape {shape} was never made: the operation that was to make it within a "
            "step of an optimizer raised an error. Make it anew"
        )
    return x._plain


def _on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pending = [x for x in tree_leaves((args, kwargs)) if type(x) is PendingTensor]
    args, kwargs = tree_map(resolved, (args, kwargs))
    result = func(*args, **kwargs)
    held = {id(x._plain): x for x in pending if "_plain" in x.__dict__}
    return tree_map(lambda x: held.get(id(x), x), result) if held else result
