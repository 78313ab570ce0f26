"""Elementwise sums of flat tensors, whose bits depend on the multiset of terms alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor import kernels
from mcftensor.kernels import Body, Columns
from mcftensor.reproducible.binned_sums import (
    Layout,
    add_body,
    merge_body,
    round_body,
    sum_body,
)

TOGETHER = 8
"""The number of terms that one pass over memory reads."""

_CHUNK = 1 << 16  # elements whose accumulators stay in the caches


def accumulators(count: int, device: torch.device) -> Tensor:
    """Return `count` empty accumulators of 8 bytes each."""
    return torch.zeros(count, dtype=torch.int64, device=device)


def add_to(accumulator: Tensor, terms: Sequence[Tensor], layout: Layout) -> None:
    """Add terms to accumulators, in one pass for each `TOGETHER` of them."""
    for i in range(0, len(terms), TOGETHER):
        _run(add_body(layout), [accumulator, *terms[i : i + TOGETHER]], accumulator)


def merge_into(accumulator: Tensor, others: Sequence[Tensor], layout: Layout) -> None:
    """Add accumulators to other accumulators of the same layout, in place."""
    for i in range(0, len(others), TOGETHER):
        _run(merge_body(layout), [accumulator, *others[i : i + TOGETHER]], accumulator)


def round_into(out: Tensor, accumulator: Tensor, layout: Layout) -> None:
    """Write sums, each rounded once to the dtype of `out`."""
    _run(round_body(layout, out.dtype), [accumulator], out)


def sum_into(
    out: Tensor, terms: Sequence[Tensor], others: Sequence[Tensor], layout: Layout
) -> None:
    """Write the sums of terms and of accumulators, each rounded once.

    Without accumulators, few terms are added directly, to the same bits.
    """
    if not others and 0 < len(terms) <= TOGETHER:
        _run(sum_body(layout, out.dtype), terms, out)
        return
    for start in range(0, out.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        total = accumulators(out[part].numel(), out.device)
        add_to(total, [x[part] for x in terms], layout)
        merge_into(total, [x[part] for x in others], layout)
        round_into(out[part], total, layout)


def _run(body: Body, vectors: Sequence[Tensor], out: Tensor) -> None:
    if out.numel():
        kernels.run(body, Columns([[x] for x in vectors], [], [[out]]))
