"""Wings: parts of the package that the core works without, and imports at their first use.

The core names a wing in a string, here or in a table of public names, and imports none. A wing
imports what it needs of the core. Without its folder, its names and commands are missing, and
everything else works.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

WINGS = ("bridge", "export", "host", "reproducible", "scaling", "serving", "tools", "wide")
"""The folders of the package that are wings."""


def wing(name: str) -> Any:
    """Return the package of a wing, imported at the first call.

    Raises:
        ModuleNotFoundError: this copy of the package has no such folder.
    """
    assert name in WINGS, name
    return importlib.import_module(f"{__package__}.{name}")


def wing_or_none(name: str) -> Any:
    """Return the package of a wing, or None if this copy of the package has no such folder."""
    try:
        return wing(name)
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{name}":
            raise
        return None


_FORMATS = {"scaled(": "scaling"}
"""How names of formats begin that wings register."""

OPERATORS = {
    **dict.fromkeys(("exact_reduction", "exact_running_sum"), "reproducible"),
    **dict.fromkeys(("logit_counts", "logit_map", "logit_sum"), "reproducible"),
    "sliced_product": "wide",
}
"""Operators of PyTorch that wings register."""


def import_format(name: str) -> None:
    """Import the wing that registers the formats of such a name, if there is one."""
    for beginning, place in _FORMATS.items():
        if name.startswith(beginning):
            wing_or_none(place)


def import_operator(name: str) -> None:
    """Import the wing that registers an operator of this name, if there is one."""
    if name in OPERATORS:
        wing_or_none(OPERATORS[name])


def names_of_wings(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that has names of wings.

    Args:
        package: the full name of the module.
        places: for each name, the wing that defines it, or that is meant by it.
    """

    def found(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = wing(places[name])
        value = place if name == places[name] else getattr(place, name)
        setattr(sys.modules[package], name, value)
        return value

    return found
