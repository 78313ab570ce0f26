"""Time of an optimizer step: bf16 expansions, PyTorch's own optimizers, and other libraries.

All contenders run in one process and take turns: every round has one step of each, begun one later
each time and backwards every other time. A ratio is the median over rounds of a contender's time
over its baseline's in the same round. The baseline is master weights: the bf16 gradient cast
to fp32, PyTorch's fused optimizer, and the result rounded to the bf16 parameter.

Where memory cannot hold all contenders they run in groups, each with its baseline, so that ratios
compare steps that were taken side by side. Gradients and values are the same for all. A contender
that is not installed, fails, or is not ready after --patience seconds is shown with the reason, and
the others go on.

On a CPU a large temporary is fresh memory from the system at every step, which costs more than the
arithmetic. MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 in the environment keeps it in
the process, and the JSON file says so.

On a GPU the time is measured between two events, from an idle device; a second figure has the
device busy before, so that it does not wait for the host. First steps include compiling, into an
empty cache unless --cache names a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from speed import machine, memory, report
from speed.clocks import clock_of
from speed.contenders import BASELINES, COMPILED, EXPANSIONS, TORCH, Contender
from speed.measuring import measure
from speed.peers import PEERS
from speed.workloads import DEFAULTS, WORKLOADS, make_workload

BASE = BASELINES["AdamW"]
EVERYTHING = [BASE, *TORCH, *EXPANSIONS, *PEERS, *COMPILED]
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def chosen(parts: Sequence[str], compiled: bool) -> list[Contender]:
    """The contenders whose names contain one of `parts`, or all; baselines come by themselves."""
    known = [c for c in EVERYTHING if compiled or c not in COMPILED]
    wanted = [part.lower() for part in parts]
    return [c for c in known if not wanted or any(part in c.name.lower() for part in wanted)]


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure every workload, and show each as it is done."""
    contenders = chosen(options.only, options.compiled)
    if any(contender.compiles for contender in contenders):
        console.print("[dim]starting the compiler[/dim]")
        with contextlib.suppress(RuntimeError):  # contenders that need it will say so
            torch.compile(lambda x: x + 1)(torch.ones(8, device=options.device))
    clock = clock_of(options.device)
    record: dict[str, Any] = {
        "machine": machine.describe(options.device),
        "rounds": options.rounds,
        "workloads": {},
    }
    for name in options.workloads or DEFAULTS[options.device]:
        workload = make_workload(name, options.device)
        with console.status(name) as status:
            found = measure(
                workload,
                contenders,
                options.device,
                clock,
                options.rounds,
                status.update,
                options.patience,
            )
        del workload
        memory.release(options.device)
        console.print(report.table(name, found))
        for line in report.failures(found):
            console.print(line, style="dim", highlight=False, markup=False)
        record["workloads"][name] = found
        # What is done is kept, should a later one be broken off.
        report.write(options.json, record)
        report.draw(options.out / "steps.png", record)
    return record


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="steps.py",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="PART", help="contenders with this in the name")
    add("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME", help=", ".join(WORKLOADS))
    add("--rounds", type=int, default=9, help="steps of each contender (default: 9)")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--threads", type=int, help="of PyTorch on the CPU (default: as it chooses)")
    add("--compiled", action="store_true", help="for-loop steps under torch.compile too (slow)")
    add("--cache", type=Path, help="folder for compiled code (default: a new one)")
    add("--patience", type=float, default=300, help="seconds for the first steps of one contender")
    add("--out", type=Path, default=Path("out/bench"), help="folder for steps.json and steps.png")
    add("--json", type=Path, help="where the figures go instead")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if not chosen(options.only, options.compiled):
        parser.error(f"--only {' '.join(options.only)}: no contender has this in its name")
    options.json = options.json or options.out / "steps.json"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)  # peers tell of kernels that they do without
    console = Console(width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory() as fresh:
        for variable in CACHES:
            os.environ[variable] = str((options.cache or Path(fresh)) / variable.lower())
        run(options, console)
    console.print(f"Wrote {options.json} and {options.out / 'steps.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
