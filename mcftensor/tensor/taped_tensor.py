"""Expansions that are on the tape of a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mcftensor.formats import Format
from mcftensor.tensor.components import COMPONENTS, Role
from mcftensor.tensor.pending_tensor import PromisedTensor
from mcftensor.tensor.tape import LOCK, Strand
from mcftensor.tensor.tensor import GradientTensor, MCFTensor

_wrapper: Any = Tensor._make_wrapper_subclass


class TapedTensor(PromisedTensor, MCFTensor):
    """An expansion with deferred operations, or one without components yet.

    Access to its components runs the operations. Then it becomes an MCFTensor.
    """

    _place: tuple[Strand, int]

    @classmethod
    def result(cls, layout: Any, format: Format, place: tuple[Strand, int]) -> TapedTensor:
        """Return a value that the tape will make."""
        device, shape, stride = layout
        made = _wrapper(cls, shape, strides=stride, dtype=format.dtype, device=device)
        made._place, made._format, made._role = place, format, "value"
        return made

    def leave_tape(self) -> None:
        """Become an MCFTensor, or a LostTensor if the components were never made."""
        is_there = COMPONENTS[0] in self.__dict__
        self.__class__ = MCFTensor if is_there else LostTensor  # type: ignore[assignment]
        del self._place

    def give_memory(self) -> list[Tensor] | None:
        """Take the memory of a result that has not been computed, and return it."""
        names = COMPONENTS[: len(self._format.components)]
        given = [self.__dict__.pop(name) for name in names if name in self.__dict__]
        return given if len(given) == len(names) else None

    def materialize(self) -> None:
        """Run the deferred operations, unless another thread has."""
        with LOCK:
            if isinstance(self, TapedTensor):
                self._place[0].run()
            if isinstance(self, TapedTensor):  # a signal has interrupted the run
                self.leave_tape()

    # Called by the name of the class: another thread may have made it an MCFTensor by now.

    def __reduce_ex__(self, protocol: Any) -> Any:
        TapedTensor.materialize(self)
        return self.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, Role, int]]:
        TapedTensor.materialize(self)
        return self.__tensor_flatten__()


class TapedGradient(TapedTensor, GradientTensor):
    """A plain gradient that deferred operations read and that nothing else aliases."""

    def leave_tape(self) -> None:
        """Become a GradientTensor, which may be written to."""
        self.__class__ = GradientTensor  # type: ignore[assignment]
        del self._place


class LostTensor(MCFTensor):
    """A tensor that was never made: its operation on the tape, or an earlier one, raised."""


def _lost(self: LostTensor) -> Tensor:
    raise RuntimeError(
        f"an expansion in {self._format.name} of shape {tuple(self.shape)} was never made: the "
        "operation that was to make it within a step of an optimizer raised an error. Make it anew"
    )


def _component(name: str, *default: None) -> Any:
    def read(self: TapedTensor) -> Any:
        if default and name not in self.__dict__:
            return default[0]
        TapedTensor.materialize(self)
        return getattr(self, name)

    def write(self: TapedTensor, component: Any) -> None:
        self.__dict__[name] = component

    return property(read, write)


for _name, _default in (("_writes", None), ("_factor", None)):  # the tape changes these, too
    setattr(TapedTensor, _name, _component(_name, _default))
for _name in COMPONENTS:
    setattr(TapedTensor, _name, _component(_name))
    setattr(LostTensor, _name, property(_lost))
