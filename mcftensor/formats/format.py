"""Formats: the storage of numbers, and their arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mcftensor import wings
from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Number, Numbers, Sum
from mcftensor.formats.moving import move_component, move_rows
from mcftensor.formats.registration_checks import require_codec
from mcftensor.kernels.block_scales import shape_of_codes
from mcftensor.kernels.without_float64 import widest

F = TypeVar("F", bound="Format")

Arithmetic = Literal["terms", "numbers", "plain", "rules"]


class Rules(Protocol):
    """Replacements of the operators in `operators/` for tensors of a format.

    `Format.rules` holds the rules of a format. `scaling/` has the rules of formats whose scales
    propagate.
    """

    def carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a PyTorch operator."""

    def convert(self, x: Tensor, format: Any) -> Any:
        """Return a tensor converted to a format with these rules; gradients pass through."""

    def convert_module(self, module: Any, format: Any, overrides: Any) -> Any:
        """Convert the parameters of a module, in place, and return it."""

    def module_as_plain(self, module: Any, dtype: torch.dtype | None) -> None:
        """Convert the parameters that follow these rules to plain ones, in place."""


SUFFIXES: dict[Rounding, str] = {"nearest": "", "stochastic": "sr", "balanced": "br"}
"""The endings of names of formats, by rounding."""


@dataclass(frozen=True)
class Component:
    """One of the tensors that store numbers."""

    name: str
    dtype: torch.dtype

    @property
    def is_shared(self) -> bool:
        """Whether it holds one number for each block of elements, in the shape of `shape`."""
        return False

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds the codes of two elements."""
        return False

    def shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the component in a tensor; the tensor's own unless overridden."""
        return shape


