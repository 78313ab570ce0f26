"""Precision that grows: float32-grade tails for the last steps alone, when steps get small.

The main job's model, AdamW and a cosine down to zero. Weights are bf16, rounded to nearest or
balanced, and get 16-bit tails for the last 5, 10 or 20 % of the steps, or parameter by parameter
once the meter says that more than 1 % of its elements lost their update. Beside these: no tails,
and tails from the first step on. AdamW in float64 gets the gradients of each run. The runs take
long: the program stops after some minutes, and the same command goes on, to the bit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

import mcftensor as mcf
from pretraining import text
from pretraining.command import COUNT, RATE, SEED, Parser, exit_status, make_folder
from pretraining.model import GPT, Shape
from pretraining.pieces import Piece, add_options, work
from pretraining.resuming import State
from pretraining.run import Run
from pretraining.training import SHAPES, Training

STARTS = ("bf16", "round")
SHARES = {"never": 0.0, "5%": 0.05, "10%": 0.1, "20%": 0.2}
LOST = 0.01  # of the elements of a parameter


class LateTraining(Training):
    """A training whose parameters get tails."""

    witness_every = 20

    def __init__(self, run: Run, training: Tensor, validation: Tensor, when: str) -> None:
        super().__init__(run, training, validation, None, witness=True)
        self.schedule: mcf.PrecisionSchedule | None = None
        model, optimizer = self.model, self.optimizer
        if when == "meter":
            self.schedule = mcf.PrecisionSchedule(
                model, optimizer, mcf.bf16i16, when={"lost": LOST}, meter=self.meter
            )
        elif SHARES.get(when):
            start = round(run.steps * (1 - SHARES[when]))
            self.schedule = mcf.PrecisionSchedule(
                model, optimizer, mcf.bf16i16, when={"step": start}
            )

    def factor(self, step: int) -> float:
        """A linear warm-up over the first tenth of the steps, then a cosine down to zero."""
        warm_up = max(1, self.run.steps // 10)
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.run.steps - warm_up)
        return 0.5 + 0.5 * math.cos(math.pi * progress)

    def update(self) -> None:
        """Let the optimizer step, and change the format if it is time."""
        super().update()
        if self.schedule is not None and (done := self.schedule.step()):
            sizes = {name: p.numel() for name, p in self.model.named_parameters()}
            names = [name for name in sizes if name in done.formats]
            self.result.changes.append(
                {
                    "step": self.step + 1,
                    "parameters": names,
                    "share": sum(sizes[name] for name in names) / sum(sizes.values()),
                    "bytes": [done.before.bytes_per_parameter, done.after.bytes_per_parameter],
                }
            )

    def state_dict(self) -> State:
        """All that a run needs to go on."""
        own = {} if self.schedule is None else {"schedule": self.schedule.state_dict()}
        return super().state_dict() | own

    def load_state_dict(self, state: State) -> None:
        """Go on from there, in the formats of then."""
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if "witness" not in state:  # of a version without one
            self.witness = None
        super().load_state_dict(state)


class LargeTraining(LateTraining):
    """The same with 5 M parameters."""

    def initial(self) -> GPT:
        """The model before its first step."""
        own = SHAPES[self.run.device]
        return GPT(Shape(context=own.context, layers=6, width=256, heads=8))


SIZES: dict[str, type[LateTraining]] = {"main": LateTraining, "large": LargeTraining}


def cases() -> list[tuple[str, str]]:
    """Strategies, and when tails come."""
    found = [*product(STARTS, (*SHARES, "meter")), ("exact", "never")]
    found.remove(("round", "meter"))  # balanced rounding loses nothing in the mean
    return found


def runs(options: argparse.Namespace, content: tuple[Tensor, Tensor]) -> list[Piece]:
    """All runs, the most informative first."""
    pieces = []
    for seed, (strategy, when) in product(options.seeds, cases()):
        run = Run(strategy, options.steps, options.lr, 0.95, 4, "cpu", seed)
        make = partial(SIZES[options.size], run, *content, when)
        said: dict[str, Any] = {"size": options.size, "tails": when}
        pieces.append(
            Piece(f"{options.size}-{strategy}-{when.rstrip('%')}-{seed}", run, make, said)
        )
    return pieces


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = Parser("late.py", __doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="main", help="1.3 M or 5 M parameters (default: main)")
    add("--steps", type=COUNT, default=2000, help="(default: 2000)")
    add("--lr", type=RATE, default=1e-3, help="peak learning rate (default: 1e-3)")
    add("--seeds", nargs="+", type=SEED, default=[0, 1, 2], help="(default: 0 1 2)")
    add_options(parser, "late", 250)
    options = parser.parse_args(arguments)

    def go() -> None:
        content = text.load(options.data, SHAPES["cpu"].context + 1)
        make_folder(options.checkpoints)
        work(
            runs(options, content),
            content,
            options,
        )

    return exit_status("late.py", go)


if __name__ == "__main__":
    sys.exit(main())
