"""Which cases of a test are run by default: every value is in some, and so are most pairs."""

import pytest


def diagonal(item: pytest.Function) -> int:
    """The sum of the places that the values of a case have among those of their parameters."""
    places = dict(item.callspec.indices)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        for name in names[1:]:  # which share the place of the first
            del places[name]
    return sum(places.values())
