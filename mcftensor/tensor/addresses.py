"""Addresses of expansions, which have no storage: the addresses of their leading components.

PyTorch takes an address of 0 as the sign of a tensor without storage, and copies such a tensor
attribute by attribute. `without_addresses` makes it do that with expansions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


class _Thread(threading.local):
    hides = False


_thread = _Thread()


def are_hidden() -> bool:
    """Whether `data_ptr` returns 0 for expansions of this thread."""
    return _thread.hides


def without_addresses(function: Callable[[], R]) -> R:
    """Call a function while `data_ptr` returns 0 for expansions, and return its result.

    PyTorch's own copying functions choose by the address how to copy a tensor.
    """
    outer = _thread.hides
    try:
        _thread.hides = True
        return function()
    finally:
        _thread.hides = outer


def require_dispatch(x: Tensor) -> None:
    """Raise TypeError while PyTorch reads a list of numbers without dispatch.

    `torch.tensor([x, y])` reads lists this way. It would read the storage of x, which does not
    exist.
    """
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        raise TypeError(
            f"torch.tensor and its kin do not accept a {type(x).__name__} in a list: they would "
            "drop its terms or scales. To keep them, use torch.stack([x[0], x[1]]); to round, "
            "torch.tensor([float(y) for y in x])"
        )
