"""Modules that store and load expansions: as plain tensors, or to be found by `as_expansion`.

For programs that store nothing but plain tensors, a module's state dict consists of terms. A plain
parameter rounds the expansion that it loads; a copy of the expansion stays here, in the memory of
the CPU, until it is written to, so that `as_expansion` finds it whole when it is called after
`load_state_dict`.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mcftensor.arithmetic.base_types import BASES
from mcftensor.arithmetic.write_counts import name_
from mcftensor.checkpoint.state_dicts import as_terms, from_terms, has_terms, names_of_terms
from mcftensor.dispatch.operands import count_of, value_in
from mcftensor.formats import Format
from mcftensor.patches.objects import as_held, has_load_hook, register_load_hook
from mcftensor.patches.table import by_name, patch
from mcftensor.tensor.components import any_format_of, format_of, local
from mcftensor.tensor.dtensor import place_of
from mcftensor.tensor.implicit_rounding import narrowing, saying_itself
from mcftensor.tensor.tensor import MCFTensor

M = TypeVar("M", bound=nn.Module)


def store_as_terms(module: M) -> M:
    """Have a module's `state_dict()` give terms, and `load_state_dict` take them, in place.

    The state dict is then the result of `as_terms`: leading terms under the names of the
    parameters, and the other terms under names derived from them. `save_pretrained` and the Trainer
    of transformers, Accelerate, and other programs that write safetensors files then store whole
    expansions. Any program reads the files as a model of the base dtype. State dicts of expansions
    and of plain tensors load as before.

    Args:
        module: the module whose `state_dict` is called; it may be wrapped afterwards.

    Returns:
        The module itself.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2, bias=False))
        >>> model = mcf.checkpoint.store_as_terms(model)
        >>> list(model.state_dict())
        ['weight', 'weight.bf16x2.term1', 'weight.bf16x2.sum']
        >>> model.load_state_dict(model.state_dict())
        <All keys matched successfully>
    """
    if _store not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_store)
        register_load_hook(module, _load, first=True)  # others need expansions
    return module


def _store(module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    _exchange(state_dict, prefix, functools.partial(as_terms, sums=True))


def _load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    *unused: Any,
) -> None:
    given = set(state_dict)
    _exchange(state_dict, prefix, from_terms)
    has_terms = any(len(names) > 1 for names in names_of_terms(given).values())
    own = module.state_dict(prefix=prefix)
    for name, names in names_of_terms(own).items():
        x = state_dict.get(name)
        # In a state dict with terms, a plain tensor may be a leading term whose own terms are
        # missing. Loaders that look for tied tensors expect all their terms here.
        is_alone = has_terms and isinstance(x, Tensor) and x.dtype == own[name].dtype
        if name not in given or (is_alone and format_of(x) is None):
            missing_keys += [n for n in names[1:] if n not in given]


def _exchange(
    state_dict: dict[str, Any], prefix: str, convert: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    own = [name for name in state_dict if name.startswith(prefix)]
    state_dict.update(convert({name: state_dict.pop(name) for name in own}))


def _joined(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict to load, with expansions in place of the terms among its keys.

    Submodules that join terms themselves are left out.
    """
    if not has_terms(state_dict):
        return state_dict
    parts = (name for name, part in module.named_modules() if has_load_hook(part, _load))
    prefixes = tuple(f"{name}." if name else "" for name in parts)
    others = {n: x for n, x in state_dict.items() if not n.startswith(prefixes)}
    found: Any = OrderedDict((n, x) for n, x in state_dict.items() if n not in others)
    found.update(from_terms(others))
    if hasattr(state_dict, "_metadata"):
        found._metadata = state_dict._metadata
    return found


@patch(
    "torch.nn.Module.load_state_dict",
    why="Readers of safetensors files give state dicts with keys of terms. These terms belong to "
    "expansions.",
    loss="load_state_dict(strict=False) silently drops terms among the keys; load "
    "mcf.checkpoint.from_terms(state_dict).",
    when="import mcftensor",
    before="A plain model may load such terms before the process creates an expansion, and may be "
    "converted afterwards.",
    takes=("self", "state_dict"),
)
@by_name
def _finding_terms(load: Callable[[], Any], given: dict[str, Any]) -> Any:
    if isinstance(given["state_dict"], Mapping):
        given["state_dict"] = state_dict = _joined(given["self"], given["state_dict"])
        narrowed = {} if given.get("assign", False) else _narrowed(given["self"], state_dict)
        if narrowed:
            narrowing("load_state_dict", narrowed)
    return load()


