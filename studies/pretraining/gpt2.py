"""GPT-2 of transformers over tokens: a task of `pretraining.training`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from pretraining.model import Shape
from pretraining.run import Run
from pretraining.training import Training, evenly_spaced

SMALLEST = Shape(context=1024, layers=12, width=768, heads=12)
VOCABULARY = 50257


@dataclass(frozen=True)
class TokenRun(Run):
    """A run, with its model and its windows."""

    shape: Shape = field(default=SMALLEST)
    vocabulary: int = VOCABULARY
    length: int = 256  # of windows, in tokens
    held_out: int = 16  # windows to validate on


def model(shape: Shape, vocabulary: int) -> GPT2LMHeadModel:
    """GPT-2 with random weights. Without dropout: no text is seen twice."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


class TokenTraining(Training):
    """A GPT-2, its optimizer, and how far they are."""

    run: TokenRun

    def __init__(self, run: TokenRun, training: Tensor, validation: Tensor) -> None:
        # A witness of 124 million parameters takes 4 GB, and longer than a step.
        super().__init__(run, training, validation, None, witness=False)

    def initial(self) -> nn.Module:
        """GPT-2."""
        return model(self.run.shape, self.run.vocabulary)

    def batches(self) -> Iterator[Tensor]:
        """Random windows of the text, (batch, length + 1), for each step."""
        windows = self.training.unfold(0, self.run.length + 1, 1)
        while self.step < self.run.steps:
            chosen = torch.randint(len(windows), (self.run.batch_size,), generator=self.generator)
            yield windows[chosen].long()

    def objective(self, batch: Tensor) -> Tensor:
        """Mean cross entropy of each token given those before it, in nats."""
        logits = self.model(batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    @torch.no_grad()
    def validate(self) -> None:
        """Add the loss on the tokens held out to the result."""
        windows = evenly_spaced(self.validation, self.run.length + 1, self.run.held_out)
        parts = windows.split(self.run.batch_size)
        summed = sum(self.objective(part).item() * len(part) for part in parts)
        self.result.validation.append((self.step, summed / len(windows)))


def count_parameters(shape: Shape, vocabulary: int) -> int:
    """Parameters of the model, the head being tied."""
    with torch.device("meta"):
        return sum(p.numel() for p in model(shape, vocabulary).parameters())
