"""Which combinations of what tests run over are run by default: all are in `make test-all`."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def thinned(*values: Sequence[Any], of: int) -> list[Any]:
    """All combinations of values, of which one of so many is not marked slow: every value is in
    one that is run, and so is nearly every pair."""
    combinations = zip(product(*values), product(*map(range, map(len, values))), strict=True)
    return [
        pytest.param(
            *chosen,
            marks=[pytest.mark.slow] * (sum(places) % of != 0),
            id="-".join(str(getattr(x, "name", getattr(x, "__name__", x))) for x in chosen),
        )
        for chosen, places in combinations
    ]
