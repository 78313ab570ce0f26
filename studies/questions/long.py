"""How far do 20,000 steps of a training lead from float64?

Here errors feed back: each strategy computes its gradients from its own weights. Its weights are
compared with two others: a *twin*, AdamW in float64 on the gradients of the run, which shows what
the steps lost; and the *own run of float64*, a training in float64 from the same weights on the
same batches, which shows where the training went. A training in float64 that starts a rounding of
float32 away says how much of that second distance any rounding makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import mcftensor as mcf
from pretraining.model import VOCABULARY
from pretraining.report import LINES
from pretraining.run import last_quarter, mean
from pretraining.strategies import as_kept, optimizer_for, parameters_of, stock_optimizer
from pretraining.training import LARGEST_NORM, evenly_spaced, learning_rate_factor
from pretraining.witness import Witness, error, whole
from questions.intervals import mean_of, slope
from questions.ledger import Key
from questions.settings import Row, Settings, dress

OWN = "float64"
CONTROLS = (OWN, "disturbed", "float32")
STRATEGIES = (
    "master", "bf16", "light", "plus", "full", "exact", "tail8", "compact", "round", "bf16sr",
)  # fmt: skip
SCHEDULES = {
    "constant": (*CONTROLS, *STRATEGIES),
    "cosine": (OWN, "master", "bf16", "plus", "compact", "round", "exact"),
}
STEPS = 20_000
CHECKS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # of the steps
LR, BETA2 = 1e-3, 0.999
CONTEXT, WIDTH, HIDDEN, BATCH_SIZE, WINDOWS = 8, 16, 64, 64, 4096
DISTURBANCE = 2.0**-24  # of weights, relative
SAMPLES = 40  # by the meter
AVERAGED = 10  # steps between two updates of the average
DECAY = 0.999  # of the average, at each of its updates
BEGINS = 0.25  # of the steps, before the average


class Model(nn.Module):
    """A byte given the eight before it, by a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(CONTEXT * WIDTH)
        self.up = nn.Linear(CONTEXT * WIDTH, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for matrix in (self.tokens.weight, self.up.weight, self.head.weight):
            nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes, (batch, 8), to logits, (batch, 256)."""
        x = self.norm(self.tokens(tokens).flatten(1))
        logits: Tensor = self.head(F.gelu(self.up(x)))
        return logits


def loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of the last byte of each window."""
    logits = model(windows[:, :-1])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, windows[:, -1])


def answer(settings: Settings) -> dict[str, Any]:
    """Distances of each strategy at some steps, and their averages of weights."""
    keys = [
        {"long": kind, "schedule": schedule, "seed": seed, "steps": STEPS}
        for seed, schedule in product(settings.seeds, SCHEDULES)
        for kind in SCHEDULES[schedule]
    ]
    runs = settings.ledger.measure_all(keys, lambda key: follow(key, settings), "long")

    def chosen(schedule: str, kind: str) -> list[dict[str, Any]]:
        pairs = zip(keys, runs, strict=True)
        return [x for key, x in pairs if (key["schedule"], key["long"]) == (schedule, kind)]

    rows: list[Row] = [
        {
            "schedule": schedule,
            "strategy": kind,
            **summary(chosen(schedule, kind), chosen(schedule, OWN)),
        }
        for schedule, kinds in SCHEDULES.items()
        for kind in kinds
    ]
    return {
        "lr": LR,
        "beta2": BETA2,
        "steps": STEPS,
        "parameters": sum(p.numel() for p in Model().parameters()),
        "average": {"every": AVERAGED, "decay": DECAY, "begins": BEGINS},
        "rows": rows,
    }


