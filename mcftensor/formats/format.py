"""Formats: how numbers are stored, and what they are computed with."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mcftensor.arithmetic import networks
from mcftensor.arithmetic.base_types import BASES
from mcftensor.arithmetic.machine_numbers import Machine, Wide
from mcftensor.arithmetic.network_numbers import Network
from mcftensor.arithmetic.noise import Noise, Rounding
from mcftensor.arithmetic.number_protocol import Floats, Number, Numbers, Sum
from mcftensor.arithmetic.rounding import peel, quiet, round_to_terms
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
MAX_TERMS = 6
"""What float64 can evaluate of bfloat16, and what the range of float32 holds near 1."""


@dataclass(frozen=True)
class Component:
    """A tensor among those that numbers are stored in."""

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
        return of_floats(*args, **kwargs) if cls is Format else super().__new__(cls)

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

    @property
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
        """The largest finite number, that of the type that numbers are computed in by default."""
        base = torch.finfo(self.numbers.dtype)
        return base.max / (2 - base.eps) * (2 - 2.0 ** (1 - self.precision))

    @property
    def dtype_of_numbers(self) -> torch.dtype:
        """The machine type of as many bits as a number has: float32, or else float64."""
        return torch.float32 if self.precision <= 24 else torch.float64

    @property
    def result(self) -> Format:
        """The format of what arithmetic gives out of place.

        One that only stores numbers gives plain tensors of the type that it computes in.
        """
        return PLAIN[self.numbers.dtype]

    @property
    def of_gradients(self) -> Format | None:
        """The format in which a plain gradient of a parameter reads within a step: its number and
        no tail, and room for what is written to it. None where no format has that component."""
        found = {torch.bfloat16: "bf16i16", torch.float32: "fp32x2"}.get(self.dtype)
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

    @property
    def takes_key(self) -> bool:
        """Whether rounding takes a key: one that is drawn, or a count of writes."""
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
        """Whether components of another format, with zeros behind them, are those of this one."""
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
        """What a tensor shows beside its numbers and the name of its format."""
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
    """A plain tensor: one float, or whatever else a dtype holds."""

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


class ExpansionFormat(Format):
    """Unevaluated sums of floats of one type; `Format(base, terms, rounding)` makes these."""

    arithmetic = "terms"
    base: torch.dtype
    terms: int

    def __new__(
        cls, base: torch.dtype, terms: int, rounding: Rounding = "nearest"
    ) -> ExpansionFormat:
        """The one format of these."""
        _check(base, terms, rounding)
        name = f"{BASES[base].name}x{terms:d}{SUFFIXES[rounding]}"
        if name in _REGISTRY:
            return _REGISTRY[name]  # type: ignore[return-value]
        self: ExpansionFormat = object.__new__(cls)
        self.name, self.base, self.terms, self.rounding = name, base, terms, rounding
        self.components = tuple(Component(f"term{i}", base) for i in range(terms))
        spare = self.takes_key  # networks compute one term more, to round it off
        wide = self.wide
        self.numbers = Network(base, terms + spare) if wide is None else Machine(wide)
        return self.register()

    @property
    def base_precision(self) -> int:
        """Significand bits p of one term, the implicit one counted."""
        return BASES[self.base].precision

    @property
    def precision(self) -> int:
        """Significand bits of the whole, `terms` times those of one term."""
        return self.terms * self.base_precision

    @property
    def u(self) -> float:
        """Unit roundoff of the base, 2^-p. Error bounds are stated in powers of it."""
        return 2.0**-self.base_precision

    @property
    def min_exponent(self) -> int:
        """Exponent e of the smallest normal number 2^e of the base."""
        return BASES[self.base].min_exponent

    @property
    def max_exponent(self) -> int:
        """Exponent e of the largest numbers: every finite one is below 2^(e+1)."""
        return BASES[self.base].max_exponent

    def extends(self, other: Format) -> bool:
        """Whether it has terms of the same float, and as many at least."""
        if not isinstance(other, ExpansionFormat):
            return False
        return other.base == self.base and other.terms <= self.terms

    @property
    def full_precision_min(self) -> float:
        """Smallest magnitude at which a number is held to u^n for n terms.

        Below it the last term falls among the subnormals of the base, loses bits, and at last
        vanishes.
        """
        return 2.0 ** (self.min_exponent + (self.terms - 1) * self.base_precision)

    @property
    def wide(self) -> torch.dtype | None:
        """Machine dtype in which arithmetic of this format is evaluated and then split.

        None for bases of 32 and 64 bits and for more than three terms: there, networks of
        error-free transformations work.
        """
        if self.base.itemsize > 2 or self.terms > 3:
            return None
        in_float32 = self.terms == 2 and self.rounding == "nearest"
        return torch.float32 if in_float32 else torch.float64

    @property
    def result(self) -> ExpansionFormat:
        """Arithmetic gives expansions."""
        return self

    @property
    def of_gradients(self) -> Format:
        """The same terms."""
        return self.nearest

    def with_rounding(self, rounding: Rounding) -> ExpansionFormat:
        """The same terms, the last of them rounded in another way."""
        return ExpansionFormat(self.base, self.terms, rounding)

    def __repr__(self) -> str:
        if self in FORMATS:
            return f"mcf.{self.name}"
        rounding = f', rounding="{self.rounding}"' if self.takes_key else ""
        return f"mcf.Format({self.base}, {self.terms}{rounding})"

    def decode(self, stored: Floats) -> Floats:
        """The terms themselves."""
        return stored

    def encode(self, number: Sum, noise: Noise | None) -> Floats:
        """Normalized terms."""
        leading, *tails = number.split(self.base, self.terms, noise)
        return [quiet(leading), *tails]

    def normalized(self, stored: Floats) -> tuple[Floats, int]:
        """Normalized terms; those do not belong together of which one is more than half an ulp of
        the one before it."""
        parts = [stored]
        if all(x.is_contiguous() and x.numel() > _BLOCK for x in stored):  # memory is read once
            parts = list(zip(*(x.view(-1).split(_BLOCK) for x in stored), strict=True))
        found, misfits = zip(*map(_normalized, parts), strict=True)
        if all(map(operator.is_, found, parts)):
            return stored, 0
        return [torch.cat(x).view_as(stored[0]) for x in zip(*found, strict=True)], sum(misfits)

    def rounded(self, number: Number) -> Number:
        """A number rounded to nearest in this format, to go on with."""
        if not isinstance(number, Wide):
            return number  # networks have rounded it
        total = round_to_terms(number.value, self.base, self.terms)
        return Wide([x.to(total.dtype) for x in peel(total, self.base, self.terms)], total)


_BLOCK = 1 << 16


def _normalized(stored: Floats) -> tuple[Floats, int]:
    """`Format.normalized` of some elements; the same object where nothing is to be done."""
    fits, is_settled = torch.ones_like(stored[0], dtype=torch.bool), True
    for i, (a, b) in enumerate(itertools.pairwise(stored)):
        total = a + b
        if torch.equal(total, a):
            continue
        where = (total != a).nonzero(as_tuple=True)
        a, b = a[where], b[where]
        moved = total[where] - a  # by an ulp on a tie
        stays, is_tie = b == 0, b.isfinite() & (moved == b + b)
        fits[where] &= stays | is_tie
        if i + 2 < len(stored):  # a tie is settled where what follows says that a is the nearer one
            stays |= is_tie & (stored[i + 2][where].sign() == -b.sign())
        is_settled &= bool(stays.all())
    if is_settled:
        return stored, 0
    terms = networks.settle(networks.distill(stored, len(stored)), stored[0])
    return terms, int(fits.numel() - fits.count_nonzero())


def of_floats(
    base: torch.dtype | None = None, terms: int | None = None, rounding: Rounding = "nearest"
) -> Format:
    """What `Format(base, terms, rounding)` gives."""
    if base == torch.bfloat16 and terms == 1 and rounding in SUFFIXES and rounding != "nearest":
        return named("bf16" + SUFFIXES[rounding])
    return ExpansionFormat(base, terms, rounding)  # type: ignore[arg-type]


def _check(base: Any, terms: Any, rounding: Any) -> None:
    if base not in BASES:
        raise TypeError(
            f"Format: base {base!r} is not a dtype that expansions are made of; "
            "use torch.bfloat16, float16, float32 or float64"
        )
    if rounding not in get_args(Rounding):
        raise ValueError(
            f"Format: rounding {rounding!r} given; it is 'nearest', 'stochastic' or 'balanced'"
        )
    most = _most_terms(base, rounding)
    if not (isinstance(terms, int) and 2 <= terms <= most):
        raise ValueError(
            f"Format: {terms!r} terms given; expansions of {BASES[base].name} with "
            f"{rounding} rounding have 2 to {most}"
        )


def _most_terms(base: torch.dtype, rounding: Rounding) -> int:
    return 3 if base == torch.float16 else MAX_TERMS - (rounding != "nearest")


PLAIN = {
    dtype: PlainFormat(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""Plain tensors as formats."""

