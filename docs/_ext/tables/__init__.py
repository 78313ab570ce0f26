"""Tables of the pages, from the results that are committed under `benchmarks/results`."""

from __future__ import annotations

import importlib

MODULES = (
    *("accuracy", "bert", "breaks", "deltas", "ecosystem", "findings", "gpt2", "house", "judged"),
    *("late", "logits", "number_formats", "operators", "speed", "training", "updates"),
)


def made(name: str) -> str:
    """The table that pages ask for by a name: of the function called so."""
    modules = (importlib.import_module(f"tables.{module}") for module in MODULES)
    found = (getattr(module, name.replace(" ", "_"), None) for module in modules)
    function = next(filter(None, found), None)
    if function is None:
        raise LookupError(f"there is no table called {name!r}")
    text: str = function()
    return text
