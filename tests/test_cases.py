"""Cases of a function are one item; slow and thinned ones are not generated."""

from itertools import product

import pytest

from support import cases

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from support.cases import pytest_generate_tests, pytest_pycollect_makeitem, pytest_runtest_protocol
"""


@pytest.fixture
def tests(pytester, monkeypatch):
    """A function that runs a module of tests, and says what was collected and how it ended."""
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n slow\n cuda\n thinned\naddopts = -m 'not slow'\n")

    def run(text, *options):
        pytester.makepyfile(text)
        collected = pytester.inline_genitems(*options)[0]
        return [x.name for x in collected], pytester.runpytest_inprocess(*options)

    return run


FAILING = """
import pytest

@pytest.fixture
def fresh():
    return []

@pytest.mark.parametrize("x", range(4))
@pytest.mark.parametrize("y", "ab")
def test_it(x, y, fresh):
    fresh.append(x)
    assert fresh != [2], f"expected no {y}"
"""


def test_all_failures_of_a_function_are_reported(tests):
    names, result = tests(FAILING)
    assert names == ["test_it"]
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*expected no a*", "*expected no b*", "failed in 2 of 8 cases*"])
    for name in ("test_it[[]a-2]", "test_it[[]b-2]"):
        result.stdout.fnmatch_lines([f"*.py::{name}"])


def test_one_case_runs_alone(tests, pytester):
    tests(FAILING)
    path = next(pytester.path.glob("test_*.py"))
    pytester.runpytest_inprocess(f"{path}::test_it[a-2]").assert_outcomes(failed=1)
    pytester.runpytest_inprocess(f"{path}::test_it[a-1]").assert_outcomes(passed=1)
    result = pytester.runpytest_inprocess("-k", "test_it and b-2")
    result.assert_outcomes(failed=1, deselected=7)


def test_the_first_failure_is_enough_with_x(tests):
    _, result = tests(FAILING, "-x")
    result.stdout.fnmatch_lines(["failed in 1 of 8 cases*"])


def test_fixtures_that_fail_and_skips_are_reported(tests):
    names, result = tests(
        """
import pytest

@pytest.fixture(params=[1, 2])
def broken(request):
    if request.param == 2:
        raise ValueError("no two")
    yield
    raise ValueError("no end")

def test_of_a_fixture(broken):
    pass

@pytest.mark.parametrize("x", [1, 2])
def test_skipped(x):
    pytest.skip("because")

@pytest.mark.parametrize("x", [1, 2])
def test_partly_skipped(x):
    if x == 1:
        pytest.skip("because")

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.xfail(strict=True))])
def test_expected_to_fail(x):
    assert x == 1
""",
        "-rs",
    )
    assert len(names) == 4
    result.assert_outcomes(failed=1, skipped=1, passed=2)
    result.stdout.fnmatch_lines(["*no end", "*no two", "failed in 2 of 2 cases*", "*because*"])


ORDER = """
import pytest

@pytest.mark.parametrize("x", range(20))
def test_it(x):
    with open("order.txt", "a") as file:
        print(x, file=file)
"""


def test_cases_are_in_random_order_if_items_are(tests, pytester):
    orders = {}
    for options in ((), ("--random-order-seed=1",), ("--random-order-seed=2",)):
        tests(ORDER, *options, *["--random-order"] * len(options))
        orders[options] = pytester.path.joinpath("order.txt").read_text().split()
        pytester.path.joinpath("order.txt").unlink()
    assert orders[()] == [*map(str, range(20))]
    assert len(set(map(tuple, orders.values()))) == 3
    assert all(sorted(x) == sorted(orders[()]) for x in orders.values())


SLOW = """
import pytest

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_partly(x):
    assert x == 1

@pytest.mark.parametrize("x", [pytest.param(2, marks=pytest.mark.slow)])
def test_wholly(x):
    assert x == 1

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.cuda)])
def test_of_a_gpu(x):
    assert x == 1
"""


def test_what_does_not_run_is_not_collected(tests, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names, result = tests(SLOW)
    assert names == ["test_partly", "test_of_a_gpu"]
    result.assert_outcomes(passed=2)
    names, result = tests(SLOW, "-m", "")
    assert names == ["test_slow", "test_partly", "test_wholly", "test_of_a_gpu"]
    result.assert_outcomes(passed=2, failed=2)


def test_thinning_is_of_values_that_are_run(tests):
    names, _ = tests(
        """
import pytest

@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("x,z", [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("y", "ab")
def test_it(x, y, z):
    pass
""",
        "-k",
        "test_it",
    )
    assert names == ["test_it[a-1-1]", "test_it[a-3-3]", "test_it[b-2-2]"]


@pytest.mark.parametrize("of", [2, 3, 4])
def test_every_value_remains(of):
    places = [dict(zip("xy", pair, strict=True)) for pair in product(range(4), range(4))]
    kept = [p for p in places if cases.diagonal(p, [["x"], ["y"]]) % of == 0]
    assert len(kept) == {2: 8, 3: 6, 4: 4}[of]
    assert {p["x"] for p in kept} == {p["y"] for p in kept} == set(range(4))
