"""Counts of what scaling does in a stretch of a program: rescalings, products, fallbacks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar

_COUNTS: ContextVar[Counter[tuple[str, str]] | None] = ContextVar("scaling_counts", default=None)


def count(event: str, name: str) -> None:
    """Count an event, if anybody does."""
    counts = _COUNTS.get()
    if counts is not None:
        counts[event, name] += 1


@contextlib.contextmanager
def counting() -> Iterator[Counter[tuple[str, str]]]:
    """Count what scaling does within.

    Backward passes count if they run on the thread of the call, as on a CPU; on a GPU autograd has
    threads of its own.

    Yields:
        A Counter of pairs: `("rescaled", operator)`, where an exponent went by the numbers and not
        by a rule; `("fp8", "native")` and `("fp8", "emulated")`, products of 8-bit data by the
        device's own or in float32; `("fallback", operator)`, what ran in plain float32.

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
