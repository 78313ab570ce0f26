"""`ComponentTensor`: a tensor that is held as components, and who shares their memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from mcftensor.arithmetic.rounding import collapse_terms
from mcftensor.arithmetic.write_counts import moved, writes_of
from mcftensor.formats import MAX_TERMS, Format, bytes_of
from mcftensor.passes.format_conversion import collapse, lent
from mcftensor.tensor.first_expansion import WAITING, prepare
from mcftensor.tensor.pending_scale import PendingScale
from mcftensor.tensor.step_context import current_step
from mcftensor.tensor.tape import Strand

Role = Literal["value", "parameter"]

COMPONENTS = tuple(f"_component{i}" for i in range(MAX_TERMS))


_OF_COMPONENTS = ("_writes", "_first", "_factor", "_base_components", "_is_own")
"""What is said of components beside them."""


def require_computing(format: Format) -> None:
    """Raise TypeError for a format that parameters cannot have."""
    if format.shared and format.lends is None:
        raise TypeError(
            f"Parameter: {format.name} stores the states of optimizers; a model computes "
            "with the leading component of its parameters, and here that is codes. Take "
            "mcf.bf16i8, mcf.bf16i16 or mcf.e4m3i8"
        )


class ComponentTensor(torch.Tensor):
    """A tensor whose elements are held as components: terms, codes and scales.

    This is what `MCFTensor` holds; its other base classes are what PyTorch asks of it.
    """

    _component0: Tensor
    _component1: Tensor
    _format: Format
    _role: Role
    _writes: Tensor | None = None  # where rounding is balanced, the count of `write_counts.py`
    _first: int = 0  # of a view: the place of its first element in what that is the count of
    _factor: PendingScale | None = (
        None  # by which it is yet to be multiplied, where scales are shared
    )
    # Of a view that shares the exponent of its base: the components of the base.
    _base_components: tuple[Tensor, ...] | None = None
    _is_own: bool = False  # nobody else has its memory
    _has_rules: bool = False  # whether its format has, which compilers ask
    _place: tuple[Strand, int] | None = None  # of a TapedTensor: where it is on the tape
    # The module that had it when it was converted, its name there, and its own identity: copies, to
    # which attributes go as they are, have another one.
    _holder: tuple[weakref.ref[torch.nn.Module], str, int] | None = None
    _hooks: tuple[Callable[[Tensor], None], ...] = ()  # on gradients; they stay when it is moved

    # Makes a tensor of components; `MCFTensor` defines it.
    of: ClassVar[Callable[..., Any]]

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
        """What balanced rounding goes by: the count of writes from the first element on."""
        return None if self._writes is None else moved(self._writes, self._first)

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
        if self._format.lends is not None:
            return lent(self._read(), self._format)
        return self._format.leading(self._read()) if self._has_rules else self._component0

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

    def hold_as(self, other: ComponentTensor) -> None:
        """Hold what another tensor of the same shape, strides, dtype and device holds."""
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
        """The exponent s of all elements, where the format has one: an int32 without dimensions on
        the device of the data. Views share it."""
        if not self._has_rules:
            raise AttributeError(f"a tensor in {self._format.name} has no exponent")
        return self._held()[-1]

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
            require_computing(self._format)
        self.__dict__["_parameter"] = flag
        if flag:
            self._role = "value" if self._has_rules else "parameter"
            for hook in self._hooks if self.requires_grad else ():
                self.register_post_accumulate_grad_hook(hook)

    def _collapsed(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The numbers as plain floats, rounded once."""
        if self._has_rules:
            return collapse_terms(self._format.decode(self._read()), dtype)
        return collapse(self._read(), self._format.name, dtype)

    def _lying(self) -> Tensor:
        """The leading component where it lies."""
        return self._component0


def _is_sole_holder(x: Tensor) -> bool:
    """Whether no other tensor has its memory."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # of which the storage object is one


T = TypeVar("T", bound=ComponentTensor)


def wrapper(cls: type[T], like: Tensor, format: Format) -> T:
    """A tensor without storage, with the layout of another one and the dtype of a format."""
    if WAITING:
        prepare()
    place = like.storage_offset()
    others: dict[str, Any] = {"storage_offset": place} if place else {}  # what is rare takes long
    if like.layout is not torch.strided:
        others["layout"] = like.layout
    made: T = torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=format.dtype, device=like.device, **others
    )
    return made
