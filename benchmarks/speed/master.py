"""The usual way to train bf16 parameters: an optimizer over fp32 copies of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Stock = Callable[[Sequence[Tensor]], Optimizer]


class MasterWeights:
    """A stock optimizer over fp32 copies, with casts of all tensors at once before and after it.

    With `keep_gradients` the fp32 gradients stay from step to step, which costs 4 bytes a parameter
    and is the faster way on a CPU, where fresh memory is slow to get.
    """

    def __init__(self, parameters: Sequence[Tensor], stock: Stock, *, keep_gradients: bool) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        self.stock = stock(self.masters)
        self.keep_gradients = keep_gradients

    @property
    def state(self) -> Any:
        """The states, by masters."""
        return self.stock.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of masters."""
        return self.stock.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Cast the gradients, update the masters, round them to the parameters."""
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        torch._foreach_copy_(gradients_of(self.masters), gradients_of(self.parameters))
        self.stock.step()
        torch._foreach_copy_(self.parameters, self.masters)
        if not self.keep_gradients:
            for master in self.masters:
                master.grad = None

    def zero_grad(self) -> None:
        """Free the bf16 gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def gradients_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, which all of them have."""
    return [tensor.grad for tensor in tensors if tensor.grad is not None]
