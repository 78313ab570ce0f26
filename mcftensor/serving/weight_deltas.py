"""`deltas`: which leading terms changed since they were last sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mcftensor.checkpoint.safetensors_files import DTYPES
from mcftensor.meters.edq.meter import unique_names
from mcftensor.patches.optimizers import named_parameters_of
from mcftensor.serving.changes import bits_for, coded_changes, digest_of, mark_changes
from mcftensor.serving.delta_files import Delta, DeltaEntry, write_delta
from mcftensor.tensor.components import local
from mcftensor.tensor.dtensor import place_of
from mcftensor.tensor.step_context import current_step
from mcftensor.tensor.tensor import MCFTensor


class Deltas:
    """Give the changes of parameters since the last delta; created by `deltas`.

    Attributes:
        number: how many deltas were taken.
    """

    def __init__(
        self, optimizer: Optimizer, names: dict[Tensor, str], anchor_every: int | None
    ) -> None:
        self.number = 0
        self._optimizer = optimizer
        self._names = names
        self._anchor_every = anchor_every
        self._sent: dict[str, tuple[Tensor, int]] = {}
        """The elements of each parameter as they were last sent, on the CPU, and their digest."""
        for name, p in self._parameters():
            x = served(p)
            self._sent[name] = x.clone(), digest_of(x)

    def __repr__(self) -> str:
        return f"Deltas({type(self._optimizer).__name__}, {self.number} taken)"

    def _parameters(self) -> list[tuple[str, Tensor]]:
        found = [
            (self._names.get(p, given), p) for given, _, p in named_parameters_of(self._optimizer)
        ]
        return list({name: (name, p) for name, p in found}.values())

    @torch.no_grad()
    def take(self, *, anchor: bool = False) -> Delta:
        """Return what changed since the last `take`, or since this was made.

        Args:
            anchor: whether to give all parameters whole, for servers of any state.

        Raises:
            RuntimeError: within a step.
            NotImplementedError: a parameter that is sharded along another dimension than the first.
        """
        if current_step() is not None:
            raise RuntimeError("take: a step is under way; call it between two steps")
        if self._anchor_every is not None:
            anchor |= self.number % self._anchor_every == 0
        parts = {name: self._part(name, p, anchor) for name, p in self._parameters()}
        delta = write_delta(parts, self.number, anchor)
        self.number += 1
        return delta

    def _part(
        self, name: str, p: Tensor, anchor: bool
    ) -> tuple[DeltaEntry, Tensor | None, Tensor | None]:
        """Return the entry of a parameter in a delta, and its gaps and codes."""
        _require_rows(name, p)
        x = served(p)
        old, before = self._sent.get(name, (x, 0))
        is_known = name in self._sent and (len(x), x.dtype) == (len(old), old.dtype)
        is_whole, after = anchor or not is_known, digest_of(x)
        changed = None
        if not is_whole:
            bits = bits_for(x)
            mark_changes(bits, x, old)
            changed = coded_changes(bits, x)
            is_whole = changed is not None and sum(y.nbytes for y in changed[1:]) >= x.nbytes
        new = old.copy_(x) if is_known else x.clone()
        self._sent[name] = new, after
        width, gaps, codes = (0, None, new) if is_whole else changed or (0, None, None)
        place = DTYPES[x.dtype], list(p.shape), place_of(p), len(x)
        known = before if is_known and not anchor else None
        return DeltaEntry(*place, width, known, after), gaps, codes

    def remove(self) -> None:
        """Forget what was sent."""
        self._sent.clear()


def deltas(
    optimizer: Optimizer,
    *,
    names: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
    anchor_every: int | None = None,
) -> Deltas:
    """Give the leading terms that change, for a server of inference.

    A server holds the leading terms, as a plain model. From when this is called, each `take()` of
    the result gives the elements that differ from those last sent, and `mcf.apply_deltas` writes
    them into the plain model, which then equals the trainer's bit by bit.

    Leading terms as last sent are kept in CPU memory, 2 bytes a parameter in 16-bit formats, and
    `take` compares. Whatever has written a parameter, all that changed is given, and nothing else:
    optimizer steps cost no more than without this.

    Args:
        optimizer: any optimizer, fused, foreach or for-loop. Under `fully_shard` each rank takes
            the delta of its shards, and the server applies the deltas of all ranks.
        names: names of parameters, as `model.named_parameters()` gives them, or the model. By
            default those that the optimizer was made with.
        anchor_every: every so many deltas one has all parameters whole, the first included.

    Returns:
        An object whose `take()` gives a delta. `remove()` frees its memory.

    Raises:
        TypeError: no optimizer.
        ValueError: `anchor_every` below 1; two parameters of one name.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(64, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        >>> deltas = mcf.deltas(optimizer, names=model)
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> delta = deltas.take()
        >>> 0 < delta.changed < delta.elements, delta.is_anchor
        (True, False)
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"deltas: got a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if anchor_every is not None and anchor_every < 1:
        raise ValueError(f"deltas: anchor_every={anchor_every!r}; give a number of at least 1")
    return Deltas(optimizer, unique_names(names, "deltas"), anchor_every)


def served(p: Tensor) -> Tensor:
    """Return what a plain model stores of a parameter on this rank, flat and on the CPU."""
    own: Any = local(p)
    x = own.compute_tensor if isinstance(own, MCFTensor) else own
    return x.detach().contiguous().view(-1).cpu()


def _require_rows(name: str, p: Tensor) -> None:
    placements = getattr(p, "placements", ())
    if not all(x.is_replicate() or x.is_shard(0) for x in placements):
        raise NotImplementedError(
            f"deltas: {name} of shape {tuple(p.shape)} is sharded as {tuple(placements)}, and a "
            "delta has whole rows; shard it along its first dimension, or gather it"
        )
