"""Fine-tuning at 1e-5, 6e-6 and 1e-6: what does the meter say beforehand, and was it right?

A small GPT learns the standard library, is rounded to bf16, as models are published, and goes on
with the C headers of Python: all of its weights, or adapters of low rank beside them. Beforehand
there are two predictions: the share of weights whose half ulp is larger than the learning rate,
which takes a checkpoint alone; and the meter's ratio over the first steps. Afterwards there are
the share of the way of float32 master weights that the weights made, and the share of their gain.
"""

from __future__ import annotations

import statistics
import sysconfig
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import mcftensor as mcf
from pretraining import text
from pretraining.model import GPT, Shape, loss
from pretraining.report import LINES
from pretraining.run import last_quarter, mean
from pretraining.strategies import as_kept, optimizer_for, parameters_of, stock_optimizer
from pretraining.training import LARGEST_NORM, evaluate, evenly_spaced, learning_rate_factor
from pretraining.witness import whole
from questions.intervals import mean_of
from questions.ledger import Key
from questions.settings import Row, Settings, brief, dress
from questions.trial import attention, batches

SHAPE = Shape(context=32, layers=2, width=48, heads=2)
PRETRAINING, PRETRAINING_LR = 2000, 3e-3
STEPS, BEFOREHAND, WINDOWS = 600, 20, 256
RATES = (1e-5, 6e-6, 1e-6)
BETA2 = 0.999
RANK = 4
REFERENCE = "master"
STRATEGIES = {"full": (REFERENCE, "bf16", "plus", "compact"), "LoRA": (REFERENCE, "bf16", "plus")}


class Adapted(nn.Module):
    """A linear layer that stays, and a product of two matrices of low rank beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) * layer.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        low = nn.functional.linear(x, self.down)
        return self.layer(x) + nn.functional.linear(low, self.up)


def with_adapters(model: GPT) -> GPT:
    """The model with all its weights frozen, and adapters on the matrices of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    return model


def answer(settings: Settings) -> dict[str, Any]:
    """Predictions and outcomes of each way, rate and strategy."""
    keys = [
        {"tuning": way, "lr": lr, "strategy": strategy, "seed": seed, "steps": STEPS}
        for seed, lr, way in product(settings.seeds, RATES, STRATEGIES)
        for strategy in STRATEGIES[way]
    ]
    runs = settings.ledger.measure_all(keys, lambda key: tune(key, settings), "tuning")
    found = {tuple(key.values()): run for key, run in zip(keys, runs, strict=True)}
    rows: list[Row] = []
    for way, lr in product(STRATEGIES, RATES):
        for strategy in STRATEGIES[way]:
            own = [found[way, lr, strategy, seed, STEPS] for seed in settings.seeds]
            masters = [found[way, lr, REFERENCE, seed, STEPS] for seed in settings.seeds]
            rows.append({"way": way, "lr": lr, "strategy": strategy, **summary(own, masters)})
    parameters = sum(p.numel() for p in GPT(SHAPE).parameters())
    return {"steps": STEPS, "beta2": BETA2, "parameters": parameters, "rows": rows}


def summary(runs: list[dict[str, Any]], masters: list[dict[str, Any]]) -> Row:
    """Means over seeds, and of the loss the difference to master weights."""
    found: Row = {
        name: statistics.fmean([run[name] for run in runs])
        for name in runs[0]
        if isinstance(runs[0][name], float)
    }
    pairs = list(zip(runs, masters, strict=True))
    found["gap"], found["gap_half"] = mean_of([a["after"] - b["after"] for a, b in pairs])
    found["gain"] = statistics.fmean(
        [(a["before"] - a["after"]) / (b["before"] - b["after"]) for a, b in pairs]
    )
    return found


def pretrained(seed: int, settings: Settings) -> dict[str, Tensor]:
    """Weights in bf16, from their file beside the ledger, which is made where it is missing."""
    path = settings.ledger.path.with_name(f"tuning-{seed}-{PRETRAINING}.pt")
    if not path.exists():
        torch.manual_seed(seed)
        model = GPT(SHAPE)
        make = stock_optimizer("adamw", "fused", PRETRAINING_LR, BETA2)
        optimizer = make(model.named_parameters())
        for step, batch in enumerate(windows(settings.training, seed, PRETRAINING)):
            for group in optimizer.param_groups:
                group["lr"] = PRETRAINING_LR * learning_rate_factor(step, PRETRAINING)
            take(model, optimizer, batch)
        with mcf.checkpoint.replacing(path) as temporary:
            torch.save(model.to(torch.bfloat16).state_dict(), temporary)
    found: dict[str, Tensor] = torch.load(path, weights_only=True)
    return found


