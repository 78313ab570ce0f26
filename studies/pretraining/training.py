"""Training of one model in one precision strategy, with a meter on its optimizer."""

from __future__ import annotations

import contextlib
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import mcftensor as mcf
from mcftensor.kernels.fast_products import slow_dtypes
from pretraining import processes
from pretraining.model import GPT, Shape, loss
from pretraining.resuming import Checkpoint, State, load_model, load_optimizer
from pretraining.run import Result, Run
from pretraining.strategies import (
    HALVES,
    as_kept,
    bytes_per_parameter,
    optimizer_for,
    stock_optimizer,
)
from pretraining.witness import Witness

SHAPES = {
    "cpu": Shape(context=128, layers=4, width=160, heads=5),
    "cuda": Shape(context=512, layers=12, width=768, heads=12),
}
BATCH_SIZES = {"cpu": 4, "cuda": 32}
SAMPLES = 25  # Of updates, by the meter: so few that they cost hardly any time.
VALIDATION_WINDOWS = 64
LARGEST_NORM = 1.0  # Of all gradients together.


def train(
    run: Run,
    training: Tensor,
    validation: Tensor,
    bar: Any,
    *,
    watch: Callable[[mcf.EDQ], object] | None = None,
    checkpoint: Checkpoint | None = None,
    witness: bool = False,
) -> Result:
    """Train one model and return its losses, what its updates lost, its memory and its speed.

    `bar` counts the steps, and `watch` gets the meter after each of its samples. With a checkpoint,
    the run goes on from what is there, and saves itself there. A witness takes all steps in float64
    beside it, in one process and without a checkpoint.
    """
    saved = checkpoint.load() if checkpoint else None
    if saved and saved["step"] == run.steps:
        return Result(**saved["result"])
    with attention(run.device):
        job = Training(run, training, validation, watch, witness)
        go_on(job, saved, checkpoint, bar)
        return job.result


def progress_bar(steps: int, done: int = 0, label: str = "") -> tqdm[Any]:
    """A bar whose time left follows from the mean of all steps, with their validation."""
    # A terminal has its bar redrawn ten times a second, a log file gets a line twice a minute.
    return tqdm(
        desc=label,
        total=steps,
        initial=done,
        unit="step",
        smoothing=0,
        mininterval=0.1 if sys.stderr.isatty() else 30,
        disable=not processes.is_first(),
    )


def attention(device: str) -> contextlib.AbstractContextManager[Any]:
    """On a CPU the flash backward in bf16 takes several times as long as plain matmuls."""
    return sdpa_kernel(SDPBackend.MATH) if device == "cpu" else contextlib.nullcontext()


