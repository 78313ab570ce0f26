"""A policy gradient on two processes: a trainer with tails, a sampler that follows by deltas.

The sampler is a plain 16-bit model. It draws tokens and says their log-probabilities; the trainer
computes them again, and takes a REINFORCE step. Then it sends the leading terms that changed. The
reward is the part of tokens that follow their predecessor: 3 after 2. Start it by
`python examples/rl.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

import mcftensor as mcf

TOKENS, LENGTH, BATCH, STEPS = 16, 8, 64, 60
FORMATS = (mcf.bf16i16, mcf.fp16i16)


def policy() -> nn.Module:
    """The next token from the last one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(TOKENS, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, TOKENS)
    )


def log_probabilities(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token after the first, of shape (batch, length - 1)."""
    return mcf.functional.selective_log_softmax(model(tokens[:, :-1]), tokens[:, 1:])


def sample(model: nn.Module, weights: Any, samples: Any) -> None:
    """Draw tokens with the weights of each delta, until there is none."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    while (delta := weights.get()) is not None:
        mcf.apply_deltas(model, delta)
        with torch.no_grad():
            tokens = torch.randint(TOKENS, (BATCH, 1), generator=generator)
            for _ in range(LENGTH):
                shares = model(tokens[:, -1]).float().softmax(-1)
                new = torch.multinomial(shares, 1, generator=generator)
                tokens = torch.cat([tokens, new], 1)
            samples.put((tokens.numpy(), log_probabilities(model, tokens).numpy()))


def train(format: mcf.Format) -> tuple[list[float], float]:
    """Return the mean reward of each step, and the largest difference of log-probabilities."""
    model = mcf.as_expansion(policy(), format, overrides={"*": format})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    deltas = mcf.deltas(optimizer, names=model, anchor_every=100)
    context = mp.get_context("spawn")
    weights, samples = context.Queue(), context.Queue()
    server = policy().to(format.dtype)
    process = context.Process(target=sample, args=(server, weights, samples))
    process.start()
    rewards, mismatch = [], 0.0
    for _ in range(STEPS):
        weights.put(bytes(deltas.take().data))
        tokens, said = map(torch.from_numpy, samples.get())
        reward = (tokens[:, 1:] == (tokens[:, :-1] + 1) % TOKENS).float()
        found = log_probabilities(model, tokens)
        mismatch = max(mismatch, (found.detach() - said).abs().max().item())
        optimizer.zero_grad()
        (-(reward - reward.mean()) * found).mean().backward()
        optimizer.step()
        rewards.append(reward.mean().item())
    weights.put(None)
    process.join()
    return rewards, mismatch


def main() -> None:
    """Train in both formats."""
    torch.set_num_threads(1)
    for format in FORMATS:
        rewards, mismatch = train(format)
        first, last = (sum(x) / 5 for x in (rewards[:5], rewards[-5:]))
        print(f"{format.name}: reward {first:.3f} to {last:.3f}, mismatch {mismatch}")


if __name__ == "__main__":
    main()
