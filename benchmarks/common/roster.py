"""The optimizers of torch and of other packages, as subjects of a trial."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import mcftensor as mcf
from common.trial import MATRICES, SHAPES, Subject, Weights, by_closure, by_descent

PACKAGES = ("torch.optim", "pytorch_optimizer", "schedulefree", "prodigyopt")


def classes(package: str) -> dict[str, type]:
    """Every optimizer of a package that is installed, by name."""
    module = importlib.import_module(package)
    found = {
        name: cls
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and callable(getattr(cls, "step", None))
    }
    own = {
        name: cls
        for name, cls in found.items()
        if cls.__module__.startswith(package) and "lr_scheduler" not in cls.__module__
    }
    return {name: own[name] for name in sorted(own, key=str.lower) if name != "Optimizer"}


def _over(cls: type) -> Callable[..., Any]:
    return lambda weights, **keywords: cls(list(weights.tensors), **keywords)


def _around(cls: type) -> Callable[..., Any]:
    """Of optimizers that wrap another."""
    return lambda weights, **keywords: cls(torch.optim.AdamW(list(weights.tensors)), **keywords)


def _around_sgd(cls: type) -> Callable[..., Any]:
    """Return a maker of wrapping optimizers that share states with the wrapped SGD."""
    return lambda weights, **keywords: cls(torch.optim.SGD(list(weights.tensors)), **keywords)


def _by_kind(cls: type) -> Callable[..., Any]:
    """Return a maker of optimizers that take matrices and other parameters in separate groups."""

    def make(weights: Weights, **keywords: Any) -> Any:
        groups = [
            {"params": [p for p in weights.tensors if p.ndim == 2], "use_muon": True},
            {"params": [p for p in weights.tensors if p.ndim != 2], "use_muon": False},
        ]
        return cls([group for group in groups if group["params"]], **keywords)

    return make


def _by_sparse_gradient(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    weights.draw()
    for p in weights.tensors:
        p.grad = p.grad.to_sparse()
    step()


def _by_fused_backward(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    optimizer.fused_backward(weights.loss(), lr=1e-3)


def _by_two_losses(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    optimizer.pc_backward([weights.loss(), weights.loss()])
    step()


def _by_scaled_loss(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    optimizer.zero_grad()
    optimizer.backward(weights.loss())
    step()


def _by_curvature(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    weights.draw()
    whole = [mcf.as_plain(p.grad, torch.float64) for p in weights.tensors]
    step(hessian=[weights.gradient(x.square()) for x in whole])


def _by_outputs(optimizer: Any, weights: Weights, step: Callable[..., Any]) -> None:
    def closure() -> tuple[None, Tensor]:
        weights.draw()
        return None, torch.ones(())

    step(closure)


class _Constant:
    """A schedule that stays where it is."""

    def step(self) -> float:
        return 0.05


def _gsam(cls: type) -> Callable[..., Any]:
    def make(weights: Weights, **keywords: Any) -> Any:
        inner = torch.optim.AdamW(list(weights.tensors))
        return cls(list(weights.tensors), inner, weights, _Constant(), **keywords)

    return make


def _wsam(cls: type) -> Callable[..., Any]:
    return lambda weights, **keywords: cls(
        weights, list(weights.tensors), torch.optim.AdamW, **keywords
    )


def _with_momentum_like(cls: type) -> Callable[..., Any]:
    """Return a maker of optimizers that would otherwise keep float64 momentum in float32."""
    return lambda weights, **keywords: cls(
        list(weights.tensors), momentum_dtype=weights.tensors[0].dtype, **keywords
    )


WRAPPERS = ("Lookahead", "Magma", "OrthoGrad", "ScheduleFreeWrapper", "TRAC")
MUONS = ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")
SHARPNESS_AWARE = ("FriendlySAM", "LookSAM", "SAM")


def _special(package: str, name: str, cls: type) -> Subject | None:
    """What needs more than parameters."""
    plain = Subject(_over(cls))
    if package == "torch.optim":
        return {
            # Its default eps is that of the dtype of its parameters.
            "Adafactor": replace(plain, keywords={"eps": (1e-30, 1e-3)}),
            "LBFGS": replace(plain, drive=by_descent, keywords={"max_iter": 3}, steps=4),
            "Muon": replace(plain, shapes=MATRICES),
            "SGD": replace(plain, keywords={"momentum": 0.9}),
            "SparseAdam": replace(plain, drive=_by_sparse_gradient),
        }.get(name)
    if package == "schedulefree" and "Wrapper" in name:
        return Subject(_around_sgd(cls))
    if name in WRAPPERS:
        return Subject(_around(cls))
    if package == "schedulefree" and name.endswith("Closure"):
        return replace(plain, drive=by_closure)
    if package != "pytorch_optimizer":
        return None
    if name in MUONS:
        return Subject(_by_kind(cls))
    if name in SHARPNESS_AWARE:
        return replace(plain, drive=by_closure, keywords={"base_optimizer": torch.optim.AdamW})
    return {
        # Its default, bf16, rounds in the oracle, too.
        "AdaFactor": replace(plain, keywords={"momentum_dtype": torch.float32}),
        "AdaHessian": replace(plain, drive=_by_curvature),
        "AdaLOMO": Subject(cls, drive=_by_fused_backward),
        "AdamMini": Subject(cls),
        "AliG": replace(plain, drive=by_closure),
        "BSAM": replace(plain, drive=by_closure, keywords={"num_data": 100}),
        "FAdam": Subject(_with_momentum_like(cls)),
        "GSAM": Subject(_gsam(cls), drive=_by_outputs),
        "LOMO": Subject(cls, drive=_by_fused_backward),
        "LoRARite": replace(plain, shapes=((2, 6), (8, 2))),
        "PCGrad": Subject(_around(cls), drive=_by_two_losses),
        "Ranger21": replace(plain, keywords={"num_iterations": 20}),
        "SafeFP16Optimizer": Subject(_around(cls), drive=_by_scaled_loss),
        "SaRA": replace(plain, keywords={"lr": 1e-3, "threshold": 0.5}),
        "SophiaH": replace(plain, drive=_by_curvature),
        "SpectralSphere": replace(plain, shapes=MATRICES, steps=3),  # each solves an equation
        "WSAM": Subject(_wsam(cls), drive=by_closure),
    }.get(name)


def subject(package: str, name: str) -> Subject:
    """An optimizer with its defaults."""
    cls = classes(package)[name]
    return _special(package, name, cls) or Subject(_over(cls), shapes=SHAPES)


def paths(package: str, name: str) -> dict[str, dict[str, Any]]:
    """The ways in which an optimizer carries out its step, and what selects them."""
    known = inspect.signature(classes(package)[name]).parameters
    found: dict[str, dict[str, Any]] = {
        "for-loop": {"foreach": False} if "foreach" in known else {}
    }
    if "foreach" in known:
        found["foreach"] = {"foreach": True}
    if "fused" in known:
        found["fused"] = {"fused": True}
    return found
