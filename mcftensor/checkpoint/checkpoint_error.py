"""The error of all that reads or writes checkpoints, and packages that some of it needs."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read, loaded or compared; the message is one line."""

    def __init__(self, message: str) -> None:
        # Names of tensors and files may hold anything.
        super().__init__(" ".join(message.splitlines()))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert any error that a damaged file causes in its reader into a CheckpointError of one
    line.
    """
    try:
        yield
    except (CheckpointError, ImportError):
        raise
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    refused = re.search(r"GLOBAL (\w[\w.]*\.\w+)", message)
    if isinstance(error, pickle.UnpicklingError) and refused:
        return (
            f"it holds a {refused[1]}, which torch.load refuses with weights_only=True; save the "
            "state dict by itself"
        )
    # What torch says before this is how to load the file in spite of it.
    message = message.rpartition("WeightsUnpickler error:")[2]
    lines = message.strip().splitlines() or [type(error).__name__]
    # Later sentences are advice for other cases than this.
    first = lines[0].split(". ")[0][:200]
    if isinstance(error, MemoryError) or "allocate memory" in message:
        return f"it does not fit into memory ({first})"
    return f"it is damaged, incomplete or no checkpoint ({first})"


def some(names: Iterable[str], most: int = 3) -> str:
    """Return the first few of many names as text."""
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def extra(module: str, caller: str) -> Any:
    """Import a module of an optional package; ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ImportError(
            f"{caller}: {package} is not installed; install it with pip install {package}"
        ) from None
