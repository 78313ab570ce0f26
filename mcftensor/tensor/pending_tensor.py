"""Plain tensors that the tape of a step will make.

Arithmetic on formats that only store numbers gives plain tensors. Within a step such a result is
deferred until its first use. It is then computed together with operations on other tensors, and
the same Python object becomes an ordinary plain tensor.
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

_wrapper: Any = Tensor._make_wrapper_subclass
_without_function: Any = torch._C._disabled_torch_function_impl
_get_device = Tensor.device.__get__
_get_version: Any = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_count_uses: Any = torch._C.TensorBase._use_count  # type: ignore[attr-defined]

# Functions whose answers are known before the tensor is made.
_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_sparse", "is_meta")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.is_contiguous, torch.is_complex, torch.is_floating_point),
}


class PromisedTensor(torch.Tensor):
    """A tensor that the tape will make or write to."""

    _place: Any  # its strand and variable on the tape
    _role: Any

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device. torch's own getter would go through `__torch_function__`."""
        found: torch.device = _without_function(_get_device, (), (self,))
        return found


class PendingTensor(PromisedTensor):
    """A plain tensor whose computation is deferred."""

    _plain: Tensor
    _role = None

    # The functions that defer operations; `dispatch/defer.py` sets it.
    _shortcuts: ClassVar[dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]] = {}

    @classmethod
    def result(cls, layout: Any, format: Format, place: tuple[Strand, int]) -> PendingTensor:
        """Return a tensor that the tape will make."""
        device, shape, stride = layout
        made = _wrapper(cls, shape, strides=stride, dtype=format.dtype, device=device)
        made._place = place
        return made

    def _hold(self, components: Sequence[Tensor], *unused: Any, **flags: Any) -> None:
        (self._plain,) = components

    def give_memory(self) -> None:
        """Release the memory allocated for a result that has not been computed."""
        self.__dict__.pop("_plain", None)

    def leave_tape(self) -> None:
        """Become the plain tensor that has been computed."""
        if "_plain" in self.__dict__:
            version = _without_function(_get_version, (), (self,))
            torch._C._autograd._unsafe_set_version_counter((self._plain,), (version,))
        self.__dict__.pop("_place", None)
        self.become()

    def become(self) -> None:
        """Swap with the computed plain tensor, unless a reference from C++ exists; then later.

        It is a single bytecode, because Python handles signals between bytecodes.
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
        """Defer an operation, or compute its pending operands and carry it out."""
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
        """Carry out an operation that C++ code calls, on computed operands."""
        return _on_plain(func, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:
        """Return it as another class. torch's own method calls no `__torch_function__`."""
        return resolved(self).as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return resolved(self).__reduce_ex__(protocol)


def resolved(x: Any) -> Any:
    """Return the computed tensor of a pending one, and anything else unchanged.

    Raises:
        RuntimeError: the operation that should have made the tensor raised an error.
    """
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
