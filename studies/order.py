"""Of the noise between runs, how much is the order of sums?

A small GPT in bf16 expansions is trained on steps of eight microbatches, the same ones each time.
Ten runs add the gradients of a step in ten different orders, as bf16 autograd does it; ten differ
by their seeds, of weights and batches; two add in different orders, but by sums without order. It
writes `order.json`: validation losses, in nats, and how far weights are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
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


def train(texts: tuple[Tensor, Tensor], steps: int, seed: int, order: int, is_free: bool) -> Any:
    """The validation loss after some steps, and the weights."""
    torch.manual_seed(seed)
    model = mcf.as_expansion(GPT(SHAPE))
    if is_free:
        mcf.order_free_gradients(model, microbatches=MICROBATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    optimizer = mcf.collage(optimizer, "plus")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    orders = torch.Generator().manual_seed(order)
    for step in range(steps):
        batch = windows(texts[0], 10**6 * (seed + 1) + step, 2 * MICROBATCHES).chunk(MICROBATCHES)
        for i in torch.randperm(MICROBATCHES, generator=orders).tolist():
            (loss(model, batch[i]) / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        validation = loss(model, windows(texts[1], 0, 512)).item()
    return validation, torch.cat(
        [mcf.as_plain(p.detach(), torch.float64).flatten() for p in model.parameters()]
    )


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
        "order": [(0, order, False) for order in range(args.runs)],
        "seed": [(seed, 0, False) for seed in range(args.runs)],
        "without order": [(0, order, True) for order in range(2)],
    }
    jobs = [(kind, job) for kind, own in kinds.items() for job in own]
    results: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for kind, job in track(jobs, console=Console(stderr=True)):
        results[kind].append(train(texts, args.steps, *job))
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
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "order.json").write_text(json.dumps(found, indent=1) + "\n")
    for kind in kinds:
        x = found[kind]
        Console().print(f"{kind}: deviation {x['deviation']:.5f} nats, range {x['range']:.5f}")


if __name__ == "__main__":
    main()
