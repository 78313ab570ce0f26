"""The step of an optimizer that this thread is in.

Within it a parameter acts as a value, unless autograd records the operation, and its gradient reads
as an expansion (`MCFTensor.grad`). While autograd does not record, operations may be deferred
(`tape.py`). A closure that the step calls is outside of it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from mcftensor.tensor.tape import Tape

R = TypeVar("R")


class Step:
    """The state of a step, which may be nested in another one."""

    def __init__(self, outer: Step | None) -> None:
        # Keyed by the id of a parameter: its plain gradient, and the tensor that it reads as.
        self.gradients: dict[int, tuple[Tensor, Any]] = {} if outer is None else outer.gradients
        # For each tensor, how many tensors were made like it.
        self.made: WeakIdKeyDictionary = WeakIdKeyDictionary() if outer is None else outer.made
        self.tape = Tape()
        self.is_outermost = outer is None
        self.has_plain_states = False  # by the mode given to `collage`
        # Whether the step function was assigned to an optimizer or its class. The steps of classes
        # that it calls are then steps of their own.
        self.is_assigned = False

    def number_beside(self, x: Tensor) -> int:
        """Return the number of tensors made like this one before."""
        number: int = self.made.get(x, 0)
        self.made[x] = number + 1
        return number

    def materialize_all(self) -> None:
        """Run the tape and allocate the tails of gradients, so that all tensors have their final
        types.
        """
        self.tape.run()
        for _, read in self.gradients.values():
            if hasattr(read, "grow_tails"):
                read.grow_tails()

    def end(self) -> None:
        """Run the tape, and detach gradients from the step."""
        try:
            self.tape.run()
        finally:
            if self.is_outermost:
                self.made.clear()
                self.let_go()

    def let_go(self) -> None:
        """Bring plain gradients up to date, and stop sharing their memory with gradient tensors.

        From now on other code may write to the plain gradients. A gradient tensor that is still
        referenced gets its own memory.
        """
        errors: list[Exception] = []
        left = [_left(*pair, errors) for pair in self.gradients.values()]
        self.gradients.clear()
        for reference in left:
            read = reference()
            if read is not None:
                read.leave_gradient()
        if errors:
            raise errors[0]


def _left(plain: Tensor, read: Any, errors: list[Exception]) -> Callable[[], Any]:
    """Bring one plain gradient up to date, and return a weak reference to its gradient tensor."""
    if hasattr(read, "leave_gradient"):
        return weakref.ref(read)
    try:
        if read is not plain and read._version:
            plain.copy_(read)
    except Exception as error:  # noqa: BLE001
        errors.append(error)
    return lambda: None


# Looked up once, because every operation calls them.
_records_gradients = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_count_modes = torch._C._len_torch_dispatch_stack
_interpreter = torch._C._functorch.peek_interpreter_stack
_is_profiled = torch.autograd._profiler_enabled


class _Thread(threading.local):
    step: Step | None = None


_thread = _Thread()


def current_step() -> Step | None:
    """Return the step that this thread is in, or None."""
    return _thread.step


def is_unwatched() -> bool:
    """Return whether only eager PyTorch runs: no autograd, mode, functorch transform or profiler.

    Code that a compiler may trace has to test for that first.
    """
    return not (
        _records_gradients()
        or _is_inference()
        or _count_modes()
        or _interpreter() is not None
        or _is_profiled()
        or forward_ad._current_level >= 0
    )


def open_tape() -> Tape | None:
    """Return the tape for operations of this thread: within a step, without an observing mode."""
    step = _thread.step
    return step.tape if step is not None and is_unwatched() else None


# These are functions instead of context managers. A KeyboardInterrupt may cut the end of a context
# manager written in Python. Its end may also run when the traceback is freed, in another step.


def in_step(function: Callable[[Step], R]) -> R:
    """Call a function within a new step of this thread, which may be nested in another one."""
    outer = _thread.step
    step = Step(outer)
    try:
        _thread.step = step
        return function(step)
    finally:
        _thread.step = outer
        step.end()


def outside(function: Callable[[], R]) -> R:
    """Call a function outside of the step that this thread is in."""
    step = _thread.step
    try:
        _thread.step = None
        return function()
    finally:
        _thread.step = step


def closure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs outside of the step that calls it, and may write to gradients."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        step = current_step()

        def left() -> Any:
            if step is not None:
                step.tape.run()
                step.let_go()
            return function(*args, **kwargs)

        return outside(left)

    return called
