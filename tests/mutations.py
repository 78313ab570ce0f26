"""Small changes that make the library wrong: some test must notice each.

    python tests/mutations.py                              # 300 mutants of all modules; hours
    python tests/mutations.py arithmetic/noise.py -n 20    # 20 mutants of a module
    python tests/mutations.py "formats/*" --all --list     # show all mutants of a folder
    python tests/mutations.py --seed 7                     # another sample
    python tests/mutations.py --slow                       # with the cases of `make test-all`

One run of `make test` notes which tests reach which lines. Each mutant is a copy of the package,
with which tests run until one fails: those that reach its line, the narrowest first, then the
others of its module and its folder, which may reach it in another process or by what an earlier
test left in a cache. The mutants that survive are shown. Each of them needs a test, or an entry in
`tests/support/equivalent_mutants.py` that says why it cannot fail. With `--record FILE`, each
outcome is written down as it is known, and the same command goes on with the mutants that are left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from coverage import CoverageData

from support.equivalent_mutants import EQUIVALENT, Equivalent
from support.mutants import Mutant, mutants

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mcftensor"
# The tests of a module: those of its own name, and then those of the first pattern it matches.
TESTS = {
    "arithmetic/*": "numerics test_fingerprint.py",
    "formats/*": "formats numerics test_fingerprint.py",
    "passes/*": "tensor/test_tape*.py kernels test_fingerprint.py",
    "kernels/*": "kernels test_fingerprint.py",
    "dispatch/*": "test_seams.py tensor test_fingerprint.py distributed",
    "operators/*": "test_seams.py tensor test_fingerprint.py distributed",
    "tensor/*": "test_seams.py tensor distributed",
    "training/*": "training distributed",
    "checkpoint/*": "files",
    "export/*": "export",
    "host/*": "host distributed/test_host_processes.py",
    "meters/*": "meters tools distributed",
    "scaling/*": "scaling",
    "bridge/*": "bridge",
    "reproducible/*": "reproducible distributed",
    "serving/*": "serving distributed",
    "tools/*": "tools",
    "wide/*": "wide test_seams.py numerics tensor test_fingerprint.py",
    "convert.py": "tensor files/test_save_file.py",
    "exact.py": "numerics/test_exact.py",
}
RUN = "make", "test", "ARGS={}"
"""The command that runs all tests, with a place for options of pytest."""
FIRST = 20
"""So many of the narrowest tests run before the files of all the others are imported."""
PATIENCE = 180
"""Seconds that one test may take, or the collection of all."""
KILLED, SURVIVED, TIMED_OUT = "killed", "SURVIVED", "timed out"


def modules(patterns: Sequence[str] = ()) -> list[str]:
    """The modules that have tests and match a pattern, relative to the package."""
    found = sorted(x.relative_to(PACKAGE).as_posix() for x in PACKAGE.rglob("*.py"))
    chosen = [x for x in found if not patterns or any(fnmatch(x, p) for p in patterns)]
    return [x for x in chosen if any(fnmatch(x, p) for p in TESTS)]


def tests_of(module: str) -> list[str]:
    """The files and folders whose tests should notice a mutant of a module."""
    own = sorted(ROOT.glob(f"tests/*/test_{Path(module).stem}.py"))
    names = TESTS[_pattern_of(module)].split()
    rest = [x for name in names for x in sorted(ROOT.glob(f"tests/{name}"))]
    return [str(x.relative_to(ROOT)) for x in dict.fromkeys(own + rest)]


class Reach:
    """Which tests reach which lines of the package, as coverage noted it in a run of them all."""

    def __init__(self, path: Path) -> None:
        """Read what a run noted; run the tests first unless this was done since the last change."""
        sources = [x for folder in ("mcftensor", "tests") for x in (ROOT / folder).rglob("*.py")]
        if not path.exists() or path.stat().st_mtime < max(x.stat().st_mtime for x in sources):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            options = f"-q --cov={PACKAGE.name} --cov-context=test --cov-report="
            command = [x.format(options) for x in RUN]
            environment = os.environ | {"COVERAGE_FILE": str(path.absolute())}
            if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
                raise SystemExit("Tests fail already: no mutant is tried.")
        self._data = CoverageData(str(path))
        self._data.read()
        self._widths: Counter[str] = Counter()
        for name in self._data.measured_files():
            for contexts in self._data.contexts_by_lineno(name).values():
                self._widths.update(contexts)

    def tests_at(self, module: str, first: int, last: int) -> list[str]:
        """The test functions that reach one of the lines, those that reach few others first."""
        lines = self._data.contexts_by_lineno(str(PACKAGE / module))
        found: Counter[str] = Counter()
        for context in {x for i in range(first, last + 1) for x in lines.get(i, ()) if x}:
            case = context.rpartition("|")[0]
            found[case.partition("[")[0]] += self._widths[context]
        return sorted(found, key=lambda x: found[x])


def _pattern_of(module: str) -> str:
    return next(p for p in TESTS if fnmatch(module, p))


def is_equivalent(module: str, mutant: Mutant, entries: Sequence[Equivalent]) -> bool:
    """Whether one of the entries is this mutant's."""
    own = module, mutant.function, mutant.kind, mutant.old, mutant.new
    return any((x.module, x.function, x.kind, x.old, x.new) == own for x in entries)


