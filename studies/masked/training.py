"""Masked language modelling in two phases: a task of `pretraining.training`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

from masked.masking import Masked, masked
from pretraining.run import Run
from pretraining.training import Training, evenly_spaced


@dataclass(frozen=True)
class Phase:
    """One phase: its length in steps, its windows, and its learning rate.

    The rate rises over a share of the steps, and then falls to 0, both on straight lines.
    """

    steps: int
    length: int  # of windows, in tokens
    batch_size: int
    rate: float  # the peak, over the peak of the run
    warm_up: float
    held_out: int  # windows to validate on


@dataclass(frozen=True)
class Size:
    """The size of the model."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 512


@dataclass(frozen=True)
class BertRun(Run):
    """A run, with its phases."""

    phases: tuple[Phase, ...] = ()
    size: Size = field(default_factory=Size)
    vocabulary: int = 0


def model(size: Size, vocabulary: int) -> BertForMaskedLM:
    """BERT with random weights. Without dropout: no text is seen twice."""
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
        "max_position_embeddings": size.context,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "eager",  # on a CPU, in bf16, the fastest
    }
    return BertForMaskedLM(BertConfig(**settings))


def logits(network: Any, batch: Masked) -> Tensor:
    """(batch * hidden, vocabulary), of the hidden tokens alone, in float32."""
    states = network.bert(batch.inputs).last_hidden_state
    where = batch.positions[..., None].expand(-1, -1, states.shape[-1])
    found: Tensor = network.cls(states.gather(1, where).flatten(0, 1))
    return found.float()


class MaskedTraining(Training):
    """A BERT, its optimizer, and how far they are."""

    run: BertRun
    decay = 0.01
    scaled = ("fp16",)
    witness_every = 20

    def __init__(self, run: BertRun, training: Tensor, validation: Tensor) -> None:
        # A witness wants to see gradients, which `released` frees.
        super().__init__(run, training, validation, None, witness=run.strategy != "released")
        ends = {sum(phase.steps for phase in run.phases[: i + 1]) for i in range(len(run.phases))}
        self.evaluated |= ends

    def initial(self) -> nn.Module:
        """BERT."""
        return model(self.run.size, self.run.vocabulary)

    def phase(self, step: int) -> tuple[Phase, int]:
        """The phase of a step, and the number of the step in it."""
        for phase in self.run.phases:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        return phase, phase.steps - 1  # after the last step

    def factor(self, step: int) -> float:
        """The learning rate of a step over the peak."""
        phase, step = self.phase(step)
        warm_up = max(1, round(phase.warm_up * phase.steps))
        rising = (step + 1) / warm_up
        falling = (phase.steps - step) / max(1, phase.steps - warm_up + 1)
        return phase.rate * min(1.0, rising, falling)

    def batches(self) -> Iterator[Masked]:
        """Random windows of the text, with hidden tokens, for each step."""
        while self.step < self.run.steps:
            phase, _ = self.phase(self.step)
            windows = self.training.unfold(0, phase.length - 2, 1)
            chosen = torch.randint(len(windows), (phase.batch_size,), generator=self.generator)
            yield masked(windows[chosen].long(), self.run.vocabulary, self.generator)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Within, fp16 computes in float16."""
        return torch.autocast("cpu", torch.float16, enabled=self.run.strategy == "fp16")

    def objective(self, batch: Masked) -> Tensor:
        """Mean cross entropy of hidden tokens, in nats."""
        with self.precision():
            return F.cross_entropy(logits(self.model, batch), batch.targets.flatten())

    @torch.no_grad()
    def validate(self) -> None:
        """Add the loss on the tokens held out, and the share that is guessed right."""
        phase, _ = self.phase(max(0, self.step - 1))
        windows = evenly_spaced(self.validation, phase.length - 2, phase.held_out)
        hidden = torch.Generator().manual_seed(0)  # the same ones each time
        loss, right, count = 0.0, 0, 0
        for part in windows.split(4 * phase.batch_size):
            batch = masked(part, self.run.vocabulary, hidden)
            with self.precision():
                found = logits(self.model, batch)
            targets = batch.targets.flatten()
            loss += F.cross_entropy(found, targets, reduction="sum").item()
            right += int((found.argmax(1) == targets).sum())
            count += len(targets)
        self.result.validation.append((self.step, loss / count))
        self.result.accuracy.append((self.step, right / count))


def count_parameters(size: Size, vocabulary: int) -> int:
    """Parameters of the model."""
    with torch.device("meta"):
        return sum(p.numel() for p in model(size, vocabulary).parameters())


def described(run: BertRun) -> dict[str, Any]:
    """What the record of a run says beside its settings."""
    return {
        "parameters": count_parameters(run.size, run.vocabulary),
        "tokens": sum(p.steps * p.batch_size * p.length for p in run.phases),
    }
