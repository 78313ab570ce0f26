"""The state of a row of logits: the largest logit, and a sum of exponentials."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.reproducible.row_chunks import logit_counts, logit_map
from mcftensor.reproducible.softmax_terms import binary_places
from mcftensor.reproducible.vocabularies import Vocabulary


class RowState(NamedTuple):
    """The states of rows of logits, in float64.

    Attributes:
        most: the largest logit.
        sum: the sum of e^(x - most), at least 1; NaN if `most` is not finite.
        log_sum: its logarithm.
    """

    most: Tensor
    sum: Tensor
    log_sum: Tensor


def state_of(x: Tensor, vocabulary: Vocabulary) -> RowState:
    """The state of rows, which are the last dimension; of the parts of all processes together."""
    if x.shape[-1]:
        most = x.amax(-1).double()
    else:
        most = torch.full(x.shape[:-1], -torch.inf, dtype=torch.float64, device=x.device)
    places = binary_places(vocabulary.classes)
    if vocabulary.group is None:
        return _finished(most, logit_counts(x, most, places), places)
    # Not all back ends pass on NaN: a largest logit of NaN is infinite, and counted.
    is_nan = most.isnan()
    most = torch.where(is_nan, torch.inf, most)
    dist.all_reduce(most, dist.ReduceOp.MAX, vocabulary.group)
    both = vocabulary.summed(torch.stack([logit_counts(x, most, places), is_nan.long()]))
    return _finished(torch.where(both[1] > 0, torch.nan, most), both[0], places)


def _finished(most: Tensor, counts: Tensor, places: int) -> RowState:
    total = counts.double() * 2.0**-places
    total = torch.where(most.isfinite(), total, torch.nan)
    return RowState(most, total, logit_map("log", [total.unsqueeze(-1)], [], torch.float64)[..., 0])
