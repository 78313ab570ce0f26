"""Hooks that autograd calls when the gradient of a parameter is there."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mcftensor.tensor import MCFTensor

Self = TypeVar("Self", bound="Handle")


class Handle:
    """An object that removes hooks; as a context manager, at the end of the block."""

    _active = True

    def remove(self) -> None:
        """End it."""
        self._active = False

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class GradientHook:
    """A hook of many parameters, called with each when autograd has added to its gradient.

    It stays with expansions when they are moved or converted. A parameter that is in a cycle with
    its hook is never collected, so hooks have no parameters.
    """

    def __call__(self, p: Tensor) -> None:
        """Process the gradient of p."""
        raise NotImplementedError

    def attach(self, parameters: Iterable[Tensor]) -> None:
        """Become the hook of parameters."""
        for p in parameters:
            p.register_post_accumulate_grad_hook(self)
            if isinstance(p, MCFTensor):
                p._hooks = (*p._hooks, self)

    def __deepcopy__(self, memo: object) -> None:
        """Return no hook: copies of a parameter have none."""


class HandleHook(GradientHook):
    """Passes gradients on to the method `take` of a handle, as long as there is one."""

    def __init__(self, handle: Any) -> None:
        self.handle: Callable[[], Any] = weakref.ref(handle)

    @torch._disable_dynamo
    def __call__(self, p: Tensor) -> None:
        """Pass on a gradient."""
        handle = self.handle()
        if handle is not None:
            handle.take(p)


def trained(module: nn.Module) -> dict[Tensor, str]:
    """Return the parameters of a module that require grad, and their names."""
    return {p: name for name, p in module.named_parameters() if p.requires_grad}


class RefusesDDP:
    """In the place of the list of what DistributedDataParallel is to ignore, which it reads when it
    is made around a module. It keeps its owner alive as long as there is the module."""

    def __init__(self, reason: str, owner: object = None) -> None:
        self._reason, self._owner = reason, owner

    def __iter__(self) -> Iterator[str]:
        raise ValueError(self._reason)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return list, ()  # copies of a module have no handle


@contextlib.contextmanager
def assigned(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Return a context in which an object has another attribute."""
    before = vars(owner).get(name, assigned)
    setattr(owner, name, value)
    yield
    if vars(owner).get(name) is value and before is assigned:
        delattr(owner, name)
    elif vars(owner).get(name) is value:
        setattr(owner, name, before)


class _Thread(threading.local):
    ends: dict[Callable[[], None], None] | None = None


_thread = _Thread()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass is through that is running."""
    if _thread.ends is None:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    else:
        _thread.ends[function] = None


def is_beside_backward() -> bool:
    """Whether this thread works on gradients that backward has passed on, while it goes on."""
    return _thread.ends is not None


@contextlib.contextmanager
def beside_backward(ends: dict[Callable[[], None], None]) -> Iterator[None]:
    """Return a context in a thread beside that of backward, which keeps what is for its end."""
    _thread.ends = ends
    try:
        yield
    finally:
        _thread.ends = None


def call_hooks(p: Tensor) -> None:
    """Call the hooks of a parameter to whose gradient has been added, as autograd does."""
    for hook in list((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(p)
