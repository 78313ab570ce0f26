"""Expansions that plain modules have loaded, kept until they are converted or written to.

A plain parameter rounds the expansion that it loads. A copy of the expansion stays here, in the
memory of the CPU, so that `as_expansion` finds it whole when it is called after `load_state_dict`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mcftensor.arithmetic.base_types import BASES
from mcftensor.formats import Format
from mcftensor.patches.objects import after_loading_module
from mcftensor.tensor.dtensor import any_format_of, format_of
from mcftensor.tensor.tensor import MCFTensor


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


_kept: weakref.WeakKeyDictionary[nn.Module, dict[str, Kept]] = weakref.WeakKeyDictionary()


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _keep(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """After a module, without its children, has loaded a state dict."""
    kept = _kept.pop(module, {})
    for name, x in _tensors(module):
        key = prefix + name
        if key not in state_dict:
            continue
        kept.pop(name, None)
        given = state_dict[key]
        format = format_of(given)
        if (
            format is None
            or any_format_of(x)
            or given.shape != x.shape
            or given.is_meta
            or x.is_meta
        ):
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
        _kept[module] = kept


after_loading_module.append(_keep)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for own in (module._parameters, module._buffers):
        for name, x in own.items():
            if x is not None:
                yield name, x


def _is_bare(x: Tensor) -> bool:
    is_known = type(x) is Tensor or isinstance(x, nn.Parameter)
    return is_known and not is_traceable_wrapper_subclass(x)


def kept_in(module: nn.Module) -> dict[int, MCFTensor]:
    """By the identities of the plain tensors of a module: the expansions that they were loaded
    from, where they have not been written to since."""
    found = {}
    for part in module.modules():
        kept = _kept.get(part, {})
        for name, x in _tensors(part):
            if name in kept and kept[name].is_of(x):
                found[id(x)] = kept[name].whole
    return found


def forget(module: nn.Module) -> None:
    """Free what is kept for a module."""
    for part in module.modules():
        _kept.pop(part, None)


def rounded(parameters: Iterable[Tensor]) -> list[tuple[str, Tensor, Format]]:
    """The parameters that are about to be written to and were rounded when they were loaded: names,
    tensors, and the formats that they were loaded from. What is kept for them is freed."""
    if not _kept:
        return []
    chosen = {id(p) for p in parameters if p.requires_grad}
    found: dict[int, tuple[str, Tensor, Format]] = {}
    for module, kept in list(_kept.items()):
        for name, x in _tensors(module):
            if name in kept and (id(x) in chosen or kept[name].was_written(x)):
                one = kept.pop(name)
                if id(x) in chosen and id(x) not in found and one.is_of(x) and one.differs_from(x):
                    found[id(x)] = one.name, x, one.whole.format
        if not kept:
            del _kept[module]
    return list(found.values())
