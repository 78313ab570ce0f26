"""Formats: the storage of numbers, and their arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Number, Numbers, Sum
from mcftensor.formats.moving import move_component, move_rows
from mcftensor.formats.registration_checks import require_codec

F = TypeVar("F", bound="Format")

Arithmetic = Literal["terms", "numbers", "plain", "rules"]


class Rules(Protocol):
    """How operators are carried out on tensors of a format, in place of `dispatch/`.

    `Format.rules` holds them; a tensor asks its format. `scaling/` has the rules of formats whose
    scales propagate.
    """

    def carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of one of PyTorch's operators."""

    def convert(self, x: Tensor, format: Any) -> Any:
        """Return a tensor in a format that has these rules; gradients pass through."""

    def convert_module(self, module: Any, format: Any, overrides: Any) -> Any:
        """Convert the parameters of a module, in place, and return it."""


SUFFIXES: dict[Rounding, str] = {"nearest": "", "stochastic": "sr", "balanced": "br"}
"""Of the names of formats."""


@dataclass(frozen=True)
class Component:
    """One of the tensors that store numbers."""

    name: str
    dtype: torch.dtype

    @property
    def is_shared(self) -> bool:
        """Whether it holds one number for each block of elements, in the shape of `shape`."""
        return False

    def shape(self, shape: torch.Size) -> torch.Size:
        """Its shape in a tensor of some shape: the same, unless a subclass says otherwise."""
        return shape


