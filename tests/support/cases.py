"""One item for all cases of a test function, and the choice of cases.

A parametrized function is one item. Its cases are generated when it runs, each with fixtures of
its own, and all that fail are reported together, by names that run one alone:

    pytest "tests/tensor/test_structure.py::test_moves_act_on_every_term[bf16x2-sample-cat]"

`make test` generates neither slow cases nor, of thinned functions, those off a diagonal; no run
generates cases for a GPU where there is none. With `-k`, every case is an item.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol


class Sweep(pytest.Function):
    """A parametrized function as one item."""

    definition: Any

    def cases(self) -> list[pytest.Function]:
        """Generate the cases to run, in random order if the items are."""
        found = list(self.parent._genfunctions(self.name, self.definition))
        if self.config.getoption("random_order_enabled", False):
            random.Random(self.config.getoption("random_order_seed")).shuffle(found)
        return [x for x in found if hasattr(x, "callspec")]

    def run(self, nextitem: pytest.Item | None) -> pytest.TestReport:
        """Run every case, or up to the first failure with `-x`; return what they report."""
        start, cases, found = time.time(), self.cases(), []
        stops = self.config.getoption("maxfail") == 1
        for case, following in zip(cases, [*cases[1:], nextitem], strict=True):
            case.reports = []
            case.ihook.pytest_runtest_protocol(item=case, nextitem=following)
            found += case.reports
            if stops and any(x.failed for x in case.reports):
                break
        return self._joined(start, len(cases), found)

    def _joined(self, start: float, count: int, reports: list[pytest.TestReport]) -> Any:
        stop = time.time()
        text: Any = None
        outcome = "passed" if any(x.passed for x in reports if x.when == "call") else "skipped"
        if failed := [x for x in reports if x.failed]:
            outcome = "failed"
            names = "\n".join(f"  {x.nodeid}" for x in failed)
            text = "\n\n".join(f"{x.nodeid} ({x.when})\n{x.longreprtext}" for x in failed)
            text = f"{text}\n\nfailed in {len(failed)} of {count} cases; to run one alone:\n{names}"
        elif outcome == "skipped":
            reasons = [x.longrepr[2] for x in reports if isinstance(x.longrepr, tuple)]
            path, line, _ = self.reportinfo()
            text = str(path), line or 0, reasons[0] if reasons else "no case is chosen"
        return pytest.TestReport(
            self.nodeid, self.location, dict.fromkeys(self.keywords, 1), outcome, text, "call",
            [x for report in failed for x in report.sections], stop - start, start, stop,
        )  # fmt: skip


def cases_of(session: pytest.Session, function: Any) -> list[pytest.Function]:
    """Return the cases of a function that this run takes."""
    items = [x for x in session.items if getattr(x, "function", None) is function]
    return [case for x in items for case in (x.cases() if isinstance(x, Sweep) else [x])]


def _wants_slow(config: pytest.Config) -> bool:
    return config.getoption("markexpr") != "not slow"


def _runs(marks: Iterable[Any], config: pytest.Config) -> bool:
    """Whether this run takes a function or a value with these marks."""
    names = {mark.name for mark in marks}
    is_left_out = "slow" in names and not _wants_slow(config)
    return not is_left_out and ("cuda" not in names or torch.cuda.is_available())


def _has_values(definition: pytest.Function) -> bool:
    """Whether each parameter of a function has a value that this run takes."""
    every = [mark.args[1] for mark in definition.iter_markers("parametrize")]
    return all(
        any(_runs(getattr(value, "marks", ()), definition.config) for value in values)
        for values in every
        if isinstance(values, (list, tuple))
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> list[pytest.Item] | None:
    """Collect a parametrized function as a sweep, and no function that does not run."""
    if isinstance(obj, type) or not collector.istestfunction(obj, name):
        return None
    obj = getattr(obj, "__func__", obj)
    config = collector.config
    item = Sweep.from_parent(collector, name=name)
    if not _runs(item.iter_markers(), config) or not _has_values(item):
        return []
    defined = item._fixtureinfo.name2fixturedefs.values()
    is_parametrized = item.get_closest_marker("parametrize") or any(x[-1].params for x in defined)
    is_named = any(f"::{name}[" in arg for arg in config.args)
    if not is_parametrized or is_named or config.getoption("keyword"):
        return None
    item.definition = obj
    return [item]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a sweep, or one of its cases."""
    if hasattr(item, "reports"):
        item.reports += runtestprotocol(item, nextitem=nextitem, log=False)
        return True
    if not isinstance(item, Sweep):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    item.ihook.pytest_runtest_logreport(report=item.run(nextitem))
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leave out values and cases before they are made."""
    parametrize = metafunc.parametrize

    def chosen(names: Any, values: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        values = [x for x in values if _runs(getattr(x, "marks", ()), metafunc.config)]
        parametrize(names, values, *args, **kwargs)

    metafunc.parametrize = chosen
    yield
    thinned = metafunc.definition.get_closest_marker("thinned")
    if thinned and not _wants_slow(metafunc.config):
        joint = [_names(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")]
        metafunc._calls = [
            x for x in metafunc._calls if not diagonal(x.indices, joint) % thinned.kwargs["of"]
        ]


def _names(argument: Any) -> list[str]:
    return argument.replace(" ", "").split(",") if isinstance(argument, str) else [*argument]


def diagonal(places: dict[str, int], joint: Iterable[list[str]]) -> int:
    """The sum of the places of a case's values among those of their parameters.

    A residue of these sums keeps every value, and most pairs; names that share values count once.
    """
    repeated = {name for names in joint for name in names[1:]}
    return sum(place for name, place in places.items() if name not in repeated)
