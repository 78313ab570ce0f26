"""Operations by PyTorch's decompositions into others, in formats that no machine type represents.

A decomposition is evaluated with one more term and rounded once. Only decompositions without plain
tensors of inexact numbers, such as places between pixels, keep all bits. Those of many gradients
multiply by 1 / n, a float64 number. Such gradients are those of a composed function, by autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mcftensor.arithmetic.special_functions import reduced
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.elementary import in_longer, like

aten = torch.ops.aten


def _decomposed(func: Any) -> Callable[..., Any]:
    @in_longer
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():  # where a number enters before it is rounded
            return decomposition(func)(*args, **kwargs)

    return evaluated


@functools.lru_cache(maxsize=128)
def decomposition(func: Any) -> Callable[..., Any]:
    """Return the decomposition of an operator that PyTorch has."""
    from torch._decomp import decomposition_table  # noqa: PLC0415  # is slow

    found: Callable[..., Any] = decomposition_table[func]
    return found


def gradients(
    function: Callable[..., Tensor],
    grad: Tensor,
    operands: Sequence[Tensor | None],
    asked: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    """Return the gradients of a composed function; None for an operand that is None or not asked.

    Operators are dispatched below autograd, which is entered anew.
    """
    with (
        torch.enable_grad(),
        torch.overrides.enable_reentrant_dispatch(),
        torch._C._EnableTorchFunction(),
    ):
        own = [None if x is None else x.detach().requires_grad_() for x in operands]
        given = zip(own, asked or [True] * len(own), strict=True)
        chosen = [x if is_asked else None for x, is_asked in given]
        leaves = [x for x in chosen if x is not None]
        found = iter(torch.autograd.grad(function(*own), leaves, grad) if leaves else ())
    return [None if x is None else next(found) for x in chosen]


def gradient_of(forward: Callable[..., Any]) -> Callable[..., Tensor | None]:
    """Return the gradient of a function, or of a decomposition, for its first argument."""

    @in_longer
    def backward(grad: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        composed = decomposition(forward) if isinstance(forward, torch._ops.OpOverload) else forward
        return gradients(lambda x: composed(x, *args, **kwargs), grad, [x])[0]

    return backward


def _by_name(*functions: Any) -> dict[str, Callable[..., Any]]:
    return {func.overloadpacket.__name__: _decomposed(func) for func in functions}


SPREADS = _by_name(
    aten.native_layer_norm.default,  # nn.LayerNorm
    aten.native_group_norm.default,  # nn.GroupNorm
    aten.native_batch_norm.default,  # nn.BatchNorm2d, nn.InstanceNorm2d
)
"""Norms of rows or channels; as all tables here, by the names of aten operators."""

DIFFERENCES = _by_name(
    aten._softmax.default,  # x.softmax
    aten.dist.default,  # torch.dist
    aten.mse_loss.default,  # losses of nn
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
)
"""Functions of differences of elements."""

ALGORITHMS = _by_name(
    aten._native_batch_norm_legit.no_stats,  # nn.BatchNorm2d in compiled code
    aten._native_batch_norm_legit_functional.default,
    aten._safe_softmax.default,  # F.scaled_dot_product_attention
    aten.nll_loss_forward.default,  # losses of nn
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.relu.default,  # activations of nn
    aten.native_dropout_backward.default,
    aten.sigmoid_backward.default,
    aten.silu_backward.default,
    aten.softplus.default,
    aten.softplus_backward.default,
    aten.tanh_backward.default,
    aten.threshold.default,
    aten.leaky_relu.default,
    aten.celu.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardtanh.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.threshold_backward.default,
    aten.softshrink.default,
    aten.hardshrink.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.glu.default,
    aten.glu_backward.default,
    aten._unsafe_masked_index.default,  # within others here
    aten._unsafe_masked_index_put_accumulate.default,
    aten.embedding_dense_backward.default,  # gradients of nn.Embedding
    aten.special_entr.default,  # torch.special.entr
    aten.renorm.default,  # x.renorm
    aten.trace.default,  # x.trace
    aten.linalg_cross.default,  # torch.linalg.cross
    aten.nansum.default,  # x.nansum
    aten.logit_backward.default,  # gradients of torch.logit
    aten.heaviside.default,  # torch.heaviside
    aten.logaddexp.default,  # torch.logaddexp
    aten.nan_to_num.default,  # torch.nan_to_num
    aten.addr.default,  # torch.addr
    aten.index_add.default,  # x.index_add, gradients of x.index_select
    aten.unfold_backward.default,  # gradients of x.unfold
)


# ------------------------------------------------------------------------------------- losses


def _soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return reduced(-F.logsigmoid(x * target), reduction)


def _multi_margin_loss(
    x: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    rows, labels = torch.atleast_2d(x), target.reshape(-1, 1)
    losses = torch.relu(margin - rows.gather(1, labels) + rows)
    losses = losses if p == 1 else losses.square()
    if weight is not None:
        losses = losses * weight[labels]
    is_label = torch.arange(rows.shape[1], device=x.device) == labels
    means = losses.masked_fill(is_label, 0.0).sum(1) / rows.shape[1]
    return reduced(means.reshape(x.shape[:-1]), reduction)


def _multilabel_margin_loss(
    x: Tensor, target: Tensor, reduction: int, *_: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of labels up to the first -1, and which classes are labels."""
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    is_label = (labels == -1).cumsum(1) == 0
    places = torch.where(is_label, labels, 0)
    classes = torch.arange(rows.shape[1], device=rows.device)
    is_target = ((places.unsqueeze(2) == classes) & is_label.unsqueeze(2)).any(1)
    margins = torch.relu(rows.unsqueeze(1) - rows.gather(1, places).unsqueeze(2) + 1)
    counts = is_label.unsqueeze(2) & ~is_target.unsqueeze(1)
    means = margins.masked_fill(~counts, 0.0).sum((1, 2)) / rows.shape[1]
    losses = reduced(means.reshape(x.shape[:-1]), reduction)
    return losses, is_target.to(x.dtype).reshape(target.shape)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return x * torch.special.ndtr(x)
    root = like(x, lambda bits: exact.sqrt(8 / exact.pi(bits), bits))
    return x * torch.sigmoid(root * x * (1 + like(x, Fraction("0.044715")) * x * x))


