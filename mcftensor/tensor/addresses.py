"""Addresses of tensors that have no storage of their own: those of their leading components.

PyTorch takes an address of 0 for the sign of such a tensor, which it copies attribute by attribute
rather than by its storage. Where it asks for that, they have none.
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
    """Whether PyTorch is to find no addresses."""
    return _thread.hides


def without_addresses(function: Callable[[], R]) -> R:
    """Call a function of PyTorch that tells by addresses how to copy tensors of this thread."""
    outer = _thread.hides
    try:
        _thread.hides = True
        return function()
    finally:
        _thread.hides = outer


def require_dispatch(x: Tensor) -> None:
    """Raise TypeError where PyTorch reads a tensor in a list of numbers, without dispatch, and
    would look for its memory."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        raise TypeError(
            f"torch.tensor and its kin take no {type(x).__name__} in a list, of which they would "
            "drop terms or scales: to keep them, torch.stack([x[0], x[1]]); to round, "
            "torch.tensor([float(y) for y in x])"
        )
