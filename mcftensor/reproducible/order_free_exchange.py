"""Leaves between processes: each element's leaves go to its owner, which adds and rounds once.

Only leaves and results are sent, in bf16 for bf16 gradients. With one leaf a process the traffic is
the bytes of a ring's all-reduce or reduce-scatter in bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.reproducible.binned_sums import Layout
from mcftensor.reproducible.order_free_leaves import Leaves, most_kept
from mcftensor.reproducible.order_free_sums import accumulators, merge_into, round_into, sum_into

Pairs = Sequence[tuple[int, Tensor]]  # a process, and what goes to it or comes from it

ACCUMULATOR = torch.int64
ALIGNMENT = 64
"""Bytes: where received tensors begin in memory."""

IDENTITY = -0.0
"""The neutral element of sums, also of negative zeros."""

# Its name from torch 2.13 on, and the one before.
all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None)
)  # type: ignore[assignment]  # builds without both have no processes
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None)
)  # type: ignore[assignment]


class BucketSum:
    """The sum over processes of a bucket of DistributedDataParallel, in two steps: `owned` waits
    for the leaves and has the owners add them; `result` waits for the results of all owners.

    Args:
        group: the processes.
        leaves: the leaves of each tensor of the bucket, or None without any.
        views: the views of the tensors in the bucket.
        out: the bucket.
        counts: the number of leaves of each process.
        accumulates: whether processes were to accumulate from the first leaf on.
        layout: the layout of the sums.
        in_bucket: whether the bucket has the only leaf of this process.
        memory: receive buffers of at most two buckets, for reuse.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        leaves: Sequence[Leaves | None],
        views: Sequence[Tensor],
        out: Tensor,
        counts: Sequence[int],
        accumulates: bool,
        layout: Layout,
        in_bucket: bool,
        memory: list[Tensor],
    ) -> None:
        world, self._rank = group.size(), group.rank()
        self._group, self._out, self._layout = group, out, layout
        self._chunk = max(-(-out.numel() // world), 1)
        most = most_kept(out.dtype)
        self._kept = [0 if accumulates or count > most else count for count in counts]
        if in_bucket and self._kept[self._rank] == 1:
            for one, view in zip(leaves, views, strict=True):
                if one is None:
                    view.fill_(IDENTITY)
            self._own = [out]
        else:
            self._own = self._laid_out(leaves, views, self._kept[self._rank])
        peers = self._peers()
        froms = [peer for peer in peers for _ in range(max(self._kept[peer], 1))]
        self._received = self._memory_for(froms, memory)
        self._work = self._exchanged(
            list(zip(froms, self._received, strict=True)),
            [(peer, self._of(peer, x)) for peer in peers for x in self._own],
        )

    def _memory_for(self, froms: list[int], memory: list[Tensor]) -> list[Tensor]:
        """Return memory for other processes' leaves of the elements that this process owns, by
        message.
        """
        count = len(self._of(self._rank, self._out))
        kinds = [self._out.dtype if self._kept[peer] else ACCUMULATOR for peer in froms]
        sizes = [count * dtype.itemsize for dtype in kinds]
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        starts = list(itertools.accumulate(steps, initial=0))
        blocks = [memory.pop()] if memory else []
        if not blocks or blocks[0].numel() < starts[-1]:
            blocks = [torch.empty(starts[-1], dtype=torch.uint8, device=self._out.device)]
        (self._block,) = blocks
        self._memory = memory
        return [
            self._block[start : start + size].view(dtype)
            for start, size, dtype in zip(starts, sizes, kinds, strict=False)
        ]

    def _peers(self) -> list[int]:
        return [peer for peer in range(self._group.size()) if peer != self._rank]

    def _of(self, owner: int, x: Tensor) -> Tensor:
        """Return the elements of a flat tensor that a process owns, as a view."""
        return x.view(-1)[owner * self._chunk : (owner + 1) * self._chunk]

    def _laid_out(
        self, leaves: Sequence[Leaves | None], views: Sequence[Tensor], kept: int
    ) -> list[Tensor]:
        """Return the kept leaves, or the accumulators, in the layout of the bucket."""
        out = self._out
        dtype, empty = (out.dtype, IDENTITY) if kept else (ACCUMULATOR, 0)
        flats = []
        for i in range(max(kept, 1)):
            flat = torch.full((out.numel(),), empty, dtype=dtype, device=out.device)
            for one, view in zip(leaves, views, strict=True):
                leaf = None if one is None else _leaf(one, i, kept, out.device)
                if leaf is not None:
                    start = view.storage_offset() - out.storage_offset()
                    place = flat.as_strided(view.shape, view.stride(), start)
                    place.copy_(leaf.view(view.shape))
            flats.append(flat)
        return flats

    def _exchanged(self, received: Pairs, sent: Pairs) -> list[Any]:
        """Begin to send tensors to processes, and to receive others."""
        # Single messages: gloo's collectives copy what a process keeps for itself, twice a bucket.
        both = [(dist.irecv, *x) for x in received] + [(dist.isend, *x) for x in sent]
        messages = [
            dist.P2POp(move, x, group=self._group, group_peer=peer)
            for move, peer, x in both
            if x.numel()
        ]
        return dist.batch_isend_irecv(messages) if messages else []

    def owned(self) -> None:
        """Add what this process owns, and begin to send it to all."""
        for work in self._work:
            work.wait()
        own = self._of(self._rank, self._out)
        every = [*(self._of(self._rank, x) for x in self._own), *self._received]
        terms = [x for x in every if x.dtype != ACCUMULATOR]
        sum_into(own, terms, [x for x in every if x.dtype == ACCUMULATOR], self._layout)
        self._memory.append(self._block)
        del self._own, self._received, self._block
        peers = self._peers()
        self._work = self._exchanged(
            [(peer, self._of(peer, self._out)) for peer in peers], [(peer, own) for peer in peers]
        )

    def result(self) -> Tensor:
        """Return the bucket, with the sums in it."""
        for work in self._work:
            work.wait()
        return self._out


def _leaf(leaves: Leaves, i: int, kept: int, device: torch.device) -> Tensor | None:
    if not kept:
        return leaves.accumulated(device)
    return leaves.kept[i] if i < len(leaves.kept) else None


class OwnerExchange:
    """In the place of a reduce-scatter of `fully_shard`: the leaves themselves go to their owner.

    Attributes:
        received: (processes, elements), the leaves of the latest reduction; None where there was
            nothing to exchange, as on one process.
        replicas: the processes with copies of the same shard, if any.
        processes: with other leaves.
        is_padding: whether the leaf of this process counts for nothing.
        is_active: whether it is not torch's own reduce-scatter.
    """

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.replicas: dist.ProcessGroup | None = None
        self.processes = 0
        self.is_padding = False
        self.is_active = True

    def arrange(self, given: dict[str, Any]) -> None:
        """Have a reduction of `fully_shard` be a sum by this object, without an all-reduce."""
        if not self.is_active:
            return
        shards = given["reduce_scatter_group"]
        self.received = None
        self.replicas = given["all_reduce_group"]
        self.processes = 1 if shards is None else shards.size()
        if self.replicas is not None:
            self.processes *= self.replicas.size()
        given["all_reduce_group"] = given["reduce_dtype"] = None
        given["gradient_divide_factor"] = 1.0
        given["force_sum_reduction_for_comms"] = True

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for a reduction, as torch asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Exchange the leaves; what becomes of them is seen to when torch has cut the shards."""
        if not self.is_active:
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        if not self.processes:
            raise RuntimeError(
                "order_free_gradients: this torch does not reduce gradients of fully_shard as the "
                "library knows it; use DistributedDataParallel, or a release that the table of "
                "patches names"
            )
        if self.is_padding:
            input_tensor.fill_(IDENTITY)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(
            received.view(torch.uint8), input_tensor.view(torch.uint8), group=group
        )
        self.received = received.view(group.size(), -1)


def sum_over_replicas(
    group: dist.ProcessGroup,
    accumulator: Tensor,
    sizes: Sequence[int],
    outs: Sequence[Tensor],
    layout: Layout,
) -> None:
    """Add the accumulators of processes with copies of the same shards, and write the sums."""
    world = group.size()
    chunk = -(-accumulator.numel() // world)
    sent = accumulators(chunk * world, accumulator.device)
    sent[: accumulator.numel()] = accumulator
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    own, *others = received.view(world, chunk).unbind()
    merge_into(own, others, layout)
    for dtype in {x.dtype for x in outs}:
        rounded = torch.empty(chunk, dtype=dtype, device=own.device)
        round_into(rounded, own, layout)
        whole = torch.empty(chunk * world, dtype=dtype, device=own.device)
        all_gather(whole, rounded, group=group)
        for part, out in zip(whole[: accumulator.numel()].split(list(sizes)), outs, strict=True):
            if out.dtype == dtype:
                out.copy_(part.view(out.shape))
