"""What all questions are given, and how their pictures are dressed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor

from pretraining.model import Shape
from questions.ledger import Ledger
from questions.trial import Outcome, Trial, train

Row = dict[str, Any]
Outcomes = dict[Trial, Outcome]


@dataclass
class Settings:
    """The text, the seeds, how long trials are, and where what they came to is kept."""

    training: Tensor
    validation: Tensor
    ledger: Ledger
    seeds: Sequence[int] = (0, 1, 2)
    steps: int = 400
    long: int = 5000
    sizes: int = 5

    def grid(
        self,
        strategies: Sequence[str],
        rates: Sequence[float],
        beta2s: Sequence[float],
        optimizer: str = "adamw",
        steps: int | None = None,
    ) -> list[Trial]:
        """Trials of all of these, one seed after the other: cut short, it is whole so far."""
        return [
            Trial(strategy, lr, beta2, seed, optimizer, steps or self.steps)
            for seed, lr, beta2, strategy in product(self.seeds, rates, beta2s, strategies)
        ]

    def outcomes(self, trials: Sequence[Trial], label: str) -> Outcomes:
        """What trials came to; each is trained once, whichever questions ask for it."""
        by_key = {repr(trial): trial for trial in trials}
        found = self.ledger.measure_all(
            [{"trial": key_of(trial)} for trial in by_key.values()],
            lambda key: train(trial_of(key["trial"]), self.training, self.validation),
            label,
        )
        return dict(zip(by_key.values(), found, strict=True))


def key_of(trial: Trial) -> Row:
    """What the ledger calls a trial: one of the usual shape by the rest alone."""
    return {name: x for name, x in asdict(trial).items() if x is not None}


def trial_of(key: Row) -> Trial:
    """The trial of a key."""
    shape = {"shape": Shape(**key["shape"])} if "shape" in key else {}
    return Trial(**key | shape)


def gap(outcomes: Outcomes, trial: Trial, reference: str, figure: str = "validation") -> float:
    """A figure of a trial less that of another strategy from the same weights and batches."""
    own, other = outcomes[trial][figure], outcomes[replace(trial, strategy=reference)][figure]
    return math.nan if own is None or other is None else own - other


def brief(rate: float) -> str:
    """A learning rate of one digit, as one writes it."""
    return f"{rate:g}" if rate >= 0.01 else f"{rate:.0e}".replace("e-0", "e-")


def dress(axes: Axes, heading: str, label: str) -> None:
    """What panels have in common."""
    axes.set(title=heading, xlabel=label)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