def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(-F.logsigmoid(-x))  # PyTorch's softplus is x from 20 on


# -------------------------------------------------------------------------- gradients of norms


@in_longer
def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    _: Tensor | None,
    invstd: Tensor | None,
    trains: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    from torch._decomp import decompositions  # noqa: PLC0415  # is slow

    helper: Any = decompositions.native_batch_norm_helper

    def norm(*given: Tensor | None) -> Tensor:
        made: Tensor = helper(*given, mean, var, trains, 0.0, eps, True)[0]
        return made

    return tuple(gradients(norm, grad, [x, weight, x.new_zeros(x.shape[1])], mask))


def _row_norm_gradients(
    grad: Tensor,
    operands: Sequence[Tensor | None],
    rstd: Tensor,
    rows: Sequence[int],
    form: Sequence[int],
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return gradients of x, weight and bias of a norm of rows.

    The weight and bias broadcast to x in a form. The eps is what 1 / rstd^2 has beyond variances.
    """

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor) -> Tensor:
        y = x.reshape(rows)
        var, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
        eps = (1 / rstd.square().view(var.shape) - var).detach()
        units = ((y - mean) * torch.rsqrt(var + eps)).view(form)
        return ((units if weight is None else units * weight) + bias).view(x.shape)

    return tuple(gradients(norm, grad, operands, mask))


@in_longer
def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    _: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    operands = [x, weight, x.new_zeros(shape)]
    rows = [*x.shape[: x.dim() - len(shape)], math.prod(shape)]
    return _row_norm_gradients(grad, operands, rstd, rows, x.shape, mask)


@in_longer
def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    _: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    channels: int,
    places: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    weight = None if weight is None else weight.view(-1, 1)
    operands, form = [x, weight, x.new_zeros(channels, 1)], (n, channels, places)
    rows = (n, groups, channels // groups * places)
    of_x, *others = _row_norm_gradients(grad, operands, rstd, rows, form, mask)
    return of_x, *(None if y is None else y.view(-1) for y in others)


@in_longer
def _embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    rows = indices.unique()
    return weight.index_copy(0, rows, weight[rows].renorm(norm_type, 0, max_norm))


@in_longer
def _col2im(x: Tensor, *args: Any) -> Tensor:
    found: Tensor = decomposition(aten.col2im.default)(x.contiguous(), *args)
    return found


DIFFERENCES |= {
    "mse_loss_backward": gradient_of(aten.mse_loss.default),  # gradients of F.mse_loss
    "smooth_l1_loss_backward": gradient_of(aten.smooth_l1_loss.default),  # of F.smooth_l1_loss
    "huber_loss_backward": gradient_of(aten.huber_loss.default),  # of F.huber_loss
    "multi_margin_loss": in_longer(_multi_margin_loss),  # F.multi_margin_loss
    "multi_margin_loss_backward": gradient_of(_multi_margin_loss),  # its gradients
    "multilabel_margin_loss_forward": in_longer(_multilabel_margin_loss),
    "multilabel_margin_loss_backward": gradient_of(lambda *x: _multilabel_margin_loss(*x)[0]),
}
SPREADS |= {
    "native_batch_norm_backward": _batch_norm_backward,  # nn.BatchNorm2d, nn.InstanceNorm2d
    "batch_norm_backward": lambda *args: _batch_norm_backward(*args[:-1]),  # of torch.export
    **dict.fromkeys(
        ("cudnn_batch_norm_backward", "miopen_batch_norm_backward"),
        lambda x, grad, *others: _batch_norm_backward(
            grad, x, *others[:5], True, others[5], [True] * 3
        ),
    ),  # on GPUs
    "native_layer_norm_backward": _layer_norm_backward,  # nn.LayerNorm
    "native_group_norm_backward": _group_norm_backward,  # nn.GroupNorm
}
ALGORITHMS |= {
    "gelu_backward": gradient_of(_gelu),  # of F.gelu
    "mish_backward": gradient_of(_mish),  # of F.mish
    "soft_margin_loss": in_longer(_soft_margin_loss),  # F.soft_margin_loss
    "soft_margin_loss_backward": gradient_of(_soft_margin_loss),  # of F.soft_margin_loss
    "embedding_renorm": _embedding_renorm,  # nn.Embedding(max_norm=...)
    "col2im": _col2im,  # F.fold, gradients of F.unfold
}
