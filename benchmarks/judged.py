"""The library judged by tests that others wrote: `make judged SUITES=folder`.

The folder holds clones of repositories, each under its own name: herbie (herbie-fp/herbie), FPBench
(FPBench/FPBench), QD (BL-highprecision/QD), accupy (nschloe/accupy) and flashoptim
(databricks/flashoptim). Nothing of theirs is copied: formulas, conditions and tolerances are read
from the clones. Writes `benchmarks/results/judged.json`, which the page on these tests shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fpcore.verdicts import KINDS, suite
from speed.machine import describe
from suites import accupy, flashoptim, qd

ROOT = Path(__file__).parents[1]
REPOSITORIES = {
    "herbie": "herbie-fp/herbie",
    "FPBench": "FPBench/FPBench",
    "QD": "BL-highprecision/QD",
    "accupy": "nschloe/accupy",
    "flashoptim": "databricks/flashoptim",
}
DEPTH = 100_000
"""Of Python's stack: formulas that programs wrote are deep."""


def commit(clone: Path) -> str:
    """The commit of a clone."""
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Judge by each suite that is there, or by those that are named, and write what is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the clones are")
    parser.add_argument("--count", type=int, default=32, help="inputs of each formula")
    parser.add_argument("--step", type=int, default=8, help="one in so many exponents of float32")
    parser.add_argument("--only", nargs="*", default=list(REPOSITORIES), help="suites")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/judged.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.setrecursionlimit(DEPTH)
    folder: Path = options.folder

    def say(line: str) -> None:
        print(line, flush=True)

    runs: dict[str, Callable[[Path], Any]] = {
        "herbie": lambda clone: suite(clone / "bench", options.count, say),
        "FPBench": lambda clone: suite(clone / "benchmarks", options.count, say),
        "QD": qd.run,
        "accupy": accupy.run,
        "flashoptim": lambda clone: flashoptim.run(clone, options.step),
    }
    results = json.loads(options.out.read_text()) if options.out.exists() else {"suites": {}}
    for name in options.only:
        clone = folder / name
        if not clone.is_dir():
            print(f"{name}: there is no {clone}; git clone https://github.com/{REPOSITORIES[name]}")
            continue
        results["suites"][name] = {
            "repository": REPOSITORIES[name],
            "commit": commit(clone),
            "found": runs[name](clone),
        }
    results |= {
        "machine": describe("cpu", packages=("mpmath",)),
        "kinds": KINDS,
        "inputs": options.count,
    }
    options.out.write_text(written(results))
    return 0


def written(results: dict[str, Any]) -> str:
    """JSON with a line for each formula."""
    text = json.dumps(results, indent=1)
    for entry in (e for s in results["suites"].values() for e in _lines(s["found"])):
        long = json.dumps(entry, indent=1).replace("\n", "\n    ")
        text = text.replace(long, json.dumps(entry))
    return text + "\n"


def _lines(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


if __name__ == "__main__":
    sys.exit(main())
