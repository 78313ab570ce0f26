"""Mutants of a function, and what `tests/mutations.py` does with them."""

import dataclasses
import os
import sys
from textwrap import dedent

import pytest

import mutations
from support.equivalent_mutants import EQUIVALENT, Equivalent
from support.mutants import mutants

SOURCE = dedent('''
    """A module."""


    def f(x: int, y=1):
        """A function."""
        x = floor(x)
        if x < y and not x:
            y += 2  # ½ of it
        return g(x, y - x)
''')


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("comparison", ["x <= y"]),
        ("logic", ["x < y or not x"]),
        ("condition", ["not (x < y and (not x))"]),
        ("sign", ["x"]),
        ("operator", ["y -= 2", "y + x"]),
        ("term", ["y", "-x"]),
        ("constant", ["2", "0", "y += 3", "y += 1"]),
        ("name", ["ceil(x)"]),
        ("arguments", ["g(y - x, x)"]),
        ("call", ["x", "x"]),
        ("return", ["return None"]),
        ("statement", ["pass", "pass"]),
    ],
)
def test_mutants_of_a_function(kind, expected):
    found = [x for x in mutants(SOURCE) if x.kind == kind]
    assert [x.new for x in found] == expected
    assert {x.function for x in found} == {"f"}


def test_a_sum_that_is_rounded_once():
    source = "def f(a, b):\n    return round_to(add_odd(a, b), t)\n"
    assert [x.new for x in mutants(source) if x.kind == "rounding"] == [
        "add_odd(a, b).to(t)",
        "a + b",
    ]


def test_the_rest_of_the_text_stays():
    (mutant,) = [x for x in mutants(SOURCE) if x.new == "y += 3"]
    assert mutant.applied(SOURCE) == SOURCE.replace("y += 2", "y += 3")
    (mutant,) = [x for x in mutants(SOURCE) if x.new == "-x"]
    assert mutant.applied(SOURCE) == SOURCE.replace("y - x", "(-x)")
    assert [x for x in mutant.difference(SOURCE, "m.py").splitlines() if x[0] in "-+"][2:] == [
        "-    return g(x, y - x)",
        "+    return g(x, (-x))",
    ]


@pytest.mark.parametrize("module", ["arithmetic/rounding.py", "tensor/leading_view.py"])
def test_all_mutants_of_a_module_compile(module):
    source = (mutations.PACKAGE / module).read_text()
    for mutant in mutants(source):
        compile(mutant.applied(source), module, "exec")


@pytest.mark.parametrize("entry", EQUIVALENT, ids=lambda x: f"{x.module}: {x.new}")
def test_equivalent_mutants_exist_and_say_why(entry):
    assert mutations.unmatched([entry]) == []
    assert len(entry.why.split()) > 4


def test_an_entry_without_its_mutant_is_reported():
    module = "arithmetic/rounding.py"
    mutant = mutants((mutations.PACKAGE / module).read_text())[0]
    entry = Equivalent(module, mutant.function, mutant.kind, mutant.old, mutant.new, "")
    others = [
        dataclasses.replace(entry, old="nothing"),
        dataclasses.replace(entry, module="nothing.py"),
    ]
    assert mutations.is_equivalent(module, mutant, [entry])
    assert mutations.unmatched([entry, *others]) == others


def test_every_pattern_has_modules_and_tests():
    for pattern in mutations.TESTS:
        chosen = mutations.modules([pattern])
        assert chosen
        for module in chosen:
            tests = mutations.tests_of(module)
            assert tests
            assert all((mutations.ROOT / x).exists() for x in tests)


def test_tests_of_its_own_name_come_first():
    own, *others = mutations.tests_of("arithmetic/eft.py")
    assert own == "tests/numerics/test_eft.py"
    assert "tests/numerics" in others


