"""The same optimizer in float64, fed the gradients of a run: what its steps should have come to.

A loss alone flatters. A second moment that is too low, for one, acts as a higher learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import mcftensor as mcf
from pretraining.strategies import Named, OptimizerFactory, parameters_of


class Witness:
    """Takes each step of a run in float64.

    Args:
        named: the parameters of the run with their names, before its first step.
        optimizer: that of the run.
        stock: what made it.
        schedule: the learning rate of a step, over the peak.
        every: look for the largest update once in so many steps.
    """

    def __init__(
        self,
        named: Named,
        optimizer: Optimizer,
        stock: OptimizerFactory,
        schedule: Callable[[int], float],
        every: int = 1,
    ) -> None:
        named = list(named)
        self.optimizer = optimizer
        self.every, self.steps = every, 0
        self.exact = {p: whole(p) for _, p in named}
        self.exact_optimizer = stock((name, self.exact[p]) for name, p in named)
        self.starts = [p.clone() for p in parameters_of(self.exact_optimizer)]
        self.scheduler = LambdaLR(self.exact_optimizer, schedule)
        self.largest = {"run": 0.0, "exact": 0.0}
        optimizer.register_step_pre_hook(self.take_gradients)

    def take_gradients(self, *_: Any) -> None:
        """Those of a step of the run, before it: some optimizers compute in them."""
        for parameter, exact in self.exact.items():
            exact.grad = None if parameter.grad is None else whole(parameter.grad)

    @torch.no_grad()
    def step(self) -> None:
        """Follow a step that the run has taken."""
        self.exact_optimizer.step()
        self.scheduler.step()
        self.steps += 1
        if self.steps % self.every:
            return
        for name, optimizer in (("run", self.optimizer), ("exact", self.exact_optimizer)):
            self.largest[name] = max(self.largest[name], largest_update(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """All that it needs to go on beside a resumed run."""
        return {
            "exact": parameters_of(self.exact_optimizer),
            "optimizer": self.exact_optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "largest": self.largest,
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the run must have begun with the same weights."""
        for own, saved in zip(parameters_of(self.exact_optimizer), state["exact"], strict=True):
            own.copy_(saved)
        self.exact_optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.largest, self.steps = dict(state["largest"]), state["steps"]

    def findings(self) -> dict[str, float]:
        """What the run did, against what it should have done: as `compared`, and `largest_*`, the
        largest update over the learning rate, decay aside, where the moments are Adam's."""
        found = compared(self.optimizer, self.exact_optimizer, self.starts)
        if any(self.largest.values()):
            found |= {f"largest_{name}": x for name, x in self.largest.items()}
        return found


def compared(run: Optimizer, exact: Optimizer, starts: list[Tensor]) -> dict[str, float]:
    """What one optimizer did, against another with the same groups that began at `starts`.

    `displacement_*`: relative error of what weights moved by, where there are such weights;
    `second_moment`: the median over the exact one, where there is one.
    """
    weights = (
        whole(p) + run.state[p].get("kahan_comp", 0.0)  # optimi's second word
        for p in parameters_of(run)
    )
    pairs = [
        (own - start, right.detach() - start)
        for own, right, start in zip(weights, parameters_of(exact), starts, strict=True)
    ]
    found = {}
    for kind, wide in (("matrices", True), ("vectors", False)):
        if chosen := [pair for pair in pairs if (pair[0].dim() > 1) == wide]:
            found[f"displacement_{kind}"] = error(chosen)
    if "exp_avg_sq" in next(iter(run.state.values())):
        own, right = map(second_moments, (run, exact))
        found["second_moment"] = (own / right)[right > 0].median().item()
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
    found = []
    for group in optimizer.param_groups:
        for state in (optimizer.state[p] for p in group["params"]):
            v = whole(state["exp_avg_sq"]).flatten()
            if "kahan_comp" in state:  # optimi keeps it divided by the bias that is known
                v *= 1 - group["beta2"] ** float(group["step"])
            found.append(v)
    return torch.cat(found)


def largest_update(optimizer: Optimizer) -> float:
    """The largest quotient of Adam's moments as they are stored, in learning rates."""
    largest = 0.0
    for group in optimizer.param_groups:
        for state in (optimizer.state[p] for p in group["params"]):
            if not {"step", "exp_avg", "exp_avg_sq"} <= state.keys():
                continue
            step, (beta1, beta2) = float(state["step"]), group["betas"]
            m = whole(state["exp_avg"]) / (1 - beta1**step)
            v = whole(state["exp_avg_sq"]) / (1 - beta2**step)
            largest = max(largest, (m.abs() / (v.sqrt() + group["eps"])).max().item())
    return largest
