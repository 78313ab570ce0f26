"""`MCFTensor`: expansions as a torch.Tensor."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from mcftensor.arithmetic.write_counts import count_beside, moved, start
from mcftensor.formats import Format, require_format, unmoved
from mcftensor.formats.format import named
from mcftensor.kernels.columns import on_device
from mcftensor.kernels.without_float64 import PIECES, has_float64, widest
from mcftensor.passes.format_conversion import of_number
from mcftensor.tensor.checks import check_components, check_writes, normalized
from mcftensor.tensor.components import COMPONENTS, Role, wrapper
from mcftensor.tensor.fsdp_hooks import GatheredTensor
from mcftensor.tensor.gradients import GradedTensor
from mcftensor.tensor.pending_scale import PendingScale
from mcftensor.tensor.pending_tensor import PendingTensor
from mcftensor.tensor.pickling import PickledTensor
from mcftensor.tensor.readable_values import ReadableTensor
from mcftensor.tensor.step_context import current_step
from mcftensor.tensor.without_storage import AddressedTensor

_without_function: Any = torch._C._disabled_torch_function_impl


def _rebuild(
    components: Any,
    format: Any,
    role: Any,
    shape: Any,
    requires_grad: bool,
    is_param: bool,
    writes: Any = None,
) -> MCFTensor:
    """Rebuild a tensor from a pickle, with checks, because a file may contain anything.

    Raises:
        ValueError: components, format and role do not make a tensor of this shape.
    """
    try:
        found = Format.from_name(format)
        if len(components) == len(found.components):
            components = list(map(unmoved, components, found.components))
        check_components(components, found)
        if components[0].shape != shape or role not in ("value", "parameter"):
            raise ValueError(f"shape {shape}, {role!r}, components of {components[0].shape}")
        check_writes(writes, found)
        components, _ = normalized(components, found)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"MCFTensor: damaged components, format or role ({error})") from error
    x = MCFTensor.of(components, found, role, writes=writes)
    x.requires_grad_(requires_grad)
    if is_param:
        x.__dict__["_parameter"] = True
    return x


class MCFTensor(GatheredTensor, PickledTensor, GradedTensor, AddressedTensor, ReadableTensor):
    """A tensor whose elements are expansions: unevaluated sums of floats of one small type.

    Each term has the `shape`, `stride`, `device` and `dtype` of the tensor.
    `as_expansion` makes these tensors; call the class itself only with normalized terms.

    A tensor has one of two roles. A *value* is a number type like any other: arithmetic with
    numbers, plain tensors and expansions gives expansions. A *parameter* is a weight. Operations
    with plain tensors use its leading term and give plain results, while every update in place
    changes all its terms. `nn.Parameter(expansion)` makes a parameter. Within a step of an
    optimizer it counts as a value. Some formats, such as `mcf.scaling.scaled(torch.float16)`, carry
    out operators by their own rules; all their tensors are values.

    Args:
        components: the terms, leading term first, normalized; plain tensors of equal shape,
            strides, device and dtype.
        format: the format or its name; by default inferred from their dtype and number.
        role: `"value"` or `"parameter"`.

    Raises:
        TypeError: the components are not of the format's dtypes.
        ValueError: a wrong number of components, components that are not plain tensors, or
            components of unlike shapes, strides or devices.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1.0, 0.1], dtype=torch.float64), mcf.fp32x2)
        >>> x * x + 1
        MCFTensor([2.0000, 1.0100], format=fp32x2)
        >>> (x * 0.999).components[0]
        tensor([0.9990, 0.0999])
    """

    # The functions that carry out operations; `dispatch/` sets them.
    _dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    _whole: ClassVar[set[Callable[..., Any]]]
    _evaluate_whole: ClassVar[Callable[..., Any]]
    _evaluate_into: ClassVar[Callable[..., Any]]
    _shortcuts: ClassVar[dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]]
    _narrowly: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    _rebuilt = staticmethod(_rebuild)

    @staticmethod
    def __new__(
        cls,
        components: Sequence[Tensor],
        format: Format | str | None = None,
        role: Role = "value",
        *,
        _name: str | None = None,
        _writes: Tensor | None = None,
        _first: int = 0,
    ) -> MCFTensor:
        """Check components, and make a tensor from them."""
        if _name is not None:
            format = Format.from_name(_name)
        if format is None:
            format = Format(components[0].dtype, len(components))
        format = require_format(format, "MCFTensor", with_rules=True)
        check_components(components, format)
        return _made(components, format, role, _writes, _first, own=False)

    def __init__(
        self,
        components: Sequence[Tensor],
        format: Format | str | None = None,
        role: Role = "value",
        *,
        _name: str | None = None,
        _writes: Tensor | None = None,
        _first: int = 0,
    ) -> None:
        pass

    @staticmethod
    def of(
        components: Sequence[Tensor],
        format: Format,
        role: Role = "value",
        *,
        own: bool = False,
        writes: Tensor | None = None,
        first: int = 0,
    ) -> MCFTensor:
        """Create a tensor from components of a format, without checks. All tensors are created
        here.

        `own` says that the memory of the components has no other owner, now and later. `writes` is
        the write count, by default none, and `first` the offset of this tensor in the tensor whose
        writes are counted.
        """
        if is_compiling():  # a graph records a call of the class with tensors and strings
            return MCFTensor(
                list(components), role=role, _name=format.name, _writes=writes, _first=first
            )
        return _made(components, format, role, writes, first, own)

    def _like(
        self, components: Sequence[Tensor], *, own: bool = False, start: int = 0
    ) -> MCFTensor:
        """Return the results of one operation on each component as a tensor like this one.

        `own` says that the components are in new memory; otherwise they are views, which share the
        write count. The result starts `start` elements after the first one, and its elements keep
        their sequences of balanced rounding.
        """
        writes, first = self._writes, self._first + start
        if writes is not None and own:
            writes, first = moved(writes.to(components[0].device, copy=True), first), 0
        made = MCFTensor.of(
            components, self._format, self._role, own=own, writes=writes, first=first
        )
        if not own and self._factor is not None:
            made._factor = self._factor
        if not own and self._base_components is not None:
            made._base_components = self._base_components
        return made

    def _made_beside(self, components: Sequence[Tensor], role: Role) -> MCFTensor:
        """Return new components as a tensor of this format without writes, such as a state of an
        optimizer.

        Tensors that one step creates like this one round by different sequences.
        """
        writes, device = self._count, components[0].device
        if writes is not None:
            step = current_step()
            number = 0 if step is None else step.number_beside(self)
            known = writes.device == device or not writes.is_meta
            writes = count_beside(writes, f"{number}").to(device) if known else None
        return MCFTensor.of(components, self._format, role, own=True, writes=writes)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if len(types) > 1 and any(issubclass(kind, (Format, PendingTensor)) for kind in types):
            return NotImplemented  # the other class handles it
        if func in _ARE_COMPLEX and not kwargs:  # optimizers ask it of every parameter
            return False
        is_eager = not is_compiling()
        if is_eager:
            for x in args if not kwargs else (*args, *kwargs.values()):
                if isinstance(x, MCFTensor) and x._has_rules:
                    return _without_function(func, types, args, kwargs or {})
        shortcut = cls._shortcuts.get(func)
        if shortcut is not None and is_eager:
            result = shortcut(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        if not kwargs and func not in cls._whole and func not in _CHOICES:
            return _without_function(func, types, args)
        kwargs = kwargs or {}
        if "dtype" in kwargs and is_eager:
            result = cls._narrowly(func, args, kwargs)
            if result is not NotImplemented:
                return result
        out = kwargs.get("out")
        if out is not None and not isinstance(func, OpOverload) and _holds_expansion(out):
            inputs = {name: x for name, x in kwargs.items() if name != "out"}
            if _holds_expansion((args, inputs)):
                return cls._evaluate_into(func, args, inputs, out)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _CHOICES:
                return _CHOICES[func](*args, **kwargs)
            if func in cls._whole and _has_value((args, kwargs)):
                return cls._evaluate_whole(func, *args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if PendingTensor in types:
            return NotImplemented
        for x in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(x, list):
                x = next((y for y in x if isinstance(y, MCFTensor) and y._has_rules), None)
            if isinstance(x, MCFTensor) and x._has_rules:
                rules: Any = x._format.rules
                return rules.carry_out(func, args, kwargs or {})
        return cls._dispatch(func, args, kwargs or {})

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch would round a number to the base dtype before dispatch.
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
            # A number for a mask has to be on the CPU.
            place = torch.device("cpu") if is_mask else self.device
            value = number_in(value, self._format, device=place)
        super().__setitem__(index, value)

    def new_tensor(  # type: ignore[override]
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Return data in the format and role of this tensor. torch would round them to the base
        dtype.
        """
        is_narrow = self.is_inside_step and dtype != self._format.dtype_of_numbers(
            self._component0.device
        )
        if dtype is not None and (is_narrow or dtype != self._format.dtype):
            plain = self.compute_tensor
            return plain.new_tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)
        if not isinstance(data, Tensor):
            data = of_numbers(data)
        made = self.new_empty(data.shape, device=device).copy_(data.detach())
        return made.requires_grad_(requires_grad)

    def new(  # type: ignore[override]
        self, *size_or_data: Any, device: torch.device | str | None = None
    ) -> Tensor:
        """Return `new_tensor` of data, or `new_empty` of a size."""
        (first, *_) = size_or_data or (0,)
        if isinstance(first, torch.Size) or (
            hasattr(first, "__index__") and not isinstance(first, (Tensor, np.ndarray))
        ):
            return self.new_empty(*size_or_data or (0,), device=device)
        return self.new_tensor(first, device=device)

    def _wrapped(self, gradient: Tensor) -> Tensor:
        return gradient_tensor(gradient, self._format)


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


