"""Which cases of a test are run by default: every value is in some, and so are most pairs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest


def diagonals(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, int]]:
    """Thinned cases, each with the sum of its values' places among those of their parameters."""
    places = defaultdict(dict)
    for item in items:
        if not item.get_closest_marker("thinned"):
            continue
        joint = [mark.args[0] for mark in item.iter_markers("parametrize")]
        joint = [x.replace(" ", "").split(",") if isinstance(x, str) else list(x) for x in joint]
        fixtures = item.callspec.params.keys() - {name for names in joint for name in names}
        total = 0
        for names in [*joint, *([name] for name in sorted(fixtures))]:
            own = places[(item.nodeid.partition("[")[0], *names)]
            value = tuple(id(item.callspec.params[name]) for name in names)
            total += own.setdefault(value, len(own))
        yield item, total
