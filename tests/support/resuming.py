"""A training run that can stop and go on, for `test_resume.py`: alone, or in a new process."""

import contextlib
import sys
from pathlib import Path

import torch
from torch import nn

import mcftensor as mcf

STOCHASTIC = mcf.Format(torch.bfloat16, 2, rounding="stochastic")
FORMATS = {
    "default": None,
    "stochastic": STOCHASTIC,
    "fp32x2": mcf.fp32x2,
    "exact": mcf.bf16i16,
    "tail8": mcf.bf16i8,
    "round": mcf.Format(torch.bfloat16, 1, rounding="balanced"),
    "balanced": mcf.bf16x2.with_rounding("balanced"),
}
OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True, amsgrad=True),
    "for-loop": lambda p: torch.optim.AdamW(p, 1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True),
}
NAMED = {"exp_avg": mcf.bf16x3, "exp_avg_sq": None}
RUNS = [
    *(("default", mode, "fused") for mode in (None, "light", "plus", "full", NAMED)),
    ("default", None, "for-loop"),
    ("default", "plus", "foreach"),
    ("default", None, "sgd"),
    ("default", "full", "sgd"),
    ("stochastic", None, "fused"),
    ("stochastic", "light", "for-loop"),
    ("stochastic", "full", "sgd"),
    ("fp32x2", "full", "fused"),
    ("exact", None, "for-loop"),
    ("tail8", None, "fused"),
    ("tail8", "light", "foreach"),
    ("round", None, "sgd"),
    ("balanced", None, "for-loop"),
    *(("tail8", "compact", kind) for kind in ("fused", "for-loop", "sgd")),
    ("exact", "compact", "foreach"),
    *(("tail8", "compact4", kind) for kind in ("fused", "for-loop", "sgd")),
    ("default", "compact", "for-loop"),
]


class Run:
    """A model with dropout and a buffer, an optimizer with a mode, a scheduler."""

    def __init__(self, format, mode, kind, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 2)
        )
        self.model = mcf.as_expansion(model, FORMATS[format])
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        if mode:
            mcf.collage(self.optimizer, mode)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def train(self, steps):
        for _ in range(steps):
            self.step()
        return self

    def step(self):
        """Take one step, and return the loss before it."""
        dtype = self.model[0].weight.dtype
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(16, 4).to(dtype)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }

    def save(self, folder, name):
        """Once as it is, and once with the weights in safetensors."""
        state = self.state()
        with mcf.checkpoint.replacing(folder / f"{name}.pt") as temporary:
            torch.save(state, temporary)
        mcf.save_file(self.model, folder / f"{name}.safetensors")
        del state["model"]
        torch.save(state, folder / f"{name}-rest.pt")

    def load(self, folder, name, *, safetensors):
        state = torch.load(folder / f"{name}{'-rest' * safetensors}.pt", weights_only=True)
        if safetensors:
            mcf.load_file(folder / f"{name}.safetensors", self.model)
        else:
            self.model.load_state_dict(state["model"])
        return self.load_rest(state)

    def load_rest(self, state):
        """All but the model."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        return self


def go_on(folder):
    """Load every run that is there, train on, and save it."""
    for i, kinds in enumerate(RUNS):
        if not Path(folder, f"run{i}.pt").exists():
            continue
        run = Run(*kinds, seed=99).load(folder, f"run{i}", safetensors=bool(i % 2)).train(10)
        torch.save(run.state(), folder / f"done{i}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with mcf.without_float64() if sys.argv[2:] else contextlib.nullcontext():
        go_on(Path(sys.argv[1]))
