"""What a format is: how numbers are stored, and what they are computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from mcftensor.arithmetic.numbers import Numbers, Sum

F = TypeVar("F", bound="Format")
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Component:
    """A tensor among those that numbers are stored in."""

    name: str
    dtype: torch.dtype

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
            most 5 with stochastic rounding, which is evaluated with one term more.
        rounding: of the last term. `"nearest"`, ties to even; or `"stochastic"`, up or down with
            probabilities that leave no error in the mean, drawn from PyTorch's generator of the
            device. Updates too small for the format then survive in the mean. It applies to
            arithmetic and to conversions into the format; what an expansion meets in a comparison
            or a choice, and what is filled in or placed by an index, is rounded to nearest.

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
    is_plain = False
    """Whether it is that of plain tensors of a dtype, which has the dtype's name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """One of the formats made of floats, if no other class is asked for."""
        if cls is Format:
            return _of_floats[0](*args, **kwargs)
        return super().__new__(cls)

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
            TypeError: it does not say its name, its components or its numbers.
            ValueError: another one has the name.
        """
        for attribute in ("name", "components", "numbers"):
            if not hasattr(self, attribute):
                raise TypeError(f"Format: {type(self).__name__} does not say its {attribute}")
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
        if found is None or found.is_plain:
            raise ValueError(
                f"Format: {name!r} is not the name of a format; names look like 'bf16x2': bf16, "
                "fp16, fp32 or fp64, an x, and 2 to 6 terms. Formats of other modules are known "
                "once register() has been called there"
            )
        return found

    def __reduce__(self) -> tuple[Callable[[str], Format], tuple[str]]:
        return format_named, (self.name,)

    def __repr__(self) -> str:
        return f"mcf.Format.from_name({self.name!r})"

    # ---------------------------------------------------------------------------------- the codec

    def decode(self, stored: Sequence[Tensor]) -> Sequence[Tensor]:
        """The floats, leading one first, whose sum is the number stored; elementwise."""
        raise NotImplementedError(f"{type(self).__name__}: a format says how it decodes")

    def encode(self, number: Sum, noise: Tensor | None) -> Sequence[Tensor]:
        """What a number is stored as, with one rounding; elementwise."""
        raise NotImplementedError(f"{type(self).__name__}: a format says how it encodes")

    # ----------------------------------------------------------- what follows, unless a format says

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of tensors of this format, which gradients follow: the leading component's."""
        return self.components[0].dtype

    @property
    def bytes(self) -> int:
        """Bytes an element, where all components have the shape of the tensor."""
        return sum(component.dtype.itemsize for component in self.components)

    @property
    def precision(self) -> int:
        """Significand bits of a number, those of a float32 by default."""
        return 24

    @property
    def result(self) -> Format:
        """The format of what arithmetic gives out of place.

        One that only stores numbers gives plain tensors of the type that it computes in.
        """
        return named(str(self.numbers.dtype).removeprefix("torch."))

    @property
    def nearest(self) -> Format:
        """The same format, rounded to nearest."""
        return self

    def empty_like(self, template: Tensor) -> list[Tensor]:
        """Components without data for a tensor laid out as another one."""
        return [
            torch.empty_like(template, dtype=component.dtype)
            if (shape := component.shape(template.shape)) == template.shape
            else template.new_empty(shape, dtype=component.dtype)
            for component in self.components
        ]

    def moves(self, func: Any) -> bool:
        """Whether an operator that moves elements may act on each component by itself."""
        return True


_REGISTRY: dict[str, Format] = {}
_of_floats: list[type[Format]] = []  # the class that makes `Format(base, terms)`, defined later


def named(name: str) -> Format:
    """The format of a name, or of plain tensors of the dtype that has this name."""
    return _REGISTRY.get(name) or Format.from_name(name)


def format_named(name: str) -> Format:
    """`Format.from_name`, for pickles."""
    return Format.from_name(name)
