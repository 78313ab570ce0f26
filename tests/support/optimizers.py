"""The optimizers of torch that take dense gradients, in each of their paths."""

import inspect

import pytest
import torch

OPTIMIZERS = [
    getattr(torch.optim, name)
    for name in torch.optim.__all__
    if inspect.isclass(getattr(torch.optim, name))
    and name not in ("Optimizer", "SparseAdam", "LBFGS")
]
PATHS = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
CASES = [
    pytest.param(cls, flags, id=f"{cls.__name__}-{path}")
    for cls in OPTIMIZERS
    for path, flags in PATHS.items()
    if set(flags) <= set(inspect.signature(cls).parameters)
] + [pytest.param(torch.optim.Muon, {}, id="Muon")]

# The configurations of which the default run takes one each: they have most of the options.
SAMPLE = {
    "Adadelta": "maximize, weight_decay",
    "Adafactor": "maximize",
    "Adagrad": "lr_decay",
    "Adam": "amsgrad",
    "Adamax": "maximize, weight_decay",
    "AdamW": "amsgrad",
    "ASGD": "maximize, nonzero weight_decay",
    "LBFGS": "default",
    "Muon": "non-default weight_decay",
    "NAdam": "decoupled_weight_decay",
    "RAdam": "decoupled_weight_decay",
    "RMSprop": "maximize, centered, weight_decay, w/ momentum",
    "Rprop": "non-default etas",
    "SGD": "nesterov",
}
