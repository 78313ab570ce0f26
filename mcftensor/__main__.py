"""The command line: `python -m mcftensor audit`, `convert`, `memory` and `selfcheck`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from mcftensor.checkpoint.bridge.checkpoint_conversion import Progress, convert_checkpoint
from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.checkpoint.saving import size_in_bytes
from mcftensor.device_checks import device_report
from mcftensor.formats import named
from mcftensor.meters import memory_fit
from mcftensor.meters.auditing import Audit, audit
from mcftensor.meters.memory_summary import MakeOptimizer, estimate
from mcftensor.options import parse
from mcftensor.tensor import text_tables


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    run = {
        "audit": run_audit,
        "convert": run_convert,
        "memory": run_memory,
        "selfcheck": run_selfcheck,
    }
    try:
        return run[options.command](options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (CheckpointError, ImportError, OSError, TypeError, ValueError) as error:
        reason = str(error)
        for prefix in ("audit: ", "convert_checkpoint: ", "collage: "):
            reason = reason.removeprefix(prefix)
        if options.command == "audit":
            reason = reason.removesuffix(". verify=False reads it all the same")
        for argument, option in _BY_OPTION.items():
            reason = reason.replace(argument, option)
        print(f"python -m mcftensor {options.command}: {reason}", file=sys.stderr)
        return 2


_BY_OPTION = {
    "lossy=True (--lossy)": "--lossy",
    "verify=False": "--no-verify",
    "optimizer=False": "--weights-only",
    "give parameters,": "give --parameters, a file with",
    "give step,": "give --step,",
}
"""Advice in error messages of functions, and the same advice by options of the command."""


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


def say(output: str) -> None:
    """Print to a reader who may have seen enough."""
    try:
        print(output, flush=True)
    except BrokenPipeError:
        # Python flushes once more on leaving, to no one.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_convert(options: argparse.Namespace) -> int:
    """Convert a checkpoint, and say what was done."""
    names = options.parameters and options.parameters.read_text(encoding="utf-8").split()
    with bar() as progress:
        done = convert_checkpoint(
            options.source,
            options.destination,
            options.format,
            states=options.states,
            optimizer=not options.weights_only,
            parameters=names,
            step=options.step,
            lossy=options.lossy,
            max_shard_size=options.max_shard_size,
            verify=not options.no_verify,
            progress=progress,
        )
    text = f"{options.destination}: {done.weights} weights"
    if done.states:
        text += f" and {done.states} states"
    text += f" in {done.format}, from {done.layout}"
    if done.lost:
        text += f"; {sum(done.lost.values())} elements of {len(done.lost)} tensors lost bits"
    say(text)
    return 0


def run_memory(options: argparse.Namespace) -> int:
    """Say what a model takes in training, and whether that fits."""
    model = memory_fit.model_of(options.sources)
    optimizer = optimizer_named(options.optimizer)
    size, owner = memory_fit.room()
    if options.memory:
        size, owner = size_in_bytes(options.memory, "--memory"), "given"
        if options.memory.isdecimal() and size < 1 << 20:
            raise ValueError(
                f"--memory is {options.memory!r}, {size} bytes; give a unit, as '80GB'"
            )
    if options.mode:
        own = memory_fit.format_for(options.mode)
        form = named(options.format) if options.format else own
        found = estimate(model, options.mode, format=form, optimizer=optimizer)
        shown, least, what = str(found), found.total, f"mode {options.mode}"
    else:
        ways = list(memory_fit.strategies(model, optimizer))
        shown, least = memory_fit.fits(ways, size), min(x.total for x in ways)
        what = "the smallest"
    count = sum(p.numel() for p in model.parameters())
    verdict = "fits into" if least <= size else "does not fit into"
    say(
        f"{count:,} parameters, {options.optimizer}, without activations\n{shown}\n"
        f"{what} {verdict} the {text_tables.size(size)} {owner}"
    )
    return int(least > size)


def optimizer_named(name: str) -> MakeOptimizer:
    """Return a class of torch.optim; SGD with the momentum that it has in training."""
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {name!r}; AdamW is one")
    return partial(found, lr=1e-3, momentum=0.9) if found is torch.optim.SGD else found


@contextlib.contextmanager
def bar() -> Iterator[Progress | None]:
    """Yield a progress bar for reading, if the output is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    rich = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(stderr=True)
    columns = rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn()
    with rich.Progress(*columns, "{task.description}", console=console, transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda name, done, total: shown.update(
            task, completed=done, total=total, description=name
        )


if __name__ == "__main__":
    sys.exit(main())