for _plain in PLAIN.values():
    _plain.register()
for _base, _rounding in itertools.product(BASES, get_args(Rounding)):
    for _terms in range(2, _most_terms(_base, _rounding) + 1):
        ExpansionFormat(_base, _terms, _rounding)

bf16x2 = ExpansionFormat(torch.bfloat16, 2)
bf16x3 = ExpansionFormat(torch.bfloat16, 3)
fp16x2 = ExpansionFormat(torch.float16, 2)
fp32x2 = ExpansionFormat(torch.float32, 2)
fp32x3 = ExpansionFormat(torch.float32, 3)
fp64x2 = ExpansionFormat(torch.float64, 2)

FORMATS = (bf16x2, bf16x3, fp16x2, fp32x2, fp32x3, fp64x2)
"""The expansions that have a name of their own."""

STORAGE = ("bf16i16", "bf16i8", "e4m3i16", "e4m3i8", "mxfp8", "ue5m3")
"""Names of the formats that only store, of other modules."""


def bytes_of(components: Sequence[Component], shape: torch.Size) -> int:
    """Bytes of the components of a tensor of some shape."""
    return sum(x.dtype.itemsize * x.shape(shape).numel() for x in components)


def is_vector(shape: torch.Size) -> bool:
    """Whether at most one dimension is longer than 1, as of gains and biases."""
    return sum(length > 1 for length in shape) <= 1


