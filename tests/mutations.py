"""The library made wrong on purpose, one small change at a time: some test must notice each.

    python tests/mutations.py                 # all; minutes to an hour
    python tests/mutations.py "two_sum"       # those whose name has this in it
    python tests/mutations.py --check         # whether each still has its place in the code

Each change is made in a copy of the tree, in which the tests run that should notice. What survives
is a hole in the tests; so is a change that leaves nothing to import, which shows no test anything.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.mutants import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
TREES = ("mcftensor", "tests", "benchmarks", "studies", "examples", "docs", "pyproject.toml")
TIMEOUT = 900
"""Seconds that the tests of one mutation may take; one that hangs has been noticed."""

CAUGHT, SURVIVED, NOT_RUN = "caught", "SURVIVED", "NOT RUN"


def place_of(mutation: Mutation, root: Path) -> Path:
    """The file that a mutation changes.

    Raises:
        LookupError: there is no such file, or more than one; or not one place of the text in it.
    """
    folder = root / "mcftensor"
    found = [
        f for f in folder.rglob("*.py") if f"/{f.relative_to(root)}".endswith(f"/{mutation.file}")
    ]
    if len(found) != 1:
        raise LookupError(f"{mutation.name}: {len(found)} files are called {mutation.file}")
    count = found[0].read_text().count(mutation.old)
    if count != 1:
        raise LookupError(f"{mutation.name}: {mutation.file} has its text {count} times")
    return found[0]


def outcome(mutation: Mutation, root: Path) -> tuple[str, str]:
    """What becomes of a mutation in a copy of the tree, and which test says so."""
    file = place_of(mutation, root)
    text = file.read_text()
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        status, said = tested(mutation.tests, root)
    finally:
        file.write_text(text)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if status == 0:
        return SURVIVED, ", ".join(mutation.tests)
    if status == 1 and failed:
        return CAUGHT, failed[1]
    return NOT_RUN, said.strip().splitlines()[-1] if said.strip() else f"status {status}"


def tested(tests: tuple[str, ...], root: Path) -> tuple[int, str]:
    """Run tests until the first that fails: pytest's status, and what it says."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "--tb=no",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    try:
        run = subprocess.run(
            [*command, *tests], cwd=root, env=environment, text=True, timeout=TIMEOUT, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, f"FAILED {tests[0]} (it hangs)"
    return run.returncode, run.stdout


def copy_of_the_tree(folder: Path) -> Path:
    """All that tests read."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*TREES, *(f.name for f in ROOT.glob("*.md")), "mkdocs.yml", "Makefile"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)
    return folder


def main() -> int:
    """Run the mutations that were asked for, and say how many survive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of names (all)")
    parser.add_argument("--check", action="store_true", help="only look for the places")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.names or any(n in m.name for n in options.names)]
    for mutation in chosen:
        place_of(mutation, ROOT)
    if options.check:
        print(f"{len(chosen)} mutations have their places")
        return 0
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copy_of_the_tree(Path(folder))
        passes = functools.cache(lambda tests: tested(tests, root)[0] == 0)
        for mutation in chosen:
            start = time.monotonic()
            what, where = NOT_RUN, "its tests fail already"
            if passes(mutation.tests):
                what, where = outcome(mutation, root)
            bad += what != CAUGHT
            seconds = time.monotonic() - start
            print(f"{what:8} {mutation.name}: {where} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutations are caught")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
