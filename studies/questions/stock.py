"""The optimizers of a trial, all of them as their packages have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pytorch_optimizer import Lion
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim import Adafactor, Muon, Optimizer

from pretraining.strategies import Named, OptimizerFactory, stock_optimizer
from pretraining.training import learning_rate_factor

DECAY = 0.1  # of matrices

# Learning rates of each: of updates of some size beside the weights, and so not the same.
RATES = {
    "adamw": (3e-4, 2e-3, 1e-2),
    "sgd": (0.1,),
    "lion": (1e-4, 1e-3),
    "adafactor": (1e-2,),
    "muon": (2e-3,),
    "schedulefree": (3e-3,),
}

# The fused SGD of torch 2.13 leaves bf16 parameters where they are on a CPU, but for the last few.
PATHS = {"adamw": "fused", "sgd": "foreach"}


def parts(
    optimizer: str, model: nn.Module, lr: float, beta2: float
) -> list[tuple[Named, OptimizerFactory]]:
    """The parameters of each optimizer and what makes it, that which is in question first.

    Muon is for the matrices between embeddings, and AdamW for the rest.
    """
    named = list(model.named_parameters())
    if optimizer != "muon":
        return [(named, factory(optimizer, lr, beta2))]
    inner = [pair for pair in named if pair[0].startswith("blocks.") and pair[1].dim() == 2]
    names = {name for name, _ in inner}
    outer = [pair for pair in named if pair[0] not in names]
    return [
        (inner, factory("muon", lr, beta2)),
        (outer, factory("adamw", lr, beta2)),
    ]


def factory(optimizer: str, lr: float, beta2: float) -> OptimizerFactory:
    """What makes an optimizer of named parameters, with weight decay on matrices only."""
    if optimizer in PATHS:
        return stock_optimizer(optimizer, PATHS[optimizer], lr, beta2)
    make = MAKERS[optimizer]

    def build(named: Named) -> Optimizer:
        named = list(named)
        groups: list[dict[str, Any]] = [
            {"params": [pair for pair in named if (pair[1].dim() > 1) == wide], "weight_decay": w}
            for wide, w in ((True, DECAY), (False, 0.0))
        ]
        return make([group for group in groups if group["params"]], lr, beta2)

    return build


def lion(groups: list[dict[str, Any]], lr: float, beta2: float) -> Optimizer:
    """That of pytorch_optimizer, with the betas of its paper."""
    optimizer: Optimizer = Lion(groups, lr, betas=(0.9, 0.99))
    return optimizer


def adafactor(groups: list[dict[str, Any]], lr: float, beta2: float) -> Optimizer:
    """torch's."""
    return Adafactor(groups, lr)


def muon(groups: list[dict[str, Any]], lr: float, beta2: float) -> Optimizer:
    """torch's, with updates as long as those of AdamW."""
    return Muon(groups, lr, adjust_lr_fn="match_rms_adamw")


def schedulefree(groups: list[dict[str, Any]], lr: float, beta2: float) -> Optimizer:
    """AdamW of schedulefree."""
    optimizer: Optimizer = AdamWScheduleFree(groups, lr, betas=(0.9, beta2))
    return optimizer


MAKERS: dict[str, Callable[[list[dict[str, Any]], float, float], Optimizer]] = {
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    "schedulefree": schedulefree,
}


def schedule(optimizer: str, steps: int) -> Callable[[int], float]:
    """The learning rate of a step over the peak: that of the main job, and for what has no
    schedule its warm-up alone."""
    if optimizer == "schedulefree":
        return lambda step: min(1.0, (step + 1) / max(1, steps // 10))
    return partial(learning_rate_factor, steps=steps)