def unmatched(entries: Sequence[Equivalent]) -> list[Equivalent]:
    """The entries that match no mutant of their module any more."""
    sources = {x: PACKAGE / x for x in modules()}
    return [
        x
        for x in entries
        if x.module not in sources
        or not any(is_equivalent(x.module, m, [x]) for m in mutants(sources[x.module].read_text()))
    ]


def run_tests(
    module: str, source: str, reaching: Sequence[str] = (), *, slow: bool = False
) -> tuple[str, str]:
    """What tests say of another source of a module, and which of them fails first."""
    first, more = reaching[:FIRST], reaching[FIRST:]
    rest = [*tests_of(module), *(f"--deselect={x}" for x in reaching)]
    stages = [first, more, rest] if not slow else [[*reaching, *tests_of(module), "-m", ""]]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path in ROOT.iterdir():
            if path != PACKAGE and not path.name.startswith("."):
                (root / path.name).symlink_to(path)
        shutil.copytree(PACKAGE, root / "mcftensor")  # compiled modules too: they stay valid
        (root / "mcftensor" / module).write_text(source)
        for stage in filter(None, stages):
            outcome = _run(root, stage)
            if outcome[0] != SURVIVED:
                return outcome
    return SURVIVED, ""


class _Watch:
    """A plugin of pytest that tells which test begins, and which fails."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.collects, self.failed = False, ""

    def pytest_collection(self) -> None:
        self.collects = True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._pipe.send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")


def _run(root: Path, arguments: Sequence[str]) -> tuple[str, str]:
    """Run pytest in a fork of a process that has imported what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.preloaded"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tests, args=(root, arguments, theirs))
    process.start()
    theirs.close()
    outcome, name = TIMED_OUT, ""
    try:
        while ours.poll(PATIENCE):
            match ours.recv():
                case has_failed, failed:
                    outcome, name = (KILLED if has_failed else SURVIVED), failed
                    break
                case name:
                    pass
    except EOFError:
        outcome = KILLED  # the process has died
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return outcome, name


def _tests(root: Path, arguments: Sequence[str], pipe: Connection) -> None:
    os.setpgrp()  # what it starts ends with it
    os.chdir(root)
    sys.path[:] = [str(root), *(x for x in sys.path if x != str(ROOT))]
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    watch = _Watch(pipe)
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--doctest-modules"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # what is imported before
    status = pytest.main([*options, *arguments], plugins=[watch])
    # Before the collection, a usage error is a conftest that cannot be imported. In it, a test is
    # not found whose name is made of what the mutant changed: it is left to the others.
    unnoticed = [pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED]
    unnoticed += [pytest.ExitCode.USAGE_ERROR] if watch.collects else []
    pipe.send((status not in unnoticed, watch.failed))


