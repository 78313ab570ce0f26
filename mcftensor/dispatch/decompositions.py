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
        return decomposition(func)(*args, **kwargs)

    return evaluated


@functools.lru_cache(maxsize=128)
def decomposition(func: Any) -> Callable[..., Any]:
    """Return the decomposition of an operator that PyTorch has."""
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
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.relu.default,  # activations of nn
    aten.leaky_relu.default,
    aten.hardswish_backward.default,
    aten.hardtanh.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.threshold_backward.default,
    aten.softshrink.default,
    aten.hardshrink.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.glu.default,
    aten.glu_backward.default,
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
    aten.logit_backward.default,  # gradients of torch.logit
    aten.heaviside.default,  # torch.heaviside
)
"""Decompositions by the names of aten operators."""


@in_longer
def _embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    rows = indices.unique()
    return weight.index_copy(0, rows, weight[rows].renorm(norm_type, 0, max_norm))


@in_longer
def _col2im(x: Tensor, *args: Any) -> Tensor:
    found: Tensor = decomposition(aten.col2im.default)(x.contiguous(), *args)
    return found


ALGORITHMS |= {
    "embedding_renorm": _embedding_renorm,  # nn.Embedding(max_norm=...)
    "col2im": _col2im,  # F.fold, gradients of F.unfold
}
