"""The policy for implicit roundings, where an expansion is written into a plain tensor."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mcftensor.arithmetic.base_types import BASES
from mcftensor.formats import Format
from mcftensor.kernels.columns import is_bare
from mcftensor.kernels.without_float64 import widest
from mcftensor.tensor.step_context import current_step

Action = Literal["ignore", "warn", "raise"]
_ACTIONS = ("ignore", "warn", "raise")
_FOLDERS = tuple(
    f"{Path(str(sys.modules[name].__file__)).parent}{os.sep}" for name in ("torch", "mcftensor")
)

R = TypeVar("R")


class RoundedWarning(UserWarning):
    """An expansion, or an update of one, was rounded without a request for it.

    The warning appears once for each line of the caller's code. `when_rounded` changes it to an
    error or to nothing.
    """


class RoundedError(FloatingPointError):
    """An expansion would be rounded implicitly, and `when_rounded("raise")` forbids it."""


class _Thread(threading.local):
    action: Action = "warn"


_thread = _Thread()


class when_rounded:
    """Set what happens if an expansion is rounded to a plain tensor implicitly.

    The setting holds for this thread from the call on. As a context manager it restores the former
    one at the end, as `numpy.errstate` and `torch.set_grad_enabled` do.

    A rounding is implicit if an operation writes an expansion, or a result computed from a value,
    into a given plain floating tensor whose dtype has fewer bits than the format:
    `plain.copy_(x)`, `plain[i] = x`, `plain.add_(x)`, `torch.stack(xs, out=plain)`. These are not
    implicit roundings:

    - conversions, which request the rounding: `mcf.as_plain`, `x.to(dtype)` to another dtype than
      the terms have, `float(x)`, `x.numpy()`, and any other conversion to NumPy;
    - writes to targets that represent every number of the format to its promised bits: float32 for
      `bf16x2`, `bf16x3` and `bf16i16`, float64 for these and `fp32x2`; and to integer targets;
    - writes to expansions, which round to their own format, except that `load_state_dict` of a
      module names what it rounds to a narrower one;
    - arithmetic on parameters outside of a step, which uses leading terms. A copy of a parameter
      into a plain tensor is an implicit rounding;
    - within a step, writes to gradients, which are plain, and all operations of an optimizer for
      which `collage` has made some states plain.

    Outside of a step the setting also covers updates that a line of code copies over a parameter,
    as `p.copy_(p - lr * g)` does. They are rounded, and erase the other terms of `p`. The first
    copy that erases terms counts if `g`, and so the plain tensor, is wider than a term. Otherwise
    the fourth copy over the same memory counts, if the plain tensor has the precision of the
    leading term and hardly differs from it. `p.add_(g, alpha=-lr)` keeps all terms.

    Args:
        action: `"ignore"`, `"warn"` (the default: a `RoundedWarning` once for each line of the
            caller's code), or `"raise"`, a `RoundedError` before anything is written.

    Raises:
        ValueError: another action.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> y = mcf.as_expansion(torch.tensor([0.1, 0.2], dtype=torch.float64), mcf.fp32x2)
        >>> stages = torch.empty(3, 2, dtype=y.dtype)
        >>> with mcf.when_rounded("raise"):
        ...     stages[0] = y
        Traceback (most recent call last):
        ...
        mcftensor.tensor.implicit_rounding.RoundedError: copy_: an expansion in fp32x2 of shape ...
        >>> stages = torch.empty(3, 2, dtype=mcf.fp32x2)
        >>> with mcf.when_rounded("raise"):
        ...     stages[0] = y
    """

    def __init__(self, action: Action) -> None:
        if action not in _ACTIONS:
            known = ", ".join(map(repr, _ACTIONS))
            raise ValueError(f"when_rounded: action {action!r} is not one of {known}")
        self._former = _thread.action
        self.action: Action = action
        _thread.action = action

    def __enter__(self) -> when_rounded:
        return self

    def __exit__(self, *unused: object) -> None:
        _thread.action = self._former

    def __repr__(self) -> str:
        return f"when_rounded({self.action!r})"


def saying_itself(function: Callable[[], R]) -> R:
    """Call a function that issues its own warning about a rounding, and return its result."""
    return asking(function) if _thread.action == "warn" else function()


def asking(function: Callable[[], R]) -> R:
    """Call a function that rounds on purpose, and return its result.

    `_caller` looks for the frame of this function. An interrupt could leave a setting unrestored.
    """
    return function()


def holds(dtype: torch.dtype, format: Format) -> bool:
    """Return whether a plain dtype represents every number of a format to its promised bits.

    Integer dtypes count as such: a write to integers is a requested conversion.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    own, leading = BASES.get(dtype.to_real()), BASES.get(format.dtype)
    if format.arithmetic == "rules" and dtype.to_real() not in (torch.float32, torch.float64):
        return False  # only these have a range that scales do not exceed in practice
    return (
        own is not None
        and own.precision >= format.precision
        and (leading is None or own.max_exponent >= leading.max_exponent)
    )


def rounding(operation: Any, sources: Iterable[Any], target: Tensor) -> None:
    """Warn or raise before expansions are rounded into a plain tensor."""
    action = _thread.action
    if action == "ignore" or torch.compiler.is_dynamo_compiling():
        return
    # An expansion without tails is written exactly.
    lost = [x for x in sources if x.has_tails and not holds(target.dtype, x.format)]
    step = current_step()
    if not lost or (step is not None and step.has_plain_states):
        return
    frame = _caller()
    if frame is None:
        return
    name = getattr(operation, "overloadpacket", operation)
    name = getattr(name, "__name__", str(name))
    format = lost[0].format
    repair = (
        f"To keep all terms, give a target in the format, such as torch.empty_like(x) or "
        f"torch.empty(shape, dtype=x.format); to round on purpose, use "
        f"mcf.as_plain(x, {target.dtype})"
    )
    if action == "raise":
        raise RoundedError(
            f"{name}: an expansion in {format.name} of shape {tuple(lost[0].shape)} would be "
            f"rounded to {target.dtype}, in a plain tensor of shape {tuple(target.shape)}. {repair}"
        )
    _warn(
        f"{name}: an expansion in {format.name} is rounded to {target.dtype}, in a plain tensor. "
        f"{repair}",
        frame,
    )


def narrowing(operation: str, formats: Mapping[str, tuple[Format, Format]]) -> None:
    """Warn or raise before expansions are loaded into narrower formats, by name.

    Args:
        operation: its name.
        formats: the format of each expansion and the one that it is rounded to.
    """
    if _thread.action == "ignore" or torch.compiler.is_dynamo_compiling():
        return
    name, (its, own) = next(iter(formats.items()))
    others = f" and {len(formats) - 1} more" if len(formats) > 1 else ""
    message = (
        f"{operation}: {name}{others}, saved in {its.name}, would be rounded to {own.name}, the "
        f"format of this module. To go on with all terms, call "
        f"mcf.as_expansion(model, {its.name!r}) before it; to round on purpose, mcf.as_plain(x) or "
        'mcf.when_rounded("ignore")'
    )
    if _thread.action == "raise":
        raise RoundedError(message)
    frame = _caller()
    if frame is not None:
        _warn(message.replace("would be", "is"), frame)


def _warn(message: str, frame: FrameType) -> None:
    """Warn once for the line that a frame is in."""
    warnings.warn_explicit(
        f'{message}. mcf.when_rounded("raise") makes this an error, "ignore" ends it',
        RoundedWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "<unknown>"),
        frame.f_globals.setdefault("__warningregistry__", {}),  # once a line, as warnings.warn does
    )


