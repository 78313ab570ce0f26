"""Functions of differences of elements, on all terms: variances, norms, losses, distances.

The differences 1 and -1 of 1e20 + 1 and 1e20 - 1 from 1e20 are float64 numbers, and the elements
are not. These functions are unchanged if the same number is subtracted from all elements of a row,
or from both elements of a pair. So differences are subtracted on all terms and rounded to float64,
and PyTorch's own function is evaluated on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.operands import expansions, mapped, stored_in
from mcftensor.dispatch.system import evaluated
from mcftensor.formats import Format
from mcftensor.kernels.without_float64 import widest
from mcftensor.tensor import MCFTensor
from mcftensor.wide import beyond_float64

aten = torch.ops.aten

Given = dict[str, Any]
"""The arguments of an operator by their names, some of them expansions."""


def longer_format(operands: Any) -> Format:
    """Return a format that holds the differences of operands: float64 terms, where available."""
    found = expansions(operands)
    return Format(widest(found[0].device), max(2, *(len(x._format.components) for x in found)))


def lengthened(tree: Any, format: Format) -> Any:
    """Return arguments with floating tensors as values of a longer format."""

    def enter(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return MCFTensor.of(stored_in(x, format, x.device), format)

    return mapped(enter, tree)


def in_longer_format(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with its floating operands as values of a longer format."""
    format = longer_format((args, kwargs))
    return func(*lengthened(args, format), **lengthened(kwargs, format))


def _difference(x: Tensor, y: Tensor) -> Tensor:
    """Return x - y as a machine float, from all terms."""
    format = longer_format((x, y))
    a, b = lengthened((x, y), format)
    difference: Tensor = (a - b)._collapsed(format.dtype)
    return difference


def _called(func: Any, given: Given) -> Any:
    """Return an operation on its arguments as machine floats."""

    def widened(x: Any) -> Any:
        if isinstance(x, MCFTensor):
            return x._collapsed(widest(x.device))
        is_float = isinstance(x, Tensor) and x.is_floating_point()
        return x.to(widest(x.device)) if is_float else x

    wide = mapped(widened, given)
    named = [a for a in func._schema.arguments if a.name in given]
    args = [wide[a.name] for a in named if not a.kwarg_only]
    return evaluated(func, args, {a.name: wide[a.name] for a in named if a.kwarg_only})


# --------------------------------------------------------------------------- elements of a row


def _below_largest(
    func: Any, given: Given, dims: Sequence[int], shape: Sequence[int] | None = None
) -> Any:
    """Evaluate a function on the differences from the largest element of each row.

    Rows lie along dimensions of the operand in a shape. Given and returned means of rows are
    relative to the largest elements, too.
    """
    name = "self" if "self" in given else "input"
    x = given[name]
    format = longer_format(x)
    rows = lengthened(x if shape is None else x.reshape(shape), format)
    largest = rows.amax(dims, keepdim=True)
    largest = torch.where(torch.isfinite(largest), largest, torch.zeros_like(largest))
    below = (rows - largest)._collapsed(format.dtype)
    means = {
        own: below.mean(dims).reshape(given[own].shape)
        for own in ("mean", "save_mean")
        if own in given
    }
    result = _called(func, given | means | {name: below.reshape(x.shape)})
    if func in _WITH_MEAN:
        results = [result] if isinstance(result, Tensor) else list(result)
        place = min(1, len(results) - 1)
        results[place] = largest.reshape(results[place].shape) + results[place]
        return results[0] if isinstance(result, Tensor) else tuple(results)
    return result


_WITH_MEAN = {
    aten.logsumexp.default,
    aten.mean.default,
    aten.mean.dim,
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
}
"""Functions that return means of rows, alone or as their second result."""


def _along_dims(func: Any, given: Given) -> Any:
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return _below_largest(func, given, dims or list(range(given["self"].dim())))


def _of_last_dims(func: Any, given: Given) -> Any:
    return _below_largest(func, given, list(range(-len(given["normalized_shape"]), 0)))


def _of_groups(func: Any, given: Given) -> Any:
    return _below_largest(func, given, [-1], [given["N"], given["group"], -1])


def _of_channels(func: Any, given: Given) -> Any:
    """Evaluate a batch norm: of the batch, or around running means."""
    x = given["input"]
    if given.get("training", given.get("train", given.get("update", True))):
        return _below_largest(func, given, [d for d in range(x.dim()) if d != 1])
    mean = given["running_mean"]
    around = _difference(x, mean.reshape([-1, *[1] * (x.dim() - 2)]))
    zeros = torch.zeros_like(mean, dtype=around.dtype)
    return _called(func, given | {"input": around, "running_mean": zeros})


def _below_target(func: Any, given: Given) -> Any:
    """Evaluate a function on the differences from the element of the target class."""
    x, target = given["self"], given["target"]
    return _called(func, given | {"self": _difference(x, x.gather(-1, target.unsqueeze(-1)))})


def _of_classes(func: Any, given: Given) -> Any:
    return _below_largest(func, given, [-1])


# ---------------------------------------------------------------------------- elements of pairs


def _of_pairs(func: Any, given: Given) -> Any:
    """Evaluate a function of the differences of two operands."""
    other = "other" if "other" in given else "target"
    difference = _difference(given["self"], given[other])
    return _called(func, given | {"self": difference, other: torch.zeros_like(difference)})


_PAIRS = 1 << 22
"""Numbers at a time in the differences of all pairs of rows."""


