"""The models that the rows train: small, made here, nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS = ["<pad>", "<end>", *(f"w{i}" for i in range(30))]


def gpt(seed: int = 0) -> Any:
    """A GPT-2 of one layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def tokenizer() -> Any:
    """Words of this module, one token each."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def tokens() -> list[dict[str, torch.Tensor]]:
    """Sequences that count in threes."""
    rows = [(start + 3 * torch.arange(16)) % 30 + 2 for start in range(30)]
    return [{"input_ids": row, "labels": row} for row in rows]


def sentences() -> list[str]:
    """The same as text."""
    return [" ".join(WORDS[int(i)] for i in row["input_ids"]) for row in tokens()]


class Regression(nn.Module):
    """Two layers and a norm."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output, in the dtype of the weights."""
        return self.layers(x)


def batch(step: int) -> torch.Tensor:
    """Inputs of a step."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).bfloat16()


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0, end: int = 4) -> None:
    """Some steps by hand."""
    for step in range(start, end):
        model(batch(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
