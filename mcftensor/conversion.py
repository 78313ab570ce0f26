"""From one format to another with one rounding, whatever the bases."""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor import networks
from mcftensor.rounding import collapse_terms, move

Terms = tuple[Tensor, ...]


def convert_terms(x: Terms, base: torch.dtype, terms: int, noise: Tensor | None) -> Terms:
    """Normalized terms as `terms` normalized terms of dtype `base`.

    A wider base takes every term as it is, and the network gathers them. A narrower one takes the
    whole rounded, then what remains rounded, each remainder exactly.
    """
    if x[0].dtype == base and len(x) <= terms:
        return *x, *(torch.zeros_like(x[0]) for _ in range(terms - len(x)))
    holds_both = torch.promote_types(x[0].dtype, base)
    if holds_both == base:
        entered = [t.to(base) for t in x]
        longer = networks.settle(networks.distill(entered, terms + 1), entered[0])
        return networks.shorten(longer, noise)
    rest = tuple(t.to(holds_both) for t in x)
    peeled = []
    for _ in range(terms):
        peeled.append(collapse_terms(rest, base))
        rest = networks.distill([*rest, -peeled[-1].to(holds_both)], len(rest))
    if noise is not None:
        peeled[-1] = move(peeled[-1], rest[0], noise)
    return networks.settle(networks.distill(peeled, terms), peeled[0])
