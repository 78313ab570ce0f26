"""The classes of logits, which the processes of a group may divide among themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.reproducible.softmax_terms import MOST_CLASSES

# Numbers in the message about a part: its classes, its dimensions, and the sizes of the others.
_MESSAGE = 10


class Vocabulary(NamedTuple):
    """The classes of rows.

    Attributes:
        classes: their number, over all processes.
        first: the class of the first logit of this process.
        group: the processes that divide them; None for one process.
    """

    classes: int
    first: int
    group: dist.ProcessGroup | None

    def summed(self, x: Tensor) -> Tensor:
        """Sum integers over the processes, in place, and return them."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def part(self, x: Tensor, size: int) -> Tensor:
        """Return the part of a vector of all classes that belongs to this process."""
        return x if self.group is None else x[self.first : self.first + size]

    def owned(self, index: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
        """Return local indices, and a mask of the indices that belong to this process.

        The mask is None if this process has all classes.
        """
        if self.group is None:
            return index, None
        own = index - self.first
        return own.clamp(0, max(size - 1, 0)), (own >= 0) & (own < size)

    def picked(self, x: Tensor, index: Tensor) -> Tensor:
        """Return the logits at indices of the last dimension, in float64."""
        own, is_own = self.owned(index, x.shape[-1])
        if is_own is None:
            return x.gather(-1, own).double()
        if x.shape[-1] == 0:
            bits = torch.zeros(index.shape, dtype=torch.int64, device=x.device)
        else:  # all but one process add zero to the bits, so that NaN and -0 arrive too
            bits = x.gather(-1, own).double().view(torch.int64)
            bits = torch.where(is_own, bits, 0)
        return self.summed(bits).view(torch.float64)


def vocabulary_of(name: str, x: Tensor, group: dist.ProcessGroup | None) -> Vocabulary:
    """The classes of logits, whose last dimension is a part of each process of a group."""
    if group is None:
        return Vocabulary(x.shape[-1], 0, None)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name}: group is {group!r}; give a process group that has this process, such as "
            "torch.distributed.group.WORLD or mesh.get_group()"
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{name}: this process is not in group; give a group that has it")
    own = [x.shape[-1], x.dim(), *x.shape[:-1]][:_MESSAGE]
    message = torch.tensor(own + [0] * (_MESSAGE - len(own)), device=x.device)
    gathered = [torch.empty_like(message) for _ in range(size)]
    dist.all_gather(gathered, message, group=group)
    parts = torch.stack(gathered).tolist()
    for other, part in enumerate(parts):
        if part[1:] != parts[0][1:]:
            shapes = [(*p[2 : p[1] + 1], p[0]) for p in (parts[0], part)]
            raise ValueError(
                f"{name}: the logits of rank 0 of the group have shape {shapes[0]} and those of "
                f"rank {other} have {shapes[1]}, with the vocabulary last; give all ranks the "
                "same rows"
            )
    lengths = [part[0] for part in parts]
    if not 1 <= sum(lengths) <= MOST_CLASSES:
        raise ValueError(
            f"{name}: the processes have {sum(lengths)} classes together; give 1 to {MOST_CLASSES}"
        )
    return Vocabulary(sum(lengths), sum(lengths[:rank]), group)
