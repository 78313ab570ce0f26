"""What every reader of a layout gives: tensors that are read when they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.errors import CheckpointError
from mcftensor.checkpoint.reading import Lazy
from mcftensor.checkpoint.state_dicts import (
    AnyFormat,
    format_said,
    is_sharded,
    joined,
    names_of_terms,
)
from mcftensor.formats import PLAIN
from mcftensor.tensor.sharded import format_of

Group = dict[str, Any]
"""Hyperparameters, and under `params` the names or the numbers of the parameters they are for."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint."""

    name: str
    format: AnyFormat
    shape: torch.Size
    read: Callable[[], Tensor]


@dataclass
class Contents:
    """A checkpoint: weights by name, and the states of an optimizer, by name or number of the
    parameter and by their own name. States that are no tensors are here as they are."""

    layout: str
    weights: dict[str, Entry]
    states: dict[Any, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] | None = None
    tied: dict[str, str] = field(default_factory=dict)

    def group_of(self) -> dict[Any, Group]:
        """For each parameter its group."""
        return {i: group for group in self.groups or [] for i in group["params"]}

    def parameters(self) -> list[Any]:
        """Names or numbers of the parameters, in the order of the optimizer."""
        return list(itertools.chain.from_iterable(g["params"] for g in self.groups or []))


@dataclass(frozen=True)
class Request:
    """How a checkpoint is to be read: the arguments of that name of `convert_checkpoint` and
    `load_file`."""

    optimizer: bool = False
    parameters: list[str] | None = None
    step: int | None = None
    verify: bool = True
    tails: bool = True


def entry_of(name: str, x: Tensor) -> Entry:
    """Of a tensor at hand, which may lie in a file that is mapped into memory."""
    _require_memory(name, x)
    _require_dense(name, x)
    return Entry(name, format_of(x) or PLAIN[x.dtype], x.shape, lambda: _copied(x))


def entries_of(terms: Mapping[str, Tensor], request: Request) -> dict[str, Entry]:
    """Of a state dict at hand or in files that are mapped into memory, which may be one of
    components."""
    for name, x in terms.items():
        _require_memory(name, x)
    copies = Lazy(terms, lambda name: _copied(terms[name]), terms.__getitem__)
    return entries_in(copies, request, known=False)


def entries_in(terms: Lazy, request: Request, known: bool) -> dict[str, Entry]:
    """Of a file, in which the components of a number have names of their own."""
    entries = {}
    for name, names in names_of_terms(terms).items():
        like = terms.like(name)
        _require_dense(name, like)
        format = format_said(names) or format_of(like) or PLAIN[like.dtype]

        def read(name: str = name, names: list[str] = names) -> Tensor:
            parts = {n: terms[n] for n in names}
            return joined(parts, request.tails, request.verify, known)[name].detach()

        entries[name] = Entry(name, format, like.shape, read)
    return entries


def _copied(x: Tensor) -> Tensor:
    """In its own memory, since files may be written anew, and in order, for blocks of it."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _require_memory(name: str, x: Tensor) -> None:
    if x.is_meta:
        raise CheckpointError(
            f"{name} of shape {tuple(x.shape)} was saved on the meta device, without its numbers"
        )


def _require_dense(name: str, x: Tensor) -> None:
    if is_sharded(x):
        raise CheckpointError(f"{name} is a DTensor, a part of a tensor; gather it before saving")
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        raise CheckpointError(f"{name} is of {x.layout}; only dense tensors can be converted")
