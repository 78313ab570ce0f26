"""Whole tensors gathered from shards, each on one rank, and shards scattered from them.

An optimizer that needs whole matrices, such as Muon, gets each of them on one rank, its owner. The
ranks own matrices in turn. They share the work, and each stores one whole matrix at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.arithmetic.write_counts import moved
from mcftensor.tensor.components import local
from mcftensor.tensor.dtensor import place_of
from mcftensor.tensor.step_context import outside
from mcftensor.tensor.step_tensors import GradientTensor
from mcftensor.tensor.tensor import MCFTensor


class Division(NamedTuple):
    """The ranks that share DTensors, along one dimension of their mesh."""

    mesh: Any
    axis: int

    @staticmethod
    def of(x: Any) -> Division | None:
        """Return the division of a DTensor, or None for a tensor that is whole on every rank.

        The tensor is gathered on every rank along the other dimensions of the mesh. If several
        dimensions shard rows, the last one is gathered first, so that the rest are consecutive
        rows.
        """
        if local(x) is x:
            return None
        mesh = x.device_mesh
        axes = [i for i, y in enumerate(x.placements) if hasattr(y, "dim") and mesh.size(i) > 1]
        of_rows = [i for i in axes if x.placements[i].is_shard()]
        axis = max(of_rows or axes, key=mesh.size, default=None)
        return None if axis is None else Division(mesh, axis)

    @property
    def size(self) -> int:
        """The number of ranks."""
        size: int = self.mesh.size(self.axis)
        return size

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        rank: int = self.mesh.get_local_rank(self.axis)
        return rank

    def to_owners(self, xs: Sequence[Any]) -> Any:
        """Return the whole of `xs[rank]`, which this rank owns, or None if `xs` is shorter.

        Every element of a DTensor is sent to the owner only, with all terms; gradients are sent
        without tails. Tensors that are whole on every rank, and None, are returned unchanged.
        """
        sent = [[] if self._dim(x) is None else _held(self._part(x)) for x in xs]
        x: Any = xs[self.rank] if self.rank < len(xs) else None
        dim, own = self._dim(x), None if x is None else self._part(x)
        if own is None or dim is None:
            self._send(sent, [])
            return own
        found = [_empty(own, self._shape(x, r)) for r in range(self.size)]
        found[self.rank] = sent[self.rank]
        self._send(sent, found)
        joined = [torch.cat(pieces, dim) for pieces in zip(*found, strict=True)]
        writes = own._count if isinstance(own, MCFTensor) else None
        return _made(joined, own, None if writes is None else moved(writes, -place_of(x)))

    def from_owners(self, whole: Any, like: Sequence[Any]) -> list[Any]:
        """Shard the owners' tensors in the layout and format of `like`, and return this rank's
        shards.
        """
        parts = [None if x is None else self._part(x) for x in like]
        found = [
            [] if part is None else [*_empty(part, self._shape(x, self.rank)), *_counts(part)]
            for x, part in zip(like, parts, strict=True)
        ]
        sent: list[list[Tensor]] = []
        if whole is not None:
            x, own = like[self.rank], parts[self.rank]
            assert own is not None
            if getattr(whole, "_format", None) is not getattr(own, "_format", None):
                whole = _made(_empty(own, x.shape), own, None).copy_(whole)
            sent = [[*shard, *_counts(whole)] for shard in self._shards(x, _held(whole))]
            found[self.rank] = sent[self.rank]
        self._send(sent, found)
        return [
            None if part is None else self._placed(x, part, pieces)
            for x, part, pieces in zip(like, parts, found, strict=True)
        ]

    def _send(self, sent: Sequence[list[Tensor]], found: Sequence[list[Tensor]]) -> None:
        """Exchange lists of tensors, each list with the rank of its position.

        `sent` are the tensors to send, and `found` the memory to receive into.
        """
        operations = [
            dist.P2POp(
                function,
                piece.view(-1).view(torch.uint8),  # every backend supports uint8
                group=self.mesh.get_group(self.axis),
                group_peer=peer,
            )
            for function, lists in ((dist.isend, sent), (dist.irecv, found))
            for peer, pieces in enumerate(lists)
            for piece in pieces
            if peer != self.rank and piece.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _dim(self, x: Any) -> int | None:
        """Return the dimension of a tensor that is sharded over these ranks, or None."""
        dim: int | None = None if local(x) is x else getattr(x.placements[self.axis], "dim", None)
        return dim

    def _part(self, x: Any) -> Tensor:
        """Return this rank's shard, gathered along the other dimensions, on the mesh's device."""
        if local(x) is x:
            return x.to(self.mesh.device_type)
        alone = self._alone(x)
        part = local(x if alone == list(x.placements) else x.redistribute(placements=alone))
        if isinstance(part, MCFTensor) and part._format.shared and self._dim(x):
            return part._collapsed(
                part._format.dtype_of_numbers(part.device)
            )  # blocks do not cross shards
        return part

    def _alone(self, x: Any) -> list[Any]:
        whole = torch.distributed.tensor.Replicate()
        return [y if i == self.axis else whole for i, y in enumerate(x.placements)]

    def _lengths(self, x: Any, dim: int) -> list[int]:
        """Return the length of the sharded dimension on each rank."""
        most = -(-x.shape[dim] // self.size)
        return [max(0, min(most, x.shape[dim] - most * r)) for r in range(self.size)]

    def _shape(self, x: Any, rank: int) -> torch.Size:
        shape, dim = list(x.shape), self._dim(x)
        if dim is not None:
            shape[dim] = self._lengths(x, dim)[rank]
        return torch.Size(shape)

    def _shards(self, x: Any, held: list[Tensor]) -> list[list[Tensor]]:
        """Return the shards of the memory of a whole tensor, one for each rank."""
        dim = self._dim(x)
        if dim is None:
            return [held] * self.size
        split = [torch.split(piece, self._lengths(x, dim), dim) for piece in held]
        return [[piece.contiguous() for piece in shard] for shard in zip(*split, strict=True)]

    def _placed(self, x: Any, part: Tensor, pieces: list[Tensor]) -> Tensor:
        """Return the pieces received from an owner as a tensor sharded like x."""
        counts = len(_counts(part))
        shard = _made(pieces[: len(pieces) - counts], part, None)
        if local(x) is x:
            return shard

        def place() -> Tensor:
            placed: Any = (
                type(x)
                .from_local(
                    shard,
                    x.device_mesh,
                    self._alone(x),
                    run_check=False,
                    shape=x.shape,
                    stride=x.stride(),
                )
                .redistribute(placements=x.placements)
            )
            if counts:
                local(placed)._writes.copy_(  # type: ignore[attr-defined]
                    moved(pieces[-1][0], place_of(x))
                )
            return placed

        return outside(place)


def _held(x: Tensor) -> list[Tensor]:
    """Return the memory of a tensor: all components, or the plain tensor of a gradient tensor."""
    if isinstance(x, GradientTensor) and not x.has_tails:
        return [x._component0.contiguous()]
    return [y.contiguous() for y in (x.components if isinstance(x, MCFTensor) else (x.detach(),))]


def _empty(like: Tensor, shape: torch.Size) -> list[Tensor]:
    """Allocate memory for a tensor of a shape, in the format of another one."""
    held = _held(like)
    shapes = [shape]
    if len(held) > 1 and isinstance(like, MCFTensor):
        shapes = [component.shape(shape) for component in like._format.components]
    return [
        torch.empty(s, dtype=y.dtype, device=y.device) for s, y in zip(shapes, held, strict=True)
    ]


def _made(held: list[Tensor], like: Tensor, writes: Tensor | None) -> Tensor:
    """Return a tensor over given memory, in the format and role of another one."""
    if not isinstance(like, MCFTensor):
        return held[0]
    if isinstance(like, GradientTensor) and not like.has_tails:
        return GradientTensor.over(held[0], like._format)
    return MCFTensor.of(held, like._format, like._role, own=True, writes=writes)


def _counts(x: Tensor) -> list[Tensor]:
    """Return the write count of a tensor in a list; empty unless its rounding is balanced."""
    count = x._count if isinstance(x, MCFTensor) else None
    return [] if count is None else [count.view(1)]
