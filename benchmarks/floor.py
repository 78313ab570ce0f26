"""How exact can moments of a few bits be? AdamW whose second moments are in an ideal format.

With beta2 0.999, a gradient moves a second moment by a thousandth of itself, far less than the step
between two codes. Rounding turns this into rare jumps by a whole step, and which gradients cause
them is chance. So stored second moments fluctuate. The best estimate of a probability by a machine
of n states has a mean squared error of the order 1/n, too (F. T. Leighton and R. L. Rivest,
"Estimating a probability using finite memory", IEEE Trans. Information Theory 32(6), 1986).

Balanced rounding fluctuates least among all rules that are right in the mean for each gradient. Let
a rule move a number by f_t(g) steps at write t, where the mean of f_t(g) over t is d(g), the exact
change in steps. For independent gradients g and h of one distribution, the variance of the sum of
f_t(g) over T writes is the sum of E(f_t(g) - f_t(h))^2 / 2. Squares of integers are at least their
magnitudes, so this is at least T E|d(g) - d(h)| / 2, which balanced rounding reaches but for O(log
T) roundings.

The ideal format has a geometric series of 15 numbers from the smallest to the largest of a block.
Series follow their blocks in each step without rounding, for which a format would need free bits.
Prints what weights lose, and the largest update over that in float64, in the scenarios of
`states.py`; writes them as JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import mcftensor as mcf
from mcftensor.arithmetic.noise import noise_of
from speed.machine import describe
from states import EXACT, SCENARIOS, STEPS, Rounding, course, emulated, finding, shown


class Ideal:
    """Second moments in `count` numbers for each block of `size`, right in the mean of the root."""

    def __init__(self, count: int = 15, size: int = 32) -> None:
        self.count, self.size = count, size
        self.held: Tensor | None = None
        self.writes = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Round to numbers that are whole steps from the last one."""
        held = x if self.held is None else torch.where(self.held > 0, self.held, x)
        key, index = torch.tensor(self.writes), torch.arange(x.numel())
        self.writes = (self.writes + 1) % STEPS  # one course has that many
        noise = noise_of("balanced", key, index, 1)
        assert noise is not None
        largest = x.reshape(-1, self.size).amax(1)
        smallest = torch.where(x > 0, x, torch.inf).reshape(-1, self.size).amin(1)
        binades = (largest / smallest).log2().nan_to_num(0).clamp(min=1e-3) / (self.count - 1)
        step = binades.repeat_interleave(self.size).view_as(x).exp2()
        low = held * step ** ((x / held).log().nan_to_num(0) / step.log()).floor()
        share = ((x / low).sqrt() - 1) / (step.sqrt() - 1)
        up = noise.uniform().view_as(x) < share
        self.held = torch.where(x > 0, torch.where(up, low * step, low), 0)
        return self.held


class Stored:
    """Moments in a format of the library, whose count of writes goes on."""

    def __init__(self, format: mcf.Format) -> None:
        self.format = format
        self.held: mcf.MCFTensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Round as the format does."""
        if self.held is None:
            self.held = mcf.as_expansion(torch.zeros_like(x), self.format)
        self.held.copy_(x)
        return mcf.as_plain(self.held, torch.float64)


def exact(x: Tensor) -> Tensor:
    """Lose nothing."""
    return x


def pairs() -> dict[str, tuple[Rounding, Rounding]]:
    """First and second moments, anew for each run."""
    return {
        "q4, ue4": (Stored(mcf.q4), Stored(mcf.ue4)),
        "q4, ideal": (Stored(mcf.q4), Ideal()),
        "q4, ideal in blocks of 16": (Stored(mcf.q4), Ideal(size=16)),
        "q4, exact": (Stored(mcf.q4), exact),
        "exact, ue4": (exact, Stored(mcf.ue4)),
        "exact, ideal": (exact, Ideal()),
        "exact, ideal in blocks of 16": (exact, Ideal(size=16)),
        "exact, ideal in blocks of 8": (exact, Ideal(size=8)),
        "exact, ideal of 3 bits": (exact, Ideal(7)),
        "exact, ideal of 5 bits": (exact, Ideal(31)),
        "exact, ideal of 6 bits": (exact, Ideal(63)),
    }


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128, help="of 64 weights each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/floor.json"))
    options = parser.parse_args()
    shape = (options.rows, 64)
    found: dict[str, dict[str, dict[str, object]]] = {name: {} for name in pairs()}
    for scenario in track(SCENARIOS, "floors"):
        wanted = course(EXACT, scenario, shape)
        for name, (first, second) in pairs().items():
            contender = emulated(name, 0, first, second)
            found[name][scenario.name] = asdict(finding(contender, scenario, wanted, shape))
    names = [scenario.name for scenario in SCENARIOS]
    table = Table("moments", *names, title="Displacement, largest update (v over exact)")
    for name, own in found.items():
        table.add_row(name, *(shown(own[scenario]) for scenario in names))
    Console(width=180).print(table)
    record = {"machine": describe("cpu"), "rows": options.rows, "steps": STEPS, "moments": found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
