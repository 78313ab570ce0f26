"""Train a small GPT in float16 and 8-bit floats whose scales propagate, beside float32.

Every variant starts from the same weights, sees the same batches and runs stock AdamW without
clipping by anything but the norm. They differ in what is kept in which type:

  float32     everything
  float16     everything, unscaled; it ends where the loss is no number
  float16eps  the same with an eps of AdamW that float16 holds, 1e-6
  halfgrads   float16 but for float32 master weights and states, unscaled
  gradscaler  the same with torch.amp.GradScaler
  masters     scaled float16 but for float32 master weights and states
  weights     scaled float16 but for float32 states
  scaled      scaled float16: parameters, gradients, activations and states
  weights8    as weights, with parameters that have an 8-bit tail
  scaled8     as scaled, with the same
  stochastic  as scaled, with parameters rounded stochastically
  pairs       as scaled, with parameters and states in scaled(fp16x2)
  fp8         as stochastic, with 8-bit products in linear layers
  fp8masters  as masters, with 8-bit products

What is done already is taken from the folder, so a run that was stopped goes on.

After the paper: P. Balanca et al., "Scalify: scale propagation for efficient low-precision LLM
training", arXiv 2407.17353, 2024, table 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import mcftensor as mcf
from pretraining import text
from pretraining.command import COUNT, RATE, SEED, Parser, exit_status, make_folder, selected
from pretraining.model import GPT, loss
from pretraining.training import (
    LARGEST_NORM,
    SHAPES,
    evaluate,
    evenly_spaced,
    learning_rate_factor,
    machine,
)

HALF = torch.float16
BATCH = 4
SAMPLES = 20


@dataclass(frozen=True)
class Variant:
    """What is kept in which type."""

    format: mcf.scaling.ScaledFormat | None = None  # of parameters; None is plain
    dtype: torch.dtype = torch.float32  # of plain parameters
    masters: bool = False  # weights and states are float32
    states: bool = False  # states are float32, and weights are what they are
    products: str | None = None
    scaler: bool = False
    eps: float = 1e-8


_SCALED = mcf.scaling.scaled(HALF)
_STOCHASTIC = mcf.scaling.scaled(HALF, rounding="stochastic")
_TAILS = mcf.scaling.scaled(HALF, tail=8)
VARIANTS = {
    "float32": Variant(),
    "float16": Variant(dtype=HALF),
    "float16eps": Variant(dtype=HALF, eps=1e-6),
    "halfgrads": Variant(dtype=HALF, masters=True),
    "gradscaler": Variant(dtype=HALF, masters=True, scaler=True),
    "masters": Variant(_SCALED, masters=True),
    "weights": Variant(_SCALED, states=True),
    "scaled": Variant(_SCALED),
    "weights8": Variant(_TAILS, states=True),
    "scaled8": Variant(_TAILS),
    "stochastic": Variant(_STOCHASTIC),
    "pairs": Variant(mcf.scaling.scaled(mcf.fp16x2)),
    "fp8": Variant(_STOCHASTIC, products="fp8"),
    "fp8masters": Variant(_SCALED, masters=True, products="fp8"),
}


@dataclass
class Outcome:
    """What one run came to."""

    validation: float | None = None  # of what ran to the end
    steps: int = 0  # that were taken before the loss was no number
    zeros: float = math.nan  # share of elements of gradients that are zero, the mean of samples
    seconds_per_step: float = math.nan
    counts: dict[str, int] = field(default_factory=dict)  # of one training step
    sampled: list[int] = field(default_factory=list)  # the steps that were looked at
    # log2 rms of data at these, by kind and name; kept of the first seed
    sizes: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)


DRAWN = ("float32", "stochastic", "fp8")
KINDS = {
    "activations": "activations",
    "gradients": "gradients",
    "parameters": "parameters",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}


class Masters:
    """An optimizer over float32 copies, whose results are given back rounded."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, keep: bool) -> None:
        self.pairs = [(p, _plain(p).requires_grad_()) for p in parameters]
        self.keep = keep  # or round them after each step, so that states alone are float32

    @torch.no_grad()
    def take(self, factor: float = 1.0) -> None:
        """The gradients of the parameters, divided by the factor of the loss."""
        for p, master in self.pairs:
            master.grad = None if p.grad is None else _plain(p.grad).div_(factor)

    @torch.no_grad()
    def give(self) -> None:
        """The values of the copies."""
        for p, master in self.pairs:
            p.copy_(master)
            if not self.keep:
                master.copy_(_plain(p))


def _plain(x: Tensor) -> Tensor:
    return mcf.as_plain(x.detach(), torch.float32).clone()


