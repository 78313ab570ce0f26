"""Thinning chooses among all combinations of values, not among every n-th of them."""

from itertools import product
from types import SimpleNamespace

import pytest

from support.thinning import diagonals


def cases(*columns, fixture=()):
    """Collected cases of one test, over the product of columns of names and values."""
    found = []
    for values in product(*(rows for _, rows in columns), fixture or [None]):
        marks = [SimpleNamespace(args=(names, rows)) for names, rows in columns]
        params = {"f": values[-1]} if fixture else {}
        for (names, _), row in zip(columns, values, strict=False):
            params |= zip(names.split(","), row if "," in names else [row], strict=True)
        found.append(
            SimpleNamespace(
                nodeid=f"test.py::test[{values}]",
                get_closest_marker=lambda name: name == "thinned",
                iter_markers=lambda name, marks=marks: marks,
                callspec=SimpleNamespace(params=params, values=values),
            )
        )
    return found


@pytest.mark.parametrize("of", [2, 3, 4])
def test_every_value_remains(of):
    columns = ("x", "abcd"), ("y", "efgh")
    kept = [x.callspec.values[:2] for x, total in diagonals(cases(*columns)) if total % of == 0]
    assert len(kept) == {2: 8, 3: 6, 4: 4}[of]
    assert {x for x, _ in kept} == set("abcd")
    assert {y for _, y in kept} == set("efgh")


def test_names_that_share_their_values_count_once():
    columns = [("x,y", [("a", 1), ("a", 2), ("b", 1)])]
    assert [total for _, total in diagonals(cases(*columns))] == [0, 1, 2]


def test_values_of_fixtures_count():
    totals = [total for _, total in diagonals(cases(("x", "ab"), fixture=("f1", "f2")))]
    assert totals == [0, 1, 1, 2]
