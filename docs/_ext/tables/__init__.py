"""Tables of the pages, from the results that are committed under `benchmarks/results`."""

from __future__ import annotations

from tables import (
    accuracy,
    bert,
    breaks,
    deltas,
    ecosystem,
    findings,
    gpt2,
    house,
    judged,
    late,
    logits,
    number_formats,
    operators,
    order,
    speed,
    training,
    updates,
)

MODULES = (
    accuracy,
    bert,
    breaks,
    deltas,
    ecosystem,
    findings,
    gpt2,
    house,
    judged,
    late,
    logits,
    number_formats,
    operators,
    order,
    speed,
    training,
    updates,
)


def made(name: str) -> str:
    """The table that pages ask for by a name: of the function called so."""
    function = name.replace(" ", "_")
    for module in MODULES:
        if hasattr(module, function):
            text: str = getattr(module, function)()
            return text
    raise LookupError(f"there is no table called {name!r}")