def _caller() -> FrameType | None:
    """Return the frame of the caller's own line, outside of PyTorch and the library.

    Returns None if the rounding is on purpose, or if `fully_shard` gathers compute tensors.
    """
    outer: FrameType | None = sys._getframe(1)
    while outer is not None:
        if outer.f_code is asking.__code__:
            return None
        outer = outer.f_back
    return _outside()


def _outside() -> FrameType | None:
    """Return the innermost frame outside of PyTorch and the library, or None in `fully_shard`."""
    frame = outermost = sys._getframe(1)
    while frame.f_code.co_filename.startswith((*_FOLDERS, "<frozen")) and frame.f_back:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.fsdp."):
            return None
        frame = frame.f_back
    return frame if not frame.f_code.co_filename.startswith(_FOLDERS) else outermost


# ------------------------------------------------------------------ updates that are copied over
#
# `p.copy_(p - lr * g)` outside of a step computes with the leading term of p, and the copy erases
# the other terms. A result in a wider dtype, as with a float32 g, is noted when it is computed.
# Other results are recognized by what they do: unlike loading or initialization, the same line
# copies over the same memory again and again, and the parameter hardly changes. A line that does
# something else is examined ever less often.

_NOTED = 4096  # results of leading terms that are remembered
_of_leading: dict[int, StorageWeakRef] = {}
"""The memory of these results. A weak reference keeps the address from being given anew."""
_moved: dict[int, StorageWeakRef] = {}


def note_of_leading(result: Tensor, x: Any) -> None:
    """Note a plain result, in a wider dtype, of arithmetic with the leading term of a parameter."""
    is_wider = result.dtype != x.dtype and result.is_floating_point()
    if not is_wider or result.layout is not torch.strided or not is_bare([result]):
        return
    _note(_of_leading, result)


def note_moved(result: Tensor, x: Any) -> None:
    """Note a plain result of moving elements of a parameter beside plain ones, as `torch.cat` does.

    It may become a parameter in place of the one that it is made of.
    """
    if result.dtype == x.dtype and not result.requires_grad and is_bare([result]):
        _note(_moved, result)


def is_moved(x: Tensor) -> bool:
    """Return whether a plain tensor was made by moving elements of expansions."""
    return _is_noted(_moved, x)


def _note(noted: dict[int, StorageWeakRef], x: Tensor) -> None:
    memory = StorageWeakRef(x.untyped_storage())
    noted[memory.cdata] = memory
    if len(noted) > _NOTED:
        noted.pop(next(iter(noted)), None)


def _is_noted(noted: dict[int, StorageWeakRef], x: Tensor) -> bool:
    if not noted or x.layout is not torch.strided:
        return False
    return StorageWeakRef(x.untyped_storage()).cdata in noted