class Format:
    """How the elements of a tensor are stored, and what they are computed with.

    `Format(base, terms)` is a multi-component float: an unevaluated sum of `terms` floats of type
    `base`. Formats of other kinds are subclasses: they name their components, decode them, and
    encode numbers; everything else follows from that. There is one object of each name.

    Args:
        base: dtype of every term: bfloat16, float16, float32 or float64.
        terms: number of terms, from 2 to 6; at most 3 for float16, whose range ends there, and at
            most 5 where rounding is not to nearest, which is evaluated with one term more. One
            bfloat16 alone, not rounded to nearest, is a format too: updates that are too small for
            it survive in the mean.
        rounding: of the last term. `"nearest"`, ties to even; `"stochastic"`, up or down with
            probabilities that leave no error in the mean, drawn from PyTorch's generator of the
            device; or `"balanced"`, up as often as down where the same is written time and again,
            by a count of writes that the tensor keeps in place of a generator. Updates too small
            for the format then survive in the mean. It applies to arithmetic and to conversions
            into the format; what an expansion meets in a comparison or a choice, and what is
            filled in or placed by an index, is rounded to nearest.

    Attributes:
        name: short name; `Format.from_name` finds the format by it.
        components: what a number is stored in, the leading component first: the one that models
            compute with, and whose dtype is that of the tensor.
        numbers: the kind of numbers that arithmetic works on.
        rounding: of what is stored.

    Raises:
        TypeError: `base` is not one of the four dtypes.
        ValueError: `terms` or `rounding` is not one of those.

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
    """How operators are carried out: on `"terms"`, whose results are in this format; on decoded
    `"numbers"`, by PyTorch, where the format only stores what is computed in plain tensors; by the
    format's own `"rules"`; or `"plain"`, where a tensor is one already."""

    rules: ClassVar[Rules | None] = None
    """The rules that carry operators out, where the format has its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An expansion, if no other class is asked for."""
        return cls._of_floats(*args, **kwargs) if cls is Format else super().__new__(cls)

    def __init__(
        self,
        base: torch.dtype | None = None,
        terms: int | None = None,
        rounding: Rounding = "nearest",
    ) -> None:
        """What `Format(base, terms)` is called with; it is looked up, and subclasses need none."""

    def register(self: F) -> F:
        """Make the format known by its name, from when on it stays as it is, and return it.

        Raises:
            TypeError: it does not say its name, its components or its numbers; its leading
                component is no float; what it encodes are not its components.
            ValueError: another one has the name; what it stores does not come back.
        """
        for attribute in ("name", "components", "numbers"):
            if not hasattr(self, attribute):
                raise TypeError(f"Format: {type(self).__name__} does not say its {attribute}")
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
        """The format of a short name such as `"bf16x2"` or, rounded stochastically, `"bf16x2sr"`.

        Raises:
            ValueError: no format has this name.
        """
        found = _REGISTRY.get(name) if isinstance(name, str) else None
        if found is None or isinstance(found, PlainFormat):
            raise ValueError(
                f"Format: {name!r} is not the name of a format; names look like 'bf16x2': bf16, "
                "fp16, fp32 or fp64, an x, and 2 to 6 terms; or are one of "
                f"{', '.join(STORAGE)}. Formats of other modules are known once register() has "
                "been called there"
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
        """PyTorch comes here where a format is given as a dtype; see
        `dispatch/format_as_dtype.py`."""
        kwargs = kwargs or {}
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Format))
        return cls._in_place_of_dtype(found, func, args, kwargs)

    # ---------------------------------------------------------------------------------- the codec

    def decode(self, stored: Sequence[Tensor]) -> Sequence[Tensor]:
        """The floats, leading one first, whose sum is the number stored; elementwise."""
        raise NotImplementedError(f"{type(self).__name__}: a format says how it decodes")

    def encode(self, number: Sum, noise: Noise | None) -> Sequence[Tensor]:
        """What a number is stored as, with one rounding; elementwise."""
        raise NotImplementedError(f"{type(self).__name__}: a format says how it encodes")

    # ----------------------------------------------------------- what follows, unless a format says

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of tensors of this format, which gradients follow: the leading component's."""
        return self.components[0].dtype

    @functools.cached_property
    def lends(self) -> tuple[str, tuple[int, ...]] | None:
        """What a model computes with where blocks of elements share a component: the name of a
        format, and which of the components that format decodes to a number of this dtype.

        The leading component by default, if it is a float. None where blocks share nothing, and
        where no model can compute with the format, which then stores states alone.
        """
        leading = self.components[0].dtype
        is_lent = bool(self.shared) and leading.is_floating_point
        return (PLAIN[leading].name, (0,)) if is_lent else None

    @property
    def bytes(self) -> int:
        """Bytes an element, without what blocks of elements share."""
        return sum(x.dtype.itemsize for x in self.components if not x.is_shared)

    @property
    def precision(self) -> int:
        """Significand bits of a number, those of a float32 by default."""
        return 24

    @property
    def smallest(self) -> tuple[float, float]:
        """The smallest number that has all its bits, and the smallest one above zero."""
        normal = torch.finfo(self.numbers.dtype).smallest_normal
        return normal, normal * 2.0 ** (1 - self.precision)

    @property
    def largest(self) -> float:
        """The largest finite number; by default that of the type of the arithmetic."""
        base = torch.finfo(self.numbers.dtype)
        return base.max / (2 - base.eps) * (2 - 2.0 ** (1 - self.precision))

    @property
    def dtype_of_numbers(self) -> torch.dtype:
        """The machine type of as many bits as a number has: float32, or else float64."""
        return torch.float32 if self.precision <= 24 else torch.float64

    @property
    def result(self) -> Format:
        """The format of the results of arithmetic out of place.

        Storage formats return plain tensors of the type that they compute in.
        """
        return PLAIN[self.numbers.dtype]

    @property
    def of_gradients(self) -> Format | None:
        """The format in which a plain gradient of a parameter reads within a step: its number and
        no tail, and room for what is written to it. None where no format has that component."""
        longer = {torch.bfloat16: "bf16i16", torch.float16: "fp16i16", torch.float32: "fp32x2"}
        found = longer.get(self.dtype)
        return None if found is None else named(found)

    @property
    def gradient(self) -> Format:
        """The format of the gradient that a parameter gets: a plain tensor of the same dtype."""
        return PLAIN[self.dtype]

    @property
    def of_sums(self) -> Format:
        """The format in which gradients of this format are summed: the same."""
        return self

    @property
    def of_states(self) -> Format:
        """The format of what is made like a parameter: the same, unless its range is one for
        weights."""
        return self

    @property
    def is_exact(self) -> bool:
        """Whether it holds every number that arithmetic on it works with, without rounding."""
        return False

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """Which of the components blocks of elements share."""
        return frozenset(i for i, x in enumerate(self.components) if x.is_shared)

    @functools.cached_property
    def takes_key(self) -> bool:
        """Whether rounding takes a key: a random one, or a count of writes."""
        return self.rounding != "nearest"

    def with_rounding(self, rounding: Rounding) -> Format:
        """The same format, rounded in another way.

        Raises:
            ValueError: a way that it is not rounded in.

        Examples:
            >>> import mcftensor as mcf
            >>> mcf.bf16x2.with_rounding("balanced").name
            'bf16x2br'
        """
        if rounding != self.rounding:
            raise ValueError(
                f"Format: {self.name} is rounded to {self.rounding}, and not otherwise"
            )
        return self

    @functools.cached_property
    def nearest(self) -> Format:
        """The same format, rounded to nearest."""
        return self.with_rounding("nearest") if self.takes_key else self

    def require(self, x: Tensor) -> None:
        """Raise ValueError for a tensor that cannot be stored so."""
        for component in self.components:
            component.shape(x.shape)

    def empty_like(self, template: Tensor) -> list[Tensor]:
        """Components without data for a tensor laid out as another one."""
        return [
            torch.empty_like(template, dtype=component.dtype)
            if (shape := component.shape(template.shape)) == template.shape
            else template.new_empty(shape, dtype=component.dtype)
            for component in self.components
        ]

    def normalized(self, stored: Floats) -> tuple[Floats, int]:
        """Components that come from elsewhere in the one form that their numbers have, and how many
        elements have some that cannot belong together."""
        return stored, 0

    def rounded(self, number: Number) -> Number:
        """Return what a number is once it is stored, to nearest, without storing it."""
        raise NotImplementedError(f"{type(self).__name__}: its numbers are not terms")

    def extends(self, other: Format) -> bool:
        """Return whether components of another format, with zeros appended, are components of this
        one."""
        return False

    def move(
        self, func: Any, stored: Floats, shape: torch.Size, args: Any, kwargs: Any, *, own: bool
    ) -> list[Any] | None:
        """Return what an operator that moves elements makes of each component of a tensor of some
        shape, in memory of their own or as views.

        None if it has to work on decoded numbers.
        """
        if self.shared:
            return move_rows(func, stored, shape, args, kwargs, own=own)
        return [move_component(func, x, args, kwargs) for x in stored]

    def leading(self, stored: Floats) -> Tensor:
        """The leading component as a number."""
        return stored[0]

    def about(self, stored: Floats) -> str:
        """Return what the repr of a tensor shows besides numbers and the name of the format."""
        return ""

    def to_file(self, stored: Floats) -> Floats:
        """Components as files have them, with the same memory."""
        return stored

    def from_file(self, stored: Floats) -> Floats:
        """Components that a file has, with the same memory."""
        return stored


