"""Tokens a second and peak memory of training GPT-2: bf16 expansions against other precisions.

  light, plus, full
                 bf16 expansions, PyTorch's fused AdamW
  exact          float32 in bf16i16, states too, PyTorch's fused AdamW
  compact        bf16i8, states of one byte, PyTorch's fused AdamW; released: with gradients that
                 backward frees
  autocast       fp32 parameters, forward pass in bf16 by autocast, PyTorch's fused AdamW
  master         bf16 parameters, fp32 master weights, PyTorch's fused AdamW
  bf16           bf16 parameters and states, PyTorch's fused AdamW
  Collage loop   pairs of bf16 tensors in unfused operations, one parameter after another, as in
                 the code released with the Collage paper

Each trains alone, since memory is compared, in `--rounds` turns of `--steps` steps. The tokens are
random, and the weights are the same for all. Memory is the peak from before the model is made.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.optim import AdamW, Optimizer

import mcftensor as mcf
from speed import machine, memory, report
from speed.clocks import Clock, clock_of
from speed.collage_loop import CollageLoop
from speed.contenders import STORED, as_stored
from speed.gpt import GPT2, SHAPES, Shape, loss, parameter_shapes
from speed.master import MasterWeights
from speed.measuring import order, quartiles, reason

WARM_UP = 3
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.1}
BATCHES = {"124M": 16, "1.3B": 8, "1.3M": 4, "tiny": 2}


def expansion(mode: str) -> Callable[[GPT2], Optimizer]:
    """Stock fused AdamW over bf16 expansions."""

    def build(model: GPT2) -> Optimizer:
        mcf.as_expansion(model)
        return mcf.collage(AdamW(model.parameters(), **OPTIONS, fused=True), mode)

    return build


def stored(name: str, *, released: bool = False) -> Callable[[GPT2], Optimizer]:
    """Stock fused AdamW over formats that store."""
    matrices, states = STORED[name]

    def build(model: GPT2) -> Optimizer:
        as_stored(model, matrices)
        optimizer = mcf.collage(AdamW(model.parameters(), **OPTIONS, fused=True), states)
        if released:
            mcf.step_in_backward(model, optimizer)
        return optimizer

    return build


STRATEGIES: dict[str, Callable[[GPT2], Any]] = {
    "light": expansion("light"),
    "plus": expansion("plus"),
    "full": expansion("full"),
    "exact": stored("exact"),
    "compact": stored("compact"),
    "released": stored("compact", released=True),
    "autocast": lambda model: AdamW(model.float().parameters(), **OPTIONS, fused=True),
    "master": lambda model: MasterWeights(
        [*model.parameters()],
        lambda masters: AdamW(masters, **OPTIONS, fused=True),
        keep_gradients=False,
    ),
    "bf16": lambda model: AdamW(model.parameters(), **OPTIONS, fused=True),
    "Collage loop": lambda model: CollageLoop(model.parameters(), **OPTIONS),
}


class Training:
    """One model in one strategy."""

    def __init__(self, strategy: str, shape: Shape, batch: int, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            # Rounded to bf16 here, so that all begin with the same numbers.
            self.model = GPT2(shape).bfloat16()
            windows = (batch, shape.context + 1)
            self.windows = torch.randint(shape.vocabulary, windows)
        self.optimizer = STRATEGIES[strategy](self.model)
        autocast = torch.autocast(device, torch.bfloat16)
        self.precision = autocast if strategy == "autocast" else contextlib.nullcontext()

    def step(self) -> Tensor:
        """Forward, backward, update; the loss before it."""
        with self.precision:
            objective = loss(self.model, self.windows)
        objective.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return objective.detach()


def measure(strategy: str, options: argparse.Namespace, clock: Clock) -> tuple[float, int, float]:
    """Seconds of a step, as a mean over one turn, bytes at the peak, and the last loss."""
    started: list[Training] = []
    losses: list[Tensor] = []

    def start() -> None:
        started.append(Training(strategy, SHAPES[options.model], options.batch, options.device))
        for _ in range(WARM_UP):
            started[0].step()

    def steps() -> None:
        for _ in range(options.steps):
            losses[:] = [started[0].step()]

    memory.release(options.device)
    peak = memory.peak(options.device, start)
    seconds = clock.seconds(steps) / options.steps
    return seconds, peak, losses[0].item()


def attempt(
    strategy: str, options: argparse.Namespace, clock: Clock
) -> tuple[float, int, float] | str:
    """The figures of `measure`, or why there are none."""
    try:
        return measure(strategy, options, clock)
    except RuntimeError as error:  # the memory does not suffice, say
        return reason(error)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all strategies, for JSON."""
    clock = clock_of(options.device)
    turns = [name for turn in range(options.rounds) for name in order(options.strategies, turn)]
    seconds: dict[str, list[float]] = {name: [] for name in options.strategies}
    peaks: dict[str, int] = {}
    losses: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name in track(turns, f"GPT-2 {options.model}"):
        found = attempt(name, options, clock)
        if isinstance(found, str):
            failures[name] = found
        else:
            seconds[name].append(found[0])
            _, peaks[name], losses[name] = found
    memory.release(options.device)

    tokens = options.batch * SHAPES[options.model].context
    return {
        "machine": machine.describe(options.device, packages=("triton",)),
        "model": options.model,
        "parameters": sum(math.prod(shape) for shape in parameter_shapes(SHAPES[options.model])),
        "tokens_a_step": tokens,
        "steps": options.steps,
        "rounds": options.rounds,
        "strategies": {
            name: {"failed": failures[name]}
            if name in failures
            else {
                "tokens_a_second": tokens / statistics.median(times),
                "seconds": statistics.median(times),
                "seconds_quartiles": quartiles(times),
                "peak_bytes": peaks[name],
                "loss": losses[name],
            }
            for name, times in seconds.items()
        },
    }


