"""`MCFTensor`: expansions as a torch.Tensor."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from mcftensor import expansion
from mcftensor.deferred import READERS, Deferred, compute_readers, watch
from mcftensor.formats import MAX_TERMS, Format, require_format

Role = Literal["value", "parameter"]

_GRAD: Any = torch.Tensor.grad
_get_grad = _GRAD.__get__
_without_function: Any = torch._C._disabled_torch_function_impl
TERM_NAMES = tuple(f"_term{i}" for i in range(MAX_TERMS))


class MCFTensor(torch.Tensor):
    """A tensor whose elements are expansions: unevaluated sums of floats of one small type.

    `shape`, `stride` and `device` are those of each term, and `dtype` is the type of a term.
    `as_expansion` makes these tensors; call the class itself only with normalized terms.

    A tensor has one of two roles. A *value* is a number type like any other: arithmetic with
    numbers, plain tensors and expansions gives expansions. A *parameter* is a weight: it computes
    as its leading term and gives plain results wherever it meets a plain tensor, while every
    update in place reaches all its terms. `nn.Parameter(expansion)` makes a parameter.

    Args:
        components: the terms, leading term first, normalized; plain tensors alike in shape,
            strides, device and dtype.
        format: their format; by default the one that their dtype and number say.
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

    _term0: Tensor
    _term1: Tensor
    _format: Format
    _role: Role
    _deferred: Deferred | None = None  # of a DeferredTensor alone
    _accumulation: Callable[[Tensor], None] | None = None  # the hook of accumulate_gradients

    # What carries out operations; `dispatch/`, which is written for this class, sets it.
    _dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    _whole: ClassVar[set[Callable[..., Any]]]
    _evaluate_whole: ClassVar[Callable[..., Any]]
    _evaluate_into: ClassVar[Callable[..., Any]]
    _shortcuts: ClassVar[dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]]

    @staticmethod
    def __new__(
        cls,
        components: Sequence[Tensor],
        format: Format | None = None,
        role: Role = "value",
    ) -> MCFTensor:
        """Make a tensor without storage, with the metadata of the leading term."""
        leading = components[0]
        return torch.Tensor._make_wrapper_subclass(
            cls,
            leading.size(),
            strides=leading.stride(),
            storage_offset=leading.storage_offset(),
            dtype=leading.dtype,
            device=leading.device,
            layout=leading.layout,
        )

    def __init__(
        self,
        components: Sequence[Tensor],
        format: Format | None = None,
        role: Role = "value",
    ) -> None:
        _check_components(components, format)
        self._hold(components, format or Format(components[0].dtype, len(components)), role)

    def _hold(self, components: Sequence[Tensor], format: Format, role: Role) -> None:
        for name, term in zip(TERM_NAMES, components, strict=False):
            setattr(self, name, term)
        self._format = format
        self._role = role

    def _like(self, components: Sequence[Tensor]) -> MCFTensor:
        """Terms made by one operation on each term of this one, which need no check."""
        made = MCFTensor.__new__(MCFTensor, components)
        made._hold(components, self._format, self._role)
        return made

    # ------------------------------------------------------------------------------- what it is

    @property
    def components(self) -> tuple[Tensor, ...]:
        """The terms, leading term first, as plain tensors that share memory with this one."""
        terms = self._read()
        compute_readers(terms)
        return terms

    def _read(self) -> tuple[Tensor, ...]:
        """The terms, for those who write to none."""
        if self._format.terms == 2:  # the commonest, and asked for at every turn
            return self._term0, self._term1
        return tuple([getattr(self, name) for name in TERM_NAMES[: self._format.terms]])

    @property
    def format(self) -> Format:
        """The format of the elements."""
        return self._format

    @property
    def role(self) -> Role:
        """`"value"` or `"parameter"`."""
        return self._role

    @property
    def _is_param(self) -> bool:
        # nn.Parameter(expansion) sets this flag, and does nothing else that a class could see.
        return bool(self.__dict__.get("_parameter", False))

    @_is_param.setter
    def _is_param(self, flag: bool) -> None:
        self.__dict__["_parameter"] = flag
        if flag:
            self._role = "parameter"
            if self._accumulation is not None and self.requires_grad:
                self.register_post_accumulate_grad_hook(self._accumulation)

    # ------------------------------------------------------- traceable wrapper subclass protocol

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, Role]]:
        if READERS and type(self._term0) is Tensor:  # compiled code may write to its terms
            compute_readers(self._read())
        return list(TERM_NAMES[: self._format.terms]), (self._format.name, self._role)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[str, Role], outer_size: Any, outer_stride: Any
    ) -> MCFTensor:
        name, role = context
        format = Format.from_name(name)
        return MCFTensor([inner[n] for n in TERM_NAMES[: format.terms]], format, role)

    def _stable_hash_for_caching(self) -> str:
        # Compiled code holds what dispatch did, which another release may do differently.
        version = sys.modules["mcftensor"].__version__
        terms = [(t.dtype, tuple(t.shape), t.stride(), str(t.device)) for t in self.components]
        return f"{version} {self._format.name} {self._role} {self.requires_grad} {terms}"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        shortcut = cls._shortcuts.get(func)
        if shortcut is not None and not is_compiling():
            result = shortcut(func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        if not kwargs and func not in cls._whole and func not in _CHOICES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        kwargs = kwargs or {}
        out = kwargs.get("out")
        if (
            out is not None
            and _holds_expansion(out)
            and not isinstance(func, torch._ops.OpOverload)
        ):
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
        return cls._dispatch(func, args, kwargs or {})

    def __setstate__(self, state: Any) -> None:
        """What `torch.load` and `copy.copy` have of this tensor, checked: a file may say anything.

        Raises:
            ValueError: terms, format and role are not those of an expansion of this shape.
        """
        if isinstance(state, tuple) and len(state) != 2:
            super().__setstate__(state)  # of a tensor with storage; raises
        torch._utils._set_obj_state(self, state)
        try:
            f = self._format
            _check_components(self.components, Format(f.base, f.terms, f.rounding))
            whole = (self.components[0].shape, self.dtype) == (self.shape, f.base)
            if not whole or self._role not in ("value", "parameter"):
                raise ValueError(f"shape {tuple(self.shape)}, dtype {self.dtype}, {self._role!r}")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"MCFTensor: damaged terms, format or role ({error})") from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's own keeps the device beside the terms, where no function as map_location finds it.
        torch.utils.hooks.warn_if_has_hooks(self)
        state = {name: x for name, x in self.__dict__.items() if name != "_accumulation"}
        return _rebuild, (self._term0, tuple(self.shape), self.requires_grad), state

    # ----------------------------------------------------------------------- leaving the format

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter containing:\n" if self._is_param else ""
        if type(self.components[0]) is not torch.Tensor:
            return f"{kind}MCFTensor(shape={tuple(self.shape)}, format={self._format.name})"
        plain = expansion.collapse(self.components, torch.float64)
        text = repr(plain).removeprefix("tensor(").removesuffix(")")
        text = re.sub(r",\s*dtype=torch\.float64", "", text)
        text = text.replace("\n" + " " * 7, "\n" + " " * 10)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}MCFTensor({text}, format={self._format.name}{grad})"

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The collapsed values in float64, a copy on the CPU."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "numpy: this expansion requires grad; call .detach().numpy(), or numpy(force=True)"
            )
        plain = expansion.collapse(self.components, torch.float64)
        return plain.cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def tolist(self) -> Any:
        """The collapsed values as nested lists of Python floats."""
        return expansion.collapse(self.components, torch.float64).tolist()

    # ------------------------------------------------------------- what dispatch does not see

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As of any tensor; from a parameter it starts with a plain gradient."""
        if self._role == "parameter" and gradient is None and self.numel() == 1:
            gradient = torch.ones_like(self.components[0])
        elif self._role == "parameter" and isinstance(gradient, MCFTensor):
            gradient = gradient.components[0]
        super().backward(gradient, *args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch rounds a number to the base dtype before dispatch.
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            terms = _number(value, self._format, self.device)
            value = MCFTensor(terms, self._format)
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
        if dtype not in (None, self.dtype):
            plain = self.components[0]
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
        """As of any tensor. Optimizers ask for it at every turn, and torch's own way to it goes by
        `__torch_function__`."""
        return _without_function(_get_grad, (), (self,))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        """The same terms, outside of autograd: it does not see what is written to them.

        `plain.data = expansion` cannot be intercepted, and leaves `plain` without memory: the next
        operation on it crashes. Write `plain.data.copy_(expansion)`, or
        `plain.data = mcf.as_plain(expansion, plain.dtype)`.
        """
        if is_compiling():
            return self.detach()
        return MCFTensor([term.data for term in self.components], self._format, self._role)

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's own setter would change shape and dtype, and leave the terms as they are.
        if not isinstance(value, MCFTensor) or value.dtype != self.dtype:
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
        if value.format != self._format or value.stride() != self.stride():
            value = torch.empty_like(self).copy_(value)
        assert isinstance(value, MCFTensor)
        _ = self.components  # no longer deferred
        for name, term in zip(TERM_NAMES, value.components, strict=False):
            setattr(self, name, term.detach())

    def data_ptr(self) -> int:
        """0 always, also of a slice: by it torch knows a tensor without storage, to copy and save
        it term by term."""
        return 0

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: an expansion has no storage of its own to exchange."""
        raise self._has_no_storage("set_")

    def apply_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: torch would call the function on memory that is not there."""
        raise self._has_no_storage("apply_")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the protocol knows no expansions."""
        raise self._has_no_storage("__dlpack__")

    def _has_no_storage(self, name: str) -> TypeError:
        return TypeError(
            f"{name}: an expansion in {self._format.name} has no storage of its own; assign values "
            "with copy_(), or take plain tensors out with mcf.as_plain(x, dtype)"
        )

    def storage(self) -> NoReturn:
        """Refused: safetensors would read memory that is not there."""
        raise TypeError(
            f"storage: an expansion in {self._format.name} of shape {tuple(self.shape)} has none, "
            "but one for each of its terms. To save in safetensors files, use mcf.save_file, or "
            "mcf.store_as_terms(model) where another program saves the model"
        )

    def share_memory_(self) -> MCFTensor:
        """Move every term to shared memory."""
        for term in self.components:
            term.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether every term is in shared memory."""
        return all(term.is_shared() for term in self.components)


class DeferredTensor(MCFTensor):
    """A value whose terms are computed when they are read; then it is an MCFTensor."""

    @staticmethod
    def of(deferred: Deferred, like: Tensor, format: Format) -> DeferredTensor:
        """The result of an expression, laid out as another tensor."""
        made = torch.Tensor._make_wrapper_subclass(
            DeferredTensor,
            like.size(),
            strides=like.stride(),
            dtype=format.base,
            device=like.device,
        )
        made._format, made._role = format, "value"
        made.defer(deferred)
        return made

    def defer(self, deferred: Deferred) -> None:
        """Take the result of an expression in place of what was here."""
        before, self._deferred = self._deferred, deferred
        if before is None or not deferred.reads_as(before):
            watch(self, deferred)

    def compute_terms(self) -> None:
        """Compute the terms."""
        assert self._deferred is not None
        self._hold(self._deferred.compute(), self._format, self._role)
        self._deferred = None
        self.__class__ = MCFTensor  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:  # called for what is missing
        if name not in TERM_NAMES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.compute_terms()
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.compute_terms()
        return self.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, Role]]:
        self.compute_terms()
        return self.__tensor_flatten__()

    def data_ptr(self) -> int:
        """0; what copies a tensor attribute by attribute asks for it before (DCP's stager does)."""
        self.compute_terms()
        return 0


def _rebuild(leading: Tensor, shape: tuple[int, ...], requires_grad: bool) -> MCFTensor:
    """What pickle stores calls this, and then `__setstate__`."""
    if leading.shape != shape:
        raise ValueError(
            f"MCFTensor: damaged terms, format or role (shape {shape}, terms of {leading.shape})"
        )
    x = MCFTensor.__new__(MCFTensor, [leading])
    x.requires_grad_(requires_grad)
    return x


def _check_components(components: Sequence[Tensor], format: Format | None) -> None:
    if format is not None:
        require_format(format, "MCFTensor")
    leading = components[0]
    base, terms = (format.base, format.terms) if format else (leading.dtype, len(components))
    if len(components) != terms or any(isinstance(t, MCFTensor) for t in components):
        raise ValueError(
            f"MCFTensor: {len(components)} components given where {terms} plain tensors make the "
            "format; see mcf.as_expansion, which makes the components from a tensor"
        )
    for term in components:
        if term.dtype != base:
            raise TypeError(f"MCFTensor: a component of {term.dtype} in a format of {base}")
        if term.shape != leading.shape or term.stride() != leading.stride():
            raise ValueError(
                f"MCFTensor: components of shapes {[tuple(t.shape) for t in components]} and "
                f"strides {[t.stride() for t in components]}; all must be alike"
            )


def _where(condition: Tensor, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    """torch.where; numbers become expansions, since torch rounds them before dispatch."""
    expansions = [x for x in (input, other) if isinstance(x, MCFTensor)]
    if not expansions:
        chosen = () if input is None else (input, other)
        return torch.where(condition, *chosen, **kwargs)
    format, role = expansions[0].format, expansions[0].role
    input, other = (
        MCFTensor(_number(x, format), format, role) if isinstance(x, (int, float)) else x
        for x in (input, other)
    )
    return torch.where(condition, input, other, **kwargs)


def _number(x: float, format: Format, device: torch.device | None = None) -> tuple[Tensor, ...]:
    return expansion.expand(torch.tensor(x, dtype=torch.float64, device=device), format.nearest)


def _where_method(input: Any, condition: Tensor, other: Any = None) -> Any:
    return _where(condition, input, other)


# torch rounds a number to the base dtype before dispatch.
_CHOICES: dict[Any, Callable[..., Any]] = {torch.where: _where, torch.Tensor.where: _where_method}


def _holds_expansion(tree: Any) -> bool:
    return any(isinstance(x, MCFTensor) for x in tree_leaves(tree))


def _has_value(tree: Any) -> bool:
    return any(isinstance(x, MCFTensor) and x.role == "value" for x in tree_leaves(tree))


torch.serialization.add_safe_globals([MCFTensor, Format, _rebuild])
