"""Small changes that make the library wrong: some test must notice each.

    python tests/mutations.py                              # a sample of all modules; hours
    python tests/mutations.py arithmetic/noise.py -n 20    # 20 mutants of a module
    python tests/mutations.py "formats/*" --all --list     # show all mutants of a folder
    python tests/mutations.py --seed 7                     # another sample

Each mutant is a copy of the package, with which the tests of its module run until one fails. Those
that survive are shown. Each of them needs a test, or an entry in
`tests/support/equivalent_mutants.py` that says why it cannot fail.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from support.equivalent_mutants import EQUIVALENT, Equivalent
from support.mutants import Mutant, mutants

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mcftensor"
# The tests of a module: those of its own name, and then those of the first pattern it matches.
TESTS = {
    "arithmetic/*": "numerics test_fingerprint.py",
    "formats/*": "formats numerics test_fingerprint.py",
    "passes/*": "tensor/test_tape*.py kernels",
    "kernels/*": "kernels",
    "dispatch/*": "tensor",
    "tensor/*": "tensor",
    "training/*": "training",
    "checkpoint/*": "files",
    "meters/*": "meters",
    "scaling/*": "scaling",
    "convert.py": "tensor files/test_save_file.py",
    "exact.py": "numerics/test_exact.py",
}
PATIENCE = 60
"""Seconds that tests may take beyond three times what they take with the module as it is."""
KILLED, SURVIVED, TIMED_OUT, BROKEN = "killed", "SURVIVED", "timed out", "TESTS FAIL ALREADY"


def modules(patterns: Sequence[str] = ()) -> list[str]:
    """The modules that have tests and match a pattern, relative to the package."""
    found = sorted(x.relative_to(PACKAGE).as_posix() for x in PACKAGE.rglob("*.py"))
    chosen = [x for x in found if not patterns or any(fnmatch(x, p) for p in patterns)]
    return [x for x in chosen if any(fnmatch(x, p) for p in TESTS)]


def tests_of(module: str) -> list[str]:
    """The files and folders that should notice a mutant of a module, the likeliest first."""
    own = sorted(ROOT.glob(f"tests/*/test_{Path(module).stem}.py"))
    names = TESTS[_pattern_of(module)].split()
    rest = [x for name in names for x in sorted(ROOT.glob(f"tests/{name}"))]
    return [str(x.relative_to(ROOT)) for x in dict.fromkeys([*own, *rest])]


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


def run_tests(module: str, source: str, timeout: float | None = None) -> str:
    """What the tests of a module say of another source of it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path in ROOT.iterdir():
            if path != PACKAGE and not path.name.startswith("."):
                (root / path.name).symlink_to(path)
        shutil.copytree(PACKAGE, root / "mcftensor")  # compiled modules too: they stay valid
        (root / "mcftensor" / module).write_text(source)
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests_of(module)], cwd=root,
            env=os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return KILLED if process.wait(timeout) else SURVIVED
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def sample(module: str, number: int | None, seed: int) -> list[Mutant]:
    """So many mutants of a module, or all; one of each kind before any has a second."""
    found = mutants((PACKAGE / module).read_text())
    found = [x for x in found if not is_equivalent(module, x, EQUIVALENT)]
    random.Random(f"{seed} {module}").shuffle(found)
    places = defaultdict(itertools.count)
    return sorted(found, key=lambda x: next(places[x.kind]))[:number]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the chosen mutants. The status is 1 if one survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="patterns of paths within the package (all)")
    parser.add_argument("-n", "--number", type=int, default=2, help="mutants of each module (2)")
    parser.add_argument("--all", action="store_true", help="all mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (0)")
    parser.add_argument("--workers", type=int, default=1, help="mutants tried side by side (1)")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    options = parser.parse_args(arguments)
    survived, tried, timeouts = 0, 0, {}
    for module in modules(options.modules):
        source = (PACKAGE / module).read_text()
        chosen = sample(module, None if options.all else options.number, options.seed)
        differences = [x.difference(source, module) for x in chosen]
        if options.list or not chosen:
            print(*differences, sep="\n")
            continue
        pattern = _pattern_of(module)
        if pattern not in timeouts:
            start = time.monotonic()
            if run_tests(module, source) != SURVIVED:
                print(f"{module}: {BROKEN}: {' '.join(tests_of(module))}")
                return 1
            timeouts[pattern] = PATIENCE + 3 * (time.monotonic() - start)
        run = functools.partial(run_tests, module, timeout=timeouts[pattern])
        with ThreadPoolExecutor(options.workers) as pool:
            outcomes = list(pool.map(run, [x.applied(source) for x in chosen]))
        counts = Counter(outcomes)
        print(f"{module:40} " + ", ".join(f"{counts[x]} {x}" for x in sorted(counts)), flush=True)
        survivors = [x for x, what in zip(differences, outcomes, strict=True) if what == SURVIVED]
        print(*survivors, sep="\n", flush=True)
        survived += len(survivors)
        tried += len(chosen)
    if not options.list:
        print(f"{survived} of {tried} mutants survive")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
