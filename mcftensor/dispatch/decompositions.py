"""Operations by PyTorch's decompositions into others, in formats that no machine type represents.

A decomposition is evaluated with one more term and rounded once. Only decompositions without plain
tensors of inexact numbers, such as places between pixels, keep all bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.elementary import in_longer

aten = torch.ops.aten


def _decomposed(func: Any) -> Callable[..., Any]:
    @in_longer
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        return _decomposition(func)(*args, **kwargs)

    return evaluated


@functools.lru_cache(maxsize=128)
def _decomposition(func: Any) -> Callable[..., Any]:
    from torch._decomp import decomposition_table  # noqa: PLC0415  # is slow

    found: Callable[..., Any] = decomposition_table[func]
    return found


def _by_name(*functions: Any) -> dict[str, Callable[..., Any]]:
    return {func.overloadpacket.__name__: _decomposed(func) for func in functions}


ALGORITHMS = _by_name(
    aten.native_layer_norm.default,  # nn.LayerNorm
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,  # nn.GroupNorm
    aten.native_batch_norm.default,  # nn.BatchNorm2d, nn.InstanceNorm2d
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._safe_softmax.default,  # F.scaled_dot_product_attention
    aten.dist.default,  # torch.dist
    aten.mse_loss.default,  # losses of nn
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.hardtanh.default,  # activations of nn
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.threshold_backward.default,
    aten.softshrink.default,
    aten.hardshrink.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.glu.default,
    aten.glu_backward.default,
    aten.max_pool2d_with_indices_backward.default,  # gradients of F.max_pool2d
    aten.reflection_pad1d_backward.default,  # gradients of F.pad
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten._unsafe_masked_index.default,  # within others here
    aten._unsafe_masked_index_put_accumulate.default,
    aten.unfold_backward.default,  # gradients of x.unfold
    aten.embedding_dense_backward.default,  # gradients of nn.Embedding
    aten.renorm.default,  # x.renorm
    aten.trace.default,  # x.trace
    aten.linalg_cross.default,  # torch.linalg.cross
    aten.nansum.default,  # x.nansum
    aten.heaviside.default,  # torch.heaviside
)
"""Decompositions by the names of aten operators."""


@in_longer
def _embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    rows = indices.unique()
    return weight.index_copy(0, rows, weight[rows].renorm(norm_type, 0, max_norm))


@in_longer
def _col2im(x: Tensor, *args: Any) -> Tensor:
    found: Tensor = _decomposition(aten.col2im.default)(x.contiguous(), *args)
    return found


@in_longer
def _multi_margin_loss(x: Tensor, target: Tensor, *args: Any) -> Tensor:
    """PyTorch's decomposition gives a single sample a dimension."""
    losses: Tensor = _decomposition(aten.multi_margin_loss.default)(x, target, *args)
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


_NONE, _MEAN = 0, 1
"""How aten's losses are told to be reduced."""

ALGORITHMS |= {
    "embedding_renorm": _embedding_renorm,  # nn.Embedding(max_norm=...)
    "col2im": _col2im,  # F.fold, gradients of F.unfold
    "multi_margin_loss": _multi_margin_loss,  # F.multi_margin_loss
    "multilabel_margin_loss_forward": _multilabel_margin_loss,  # F.multilabel_margin_loss
    "multilabel_margin_loss_backward": _multilabel_margin_loss_backward,  # its gradients
}

WITH_FLOATS = _by_name(
    aten.relu.default,  # F.relu
    aten.native_batch_norm_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.hardswish_backward.default,
    aten.deg2rad.default,  # torch.deg2rad
    aten.mvlgamma.default,  # torch.mvlgamma
)
"""Decompositions for formats of up to 48 bits; most have constants that are rounded to float64."""


@in_longer
def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's decomposition multiplies x and its mean before it takes their difference, and the
    mean that it is given is rounded."""
    groups = x.reshape(*mean.shape, -1) - mean.unsqueeze(2)
    below = (groups - groups.mean(2, keepdim=True)).reshape(x.shape)
    found = _decomposition(aten.native_group_norm_backward.default)
    results: tuple[Tensor, Tensor, Tensor] = found(
        grad, below, torch.zeros_like(mean), rstd, *others
    )
    return results


WITH_FLOATS["native_group_norm_backward"] = _group_norm_backward  # nn.GroupNorm
