"""Cross entropy and Kullback-Leibler divergence of logits, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcftensor.reproducible.log_probabilities import put, require_classes, row_sums, rows_of
from mcftensor.reproducible.row_chunks import divided_sum, logit_map
from mcftensor.reproducible.row_states import state_of
from mcftensor.reproducible.sum_operators import exact_reduction, reduction
from mcftensor.reproducible.vocabularies import Vocabulary, vocabulary_of


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` in float32, of logits that stay in 16 bits.

    The loss and the gradient of a row have bits that depend on the row, its target and the gradient
    of its loss alone. The sum over rows is exact and rounded once, so that it has no order.

    Args:
        input: logits of bfloat16, float16 or float32, of shape (C), (N, C) or (N, C, ...).
        target: int64 classes of the shape of input without C; or probabilities of its shape, which
            are smoothed and weighted in float32.
        weight: of shape (C), for each class.
        ignore_index: the target of rows that do not count.
        reduction: "none", "mean" or "sum".
        label_smoothing: what part of the target is uniform, from 0 to 1.
        group: processes that each have a part of the C classes, as in `logsumexp`. Classes in
            `target` count over the vocabulary of all processes, in the order of their ranks in the
            group; `weight` has all classes; probabilities are divided as the logits. All processes
            get the same loss.

    *Returns*: float32: the losses, without C, or their mean or sum.

    *Error*: of a loss half an ulp, and V 2^-(P+1) + 2^-42 times 1 + the loss, as `logsumexp`; a sum
    or a mean of losses has one rounding more. Gradients: half an ulp of the dtype of the logits,
    and V 2^-(P+1) + 2^-41 of the gradient of the row's loss, times its weights. A mean
    or a sum hands float32 gradients to its rows.

    *Cost*: two readings of the logits forward, one backward; memory for a gradient in their dtype,
    and 2 MB. Label smoothing and probabilities read them once more.

    *Source*: as `logsumexp`.

    *Special values*: as `torch.nn.functional.cross_entropy`.

    Raises:
        TypeError: logits of another type, or a target of one that fits neither meaning.
        ValueError: shapes that do not fit; an unknown reduction; smoothing outside of 0 to 1.
        IndexError: a target is no class.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
        >>> mcf.functional.cross_entropy(x, torch.tensor([0]))
        tensor(2.4076)
    """
    x = rows_of("cross_entropy", input, min(1, input.dim() - 1), group)
    _require_reduction("cross_entropy", reduction, ("none", "mean", "sum"))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing is {label_smoothing}; give 0 to 1")
    vocabulary = vocabulary_of("cross_entropy", x, group)
    classes = vocabulary.classes
    if weight is not None and weight.shape != (classes,):
        raise ValueError(
            f"cross_entropy: weight has shape {tuple(weight.shape)}; with logits of shape "
            f"{tuple(input.shape)} give ({classes},)"
        )
    if target.is_floating_point():
        if target.shape != input.shape:
            raise ValueError(_shapes("cross_entropy", input, target))
        if target.requires_grad:
            raise ValueError("cross_entropy: target requires a gradient; give target.detach()")
        shares = target.movedim(min(1, input.dim() - 1), -1)
        if label_smoothing or weight is not None:
            shares = shares.to(torch.promote_types(shares.dtype, torch.float32))
            shares = shares * (1 - label_smoothing) + label_smoothing / classes
            if weight is not None:
                shares = shares * vocabulary.part(weight, x.shape[-1])
        losses = _Expected.apply(x, shares, False, vocabulary)
        return _reduced(losses, reduction, x.shape[:-1].numel())
    if target.dtype != torch.int64:
        raise TypeError(
            f"cross_entropy: target is {target.dtype}; give int64 classes, or probabilities"
        )
    if target.shape != x.shape[:-1]:
        raise ValueError(_shapes("cross_entropy", input, target))
    is_valid = target != ignore_index
    index = torch.where(is_valid, target, 0)
    require_classes("cross_entropy", index, classes)
    wide = None if weight is None else weight.detach().double()
    share = is_valid.double() if wide is None else torch.where(is_valid, wide[index], 0.0)
    losses = _CrossEntropy.apply(x, index, is_valid, share, wide, label_smoothing, vocabulary)
    return _reduced(
        losses, reduction, exact_reduction(share, None, [*range(share.dim())], "sum", torch.float64)
    )


