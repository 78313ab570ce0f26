"""Losses of PyTorch, and their gradients, in formats that no machine type represents.

PyTorch's decompositions of the gradients multiply by 1 / n, a float64 number; here they divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.decompositions import decomposition
from mcftensor.dispatch.elementary import in_longer

aten = torch.ops.aten

_NONE, _MEAN = 0, 1
"""The codes of aten's reductions of losses."""


def _averaged(grad: Tensor, x: Tensor, reduction: int) -> Tensor:
    return grad / max(x.numel(), 1) if reduction == _MEAN else grad


@in_longer
def _mse_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    return (x - target) * 2 * _averaged(grad, x, reduction)


@in_longer
def _smooth_l1_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float
) -> Tensor:
    below = x - target
    slope = below.sign()
    if beta:
        slope = torch.where(below.abs() < beta, below / beta, slope)
    return slope * _averaged(grad, x, reduction)


@in_longer
def _huber_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: float
) -> Tensor:
    return (x - target).clamp(-delta, delta) * _averaged(grad, x, reduction)


@in_longer
def _soft_margin_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    return -target * torch.sigmoid(-target * x) * _averaged(grad, x, reduction)


@in_longer
def _multi_margin_loss(x: Tensor, target: Tensor, *args: Any) -> Tensor:
    """PyTorch's decomposition gives a single sample a dimension."""
    losses: Tensor = decomposition(aten.multi_margin_loss.default)(x, target, *args)
    return losses if x.dim() > 1 else losses.reshape(())


@in_longer
def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """PyTorch's decomposition counts labels behind the first -1, too."""
    margins, is_target, _ = _margins(x, target)
    losses = margins.clamp_min(0).sum((1, 2)) / margins.shape[-1]
    if reduction != _NONE:
        losses = losses.mean() if reduction == _MEAN else losses.sum()
    elif x.dim() < 2:
        losses = losses.squeeze(0)
    return losses, is_target.to(x.dtype).reshape(target.shape)


@in_longer
def _multilabel_margin_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    margins, _, places = _margins(x, target)
    count = margins.shape[-1] * (len(margins) if reduction == _MEAN else 1)
    moves = torch.where(margins > 0, (grad / count).reshape(-1, 1, 1), 0.0)
    return moves.sum(1).scatter_add(1, places, -moves.sum(2)).reshape(x.shape)


def _margins(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 - (x of a label - x of a class), zeros where they do not count, of (samples, labels,
    classes); which classes are labels; and the classes of the labels."""
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    is_label = (labels == -1).cumsum(1) == 0  # up to the first -1
    places = torch.where(is_label, labels, 0)
    classes = torch.arange(rows.shape[1], device=rows.device)
    is_target = ((places.unsqueeze(2) == classes) & is_label.unsqueeze(2)).any(1)
    margins = rows.unsqueeze(1) - rows.gather(1, places).unsqueeze(2) + 1
    counts = is_label.unsqueeze(2) & ~is_target.unsqueeze(1)
    return torch.where(counts, margins, 0.0), is_target, places


@in_longer
def _multi_margin_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    p: float,
    margin: float,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    rows, places = torch.atleast_2d(x), target.reshape(-1, 1)
    margins = rows - rows.gather(1, places) + margin
    counts = (margins > 0) & (torch.arange(rows.shape[1], device=rows.device) != places)
    slopes = margins * 2 if p == 2 else torch.ones_like(margins)  # p is 1 or 2
    slopes = torch.where(counts, slopes, 0.0)
    if weight is not None:
        slopes = slopes * weight[places]
    count = rows.shape[1] * (len(rows) if reduction == _MEAN else 1)
    slopes = slopes * (grad / count).reshape(-1, 1)
    return slopes.scatter_add(1, places, -slopes.sum(1, keepdim=True)).reshape(x.shape)


ALGORITHMS: dict[str, Callable[..., Any]] = {
    "mse_loss_backward": _mse_backward,  # gradients of F.mse_loss
    "smooth_l1_loss_backward": _smooth_l1_backward,  # gradients of F.smooth_l1_loss
    "huber_loss_backward": _huber_backward,  # gradients of F.huber_loss
    "soft_margin_loss_backward": _soft_margin_backward,  # gradients of F.soft_margin_loss
    "multi_margin_loss": _multi_margin_loss,  # F.multi_margin_loss
    "multi_margin_loss_backward": _multi_margin_loss_backward,  # its gradients
    "multilabel_margin_loss_forward": _multilabel_margin_loss,  # F.multilabel_margin_loss
    "multilabel_margin_loss_backward": _multilabel_margin_loss_backward,  # its gradients
}
"""Algorithms by the names of aten operators."""
