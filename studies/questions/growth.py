"""How the error of weights against float64 grows with the steps, by strategy.

All strategies are fed the same gradients, and so is the optimizer in float64: random ones, of a
fixed part and noise, or those of a training over master weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from pretraining.model import GPT, loss
from pretraining.report import LINES
from pretraining.strategies import as_kept, optimizer_for, parameters_of, stock_optimizer
from pretraining.training import LARGEST_NORM
from pretraining.witness import compared, whole
from questions.intervals import mean_of, slope
from questions.settings import Row, Settings, dress
from questions.trial import SHAPE, attention, batches

STRATEGIES = ("bf16", "light", "plus", "full", "exact", "tail8", "compact", "master")
LR, BETA2 = 1e-3, 0.999
CHECKS = (0.02, 0.04, 0.1, 0.2, 0.4, 1.0)  # of the steps
SOURCES = ("random", "real")
KINDS = ("matrices", "vectors")
COUNT = 4096
Gradients = dict[str, Tensor]


class Weights(nn.Module):
    """Some of the size of a trained matrix, and some of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(COUNT // 32, 32) * 0.02)
        self.vector = nn.Parameter(torch.ones(COUNT))


def answer(settings: Settings) -> dict[str, Any]:
    """Errors of each strategy at some steps, and the slopes of their logarithms."""
    keys = [
        {"growth": source, "seed": seed, "steps": settings.long}
        for seed in settings.seeds
        for source in SOURCES
    ]
    runs = settings.ledger.measure_all(
        keys, lambda key: follow(key["growth"], key["seed"], settings), "growth"
    )
    rows: list[Row] = []
    for source in SOURCES:
        chosen = [run for key, run in zip(keys, runs, strict=True) if key["growth"] == source]
        for strategy in STRATEGIES:
            for kind in KINDS:
                rows.append({"source": source, "strategy": strategy, "kind": kind})
                rows[-1] |= summary([run[strategy] for run in chosen], kind)
    return {"lr": LR, "beta2": BETA2, "rows": rows}


def summary(runs: list[list[dict[str, float]]], kind: str) -> Row:
    """Means over seeds of the relative error at each check, of the second moment over the exact
    one, and of the slopes, with half their intervals."""
    by_check = list(zip(*runs, strict=True))
    found: Row = {
        "steps": [int(check[0]["step"]) for check in by_check],
        "error": [mean_of([x[f"displacement_{kind}"] for x in check])[0] for check in by_check],
        "second_moment": [mean_of([x["second_moment"] for x in check])[0] for check in by_check],
    }
    steps = [math.log(step) for step in found["steps"]]
    for name, factor in (("slope", f"length_{kind}"), ("slope_relative", None)):
        slopes = [
            slope(
                steps,
                [math.log(x[f"displacement_{kind}"] * (x[factor] if factor else 1)) for x in run],
            )
            for run in runs
        ]
        found[name], found[f"{name}_half"] = mean_of(slopes)
    return found


def follow(source: str, seed: int, settings: Settings) -> dict[str, list[dict[str, float]]]:
    """Errors of every strategy at some steps, over one stream of gradients."""
    torch.manual_seed(seed)
    start = (Weights() if source == "random" else GPT(SHAPE)).to(torch.bfloat16)
    make = stock_optimizer("adamw", "fused", LR, BETA2)
    models = {name: as_kept(name, copy.deepcopy(start)) for name in STRATEGIES}
    optimizers = {
        name: optimizer_for(name, model.named_parameters(), make) for name, model in models.items()
    }
    right = copy.deepcopy(start).double()
    exact = make(right.named_parameters())
    starts = [p.detach().clone() for p in parameters_of(exact)]
    stream: Iterable[Gradients]
    if source == "random":
        stream = noise(start, seed, settings.long)
    else:
        stream = of_training(models["master"], seed, settings)
    checks = {max(1, round(share * settings.long)) for share in CHECKS}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in STRATEGIES}
    for step, gradients in enumerate(stream, start=1):
        for model, optimizer in (
            (right, exact),
            *zip(models.values(), optimizers.values(), strict=True),
        ):
            give(model, gradients)
            optimizer.step()
        if step in checks:
            lengths = lengths_of(exact, starts)
            for name, optimizer in optimizers.items():
                found[name].append({"step": step, **compared(optimizer, exact, starts), **lengths})
    return found


def give(model: nn.Module, gradients: Gradients) -> None:
    """Each parameter its gradient, which no optimizer may change for the others."""
    for name, p in model.named_parameters():
        p.grad = gradients[name].to(p.dtype, copy=True)


def noise(model: nn.Module, seed: int, steps: int) -> Iterator[Gradients]:
    """In bf16: a fixed part that differs from weight to weight, and noise."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    fixed = {name: 0.3 * torch.randn(s, generator=generator) for name, s in shapes.items()}
    for _ in range(steps):
        yield {
            name: ((torch.randn(s, generator=generator) + fixed[name]) * 1e-2).bfloat16()
            for name, s in shapes.items()
        }


def of_training(model: nn.Module, seed: int, settings: Settings) -> Iterator[Gradients]:
    """Those of a model whose owner takes a step with each of them."""
    with attention():
        for batch in batches(settings.training, seed, settings.long):
            model.zero_grad()
            loss(model, batch).backward()
            clip_grad_norm_(model.parameters(), LARGEST_NORM)
            yield {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def lengths_of(exact: Optimizer, starts: list[Tensor]) -> dict[str, float]:
    """How far weights have moved, by kind."""
    ways = [whole(p) - start for p, start in zip(parameters_of(exact), starts, strict=True)]
    return {
        f"length_{kind}": torch.stack([w.norm() for w in ways if (w.dim() > 1) == wide])
        .norm()
        .item()
        for kind, wide in (("matrices", True), ("vectors", False))
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Relative errors over the steps: a row for each source, a column for each kind, and at the
    right second moments."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    figure.suptitle("Error of what weights moved by, against float64 on the same gradients")
    panels = figure.subplots(2, 3)
    for line, source in zip(panels, SOURCES, strict=True):
        for axes, kind in zip(line, (*KINDS, "second moments"), strict=True):
            for row in sorted(found["rows"], key=_width):
                if row["source"] != source or row["kind"] != (kind if kind in KINDS else KINDS[0]):
                    continue
                values = row["error"] if kind in KINDS else row["second_moment"]
                axes.plot(row["steps"], values, label=row["strategy"], **LINES[row["strategy"]])
            axes.set_xscale("log")
            if kind in KINDS:
                axes.set_yscale("log")
            dress(axes, f"{source} gradients: {kind}", "steps")
    panels[0][2].set_ylabel("median over the exact one")
    panels[1][2].set_ylabel("median over the exact one")
    panels[0][0].set_ylabel("relative error")
    panels[1][0].set_ylabel("relative error")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)


def _width(row: Row) -> float:
    """Wide lines first, so that those that coincide are all seen."""
    return -float(LINES[row["strategy"]].get("linewidth", 1.5))