class Format:
    """How the elements of a tensor are stored, and which arithmetic computes on them.

    `Format(base, terms)` is a multi-component float: an unevaluated sum of `terms` floats of type
    `base`. Other formats are subclasses that name their components, decode them, and encode
    numbers; everything else has defaults. There is one object for each name.

    Args:
        base: dtype of every term: bfloat16, float16, float32 or float64.
        terms: number of terms, from 2 to 6. At most 3 for float16, whose range ends there, and at
            most 5 if rounding is not to nearest, which is evaluated with one more term. One
            bfloat16 term with another rounding than nearest is a format too: updates that are too
            small for it survive in the mean.
        rounding: of the last term. `"nearest"` rounds ties to even. `"stochastic"` rounds up or
            down with probabilities that leave no error in the mean, drawn from PyTorch's generator
            of the device. `"balanced"` rounds up as often as down if the same number is written
            repeatedly; it uses a count of writes that the tensor stores, and no generator. Updates
            too small for the format then survive in the mean. Rounding applies to arithmetic and
            to conversions into the format. Operands that a comparison or a choice converts, and
            values that are filled in or placed by an index, are rounded to nearest.

    Attributes:
        name: short name; `Format.from_name` finds the format by it.
        components: the tensors that store a number, leading component first. Models compute with
            the leading component, and its dtype is the dtype of the tensor.
        numbers: the kind of numbers that arithmetic uses.
        rounding: how stored numbers are rounded.

    Raises:
        TypeError: `base` is not one of the four dtypes.
        ValueError: `terms` or `rounding` is not one of the values above.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.Format(torch.bfloat16, 2) is mcf.bf16x2
        True
        >>> mcf.bf16x3.precision, mcf.bf16x3.bytes
        (24, 6)
        >>> mcf.Format(torch.bfloat16, 2, rounding="stochastic").name
        'bf16x2sr'
    """

    name: str
    components: tuple[Component, ...]
    numbers: Numbers
    rounding: Rounding = "nearest"

    arithmetic: Arithmetic = "numbers"
    """How operators are carried out: on `"terms"`, with results in this format; on decoded
    `"numbers"`, by PyTorch, if the format only stores; by the format's `"rules"`; or `"plain"`, if
    the tensor is a plain tensor already."""

    rules: ClassVar[Rules | None] = None
    """The rules that carry operators out, if `arithmetic` is `"rules"`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an expansion format, unless a subclass is constructed."""
        return cls._of_floats(*args, **kwargs) if cls is Format else super().__new__(cls)

    def __init__(
        self,
        base: torch.dtype | None = None,
        terms: int | None = None,
        rounding: Rounding = "nearest",
    ) -> None:
        """Do nothing: `__new__` looks the format up, and subclasses need no initializer."""

    def register(self: F) -> F:
        """Register the format under its name and return it. It cannot be changed afterwards.

        Raises:
            TypeError: name, components or numbers are missing; the leading component is not a
                float; `encode` does not return the components.
            ValueError: another format has the name; numbers do not survive encode and decode.
        """
        for attribute in ("name", "components", "numbers"):
            if not hasattr(self, attribute):
                raise TypeError(f"Format: {type(self).__name__} does not define {attribute}")
        if not type(self).__module__.startswith("mcftensor."):
            require_codec(self)
        if _REGISTRY.setdefault(self.name, self) is not self:
            raise ValueError(f"Format: there is a format called {self.name!r} already")
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        self._require_open(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_open(name)
        super().__delattr__(name)

    def _require_open(self, name: str) -> None:
        if _REGISTRY.get(getattr(self, "name", "")) is self:
            raise AttributeError(f"Format: {name} of {self.name} is fixed; make another format")

    @staticmethod
    def from_name(name: str) -> Format:
        """Return the format of a name: `"bf16x2"`, or `"bf16x2sr"` with stochastic rounding.

        Raises:
            ValueError: no format has this name.
        """
        found = registered(name) if isinstance(name, str) else None
        if found is None or isinstance(found, PlainFormat):
            raise ValueError(
                f"Format: {name!r} is not the name of a format; names look like 'bf16x2': bf16, "
                "fp16, fp32 or fp64, an x, and 2 to 6 terms; or are one of "
                f"{', '.join(names_of_storage())}. Call register() on formats of "
                "other modules first"
            )
        return found

    def __reduce__(self) -> tuple[Callable[[str], Format], tuple[str]]:
        return named, (self.name,)

    def __repr__(self) -> str:
        return f"mcf.Format.from_name({self.name!r})"

    _in_place_of_dtype: ClassVar[Callable[..., Any]]
    _of_floats: ClassVar[Callable[..., Any]]  # `expansion_format.py` sets it

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle a format passed as a dtype to PyTorch; see `dispatch/format_as_dtype.py`."""
        kwargs = kwargs or {}
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Format))
        return cls._in_place_of_dtype(found, func, args, kwargs)

    # ---------------------------------------------------------------------------------- the codec

    def decode(self, stored: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the floats, leading one first, whose sum is the stored number; elementwise."""
        raise NotImplementedError(f"{type(self).__name__}: a format must define decode()")

    def encode(self, number: Sum, noise: Noise | None) -> Sequence[Tensor]:
        """Return the components of a number, rounded once; elementwise."""
        raise NotImplementedError(f"{type(self).__name__}: a format must define encode()")

    # ------------------------------------------------------------------ defaults that formats
    # override

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of tensors of this format and of their gradients: the leading component's."""
        return self.components[0].dtype

    @functools.cached_property
    def computes_as(self) -> tuple[str, tuple[int, ...]] | None:
        """The format that models compute with if blocks share a component: its name, and the
        indices of the components that it decodes to a number of this dtype.

        By default the leading component, if it is a float. None if blocks share nothing, and if no
        model can compute with the format, which then stores states only.
        """
        leading = self.components[0].dtype
        is_shared_float = bool(self.shared) and leading.is_floating_point
        return (PLAIN[leading].name, (0,)) if is_shared_float else None

    @property
    def bytes(self) -> float:
        """Bytes an element, without components that blocks share."""
        return sum(x.dtype.itemsize for x in self.components if not x.is_shared)

    @property
    def precision(self) -> int:
        """Significand bits of a number; a float32's by default."""
        return 24

    @property
    def exceeds_float64(self) -> bool:
        """Whether float64 rounds some numbers of this format; by default no."""
        return False

    @property
    def numbers_of_steps(self) -> Numbers:
        """The kind of numbers that fused steps use; by default that of arithmetic."""
        return self.numbers

    @property
    def smallest(self) -> tuple[float, float]:
        """The smallest number with all its bits, and the smallest number above zero."""
        normal = torch.finfo(self.numbers.dtype).smallest_normal
        return normal, normal * 2.0 ** (1 - self.precision)

    @property
    def largest(self) -> float:
        """The largest finite number; by default that of the machine type of the arithmetic."""
        base = torch.finfo(self.numbers.dtype)
        return base.max / (2 - base.eps) * (2 - 2.0 ** (1 - self.precision))

    def dtype_of_numbers(self, device: torch.device) -> torch.dtype:
        """Return the machine dtype that holds the bits of a number: float32, or else float64.

        Without float64 it is float32 for all formats of shorter terms.
        """
        if self.precision <= 24:
            return torch.float32
        return torch.float64 if self.dtype == torch.float64 else widest(device)

    @property
    def result(self) -> Format:
        """The format of results of out-of-place arithmetic.

        Storage formats return plain tensors of the dtype in which they compute.
        """
        return PLAIN[self.numbers.dtype]

    @functools.cached_property
    def of_gradients(self) -> Format | None:
        """The format in which a plain gradient of a parameter is read within a step, or None.

        It has the gradient as leading component, and a tail for numbers written to it. None if no
        format has that leading component.
        """
        longer = {torch.bfloat16: "bf16i16", torch.float16: "fp16i16", torch.float32: "fp32x2"}
        found = longer.get(self.dtype)
        return None if found is None else named(found)

    @property
    def gradient(self) -> Format:
        """The format of a parameter's gradient: by default a plain tensor of the same dtype."""
        return PLAIN[self.dtype]

    @property
    def of_sums(self) -> Format:
        """The format in which gradients of this format are summed; by default this format."""
        return self

    @property
    def of_states(self) -> Format:
        """The format of states created like a parameter.

        It is this format, unless its range suits weights only.
        """
        return self

    @property
    def is_exact(self) -> bool:
        """Whether the format holds every number of its arithmetic without rounding."""
        return False

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """The indices of components that blocks of elements share."""
        return frozenset(i for i, x in enumerate(self.components) if x.is_shared)

    @functools.cached_property
    def packed(self) -> frozenset[int]:
        """The indices of components with the codes of two elements in a byte."""
        return frozenset(i for i, x in enumerate(self.components) if x.is_packed)

    def layout(self, leading: Tensor) -> tuple[torch.Size, tuple[int, ...], Any]:
        """Return shape, strides and storage offset of a tensor with this leading component."""
        shape, strides, start = leading.shape, leading.stride(), leading.storage_offset()
        if not self.components[0].is_packed:
            return shape, strides, start
        return shape_of_codes(shape), (2 * strides[0], *strides[1:]), 2 * start

    def template(self, leading: Tensor) -> Tensor:
        """Return a tensor like those with this leading component: of their shape and device."""
        if not self.components[0].is_packed:
            return leading
        return leading.new_empty(()).expand(shape_of_codes(leading.shape))

    @functools.cached_property
    def takes_key(self) -> bool:
        """Whether rounding needs a key: a random key or a count of writes."""
        return self.rounding != "nearest"

    def with_rounding(self, rounding: Rounding) -> Format:
        """Return the same format with another rounding.

        Raises:
            ValueError: the format does not have this rounding.

        Examples:
            >>> import mcftensor as mcf
            >>> mcf.bf16x2.with_rounding("balanced").name
            'bf16x2br'
        """
        if rounding != self.rounding:
            raise ValueError(
                f"Format: {self.name} has no rounding {rounding!r}, only {self.rounding!r}"
            )
        return self

    @functools.cached_property
    def nearest(self) -> Format:
        """The same format, rounded to nearest."""
        return self.with_rounding("nearest") if self.takes_key else self

    def require(self, x: Tensor) -> None:
        """Raise ValueError for a tensor that the format cannot store."""
        for component in self.components:
            component.shape(x.shape)

    def empty_like(self, template: Tensor) -> list[Tensor]:
        """Return uninitialized components for a tensor with the layout of another one."""
        return [
            torch.empty_like(template, dtype=component.dtype)
            if (shape := component.shape(template.shape)) == template.shape
            else template.new_empty(shape, dtype=component.dtype)
            for component in self.components
        ]

    def normalized(self, stored: Floats) -> tuple[Floats, int]:
        """Return components in canonical form, and the number of inconsistent elements.

        The components come from elsewhere, such as a file. Components
        of an inconsistent element cannot belong together.
        """
        return stored, 0

    def rounded(self, number: Number) -> tuple[Floats, Number]:
        """Return the components of a number rounded to nearest, and the number they store."""
        raise NotImplementedError(f"{type(self).__name__}: its numbers are not terms")

    def extends(self, other: Format) -> bool:
        """Whether components of another format, with zeros appended, are components of this one."""
        return False

    def move(
        self, func: Any, stored: Floats, shape: torch.Size, args: Any, kwargs: Any, *, own: bool
    ) -> list[Any] | None:
        """Apply an operator that moves elements to each component of a tensor of shape `shape`.

        Returns one result per component, with its memory if `own` is set, else possibly views; or
        None if the operator must work on decoded numbers.
        """
        if self.shared:
            return move_rows(func, stored, shape, args, kwargs, own=own)
        return [move_component(func, x, args, kwargs) for x in stored]

    def leading(self, stored: Floats) -> Tensor:
        """Return the leading component as a number."""
        return stored[0]

    def about(self, stored: Floats) -> str:
        """Return the part of a tensor's repr after the numbers and the name of the format."""
        return ""

    def to_file(self, stored: Floats) -> Floats:
        """Return the components as files store them, with the same memory."""
        return stored

    def from_file(self, stored: Floats) -> Floats:
        """Return components from those in a file, with the same memory."""
        return stored


_REGISTRY: dict[str, Format] = {}


def registered(name: str) -> Format | None:
    """Return the format of a name, or the plain format of a dtype's name, or None."""
    if name not in _REGISTRY:
        wings.import_format(name)
    return _REGISTRY.get(name)


def named(name: str) -> Format:
    """Return the format of a name, or the plain format of a dtype's name.

    Raises:
        ValueError: no format has this name.
    """
    return _REGISTRY.get(name) or Format.from_name(name)


class PlainFormat(Format):
    """A plain tensor of any dtype."""

    arithmetic = "plain"

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self.components = (Component("values", dtype),)
        self.numbers = Machine(torch.float32 if dtype.itemsize <= 4 else torch.float64)

    @property
    def result(self) -> PlainFormat:
        """This format."""
        return self

    def decode(self, stored: Floats) -> Floats:
        """Return the tensor itself."""
        return stored

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Return the number, rounded once."""
        return (number.to(self.dtype),)


class StoredFormat(Format):
    """A format that only stores numbers computed in float32.

    Rounding is balanced, unless the name of the format says otherwise.
    """

    def __init__(self, stem: str, rounding: Rounding, *components: Component) -> None:
        self.stem, self.rounding, self.components = stem, rounding, components
        self.name = self._name(rounding)
        self.numbers = Machine(torch.float32)

    def _name(self, rounding: Rounding) -> str:
        return self.stem + {**SUFFIXES, "balanced": "", "nearest": "rn"}[rounding]

    def with_rounding(self, rounding: Rounding) -> Format:
        """Return the format with the same components and another rounding."""
        return named(self._name(rounding))

    def __repr__(self) -> str:
        if self.rounding == "balanced":
            return f"mcf.{self.name}"
        return f'mcf.{self.stem}.with_rounding("{self.rounding}")'


PLAIN = {
    dtype: PlainFormat(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""Plain tensors as formats."""

for _plain in PLAIN.values():
    _plain.register()


def names_of_storage() -> list[str]:
    """Return the public names of the storage formats of the library, which other modules define."""
    found = [x for x in _REGISTRY.values() if x.arithmetic == "numbers"]
    return [x.name for x in found if repr(x) == f"mcf.{x.name}"]


def bytes_of(components: Sequence[Component], shape: torch.Size) -> int:
    """Bytes of the components of a tensor of some shape."""
    return sum(x.dtype.itemsize * x.shape(shape).numel() for x in components)