def default_format(shape: torch.Size) -> ExpansionFormat:
    """The format a tensor of this shape gets when none is asked for.

    `bf16x3` for at most one dimension longer than 1, else `bf16x2`: norm weights live near 1,
    where two terms lose much of a small update, and such tensors are small.
    """
    return bf16x3 if is_vector(shape) else bf16x2


def require_format(format: object, where: str, *, with_rules: bool = False) -> Format:
    """`format` itself if it is a Format, or the one of this name, else a TypeError that names the
    caller `where`; formats that have rules of their own are let through where that is asked."""
    found = _REGISTRY.get(format) if isinstance(format, str) else format
    if isinstance(found, Format) and not isinstance(found, PlainFormat):
        if found.rules is None or with_rules:
            return found
        raise TypeError(
            f"{where}: {found.name} has one scale for each tensor, and is not accepted here; "
            "mcf.as_expansion(x, format) and mcf.scaling.scalify(model, format) take it"
        )
    known = ", ".join(f"mcf.{name}" for name in [*(f.name for f in FORMATS), *STORAGE])
    plain = isinstance(format, torch.dtype) or isinstance(found, PlainFormat)
    raise TypeError(
        f"{where}: {format!r} is {'a plain dtype' if plain else 'not a format'}; give one of "
        f"{known}, its name as a string, or build one with mcf.Format"
        + ("; None leaves a tensor as it is" if plain and "overrides" in where else "")
    )


def require_floats(format: object, where: str) -> Format:
    """Return a format of floats, plain ones too: `format` itself, or that of a dtype or a name.

    Raises:
        TypeError: anything else; the message names the caller `where`.
    """
    found = PLAIN[format] if isinstance(format, torch.dtype) else format
    found = named(found) if isinstance(found, str) else found
    if isinstance(found, Format) and found.dtype.is_floating_point:
        return found
    raise TypeError(
        f"{where}: {format!r} is no format of floats; give mcf.bf16i16, torch.float32, or the name "
        "of one"
    )


def require_expansion_format(format: object, where: str) -> ExpansionFormat:
    """The same for what works on terms alone."""
    if isinstance(found := require_format(format, where), ExpansionFormat):
        return found
    raise TypeError(f"{where}: {format!r} does not consist of terms")
