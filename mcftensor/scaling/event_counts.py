"""Counts of the events of scaling: rescalings, 8-bit products, fallbacks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar

_COUNTS: ContextVar[Counter[tuple[str, str]] | None] = ContextVar("scaling_counts", default=None)


def count(event: str, name: str) -> None:
    """Count an event within `counting`; outside, do nothing."""
    counts = _COUNTS.get()
    if counts is not None:
        counts[event, name] += 1


@contextlib.contextmanager
def counting() -> Iterator[Counter[tuple[str, str]]]:
    """Count the events of scaling in a block.

    Backward passes are counted if they run on the thread of the call, as on a CPU. On a GPU,
    autograd has its threads.

    Yields:
        A Counter of pairs: `("rescaled", operator)`, an exponent chosen by the numbers instead of
        a rule; `("fp8", "native")` and `("fp8", "emulated")`, products of 8-bit data by the
        device or in float32; `("fallback", operator)`, operators computed in plain float32.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.ones(2, 3), mcf.scaling.scaled(torch.float16))
        >>> with mcf.scaling.counting() as counts:
        ...     y = mcf.scaling.rescale(x * 1e-3)
        >>> counts
        Counter({('rescaled', 'rescale'): 1})
    """
    counts: Counter[tuple[str, str]] = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)
