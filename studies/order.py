"""Of the noise between runs, how much is the order of sums?

A small GPT in bf16 expansions is trained on steps of eight microbatches, the same ones each time.
Ten runs add the gradients of a step in ten different orders, as bf16 autograd does it; four add
them as 1, 2, 4 and 8 processes do: each its own, then one process's after the other's; ten differ
by their seeds, of weights and batches; two add in different orders, but by sums without order.

Each run is kept in a file when it is done, so the study resumes where it was stopped. It writes
`order.json`: validation losses, in nats, and how far weights are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import mcftensor as mcf
from pretraining.model import GPT, Shape, loss
from pretraining.text import load

MICROBATCHES = 8
RUNS = 10
SHAPE = Shape(context=32, layers=1, width=32, heads=2)


def windows(text: Tensor, seed: int, count: int) -> Tensor:
    """(count, context + 1) bytes, of places that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    length = SHAPE.context + 1
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return torch.stack([text[i : i + length] for i in starts.tolist()]).long()


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        seed: of the weights and the batches.
        order: the seed of the orders of microbatches.
        processes: those whose sums of gradients it adds.
        is_free: whether its sums have no order.
    """

    seed: int = 0
    order: int = 0
    processes: int = 1
    is_free: bool = False


def gradients(model: torch.nn.Module, batches: Sequence[Tensor], processes: int) -> None:
    """Add the gradients of microbatches: each process its own, then those of all, in turn."""
    parameters = list(model.parameters())
    totals: list[Tensor | None] = [None] * len(parameters)
    for process in range(processes):
        for batch in batches[process::processes]:
            (loss(model, batch) / MICROBATCHES).backward()
        if processes > 1:
            own = [p.grad for p in parameters if p.grad is not None]
            totals = [x if t is None else t + x for t, x in zip(totals, own, strict=True)]
            for p, total in zip(parameters, totals, strict=True):
                p.grad = total if process == processes - 1 else None


@mcf.fast_products()
def train(texts: tuple[Tensor, Tensor], steps: int, run: Run) -> tuple[float, Tensor]:
    """The validation loss after some steps, and the weights."""
    torch.manual_seed(run.seed)
    model = mcf.as_expansion(GPT(SHAPE))
    if run.is_free:
        mcf.order_free_gradients(model, microbatches=MICROBATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    optimizer = mcf.collage(optimizer, "plus")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    orders = torch.Generator().manual_seed(run.order)
    for step in range(steps):
        place = 10**6 * (run.seed + 1) + step
        batch = windows(texts[0], place, 2 * MICROBATCHES).chunk(MICROBATCHES)
        order = torch.randperm(MICROBATCHES, generator=orders).tolist()
        gradients(model, [batch[i] for i in order], run.processes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        validation = loss(model, windows(texts[1], 0, 512)).item()
    return validation, torch.cat(
        [mcf.as_plain(p.detach(), torch.float64).flatten() for p in model.parameters()]
    )


def kept(folder: Path, texts: tuple[Tensor, Tensor], steps: int, run: Run) -> tuple[float, Tensor]:
    """The outcome of a run, from its file if it is done."""
    path = folder / ("-".join(map(str, [steps, *vars(run).values()])) + ".pt")
    if not path.exists():
        unfinished = path.with_suffix(".new")
        torch.save(train(texts, steps, run), unfinished)
        unfinished.replace(path)
    validation, weights = torch.load(path, weights_only=True)
    return validation, weights


def main() -> None:
    """Train all runs, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = load(None, SHAPE.context + 1)
    kinds = {
        "order": [Run(order=order) for order in range(args.runs)],
        "processes": [Run(processes=count) for count in (1, 2, 4, 8)],
        "seed": [Run(seed=seed) for seed in range(args.runs)],
        "without order": [Run(order=order, is_free=True) for order in range(2)],
    }
    folder = args.out / "order"
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[tuple[float, Tensor]]] = {kind: [] for kind in kinds}
    jobs = [(kind, run) for kind, own in kinds.items() for run in own]
    for kind, run in track(jobs, console=Console(stderr=True)):
        results[kind].append(kept(folder, texts, args.steps, run))
    found: dict[str, Any] = {"steps": args.steps, "shape": vars(SHAPE)}
    for kind, runs in results.items():
        losses = [x for x, _ in runs]
        first = runs[0][1]
        found[kind] = {
            "losses": losses,
            "deviation": statistics.stdev(losses),
            "range": max(losses) - min(losses),
            "weights that differ": [(w != first).double().mean().item() for _, w in runs[1:]],
            "distance": [((w - first).norm() / first.norm()).item() for _, w in runs[1:]],
        }
    (args.out / "order.json").write_text(json.dumps(found, indent=1) + "\n")
    for kind in kinds:
        x = found[kind]
        Console().print(f"{kind}: deviation {x['deviation']:.5f} nats, range {x['range']:.5f}")


if __name__ == "__main__":
    main()