def test_a_sample_takes_one_mutant_of_each_module_before_a_second():
    names = mutations.modules()
    found = mutations.spread(names, 50, seed=0)
    assert found == mutations.spread(names, 50, seed=0)
    counts = [len(x) for x in found.values()]
    assert (sum(counts), set(counts)) == (50, {0, 1})
    assert found != mutations.spread(names, 50, seed=1)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one module and its tests."""
    for folder in ("mcftensor/part", "tests/part"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mcftensor/__init__.py").touch()
    (tmp_path / "mcftensor/part/one.py").write_text("def f(x):\n    return x < 1\n")
    (tmp_path / "tests/part/test_one.py").write_text(
        "import pytest\n"
        "import mcftensor\n"
        "from mcftensor.part.one import f\n"
        "@pytest.mark.parametrize('x', [0, -1])\n"
        "def test_small(x):\n    assert f(x)\n"
        "def test_both():\n    assert f(0) and not f(2)\n"
        "def test_package():\n    assert mcftensor.__file__\n"
    )
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "PACKAGE", tmp_path / "mcftensor")
    monkeypatch.setattr(mutations, "TESTS", {"part/*": "part"})
    monkeypatch.setattr(mutations, "PATIENCE", 20)
    command = f"{sys.executable} -m pytest -p no:cacheprovider {{}}"
    monkeypatch.setattr(mutations, "RUN", ("sh", "-c", command))
    return tmp_path


BOTH = "tests/part/test_one.py::test_both"


@pytest.mark.parametrize("reaching", [[], [BOTH]])
@pytest.mark.parametrize(
    ("body", "outcome", "test"),
    [
        ("return x < 2", mutations.SURVIVED, ""),
        ("return x < 3", mutations.KILLED, BOTH),
        ("while x > 1: pass\n    return True", mutations.TIMED_OUT, BOTH),
        ("import os; os._exit(0)", mutations.KILLED, BOTH),
        ("return", mutations.KILLED, None),
        ("return f", mutations.KILLED, BOTH),
    ],
)
def test_tests_of_a_mutant(package, monkeypatch, reaching, body, outcome, test):
    monkeypatch.setattr(mutations, "PATIENCE", 4)
    found = mutations.run_tests("part/one.py", f"def f(x):\n    {body}\n", reaching)
    assert found[0] == outcome
    if test is not None and reaching:
        assert found[1] == test


def test_a_module_that_cannot_be_imported(package):
    assert mutations.run_tests("part/one.py", "1 / 0\n")[0] == mutations.KILLED


def test_tests_that_a_mutant_renames_are_left_to_the_others(package):
    source = "def f(x):\n    return True\n"
    found = mutations.run_tests("part/one.py", source, ["tests/part/test_one.py::test_gone"])
    assert found == (mutations.KILLED, BOTH)


def test_what_tests_reach(package):
    path = package / "out" / "coverage"
    reach = mutations.Reach(path)
    assert reach.tests_at("part/one.py", 2, 2) == [BOTH, BOTH.replace("both", "small")]
    assert reach.tests_at("part/one.py", 1, 1) == []  # at import
    written = path.stat().st_mtime_ns
    mutations.Reach(path)
    assert path.stat().st_mtime_ns == written
    os.utime(package / "tests/part/test_one.py")
    mutations.Reach(path)
    assert path.stat().st_mtime_ns > written


def test_survivors_are_shown(package, capsys, monkeypatch):
    tried = []

    def run(module, source, reaching, *, slow):
        assert BOTH in reaching
        tried.append(source)
        return (mutations.KILLED if "None" in source else mutations.SURVIVED), ""

    monkeypatch.setattr(mutations, "run_tests", run)
    files = ["--record", str(package / "record.jsonl"), "--coverage", str(package / "coverage")]
    for _ in range(2):
        assert mutations.main(["--all", "--workers", "2", *files]) == 1
        shown = capsys.readouterr().out
        assert "3 SURVIVED, 1 killed" in shown
        assert "3 of 4 mutants survive" in shown
        assert "+    return (x <= 1)" in shown
    assert len(tried) == 4  # each mutant once
    assert mutations.main(["-n", "1", *files[2:]]) == 1
    assert " of 1 mutants survive" in capsys.readouterr().out


def test_tests_have_to_pass_before(package):
    (package / "tests/part/test_two.py").write_text("def test_two():\n    assert False\n")
    with pytest.raises(SystemExit, match="fail already"):
        mutations.main(["--coverage", str(package / "coverage")])