def _narrowed(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the names and formats of what a module would round to its own formats."""
    found = {}
    for name, x in itertools.chain(module.named_parameters(), module.named_buffers()):
        its, own = format_of(state_dict.get(name)), format_of(x)
        if its is None or own is None or its == own:
            continue
        if its.precision > own.precision:
            found[name] = its, own
    return found


# ---------------------------------------------------------------------------- loaded expansions


@dataclass(frozen=True)
class Kept:
    """An expansion that was loaded, and the plain tensor as it was then."""

    name: str
    """The key in the state dict."""
    whole: Any
    """The expansion, a value."""
    dtype: torch.dtype
    owner: int
    """The identity of the plain tensor."""
    version: int | None

    def was_written(self, x: Tensor) -> bool:
        """Whether autograd has counted a write to the plain tensor."""
        return id(x) == self.owner and _version(x) != self.version

    @torch.no_grad()
    def is_of(self, x: Tensor) -> bool:
        """Whether the plain tensor still has the rounded values; a module may have made it anew in
        another dtype, and writes to `x.data` are not counted."""
        if self.was_written(x) or x.is_meta or x.shape != self.whole.shape:
            return False
        rounded = self.whole._collapsed(self.dtype).to(x.dtype)
        own = x.detach().cpu()
        return bool(((own == rounded) | (own.isnan() & rounded.isnan())).all())

    @torch.no_grad()
    def differs_from(self, x: Tensor) -> bool:
        """Whether the plain tensor has lost something of it."""
        back: Any = torch.zeros_like(self.whole).copy_(x.detach().cpu())
        return not all(map(torch.equal, back.components, self.whole.components))


KEPT: weakref.WeakKeyDictionary[nn.Module, dict[str, Kept]] = weakref.WeakKeyDictionary()


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


@patch(
    "torch.nn.Module._load_from_state_dict",
    why="A plain parameter rounds an expansion that it loads, and a later `as_expansion` needs "
    "all terms. PyTorch's hooks on loading belong to single modules.",
    loss="plain models that load expansions drop their tails; call mcf.as_expansion(model) before "
    "load_state_dict.",
    takes=("self", "state_dict", "prefix", "local_metadata"),
)
@by_name
def _keeping_what_is_loaded(load: Callable[[], None], given: dict[str, Any]) -> None:
    if all(map(any_format_of, _own_tensors(given["self"]).values())):
        load()  # nothing is rounded
        return
    saying_itself(load)
    if not given["local_metadata"].get("assign_to_params_buffers", False):
        _keep(given["self"], given["state_dict"], given["prefix"])


def _keep(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Keep the loaded expansions of a module, without its children, after loading."""
    kept = KEPT.pop(module, {})
    for name, x in _own_tensors(module).items():
        key = prefix + name
        if key not in state_dict:
            continue
        kept.pop(name, None)
        given = state_dict[key]
        format = format_of(given)
        if format is None or any_format_of(x) or given.shape != x.shape:
            continue
        if given.is_meta or x.is_meta:
            continue
        is_whole = isinstance(given, MCFTensor) and _is_bare(given._component0)
        if is_whole and _is_bare(x) and x.is_floating_point():
            whole = given.detach().to("cpu", copy=True)
            kept[name] = Kept(key, whole, x.dtype, id(x), _version(x))
        elif x.dtype not in BASES or BASES[x.dtype].precision < format.precision:
            warnings.warn(
                f"load_state_dict: {key} is an expansion in {format.name} in the state dict and "
                f"a {type(x).__name__} of {x.dtype} in the model, so it was rounded. To go on "
                "with all terms, call mcf.as_expansion(model) before load_state_dict",
                stacklevel=2,
            )
    if kept:
        KEPT[module] = kept


def _is_bare(x: Tensor) -> bool:
    is_known = type(x) is Tensor or isinstance(x, nn.Parameter)
    return is_known and not is_traceable_wrapper_subclass(x)


def kept_in(module: nn.Module) -> dict[int, MCFTensor]:
    """Return the expansions that plain tensors of a module were loaded from, by the tensors' ids,
    unless these have been written to since.
    """
    found = {}
    for part in module.modules():
        kept = KEPT.get(part, {})
        for name, x in _own_tensors(part).items():
            if name in kept and kept[name].is_of(x):
                found[id(x)] = kept[name].whole
    return found


def forget(module: nn.Module) -> None:
    """Free the expansions kept for a module."""
    for part in module.modules():
        KEPT.pop(part, None)


def rounded(parameters: Iterable[Tensor]) -> list[tuple[str, Tensor, Format]]:
    """Return the parameters about to be written to that were rounded at loading.

    Return their names, tensors, and the formats that they were loaded from, and free the
    expansions kept for them.
    """
    if not KEPT:
        return []
    chosen = {id(p) for p in parameters if p.requires_grad}
    found: dict[int, tuple[str, Tensor, Format]] = {}
    for module, kept in list(KEPT.items()):
        for name, x in _own_tensors(module).items():
            if name in kept and (id(x) in chosen or kept[name].was_written(x)):
                one = kept.pop(name)
                if id(x) in chosen and id(x) not in found and one.is_of(x) and one.differs_from(x):
                    found[id(x)] = one.name, x, one.whole.format
        if not kept:
            del KEPT[module]
    return list(found.values())


# --------------------------------------------------------------------------- modules of expansions


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = module._parameters | module._buffers
    return {name: x for name, x in own.items() if x is not None}


def keep_expansions(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    *unused: Any,
) -> None:
    """With `assign=True`, torch puts the tensors of a checkpoint in place of the parameters; and
    what was on the meta device has no salt yet."""
    assigns = local_metadata.get("assign_to_params_buffers", False)
    for name, x in _own_tensors(module).items():
        key = prefix + name
        count = count_of(x)
        if count is not None and not count.is_meta:
            name_(count, key, place_of(x))
        format, new = format_of(x), state_dict.get(key)
        if assigns and format and isinstance(new, Tensor) and new.shape == x.shape:
            if format_of(new) != format:
                new = value_in(new, format, name=key)
            role = local(x).role  # type: ignore[attr-defined]
            is_parameter = isinstance(x, nn.Parameter)
            state_dict[key] = as_held(is_parameter, new.detach(), role, x.requires_grad)