def table(record: dict[str, Any]) -> Table:
    """One strategy a row."""
    screen = Table(
        title=f"GPT-2, {record['parameters']:,} parameters, "
        f"{record['tokens_a_step']:,} tokens a step, {record['machine']['device']}"
    )
    screen.add_column("strategy")
    for column in ("tokens a second", "ms a step", "quartiles", "peak, GB"):
        screen.add_column(column, justify="right")
    for name, row in record["strategies"].items():
        if "failed" in row:
            screen.add_row(name, row["failed"], style="dim")
            continue
        low, high = row["seconds_quartiles"]
        screen.add_row(
            name,
            f"{row['tokens_a_second']:,.0f}",
            report.milliseconds(row["seconds"]),
            f"{report.milliseconds(low)}–{report.milliseconds(high)}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        )
    return screen


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="124M", choices=SHAPES)
    add("--strategies", nargs="+", default=[*STRATEGIES], choices=STRATEGIES, metavar="NAME")
    add("--steps", type=int, default=10, help="timed in each turn (default: 10)")
    add("--rounds", type=int, default=3, help="turns of each strategy (default: 3)")
    add("--batch", type=int, help="windows of 1024 tokens a step (default: by model)")
    add("--device", default="cuda", choices=("cpu", "cuda"))
    add("--threads", type=int, help="of PyTorch on the CPU (default: as it chooses)")
    add("--json", type=Path, help="where the figures go (default: out/bench/train-MODEL.json)")
    options = parser.parse_args(arguments)
    if min(options.steps, options.rounds) < 1:
        parser.error("--steps and --rounds must be 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device; a CPU can do --model 1.3M")
    options.batch = options.batch or BATCHES[options.model]
    options.json = options.json or Path(f"out/bench/train-{options.model}.json")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console()
    record = run(options)
    console.print(table(record))
    report.write(options.json, record)
    console.print(f"Wrote {options.json}", soft_wrap=True)


if __name__ == "__main__":
    main()