def windows(content: Tensor, seed: int, steps: int) -> Any:
    """Batches of the length of this model's context."""
    return (batch[:, : SHAPE.context + 1] for batch in batches(content, seed, steps))


def take(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    """One step."""
    model.zero_grad()
    with attention():
        loss(model, batch).backward()
    clip_grad_norm_([p for p in model.parameters() if p.requires_grad], LARGEST_NORM)
    optimizer.step()


def other_text() -> tuple[Tensor, Tensor]:
    """The C headers of this Python."""
    return text.load(Path(sysconfig.get_paths()["include"]), SHAPE.context + 1)


def make_model(way: str, strategy: str, seed: int, settings: Settings) -> nn.Module:
    """The published model, with adapters or without, as a strategy keeps it."""
    model = GPT(SHAPE)
    model.load_state_dict(pretrained(seed, settings))
    if way == "LoRA":
        torch.manual_seed(seed)
        with_adapters(model)
    return as_kept(strategy, model.to(torch.bfloat16))


def learned(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters that are not frozen."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def tune(key: Key, settings: Settings) -> dict[str, Any]:
    """Predict, train, and compare."""
    way, lr, strategy, seed = key["tuning"], key["lr"], key["strategy"], key["seed"]
    training, validation = other_text()
    held_out = evenly_spaced(validation, SHAPE.context + 1, WINDOWS)
    make = stock_optimizer("adamw", "fused", lr, BETA2)

    model = make_model(way, strategy, seed, settings)
    found: dict[str, Any] = {"small": too_small(learned(model), lr)}
    optimizer = optimizer_for(strategy, learned(model), make)
    meter = mcf.EDQ(optimizer, every=4)
    for batch in windows(training, seed + 1000, BEFOREHAND):
        take(model, optimizer, batch)
    found |= {f"{name}_first": mean(x[name] for x in meter.history) for name in ("ratio", "lost")}

    model = make_model(way, strategy, seed, settings)
    named = learned(model)
    optimizer = optimizer_for(strategy, named, make)
    starts = [whole(p) for p in parameters_of(optimizer)]
    meter = mcf.EDQ(optimizer, every=max(1, STEPS // 12))
    with attention():
        found["before"] = evaluate(model, held_out, WINDOWS)
    for batch in windows(training, seed, key["steps"]):
        take(model, optimizer, batch)
    with attention():
        found["after"] = evaluate(model, held_out, WINDOWS)
    late = last_quarter(meter.history)
    found |= {name: mean(x[name] for x in late) for name in ("ratio", "lost")}
    moved = torch.cat(
        [
            (whole(p) - start).flatten()
            for p, start in zip(parameters_of(optimizer), starts, strict=True)
        ]
    )
    path = settings.ledger.path.with_name(f"tuning-{way}-{lr:g}-{seed}-{key['steps']}.pt")
    if strategy == REFERENCE:
        with mcf.checkpoint.replacing(path) as temporary:
            torch.save(moved, temporary)
    right = torch.load(path, weights_only=True)
    found["made"] = float(moved @ right / (right @ right))
    found["stayed"] = float((moved == 0).double().mean())
    return found


def too_small(named: list[tuple[str, Tensor]], lr: float) -> float:
    """The share of weights whose half ulp in bf16 is larger than the learning rate."""
    weights = torch.cat([mcf.as_plain(p.detach(), torch.float64).flatten() for _, p in named])
    _, exponent = torch.frexp(weights)
    half = torch.ldexp(torch.ones_like(weights), exponent - 9)
    return float(((half > lr) & (weights != 0)).double().mean())


def draw(found: dict[str, Any], path: Path) -> None:
    """What was predicted, and what came of it."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle("Fine-tuning: the meter's ratio over the first steps, and what came of it")
    names = {"made": "share of the way of master weights", "gain": "share of their gain in loss"}
    for axes, (name, heading) in zip(figure.subplots(1, 2), names.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="#BBBBBB", zorder=0)
        for row in found["rows"]:
            if row["strategy"] == REFERENCE:
                continue
            full = row["way"] == "full"
            axes.plot(
                row["ratio_first"],
                row[name],
                linestyle="",
                marker="o" if full else "s",
                markerfacecolor=LINES[row["strategy"]]["color"] if full else "none",
                color=LINES[row["strategy"]]["color"],
                label=f"{row['strategy']}, {row['way']}" if row["lr"] == RATES[0] else None,
            )
            if row["strategy"] == "bf16":
                axes.annotate(brief(row["lr"]), (row["ratio_first"], row[name]), fontsize=8)
        dress(axes, heading, "EDQ ratio of the first steps")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
