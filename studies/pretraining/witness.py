"""The same optimizer in float64, fed the gradients of a run: what its steps should have come to.

A loss alone flatters. A second moment that is too low, for one, acts as a higher learning rate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import mcftensor as mcf
from pretraining.strategies import OptimizerFactory, parameters_of


class Witness:
    """Takes each step of a run in float64.

    Args:
        model: that of the run, before its first step.
        optimizer: that of the run.
        stock: what made it.
        schedule: the learning rate of a step, over the peak.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        stock: OptimizerFactory,
        schedule: Callable[[int], float],
    ) -> None:
        self.optimizer = optimizer
        self.exact = {p: whole(p) for p in model.parameters()}
        named = [(name, self.exact[p]) for name, p in model.named_parameters()]
        self.exact_optimizer = stock(named)
        self.starts = [p.clone() for p in parameters_of(self.exact_optimizer)]
        self.scheduler = LambdaLR(self.exact_optimizer, schedule)
        self.largest = {"run": 0.0, "exact": 0.0}

    @torch.no_grad()
    def step(self) -> None:
        """Follow a step that the run has taken; its gradients are still there."""
        for parameter, exact in self.exact.items():
            exact.grad = None if parameter.grad is None else whole(parameter.grad)
        self.exact_optimizer.step()
        self.scheduler.step()
        for name, optimizer in (("run", self.optimizer), ("exact", self.exact_optimizer)):
            self.largest[name] = max(self.largest[name], largest_update(optimizer))

    def findings(self) -> dict[str, float]:
        """What the run did, against what it should have done.

        `displacement_*`: relative error of what weights moved by; `second_moment`: the median over
        the exact one; `largest_*`: the largest update over the learning rate, decay aside.
        """
        pairs = [
            (whole(own) - start, exact.detach() - start)
            for own, exact, start in zip(
                parameters_of(self.optimizer),
                parameters_of(self.exact_optimizer),
                self.starts,
                strict=True,
            )
        ]
        found = {
            f"displacement_{kind}": error([pair for pair in pairs if (pair[0].dim() > 1) == wide])
            for kind, wide in (("matrices", True), ("vectors", False))
        }
        if "exp_avg_sq" in next(iter(self.optimizer.state.values())):
            own, exact = map(second_moments, (self.optimizer, self.exact_optimizer))
            found["second_moment"] = (own / exact)[exact > 0].median().item()
            found |= {f"largest_{name}": x for name, x in self.largest.items()}
        return found


def whole(x: Tensor) -> Tensor:
    """A tensor in float64, as one of its own."""
    return mcf.as_plain(x.detach(), torch.float64).clone()


def error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The relative error of the first of each pair, of all together."""
    off = torch.stack([(own - exact).norm() for own, exact in pairs]).norm()
    return float(off / torch.stack([exact.norm() for _, exact in pairs]).norm())


def second_moments(optimizer: Optimizer) -> Tensor:
    """Those of all parameters, in a row."""
    states = (optimizer.state[p] for p in parameters_of(optimizer))
    return torch.cat([whole(state["exp_avg_sq"]).flatten() for state in states])


def largest_update(optimizer: Optimizer) -> float:
    """The largest quotient of Adam's moments as they are stored, in learning rates."""
    largest = 0.0
    for group in optimizer.param_groups:
        for state in (optimizer.state[p] for p in group["params"]):
            if "exp_avg_sq" not in state:
                continue
            step, (beta1, beta2) = float(state["step"]), group["betas"]
            m = whole(state["exp_avg"]) / (1 - beta1**step)
            v = whole(state["exp_avg_sq"]) / (1 - beta2**step)
            largest = max(largest, (m.abs() / (v.sqrt() + group["eps"])).max().item())
    return largest
