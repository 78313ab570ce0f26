"""torch's own database of optimizers, as subjects of a trial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from common.roster import subject
from common.trial import Subject

INFOS: dict[str, OptimizerInfo] = {info.name: info for info in optim_db}


def configurations(name: str) -> dict[str, Subject]:
    """Every configuration of a class, by its description.

    None of SparseAdam, whose gradients are not dense.
    """
    info = INFOS[name]
    if info.only_supports_sparse_grads:
        return {}
    base = subject("torch.optim", name)
    needed = {"Adafactor", "LBFGS"} & {name}  # what makes a trial of it, beside the configuration
    found = {}
    for given in info.optim_inputs_func(device="cpu"):
        keywords = (base.keywords if needed else {}) | given.kwargs
        found[given.desc] = replace(base, keywords=keywords)
    return found


def paths_of(name: str) -> dict[str, dict[str, Any]]:
    """The paths that torch says a class has on a CPU."""
    info = INFOS[name]
    found: dict[str, dict[str, Any]] = {"for-loop": {}}
    if "foreach" in info.supported_impls:
        found = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
    if "cpu" in info.supports_fused_on:
        found["fused"] = {"fused": True}
    return found


def cases() -> list[tuple[str, str, str]]:
    """Every class, configuration and path."""
    return [
        (name, configuration, path)
        for name in INFOS
        for configuration in configurations(name)
        for path in paths_of(name)
    ]
