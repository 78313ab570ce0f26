"""A plugin of pytest, or a first import, that takes wings out of the package: `MCFTENSOR_WITHOUT`.

Its value names the wings, divided by commas. Imports of their modules raise ModuleNotFoundError, as
if their folders were deleted. Tests that are marked with a missing wing are left out.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder

import pytest


class _Deleted(MetaPathFinder):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self.names or name.startswith(tuple(f"{x}." for x in self.names)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests of missing wings."""
    missing = {x.removeprefix("mcftensor.") for x in _names}
    items[:] = [x for x in items if not missing & {m.args[0] for m in x.iter_markers("wing")}]


_names = [f"mcftensor.{x}" for x in os.environ.get("MCFTENSOR_WITHOUT", "").split(",") if x]
sys.meta_path.insert(0, _Deleted(_names))
