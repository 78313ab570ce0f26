"""What steps side by side: PyTorch's own optimizers, and the same over expansions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import mcftensor as mcf
from speed.master import MasterWeights, Stock, gradients_of
from speed.running import Running
from speed.workloads import Workload

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
PATHS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Contender:
    """One way to step, and how it is set up over copies of a workload."""

    name: str
    build: Callable[[Workload], Running]
    kind: str = "AdamW"  # contenders are compared with the baseline of their kind
    family: str = "PyTorch"
    compiles: bool = False  # at its first step


def adamw(path: str) -> Stock:
    """The stock optimizer by one of its paths."""
    return lambda parameters: AdamW(parameters, **ADAMW, **PATHS[path])


def sgd(path: str) -> Stock:
    """The stock optimizer, with momentum, by one of its paths."""
    return lambda parameters: SGD(parameters, **MOMENTUM, **PATHS[path])


def parameters_of(workload: Workload, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Copies of the values with copies of the gradients."""
    parameters: list[Tensor] = []
    for value, gradient in zip(workload.values, workload.gradients, strict=True):
        parameter = nn.Parameter(value.to(dtype, copy=True))
        parameter.grad = gradient.to(dtype, copy=True)
        parameters.append(parameter)
    return parameters


def run(parameters: list[Tensor], optimizer: Any, compiled: bool = False) -> Running:
    """The optimizer over parameters that have gradients."""
    gradients = gradients_of(parameters)
    step = torch.compile(optimizer.step) if compiled else optimizer.step
    return Running(parameters, gradients, optimizer, step)


def plain(stock: Stock, dtype: torch.dtype, compiled: bool = False) -> Callable[..., Running]:
    """A stock optimizer over parameters, gradients and states in one dtype."""

    def build(workload: Workload) -> Running:
        parameters = parameters_of(workload, dtype)
        return run(parameters, stock(parameters), compiled)

    return build


def expansions(
    stock: Stock, mode: str, format: mcf.Format | None = None, compiled: bool = False
) -> Callable[..., Running]:
    """A stock optimizer over bf16 expansions with plain gradients, in a mode of `collage`."""

    def build(workload: Workload) -> Running:
        parameters = parameters_of(workload)
        mcf.as_expansion(nn.ParameterList(parameters), format)
        optimizer = stock(parameters)
        if mode != "none":
            mcf.collage(optimizer, mode)
        return run(parameters, optimizer, compiled)

    return build


def stored(
    stock: Stock, matrices: mcf.Format, states: str | Mapping[str, mcf.Format]
) -> Callable[..., Running]:
    """A stock optimizer over a format that stores, vectors being float32 in bf16i16."""

    def build(workload: Workload) -> Running:
        parameters = parameters_of(workload)
        as_stored(nn.ParameterList(parameters), matrices)
        return run(parameters, mcf.collage(stock(parameters), states))

    return build


def as_stored(model: nn.Module, matrices: mcf.Format) -> nn.Module:
    """The parameters of a model in a format, those with one dimension in bf16i16."""
    vectors = {name: mcf.bf16i16 for name, p in model.named_parameters() if p.dim() == 1}
    return mcf.as_expansion(model, matrices, overrides=vectors)


def master_weights(stock: Stock, keep_gradients: bool = True) -> Callable[..., Running]:
    """A stock optimizer over fp32 copies, with casts before and after it."""

    def build(workload: Workload) -> Running:
        parameters = parameters_of(workload)
        optimizer = MasterWeights(parameters, stock, keep_gradients=keep_gradients)
        return replace(run(parameters, optimizer), written_only=True)

    return build


BASELINES = {
    "AdamW": Contender("master weights", master_weights(adamw("fused"))),
    "SGD": Contender("SGD, master weights", master_weights(sgd("fused")), kind="SGD"),
}

TORCH = [
    Contender(
        "master weights, gradients freed", master_weights(adamw("fused"), keep_gradients=False)
    ),
    *(Contender(f"torch bf16, {path}", plain(adamw(path), torch.bfloat16)) for path in PATHS),
    Contender("torch fp32, fused", plain(adamw("fused"), torch.float32)),
]

# The format of matrices, and those of states.
STORED: dict[str, tuple[mcf.Format, str | Mapping[str, mcf.Format]]] = {
    "exact": (mcf.bf16i16, dict.fromkeys(("exp_avg", "exp_avg_sq"), mcf.bf16i16)),
    "compact": (mcf.bf16i8, "compact"),
}

EXPANSIONS = [
    *(
        Contender(f"mcf {mode}, {path}", expansions(adamw(path), mode), family="mcftensor")
        for mode in ("none", "light", "plus", "full")
        for path in PATHS
    ),
    *(
        Contender(f"mcf {name}, {path}", stored(adamw(path), *how), family="mcftensor")
        for name, how in STORED.items()
        for path in PATHS
    ),
    Contender(
        "mcf plus, stochastic, fused",
        expansions(adamw("fused"), "plus", mcf.Format(torch.bfloat16, 2, "stochastic")),
        family="mcftensor",
    ),
    *(
        Contender(
            f"SGD, mcf full, {path}", expansions(sgd(path), "full"), kind="SGD", family="mcftensor"
        )
        for path in PATHS
    ),
]

COMPILED = [
    Contender(
        "torch bf16, for-loop, compiled",
        plain(adamw("for-loop"), torch.bfloat16, compiled=True),
        compiles=True,
    ),
    Contender(
        "mcf plus, for-loop, compiled",
        expansions(adamw("for-loop"), "plus", compiled=True),
        family="mcftensor",
        compiles=True,
    ),
]

KNOWN = {contender.name: contender for contender in (*BASELINES.values(), *TORCH, *EXPANSIONS)}
"""PyTorch's and this library's, by their names."""
