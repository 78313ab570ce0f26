"""The table of patches, and how they are looked up and installed.

A private name of torch may be missing in another release, or may have changed its meaning. Then one
warning says which features are lost, and everything else works.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import warnings
from collections import ChainMap, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mcftensor.tensor.first_expansion import WAITING

FIRST = "the first expansion"


class PatchWarning(UserWarning):
    """This release of torch has changed where the library changes it, and something is lost.

    Raised once a process for each row of [the table](../design/index.md#changes-to-pytorch).
    """


@dataclass(frozen=True)
class Patch:
    """One name of torch, or of a package around it, and its replacement."""

    name: str
    """The patched attribute, as a module or class and a name."""
    why: str
    """The caller that needs the patch."""
    loss: str
    """The loss of users without the patch, in a sentence."""
    when: str = FIRST
    """What installs it: the first expansion of the process; an import, of a module that may come
    later than that; or a call, which may also make the change to its arguments alone."""
    before: str = ""
    """Why `import mcftensor` installs it before there is any expansion; empty in other rows."""
    releases: str = "2.9 to 2.15"
    """Releases of its package that were seen to have the name."""
    change: Callable[[Any], Any] | None = None
    """From what torch has to what takes its place; None of a change to single objects."""
    kind: Any = Callable
    """The type of what is expected under the name."""
    takes: tuple[str, ...] = ()
    """Arguments that are asked for by name."""

    def install(self, owner: object = None) -> None:
        """Make the change in a module or class, by default in the owner of the name."""
        assert self.change is not None
        try:
            owner = owner or pkgutil.resolve_name(self.name.rpartition(".")[0])
            # The attributes of the class and of C classes above it, which cannot change.
            bases = [x for x in getattr(owner, "__mro__", ()) if not x.__flags__ & _CAN_CHANGE]
            declared = ChainMap(*[dict(vars(x)) for x in (owner, *bases, object)])[self.attribute]
            is_static = isinstance(declared, staticmethod)
            found = declared.__func__ if is_static else declared
            self._check(found)
            changed = self.change(found)
        except (AttributeError, ImportError, LookupError, TypeError, ValueError):
            _warn(self.name, self.loss)
            return
        if changed is not found:
            setattr(owner, self.attribute, staticmethod(changed) if is_static else changed)

    def found_in(self, owner: object) -> Any:
        """Return the object under the name, or None, which is a loss."""
        try:
            found = getattr(owner, self.attribute)
            self._check(found)
        except (AttributeError, TypeError):
            _warn(self.name, self.loss)
            return None
        return found

    @property
    def attribute(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def _check(self, found: Any) -> None:
        if not isinstance(found, self.kind):
            raise TypeError(f"{self.name} is {type(found).__name__}")
        if self.takes and not set(self.takes) <= inspect.signature(found).parameters.keys():
            raise TypeError(f"{self.name} does not take {', '.join(self.takes)}")


_CAN_CHANGE = 1 << 9  # Py_TPFLAGS_HEAPTYPE

_waiting: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call a function now, if a module has been imported, or when it has been."""
    if name in sys.modules:
        function()
    else:
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        _waiting[name].append(function)


class _Finder(MetaPathFinder):
    """Finds modules with waiting patches, by the other finders."""

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
                functions = _waiting.pop(fullname, ())
                if not _waiting:
                    # A new list: other threads may be going through the old one, and would miss a
                    # finder.
                    sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
                for function in functions:
                    function()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


TABLE: list[Patch] = []


class _Calls:
    """The functions that changes call; folders imported later set them."""

    as_loaded: Callable[[Any, Any, Any], Any]
    """From a parameter, a state of it that is being loaded, and the state's name, the state that
    torch is to cast to the dtype of the parameter."""
    before_step: Callable[..., None]
    """Looks at an optimizer before a step that may not be as it is meant to be, and at the
    arguments of the step."""
    after_step: Callable[[Any], None]
    """Looks at the states of an optimizer after its first step."""
    now_and_then: Callable[[Any], None]
    """Looks at the states of an optimizer every few steps."""
    when_saved: Callable[[Any], None]
    """Looks at an optimizer over expansions when it gives its state dict."""
    norm_of_gradients: Callable[[list[Any]], Any]
    """The Euclidean norm of gradients, or None, which leaves it to torch."""
    around_reduction: Callable[[dict[str, Any]], None]
    """Given the arguments of each reduction of `fully_shard`, by name, to change them."""


calls = _Calls()


def rows(*names: str, **columns: Any) -> tuple[Patch, ...]:
    """Add rows to the table and install each when it says: now if it has a reason, with the first
    expansion, after an import that follows it, or by the call that it names."""
    new = tuple(Patch(name, **columns) for name in names)
    TABLE.extend(new)
    for row in new:
        action, _, module = row.when.partition(" ")
        if row.before:
            row.install()
        elif action == "import":
            WAITING.append(functools.partial(after_import, module, row.install))
        elif row.when == FIRST:
            WAITING.append(row.install)
    return new


def patch(*names: str, **columns: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add rows for the function that is decorated, which makes the change."""

    def decorate(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        rows(*names, change=change, **columns)
        return change

    return decorate


def by_name(
    function: Callable[[Callable[[], Any], dict[str, Any]], Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a change that gets the original call and its arguments by name, to replace any."""

    def change(found: Callable[..., Any]) -> Callable[..., Any]:
        bind = inspect.signature(found).bind

        @functools.wraps(found)
        def changed(*args: Any, **kwargs: Any) -> Any:
            given = bind(*args, **kwargs)
            return function(lambda: found(*given.args, **given.kwargs), given.arguments)

        return changed

    return change


def wherever_imported(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a change also in modules that have imported the function by name."""

    def everywhere(found: Any) -> Any:
        changed, name = change(found), found.__name__
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is found:
                setattr(module, name, changed)
        return changed

    return everywhere


@functools.lru_cache(maxsize=64)
def install_once(rows: tuple[Patch, ...]) -> None:
    """Install rows at the first call with them."""
    for each in rows:
        each.install()


@functools.lru_cache(maxsize=256)  # a warning that is made an error comes again
def _warn(name: str, loss: str) -> None:
    package = name.partition(".")[0]
    warnings.warn(f"this {package} has no {name} as mcftensor knows it: {loss}", PatchWarning, 2)
