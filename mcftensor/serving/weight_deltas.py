"""`deltas`: which leading terms the steps of an optimizer changed, told by the steps themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mcftensor.checkpoint.safetensors_files import DTYPES
from mcftensor.kernels.marks import Marks, watch
from mcftensor.meters.edq.meter import unique_names
from mcftensor.patches.optimizers import named_parameters_of
from mcftensor.serving.changes import coded_changes, digest_of, mark_changes
from mcftensor.serving.delta_files import Delta, DeltaEntry, write_delta
from mcftensor.tensor.components import local
from mcftensor.tensor.dtensor import place_of
from mcftensor.tensor.step_context import current_step
from mcftensor.tensor.tensor import MCFTensor


class Deltas:
    """Record the changes of parameters between deltas; created by `deltas`.

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
        self._known: dict[str, _Known] = {}
        for name, p in self._parameters():
            self._known[name] = _Known(p)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def __repr__(self) -> str:
        return f"Deltas({type(self._optimizer).__name__}, {self.number} taken)"

    def _parameters(self) -> list[tuple[str, Tensor]]:
        found = [
            (self._names.get(p, given), p) for given, _, p in named_parameters_of(self._optimizer)
        ]
        return list({name: (name, p) for name, p in found}.values())

    def _before_step(self) -> None:
        groups = self._optimizer.param_groups
        fused = {id(p) for group in groups if group.get("fused") for p in group["params"]}
        for known in self._known.values():
            known.before_step(writes_once=id(known.p) in fused)

    def _after_step(self) -> None:
        for known in self._known.values():
            known.after_step()

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
        parts = {}
        for name, p in self._parameters():
            if name not in self._known:
                self._known[name] = _Known(p, is_new=True)
            parts[name] = self._known[name].taken(name, p, anchor)
        delta = write_delta(parts, self.number, anchor)
        self.number += 1
        return delta

    def remove(self) -> None:
        """Record nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._known.clear()


def deltas(
    optimizer: Optimizer,
    *,
    names: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
    anchor_every: int | None = None,
) -> Deltas:
    """Record which leading terms the steps of an optimizer change.

    A server of inference holds the leading terms, as a plain model. From when this is called, each
    `take()` of the result gives the elements that changed since the last one, and
    `mcf.apply_deltas` writes them into the plain model, which then equals the trainer's bit by bit.

    Fused steps over expansions mark what they change, one bit an element, as they store it:
    nothing is kept to compare with. Other steps may write an element more than once. These, and
    steps of plain parameters and of those in formats that share scales, are compared within the
    step, with a copy that lives as long as the step. An element that one step changes and a later
    one changes back is given if both come between two takes. What PyTorch's own operations write
    outside of a step, as `load_state_dict` and `copy_` do, is found by the tensor's version, and
    writes to plain parameters by their digest: the parameter is then given whole.

    Args:
        optimizer: any optimizer, fused, foreach or for-loop. Under `fully_shard` each rank takes
            the delta of its shards, and the server applies the deltas of all ranks.
        names: names of parameters, as `model.named_parameters()` gives them, or the model. By
            default those that the optimizer was made with.
        anchor_every: every so many deltas one has all parameters whole, the first included.

    Returns:
        The recorder; `take()` gives a delta and `remove()` ends it.

    Raises:
        TypeError: no optimizer.
        ValueError: `anchor_every` below 1; two parameters of one name.
        RuntimeError: another recorder has the parameters; remove() ends that one.

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


class _Known:
    """The state of a parameter at the last delta.

    Where kernels write leading terms as they are, these mark. In a step that may write more than
    once, and for other formats, the parameter is compared before and after it.
    """

    def __init__(self, p: Tensor, is_new: bool = False) -> None:
        self.p, self.is_new = p, is_new
        self._start()

    def _start(self) -> None:
        x = served(self.p)
        self.is_marked = _is_marked(self.p)
        self.marks = watch(x) if self.is_marked else Marks(x)
        self.before: tuple[Tensor, Tensor, bool] | None = None
        self.digest = self.latest = digest_of(x.view(-1))

    def before_step(self, writes_once: bool) -> None:
        """Keep what the step is going to change, unless marks alone will say it."""
        if self.is_marked and writes_once:
            return
        x, marks = served(self.p).view(-1), self.marks
        if self.is_marked:
            marks.look(x)
        else:
            marks.is_blind |= len(x) != marks.length or digest_of(x) != self.latest
        self.before = x.clone(), marks.bits.clone(), marks.is_blind

    def after_step(self) -> None:
        """Mark what it changed, and nothing that it has changed back."""
        if self.before is None:
            return
        x, marks = served(self.p).view(-1), self.marks
        old, bits, is_blind = self.before
        self.before = None
        if len(x) == len(old) == marks.length and x.dtype == old.dtype:
            marks.bits.copy_(bits)
            mark_changes(marks.bits, x, old)
            marks.stored(x)
            marks.is_blind = is_blind
        else:
            marks.is_blind = True
        if not self.is_marked:
            self.latest = digest_of(x)

    def taken(
        self, name: str, p: Tensor, anchor: bool
    ) -> tuple[DeltaEntry, Tensor | None, Tensor | None]:
        """Return the entry of the parameter in a delta and its data; the next delta starts here."""
        _require_rows(name, p)
        x, marks = served(p).view(-1), self.marks
        after = digest_of(x)
        is_other = self.is_new or p is not self.p or self.is_marked != _is_marked(p)
        is_other |= len(x) != marks.length or x.element_size() != marks.width
        if self.is_marked and not is_other:
            is_other = x.data_ptr() != marks.address
            marks.look(x)
        elif not is_other:
            marks.is_blind |= after != self.latest
        whole = anchor or is_other or marks.is_blind
        before = None if whole else self.digest
        gaps: Tensor | None = None
        width = 0
        codes: Tensor | None = x
        if not whole:
            width, gaps, codes = coded_changes(marks.bits, x) or (0, None, None)
            if gaps is not None and codes is not None and gaps.nbytes + codes.nbytes >= x.nbytes:
                width, gaps, codes = 0, None, x
        entry = DeltaEntry(
            DTYPES[x.dtype], list(p.shape), place_of(p), len(x), width, before, after
        )
        if is_other:
            del self.marks, marks
            self.p, self.is_new = p, False
            self._start()
        else:
            marks.clear(served(p))
            self.digest = self.latest = after
        return entry, gaps, codes


def served(p: Tensor) -> Tensor:
    """Return the compute tensor of a parameter on this rank, which a plain model stores."""
    own: Any = local(p)
    x = own.compute_tensor if isinstance(own, MCFTensor) else own
    return x.detach().contiguous()


def _is_marked(p: Tensor) -> bool:
    """Whether kernels write what a plain model holds, as it lies in memory."""
    own: Any = local(p)
    return (
        isinstance(own, MCFTensor)
        and own.compute_tensor is own._component0
        and own._component0.is_contiguous()
        and not own._component0.is_inference()
        and own.numel() > 0
    )


def _require_rows(name: str, p: Tensor) -> None:
    placements = getattr(p, "placements", ())
    if not all(x.is_replicate() or x.is_shard(0) for x in placements):
        raise NotImplementedError(
            f"deltas: {name} of shape {tuple(p.shape)} is sharded as {tuple(placements)}, and a "
            "delta has whole rows; shard it along its first dimension, or gather it"
        )
