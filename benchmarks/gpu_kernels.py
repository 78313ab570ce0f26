"""Every Triton kernel compiled for GPUs that need not be there, and its machine code inspected.

For each target of NVIDIA's and AMD's: registers, how many threads a unit holds, spills, products
contracted with sums, flushed subnormals, and the widths of loads and stores. It needs Triton. What
is in the file already, of as many instructions, is not compiled again. The longest kernel of each
group comes first, for all targets, so that a run that is broken off has some of each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from machine_code.catalogue import catalogue, group_of
from machine_code.inspection import TARGETS, inspect
from speed import machine

KEPT = ("instructions", "registers", "warps", "occupancy", "spills", "loads", "stores")

programs = functools.cache(catalogue)


def figures_of(target: str, name: str) -> dict[str, Any]:
    """Figures and faults of a kernel for a target, or why it has none."""
    torch.set_num_threads(1)
    program = programs()[name]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            seen = inspect(program, target, Path(folder))
        except (RuntimeError, AssertionError) as error:
            return {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
    figures = asdict(seen) | {"instructions": len(program.instructions)}
    return {key: figures[key] for key in KEPT} | {"faults": seen.faults}


def still_there(kernels: dict[str, Any]) -> dict[str, Any]:
    """Return the kernels that the library still has, with as many instructions."""
    lengths = {name: len(program.instructions) for name, program in programs().items()}
    return {
        name: found
        for name, found in kernels.items()
        if found.get("instructions") == lengths.get(name) and {*KEPT} <= {*found}
    }


def chosen(only: Sequence[str], most: int) -> list[str]:
    """The kernels whose names contain one of these, or all; of so many instructions at most.

    Each group's longest kernel comes first, then each group's second; of those the short ones.
    """
    lengths = {name: len(program.instructions) for name, program in programs().items()}
    groups: dict[str, list[str]] = {}
    for name in sorted(lengths, key=lambda name: -lengths[name]):
        if (not only or any(part in name for part in only)) and lengths[name] <= most:
            groups.setdefault(group_of(name), []).append(name)
    ranks = itertools.zip_longest(*reversed(groups.values()))
    return [name for rank in ranks for name in rank if name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a kernel has a fault."""
    parser = argparse.ArgumentParser(prog="gpu_kernels.py", description=__doc__)
    add = parser.add_argument
    add("--targets", nargs="+", choices=TARGETS, default=[*TARGETS], metavar="NAME")
    add("--only", nargs="+", default=[], metavar="PART", help="kernels with this in the name")
    add("--most", type=int, default=1 << 20, help="instructions; long kernels take minutes")
    add("--workers", type=int, default=1, help="processes (default: 1)")
    add("--out", type=Path, help="a JSON file to write; what it has, it keeps")
    options = parser.parse_args(arguments)
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    targets = {t: still_there(kept.get("targets", {}).get(t, {})) for t in TARGETS}
    record = {"machine": machine.describe("cpu", ("triton",)), "targets": targets}
    wanted = [
        (target, name)
        for name in chosen(options.only, options.most)
        for target in options.targets
        if name not in targets[target]
    ]
    for target, name, found in computed(wanted, options.workers):
        targets[target][name] = found
        if options.out:  # what is done is kept, should it be broken off
            options.out.write_text(lines(record))
    faults = [line for t, rows in targets.items() for line in faults_of(t, rows)]
    for line in faults:
        print(line)
    print(f"{sum(map(len, targets.values()))} kernels compiled, {len(faults)} with faults")
    return int(bool(faults))


def computed(
    wanted: Iterable[tuple[str, str]], workers: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The figures of kernels for targets, as they are done. One worker is this process."""
    if workers == 1:
        yield from ((*item, figures_of(*item)) for item in wanted)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting = {pool.submit(figures_of, *item): item for item in wanted}
        for done in as_completed(waiting):
            yield *waiting[done], done.result()


def faults_of(target: str, kernels: dict[str, Any]) -> list[str]:
    """A line for each kernel that is not as it must be."""
    return [
        f"{target}, {name}: {found.get('failed') or '; '.join(found['faults'])}"
        for name, found in kernels.items()
        if found.get("failed") or found["faults"]
    ]


def lines(record: dict[str, Any]) -> str:
    """JSON with a kernel a line, in the order of names."""
    targets = ",\n".join(
        f'"{target}": {{\n'
        + ",\n".join(f" {json.dumps(k)}: {json.dumps(x)}" for k, x in sorted(rows.items()))
        + "\n}"
        for target, rows in record["targets"].items()
    )
    about = json.dumps(record["machine"])
    return f'{{\n"machine": {about},\n"targets": {{\n{targets}\n}}\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
