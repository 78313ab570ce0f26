"""Training of one model in one precision strategy, with a meter on its optimizer."""

from __future__ import annotations

import contextlib
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import mcftensor as mcf
from pretraining.model import GPT, Shape, loss
from pretraining.strategies import bytes_per_parameter, prepare, stock_optimizer

SHAPES = {
    "cpu": Shape(context=128, layers=4, width=160, heads=5),
    "cuda": Shape(context=512, layers=12, width=768, heads=12),
}
BATCH_SIZES = {"cpu": 4, "cuda": 32}
EVALUATIONS = 10
SAMPLES = 25  # Of updates, by the meter: so few that they cost hardly any time.
VALIDATION_WINDOWS = 64


@dataclass(frozen=True)
class Run:
    """All that decides what one training comes to, the text aside."""

    strategy: str
    steps: int
    lr: float
    beta2: float
    batch_size: int
    device: str
    seed: int
    optimizer: str = "adamw"
    path: str = "fused"
    evaluations: int = EVALUATIONS


@dataclass
class Result:
    """What one run came to; losses are in nats per byte."""

    training: list[float] = field(default_factory=list)  # one loss a step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    edq: list[Mapping[str, Any]] = field(default_factory=list)  # readings of the whole model
    bytes_per_parameter: float = math.nan
    seconds_per_step: float = math.nan

    @property
    def final(self) -> float:
        """The validation loss after the last step."""
        return self.validation[-1][1]

    def late(self, figure: str) -> float | None:
        """The mean of one figure of the meter over the last quarter of its samples."""
        return mean(reading[figure] for reading in last_quarter(self.edq))


def last_quarter(samples: list[Any]) -> list[Any]:
    """The last quarter of `samples`, and one at least."""
    return samples[3 * len(samples) // 4 :]


def mean(values: Iterator[float | None]) -> float | None:
    """The mean of those that are numbers, or None."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def train(
    run: Run,
    training: Tensor,
    validation: Tensor,
    *,
    label: str = "",
    watch: Callable[[mcf.EDQ], object] | None = None,
) -> Result:
    """Train one model and return its losses, what its updates lost, its memory and its speed.

    `label` goes before the progress bar, and `watch` gets the meter after each of its samples.
    """
    # On a CPU the flash backward in bf16 takes several times as long as plain matmuls.
    with sdpa_kernel(SDPBackend.MATH) if run.device == "cpu" else contextlib.nullcontext():
        return _train(run, training, validation, label or run.strategy, watch)


def _train(
    run: Run,
    training: Tensor,
    validation: Tensor,
    label: str,
    watch: Callable[[mcf.EDQ], object] | None,
) -> Result:
    torch.manual_seed(run.seed)
    shape = SHAPES[run.device]
    # Rounded to bf16 here, so that every strategy starts from exactly the same numbers.
    model = GPT(shape).to(run.device, torch.bfloat16)
    stock = stock_optimizer(run.optimizer, run.path, run.lr, run.beta2)
    optimizer = prepare(run.strategy, model, stock)
    # Between two samples is at least one step without, whose time counts.
    meter = mcf.EDQ(optimizer, every=max(2, run.steps // SAMPLES), callback=watch)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, run.steps))
    held_out = evenly_spaced(validation, shape.context + 1).to(run.device)
    evaluated = {round(run.steps * i / run.evaluations) for i in range(run.evaluations + 1)}

    result = Result(validation=[(0, evaluate(model, held_out, run.batch_size))])
    seconds: list[float] = []
    seconds_sampled: list[float] = []
    # A terminal has its bar redrawn ten times a second, a log file gets a line twice a minute.
    redraw = 0.1 if sys.stderr.isatty() else 30
    stream = batches(training, shape.context + 1, run)
    bar = tqdm(stream, label, run.steps, unit="step", mininterval=redraw)
    for step, batch in enumerate(bar, start=1):
        start = time.perf_counter()
        model.zero_grad()
        objective = loss(model, batch)
        objective.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        result.training.append(objective.item())  # On a GPU this also waits for the step.
        sampled = meter.last is not None and meter.last["step"] == step
        (seconds_sampled if sampled else seconds).append(time.perf_counter() - start)
        if step in evaluated:
            result.validation.append((step, evaluate(model, held_out, run.batch_size)))
        bar.set_postfix(
            training=f"{result.training[-1]:.3f}", validation=f"{result.final:.3f}", refresh=False
        )
    meter.remove()
    result.edq = [*meter.history]
    result.bytes_per_parameter = bytes_per_parameter(model, optimizer)
    result.seconds_per_step = statistics.median(seconds or seconds_sampled)
    return result


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to 10 %."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


def batches(content: Tensor, window: int, run: Run) -> Iterator[Tensor]:
    """Random windows of `content`, (batch, window): the same ones for the same seed."""
    generator = torch.Generator().manual_seed(run.seed)
    windows = content.unfold(0, window, 1)
    for _ in range(run.steps):
        chosen = torch.randint(len(windows), (run.batch_size,), generator=generator)
        yield windows[chosen].long().to(run.device)


def evenly_spaced(content: Tensor, window: int) -> Tensor:
    """`VALIDATION_WINDOWS` windows from all over `content`, the same for every seed."""
    windows = content.unfold(0, window, 1)
    chosen = torch.linspace(0, len(windows) - 1, VALIDATION_WINDOWS, dtype=torch.float64)
    return windows[chosen.long()].long()


@torch.no_grad()
def evaluate(model: GPT, windows: Tensor, batch_size: int) -> float:
    """Mean loss over `windows`."""
    total = sum(loss(model, part).item() * len(part) for part in windows.split(batch_size))
    return total / len(windows)


def count_parameters(device: str) -> int:
    """Parameters of the model that is trained on a device."""
    return sum(p.numel() for p in GPT(SHAPES[device]).parameters())


def machine(device: str) -> dict[str, Any]:
    """The hardware and the versions that the numbers belong to."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mcftensor": mcf.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