_COPIES = 4  # small changes of the same memory that make a line an update
_OTHERS = 8  # copies that are no small changes, after which a line is examined less often
_SMALL = 2.0**-5  # a small change, relative to the element
_PLUMBING = (
    *(
        f"{_FOLDERS[1]}{folder}{os.sep}"
        for folder in ("tensor", "dispatch", "operators", "kernels")
    ),
    *(f"{_FOLDERS[0]}{file}" for file in ("_ops.py", "_tensor.py")),
)


class _Line:
    """The copies of plain tensors over parameters that one line of code has made."""

    def __init__(self) -> None:
        # The weak reference keeps the address from being given to another storage.
        self.memory: tuple[StorageWeakRef, int] | None = None
        self.copies = 0
        self.others = 0
        self.unexamined = 0  # so many copies from now on

    def updates(self, target: Any, source: Tensor) -> bool:
        """Return whether this copy, together with earlier ones, shows the line to be an update."""
        if self.copies == _COPIES:
            return False
        if self.unexamined:
            self.unexamined -= 1
            return False
        leading = target._component0
        memory = StorageWeakRef(leading.untyped_storage()), leading.data_ptr()
        if self.memory is not None and self.memory[0].expired():
            self.memory, self.copies = None, 0
        if self.memory is not None and memory != self.memory:
            return False
        if _is_small_update(target, source):
            self.memory, self.copies = memory, self.copies + 1
        else:
            self.memory, self.copies, self.others = None, 0, self.others + 1
            if self.others % _OTHERS == 0:
                self.unexamined = 64 * self.others
        return self.copies == _COPIES

    def erases(self, target: Any) -> bool:
        """Return whether the first copy of a line that erases terms is about to be made."""
        if self.copies == _COPIES or not any(bool(x.any()) for x in target._read()[1:]):
            return False
        self.copies = _COPIES
        return True


_lines: dict[tuple[str, int], _Line] = {}


def updating(operation: Any, target: Any, source: Tensor) -> None:
    """Warn or raise before a plain tensor is copied over a parameter as its update.

    This applies outside of a step, to a copy by a line of the caller's own code.
    """
    action = _thread.action
    if action == "ignore" or current_step() is not None or not target.numel():
        return
    if source.device != target.device or not is_bare([source, target._component0]):
        return  # what comes from another device was not computed from the parameter
    frame: FrameType | None
    if is_of_leading := _is_noted(_of_leading, source):
        frame = _outside()  # a load says nothing of this rounding
    else:
        if target.shape != source.shape:
            return
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_PLUMBING):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith((*_FOLDERS, "<frozen")):
            return  # a load or an initialization by PyTorch
    if frame is None:
        return
    line = _lines.setdefault((frame.f_code.co_filename, frame.f_lineno), _Line())
    if not (line.erases(target) if is_of_leading else line.updates(target, source)):
        return
    what = f"a {target._role} in {target.format.name} of shape {tuple(target.shape)}"
    about = (
        "that was computed from leading terms is copied over "
        f"{what}. Outside of a step p - update uses only the leading term of p. "
        if is_of_leading
        else f"is copied over {what} from which it hardly differs, for the {_COPIES}th time. If it "
        "is an update: outside of a step p - update uses only the leading term of p. "
    )
    repair = (
        "Small updates are rounded away, and the copy erases the other terms of p. Update in "
        "place, p.sub_(update) or p.add_(g, alpha=-lr), or in the step of a torch.optim.Optimizer"
    )
    if target._role == "value":
        about = f"is copied over {what} from which it hardly differs, for the {_COPIES}th time. "
        repair = (
            "If it is an update: the cast to x.dtype rounds to one term, and the copy erases the "
            "other terms of x. Copy the result as it is, x.copy_(y), or cast it to the format, "
            "y.to(x.format)"
        )
    message = f"{operation.overloadpacket.__name__}: a plain {source.dtype} tensor {about}{repair}"
    if action == "raise":
        line.copies -= 1  # the next copy raises, too
        raise RoundedError(message)
    _warn(message, frame)


@torch.no_grad()
def _is_small_update(target: Any, source: Tensor) -> bool:
    """Return whether a copy changes a parameter by little, judged on a sample of its elements.

    At least half of all elements, and half of the changed ones, must change by at most 2^-5 of the
    leading term.
    """
    target = target.detach()
    for dim, size in enumerate(target.shape):
        step = -(-size // 32)
        places = [slice(None)] * dim + [slice(None, None, step)]
        target, source = target[tuple(places)], source.detach()[tuple(places)]
    wide = widest(source.device)
    new, leading = source.to(wide), target.compute_tensor.to(wide)
    changes = (new - leading).abs()
    is_near = changes <= _SMALL * leading.abs()
    is_changed = changes > 0
    is_small = (is_near.sum() * 2 >= is_near.numel()) & (
        (is_near & is_changed).sum() * 2 >= is_changed.sum()
    )
    # A wider tensor may have been computed from all terms.
    return bool(is_small & (new == new.to(target.dtype)).all())
