"""Many long runs in pieces: each start goes on where the last one stopped, run after run."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from pretraining import report
from pretraining.command import COUNT, RATE, Parser, make_folder
from pretraining.resuming import Checkpoint
from pretraining.run import Run
from pretraining.training import Training, attention, go_on, machine, progress_bar

THIN = 20  # Steps of which a record keeps the mean loss.


def thinned(losses: Sequence[float]) -> list[float]:
    """Means over so many steps, rounded."""
    parts = (losses[i : i + THIN] for i in range(0, len(losses), THIN))
    return [round(statistics.fmean(part), 4) for part in parts]


@dataclass(frozen=True)
class Piece:
    """One run, and how to make its training."""

    name: str
    run: Run
    make: Callable[[], Training]
    described: dict[str, Any]  # What its record says beside settings and results.


def add_options(parser: Parser, name: str, every: int) -> None:
    """Add the options of a study in pieces, which `work` reads."""
    add = parser.add_argument
    add("--data", type=Path, metavar="PATH", help="text instead of the libraries'")
    add("--minutes", type=RATE, default=9.0, help="to work before a stop (default: 9)")
    add("--save-every", type=COUNT, default=every, help=f"steps (default: {every})")
    place = f"out/{name}"
    add("--checkpoints", type=Path, default=Path(place), help=f"folder (default: {place})")
    place = f"benchmarks/results/{name}"
    add("--out", type=Path, default=Path(place), help=f"of the records (default: {place})")


def work(
    pieces: Sequence[Piece], content: tuple[Tensor, Tensor], options: argparse.Namespace
) -> None:
    """Go on with the first run that has no record yet, then with the next, for some minutes.

    A finished run leaves a record, `OUT/NAME.json`. One that is stopped leaves a checkpoint in
    `CHECKPOINTS/NAME`, saved every so many steps and at the end of the time.
    """
    results = options.out
    console = Console()
    started = time.perf_counter()

    def is_late() -> bool:
        return time.perf_counter() - started > 60 * options.minutes

    make_folder(results)
    for piece in pieces:
        record = results / f"{piece.name}.json"
        if record.exists():
            continue
        folder = options.checkpoints / piece.name
        make_folder(folder)
        checkpoint = Checkpoint(folder, piece.run, content, options.save_every)
        with attention(piece.run.device):
            saved, job = checkpoint.load(), piece.make()
            done = saved["step"] if saved else 0
            with progress_bar(piece.run.steps, done, piece.name) as bar:
                go_on(job, saved, checkpoint, bar, is_late=is_late)
        if job.step < piece.run.steps:
            done = sum((results / f"{x.name}.json").exists() for x in pieces)
            console.print(
                f"{piece.name}: {job.step} of {piece.run.steps} steps are done; "
                f"{done} of {len(pieces)} runs are. The same command goes on.",
                soft_wrap=True,
            )
            return
        report.write_record(
            record,
            {
                "machine": machine(piece.run.device),
                **piece.described,
                "run": asdict(piece.run),
                "result": asdict(job.result) | {"training": thinned(job.result.training)},
            },
        )
        checkpoint.path.unlink()
        folder.rmdir()
        console.print(f"{piece.name}: {job.result.final:.4f}")
        if is_late():
            return
