"""Many long runs in pieces: each start goes on where the last one stopped, run after run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from pretraining import report
from pretraining.command import make_folder
from pretraining.resuming import Checkpoint
from pretraining.run import Run
from pretraining.training import Training, attention, go_on, machine

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


def work(
    pieces: Sequence[Piece],
    content: tuple[Tensor, Tensor],
    *,
    results: Path,
    checkpoints: Path,
    every: int,
    minutes: float,
) -> None:
    """Go on with the first run that has no record yet, then with the next, for so many minutes.

    A finished run leaves a record, `results/NAME.json`. One that is stopped leaves a checkpoint
    in `checkpoints/NAME`, saved every so many steps and at the end of the time.
    """
    console = Console()
    started = time.perf_counter()

    def is_late() -> bool:
        return time.perf_counter() - started > 60 * minutes

    make_folder(results)
    for piece in pieces:
        record = results / f"{piece.name}.json"
        if record.exists():
            continue
        folder = checkpoints / piece.name
        make_folder(folder)
        checkpoint = Checkpoint(folder, piece.run, content, every)
        with attention(piece.run.device):
            saved, job = checkpoint.load(), piece.make()
            go_on(job, saved, checkpoint, label=piece.name, is_late=is_late)
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
