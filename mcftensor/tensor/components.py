"""`ComponentTensor`: a tensor stored as components, its role, memory and gradient; and checks of
components from callers and files."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mcftensor.arithmetic.rounding import collapse_terms
from mcftensor.arithmetic.write_counts import moved, start, writes_of
from mcftensor.formats import MAX_TERMS, PLAIN, Format, bytes_of
from mcftensor.passes.format_conversion import collapse, compute_tensor
from mcftensor.tensor.first_expansion import WAITING, prepare
from mcftensor.tensor.pending_scale import PendingScale
from mcftensor.tensor.step_context import current_step, outside
from mcftensor.tensor.tape import Strand

T = TypeVar("T", bound="ComponentTensor")

Role = Literal["value", "parameter"]

COMPONENTS = tuple(f"_component{i}" for i in range(MAX_TERMS))


_OF_COMPONENTS = ("_writes", "_first", "_factor", "_base_components", "_is_own")
"""Attributes that describe the components of a tensor."""


def require_computing(format: Format) -> None:
    """Raise TypeError if a format cannot store parameters."""
    if format.shared and format.computes_as is None:
        raise TypeError(
            f"Parameter: {format.name} stores the states of optimizers; a model computes "
            "with the leading component of its parameters, and here that is codes. Take "
            "mcf.bf16i8, mcf.bf16i16 or mcf.e4m3i8"
        )


_without_function: Any = torch._C._disabled_torch_function_impl
_calls_functions = torch._C._is_torch_function_enabled
_GRAD: Any = torch.Tensor.grad
_get_grad = _GRAD.__get__
_SETS_UNTRACED = torch.__version__ >= "2.14"  # its compiler fails to set a descriptor written in C


@torch._disable_dynamo
def _set_grad(x: Tensor, value: Tensor | None) -> None:
    _GRAD.__set__(x, value)


class ComponentTensor(torch.Tensor):
    """A tensor stored as components: terms, codes and scales.

    This class has the data of `MCFTensor`. The other base classes of `MCFTensor` implement the
    methods of torch.Tensor.
    """

    _component0: Tensor
    _component1: Tensor
    _format: Format
    _role: Role
    _writes: Tensor | None = None  # the count of `write_counts.py`, if rounding is balanced
    _first: int = 0  # the offset of a view in the tensor whose writes are counted
    _factor: PendingScale | None = None  # the deferred factor, in formats with shared scales
    # For a view that shares the exponent of its base: the components of the base.
    _base_components: tuple[Tensor, ...] | None = None
    _is_own: bool = False  # no other tensor aliases its memory
    _has_rules: bool = False  # whether its format has rules; compilers read this attribute
    _place: tuple[Strand, int] | None = None  # for a TapedTensor: its strand and variable
    # The module that owned it at conversion, its name there, and its own id. A copy of the tensor
    # gets the attribute too, and is recognized by its different id.
    _holder: tuple[weakref.ref[torch.nn.Module], str, int] | None = None
    _hooks: tuple[Callable[[Tensor], None], ...] = ()  # hooks of gradients, kept by `.to(device)`

    # Returns a gradient as it reads within a step; `step_tensors.py` defines it.
    _read_gradient: ClassVar[Callable[[Tensor, Format], Tensor]]

    @classmethod
    def of(
        cls: type[T],
        components: Sequence[Tensor],
        format: Format,
        role: Role = "value",
        *,
        own: bool = False,
        writes: Tensor | None = None,
        first: int = 0,
    ) -> T:
        """Create a tensor from components of a format, without checks. All tensors are created
        here.

        `own` says that the memory of the components has no other owner, now and later. `writes` is
        the write count, by default none, and `first` the offset of this tensor in the tensor whose
        writes are counted.
        """
        if is_compiling():  # a graph records a call of the class with tensors and strings
            made: T = cls(  # type: ignore[call-overload]
                list(components), role=role, _name=format.name, _writes=writes, _first=first
            )
            return made
        return cls._made(components, format, role, writes, first, own)

    @classmethod
    def _made(
        cls: type[T],
        components: Sequence[Tensor],
        format: Format,
        role: Role,
        writes: Tensor | None,
        first: int,
        own: bool,
    ) -> T:
        made = wrapper(cls, components[0], format)
        made._hold(components, format, role, own)
        if format.rounding == "balanced":
            device = components[0].device
            made._writes = start(device) if writes is None else writes
            if first:
                made._first = first
        if format.shared:
            made._factor = PendingScale(components, format, made._writes, first)
        return made

    def _hold(self, components: Sequence[Tensor], format: Format, role: Role, own: bool) -> None:
        held = self.__dict__
        held.update(zip(COMPONENTS, components, strict=False))
        held["_format"], held["_role"] = format, role
        if own:
            held["_is_own"] = True
        if format.rules is not None:
            held["_has_rules"] = True
            # PyTorch looks here before it calls the class; operators go to the rules directly.
            held["__torch_function__"] = torch._C._disabled_torch_function_impl

    @property
    def _count(self) -> Tensor | None:
        """The write count of the first element, from which balanced rounding continues."""
        if self._writes is None or not self._first:
            return self._writes
        return moved(self._writes, self._first)

    @property
    def components(self) -> tuple[Tensor, ...]:
        """The components as plain tensors that alias this tensor's memory, the leading one first.

        In formats of terms these are the terms of the expansion.
        """
        components = self._read()
        if self._is_own:
            self._is_own = False
        return components

    def _read(self) -> tuple[Tensor, ...]:
        """Return the components for reading, after any deferred multiplication.

        The caller must not write to them or pass them on.
        """
        if self._factor is not None and self._factor.value != 1:
            self._factor.apply()
        return self._held()

    def _held(self) -> tuple[Tensor, ...]:
        """Return the components without applying a deferred multiplication."""
        if len(self._format.components) == 2:  # the commonest case of a hot path
            return self._component0, self._component1
        return tuple([getattr(self, name) for name in COMPONENTS[: len(self._format.components)]])

    @property
    def compute_tensor(self) -> Tensor:
        """The compute tensor: the plain tensor that a model computes with.

        This is the leading component, or the decoded number in formats whose leading component is a
        code or has a scale.
        """
        if self._format.computes_as is not None:
            return compute_tensor(self._read(), self._format)
        return self._format.leading(self._read()) if self._has_rules else self._component0

    @property
    def has_tails(self) -> bool:
        """Whether any component but the leading one may be nonzero."""
        return True

    @property
    def is_part(self) -> bool:
        """Whether it is a view of a part of a tensor with shared scales."""
        return self._factor is not None and not self._factor.is_of_all(self._held())

    def leave_gradient(self) -> None:
        """Stop sharing memory with a plain gradient."""
        self._component0 = self._component0.clone()

    def reclaim(self) -> bool:
        """Return whether this tensor is the only owner of its memory, and record it if so."""
        if not self._is_own:
            held = [weakref.ref(x) for x in self._held()]
            alone = [x.detach() for x in self._held()]  # a reference to a component is an owner
            self._hold_anew(alone)
            self._is_own = all(map(_is_sole_holder, alone))
            if not self._is_own:
                kept = [y if x() is None else x() for x, y in zip(held, alone, strict=True)]
                self._hold_anew(kept)
        return self._is_own

    def _hold_anew(self, components: Sequence[Any]) -> None:
        """Replace the components by other tensors of the same memory."""
        self.__dict__.update(zip(COMPONENTS, components, strict=False))
        if self._factor is not None and not self.is_part:
            self._factor.components = components

    def hold_as(self, other: ComponentTensor) -> None:
        """Take over the components of a tensor of the same shape, strides, dtype and device."""
        held = self.__dict__
        for name in (*COMPONENTS, *_OF_COMPONENTS):
            held.pop(name, None)
        held.update(other.__dict__)

    @property
    def format(self) -> Format:
        """The format of the elements."""
        return self._format

    @property
    def exponent(self) -> Tensor:
        """The exponent s of all elements: an int32 tensor without dimensions, shared by views.

        Raises:
            AttributeError: the format has no exponent.
        """
        if not self._has_rules:
            raise AttributeError(f"a tensor in {self._format.name} has no exponent")
        return self._held()[-1]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all components."""
        return bytes_of(self._format.components, self.shape)

    @property
    def writes(self) -> Tensor | None:
        """The number of writes to this tensor: an int64 tensor without dimensions on its device.

        Only formats with balanced rounding count writes; others return None. Views share the count
        of their base, and copies continue from it.
        """
        return None if self._writes is None else writes_of(self._writes)

    @property
    def role(self) -> Role:
        """`"value"` or `"parameter"`."""
        return self._role

    @property
    def is_inside_step(self) -> bool:
        """Whether a step of an optimizer runs and autograd does not record operations on it."""
        return current_step() is not None and not (torch.is_grad_enabled() and self.requires_grad)

    @property
    def acts_as(self) -> Role:
        """The role at this moment: a parameter acts as a value within a step."""
        return "value" if self._role == "value" or self.is_inside_step else "parameter"

    @property
    def _is_param(self) -> bool:
        # Setting this flag is all that a class can see of nn.Parameter(expansion).
        return bool(self.__dict__.get("_parameter", False))

    @_is_param.setter
    def _is_param(self, flag: bool) -> None:
        if flag:
            require_computing(self._format)
        self.__dict__["_parameter"] = flag
        if flag:
            self._role = "value" if self._has_rules else "parameter"
            for hook in self._hooks if self.requires_grad else ():
                self.register_post_accumulate_grad_hook(hook)

    def _collapsed(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the numbers as a plain tensor, rounded once."""
        if self._has_rules:
            return collapse_terms(self._format.decode(self._read()), dtype)
        return collapse(self._read(), self._format.name, dtype)

    def _lying(self) -> Tensor:
        """Return the leading component without a copy."""
        return self._component0

    # ------------------------------------------------------------------------------ gradients

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, as `torch.Tensor.backward`. Parameters start from a plain gradient."""
        if self._role == "parameter" and gradient is None and self.numel() == 1:
            gradient = torch.ones_like(self.compute_tensor)
        elif self._role == "parameter" and isinstance(gradient, ComponentTensor):
            gradient = gradient.compute_tensor
        elif self._has_rules and not isinstance(gradient, ComponentTensor | None):
            # Autograd would round a plain gradient to the dtype of the data.
            gradient = torch.empty_like(self.detach()).copy_(gradient)
        super().backward(gradient, *args, **kwargs)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, as `torch.Tensor.grad`; within a step a plain gradient reads as an
        expansion.

        In-place changes of that expansion reach the plain gradient, rounded.
        """
        # Optimizers read it often, and torch's own getter would go through __torch_function__.
        found: Tensor | None = (
            _without_function(_get_grad, (), (self,)) if _calls_functions() else _get_grad(self)
        )
        step = current_step()
        if step is None or found is None:
            return found
        if found.requires_grad and torch.is_grad_enabled():
            return found  # part of an autograd graph
        held, read = step.gradients.get(id(self), (None, None))
        if held is not found:
            read = type(self)._read_gradient(found, self._format)
            step.gradients[id(self)] = found, read
        return read

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        step = current_step()
        held = None if step is None else _without_function(_get_grad, (), (self,))
        if step is not None and value is not None and not isinstance(held, ComponentTensor):
            plain = _rounded_gradient(value, self._format)  # the gradient after the step
            if plain is not value:
                step.gradients[id(self)] = plain, value
                value = plain
        elif step is None and type(value) is type(self):
            wanted = getattr(self, "grad_dtype", self.dtype)  # torch 2.9 has no such attribute
            if wanted not in (None, value._format.dtype):
                value = value._collapsed(wanted)  # as of zeros_like(p)
        with torch._C.DisableTorchFunctionSubclass():
            if _SETS_UNTRACED and is_compiling():
                _set_grad(self, value)
            else:
                _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def keep_from_compilers(function: Any) -> None:
    """Have compilers take no frame of a function, or below it, for the start of a graph.

    What a graph leaves to eager code calls the library's own functions.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


# Compiled code reads gradients as it runs, and compilers before torch 2.11 would trace the getter.
keep_from_compilers(vars(ComponentTensor)["grad"].fget)


def _rounded_gradient(read: Tensor, format: Format) -> Tensor:
    """Return the plain gradient that a gradient tensor wraps."""
    if isinstance(read, ComponentTensor):
        return read._component0
    is_wide = read.dtype == format.dtype_of_numbers(read.device)
    return read.to(format.dtype) if is_wide else read


def _is_sole_holder(x: Tensor) -> bool:
    """Return whether no other tensor aliases the memory of x."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # x and the storage object


def wrapper(cls: type[T], like: Tensor, format: Format) -> T:
    """Return a tensor without storage, with the layout of another one and the dtype of a format."""
    if WAITING:
        prepare()
    shape, strides, place = format.layout(like)
    others: dict[str, Any] = {"storage_offset": place} if place else {}  # the argument is slow
    if like.layout is not torch.strided:
        others["layout"] = like.layout
    made: T = torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=strides, dtype=format.dtype, device=like.device, **others
    )
    return made


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor itself."""
    return getattr(x, "_local_tensor", x)


def on_local(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """Apply an elementwise function, or a function of rows, to this rank's shard of a DTensor.

    Raises:
        NotImplementedError: a function of rows, and a sharded dimension other than the first.
    """
    if not hasattr(x, "_local_tensor"):
        return function(x, *args)

    def on_own() -> Tensor:
        own = function(local(x), *args)
        shape, stride = x.shape, x.stride()
        if own.shape != local(x).shape:
            placements = x.placements  # type: ignore[attr-defined]
            if not all(y.is_replicate() or y.is_shard(0) for y in placements):
                raise NotImplementedError(
                    f"a tensor of shape {tuple(x.shape)} in a format whose rows share scales is "
                    "sharded along another dimension than the first: shard its rows, or keep it in "
                    "mcf.bf16i16"
                )
            shape = torch.Size((x.shape[0], *own.shape[1:]))
            stride = torch.empty(shape, device="meta").stride()
        return type(x).from_local(  # type: ignore[attr-defined]
            own,
            x.device_mesh,  # type: ignore[attr-defined]
            x.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=shape,
            stride=stride,
        )

    return outside(on_own)  # DTensor reads the dtype of the shard


def placed_like(x: Tensor, own: Tensor) -> Tensor:
    """Return a DTensor like x with `own` as this rank's shard; or `own`, if x is plain."""
    return on_local(lambda _: own, x)


def format_of(x: object) -> Format | None:
    """Return the format of an expansion or of a DTensor of one, or None for other tensors.

    It is also None if the format has rules, because optimizers then need no special treatment.
    """
    format = any_format_of(x)
    return format if format is None or format.rules is None else None


def holder_of(x: Any) -> tuple[weakref.ref[torch.nn.Module], str] | None:
    """Return the module that owned an expansion at its conversion, by weak reference, and the name
    there; None for a copy of it, and for other tensors.
    """
    held = x._holder if isinstance(x, ComponentTensor) else None
    return None if held is None or held[2] != id(x) else held[:2]


def is_held(x: Tensor) -> bool:
    """Return whether the module that owned an expansion at its conversion still does, if it
    exists.
    """
    held = holder_of(x)
    owner = None if held is None else held[0]()
    return held is None or owner is None or owner._parameters.get(held[1]) is x


def any_format_of(x: object) -> Format | None:
    """Return the format of an MCFTensor or of a DTensor of one; None for other tensors."""
    if isinstance(x, ComponentTensor):
        return x._format
    x = getattr(x, "_local_tensor", None)
    return x._format if isinstance(x, ComponentTensor) else None


def stored_format_of(x: Tensor) -> Format:
    """Return the format of a tensor, also of a plain one."""
    return any_format_of(x) or PLAIN[x.dtype]


# ------------------------------------------------- components from callers, pickles and checkpoints


def normalized(components: Sequence[Tensor], format: Format) -> tuple[Sequence[Tensor], int]:
    """Return components normalized by `Format.normalized`, and the number of misfits: elements
    whose components do not belong together.

    Components of fake and meta tensors, which have no elements, are returned unchanged.

    Raises:
        ValueError: a tail is not finite while the leading component is.
    """
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in components):
        return components, 0
    if any(hasattr(x.untyped_storage(), "_torch_load_uninitialized") for x in components):
        return components, 0  # the legacy format of torch.save fills storages later
    found, misfits = format.normalized(components)
    if misfits:
        leading, *others = components
        tails = [x for x in others if x.shape == leading.shape]  # scales are whole numbers
        if any((leading.isfinite() & ~x.isfinite()).any() for x in tails):
            raise ValueError(
                f"a {format.components[-1].name} is not finite while its leading component is"
            )
    return found, misfits


def check_components(components: Sequence[Tensor], format: Format) -> None:
    """Raise TypeError or ValueError if tensors are not valid components of a format."""
    wanted = format.components
    if len(components) != len(wanted) or any(
        isinstance(x, ComponentTensor) or not isinstance(x, Tensor) for x in components
    ):
        raise ValueError(
            f"MCFTensor: {len(components)} components given where {len(wanted)} plain tensors make "
            f"{format.name}; see mcf.as_expansion, which makes the components from a tensor"
        )
    leading = components[0]
    shape = format.layout(leading)[0]
    for component, x in zip(wanted, components, strict=True):
        if x.dtype != component.dtype:
            raise TypeError(
                f"MCFTensor: a component of {x.dtype} in a format of {component.dtype}: the "
                f"{component.name} of {format.name}"
            )
        if x.shape != component.shape(shape) or (
            x.shape == leading.shape and x.stride() != leading.stride()
        ):
            raise ValueError(
                f"MCFTensor: components of shapes {[tuple(t.shape) for t in components]} and "
                f"strides {[t.stride() for t in components]}; all must be alike"
            )
        if x.device != leading.device:
            raise ValueError(
                f"MCFTensor: components on {leading.device} and {x.device}; move them to one device"
            )


def check_writes(writes: Any, format: Format) -> None:
    """Raise ValueError if `writes` is not a valid write count for a tensor in this format."""
    if writes is None:
        return
    is_count = isinstance(writes, Tensor) and writes.shape == () and writes.dtype == torch.int64
    if not is_count or format.rounding != "balanced":
        raise ValueError(f"{writes!r} as the count of writes to {format.name}")
