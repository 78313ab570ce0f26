"""A network whose blocks are sharded each for itself."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Network(nn.Module):
    """Blocks that are sharded each for itself, and parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(2, 2)
        self.checkpointed = False

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return nn.functional.linear(self.norm(x), self.table.weight)


def by_blocks(model: Network, **options) -> Network:
    """The network after `fully_shard`."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)