class Job:
    """One model that is trained in one variant."""

    def __init__(self, name: str, seed: int, steps: int, lr: float) -> None:
        torch.manual_seed(seed)
        self.variant, self.steps = VARIANTS[name], steps
        self.outcome = Outcome()
        self.model = GPT(SHAPES["cpu"]).to(self.variant.dtype)
        if self.variant.format is not None:
            mcf.scaling.scalify(self.model, self.variant.format, products=self.variant.products)
        self.masters: Masters | None = None
        parameters: list[Any] = list(self.model.parameters())
        if self.variant.masters or self.variant.states:
            self.masters = Masters(parameters, keep=self.variant.masters)
            parameters = [master for _, master in self.masters.pairs]
        self.optimized = parameters
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr,
            betas=(0.9, 0.999),
            eps=self.variant.eps,
            foreach=False,
        )
        self.scheduler = LambdaLR(self.optimizer, partial(learning_rate_factor, steps=steps))
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.variant.scaler)
        self.zeros: list[float] = []
        self.sizes: dict[str, dict[str, list[float | None]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def step(self, batch: Tensor, *, sample: bool, step: int) -> float:
        """One training step; returns the loss."""
        self.model.zero_grad()
        with contextlib.ExitStack() as stack:
            counts = stack.enter_context(mcf.scaling.counting()) if sample else Counter()
            if sample:
                stack.enter_context(self.watching())
            objective = loss(self.model, batch)
            self.scaler.scale(objective).backward()
        if sample:
            self.look(counts, step)
        if self.masters:
            self.masters.take()
            self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.optimized, LARGEST_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.masters:
            self.masters.give()
        self.scheduler.step()
        return objective.item()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Have the outputs of modules measured."""

        def measure(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: self.measure("activations", name, output)

        handles = [
            module.register_forward_hook(measure(name))
            for name, module in self.model.named_modules()
            if name and not isinstance(module, nn.ModuleList)
        ]
        yield
        for handle in handles:
            handle.remove()

    def look(self, counts: Counter[tuple[str, str]], step: int) -> None:
        """Measure gradients, parameters and states."""
        self.outcome.sampled.append(step)
        self.outcome.counts = {" ".join(event): n for event, n in counts.items()}
        found, zero = 0, 0
        for name, p in self.model.named_parameters():
            self.measure("parameters", name, p)
            if p.grad is not None:
                self.measure("gradients", name, p.grad)
                plain = _plain(p.grad)
                found, zero = found + plain.numel(), zero + int((plain == 0).sum())
            for key, x in self.optimizer.state.get(p, {}).items():
                if key != "step":
                    self.measure(key, name, x)
        self.zeros.append(zero / max(1, found))

    def measure(self, kind: str, name: str, x: Tensor) -> None:
        """log2 rms of what is stored."""
        data = x.components[0] if isinstance(x, mcf.MCFTensor) else x
        size = data.detach().double().square().mean().sqrt().item()
        found = round(math.log2(size), 3) if 0 < size < math.inf else None
        self.sizes[kind][name].append(found)


def train(
    name: str, seed: int, training: Tensor, held_out: Tensor, options: argparse.Namespace
) -> Outcome:
    """Train one variant from one seed."""
    job = Job(name, seed, options.steps, options.lr)
    outcome = job.outcome
    generator = torch.Generator().manual_seed(seed)
    windows = training.unfold(0, SHAPES["cpu"].context + 1, 1)
    every = max(1, options.steps // SAMPLES)
    seconds = []
    is_half = job.variant.dtype == HALF
    # float16 takes the steps of attention one by one, each of which is fast.
    with sdpa_kernel(SDPBackend.MATH) if is_half else contextlib.nullcontext():
        for step in tqdm(range(options.steps), f"{name} {seed}", mininterval=30):
            chosen = torch.randint(len(windows), (BATCH,), generator=generator)
            start = time.perf_counter()
            value = job.step(windows[chosen].long(), sample=step % every == 0, step=step)
            seconds.append(time.perf_counter() - start)
            if not math.isfinite(value):
                break
            outcome.steps = step + 1
        if outcome.steps == options.steps:
            outcome.validation = evaluate(job.model, held_out, BATCH)
    outcome.zeros = statistics.fmean(job.zeros)
    outcome.seconds_per_step = statistics.median(seconds)
    outcome.sizes = {kind: dict(names) for kind, names in job.sizes.items()}
    return outcome


def compare(options: argparse.Namespace) -> None:
    """Train every variant from every seed, then show and save what came of it."""
    training, validation = text.load(options.data, SHAPES["cpu"].context + 1)
    held_out = evenly_spaced(validation, SHAPES["cpu"].context + 1)
    make_folder(options.out)
    console = Console()
    settings = {"steps": options.steps, "lr": options.lr, "data": str(options.data)}
    path = options.out / "scaling.json"
    results = finished(path, settings)
    for seed in options.seeds:
        for name in options.variants:
            if seed in results[name]:
                continue
            found = train(name, seed, training, held_out, options)
            if results[name]:
                found.sizes = {}
            results[name][seed] = found
            runs = {
                name: {str(seed): asdict(run) for seed, run in by_seed.items()}
                for name, by_seed in results.items()
            }
            content = {"settings": settings, "machine": machine("cpu"), "runs": runs}
            path.write_text(json.dumps(content, allow_nan=False))
    console.print(table({name: results[name] for name in options.variants}))
    draw(options.out / "scaling.png", {name: results[name] for name in options.variants})
    console.print(f"Wrote scaling.json and scaling.png to {options.out}", soft_wrap=True)


def finished(path: Path, settings: dict[str, Any]) -> dict[str, dict[int, Outcome]]:
    """The runs that are done, if they were made with the same settings."""
    results: dict[str, dict[int, Outcome]] = defaultdict(dict)
    content = json.loads(path.read_text()) if path.exists() else {}
    if content.get("settings") == settings:
        for name, runs in content["runs"].items():
            results[name] = {int(seed): Outcome(**run) for seed, run in runs.items()}
    return results


def table(results: dict[str, dict[int, Outcome]]) -> Table:
    """One row for each variant."""
    shown = Table(title="Validation loss in nats a byte, and what it took")
    for column in ("variant", "loss", "beyond float32", "by seed", "gradients zero"):
        shown.add_column(column)
    for column in ("rescaled a layer", "8-bit products", "s/step"):
        shown.add_column(column)
    base = results.get("float32", {})
    for name, runs in results.items():
        last = list(runs.values())[-1]
        beyond = differences(runs, base)
        rescaled = sum(n for event, n in last.counts.items() if event.startswith("rescaled"))
        eight = {
            event.removeprefix("fp8 "): n for event, n in last.counts.items() if "fp8" in event
        }
        failed = last.validation is None
        shown.add_row(
            name,
            f"failed at step {last.steps}" if failed else f"{_mean(runs, 'validation'):.4f}",
            f"{statistics.fmean(beyond):+.4f}" if beyond else "",
            " ".join(f"{x:+.4f}" for x in beyond),
            f"{_mean(runs, 'zeros'):.2%}",
            f"{rescaled / SHAPES['cpu'].layers:.1f}" if rescaled else "",
            ", ".join(f"{n} {how}" for how, n in eight.items()),
            f"{_mean(runs, 'seconds_per_step'):.3f}",
        )
    return shown


def differences(runs: dict[int, Outcome], base: dict[int, Outcome]) -> list[float]:
    """Losses of the seeds that both came to the end of, as differences."""
    pairs = [(run.validation, base[seed].validation) for seed, run in runs.items() if seed in base]
    return [x - y for x, y in pairs if x is not None and y is not None]


def _mean(runs: dict[int, Outcome], figure: str) -> float:
    return statistics.fmean(getattr(run, figure) for run in runs.values())


def draw(path: Path, results: dict[str, dict[int, Outcome]]) -> None:
    """The root mean square of the data of every tensor over training: a row for each variant."""
    names = [name for name in results if name in DRAWN] or list(results)
    figure = Figure(figsize=(2.2 * len(KINDS), 1.7 * len(names) + 0.5), layout="constrained")
    grid = figure.subplots(len(names), len(KINDS), sharex=True, sharey=True, squeeze=False)
    for row, name in zip(grid, names, strict=True):
        run = next(iter(results[name].values()))
        for axes, kind in zip(row, KINDS, strict=True):
            axes.axhspan(-14, 16, color="0.92", zorder=0)  # the normal range of float16
            axes.axhline(0, color="0.6", linewidth=0.8)
            for sizes in run.sizes.get(kind, {}).values():
                shown = [math.nan if x is None else x for x in sizes]
                axes.plot(run.sampled[-len(sizes) :], shown, linewidth=0.7, alpha=0.6)
            axes.set_yticks(range(-32, 17, 8), [f"$2^{{{k}}}$" for k in range(-32, 17, 8)])
            axes.tick_params(labelsize=8)
        row[0].set_ylabel(name, fontsize=9)
    for axes, title in zip(grid[0], KINDS.values(), strict=True):
        axes.set_title(title, fontsize=9)
    figure.supxlabel("step", fontsize=9)
    figure.savefig(path, dpi=110)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line, checked."""
    description, _, variants = (__doc__ or "").partition("\n\n")
    parser = Parser("scaling.py", description, variants)
    add = parser.add_argument
    add("--steps", type=COUNT, default=500, help="training steps (default: 500)")
    add("--variants", nargs="+", default=list(VARIANTS), metavar="NAME", help="(default: all)")
    add("--seeds", nargs="+", type=SEED, default=[0, 1, 2], help="(default: 0 1 2)")
    add("--lr", type=RATE, default=3e-4, help="peak learning rate (default: 3e-4)")
    add("--data", type=Path, metavar="PATH", help="text instead of Python's standard library")
    add(
        "--out",
        type=Path,
        default=Path("out/scaling"),
        metavar="DIR",
        help="(default: out/scaling)",
    )
    options = parser.parse_args(arguments)
    options.variants = selected(parser, "variant", options.variants, list(VARIANTS))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    return exit_status("scaling.py", lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
