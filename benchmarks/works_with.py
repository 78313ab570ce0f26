"""Try training frameworks over expansions, one process each, and report which work.

The page "Works with" is made from its results. A cell that fails makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results/works-with.json"
TIMEOUT = 900


def tried(name: str) -> dict[str, object]:
    """A row, tried in this process."""
    from ecosystem.row import Row
    from ecosystem.rows import ROWS

    packages, function = ROWS[name]
    row = Row(packages)
    with tempfile.TemporaryDirectory() as folder:
        try:
            function(row, Path(folder))
        except ImportError as error:
            row.says("train", f"not tried: {error}")
        except Exception as error:  # noqa: BLE001
            row.failed = True
            row.cells.setdefault(
                "train", f"FAILS: {type(error).__name__}: {error}".partition("\n")[0]
            )
    return {"versions": row.versions, "cells": row.cells, "failed": row.failed}


def main() -> int:
    """Try all rows, or some, and keep the results of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="names of rows (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        options.results.write_text(json.dumps(tried(options.rows[0])))
        return 0
    import torch

    from ecosystem.rows import ROWS

    held = json.loads(options.results.read_text()) if options.results.exists() else {"rows": {}}
    held["machine"] = {"torch": torch.__version__, "python": platform.python_version()}
    for name in options.rows or ROWS:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, name, "--here", "--results", file.name]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=TIMEOUT
            )
            if done.returncode:
                tail = done.stderr.strip().rpartition("\n")[2]
                found = {"versions": {}, "cells": {"train": f"FAILS: {tail}"}, "failed": True}
            else:
                found = json.loads(Path(file.name).read_text())
        held["rows"][name] = found
        print(name, found["versions"])
        for column, cell in found["cells"].items():
            print(f"    {column}: {cell}", flush=True)
        held["rows"] = {x: held["rows"][x] for x in ROWS if x in held["rows"]}
        options.results.write_text(json.dumps(held, indent=1) + "\n")
    return int(any(held["rows"][name]["failed"] for name in options.rows or ROWS))


if __name__ == "__main__":
    raise SystemExit(main())
