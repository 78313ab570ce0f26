"""The leaves of one tensor in a step: as they came while they are few, else as accumulators."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcftensor.reproducible.binned_sums import Layout
from mcftensor.reproducible.order_free_sums import accumulators, add_to, sum_into

ACCUMULATOR_BYTES = 8


def most_kept(dtype: torch.dtype) -> int:
    """Return the number of leaves that take no more memory than accumulators."""
    return ACCUMULATOR_BYTES // dtype.itemsize


@dataclass(eq=False)
class Leaves:
    """The leaves of one tensor, flat.

    Attributes:
        count: the number of elements of a leaf.
        layout: the layout of the sum of all leaves of the step, on all processes.
        accumulates: whether this process will have more leaves than are kept separately.
        kept: the separate leaves.
        accumulator: the sum of the other leaves, or None.
    """

    count: int
    layout: Layout
    accumulates: bool
    kept: list[Tensor] = field(default_factory=list)
    accumulator: Tensor | None = None

    def add(self, *leaves: Tensor) -> None:
        """Take leaves in. They belong to this object then."""
        self.kept += leaves
        if self.accumulates or len(self.kept) > most_kept(leaves[0].dtype):
            self.accumulated(leaves[0].device)

    def accumulated(self, device: torch.device) -> Tensor:
        """Return all leaves as accumulators."""
        if self.accumulator is None:
            self.accumulator = accumulators(self.count, device)
        add_to(self.accumulator, self.kept, self.layout)
        self.kept.clear()
        return self.accumulator

    def sum_into(self, out: Tensor) -> None:
        """Write the sum of all leaves, rounded once."""
        sum_into(
            out, self.kept, [] if self.accumulator is None else [self.accumulator], self.layout
        )
