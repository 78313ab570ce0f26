"""Train a small network in float32, in plain bf16, and in bf16 with this library.

    python examples/quickstart.py

The task is to follow a noisy sine; the learning rate is small, as at the end of a training.
"""

from __future__ import annotations

import torch
from torch import nn

import mcftensor as mcf

STEPS = 300


def train(weights: str) -> tuple[float, mcf.EDQ]:
    """Return the error at the end and a meter of the updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1))
    if weights == "bf16":
        model = model.bfloat16()
    if weights == "expansions":
        model = mcf.as_expansion(model)  # parameters become bf16 expansions, in place
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # stock
    if weights == "expansions":
        opt = mcf.collage(opt, "plus")  # optional: which states are expansions
    edq = mcf.EDQ(opt, every=50)  # optional: what do the updates lose?

    dtype = next(model.parameters()).dtype
    for _ in range(STEPS):
        x = 6 * torch.rand(128, 1) - 3
        y = torch.sin(x) + 0.1 * torch.randn(128, 1)
        loss = (model(x.to(dtype)).float() - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    x = torch.linspace(-3, 3, 1000)[:, None]
    with torch.no_grad():
        return (model(x.to(dtype)).float() - torch.sin(x)).square().mean().item(), edq


def main() -> None:
    """Train three times and print a table."""
    print(f"{'weights':<12}{'error':>8}{'EDQ ratio':>11}{'updates lost':>14}")
    for weights in ("float32", "bf16", "expansions"):
        error, edq = train(weights)
        assert edq.last is not None
        print(f"{weights:<12}{error:>8.4f}{edq.last['ratio']:>11.3f}{edq.last['lost']:>13.1%}")


if __name__ == "__main__":
    main()
