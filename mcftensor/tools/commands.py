"""The commands `audit`, `doctor`, `memory` and `selfcheck`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from functools import partial

import torch

from mcftensor.checkpoint.saving import size_in_bytes
from mcftensor.formats import named
from mcftensor.options import say
from mcftensor.tensor import text_tables
from mcftensor.tools import device_report, doctor, memory_fit
from mcftensor.tools.auditing import Audit, audit
from mcftensor.tools.memory_summary import MakeOptimizer, estimate


def run_selfcheck(options: argparse.Namespace) -> int:
    """Say whether a device can be trusted, a line for each group of checks."""
    try:
        device = torch.device(options.device)
        torch.zeros(1, device=device).add(1).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        print(f"python -m mcftensor selfcheck: {options.device}: {reason}", file=sys.stderr)
        return 2
    print(device_report.introduction(device), flush=True)
    lines = []
    for line in device_report.report(device, compiled=not options.eager):
        lines.append(line)
        print(line, flush=True)
    count, failed = (sum(x) for x in zip(*((y.count, len(y.failures)) for y in lines), strict=True))
    seconds = sum(line.seconds for line in lines)
    if failed:
        print(
            f"python -m mcftensor selfcheck: on {device}, {failed} of {count} checks failed. "
            "Results there cannot be trusted: look for fast-math flags, flushing of subnormals, "
            "or a compiler that fuses roundings away, and report these lines",
            file=sys.stderr,
        )
        return 1
    print(f"{count} checks passed on {device} in {seconds:.0f} s")
    return 0


def run_audit(options: argparse.Namespace) -> int:
    """Show what froze between two checkpoints."""
    found = audit(options.before, options.after, threshold=options.threshold, ignore=options.ignore)
    say(found.to_json() if options.json else screen(found, moving=options.all))
    return 1 if found.suspicious else 0


def screen(found: Audit, *, moving: bool) -> str:
    """Return the table, if it has a row, and the summary in one line."""
    if not (moving or found.suspicious):
        return found.summary()
    # Without a terminal there is no width to keep to, and names stay in one piece.
    width = None if sys.stdout.isatty() else 100_000
    console = importlib.import_module("rich.console").Console(width=width)
    with console.capture() as capture:
        console.print(found.table(moving=moving))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    equal = "; the two checkpoints are equal" if found.unchanged == 1 else ""
    return "\n".join([*(line for line in lines if line), "", found.summary() + equal])


def run_doctor(options: argparse.Namespace) -> int:
    """Run a script, and say what its updates lose."""
    report, status = doctor.examine(
        options.program, options.arguments, is_module=options.is_module, steps=options.steps
    )
    rank = os.environ.get("RANK")  # of a launcher, to which a status of 1 is a failure
    if rank in (None, "0"):
        say(report)
    return status if rank is None or status == 2 else 0


def run_memory(options: argparse.Namespace) -> int:
    """Say what a model takes in training, and whether that fits."""
    model = memory_fit.model_of(options.sources)
    optimizer = optimizer_named(options.optimizer)
    size = size_in_bytes(options.memory, "--memory") if options.memory else None
    if size is not None and options.memory.isdecimal() and size < 1 << 20:
        raise ValueError(f"--memory is {options.memory!r}, {size} bytes; give a unit, as '80GB'")
    rooms = memory_fit.rooms(size, on_host=options.host)
    if options.mode:
        name = options.format or ("bf16i8" if options.mode.startswith("compact") else None)
        format = name and named(name)
        found = estimate(
            model, options.mode, format=format, optimizer=optimizer, on_host=options.host
        )
        sizes = found.total, 0, 0
        ways = [memory_fit.Strategy(options.mode, sizes, found.trained, found.device_bytes)]
        shown, what = str(found), f"mode {options.mode}"
    else:
        ways = list(memory_fit.strategies(model, optimizer, on_host=options.host))
        shown, what = memory_fit.fits(ways, rooms), "the smallest"
    count = sum(p.numel() for p in model.parameters())
    fits = any(x.fits(rooms) for x in ways)
    verdict = "fits into" if fits else "does not fit into"
    places = " and ".join(f"the {text_tables.size(x.size)} {x.owner}" for x in rooms)
    say(
        f"{count:,} parameters, {options.optimizer}, without activations"
        f"{', weights on the host' if options.host else ''}\n{shown}\n"
        f"{what} {verdict} {places}"
    )
    return int(not fits)


def optimizer_named(name: str) -> MakeOptimizer:
    """Return a class of torch.optim; SGD with the momentum that it has in training."""
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {name!r}; AdamW is one")
    return partial(found, lr=1e-3, momentum=0.9) if found is torch.optim.SGD else found