def summary(runs: list[dict[str, Any]], reference: list[dict[str, Any]]) -> Row:
    """Means over seeds, and of the final loss the difference to the own run of float64."""
    checks = [run["checks"] for run in runs]
    found: Row = {"steps": [check["step"] for check in checks[0]]}
    for name in checks[0][0]:
        if name != "step":
            found[name] = [mean_of([x[name] for x in at])[0] for at in zip(*checks, strict=True)]
    found["gap"], found["gap_half"] = mean_of(
        [
            run["checks"][-1]["validation"] - own["checks"][-1]["validation"]
            for run, own in zip(runs, reference, strict=True)
        ]
    )
    for name in runs[0]:
        if name != "checks":
            values = [run[name] for run in runs]
            found[name] = None if None in values else mean_of(values)[0]
    if "twin" in found:
        late = slice(len(found["steps"]) // 2, None)
        found["slope"] = slope(
            [math.log(x) for x in found["steps"][late]], [math.log(x) for x in found["twin"][late]]
        )
    return found


def follow(key: Key, settings: Settings) -> dict[str, Any]:
    """One training. Weights at the start and at each check of the own run of float64 are read from
    its file, beside the ledger, which that run writes."""
    schedule, seed, steps = key["schedule"], key["seed"], key["steps"]
    path = settings.ledger.path.with_name(f"long-{schedule}-{seed}-{steps}.pt")
    own: dict[int, list[Tensor]] = {}
    if key["long"] != OWN:
        own = torch.load(path, weights_only=True)
    found = train(key["long"], schedule, seed, steps, settings, own)
    if key["long"] == OWN:
        with mcf.checkpoint.replacing(path) as temporary:
            torch.save(own, temporary)
    return found


def train(
    kind: str,
    schedule: str,
    seed: int,
    steps: int,
    settings: Settings,
    own: dict[int, list[Tensor]],
) -> dict[str, Any]:
    """Train one model; the own run of float64 fills `own`."""
    torch.manual_seed(seed)
    # Rounded to bf16, so that all start from exactly the same numbers.
    model: nn.Module = Model().to(torch.bfloat16)
    make = stock_optimizer("adamw", "fused", LR, BETA2)
    if kind in CONTROLS:
        model = model.to(torch.float32 if kind == "float32" else torch.float64)
        if kind == "disturbed":
            disturb(model)
        optimizer = make(model.named_parameters())
    else:
        as_kept(kind, model)
        optimizer = optimizer_for(kind, model.named_parameters(), make)
    factor = partial(learning_rate_factor, steps=steps) if schedule == "cosine" else constant
    scheduler = LambdaLR(optimizer, factor)
    twin = None
    if kind not in (OWN, "disturbed"):
        twin = Witness(model.named_parameters(), optimizer, make, factor, steps)
    meter = mcf.EDQ(optimizer, max(1, steps // SAMPLES)) if twin else None
    if kind == OWN:
        own[0] = weights_of(optimizer)
    held_out = evenly_spaced(settings.validation, CONTEXT + 1, WINDOWS)
    begins = max(1, round(BEGINS * steps))
    due = {max(1, round(share * steps)) for share in CHECKS}
    checks: list[dict[str, float]] = []
    for step, batch in enumerate(batches(settings.training, seed, steps), start=1):
        model.zero_grad()
        loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        scheduler.step()
        if twin:
            twin.step()
        if step == begins:
            average = Average(optimizer)
        elif step > begins and step % AVERAGED == 0:
            average.update(optimizer)
        if step in due:
            if kind == OWN:
                own[step] = weights_of(optimizer)
            checks.append({"step": step, **distances(optimizer, twin, own, step)})
            checks[-1]["validation"] = evaluate(model, held_out)
    found: dict[str, Any] = {"checks": checks, **average.findings(held_out)}
    if meter:
        late = last_quarter(meter.history)
        found |= {name: mean(x[name] for x in late) for name in ("ratio", "lost", "ratio_leading")}
        second = [x["exp_avg_sq"] for x in last_quarter(meter.states) if "exp_avg_sq" in x]
        found |= {f"second_{name}": mean(x[name] for x in second) for name in ("ratio", "lost")}
    return found


def constant(step: int) -> float:
    """A learning rate that stays."""
    return 1.0


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Move each weight by about a rounding of float32."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.mul_(1 + DISTURBANCE * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def batches(content: Tensor, seed: int, steps: int) -> Iterator[Tensor]:
    """Random windows of the text, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    windows = content.unfold(0, CONTEXT + 1, 1)
    for _ in range(steps):
        chosen = torch.randint(len(windows), (BATCH_SIZE,), generator=generator)
        yield windows[chosen].long()


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """The weights of an optimizer in float64."""
    return [whole(p) for p in parameters_of(optimizer)]


def distances(
    optimizer: Optimizer, twin: Witness | None, own: dict[int, list[Tensor]], step: int
) -> dict[str, float]:
    """`own`: the distance to the own run of float64, over the way that it made. `twin`: the same
    to the twin, over the way of the twin, and what the twin says of second moments."""
    pairs = [
        (here - start, there - start)
        for here, there, start in zip(weights_of(optimizer), own[step], own[0], strict=True)
    ]
    found = {"own": error(pairs)}
    if twin:
        of_twin = twin.findings()
        exact = parameters_of(twin.exact_optimizer)
        found["twin"] = error(
            [
                (here - start, there.detach() - start)
                for here, there, start in zip(
                    weights_of(optimizer), exact, twin.starts, strict=True
                )
            ]
        )
        found["second_moment"] = of_twin["second_moment"]
        found["twin_vectors"] = of_twin["displacement_vectors"]
    return found


class Average:
    """A moving average of weights in their own format, and the same in float64."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.weights = [p.detach().clone() for p in parameters_of(optimizer)]
        self.exact = weights_of(optimizer)
        self.starts = weights_of(optimizer)

    @torch.no_grad()
    def update(self, optimizer: Optimizer) -> None:
        """Move both towards the weights."""
        parameters = [p.detach() for p in parameters_of(optimizer)]
        torch._foreach_lerp_(self.weights, parameters, 1 - DECAY)
        torch._foreach_lerp_(self.exact, weights_of(optimizer), 1 - DECAY)

    def findings(self, held_out: Tensor) -> dict[str, float]:
        """The relative error of the way of the average, and the losses of it and of the exact one
        in a model that computes in bf16."""
        values = [whole(x) for x in self.weights]
        pairs = [
            (here - start, there - start)
            for here, there, start in zip(values, self.exact, self.starts, strict=True)
        ]
        found = {"average": error(pairs)}
        for name, values in (("average_loss", self.weights), ("average_exact_loss", self.exact)):
            plain = Model().to(torch.bfloat16)
            # As optimizers have them: matrices, then vectors.
            own = sorted(plain.parameters(), key=lambda p: p.dim() <= 1)
            with torch.no_grad():
                for p, value in zip(own, values, strict=True):
                    p.copy_(mcf.as_plain(value, torch.bfloat16))
            found[name] = evaluate(plain, held_out)
        return found


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor) -> float:
    """Mean loss over windows."""
    return loss(model, windows).item()


def draw(found: dict[str, Any], path: Path) -> None:
    """A row for each schedule: distances to the twin and to the own run, and the loss."""
    schedules = list(dict.fromkeys(row["schedule"] for row in found["rows"]))
    figure = Figure(figsize=(13, 1 + 4 * len(schedules)), layout="constrained")
    figure.suptitle(f"{found['steps']:,} steps of a training that feeds back")
    panels = figure.subplots(len(schedules), 3, squeeze=False)
    names = {
        "twin": "error of the way, against a twin on the same gradients",
        "own": "distance to the run of float64, over its way",
        "validation": "validation loss, less that of float64",
    }
    for line, schedule in zip(panels, schedules, strict=True):
        rows = [row for row in found["rows"] if row["schedule"] == schedule]
        exact = next(row for row in rows if row["strategy"] == OWN)
        for axes, (name, heading) in zip(line, names.items(), strict=True):
            for row in sorted(rows, key=_width):
                if name not in row or row["strategy"] == OWN:
                    continue
                values = row[name]
                if name == "validation":
                    values = [a - b for a, b in zip(values, exact[name], strict=True)]
                axes.plot(row["steps"], values, label=row["strategy"], **_style(row["strategy"]))
            axes.set_xscale("log")
            if name == "validation":
                axes.set_yscale("symlog", linthresh=0.003)
            else:
                axes.set_yscale("log")
            dress(axes, f"{schedule}: {heading}" if name == "twin" else heading, "steps")
            axes.title.set_fontsize(10)
    handles, labels = panels[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)


_OTHERS: dict[str, dict[str, Any]] = {
    "disturbed": {"color": "#BBBBBB", "linestyle": "--"},
    "float32": {"color": "#666666", "linestyle": ":"},
    "bf16sr": {"color": "#CC0000", "marker": "d", "markersize": 3, "linewidth": 1},
}


def _style(strategy: str) -> dict[str, Any]:
    return LINES.get(strategy) or _OTHERS[strategy]


def _width(row: Row) -> float:
    """Wide lines first, so that those that coincide are all seen."""
    return -float(
        _OTHERS.get(row["strategy"], LINES.get(row["strategy"], {})).get("linewidth", 1.5)
    )
