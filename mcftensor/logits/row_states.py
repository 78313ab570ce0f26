"""What the rows of logits have in common with all of their elements: the largest, and a sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.logits.row_chunks import logit_counts, logit_map
from mcftensor.logits.softmax_terms import binary_places


class RowState(NamedTuple):
    """Of rows of logits, in float64.

    Attributes:
        most: the largest logit.
        sum: the sum of e^(x - most), at least 1; NaN if `most` is not finite.
        log_sum: its logarithm.
    """

    most: Tensor
    sum: Tensor
    log_sum: Tensor


def state_of(x: Tensor, group: dist.ProcessGroup | None = None) -> RowState:
    """The state of rows, which are the last dimension; of all processes of a group together, each
    of which has a part of every row."""
    most = x.amax(-1).double()
    if group is None:
        return _finished(most, logit_counts(x, most, binary_places(x.shape[-1])), x.shape[-1])
    classes = torch.tensor(x.shape[-1], device=x.device)
    dist.all_reduce(classes, group=group)
    # Not all back ends pass on NaN: a largest logit of NaN is infinite, and counted.
    is_nan = most.isnan()
    most = torch.where(is_nan, torch.inf, most)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    counts = logit_counts(x, most, binary_places(int(classes)))
    both = torch.stack([counts, is_nan.long()])
    dist.all_reduce(both, group=group)
    most = torch.where(both[1] > 0, torch.nan, most)
    return _finished(most, both[0], int(classes))


def _finished(most: Tensor, counts: Tensor, classes: int) -> RowState:
    total = counts.double() * 2.0 ** -binary_places(classes)
    total = torch.where(most.isfinite(), total, torch.nan)
    return RowState(most, total, logit_map("log", [total.unsqueeze(-1)], [], torch.float64)[..., 0])