_REGISTRY: dict[str, Format] = {}


def named(name: str) -> Format:
    """The format of a name, or of plain tensors of the dtype that has this name."""
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
        """Itself."""
        return self

    def decode(self, stored: Floats) -> Floats:
        """Itself."""
        return stored

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Rounded once."""
        return (number.to(self.dtype),)


class StoredFormat(Format):
    """A format that only stores what is computed in float32, rounded balanced unless its name says
    otherwise."""

    def __init__(self, stem: str, rounding: Rounding, *components: Component) -> None:
        self.stem, self.rounding, self.components = stem, rounding, components
        self.name = self._name(rounding)
        self.numbers = Machine(torch.float32)

    def _name(self, rounding: Rounding) -> str:
        return self.stem + {**SUFFIXES, "balanced": "", "nearest": "rn"}[rounding]

    def with_rounding(self, rounding: Rounding) -> Format:
        """The same components."""
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

STORAGE = ("bf16i16", "bf16i8", "fp16i16", "fp16i8", "e4m3i16", "e4m3i8", "mxfp8", "ue5m3")
"""Names of the formats that only store, of other modules."""


def bytes_of(components: Sequence[Component], shape: torch.Size) -> int:
    """Bytes of the components of a tensor of some shape."""
    return sum(x.dtype.itemsize * x.shape(shape).numel() for x in components)