def sample(module: str, number: int | None, seed: int) -> list[Mutant]:
    """So many mutants of a module, or all; one of each kind before any has a second."""
    found = mutants((PACKAGE / module).read_text())
    found = [x for x in found if not is_equivalent(module, x, EQUIVALENT)]
    random.Random(f"{seed} {module}").shuffle(found)
    places = defaultdict(itertools.count)
    return sorted(found, key=lambda x: next(places[x.kind]))[:number]


def spread(chosen: Sequence[str], total: int, seed: int) -> dict[str, list[Mutant]]:
    """So many mutants of all modules, one of each module before any has a second."""
    shuffled = random.Random(seed).sample(chosen, len(chosen))
    rows = itertools.zip_longest(*(sample(x, None, seed) for x in shuffled))
    pairs = ((x, m) for row in rows for x, m in zip(shuffled, row, strict=True) if m)
    found: dict[str, list[Mutant]] = {x: [] for x in chosen}
    for module, mutant in itertools.islice(pairs, total):
        found[module].append(mutant)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the chosen mutants. The status is 1 if one survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="patterns of paths within the package (all)")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--total", type=int, default=300, help="mutants of all modules (300)")
    number.add_argument("-n", "--number", type=int, help="mutants of each module")
    number.add_argument("--all", action="store_true", help="all mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (0)")
    parser.add_argument("--slow", action="store_true", help="run the slow cases too")
    parser.add_argument("--workers", type=int, default=1, help="mutants tried side by side (1)")
    parser.add_argument("--record", type=Path, help="a file for the outcomes, to go on from")
    parser.add_argument(
        "--coverage", type=Path, default=ROOT / "out" / "mutations.coverage",
        help="a file for what tests reach, used again until a source changes (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    options = parser.parse_args(arguments)
    names = modules(options.modules)
    if options.all or options.number:
        chosen = {x: sample(x, options.number, options.seed) for x in names}
    else:
        chosen = spread(names, options.total, options.seed)
    record = options.record
    lines = record.read_text().splitlines() if record and record.exists() else []
    known = {x["mutant"]: x for x in map(json.loads, lines)}
    sources = {x: (PACKAGE / x).read_text() for x in chosen}
    tasks = [(x, m, m.difference(sources[x], x)) for x, several in chosen.items() for m in several]
    if options.list:
        print(*(difference for *_, difference in tasks), sep="\n")
        return 0
    reach = Reach(options.coverage)

    def outcome(module: str, mutant: Mutant, difference: str) -> str:
        if difference not in known:
            reaching = reach.tests_at(module, mutant.node.lineno, mutant.node.end_lineno)
            source = mutant.applied(sources[module])
            found = run_tests(module, source, reaching, slow=options.slow)
            known[difference] = dict(
                zip(("mutant", "outcome", "test"), (difference, *found), strict=True)
            )
            if record:
                with record.open("a") as file:
                    print(json.dumps(known[difference]), file=file)
        return known[difference]["outcome"]

    with ThreadPoolExecutor(options.workers) as pool:
        outcomes = pool.map(lambda task: outcome(*task), tasks)
        counts: Counter[str] = Counter()
        for (module, _, difference), found in zip(tasks, outcomes, strict=True):
            counts[found] += 1
            if found == SURVIVED:
                print(f"{module}: {found}\n{difference}", flush=True)
    print(", ".join(f"{counts[x]} {x}" for x in sorted(counts)))
    print(f"{counts[SURVIVED]} of {counts.total()} mutants survive")
    return int(counts[SURVIVED] > 0)


if __name__ == "__main__":
    sys.exit(main())