def go_on(
    job: Training,
    saved: State | None,
    checkpoint: Checkpoint | None,
    bar: Any,
    *,
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Take the steps that are left, from what is saved on; save and return once it `is_late`."""
    if saved:
        job.load_state_dict(saved)
    else:
        job.validate()
    for batch in job.batches():
        job.take(batch)
        late = is_late()
        if checkpoint and (late or checkpoint.is_due(job.step)):
            checkpoint.save(job.state_dict())
        bar.set_postfix(
            training=f"{job.result.training[-1]:.3f}",
            validation=f"{job.result.final:.3f}",
            refresh=False,
        )
        bar.update()
        if late:
            return


class Training:
    """A model, its optimizer, and how far they are.

    Other tasks than that of `pretrain.py` are subclasses, which say what is the model, what are the
    batches and the loss, and how it is judged.
    """

    decay: float | None = None  # of matrices, if it is not that of `stock_optimizer`
    scaled: tuple[str, ...] = HALVES  # Strategies whose loss is scaled.
    witness_every = 1  # Steps from one look at the largest update to the next.

    def __init__(
        self,
        run: Run,
        training: Tensor,
        validation: Tensor,
        watch: Callable[[mcf.EDQ], object] | None,
        witness: bool,
    ) -> None:
        torch.manual_seed(run.seed)
        self.run = run
        self.step = 0
        self.result = Result()
        self.seconds: dict[str, list[float]] = {"plain": [], "sampled": []}
        self.training, self.validation = training, validation
        # Draws the batches: the same ones for the same seed.
        self.generator = torch.Generator().manual_seed(run.seed)
        self.evaluated = {
            round(run.steps * i / run.evaluations) for i in range(run.evaluations + 1)
        }

        # Rounded to bf16 here, so that every strategy starts from exactly the same numbers.
        self.model = self.initial().to(run.device, torch.bfloat16)
        as_kept(run.strategy, self.model)
        self.parallel = processes.divided(self.model, run.parallel, run.device)
        stock = stock_optimizer(run.optimizer, run.path, run.lr, run.beta2, self.decay)
        self.optimizer = optimizer_for(run.strategy, self.model.named_parameters(), stock)
        # Between two samples is at least one step without, whose time counts.
        self.meter = mcf.EDQ(self.optimizer, every=max(2, run.steps // SAMPLES), callback=watch)
        self.steps_in_backward: mcf.training.step_in_backward.StepInBackward | None = None
        if run.strategy == "released":
            self.steps_in_backward = mcf.step_in_backward(self.model, self.optimizer)
        self.scheduler = LambdaLR(self.optimizer, self.factor)
        enabled = run.strategy in self.scaled
        self.scaler = torch.amp.GradScaler(run.device, enabled=enabled, init_scale=2**15)
        self.witness: Witness | None = None
        if witness:
            named = self.model.named_parameters()
            self.witness = Witness(named, self.optimizer, stock, self.factor, self.witness_every)

    def initial(self) -> nn.Module:
        """The model before its first step."""
        return GPT(SHAPES[self.run.device])

    def factor(self, step: int) -> float:
        """The learning rate of a step over the peak."""
        return learning_rate_factor(step, self.run.steps)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Within, the model computes."""
        return contextlib.nullcontext()

    def objective(self, batch: Any) -> Tensor:
        """The loss on a batch."""
        with self.precision():
            return loss(self.parallel, batch)

    def batches(self) -> Iterator[Any]:
        """This process's share of random windows of the text, (batch, window), for each step."""
        windows = self.training.unfold(0, SHAPES[self.run.device].context + 1, 1)
        while self.step < self.run.steps:
            chosen = torch.randint(len(windows), (self.run.batch_size,), generator=self.generator)
            yield windows[processes.share(chosen)].long().to(self.run.device)

    def take(self, batch: Any) -> None:
        """Take one step, and measure it."""
        start = time.perf_counter()
        self.model.zero_grad()
        objective = self.objective(batch)
        self.backward(objective)
        self.update()
        self.scheduler.step()
        self.step += 1
        # On a GPU this also waits for the step.
        mean = processes.total(objective.item(), self.run.device) / processes.count()
        self.result.training.append(mean)
        sampled = self.meter.last is not None and self.meter.last["step"] == self.step
        self.seconds["sampled" if sampled else "plain"].append(time.perf_counter() - start)
        if self.witness:
            self.witness.step()
        if self.step in self.evaluated:
            self.validate()
        if self.step == self.run.steps:
            self.conclude()

    def backward(self, objective: Tensor) -> None:
        """Leave gradients that are not too long, or steps taken in their stead: these take two
        passes, one for the norm."""
        handle = self.steps_in_backward
        if handle and self.witness is None and self.step % self.meter.every:
            with handle.measure_norm(LARGEST_NORM):
                objective.backward(retain_graph=True)
            objective.backward()
            return
        with handle.no_step() if handle else contextlib.nullcontext():
            # The meter and the witness want to see gradients.
            self.scaler.scale(objective).backward()
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), LARGEST_NORM)

    def update(self) -> None:
        """Let the optimizer step, unless scaled gradients are infinite."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def validate(self) -> None:
        """Add the loss on the text held out to the result."""
        held_out = evenly_spaced(self.validation, SHAPES[self.run.device].context + 1)
        with self.precision():
            mean = evaluate(self.parallel, held_out.to(self.run.device), self.run.batch_size)
        self.result.validation.append((self.step, mean))

    def conclude(self) -> None:
        """Complete the result."""
        self.meter.remove()
        self.result.edq = [*self.meter.history]
        self.result.witness = self.witness.findings() if self.witness else {}
        self.result.bytes_per_parameter = bytes_per_parameter(self.model, self.optimizer)
        self.result.seconds_per_step = statistics.median(
            self.seconds["plain"] or self.seconds["sampled"]
        )

    def state_dict(self) -> State:
        """All that a run needs to go on."""
        random = {"cpu": torch.get_rng_state()}
        if self.run.device == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "meter": self.meter.state_dict(),
            "scaler": self.scaler.state_dict(),
            "batches": self.generator.get_state(),
            "random": random,  # All processes have the same, and draw as often.
            "result": asdict(self.result),
            "seconds": self.seconds,
        }
        return state | ({"witness": self.witness.state_dict()} if self.witness else {})

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self.step = state["step"]
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.meter.load_state_dict(state["meter"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.generator.set_state(state["batches"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.run.device == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"])
        self.result = Result(**state["result"])
        self.seconds = state["seconds"]
        if self.witness:
            self.witness.load_state_dict(state["witness"])


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to 10 %."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


def evenly_spaced(content: Tensor, window: int, count: int | None = None) -> Tensor:
    """`count` windows from all over `content`, the same for every seed."""
    windows = content.unfold(0, window, 1)
    count = count or VALIDATION_WINDOWS
    chosen = torch.linspace(0, len(windows) - 1, count, dtype=torch.float64)
    return windows[chosen.long()].long()


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch_size: int) -> float:
    """Mean loss over `windows`, of which each process takes its share."""
    summed = 0.0
    for part in windows.split(batch_size):
        mine = processes.share(part)
        # Whoever has none takes part all the same: a divided model needs all processes.
        value = loss(model, mine if len(mine) else part[:1]).item()
        summed += value * len(mine)
    return processes.total(summed, windows.device.type) / len(windows)


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
        "products_in_float32": sorted(map(str, slow_dtypes())) if device == "cpu" else [],
    }
