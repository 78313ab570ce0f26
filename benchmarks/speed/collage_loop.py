"""Collage-plus as it was published: AdamW in plain operations on pairs of bf16 tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class CollageLoop(Optimizer):
    """AdamW whose parameters and second moments are pairs of bf16 tensors, one at a time.

    The operations follow the code released with the paper, unfused and in a loop over the
    parameters. Its multiplication of the second moment overwrites its own operand; that is
    corrected here.

    References:
        T. Yu et al., "Collage: Light-Weight Low-Precision Strategy for LLM Training", ICML 2024,
        arXiv:2405.03637, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    for name in ("low", "exp_avg", "exp_avg_sq", "exp_avg_sq_low"):
                        state[name] = torch.zeros_like(p)
                state["step"] += 1
                moment, square = state["exp_avg"], state["exp_avg_sq"]
                moment.lerp_(p.grad, 1 - beta1)
                scale(square, state["exp_avg_sq_low"], beta2)
                grow(square, state["exp_avg_sq_low"], (1 - beta2) * p.grad * p.grad)

                root = (1 - beta2 ** state["step"]) ** 0.5
                denominator = (square.sqrt() / root).add_(group["eps"])
                update = moment / denominator * (-group["lr"] / (1 - beta1 ** state["step"]))
                update.add_(p, alpha=-group["lr"] * group["weight_decay"])
                grow(p, state["low"], update)


def grow(high: Tensor, low: Tensor, x: Tensor) -> None:
    """Add `x` to the pair, in place."""
    total = high + x
    low.add_(x - (total - high))
    high.copy_(total + low)
    low.sub_(high - total)


def scale(high: Tensor, low: Tensor, factor: float) -> None:
    """Multiply the pair by a number of twice the precision, in place."""
    leading = torch.tensor(factor, dtype=high.dtype).item()
    product = high * leading
    # In fp32 the product of two bf16 numbers is exact, as with a fused multiply-add.
    error = (high.float() * leading - product.float()).to(high.dtype)
    error.add_(low * leading).add_(high * (factor - leading))
    high.copy_(product + error)
    low.copy_(error.sub_(high - product))
