"""A small GPT over bytes, written as one would without any thought of precision."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The size of a `GPT`: bytes of context, layers, width and attention heads."""

    context: int
    layers: int
    width: int
    heads: int


class Block(nn.Module):
    """One pre-norm layer: causal attention, then a GELU MLP four times as wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, of shape (batch, time, width), to the same shape."""
        x = x + self.attention_out(self.attend(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, qkv: Tensor) -> Tensor:
        """Causal attention: (batch, time, 3 * width) to (batch, time, width)."""
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """A byte-level language model whose head is tied to its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.initialize(branches=2 * shape.layers)

    def initialize(self, branches: int) -> None:
        """Draw matrices with deviation 1/√fan-in, less where `branches` of them are summed."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deviation = parameter.shape[1] ** -0.5
                if name.endswith(("attention_out.weight", "down.weight")):
                    deviation /= branches**0.5
                nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes, of shape (batch, time), to logits, (batch, time, 256)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of every byte given those before it, the first aside.

    `windows` has the shape (batch, context + 1). The softmax is taken in fp32 whatever the model
    computes in.
    """
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
