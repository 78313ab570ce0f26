"""GPT-2 in plain PyTorch, with the names, shapes and tied head of the original."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """The size of a `GPT2`."""

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50257


SHAPES = {
    "124M": Shape(layers=12, width=768, heads=12),
    "1.3B": Shape(layers=24, width=2048, heads=16),
    "1.3M": Shape(layers=4, width=160, heads=5, context=128, vocabulary=256),
    "tiny": Shape(layers=2, width=32, heads=2, context=32, vocabulary=101),
}


class Block(nn.Module):
    """One pre-norm layer: causal attention, then a GELU MLP four times as wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.ln_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, of shape (batch, time, width), to the same shape."""
        q, k, v = (
            t.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for t in self.attention(self.ln_1(x)).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The language model: 148 parameters, 124,439,808 elements, in its smallest size."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, of shape (batch, time), to logits, (batch, time, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: GPT2, windows: Tensor) -> Tensor:
    """Mean cross entropy of each token of `windows`, (batch, time + 1), the first aside."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def parameter_shapes(shape: Shape) -> list[tuple[int, ...]]:
    """The shapes of the parameters, each distinct one once."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in GPT2(shape).parameters()]
