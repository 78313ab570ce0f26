"""Functions that run when a module has been imported, which may take seconds or never happen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call a function now, if a module has been imported, or when it has been."""
    if name in sys.modules:
        function()
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.name == name:
            finder.functions.append(function)
            return
    sys.meta_path.insert(0, _Finder(name, function))


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, and waits until it is there."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.functions = [function]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                for function in self.functions:
                    function()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