def kl_div(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The Kullback-Leibler divergence of softmax(input) from a target, along the last dimension.

    It is `kl_div(log_softmax(input), target)` of `torch.nn.functional` in float32, from logits that
    stay in 16 bits. Logarithms of probabilities are logits too.

    Args:
        input: logits of bfloat16, float16 or float32, of shape (..., V).
        target: probabilities of any floating type and the shape of input; or, with `log_target`,
            logits of one of these three types. With `log_target` it has a gradient too.
        reduction: "rows", the sum of each row; "sum" of all; "batchmean", the sum divided by the
            first dimension; or "mean", divided by the number of logits, as in PyTorch.
        log_target: whether the target is logits.
        group: processes that each have a part of the dimension, as in `logsumexp`, of the target
            too. "mean" divides by the number of logits of all processes. All get the same result.

    *Returns*: float32, of the shape of input without V for "rows", else without dimensions.

    *Error*: of a row half an ulp, and 2 V 2^-(P+1) + 2^-41 times 1 + sum(q |log(q) - log(p)|).
    Gradients of input: half an ulp of its dtype, and V 2^-P + 2^-41 of the gradient of the row.

    *Cost*: two readings of the logits for each softmax and one for the sum; backward one, with
    memory for a gradient in their dtype, and 4 MB.

    *Source*: as `logsumexp`; the sum of terms in float64 is exact, and rounded once.

    *Special values*: where the target is 0, or its logit -inf, nothing is added.

    Raises:
        TypeError: logits of another type.
        ValueError: shapes that do not fit, or an unknown reduction. "none" of PyTorch would make a
            float32 tensor of the size of the logits.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
        >>> mcf.functional.kl_div(x, torch.tensor([[0.0, 0.0, 1.0]]), "rows")
        tensor([0.4076])
        >>> mcf.functional.kl_div(x, x, "rows", log_target=True)
        tensor([0.])
    """
    x = rows_of("kl_div", input, -1, group)
    _require_reduction("kl_div", reduction, ("rows", "sum", "batchmean", "mean"))
    if target.shape != x.shape:
        raise ValueError(_shapes("kl_div", input, target))
    vocabulary = vocabulary_of("kl_div", x, group)
    if log_target:
        rows = _Divergence.apply(x, rows_of("kl_div", target, -1, group), vocabulary)
    else:
        if target.requires_grad:
            raise ValueError(
                "kl_div: target requires a gradient; give target.detach(), or its logits with "
                "log_target=True"
            )
        rows = _Expected.apply(x, target, True, vocabulary)
    if reduction == "rows":
        return rows
    logits = x.shape[:-1].numel() * vocabulary.classes
    count = {"sum": 1, "batchmean": x.shape[0], "mean": logits}[reduction]
    return _reduced(rows, "sum" if reduction == "sum" else "mean", count)


def _require_reduction(name: str, reduction: str, known: tuple[str, ...]) -> None:
    if reduction not in known:
        raise ValueError(f"{name}: reduction is {reduction!r}; give one of {', '.join(known)}")


def _shapes(name: str, input: Tensor, target: Tensor) -> str:
    return (
        f"{name}: logits have shape {tuple(input.shape)} and target has {tuple(target.shape)}; "
        "give classes for each row, or probabilities of the shape of the logits"
    )


def _reduced(losses: Tensor, way: str, count: Tensor | int) -> Tensor:
    """The losses of rows in float32, or their exact sum, divided by a number in float64."""
    if way == "none":
        return losses
    if losses.dim() == 0:
        total = losses.double()
    else:
        total = reduction(losses, None, [*range(losses.dim())], "sum", torch.float64)
    return (total if way == "sum" else total / count).float()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        is_valid: Tensor,
        share: Tensor,
        weight: Tensor | None,
        smoothing: float,
        vocabulary: Vocabulary,
    ) -> Tensor:
        state = state_of(x, vocabulary)
        picked = vocabulary.picked(x, index.unsqueeze(-1)).squeeze(-1)
        losses = (1 - smoothing) * share * ((state.most - picked) + state.log_sum)
        classes = vocabulary.classes
        ctx.smoothing, ctx.whole, ctx.vocabulary = smoothing, float(classes), vocabulary
        if smoothing:
            if weight is None:
                gaps = divided_sum("gap", [x], [state.most], vocabulary)
                whole = torch.tensor(float(classes), dtype=torch.float64, device=x.device)
            else:
                own = vocabulary.part(weight, x.shape[-1]).expand(x.shape)
                gaps = divided_sum("weighted_gap", [x, own], [state.most], vocabulary)
                whole = exact_reduction(weight, None, [0], "sum", torch.float64)
            ctx.whole = whole
            even = smoothing / classes * (whole * state.log_sum + gaps)
            losses = losses + torch.where(is_valid, even, 0.0)
        losses = torch.where(is_valid, losses, 0.0)
        ctx.save_for_backward(x, index, is_valid, share, weight, state.most, state.sum)
        return losses.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, index, is_valid, share, weight, most, total = ctx.saved_tensors
        smoothing, picked = ctx.smoothing, index.unsqueeze(-1)
        wide = torch.where(is_valid, gradient.double(), 0.0)
        even = wide * (smoothing / ctx.vocabulary.classes)
        own = wide * (1 - smoothing) * share
        a = (own + even * ctx.whole if smoothing else own) / total
        if smoothing:
            others = torch.ones((), dtype=torch.float64, device=x.device)
            if weight is not None:
                others = ctx.vocabulary.part(weight, x.shape[-1])
            others = others.expand(x.shape)
            result = logit_map("slope_and", [x, others], [most, a, -even], x.dtype)
            at = even if weight is None else even * weight[index]
        else:
            result = logit_map("slope", [x], [most, a], x.dtype)
            at = torch.zeros_like(even)
        put(result, picked, x, most, a, -(own + at).unsqueeze(-1), ctx.vocabulary)
        return result, None, None, None, None, None, None


class _Expected(torch.autograd.Function):
    """The cross entropy of probabilities, times weights; or the divergence from them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shares: Tensor, is_divergence: bool, vocabulary: Vocabulary
    ) -> Tensor:
        state = state_of(x, vocabulary)
        whole = row_sums(shares, vocabulary)
        ctx.save_for_backward(x, shares, state.most, state.sum, whole)
        if is_divergence:
            rows = [state.most, state.log_sum]
            return divided_sum("divergence_from", [x, shares], rows, vocabulary).float()
        gaps = divided_sum("weighted_gap", [x, shares], [state.most], vocabulary)
        return (gaps + whole * state.log_sum).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of minus the expected logarithm of softmax."""
        x, shares, most, total, whole = ctx.saved_tensors
        wide = gradient.double()
        rows = [most, wide * whole / total, -wide]
        return logit_map("slope_and", [x, shares], rows, x.dtype), None, None, None


class _Divergence(torch.autograd.Function):
    """The divergence from a softmax."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, vocabulary: Vocabulary) -> Tensor:
        p, q = state_of(x, vocabulary), state_of(y, vocabulary)
        rows = [p.most, p.log_sum, q.most, q.log_sum, 1 / q.sum]
        divergence = divided_sum("divergence", [x, y], rows, vocabulary)
        ctx.save_for_backward(x, y, *p, *q, divergence)
        return divergence.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, most, total, log_sum, other, other_sum, other_log, mean = ctx.saved_tensors
        wide, of_x, of_y = gradient.double(), None, None
        if ctx.needs_input_grad[0]:
            rows = [most, wide / total, other, -wide / other_sum]
            of_x = logit_map("slopes", [x, y], rows, x.dtype)
        if ctx.needs_input_grad[1]:
            rows = [most, log_sum, other, other_log, wide / other_sum, mean]
            of_y = logit_map("divergence_slope", [x, y], rows, y.dtype)
        return of_x, of_y, None
