"""The classes that tensors have within a step: pending results, gradients, expansions on the tape.

Arithmetic on formats that only store numbers gives plain tensors. Within a step such a result is
deferred until its first use. It is then computed together with operations on other tensors, and
the same Python object becomes an ordinary plain tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mcftensor.formats import Format
from mcftensor.kernels import LOCK
from mcftensor.tensor.components import COMPONENTS, Role, wrapper
from mcftensor.tensor.tape import Strand
from mcftensor.tensor.tensor import MCFTensor

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


def on_plain(
    func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Carry out a function on computed tensors, unless its answer is known before."""
    if func in _KNOWN and args and "_plain" not in args[0].__dict__:
        return _without_function(func, types, args, kwargs)
    return _on_plain(func, args, kwargs)


def _on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pending = [x for x in tree_leaves((args, kwargs)) if type(x) is PendingTensor]
    args, kwargs = tree_map(resolved, (args, kwargs))
    result = func(*args, **kwargs)
    held = {id(x._plain): x for x in pending if "_plain" in x.__dict__}
    return tree_map(lambda x: held.get(id(x), x), result) if held else result


# --------------------------------------------------------------------------------------- gradients


class GradientTensor(MCFTensor):
    """A plain tensor wrapped as a value without tails.

    The first write allocates the tails. It then becomes an MCFTensor with the plain tensor as its
    leading component.
    """

    _view_of: GradientTensor | None = None
    _views: tuple[tuple[weakref.ref[GradientTensor], Callable[[Tensor], Tensor]], ...] = ()

    is_sparse = False  # optimizers read it of every gradient
    has_tails = False

    @staticmethod
    def over(plain: Tensor, format: Format) -> GradientTensor:
        """Return a plain tensor wrapped as a value of a format."""
        made = wrapper(GradientTensor, plain, format)
        made._component0, made._format, made._role = plain, format, "value"
        return made

    def viewed(self, plain: Tensor, view: Callable[[Tensor], Tensor]) -> GradientTensor:
        """Return a view, given the view of the plain tensor. Both get their tails together."""
        made = GradientTensor.over(plain, self._format)
        made._view_of = self
        self._views = (*self._views, (weakref.ref(made), view))
        return made

    def views(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of a view operator."""

        return each_view(self.viewed, func, self._component0, args, kwargs)

    def grow_tails(self) -> None:
        """Allocate the tails, before they are written to or passed on."""
        if self._view_of is None:
            self._grow(self._zeros())
        else:
            self._view_of.grow_tails()

    def _zeros(self) -> list[Tensor]:
        rest = self._format.components[1:]
        return [torch.zeros_like(self._component0, dtype=x.dtype) for x in rest]

    def _grow(self, tails: Sequence[Tensor]) -> None:
        self._hold([self._component0, *tails], self._format, self._role, own=False)
        views = self._views
        self.__dict__.pop("_view_of", None)
        self.__dict__.pop("_views", None)
        self.__class__ = MCFTensor  # type: ignore[assignment]
        for reference, view in views:
            made = reference()
            if made is not None:
                made._grow([view(x) for x in tails])

    def has_one_owner(self) -> bool:
        """Return whether the plain tensor and its memory have no other owner.

        A parameter whose gradient it is does not count as an owner.
        """
        return self._view_of is None and not self._views and _holders(self) in _ALONE

    def leave_gradient(self) -> None:
        """Do nothing: it continues to share memory with the gradient."""

    def _read(self) -> tuple[Tensor, ...]:
        return self._component0, *self._zeros()

    @property
    def components(self) -> tuple[Tensor, ...]:
        """The components of any expansion. Access allocates the tails."""
        self.grow_tails()
        return self.components

    def __getattr__(self, name: str) -> Any:  # called for missing attributes: the tails
        if name not in COMPONENTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.grow_tails()
        return getattr(self, name)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, Role, int]]:
        self.grow_tails()
        return self.__tensor_flatten__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.grow_tails()
        return self.__reduce_ex__(protocol)


def each_view(
    over: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor],
    func: Any,
    plain: Tensor,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return the views of a plain tensor by an operator, each passed to `over`.

    `over` also gets a function that makes the same view of another plain tensor.
    """
    views = func(plain, *args, **kwargs)
    if isinstance(views, Tensor):
        return over(views, lambda t: func(t, *args, **kwargs))

    def one(i: int) -> Callable[[Tensor], Tensor]:
        return lambda t: func(t, *args, **kwargs)[i]

    return type(views)(over(view, one(i)) for i, view in enumerate(views))


def _holders(x: Any) -> tuple[int, int, int]:
    """Count the references to the plain tensor of a gradient tensor: in Python, in C++, and to its
    memory.
    """
    plain = x._component0
    storage = plain.untyped_storage()
    memory = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(plain), plain._use_count(), memory


_leaf = torch.empty(0, device="cpu", requires_grad=True)
_leaf.grad = torch.empty(0, device="cpu")
_gradient = _leaf.grad  # as a step holds it
_ALONE = (
    _holders(SimpleNamespace(_component0=_gradient)),
    _holders(SimpleNamespace(_component0=torch.empty(0, device="cpu"))),
)


def gradient_tensor(gradient: Tensor, format: Format) -> Tensor:
    """Return what a gradient of a parameter in a format reads as within a step.

    A plain gradient in the dtype of the format reads as a gradient tensor, or in the dtype of
    numbers if it is sparse. Any other gradient is returned unchanged. A gradient with an autograd
    graph stays in the graph, so that it can be differentiated again.
    """
    if type(gradient) is not Tensor or gradient.dtype != format.dtype:
        return gradient
    if not gradient.requires_grad:
        return _wrapped(gradient, format)
    with torch.enable_grad():
        read: Tensor = _Wrap.apply(gradient, format)
    return read


def _wrapped(gradient: Tensor, format: Format) -> Tensor:
    if gradient.layout != torch.strided or format.of_gradients is None:
        return gradient.to(format.dtype_of_numbers(gradient.device))
    return GradientTensor.over(gradient, format.of_gradients)


class _Wrap(torch.autograd.Function):
    """A gradient as it reads within a step, in the same memory; its own gradient is plain."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, format: Format) -> Tensor:
        ctx.dtype = gradient.dtype
        return _wrapped(gradient.detach(), format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if isinstance(grad, MCFTensor):
            return grad._collapsed(ctx.dtype), None
        return grad.to(ctx.dtype), None


MCFTensor._read_gradient = staticmethod(gradient_tensor)


# ------------------------------------------------------------------------------------- on the tape


class TapedTensor(PromisedTensor, MCFTensor):
    """An expansion with deferred operations, or one without components yet.

    Access to its components runs the operations. Then it becomes an MCFTensor.
    """

    _place: tuple[Strand, int]

    @classmethod
    def result(cls, layout: Any, format: Format, place: tuple[Strand, int]) -> TapedTensor:
        """Return a value that the tape will make."""
        device, shape, stride = layout
        made = _wrapper(cls, shape, strides=stride, dtype=format.dtype, device=device)
        made._place, made._format, made._role = place, format, "value"
        return made

    def leave_tape(self) -> None:
        """Become an MCFTensor, or a LostTensor if the components were never made."""
        is_there = COMPONENTS[0] in self.__dict__
        self.__class__ = MCFTensor if is_there else LostTensor  # type: ignore[assignment]
        del self._place

    def give_memory(self) -> list[Tensor] | None:
        """Take the memory of a result that has not been computed, and return it."""
        names = COMPONENTS[: len(self._format.components)]
        given = [self.__dict__.pop(name) for name in names if name in self.__dict__]
        return given if len(given) == len(names) else None

    def materialize(self) -> None:
        """Run the deferred operations, unless another thread has."""
        with LOCK:
            if isinstance(self, TapedTensor):
                self._place[0].run()
            if isinstance(self, TapedTensor):  # a signal has interrupted the run
                self.leave_tape()

    # Called by the name of the class: another thread may have made it an MCFTensor by now.

    def __reduce_ex__(self, protocol: Any) -> Any:
        TapedTensor.materialize(self)
        return self.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, Role, int]]:
        TapedTensor.materialize(self)
        return self.__tensor_flatten__()


class TapedGradient(TapedTensor, GradientTensor):
    """A plain gradient that deferred operations read and that nothing else aliases."""

    def leave_tape(self) -> None:
        """Become a GradientTensor, which may be written to."""
        self.__class__ = GradientTensor  # type: ignore[assignment]
        del self._place


class LostTensor(MCFTensor):
    """A tensor that was never made: its operation on the tape, or an earlier one, raised."""


def _lost(self: LostTensor) -> Tensor:
    raise RuntimeError(
        f"an expansion in {self._format.name} of shape {tuple(self.shape)} was never made: the "
        "operation that was to make it within a step of an optimizer raised an error. Make it anew"
    )


def _component(name: str, *default: None) -> Any:
    def read(self: TapedTensor) -> Any:
        if default and name not in self.__dict__:
            return default[0]
        TapedTensor.materialize(self)
        return getattr(self, name)

    def write(self: TapedTensor, component: Any) -> None:
        self.__dict__[name] = component

    return property(read, write)


for _name, _default in (("_writes", None), ("_factor", None)):  # the tape changes these, too
    setattr(TapedTensor, _name, _component(_name, _default))
for _name in COMPONENTS:
    setattr(TapedTensor, _name, _component(_name))
    setattr(LostTensor, _name, property(_lost))
