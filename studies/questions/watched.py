"""One small training, watched by the meter and by a twin in float64 that is told what is right."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import mcftensor as mcf
from pretraining.model import GPT, Shape, loss
from pretraining.run import last_quarter, mean
from pretraining.strategies import parameters_of
from pretraining.witness import error, whole

SHAPE = Shape(context=16, layers=1, width=32, heads=2)
SAMPLES = 20  # by the meter
ALARM, PATIENCE = 0.9, 5  # of the meter, for frozen weights

Figures = dict[str, Any]
Exact = dict[str, Tensor]
Backward = Callable[[nn.Module, Tensor, int], Exact]


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        name: as the page says it.
        keep: converts the model, of float32 parameters.
        mode: of `mcf.collage`, or None without one.
        lr: a number, or what a schedule changes.
        backward: leaves gradients, and returns the right ones by name.
        schedule: makes a scheduler of the optimizer.
        right_rate: the learning rate of a step, where the twin must not take that of the run.
        betas, decay, steps: as their names say.
        model: makes the model.
        part: the name of a weight and an index into it, where the error is taken of it alone.
        batch_size: windows of a batch.
    """

    name: str
    keep: Callable[[nn.Module], nn.Module]
    mode: Any = None
    lr: Any = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.0
    backward: Backward | None = None
    schedule: Callable[[Optimizer], Any] | None = None
    right_rate: Callable[[int], float] | None = None
    steps: int = 200
    model: Callable[[], nn.Module] = lambda: GPT(SHAPE)
    part: tuple[str, Any] | None = None
    batch_size: int = 8


def observe(way: Way, content: Tensor, seed: int = 0) -> Figures:
    """Train, and return what the meter, the library's warnings and the twin say.

    `error` is the relative error of the way of the weights against the twin, and `made` the share
    of the twin's way that they made in its direction. Figures of the meter are means over the last
    quarter of its samples, the verdict aside.
    """
    torch.manual_seed(seed)
    model = way.keep(way.model())
    exact = {name: whole(p) for name, p in model.named_parameters()}
    starts = {name: p.clone() for name, p in exact.items()}
    lr = way.lr() if callable(way.lr) else way.lr
    options: dict[str, Any] = {"betas": way.betas, "weight_decay": way.decay}
    optimizer: Optimizer = AdamW(model.named_parameters(), lr, **options, fused=True)
    if way.mode is not None:
        optimizer = mcf.collage(optimizer, way.mode)
    twin = AdamW(exact.items(), float(lr), **options, fused=True)
    scheduler = way.schedule(optimizer) if way.schedule else None
    backward = way.backward or plain
    rates: list[float] = []
    rights: list[Exact] = []
    diagnosis = mcf.meters.edq.Diagnosis(max(1, way.steps // SAMPLES), names=model)
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stderr(io.StringIO()),
        diagnosis,
    ):
        warnings.simplefilter("always")
        for step, batch in enumerate(batches(content, seed, way)):
            model.zero_grad()
            rights.append(backward(model, batch, step))
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            diagnosis.meters[0].alarm, diagnosis.meters[0].patience = ALARM, PATIENCE
            if scheduler:
                scheduler.step()
        optimizer.state_dict()  # which looks for numbers that are too large
    for step, (right, rate) in enumerate(zip(rights, rates, strict=True)):
        for name, p in exact.items():
            p.grad = right[name]
        twin.param_groups[0]["lr"] = way.right_rate(step) if way.right_rate else rate
        twin.step()
    own = dict(zip((n for n, _ in model.named_parameters()), parameters_of(optimizer), strict=True))
    ways = {name: (whole(own[name]) - start, exact[name] - start) for name, start in starts.items()}
    if way.part:
        name, index = way.part
        ways = {name: (ways[name][0][index], ways[name][1][index])}
    pairs = list(ways.values())
    found: Figures = {"way": way.name, "steps": way.steps}
    found["error"] = error(pairs)
    found["made"] = float(
        sum((x * y).sum() for x, y in pairs) / sum((y * y).sum() for _, y in pairs)
    )
    (meter,) = diagnosis.meters
    found |= of_meter(meter)
    found["rates"] = [rates[0], rates[-1]]
    found["verdict"] = diagnosis.verdict().split("\n")[1:]
    found["warnings"] = sorted(
        {f"{type(w.message).__name__}: {w.message}" for w in caught if ours(w.message)}
    )
    return found


def ours(message: Warning | str) -> bool:
    """Whether a warning is of the library."""
    return type(message).__module__.startswith("mcftensor") or "EDQ" in str(message)


def of_meter(meter: mcf.EDQ) -> Figures:
    """The last quarter of the samples, and for the ratio the whole course."""
    late = last_quarter(meter.history)
    found: Figures = {
        name: mean(x[name] for x in late)
        for name in ("ratio", "lost", "ratio_leading", "update_norm", "largest")
    }
    found["largest"] = max((x["largest"] for x in meter.history if x["largest"]), default=None)
    found["first_norm"] = meter.history[0]["update_norm"]
    found["course"] = [(x["step"], x["ratio"], x["lost"]) for x in meter.history]
    found["parameters"] = {
        name: {"ratio": x["ratio"], "lost": x["lost"]} for name, x in meter.per_parameter.items()
    }
    states = last_quarter(meter.states)
    for state in sorted({name for x in states for name in x}):
        own = [x[state] for x in states if state in x]
        found[state] = {n: mean(x[n] for x in own) for n in ("ratio", "lost", "zero", "raised")}
    return found


def plain(model: nn.Module, batch: Tensor, step: int) -> Exact:
    """Gradients as they come."""
    loss(model, batch).backward()
    return gradients(model)


def gradients(model: nn.Module) -> Exact:
    """Those of a model, in float64."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def batches(content: Tensor, seed: int, way: Way) -> Iterator[Tensor]:
    """Random windows of the text, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    windows = content.unfold(0, SHAPE.context + 1, 1)
    for _ in range(way.steps):
        chosen = torch.randint(len(windows), (way.batch_size,), generator=generator)
        yield windows[chosen].long()
