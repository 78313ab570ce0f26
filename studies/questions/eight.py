"""Do expansions work with 8-bit terms? What weights in them move by, EDQ, and the loss.

Terms of E4M3 under shared scales, beside E4M3 codes with an integer tail. Weights alone are stored
so: states are float32, and so are vectors. A model computes with the leading code in all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import AdamW

import mcftensor as mcf
from pretraining.witness import error, whole
from questions.growth import noise
from questions.intervals import mean_of
from questions.settings import Row, Settings, brief, dress, gap
from questions.stock import RATES
from questions.terms import TERMS

# Formats by bytes a weight, scales aside.
FORMATS = (
    *(f"e4m3x{n}{r}" for n in TERMS for r in ("", "br", "s")),
    "e4m3i8rn",
    "e4m3i8",
    "e4m3i16rn",
    "e4m3i16",
    "bf16br",
    "bf16x2",
)
TRAINED = ("e4m3i16", "e4m3i8", "e4m3i8rn", "e4m3x2", "e4m3x2br", "e4m3x3")
REFERENCE = TRAINED[0]  # as exact as float32 here, with the leading codes of the others
RULES = ((1e-4, 0.999), (1e-5, 0.95))
KINDS = {"small": 0.02, "ones": 0.0}
COUNT, STEPS, BETA2 = 4096, 1000, 0.999
STATES = {"exp_avg": mcf.bf16i16, "exp_avg_sq": mcf.bf16i16}
LR = RATES["adamw"][0]  # at which most is lost


def answer(settings: Settings) -> dict[str, Any]:
    """Errors of what weights moved by, over random gradients; then EDQ and losses of trainings."""
    keys = [
        {"eight": name, "lr": lr, "beta2": beta2, "kind": kind, "seed": seed, "steps": STEPS}
        for seed in settings.seeds
        for lr, beta2 in RULES
        for kind in KINDS
        for name in FORMATS
    ]
    errors = settings.ledger.measure_all(keys, lambda key: displaced(**key), "8 bits, stored")
    stored = []
    for name in FORMATS:
        row: Row = {"format": name, "bytes": mcf.Format.from_name(name).bytes}
        for lr, _ in RULES:
            for kind in KINDS:
                same = {"eight": name, "lr": lr, "kind": kind}
                own = [
                    e for key, e in zip(keys, errors, strict=True) if same.items() <= key.items()
                ]
                row[f"{lr:g} {kind}"], row[f"{lr:g} {kind} half"] = mean_of(own)
        stored.append(row)
    return {"stored": stored, "trained": trained(settings)}


def displaced(eight: str, lr: float, beta2: float, kind: str, seed: int, steps: int) -> float:
    """The relative error of what weights in a format moved by, against AdamW in float64."""
    torch.manual_seed(seed)
    weights = torch.randn(COUNT // 32, 32) * KINDS[kind] + (kind == "ones")
    start = nn.ParameterDict({"w": weights.bfloat16().float()})
    format = mcf.Format.from_name(eight)
    own = nn.Parameter(mcf.as_expansion(start["w"].detach(), format))
    exact = nn.Parameter(start["w"].detach().double())
    rule: dict[str, Any] = {"lr": lr, "betas": (0.9, beta2), "weight_decay": 0.1, "fused": True}
    pairs = [(own, mcf.collage(AdamW([own], **rule), STATES)), (exact, AdamW([exact], **rule))]
    for gradients in noise(start, seed, steps):
        for p, optimizer in pairs:
            p.grad = gradients["w"].to(p.dtype, copy=True)
            optimizer.step()
    begin: Tensor = start["w"].detach().double()
    return error([(whole(own) - begin, exact.detach() - begin)])


def trained(settings: Settings) -> list[Row]:
    """What trainings with such weights came to, beside those of the longest tail."""
    trials = settings.grid(TRAINED, [LR], [BETA2])
    outcomes = settings.outcomes(trials, "8 bits, trained")
    rows = []
    for name in TRAINED:
        own = [t for t in trials if t.strategy == name]
        row: Row = {"format": name, "lr": LR}
        for figure in ("ratio", "lost", "displacement_matrices", "validation"):
            row[figure] = mean_of([outcomes[t][figure] or 0.0 for t in own])[0]
        row["gap"], row["gap_half"] = mean_of([gap(outcomes, t, REFERENCE) for t in own])
        rows.append(row)
    return rows


FAMILIES = {
    "terms": (("e4m3x2", "e4m3x3", "e4m3x4"), "#D55E00", "o"),
    "terms, balanced": (("e4m3x2br", "e4m3x3br", "e4m3x4br"), "#009E73", "^"),
    "terms, scales apart": (("e4m3x2s", "e4m3x3s", "e4m3x4s"), "#E69F00", "x"),
    "integer tails": (("e4m3i8rn", "e4m3i16rn"), "#56B4E9", "s"),
    "integer tails, balanced": (("e4m3i8", "e4m3i16"), "#000000", "D"),
    "bf16 balanced, two bf16": (("bf16br", "bf16x2"), "#BBBBBB", "*"),
}


def draw(found: dict[str, Any], path: Path) -> None:
    """Errors over bytes, and at the right what trainings lost."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    figure.suptitle("Weights in E4M3 terms, and in E4M3 with an integer tail")
    panels = figure.subplots(2, 3)
    stored = {row["format"]: row for row in found["stored"]}
    columns = [(lr, kind) for lr, _ in RULES for kind in KINDS]
    for axes, (lr, kind) in zip(panels[:, :2].flat, columns, strict=True):
        for label, (names, colour, marker) in FAMILIES.items():
            own = [stored[name] for name in names]
            axes.plot(
                [row["bytes"] for row in own],
                [row[f"{lr:g} {kind}"] for row in own],
                label=label,
                color=colour,
                marker=marker,
            )
        axes.set_yscale("log")
        axes.set_xticks([2, 3, 4])
        dress(axes, f"Error of the displacement: lr {brief(lr)}, {kind}", "bytes a weight")
    panels[0][0].legend(frameon=False, fontsize="small")
    ratio, loss = panels[:, 2]
    rows = found["trained"]
    formats = [row["format"] for row in rows]
    ratio.plot([row["ratio"] for row in rows], formats, "o", color="#0072B2")
    halves = [row["gap_half"] or 0.0 for row in rows]
    loss.errorbar(
        [row["gap"] for row in rows], formats, None, halves, "o", color="#0072B2", capsize=3
    )
    for axes in (ratio, loss):
        axes.invert_yaxis()
    dress(ratio, f"EDQ ratio in trainings, lr {brief(LR)}", "")
    dress(loss, f"Validation loss, less that of {REFERENCE}", "nats a byte")
    figure.savefig(path, dpi=120)
