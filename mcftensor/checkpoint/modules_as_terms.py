"""Modules whose state dict consists of plain tensors, for programs that store nothing else."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from mcftensor.checkpoint.state_dicts import as_terms, from_terms, has_terms, names_of_terms
from mcftensor.patches import adapters
from mcftensor.patches.objects import before_loading, has_load_hook, register_load_hook
from mcftensor.tensor.dtensor import format_of

M = TypeVar("M", bound=nn.Module)


def store_as_terms(module: M) -> M:
    """Have a module's `state_dict()` give terms, and `load_state_dict` take them, in place.

    The state dict is then as `as_terms` makes it: leading terms under the names of the parameters,
    the others beside them. So all that stores modules in safetensors files stores whole
    expansions: `save_pretrained` and the Trainer of transformers, Accelerate. Any program reads
    the files as a model of the base dtype. State dicts of expansions and of plain tensors load as
    before.

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
        # Beside terms of others, what looks like a leading term lacks its own. And loaders that
        # look for what is tied and was not stored expect all its terms here.
        is_alone = has_terms and isinstance(x, Tensor) and x.dtype == own[name].dtype
        if name not in given or (is_alone and format_of(x) is None):
            missing_keys += [n for n in names[1:] if n not in given]


def _exchange(
    state_dict: dict[str, Any], prefix: str, convert: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    own = [name for name in state_dict if name.startswith(prefix)]
    state_dict.update(convert({name: state_dict.pop(name) for name in own}))


def _joined(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict that a module is to load, with expansions in place of the terms among its keys,
    but for parts that look for terms themselves."""
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


before_loading.append(_joined)
adapters.to_terms.append(functools.partial(as_terms, sums=True))
adapters.from_terms.append(from_terms)
adapters.when_unloaded.append(store_as_terms)