def _of_all_rows(func: Any, given: Given) -> Any:
    """Evaluate distances of all pairs of rows, or their gradients."""
    x, y = given["x1"], given["x2"]
    half = x.shape[-2] // 2
    if half and x.numel() * y.shape[-2] > _PAIRS:
        cut = [name for name in ("grad", "x1", "cdist") if name in given]
        parts = zip(*(given[name].tensor_split([half], -2) for name in cut), strict=True)
        of_parts = [_of_all_rows(func, given | dict(zip(cut, p, strict=True))) for p in parts]
        return torch.cat(of_parts, -2)
    pairs = _difference(x.unsqueeze(-2), y.unsqueeze(-3))
    found = _of_rows(func, given, pairs)
    return found.sum(-2) if "grad" in given else found


def _of_own_rows(func: Any, given: Given) -> Any:
    """Evaluate distances of all pairs of rows of one matrix, or their gradients."""
    x = given["self"]
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    of_pairs = aten._cdist_backward if "grad" in given else aten._cdist_forward
    found = _of_rows(
        of_pairs.default,
        given | {"p": given.get("p", 2.0), "compute_mode": None},
        _difference(x[i], x[j]),
    )
    if "grad" not in given:
        return found
    zeros = found.new_zeros(x.shape)
    return zeros.index_add(0, i, found).index_add(0, j, found, alpha=-1)


def _of_rows(func: Any, given: Given, differences: Tensor) -> Tensor:
    """Evaluate distances of rows of differences from zero, in batches of one row."""
    *outer, count = differences.shape
    rows = differences.reshape(math.prod(outer), 1, count)
    distances = given.get("cdist", given.get("pdist"))
    each = {"grad": given.get("grad"), "cdist": distances}
    each = {name: None if x is None else x.reshape(-1, 1, 1) for name, x in each.items()}
    found = _called(func, given | each | {"x1": rows, "x2": torch.zeros_like(rows)})
    result: Tensor = found.reshape(differences.shape if "grad" in given else outer)
    return result


# ---------------------------------------------------------------------------------- all by name


def _by_algorithm(func: Any, given: Given) -> Any:
    """Evaluate a function that has an algorithm for formats beyond 48 bits by this algorithm."""
    return beyond_float64.by_algorithm(func, longer_format(given), *given.values())


OF_SPREADS = {
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default,
}
"""Functions that lose bits in float64, too, if a mean is large beside the deviations from it."""

RULES: dict[Any, Callable[[Any, Given], Any]] = {
    aten._softmax.default: _along_dims,  # x.softmax
    aten._log_softmax.default: _along_dims,  # x.log_softmax, F.cross_entropy
    aten.logsumexp.default: _along_dims,  # x.logsumexp
    aten.mean.default: _along_dims,  # x.mean(), gradients of x.var
    aten.mean.dim: _along_dims,  # x.mean(0), torch.cov
    aten.var.correction: _along_dims,  # x.var
    aten.std.correction: _along_dims,  # x.std
    aten.var_mean.correction: _along_dims,  # torch.var_mean
    aten.std_mean.correction: _along_dims,  # torch.std_mean
    aten.native_layer_norm.default: _of_last_dims,  # F.layer_norm
    aten.native_layer_norm_backward.default: _of_last_dims,  # its gradients
    aten.native_group_norm.default: _of_groups,  # F.group_norm
    aten.native_group_norm_backward.default: _of_groups,  # its gradients
    aten.native_batch_norm.default: _of_channels,  # F.batch_norm, F.instance_norm
    aten.native_batch_norm_backward.default: _of_channels,  # their gradients
    aten.batch_norm_backward.default: _of_channels,  # of the norms of torch.export
    aten.cudnn_batch_norm_backward.default: _of_channels,  # on a GPU
    aten.miopen_batch_norm_backward.default: _of_channels,  # on one of AMD
    aten.multi_margin_loss.default: _below_target,  # F.multi_margin_loss
    aten.multi_margin_loss_backward.default: _below_target,  # its gradients
    aten.multilabel_margin_loss_forward.default: _of_classes,  # F.multilabel_margin_loss
    aten.multilabel_margin_loss_backward.default: _of_classes,  # its gradients
    aten.mse_loss.default: _of_pairs,  # F.mse_loss
    aten.mse_loss_backward.default: _of_pairs,  # its gradients
    aten.huber_loss.default: _of_pairs,  # F.huber_loss
    aten.huber_loss_backward.default: _of_pairs,  # its gradients
    aten.smooth_l1_loss.default: _of_pairs,  # F.smooth_l1_loss
    aten.smooth_l1_loss_backward.default: _of_pairs,  # its gradients
    aten.dist.default: _of_pairs,  # torch.dist
    aten._cdist_forward.default: _of_all_rows,  # torch.cdist
    aten._cdist_backward.default: _of_all_rows,  # its gradients
    aten._pdist_forward.default: _of_own_rows,  # F.pdist
    aten._pdist_backward.default: _of_own_rows,  # its gradients
    aten.logcumsumexp.default: _by_algorithm,  # x.logcumsumexp
    aten.binary_cross_entropy.default: _by_algorithm,  # F.binary_cross_entropy
    aten.binary_cross_entropy_backward.default: _by_algorithm,  # its gradients
    aten.allclose.default: _by_algorithm,  # torch.allclose
}
"""The evaluation of functions if float64 rounds one of their arguments."""