def _made(
    components: Sequence[Tensor],
    format: Format,
    role: Role,
    writes: Tensor | None,
    first: int,
    own: bool,
) -> MCFTensor:
    made = wrapper(MCFTensor, components[0], format)
    made._hold(components, format, role, own)
    if format.rounding == "balanced":
        device = components[0].device
        made._writes = start(device) if writes is None else writes
        if first:
            made._first = first
    if format.shared:
        made._factor = PendingScale(components, format, made._writes, first)
    return made


def _where(condition: Tensor, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    """Return torch.where. Numbers become expansions, since torch rounds them before dispatch."""
    expansions = [x for x in (input, other) if isinstance(x, MCFTensor) and not x._has_rules]
    if not expansions:
        chosen = () if input is None else (input, other)
        return torch.where(condition, *chosen, **kwargs)
    format, role = expansions[0].format, expansions[0].role
    input, other = (
        number_in(x, format, role) if isinstance(x, (int, float)) else x for x in (input, other)
    )
    return torch.where(condition, input, other, **kwargs)


def of_numbers(data: Any) -> Tensor:
    """Return numbers, in nested lists or an array, in float64, or in float32 terms without it."""
    if has_float64():
        return torch.tensor(data, dtype=torch.float64, device="cpu")
    high = torch.tensor(data, dtype=torch.float32, device="cpu").numpy()  # or an error
    numbers = np.asarray(data, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.where(np.isfinite(high), numbers - high, 0).astype(np.float32)
        total = high.astype(np.float64) + low
        high = total.astype(np.float32)  # low may lie on a tie
        low, rest = (
            np.where(np.isfinite(high), x, 0).astype(np.float32)
            for x in (total - high, numbers - total)
        )
    terms = [torch.from_numpy(np.array(x)) for x in (high, low, rest)]
    return MCFTensor.of(terms, named(PIECES))


def number_in(
    x: float, format: Format, role: Role = "value", device: torch.device | None = None
) -> Tensor:
    """Return a number as a 0-d expansion, rounded to nearest.

    In formats with shared scales or rules it is a plain tensor.
    """
    if format.shared or format.rules is not None:
        dtype = widest(device)
        number = torch.tensor(x, dtype=dtype, device="cpu")
        return number if device is None else on_device(number, device)
    terms = of_number(x, format, device)
    return MCFTensor.of(
        [t if device is None else on_device(t, device) for t in terms], format, role
    )


_ARE_COMPLEX = {torch.is_complex, Tensor.is_complex}

# torch rounds a number to the base dtype before dispatch.
_CHOICES: dict[Any, Callable[..., Any]] = {
    torch.where: _where,
    torch.Tensor.where: lambda input, condition, other: _where(condition, input, other),
}


def _holds_expansion(tree: Any) -> bool:
    return any(isinstance(x, MCFTensor) and not x._has_rules for x in tree_leaves(tree))


def _has_value(tree: Any) -> bool:
    return any(
        isinstance(x, MCFTensor) and not x._has_rules and x.acts_as == "value"
        for x in tree_leaves(tree)
    )


torch.serialization.add_safe_globals([MCFTensor, named, _rebuild])
