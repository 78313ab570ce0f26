"""Leaves between processes: each element's go to its owner, which adds them and rounds once.

Nothing else travels, so that what is sent is bf16 where gradients are: one leaf a process takes the
bytes of a ring's all-reduce or reduce-scatter in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.arithmetic.binned_sums import Layout
from mcftensor.passes.order_free_sums import accumulators, merge_into, round_into, sum_into
from mcftensor.training.order_free_leaves import ACCUMULATOR_BYTES, Leaves, most_kept

IDENTITY = -0.0
"""What changes no sum, not even that of negative zeros."""

# Its name from torch 2.13 on, and the one before.
all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None)
)  # type: ignore[assignment]  # there are no processes where there is neither
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None)
)  # type: ignore[assignment]


class BucketSum:
    """The sum over processes of a bucket of DistributedDataParallel, in two steps: `owned` waits
    for the leaves and has the owners add them; `result` waits for what they have sent to all.

    Args:
        group: the processes.
        leaves: of the tensors of the bucket, None of one without any.
        views: where these lie in the bucket.
        out: the bucket.
        counts: leaves of each process.
        accumulates: whether processes were to accumulate from the first leaf on.
        layout: of the sums.
        in_bucket: whether the bucket holds the leaf of this process, its only one.
        memory: what others have received into, of at most two buckets, to be used again.
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
        world, rank = group.size(), group.rank()
        self._group, self._out, self._layout = group, out, layout
        self._chunk = -(-out.numel() // world)
        most = most_kept(out.dtype)
        self._kept = [0 if accumulates or count > most else count for count in counts]
        own = self._kept[rank]
        if in_bucket and own == 1 and out.numel() % world == 0:
            for one, view in zip(leaves, views, strict=True):
                if one is None:
                    view.fill_(IDENTITY)
            sent = out
        else:
            sent = self._together(leaves, views, own)
        width = out.dtype.itemsize
        sizes = [self._chunk * (k * width if k else ACCUMULATOR_BYTES) for k in self._kept]
        kept_memory = [memory.pop()] if memory else []
        if not kept_memory or kept_memory[0].numel() < sum(sizes):
            kept_memory = [torch.empty(sum(sizes), dtype=torch.uint8, device=out.device)]
        (self._block,) = kept_memory
        self._received = self._block[: sum(sizes)]
        self._sizes, self._memory = sizes, memory
        self._work: Any = dist.all_to_all_single(
            self._received,
            sent.view(-1).view(torch.uint8),
            sizes,
            [sizes[rank]] * world,
            group=group,
            async_op=True,
        )
        self._sent = sent  # until it is

    def _together(
        self, leaves: Sequence[Leaves | None], views: Sequence[Tensor], kept: int
    ) -> Tensor:
        """What goes to each owner, one after the other: its part of all leaves that were kept, or
        of accumulators."""
        world, out = self._group.size(), self._out
        dtype = out.dtype if kept else torch.int64
        empty = IDENTITY if kept else 0
        sent = torch.empty((world, max(kept, 1), self._chunk), dtype=dtype, device=out.device)
        for i in range(sent.shape[1]):
            flat = torch.full((world * self._chunk,), empty, dtype=dtype, device=out.device)
            for one, view in zip(leaves, views, strict=True):
                leaf = None if one is None else _leaf(one, i, kept, out.device)
                if leaf is not None:
                    start = view.storage_offset() - out.storage_offset()
                    place = flat.as_strided(view.shape, view.stride(), start)
                    place.copy_(leaf.view(view.shape))
            sent[:, i] = flat.view(world, -1)
        return sent

    def owned(self) -> None:
        """Add what this process owns, and begin to send it to all."""
        self._work.wait()
        del self._sent
        terms: list[Tensor] = []
        others: list[Tensor] = []
        for part, kept in zip(self._received.split(self._sizes), self._kept, strict=True):
            if kept:
                terms += part.view(self._out.dtype).view(kept, -1).unbind()
            else:
                others.append(_aligned(part).view(torch.int64))
        own = self._out.new_empty(self._chunk)
        sum_into(own, terms, others, self._layout)
        self._memory.append(self._block)
        del self._received, self._block
        whole = self._chunk * self._group.size()
        fits = whole == self._out.numel()
        self._gathered = self._out if fits else self._out.new_empty(whole)
        self._own = own
        self._work = all_gather(self._gathered, own, group=self._group, async_op=True)

    def result(self) -> Tensor:
        """The bucket, with the sums in it."""
        self._work.wait()
        if self._gathered is not self._out:
            self._out.copy_(self._gathered[: self._out.numel()])
        return self._out


def _leaf(leaves: Leaves, i: int, kept: int, device: torch.device) -> Tensor | None:
    if not kept:
        return leaves.accumulated(device)
    return leaves.kept[i] if i < len(leaves.kept) else None


def _aligned(part: Tensor) -> Tensor:
    """Bytes that may be seen as int64: other processes' leaves before them may be of any number."""
    return part.clone() if part.storage_offset() % ACCUMULATOR_BYTES else part


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
        """Memory for a reduction, as torch asks for it."""
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
