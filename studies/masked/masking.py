"""Which tokens of a window are hidden, and what stands in their place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from pretraining.corpus import CLS, MASK, SEP, SPECIAL

HIDDEN = 0.15  # Of the tokens of a window.
MASKED, RANDOM = 0.8, 0.1  # Of the hidden ones; the rest stays as it is.


class Masked(NamedTuple):
    """Windows with hidden tokens: inputs (batch, time), positions of the hidden tokens (batch,
    hidden), and these tokens themselves, of the same shape."""

    inputs: Tensor
    positions: Tensor
    targets: Tensor


def masked(tokens: Tensor, vocabulary: int, generator: Generator) -> Masked:
    """Hide 15 % of each window of tokens, (batch, time - 2), between a first and a last mark.

    The number is the same in each window. As in BERT, of ten hidden tokens eight become the mask,
    one a random token, and one stays.
    """
    batch, length = tokens.shape
    ends = [tokens.new_full((batch, 1), mark) for mark in (CLS, SEP)]
    inputs = torch.cat([ends[0], tokens, ends[1]], dim=1)
    hidden = max(1, round(HIDDEN * length))
    order = torch.rand((batch, length), generator=generator).argsort(dim=1)
    positions = order[:, :hidden].sort(dim=1).values + 1
    targets = inputs.gather(1, positions)
    draw = torch.rand(targets.shape, generator=generator)
    other = torch.randint(len(SPECIAL), vocabulary, targets.shape, generator=generator)
    shown = torch.where(draw < MASKED, MASK, torch.where(draw < MASKED + RANDOM, other, targets))
    return Masked(inputs.scatter(1, positions, shown), positions, targets)
