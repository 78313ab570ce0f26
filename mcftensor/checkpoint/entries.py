"""The results of the readers of all layouts: tensors that are read at their use."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.checkpoint.safetensors_files import Lazy, Stored
from mcftensor.checkpoint.state_dicts import format_said, is_sharded, joined, names_of_terms
from mcftensor.formats import PLAIN, Format
from mcftensor.tensor.components import format_of

LIKE_PARAMETERS = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"),
    *("square_avg", "acc_delta", "grad_avg", "exp_inf"),
)
"""States that have the shape of their parameter, in every optimizer that has states so called."""

Group = dict[str, Any]
"""Hyperparameters, and under `params` the names or the numbers of the parameters they are for."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint."""

    name: str
    format: Format
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
        """Return the group of each parameter."""
        return {i: group for group in self.groups or [] for i in group["params"]}

    def parameters(self) -> list[Any]:
        """Return names or numbers of the parameters, in the order of the optimizer."""
        return list(itertools.chain.from_iterable(g["params"] for g in self.groups or []))

    def names(self) -> list[str] | None:
        """Return names of the parameters in the same order, if the groups have them."""
        groups = self.groups or []
        if not groups or not all("param_names" in group for group in groups):
            return None
        return [name for group in groups for name in group["param_names"]]

    def require_known(self, parameters: list[str] | None) -> None:
        """Check that parameters that were named are weights here."""
        unknown = [x for x in parameters or [] if x not in self.weights and x not in self.tied]
        if unknown:
            raise CheckpointError(
                f"parameters: {len(unknown)} of {len(parameters or [])} are no weights of the "
                f"checkpoint, such as {unknown[0]!r}; give the names of its weights, such as "
                f"{next(iter(self.weights), 'none, as it has none')!r}"
            )

    def require_fitting_moments(self, parameters: list[str] | None) -> None:
        """Check that moments have the shape of their weight or, where a number says which that is,
        of any that is left."""
        if not self.states:
            return
        own, said = self.parameters(), self.names() or parameters or []
        names = dict(zip(own, said, strict=True)) if len(said) == len(own) else {}
        left = Counter(x.shape for x in self.weights.values())
        for i, state in self.states.items():
            moments = [
                (key, x)
                for key, x in state.items()
                if isinstance(x, Entry) and key in LIKE_PARAMETERS and x.shape
            ]
            weight = self.weights.get(names.get(i, i))
            for key, x in moments:
                like = weight.shape if weight else moments[0][1].shape
                if x.shape != like:
                    raise CheckpointError(
                        f"{key} of {names.get(i, i)} is of shape {tuple(x.shape)}, and "
                        f"{'the weight' if weight else moments[0][0]} of {tuple(like)}; "
                        "optimizer=False leaves the states out"
                    )
            if moments and weight is None:
                key, x = moments[0]
                left[x.shape] -= 1
                if left[x.shape] < 0:
                    raise CheckpointError(
                        f"{key} of parameter {i} is of shape {tuple(x.shape)}, as no weight "
                        "is that has no other moments; optimizer=False leaves the states out"
                    )


@dataclass(frozen=True)
class Request:
    """The options of a reader: the arguments of these names of `convert_checkpoint` and
    `load_file`.
    """

    optimizer: bool = False
    parameters: list[str] | None = None
    step: int | None = None
    verify: bool = True
    tails: bool = True

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 0:
            raise CheckpointError(f"step is {self.step}; give how many steps were taken, 0 or more")


def entry_of(name: str, x: Tensor) -> Entry:
    """Return the entry of a tensor in memory, which may be mapped from a file."""
    _require_dense(name, x)
    return Entry(name, format_of(x) or PLAIN[x.dtype], x.shape, lambda: _copied(name, x))


def entries_in(stored: Stored, request: Request) -> dict[str, Entry]:
    """Return the entries of a checkpoint, in which each component has a separate name."""
    terms, known = stored.terms, request.verify and stored.seal is not None
    entries = {}
    for name, names in names_of_terms(x for x in terms if x not in stored.tied).items():
        like = terms.like(name) if isinstance(terms, Lazy) else terms[name]
        _require_dense(name, like)
        format = format_said(names) or format_of(like) or PLAIN[like.dtype]

        def read(names: list[str] = names) -> Tensor:
            parts = {n: terms[n].detach() for n in names}
            if stored.layout != "safetensors":
                parts = {n: _copied(n, x) for n, x in parts.items()}
            whole: Tensor = joined(parts, names, request.tails, request.verify, known)
            return whole

        entries[name] = Entry(name, format, like.shape, read)
    return entries


def _copied(name: str, x: Tensor) -> Tensor:
    """Return a contiguous copy in new memory, since mapped files may be overwritten."""
    if x.is_meta:
        raise CheckpointError(
            f"{name} of shape {tuple(x.shape)} was saved on the meta device, without its numbers"
        )
    return x.detach().clone(memory_format=torch.contiguous_format)


def _require_dense(name: str, x: Tensor) -> None:
    if is_sharded(x):
        raise CheckpointError(f"{name} is a DTensor, a part of a tensor; gather it before saving")
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        raise CheckpointError(f"{name} is of {x.layout}; only dense tensors can be converted")
