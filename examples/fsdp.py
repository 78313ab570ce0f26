"""Train a small transformer under `fully_shard`: what each process holds, and what travels.

    torchrun --nproc-per-node 2 examples/fsdp.py

Runs on CPUs, or with `--device cuda` on as many GPUs as there are processes.
"""

from __future__ import annotations

import argparse
import collections
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mcftensor as mcf

WORDS, WIDTH, LAYERS, LENGTH = 64, 128, 4, 24


class Transformer(nn.Module):
    """A decoder that predicts the next of `WORDS` words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each next word."""
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=x.device, dtype=x.dtype
        )
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x).float()


class Wire(TorchDispatchMode):
    """Counts the bytes in each collective, within it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at what an operation of torch.distributed is given."""
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
            self.sent[name] += max(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def held(x: Tensor) -> int:
    """The bytes of what this process has of a tensor, all terms together."""
    part = x.to_local() if hasattr(x, "to_local") else x
    terms = part.components if isinstance(part, mcf.MCFTensor) else (part,)
    return sum(t.nbytes for t in terms)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, device: str) -> None:
    """Sequences of four words that repeat themselves, other ones on each process."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        tokens = torch.randint(WORDS, (8, 4), generator=generator).repeat(1, LENGTH // 4).to(device)
        with Wire() as wire:
            scores = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {mean.item() / dist.get_world_size():.3f}")
    if dist.get_rank() == 0:
        for name, sent in wire.sent.items():
            print(f"in one step, {name}: {sent:,} bytes")


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if options.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)

    model = mcf.as_expansion(Transformer().to(options.device))
    elements = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    mcf.collage(optimizer, "plus")

    if dist.get_rank() == 0:
        print(f"{elements:,} parameters, {2 * elements:,} bytes in bf16")
    train(model, optimizer, options.steps, options.device)

    parameters = sum(held(p) for p in model.parameters())
    states = sum(held(x) for state in optimizer.state.values() for x in state.values())
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        lines,
        f"process {dist.get_rank()} holds {parameters:,} bytes of parameters and {states:,} of "
        f"states, {(parameters + states) / elements:.2f} a parameter",
    )
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
