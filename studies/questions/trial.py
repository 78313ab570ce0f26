"""One short training: what decides it, how it goes, and what is kept of it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import mcftensor as mcf
from mcftensor.training.state_names import FIRST_MOMENTS, SECOND_MOMENTS
from pretraining.model import GPT, Shape, loss
from pretraining.run import last_quarter, mean
from pretraining.strategies import as_kept, optimizer_for
from pretraining.training import LARGEST_NORM, evaluate, evenly_spaced
from pretraining.witness import Witness
from questions import stock

SHAPE = Shape(context=64, layers=2, width=64, heads=2)
BATCH_SIZE = 8
WINDOWS = 256  # to validate on
SAMPLES = 12  # by the meter, and as often by the witness, of the largest update


@dataclass(frozen=True)
class Trial:
    """All that decides what a training comes to, the text aside."""

    strategy: str
    lr: float
    beta2: float
    seed: int
    optimizer: str
    steps: int
    shape: Shape | None = None  # `SHAPE`


Outcome = dict[str, float | None]


def train(trial: Trial, training: Tensor, validation: Tensor) -> Outcome:
    """Train one model; return its losses, and what the meter and the witness saw.

    Figures of the meter are means over the last quarter of its samples, those of the witness are
    of the last step, and the largest updates those of all samples.
    """
    torch.manual_seed(trial.seed)
    # Rounded to bf16 here, so that every strategy starts from exactly the same numbers.
    shape = trial.shape or SHAPE
    model = GPT(shape).to(torch.bfloat16)
    as_kept(trial.strategy, model)
    factor = stock.schedule(trial.optimizer, trial.steps)
    pairs = stock.parts(trial.optimizer, model, trial.lr, trial.beta2)
    optimizers = [optimizer_for(trial.strategy, named, make) for named, make in pairs]
    schedulers = [LambdaLR(optimizer, factor) for optimizer in optimizers]
    (named, make), first = pairs[0], optimizers[0]
    every = max(1, trial.steps // SAMPLES)
    witness = Witness(named, first, make, factor, every)
    for optimizer in (*optimizers, witness.exact_optimizer):
        if hasattr(
            optimizer, "train"
        ):  # is free of a schedule, and starts so that it may be judged
            optimizer.train()
    meter = mcf.EDQ(first, every)
    losses = []
    with attention():
        for batch in batches(training, trial.seed, trial.steps, shape.context):
            model.zero_grad()
            value = loss(model, batch)
            value.backward()
            clip_grad_norm_(model.parameters(), LARGEST_NORM)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            witness.step()
            losses.append(value.item())
        held_out = evenly_spaced(validation, shape.context + 1, WINDOWS)
        with judged(model, optimizers):
            final = evaluate(model, held_out, 8 * BATCH_SIZE)
    late = {
        name: mean(reading[name] for reading in last_quarter(meter.history))
        for name in ("ratio", "lost", "ratio_leading", "lost_leading", "update_norm")
    }
    return {
        "validation": final,
        "training": statistics.fmean(losses[-max(1, trial.steps // 10) :]),
        **late,
        "largest": max((x["largest"] for x in meter.history if x["largest"]), default=None),
        **of_states(meter),
        **witness.findings(),
    }


def batches(content: Tensor, seed: int, steps: int, context: int | None = None) -> Iterator[Tensor]:
    """Random windows of the text, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    windows = content.unfold(0, (context or SHAPE.context) + 1, 1)
    for _ in range(steps):
        chosen = torch.randint(len(windows), (BATCH_SIZE,), generator=generator)
        yield windows[chosen].long()


def attention() -> contextlib.AbstractContextManager[Any]:
    """On a CPU the flash backward in bf16 takes several times as long as plain matmuls."""
    return sdpa_kernel(SDPBackend.MATH)


@contextlib.contextmanager
def judged(model: nn.Module, optimizers: list[Optimizer]) -> Iterator[None]:
    """Within, weights are those to be judged: of what is free of a schedule an average."""
    averaging = [x for x in optimizers if hasattr(x, "eval")]
    for optimizer in averaging:
        optimizer.eval()
        take_weights(model, optimizer)
    yield
    for optimizer in averaging:
        optimizer.train()  # type: ignore[attr-defined]
        take_weights(model, optimizer)


@torch.no_grad()
def take_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Round master weights to those of the model; others are these themselves."""
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            if p is not (own := model.get_parameter(name)):
                own.copy_(p)


def of_states(meter: mcf.EDQ) -> Outcome:
    """What the meter says of the moments, where they have the shape of their weights."""
    found: Outcome = {}
    samples = last_quarter(meter.states)
    for kind, names in (("first", FIRST_MOMENTS), ("second", SECOND_MOMENTS)):
        own = [x for sample in samples for name, x in sample.items() if name in names]
        found |= {f"{kind}_{name}": mean(x[name] for x in own) for name in ("ratio", "lost")}
    return found


def count_parameters(shape: Shape | None = None) -> int:
    """Parameters of the model that is trained."""
    return sum(p.numel() for p in GPT(shape or SHAPE).parameters())
