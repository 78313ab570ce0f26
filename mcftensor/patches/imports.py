"""Functions that run when a module has been imported, which may take seconds or never happen."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_waiting: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call a function now, if a module has been imported, or when it has been."""
    if name in sys.modules:
        function()
    else:
        _waiting[name].append(function)


class _Finder(MetaPathFinder):
    """Finds what is waited for as the other finders do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for function in _waiting.pop(fullname, ()):
                    function()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
