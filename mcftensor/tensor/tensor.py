"""`MCFTensor`: expansions as a torch.Tensor."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from mcftensor.arithmetic.counting import count_beside, moved, start, writes_of
from mcftensor.formats import MAX_TERMS, Format, bytes_of, require_format
from mcftensor.formats.format import named
from mcftensor.passes.recoding import collapse, lent, recode
from mcftensor.tensor import showing
from mcftensor.tensor.addresses import are_hidden, without_addresses
from mcftensor.tensor.factor import Factor
from mcftensor.tensor.pending import PendingTensor
from mcftensor.tensor.printing import formatted, text_of
from mcftensor.tensor.stepping import current_step
from mcftensor.tensor.tape import Strand

Role = Literal["value", "parameter"]

_GRAD: Any = torch.Tensor.grad
_get_grad = _GRAD.__get__
_SETS_UNTRACED = torch.__version__ >= "2.14"  # whose compiler fails where a descriptor of C is set


@torch._disable_dynamo
def _set_grad(x: Tensor, value: Tensor | None) -> None:
    _GRAD.__set__(x, value)


def _require_computing(format: Format) -> None:
    """Raise TypeError for a format that parameters cannot have."""
    if format.shared and format.lends is None:
        raise TypeError(
            f"Parameter: {format.name} stores the states of optimizers; a model computes "
            "with the leading component of its parameters, and here that is codes. Take "
            "mcf.bf16i8, mcf.bf16i16 or mcf.e4m3i8"
        )


_DATA: Any = torch.Tensor.data
_without_function: Any = torch._C._disabled_torch_function_impl
COMPONENTS = tuple(f"_component{i}" for i in range(MAX_TERMS))


def _without_storage(name: str) -> Callable[..., NoReturn]:
    """A method of torch.Tensor that would work on memory which is not there."""

    def refuse(self: MCFTensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{name}: an expansion in {self._format.name} has no storage of its own; assign values "
            "with copy_(), or take plain tensors out with mcf.as_plain(x, dtype)"
        )

    return refuse


class MCFTensor(torch.Tensor):
    """A tensor whose elements are expansions: unevaluated sums of floats of one small type.

    `shape`, `stride` and `device` are those of each term, and `dtype` is the type of a term.
    `as_expansion` makes these tensors; call the class itself only with normalized terms.

    A tensor has one of two roles. A *value* is a number type like any other: arithmetic with
    numbers, plain tensors and expansions gives expansions. A *parameter* is a weight: it computes
    as its leading term and gives plain results wherever it meets a plain tensor, while every
    update in place reaches all its terms. `nn.Parameter(expansion)` makes a parameter. Within a
    step of an optimizer it counts as a value.

    Args:
        components: the terms, leading term first, normalized; plain tensors alike in shape,
            strides, device and dtype.
        format: their format, or its name; by default the one that their dtype and number say.
        role: `"value"` or `"parameter"`.

    Raises:
        TypeError: components that are not plain tensors, or not of the format's base.
        ValueError: a wrong number of components, or components of unlike shapes.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1.0, 0.1], dtype=torch.float64), mcf.fp32x2)
        >>> x * x + 1
        MCFTensor([2.0000, 1.0100], format=fp32x2)
        >>> (x * 0.999).components[0]
        tensor([0.9990, 0.0999])
    """

    _component0: Tensor
    _component1: Tensor
    _format: Format
    _role: Role
    _writes: Tensor | None = None  # where rounding is balanced, the count of `counting.py`
    _first: int = 0  # of a view: the place of its first element in what that is the count of
    _factor: Factor | None = None  # by which it is yet to be multiplied, where scales are shared
    _is_own: bool = False  # nobody else has its memory
    _place: tuple[Strand, int] | None = None  # of a TapedTensor: where it is on the tape
    # The module that had it when it was converted, its name there, and its own identity: copies, to
    # which attributes go as they are, have another one.
    _holder: tuple[weakref.ref[torch.nn.Module], str, int] | None = None
    _hooks: tuple[Callable[[Tensor], None], ...] = ()  # on gradients; they stay when it is moved

    # What carries out operations; `dispatch/`, which is written for this class, sets it.
    _dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    _whole: ClassVar[set[Callable[..., Any]]]
    _evaluate_whole: ClassVar[Callable[..., Any]]
    _evaluate_into: ClassVar[Callable[..., Any]]
    _shortcuts: ClassVar[dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]]
    _narrowly: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    # What `fully_shard` gathers of a shard and makes of it, which `lending.py` sets.
    _before_gathering: ClassVar[Callable[..., Any]]
    _after_gathering: ClassVar[Callable[..., Any]]

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
        """Make a tensor of components that are checked."""
        if _name is not None:
            format = Format.from_name(_name)
        if format is None:
            format = Format(components[0].dtype, len(components))
        format = require_format(format, "MCFTensor")
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
        """The one way to make such a tensor: of components of a format, which are not checked.

        `own` says that nobody else has, or will have, the memory of the components; `writes` is the
        count of writes to go on with, by default none, and `first` where it begins among what that
        is the count of.
        """
        if is_compiling():  # graphs hold calls of the class, of tensors and texts
            return MCFTensor(
                list(components), role=role, _name=format.name, _writes=writes, _first=first
            )
        return _made(components, format, role, writes, first, own)

    def _hold(self, components: Sequence[Tensor], format: Format, role: Role, own: bool) -> None:
        for name, component in zip(COMPONENTS, components, strict=False):
            setattr(self, name, component)
        self._format = format
        self._role = role
        if own:
            self._is_own = True

    def _like(
        self, components: Sequence[Tensor], *, own: bool = False, start: int = 0
    ) -> MCFTensor:
        """Components made by one operation on each component of this one: in memory of their own,
        which is written to from now on without this one, or views, which count writes together.
        They start some elements after the first one, and elements keep their sequences."""
        writes, first = self._writes, self._first + start
        if writes is not None and own:
            writes, first = moved(writes.to(components[0].device, copy=True), first), 0
        made = MCFTensor.of(
            components, self._format, self._role, own=own, writes=writes, first=first
        )
        if not own and self._factor is not None:
            made._factor = self._factor
        return made

    @property
    def _count(self) -> Tensor | None:
        """What balanced rounding goes by: the count of writes from the first element on."""
        return None if self._writes is None else moved(self._writes, self._first)

    # ------------------------------------------------------------------------------- what it is

    @property
    def components(self) -> tuple[Tensor, ...]:
        """The components, leading one first, as plain tensors that share memory with this one: the
        terms of an expansion."""
        components = self._read()
        if self._is_own:
            self._is_own = False
        return components

    def _read(self) -> tuple[Tensor, ...]:
        """The components, for those who neither write to them nor pass them on."""
        if self._factor is not None:
            self._factor.settle()
        return self._held()

    def _held(self) -> tuple[Tensor, ...]:
        """The components, whatever they are yet to be multiplied by."""
        if len(self._format.components) == 2:  # the commonest, and asked for at every turn
            return self._component0, self._component1
        return tuple([getattr(self, name) for name in COMPONENTS[: len(self._format.components)]])

    @property
    def lent(self) -> Tensor:
        """What a model computes with, as a plain tensor: the leading component, unless that is no
        number by itself."""
        return self._component0 if self._format.lends is None else lent(self._read(), self._format)

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Any]:
        """What `fully_shard` calls of formats that it cannot gather by their leading component; not
        of the plain part of one that a smaller group keeps after forward, whom it asks, too."""
        self._require_lending()
        asking = sys._getframe(1).f_locals.get("self")
        if getattr(getattr(asking, "sharded_state", None), "name", "") == "SHARDED_POST_FORWARD":
            raise AttributeError("what is gathered now is plain")
        return functools.partial(self._before_gathering, self)

    @property
    def fsdp_post_all_gather(self) -> Callable[..., Any]:
        """The same, after it has gathered."""
        self._require_lending()
        return self._after_gathering

    def _require_lending(self) -> None:
        if self._format.lends is None:
            raise AttributeError(f"{self._format.name} is gathered by its leading component")

    @property
    def has_tails(self) -> bool:
        """Whether it may be more than its leading component."""
        return True

    @property
    def is_part(self) -> bool:
        """Whether it shares scales, and its memory is a part of what was made."""
        return self._factor is not None and not self._factor.is_of_all(self._held())

    def leave_gradient(self) -> None:
        """As what a gradient has read as: no longer share memory with it."""
        self._component0 = self._component0.clone()

    def regain(self) -> bool:
        """Find out whether nobody else has the memory, or has no longer."""
        if not self._is_own:
            held = [weakref.ref(x) for x in self._held()]
            alone = [x.detach() for x in self._held()]  # whoever has a component keeps the memory
            self._hold_anew(alone)
            self._is_own = all(map(_is_sole_holder, alone))
            if not self._is_own:
                kept = [y if x() is None else x() for x, y in zip(held, alone, strict=True)]
                self._hold_anew(kept)
        return self._is_own

    def _hold_anew(self, components: Sequence[Any]) -> None:
        """The same memory by other tensors."""
        self.__dict__.update(zip(COMPONENTS, components, strict=False))
        if self._factor is not None and not self.is_part:
            self._factor.components = components

    def _made_beside(self, components: Sequence[Tensor], role: Role) -> MCFTensor:
        """New components as a tensor of this format that has not been written to, such as a state
        of an optimizer; of what one step makes like this one, each has sequences of its own."""
        writes, device = self._count, components[0].device
        if writes is not None:
            step = current_step()
            number = 0 if step is None else step.number_beside(self)
            known = writes.device == device or not writes.is_meta
            writes = count_beside(writes, f"{number}").to(device) if known else None
        return MCFTensor.of(components, self._format, role, own=True, writes=writes)

    @property
    def format(self) -> Format:
        """The format of the elements."""
        return self._format

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all components."""
        return bytes_of(self._format.components, self.shape)

    @property
    def writes(self) -> Tensor | None:
        """How often something was rounded into it, where rounding is balanced: an int64 without
        dimensions, on its device. Views count together, and copies go on from it. None otherwise.
        """
        return None if self._writes is None else writes_of(self._writes)

    @property
    def role(self) -> Role:
        """`"value"` or `"parameter"`."""
        return self._role

    @property
    def is_inside_step(self) -> bool:
        """Whether it is its number: within a step of an optimizer, unless gradients are recorded of
        what is done with it."""
        return current_step() is not None and not (torch.is_grad_enabled() and self.requires_grad)

    @property
    def acts_as(self) -> Role:
        """The role that it has at the moment: inside a step that of a value."""
        return "value" if self._role == "value" or self.is_inside_step else "parameter"

    @property
    def _is_param(self) -> bool:
        # nn.Parameter(expansion) sets this flag, and does nothing else that a class could see.
        return bool(self.__dict__.get("_parameter", False))

    @_is_param.setter
    def _is_param(self, flag: bool) -> None:
        if flag:
            _require_computing(self._format)
        self.__dict__["_parameter"] = flag
        if flag:
            self._role = "parameter"
            for hook in self._hooks if self.requires_grad else ():
                self.register_post_accumulate_grad_hook(hook)

    # ------------------------------------------------------- traceable wrapper subclass protocol

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, Role, int]]:
        self._is_own = False  # compiled code may write to it
        self._read()
        names = list(COMPONENTS[: len(self._format.components)])
        if self._writes is not None:
            names.append("_writes")
        return names, (self._format.name, self._role, self._first)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[str, Role, int],
        outer_size: Any,
        outer_stride: Any,
    ) -> MCFTensor:
        name, role, first = context
        format = Format.from_name(name)
        components = [inner[n] for n in COMPONENTS[: len(format.components)]]
        return MCFTensor.of(components, format, role, writes=inner.get("_writes"), first=first)

    def _stable_hash_for_caching(self) -> str:
        # Compiled code holds what dispatch did, which another release may do differently.
        version = sys.modules["mcftensor"].__version__
        parts = [(t.dtype, tuple(t.shape), t.stride(), str(t.device)) for t in self._read()]
        kind = f"{self._format.name} {self._role} {self._first}"
        return f"{version} {kind} {self.requires_grad} {parts}"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if len(types) > 1 and any(issubclass(kind, (Format, PendingTensor)) for kind in types):
            return NotImplemented  # that knows
        shortcut = cls._shortcuts.get(func)
        if shortcut is not None and not is_compiling():
            result = shortcut(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        if not kwargs and func not in cls._whole and func not in _CHOICES:
            return _without_function(func, types, args)
        kwargs = kwargs or {}
        if "dtype" in kwargs and not is_compiling():
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
        return cls._dispatch(func, args, kwargs or {})

    def __setstate__(self, state: Any) -> None:
        """What else a pickle has of this tensor: attributes that users gave it."""
        if not isinstance(state, dict):
            super().__setstate__(state)  # of a tensor with storage; raises
        if any(name in _OWN for name in state):
            raise ValueError("MCFTensor: damaged components, format or role")
        self.__dict__.update(state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's own keeps the device beside the components, where no function as map_location
        # finds it.
        torch.utils.hooks.warn_if_has_hooks(self)
        state = {name: x for name, x in self.__dict__.items() if name not in _OWN}
        # By the protocol of torch.save nobody gets the memory itself.
        components = self._read() if protocol == 2 else self.components
        whole = (components, self._format.name, self._role, tuple(self.shape))
        flags = (self.requires_grad, self._is_param)
        counted = () if self._count is None else (self._count,)
        return _rebuild, (*whole, *flags, *counted), state or None

    def __copy__(self) -> MCFTensor:
        """Another tensor with the same memory."""
        rebuild, arguments, state = self.__reduce_ex__(4)
        made: MCFTensor = rebuild(*arguments)
        made.__dict__.update(state or {})
        made._factor = self._factor
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> MCFTensor:
        copied: MCFTensor = without_addresses(lambda: torch.Tensor.__deepcopy__(self, memo))
        return copied

    # ----------------------------------------------------------------------- leaving the format

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter containing:\n" if self._is_param else ""
        if type(self._read()[0]) is not torch.Tensor:
            return f"{kind}MCFTensor(shape={tuple(self.shape)}, format={self._format.name})"
        text = text_of(self._collapsed(), self._format.decode(self._read()), self._format)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}MCFTensor({text}, format={self._format.name}{grad})"

    def _repr_html_(self) -> str:
        components = self._read()
        has_data = type(components[0]) is torch.Tensor and not self.is_meta
        is_shown = has_data and 0 < self.numel() <= showing.FEW
        about = f"{self._role}, shape {tuple(self.shape)}, {showing.size(self.nbytes)}"
        numbers = self._collapsed() if is_shown else None
        return showing.numbers(repr(self), about, self._format, components, numbers)

    def __format__(self, spec: str) -> str:
        if self.dim() or type(self._read()[0]) is not torch.Tensor:
            return object.__format__(self, spec)
        terms = self._format.decode(self._read())
        return formatted(self._collapsed(), terms, self._format, spec)

    def _collapsed(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The numbers as plain floats, rounded once."""
        return collapse(self._read(), self._format.name, dtype)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The collapsed values in float64, a copy on the CPU."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "numpy: this expansion requires grad; call .detach().numpy(), or numpy(force=True)"
            )
        return self._collapsed().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def tolist(self) -> Any:
        """The collapsed values as nested lists of Python floats."""
        return self._collapsed().tolist()

    def dequantize(self) -> Tensor:
        """The numbers as a plain tensor, exactly where its format only stores them: float32."""
        return self._collapsed(self._format.dtype_of_numbers)

    # ------------------------------------------------------------- what dispatch does not see

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As of any tensor; from a parameter it starts with a plain gradient."""
        if self._role == "parameter" and gradient is None and self.numel() == 1:
            gradient = torch.ones_like(self.lent)
        elif self._role == "parameter" and isinstance(gradient, MCFTensor):
            gradient = gradient.lent
        super().backward(gradient, *args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch rounds a number to the base dtype before dispatch.
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = number_in(value, self._format, device=self.device)
        super().__setitem__(index, value)

    def new_tensor(  # type: ignore[override]
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Data in the format and role of this one; torch would round them to the base dtype."""
        is_narrow = self.is_inside_step and dtype != self._format.dtype_of_numbers
        if dtype is not None and (is_narrow or dtype != self._format.dtype):
            plain = self.lent
            return plain.new_tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)
        if not isinstance(data, Tensor):
            data = torch.tensor(data, dtype=torch.float64)
        made = self.new_empty(data.shape, device=device).copy_(data.detach())
        return made.requires_grad_(requires_grad)

    def new(  # type: ignore[override]
        self, *size_or_data: Any, device: torch.device | str | None = None
    ) -> Tensor:
        """As `new_tensor` of data, or `new_empty` of a size."""
        (first, *_) = size_or_data or (0,)
        if isinstance(first, torch.Size) or (
            hasattr(first, "__index__") and not isinstance(first, (Tensor, np.ndarray))
        ):
            return self.new_empty(*size_or_data or (0,), device=device)
        return self.new_tensor(first, device=device)

    @property
    def grad(self) -> Tensor | None:
        """As of any tensor; within a step of an optimizer a plain gradient reads as an expansion,
        whose changes in place reach the plain one, rounded.

        Optimizers ask for it at every turn, and torch's own way to it goes by
        `__torch_function__`.
        """
        found: Tensor | None = _without_function(_get_grad, (), (self,))
        step = current_step()
        if step is None or found is None:
            return found
        if found.requires_grad and torch.is_grad_enabled():
            return found  # a part of the graph
        held, read = step.gradients.get(id(self), (None, None))
        if held is not found:
            read = lifted_gradient(found, self._format)
            step.gradients[id(self)] = found, read
        return read

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        step = current_step()
        held = None if step is None else _without_function(_get_grad, (), (self,))
        if step is not None and value is not None and not isinstance(held, MCFTensor):
            plain = _rounded_gradient(value, self._format)  # which it is after the step
            if plain is not value:
                step.gradients[id(self)] = plain, value
                value = plain
        with torch._C.DisableTorchFunctionSubclass():
            if _SETS_UNTRACED and is_compiling():
                _set_grad(self, value)
            else:
                _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        """The same terms, outside of autograd: it does not see what is written to them.

        `p.data = expansion` has both share memory, as of plain tensors: `p` takes over the terms,
        their format and their layout.

        `plain.data = expansion` cannot be intercepted, and leaves `plain` without memory: the next
        operation on it crashes. Write `plain.data.copy_(expansion)`, or
        `plain.data = mcf.as_plain(expansion, plain.dtype)`.
        """
        if is_compiling():
            return self.detach()
        return self._like([x.data for x in self.components])

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's own setter would change shape and dtype, and leave the terms as they are.
        if not isinstance(value, MCFTensor) or value._format.dtype != self._format.dtype:
            given = value.format.name if isinstance(value, MCFTensor) else f"plain {value.dtype}"
            raise TypeError(
                f"data: an expansion in {self._format.name} of shape {tuple(self.shape)} cannot "
                f"take the data of a {given} tensor of shape {tuple(value.shape)}. To leave the "
                "format, use mcf.as_plain(module) or mcf.as_plain(tensor, dtype); to assign "
                "values, copy_()"
            )
        if value.shape != self.shape or value.device != self.device:
            raise ValueError(
                f"data: shape {tuple(self.shape)} on {self.device} given data of shape "
                f"{tuple(value.shape)} on {value.device}; make a new expansion instead"
            )
        if self._is_param:
            _require_computing(value._format)
        self._read()  # no longer on a tape
        self._is_own = False
        if value.stride() != self.stride():
            with torch._C.DisableTorchFunctionSubclass():
                _DATA.__set__(self, value)  # which moves the layout alone
        new: dict[str, Any] = dict(
            zip(COMPONENTS, [x.detach() for x in value.components], strict=False)
        )
        new |= {"_writes": value._writes, "_first": value._first, "_factor": value._factor}
        new["_format"] = value._format  # what is tied is of one format
        self.__dict__.update(new)  # all by one call

    def data_ptr(self) -> int:
        """The address of the first element of the leading component, as an identity of memory: that
        of a view has its offset. The other components lie elsewhere."""
        if are_hidden():
            self.components  # noqa: B018  # there for all, before attributes are copied
            return 0
        return self._lying().data_ptr()

    const_data_ptr = data_ptr

    def _lying(self) -> Tensor:
        """The leading component where it lies."""
        return self._component0

    set_ = _without_storage("set_")
    apply_ = _without_storage("apply_")
    __dlpack__ = _without_storage("__dlpack__")

    def storage(self) -> NoReturn:
        """Refused: safetensors would read memory that is not there."""
        raise TypeError(
            f"storage: an expansion in {self._format.name} of shape {tuple(self.shape)} has none, "
            "but one for each of its terms. To save in safetensors files, use mcf.save_file, or "
            "mcf.store_as_terms(model) where another program saves the model"
        )

    def share_memory_(self) -> MCFTensor:
        """Move every term to shared memory."""
        for component in self.components:
            component.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether every term is in shared memory."""
        return all(x.is_shared() for x in self._read())


class LiftedTensor(MCFTensor):
    """A plain tensor as a value without tails, until one is written to; then it is an MCFTensor
    that has the plain tensor as its leading component."""

    _view_of: LiftedTensor | None
    _views: list[tuple[weakref.ref[LiftedTensor], Callable[[Tensor], Tensor]]]

    is_sparse = False  # optimizers ask it of every gradient
    has_tails = False

    @staticmethod
    def over(plain: Tensor, format: Format) -> LiftedTensor:
        """A plain tensor in a format."""
        made = wrapper(LiftedTensor, plain, format)
        made._component0, made._format, made._role = plain, format, "value"
        made._view_of, made._views = None, []
        return made

    def viewed(self, plain: Tensor, view: Callable[[Tensor], Tensor]) -> LiftedTensor:
        """A view of it, given that of the plain tensor; they get their tails together."""
        made = LiftedTensor.over(plain, self._format)
        made._view_of = self
        self._views.append((weakref.ref(made), view))
        return made

    def grow_tails(self) -> None:
        """Make the tails, which are to be written to or handed out."""
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
        del self._view_of, self._views
        self.__class__ = MCFTensor  # type: ignore[assignment]
        for reference, view in views:
            made = reference()
            if made is not None:
                made._grow([view(x) for x in tails])

    def leave_gradient(self) -> None:
        """It goes on as the gradient does."""

    def _read(self) -> tuple[Tensor, ...]:
        return self._component0, *self._zeros()

    @property
    def components(self) -> tuple[Tensor, ...]:
        """As of any expansion; from now on the tails are there."""
        self.grow_tails()
        return self.components

    def __getattr__(self, name: str) -> Any:  # called for what is missing
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


def lifted_gradient(gradient: Tensor, format: Format) -> Tensor:
    """What a gradient of a parameter in some format reads as within a step: one of the base as an
    expansion, or, where it is sparse, in the dtype of numbers; any other as itself. One that is a
    part of a graph still is, so that it can be differentiated again."""
    if type(gradient) is not Tensor or gradient.dtype != format.dtype:
        return gradient
    if not gradient.requires_grad:
        return _lifted(gradient, format)
    with torch.enable_grad():
        read: Tensor = _Lift.apply(gradient, format)
    return read


def _lifted(gradient: Tensor, format: Format) -> Tensor:
    if gradient.layout != torch.strided or format.of_gradients is None:
        return gradient.to(format.dtype_of_numbers)
    return LiftedTensor.over(gradient, format.of_gradients)


class _Lift(torch.autograd.Function):
    """A gradient as it reads within a step, in the same memory; its own gradient is plain."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, format: Format) -> Tensor:
        """Lift it."""
        ctx.dtype = gradient.dtype
        return _lifted(gradient.detach(), format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Round once."""
        if isinstance(grad, MCFTensor):
            return grad._collapsed(ctx.dtype), None
        return grad.to(ctx.dtype), None


def _rounded_gradient(read: Tensor, format: Format) -> Tensor:
    """The plain gradient of what one is to read as."""
    if isinstance(read, MCFTensor):
        return read._component0
    return read.to(format.dtype) if read.dtype == format.dtype_of_numbers else read


def _is_sole_holder(x: Tensor) -> bool:
    """Whether no other tensor has its memory."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # of which the storage object is one


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
        made._factor = Factor(components, format, made._writes, first)
    return made


T = TypeVar("T", bound=MCFTensor)


def wrapper(cls: type[T], like: Tensor, format: Format) -> T:
    """A tensor without storage, with the layout of another one and the dtype of a format."""
    made: T = torch.Tensor._make_wrapper_subclass(
        cls,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=format.dtype,
        device=like.device,
        layout=like.layout,
    )
    return made


# What a pickle has of its own, beside attributes that users gave a tensor.
_OWN = (
    *(*COMPONENTS, "_format", "_role", "_writes", "_first", "_factor", "_is_own", "_place"),
    *("_hooks", "_holder", "_parameter"),
)


def _rebuild(
    components: Any,
    format: Any,
    role: Any,
    shape: Any,
    requires_grad: bool,
    is_param: bool,
    writes: Any = None,
) -> MCFTensor:
    """What a pickle says of a tensor, checked: a file may say anything.

    Raises:
        ValueError: components, format and role are not those of a tensor of this shape.
    """
    try:
        found = Format.from_name(format)
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


def normalized(components: Sequence[Tensor], format: Format) -> tuple[Sequence[Tensor], int]:
    """Components that come from elsewhere, as `Format.normalized` gives them; those of fake tensors
    and on meta, which have no elements, and of which a file has the elements further on, as they
    are.

    Raises:
        ValueError: one is not finite beside a leading one that is.
    """
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in components):
        return components, 0
    if any(hasattr(x.untyped_storage(), "_torch_load_uninitialized") for x in components):
        return components, 0  # the old form of torch.save
    found, misfits = format.normalized(components)
    if misfits:
        leading, *others = components
        tails = [x for x in others if x.shape == leading.shape]  # scales are whole numbers
        if any((leading.isfinite() & ~x.isfinite()).any() for x in tails):
            raise ValueError(f"a {format.components[-1].name} is not finite beside one that is")
    return found, misfits


def check_components(components: Sequence[Tensor], format: Format) -> None:
    """Raise TypeError or ValueError for what are not components of a format."""
    wanted = format.components
    if len(components) != len(wanted) or any(
        isinstance(x, MCFTensor) or not isinstance(x, Tensor) for x in components
    ):
        raise ValueError(
            f"MCFTensor: {len(components)} components given where {len(wanted)} plain tensors make "
            f"{format.name}; see mcf.as_expansion, which makes the components from a tensor"
        )
    leading = components[0]
    for component, x in zip(wanted, components, strict=True):
        if x.dtype != component.dtype:
            raise TypeError(
                f"MCFTensor: a component of {x.dtype} in a format of {component.dtype}: the "
                f"{component.name} of {format.name}"
            )
        if x.shape != component.shape(leading.shape) or (
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
    """Raise ValueError for what is no count of writes of a tensor of this format."""
    if writes is None:
        return
    is_count = isinstance(writes, Tensor) and writes.shape == () and writes.dtype == torch.int64
    if not is_count or format.rounding != "balanced":
        raise ValueError(f"{writes!r} as the count of writes to {format.name}")


def _where(condition: Tensor, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    """torch.where; numbers become expansions, since torch rounds them before dispatch."""
    expansions = [x for x in (input, other) if isinstance(x, MCFTensor)]
    if not expansions:
        chosen = () if input is None else (input, other)
        return torch.where(condition, *chosen, **kwargs)
    format, role = expansions[0].format, expansions[0].role
    input, other = (
        number_in(x, format, role) if isinstance(x, (int, float)) else x for x in (input, other)
    )
    return torch.where(condition, input, other, **kwargs)


def number_in(
    x: float, format: Format, role: Role = "value", device: torch.device | None = None
) -> Tensor:
    """A number as an expansion without dimensions, to nearest; a plain one beside formats that have
    none of these."""
    number = torch.tensor(x, dtype=torch.float64, device=device)
    if format.shared:
        return number
    return MCFTensor.of(recode([number], "float64", format.nearest.name, None), format, role)


# torch rounds a number to the base dtype before dispatch.
_CHOICES: dict[Any, Callable[..., Any]] = {
    torch.where: _where,
    torch.Tensor.where: lambda input, condition, other: _where(condition, input, other),
}


def _holds_expansion(tree: Any) -> bool:
    return any(isinstance(x, MCFTensor) for x in tree_leaves(tree))


def _has_value(tree: Any) -> bool:
    return any(isinstance(x, MCFTensor) and x.acts_as == "value" for x in tree_leaves(tree))


torch.serialization.add_safe_globals([MCFTensor, named, _rebuild])
