"""The command `convert`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator

from mcftensor.bridge.checkpoint_conversion import Progress, convert_checkpoint
from mcftensor.options import say


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
