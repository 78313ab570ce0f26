"""Packages that only some parts of the library need."""

from __future__ import annotations

import importlib
from typing import Any


def extra(module: str, caller: str) -> Any:
    """A module of an optional package; ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ImportError(
            f"{caller}: {package} is not installed; install it with pip install {package}"
        ) from None
