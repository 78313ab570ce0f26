"""A mode in which every float64 tensor of the library raises, those inside dispatch and in
operators too.

Tests compare with float64, and ask the library for it. A float64 tensor is the library's where its
code made it, and where no call that entered the library on the way named float64: no such tensor,
dtype or format was among its arguments.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mcftensor as mcf
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.tensor import step_context

_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.UninitializedParameter)
_LIBRARY = str(Path(mcf.__file__).parent)
_MODULES = str(torch.nn.modules.module.__file__)
_LAYOUTS = str(Path(torch.__file__).parent / "distributed/tensor/_sharding_prop.py")
_BETWEEN = (functools.__file__, contextlib.__file__, __file__, "<")
_THROUGH = (str(Path(torch.__file__).parent), *_BETWEEN)
_WIDE = (torch.float64, torch.complex128)


NEEDS_FLOAT64 = {
    "fp64": "the case is of float64",
    "float64": "the case is of float64",
    "fp32bf16": "numbers of this format are float64",
    "scaled(": "scaled formats compute in float64",
    "float_power": "PyTorch defines its result in float64",
    "-nn.functional.batch_norm": "of no elements, PyTorch's code for CPUs has float64 means",
    "-pinverse": "PyTorch's code has float64 bounds",
    "-linalg.pinv": "PyTorch's code has float64 bounds",
    "-linalg.matrix_rank": "PyTorch's code has float64 bounds",
}
"""Parts of the parameters of cases that `--without-float64` runs with float64, and why."""


class Float64Error(AssertionError):
    """A float64 tensor was made."""


class _Watch(TorchDispatchMode):
    def __init__(self, of_all: bool) -> None:
        super().__init__()
        self.of_all = of_all

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports its compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(x.__name__ == "FakeTensor" for x in types):
            return func(*args, **kwargs)  # DTensors find the layouts of results by them
        if not all(x in _PLAIN for x in types):
            return NotImplemented  # it is carried out on components
        if func.namespace == "mcftensor":
            with self:
                return func._op_dk(_EXPLICIT, *args, **kwargs)
        result = func(*args, **kwargs)
        if _has_wide(result) and (self.of_all or _is_ours()):
            raise Float64Error(str(func))
        if self.of_all and _has_wide((args, kwargs)):
            raise Float64Error(str(func))
        return result


def _has_wide(tree: Any) -> bool:
    tensors = (tree,) if isinstance(tree, Tensor) else _tensors(tree)
    return any(x.dtype in _WIDE for x in tensors)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _is_ours() -> bool:
    """Whether the library makes what is made, and was not asked for it."""
    entry: FrameType | None = None
    is_ours = False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _LAYOUTS or (path == _MODULES and _names_float64(frame)):
            return False  # DTensors find the layouts of results by tensors without memory
        if path.startswith(_LIBRARY):
            entry, is_ours = frame, True
        elif not path.startswith(_THROUGH):
            if not is_ours or (entry is not None and _asks(entry)):
                return False
            entry = None
        frame = frame.f_back
    return is_ours and (entry is None or not _asks(entry))


def _names_float64(frame: FrameType) -> bool:
    """Whether a program asked for float64 by `double()` or `to(dtype)` of a module."""
    return frame.f_code.co_name == "double" or frame.f_locals.get("dtype") in _WIDE


def _asks(entry: FrameType) -> bool:
    code = entry.f_code
    flags = bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]
    given = tree_leaves([entry.f_locals.get(name) for name in names])
    return any(map(_is_wide, given))


def _is_wide(x: Any) -> bool:
    if isinstance(x, mcf.Format):
        return x.dtype in _WIDE
    if isinstance(x, Tensor | Sum | torch.nn.Module | torch.optim.Optimizer):
        return any(y.dtype in _WIDE for y in _held(x))
    return x in _WIDE if isinstance(x, torch.dtype) else x is Tensor.double


def _held(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Sum):
        return [*x.floats]
    if isinstance(x, torch.nn.Module):
        return [*x.parameters(), *x.buffers()]
    return [p for group in x.param_groups for p in group["params"]] + _tensors([*x.state.values()])


@contextlib.contextmanager
def no_float64(*, of_all: bool = True) -> Iterator[None]:
    """`mcf.without_float64()`, and whatever makes a float64 tensor raises, or only the library."""
    length, own = torch._C._len_torch_dispatch_stack, threading.get_ident()

    def seen() -> int:
        """The modes of a thread, without the one that watches."""
        return length() - (threading.get_ident() == own and length() > 0)

    with pytest.MonkeyPatch.context() as patch, mcf.without_float64(), _Watch(of_all):
        # The library takes the ways that it takes where nobody looks on.
        patch.setattr(torch._C, "_len_torch_dispatch_stack", seen)
        patch.setattr(step_context, "_count_modes", seen)
        yield
