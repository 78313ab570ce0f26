"""An optimizer at work, and the bytes that it holds and moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass
class Running:
    """One optimizer over its own parameters and gradients."""

    parameters: list[Tensor]  # what a model computes with
    gradients: list[Tensor]
    optimizer: Any  # with `state` and `param_groups`
    step: Callable[[], object]
    written_only: bool = False  # parameters that are rounded from master weights are not read

    def prepare(self) -> None:
        """Give back the gradients, which some optimizers take away."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    @property
    def elements(self) -> int:
        """How many parameters there are, counted by elements."""
        return sum(parameter.numel() for parameter in self.parameters)

    def held(self) -> int:
        """Bytes of all that stays between two steps: parameters, gradients, states."""
        groups = self.optimizer.param_groups
        inner = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        return size(storages([self.parameters, self.gradients, inner, self._states()]))

    def added(self) -> int:
        """The bytes that remain in addition to one plain parameter and one gradient each."""
        plain = sum(p.numel() * p.element_size() for p in self.parameters)
        return self.held() - plain - size(storages(self.gradients))

    def moved(self) -> int:
        """Bytes that a step must read and write.

        Gradients are read once, states and every term of the parameters read and written once.
        What an implementation moves besides, in separate passes or for temporaries, does not count.
        """
        gradients, parameters = storages(self.gradients), storages(self.parameters)
        states = {
            key: nbytes
            for key, nbytes in storages(self._states()).items()
            if key not in gradients and key not in parameters
        }
        passes = 1 if self.written_only else 2
        return size(gradients) + 2 * size(states) + passes * size(parameters)

    def _states(self) -> list[Any]:
        return [dict(self.optimizer.state), [dict(group) for group in self.optimizer.param_groups]]


def storages(held: object) -> dict[int, int]:
    """Address and bytes of each memory block behind the tensors in `held`, counters aside."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in plain_tensors(held)
        if tensor.dim() > 0
    }


def size(blocks: Mapping[int, int]) -> int:
    """Bytes of all blocks."""
    return sum(blocks.values())


def plain_tensors(held: object) -> Iterator[Tensor]:
    """The plain tensors in containers and objects; a tensor subclass gives those it wraps."""
    if isinstance(held, Tensor):
        if is_traceable_wrapper_subclass(held):
            names, _ = held.__tensor_flatten__()
            yield from plain_tensors([getattr(held, name) for name in names])
        else:
            yield held
    elif isinstance(held, Mapping):
        yield from plain_tensors(list(held.values()))
    elif isinstance(held, (list, tuple, set)):
        for part in held:
            yield from plain_tensors(part)
    else:
        yield from plain_tensors(attributes(held))


def attributes(held: object) -> list[Tensor]:
    """Return the tensors among the attributes of an object: a peer may keep a state as its own
    class.
    """
    if isinstance(held, type):
        return []
    slots = getattr(type(held), "__slots__", ())
    named = [getattr(held, slot, None) for slot in ([slots] if isinstance(slots, str) else slots)]
    every = [*named, *getattr(held, "__dict__", {}).values()]
    return [attribute for attribute in every if isinstance(attribute, Tensor)]
