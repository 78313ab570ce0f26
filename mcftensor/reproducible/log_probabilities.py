"""Logarithms of softmax and of its denominator, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcftensor.arithmetic.rounding import round_to
from mcftensor.kernels.without_float64 import widest, without
from mcftensor.reproducible.row_chunks import divided_sum, logit_map
from mcftensor.reproducible.row_states import state_of
from mcftensor.reproducible.softmax_terms import MOST_CLASSES, exponential
from mcftensor.reproducible.sum_operators import exact_reduction
from mcftensor.reproducible.vocabularies import Vocabulary, vocabulary_of
from mcftensor.tensor.tensor import MCFTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of logits and of results."""


def logsumexp(
    x: Tensor, dim: int = -1, keepdim: bool = False, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """log(sum(exp(x))) along a dimension, in float32, whose bits depend on the row alone.

    They depend neither on the other rows of the batch, nor on the order of the elements, on how the
    row is divided into chunks, on threads or on processes.

    Args:
        x: logits of bfloat16, float16 or float32, with up to 2^24 along `dim`.
        dim: the dimension.
        keepdim: whether the result has it, with length 1.
        group: processes that each have a part of the dimension, of any length. All get the bits of
            the undivided row; backward gives each the gradient of its part, from its own gradient
            of the result, which must be the same on all. All need the same rows.

    *Returns*: float32, without `dim`.

    *Error*: half an ulp of the result, and V 2^-(P+1) + 2^-43, where V is the length of the row and
    P = min(50, 62 - ceil(log2(V))): 2^-33 for 32,768 logits, 2^-27 for 262,144. Gradients: half an
    ulp of the dtype of x, and as much relative to the exact gradient.

    *Cost*: two readings of x, and 2 MB of memory, however large x is.

    *Source*: the largest logit and a sum of integers, proved in
    `mcftensor.reproducible.softmax_terms`.

    *Special values*: as `torch.logsumexp`.

    Raises:
        TypeError: x is no plain tensor of these types.
        IndexError: `dim` is none of its dimensions.
        ValueError: the dimension has length 0, or more than 2^24; processes have other rows.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
        >>> mcf.functional.logsumexp(x)
        tensor([3.4076])
    """
    rows = rows_of("logsumexp", x, dim, group)
    result = _LogSumExp.apply(rows, vocabulary_of("logsumexp", rows, group))
    return result.unsqueeze(dim) if keepdim else result


def log_softmax(
    x: Tensor,
    dim: int = -1,
    dtype: torch.dtype = torch.float32,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The logarithms of softmax along a dimension, whose bits depend on the row alone.

    Args:
        x: logits of bfloat16, float16 or float32, with up to 2^24 along `dim`.
        dim: the dimension.
        dtype: of the result, which is rounded to it once.
        group: as in `logsumexp`. Each process gets the result of its part, and backward takes the
            gradient of that part.

    *Returns*: a tensor of the shape of x.

    *Error*: half an ulp of the result, and that of `logsumexp`. Gradients: half an ulp of the dtype
    of x, and 2^-42 + V 2^-(P+1), relative to the sum of the magnitudes of the gradient.

    *Cost*: as `logsumexp`, and the result.

    *Source*: as `logsumexp`.

    *Special values*: as `torch.nn.functional.log_softmax`.

    Raises:
        TypeError: x is no plain tensor of these types, or `dtype` is none of them.
        IndexError: `dim` is none of its dimensions.
        ValueError: the dimension has length 0, or more than 2^24; processes have other rows.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
        >>> mcf.functional.log_softmax(x)
        tensor([-2.4076, -1.4076, -0.4076])
    """
    if dtype not in DTYPES:
        raise TypeError(f"log_softmax: dtype is {dtype}; give bfloat16, float16 or float32")
    rows = rows_of("log_softmax", x, dim, group)
    result: Tensor = _LogSoftmax.apply(rows, dtype, vocabulary_of("log_softmax", rows, group))
    return result.movedim(-1, dim)


def selective_log_softmax(
    logits: Tensor, index: Tensor, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The logarithms of softmax along the last dimension, of some elements alone.

    Args:
        logits: of bfloat16, float16 or float32, of shape (..., V).
        index: int64, of shape (...), or (..., K) for K elements of each row.
        group: as in `logsumexp`. Indices count over the vocabulary of all processes, in the order
            of their ranks in the group, and are the same on all processes, as are the results.

    *Returns*: float32 of the shape of `index`: the bits of `log_softmax(logits)` there.

    *Error*: as `log_softmax`.

    *Cost*: as `logsumexp`; no tensor of the size of the logits but the gradient, in their dtype.

    *Source*: as `logsumexp`.

    *Special values*: as `log_softmax`.

    Raises:
        TypeError: logits are no plain tensor of these types, or `index` has another than int64.
        ValueError: the shapes do not fit.
        IndexError: an index is not in the range from 0 to V - 1.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
        >>> mcf.functional.selective_log_softmax(x, torch.tensor([2]))
        tensor([-0.4076])
    """
    x = rows_of("selective_log_softmax", logits, -1, group)
    if not isinstance(index, Tensor) or index.dtype != torch.int64:
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"selective_log_softmax: index is {kind}; give int64")
    is_single = index.dim() == x.dim() - 1
    if index.shape[: x.dim() - 1] != x.shape[:-1] or index.dim() not in (x.dim() - 1, x.dim()):
        raise ValueError(
            f"selective_log_softmax: logits have shape {tuple(x.shape)} and index has "
            f"{tuple(index.shape)}; give an index of shape {tuple(x.shape[:-1])}, or with one "
            "dimension more"
        )
    picked = index.unsqueeze(-1) if is_single else index
    vocabulary = vocabulary_of("selective_log_softmax", x, group)
    require_classes("selective_log_softmax", picked, vocabulary.classes)
    result: Tensor = _Selective.apply(x, picked, vocabulary)
    return result.squeeze(-1) if is_single else result


def rows_of(name: str, x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Logits with the dimension of a softmax last."""
    if not isinstance(x, Tensor) or isinstance(x, MCFTensor) or x.dtype not in DTYPES:
        kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        kind = x.format.name if isinstance(x, MCFTensor) else kind
        raise TypeError(
            f"{name}: logits are {kind}; give a plain tensor of bfloat16, float16 or float32 "
            "(mcf.as_plain makes one of an expansion), or call the function of "
            "torch.nn.functional, which keeps other types"
        )
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{name}: dim is {dim}, and the logits have shape {tuple(x.shape)}")
    if not (group is None) <= x.shape[dim] <= MOST_CLASSES:
        raise ValueError(
            f"{name}: the logits have shape {tuple(x.shape)}, with {x.shape[dim]} along dimension "
            f"{dim}; give 1 to {MOST_CLASSES}"
        )
    if widest(x.device) == torch.float32:
        raise without(name)
    return x.movedim(dim, -1)


def require_classes(name: str, index: Tensor, classes: int) -> None:
    """Refuse indices out of range; other devices than the CPU say so themselves."""
    if index.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= classes):
        raise IndexError(
            f"{name}: an index is {int(index.min())} and one is {int(index.max())}; with "
            f"{classes} classes, give 0 to {classes - 1}"
        )


def probability(x: Tensor, most: Tensor, scale: Tensor) -> Tensor:
    """scale e^(x - most) of single elements, with the bits that all elements have."""
    return scale * exponential(x.double() - most, -700.0)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vocabulary: Vocabulary) -> Tensor:
        state = state_of(x, vocabulary)
        ctx.save_for_backward(x, state.most, state.sum)
        return torch.where(state.most.isinf(), state.most, state.most + state.log_sum).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, most, total = ctx.saved_tensors
        return logit_map("slope", [x], [most, gradient.double() / total], x.dtype), None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, vocabulary: Vocabulary) -> Tensor:
        state = state_of(x, vocabulary)
        ctx.vocabulary = vocabulary
        ctx.save_for_backward(x, state.most, state.sum)
        return logit_map("log_probability", [x], [state.most, state.log_sum], dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, most, total = ctx.saved_tensors
        whole = row_sums(gradient, ctx.vocabulary)
        rows = [most, -whole / total, torch.ones_like(most)]
        return logit_map("slope_and", [x, gradient], rows, x.dtype), None, None


class _Selective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, vocabulary: Vocabulary) -> Tensor:
        state = state_of(x, vocabulary)
        ctx.vocabulary = vocabulary
        ctx.save_for_backward(x, index, state.most, state.sum)
        picked = vocabulary.picked(x, index)
        return ((picked - state.most.unsqueeze(-1)) - state.log_sum.unsqueeze(-1)).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, index, most, total = ctx.saved_tensors
        whole = exact_reduction(gradient, None, [gradient.dim() - 1], "sum", torch.float64)
        a = -whole / total
        result = logit_map("slope", [x], [most, a], x.dtype)
        own = torch.zeros_like(gradient, dtype=torch.float64)  # with what repeated indices have
        for i in range(index.shape[-1]):
            one = slice(i, i + 1)
            own = own + torch.where(index == index[..., one], gradient[..., one].double(), 0.0)
        put(result, index, x, most, a, own, ctx.vocabulary)
        return result, None, None


def row_sums(x: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The exact sums of rows, in float64."""
    if vocabulary.group is None:
        return exact_reduction(x, None, [x.dim() - 1], "sum", torch.float64)
    return divided_sum("value", [x], [], vocabulary)


def put(
    result: Tensor,
    index: Tensor,
    x: Tensor,
    most: Tensor,
    a: Tensor,
    own: Tensor,
    vocabulary: Vocabulary,
) -> None:
    """Write a e^(x - most) + own, rounded once, at indices of the last dimension."""
    if x.shape[-1] == 0:
        return
    index, is_own = vocabulary.owned(index, x.shape[-1])
    slope = probability(x.gather(-1, index), most.unsqueeze(-1), a.unsqueeze(-1))
    matrix, columns = result.view(-1, x.shape[-1]), index.reshape(-1, index.shape[-1])
    rows = torch.arange(len(matrix), device=x.device).unsqueeze(
        -1
    )  # scatter_ takes 4 bytes a logit
    values = round_to(slope + own, result.dtype).reshape(columns.shape)
    if is_own is not None:
        kept = is_own.reshape(columns.shape)
        rows, columns, values = rows.expand(columns.shape)[kept], columns[kept], values[kept]
    matrix.index_put_((rows, columns), values)
