"""Open questions around Collage (arXiv:2405.03637), each measured over several seeds.

A very small GPT over bytes is trained some hundreds of times, for a few seconds each. What has been
measured is written to the folder at once, and not measured again: stop the program whenever you
like, and the same command goes on.

  eight       do expansions work with 8-bit terms, and with integer tails of 8-bit codes?
  beta2       which beta2 is best for each strategy?
  prediction  does EDQ predict the final loss?
  breaks      where does it break, who says so, and what is the cure?
  growth      how does the error of weights grow with the steps?
  long        how far do 20,000 steps of a training lead from float64? Hours: not among the others
  sizes       does the gap grow or close with the size of the model? Hours: not among the others
  others      do light and plus help SGD, Lion, Muon, Adafactor and schedule-free AdamW?
  tuning      fine-tuning at 1e-5 to 1e-6: what does the meter say, and was it right?
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from pretraining import report, text
from pretraining.command import COUNT, SEED, Parser, exit_status, make_folder, selected
from pretraining.training import machine
from questions import (
    beta2,
    breaks,
    eight,
    growth,
    long,
    others,
    prediction,
    sizes,
    trial,
    tuning,
)
from questions.ledger import Ledger
from questions.settings import Settings

QUESTIONS: dict[str, ModuleType] = {
    "beta2": beta2,
    "others": others,
    "tuning": tuning,
    "eight": eight,
    "breaks": breaks,
    "growth": growth,
    "prediction": prediction,
}
LONG: dict[str, ModuleType] = {"long": long, "sizes": sizes}  # Those that are asked for alone.


def investigate(options: argparse.Namespace) -> None:
    """Measure what is missing, and write and draw each answer."""
    training, validation = text.load(options.data, trial.SHAPE.context + 1)
    make_folder(options.out)
    model = {
        "model": asdict(trial.SHAPE),
        "batch_size": trial.BATCH_SIZE,
        "validation_windows": trial.WINDOWS,
        "parameters": trial.count_parameters(),
    }
    data = [zlib.crc32(part.numpy().data) for part in (training, validation)]
    ledger = Ledger(options.out / "measured.jsonl", model | {"data": data})
    settings = Settings(
        training,
        validation,
        ledger,
        options.seeds,
        options.steps,
        options.long_steps,
        options.sizes,
    )
    console = Console()
    for name in options.only:
        question = (QUESTIONS | LONG)[name]
        found: dict[str, Any] = question.answer(settings)
        record = {
            "machine": machine("cpu"),
            "settings": model
            | {"seeds": options.seeds, "steps": options.steps, "long_steps": options.long_steps},
            **found,
        }
        report.write_record(options.out / f"findings-{name}.json", record)
        question.draw(found, options.out / f"findings-{name}.png")
        console.print(f"Wrote findings-{name}.json and .png to {options.out}", soft_wrap=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, checked and complete."""
    description, _, questions = (__doc__ or "").rpartition("\n\n")
    parser = Parser("findings.py", description, questions)
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        default=QUESTIONS,
        metavar="QUESTION",
        help="which to answer, separated by commas or spaces (default: all but long and sizes)",
    )
    add("--seeds", nargs="+", type=SEED, default=[0, 1, 2], help="(default: 0 1 2)")
    add("--steps", type=COUNT, default=400, help="of each training (default: 400)")
    add("--long-steps", type=COUNT, default=5000, help="of the growth of errors (default: 5000)")
    add("--sizes", type=COUNT, default=5, help="of the five sizes, the smallest (default: all)")
    add("--data", type=Path, metavar="PATH", help="text instead of Python's standard library")
    add("--out", type=Path, default=Path("out/findings"), metavar="DIR", help="(out/findings)")
    options = parser.parse_args(arguments)
    options.only = selected(parser, "question", options.only, [*QUESTIONS, *LONG])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    return exit_status("findings.py", lambda: investigate(options))


if __name__ == "__main__":
    sys.exit(main())
