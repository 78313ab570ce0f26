"""`ScaledTensor`: low-precision data times a power of two, as a torch.Tensor."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from mcftensor.arithmetic.rounding import round_to
from mcftensor.scaling.exponents import times_any_power
from mcftensor.scaling.scaled_format import ScaledFormat, of_dtype
from mcftensor.tensor.addresses import are_hidden, require_dispatch, without_addresses

_PARTS = ("_data", "_tail")
_OWN = {*_PARTS, "_exponent", "_format", "_whole", "_is_param"}


class ScaledTensor(torch.Tensor):
    """A tensor whose numbers are `data · 2^exponent`: one exponent for all, kept beside the data.

    `mcf.as_expansion(x, mcf.scaled(torch.float16))` makes these tensors. Shape, strides, device and
    dtype are those of the data. Operations follow the rules of unit scaling, which this folder's
    modules list by operator: what comes out is scaled again, and so are gradients.

    Views share the exponent of their base. A write into the whole of it sets the exponent; one into
    a part can only raise it, and then shifts what lies beside. Copies have an exponent of their
    own.

    Args:
        components: the data, and the tail if the format has one; plain tensors alike.
        exponent: s, as an int32 tensor without dimensions.
        format: their format; by default that of the data's dtype.

    Raises:
        TypeError: components that are not of the format.
        ValueError: a wrong number of components, or components of unlike shapes.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([1e-6, 2e-6]), mcf.scaled(torch.float16))
        >>> x @ x
        ScaledTensor(5.0022e-12, format=scaled(float16), exponent=-40)
        >>> mcf.as_plain(x, torch.float64)
        tensor([1.0002e-06, 2.0005e-06], dtype=torch.float64)
    """

    _data: Tensor
    _tail: Tensor
    _exponent: Tensor
    _format: ScaledFormat
    _whole: tuple[Tensor, ...] | None  # of a view: the data of its base

    # What carries out operations; `ruling.py`, which is written for this class, sets it.
    _dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]

    @staticmethod
    def __new__(
        cls,
        components: Sequence[Tensor],
        exponent: Tensor,
        format: ScaledFormat | None = None,
    ) -> ScaledTensor:
        """Make a tensor of components that are checked."""
        dtypes = tuple(x.dtype for x in components)
        format = format or of_dtype(dtypes[0], dtypes[1] if len(dtypes) > 1 else None)
        if len(components) != len(format.dtypes) or len({x.shape for x in components}) != 1:
            shapes = ", ".join(str(tuple(x.shape)) for x in components)
            raise ValueError(
                f"ScaledTensor: {format.name} has {len(format.dtypes)} components of one shape; "
                f"got {len(components)}, of shapes {shapes}"
            )
        if dtypes != format.dtypes:
            raise TypeError(
                f"ScaledTensor: {format.name} holds {', '.join(map(str, format.dtypes))}; got "
                f"{', '.join(map(str, dtypes))}"
            )
        if exponent.dtype != torch.int32 or exponent.dim():
            raise TypeError(
                f"ScaledTensor: an exponent is an int32 without dimensions; got {exponent.dtype} "
                f"of shape {tuple(exponent.shape)}"
            )
        return ScaledTensor.of(components, exponent, format)

    def __init__(
        self,
        components: Sequence[Tensor],
        exponent: Tensor,
        format: ScaledFormat | None = None,
    ) -> None:
        pass

    @staticmethod
    def of(
        components: Sequence[Tensor],
        exponent: Tensor,
        format: ScaledFormat,
        whole: tuple[Tensor, ...] | None = None,
    ) -> ScaledTensor:
        """The one way to make such a tensor, unchecked."""
        data = components[0]
        made: ScaledTensor = torch.Tensor._make_wrapper_subclass(
            ScaledTensor,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
        )
        made._data = data
        if len(components) == 2:
            made._tail = components[1]
        made._exponent = exponent
        made._format = format
        made._whole = whole
        return made

    # ------------------------------------------------------------------------------- what it is

    @property
    def components(self) -> tuple[Tensor, ...]:
        """The data, and the tail if there is one, as plain tensors with the same memory."""
        return (self._data,) if self._format.tail is None else (self._data, self._tail)

    @property
    def exponent(self) -> Tensor:
        """s, as an int32 without dimensions on the device of the data; views share it."""
        return self._exponent

    @property
    def format(self) -> ScaledFormat:
        """The format of the data."""
        return self._format

    # ------------------------------------------------------- traceable wrapper subclass protocol

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        format = self._format
        names = [*_PARTS[: len(format.dtypes)], "_exponent"]
        return names, (format.dtype, format.tail, format.rounding)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Any, ...],
        outer_size: Any,
        outer_stride: Any,
    ) -> ScaledTensor:
        format = of_dtype(*context)
        components = [inner[name] for name in _PARTS[: len(format.dtypes)]]
        return ScaledTensor.of(components, inner["_exponent"], format)

    def _stable_hash_for_caching(self) -> str:
        # Compiled code holds what rules did, which another release may do differently.
        version = sys.modules["mcftensor"].__version__
        parts = [(x.dtype, tuple(x.shape), x.stride(), str(x.device)) for x in self.components]
        return f"{version} {self._format.name} {self.requires_grad} {parts}"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return cls._dispatch(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        torch.utils.hooks.warn_if_has_hooks(self)
        state = {name: x for name, x in self.__dict__.items() if name not in _OWN}
        is_param = isinstance(self, torch.nn.Parameter)
        kept = (self._format.rounding, self.requires_grad, is_param)
        whole = (self.components, self._exponent, *kept)
        return _rebuilt, whole, state or None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or any(name in _OWN for name in state):
            raise ValueError("ScaledTensor: damaged components, exponent or format")
        self.__dict__.update(state)

    # ----------------------------------------------------------------------- leaving the format

    def to_plain(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The numbers as plain floats, rounded once; exact in float64, and in float32 if they fit.

        What float64 cannot hold, below 2^-1022, becomes zero.
        """
        numbers = self._format.load([x.detach() for x in self.components], torch.float64)
        return round_to(times_any_power(numbers, self._exponent), dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        if type(self._data) is not torch.Tensor or self.is_meta:
            return f"{kind}ScaledTensor(shape={tuple(self.shape)}, format={self._format.name})"
        text = repr(self.to_plain()).removeprefix("tensor(").removesuffix(")")
        text = re.sub(r",\s*dtype=torch\.float64", "", text)
        text = text.replace("\n" + " " * 7, "\n" + " " * 13)
        grad = ", requires_grad=True" if self.requires_grad else ""
        about = f"format={self._format.name}, exponent={self._exponent.item()}"
        return f"{kind}ScaledTensor({text}, {about}{grad})"

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The numbers in float64, a copy on the CPU."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "numpy: this scaled tensor requires grad; call .detach().numpy(), or "
                "numpy(force=True)"
            )
        return self.to_plain().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __float__(self) -> float:
        require_dispatch(self)
        return super().__float__()

    def tolist(self) -> Any:
        """The numbers as nested lists of Python floats."""
        return self.to_plain().tolist()

    # ------------------------------------------------------------- what dispatch does not see

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As of any tensor; a plain gradient gets a scale, where autograd would round it to the
        dtype of the data."""
        if isinstance(gradient, Tensor) and not isinstance(gradient, ScaledTensor):
            gradient = torch.empty_like(self.detach()).copy_(gradient)
        super().backward(gradient, *args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The same numbers, outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's own setter would change shape and dtype, and leave the numbers as they are.
        if not isinstance(value, ScaledTensor) or value.format != self.format:
            given = value.format.name if isinstance(value, ScaledTensor) else f"plain {value.dtype}"
            raise TypeError(
                f"data: a tensor in {self.format.name} of shape {tuple(self.shape)} cannot take "
                f"the data of a {given} tensor of shape {tuple(value.shape)}; assign values with "
                "copy_(), or leave the format with mcf.as_plain"
            )
        if value.shape != self.shape or value.device != self.device:
            raise ValueError(
                f"data: shape {tuple(self.shape)} on {self.device} given data of shape "
                f"{tuple(value.shape)} on {value.device}; make a new tensor instead"
            )
        if value.stride() != self.stride():
            pairs = zip(self.components, value.components, strict=True)
            parts = [torch.empty_like(mine).copy_(theirs) for mine, theirs in pairs]
            value = ScaledTensor.of(parts, value.exponent.clone(), self.format)
        names = (*_PARTS[: len(self.format.dtypes)], "_exponent", "_whole")
        self.__dict__.update({name: getattr(value, name) for name in names})

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"a tensor in {self._format.name} of shape {tuple(self.shape)} has no storage of its "
            "own; assign values with copy_(), or take plain tensors out with mcf.as_plain(x, dtype)"
        )

    set_ = storage = share_memory_ = apply_ = __dlpack__ = _refuse

    def data_ptr(self) -> int:
        """The address of the data, as an identity of memory; that of a view has its offset."""
        return 0 if are_hidden() else self._data.data_ptr()

    const_data_ptr = data_ptr

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaledTensor:
        copied: ScaledTensor = without_addresses(lambda: torch.Tensor.__deepcopy__(self, memo))
        return copied


def _rebuilt(
    components: tuple[Tensor, ...],
    exponent: Tensor,
    rounding: Literal["nearest", "stochastic"],
    requires_grad: bool,
    is_param: bool,
) -> ScaledTensor:
    dtype, tail = components[0].dtype, components[1].dtype if len(components) > 1 else None
    made = ScaledTensor(components, exponent, of_dtype(dtype, tail, rounding))
    if is_param:
        return torch.nn.Parameter(made, requires_grad)  # type: ignore[return-value]
    made.requires_grad_(requires_grad)
    return made


torch.serialization.add_safe_globals([ScaledTensor, _rebuilt])
