"""Batch norms, whose running statistics are averages and keep all their terms.

PyTorch's kernels write the statistics in place, and most schemas do not say so. The kernels
therefore write the batch statistics into scratch tensors, and this module updates the averages. In
training, outputs and gradients are computed as for plain tensors of the base. In eval mode, 16-bit
inputs are normalized with float32 statistics, as PyTorch's norms allow.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import NARROW
from mcftensor.dispatch.default_handler import PRECISION, compute
from mcftensor.dispatch.operands import named_arguments, plainly, value_of
from mcftensor.dispatch.registry import implements
from mcftensor.dispatch.rounded_arguments import WIDE
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten

_STATISTICS = ("running_mean", "running_var")
_SHARES = ("momentum", "exponential_average_factor")  # of the batch in the average
_READING = (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)
_OF_INPUT = ("input", "grad_out", "grad_output", "counts", "reserve", "reserveSpace")


@implements(
    aten.native_batch_norm.default,  # nn.BatchNorm2d, nn.InstanceNorm2d
    aten._native_batch_norm_legit.default,  # its form in compiled code
    aten._native_batch_norm_legit_no_training.default,  # the same in eval mode
    aten._batch_norm_with_update.default,  # in models of torch.export
    aten._batch_norm_no_update.default,  # the same in eval mode
    aten.cudnn_batch_norm.default,  # nn.BatchNorm2d on a GPU
    aten.miopen_batch_norm.default,  # the same on one of AMD
    aten.batch_norm_update_stats.default,  # programs that average by themselves
    aten.batch_norm_gather_stats.default,  # nn.SyncBatchNorm, formerly
    aten.batch_norm_gather_stats_with_counts.default,  # nn.SyncBatchNorm
)
def normalize(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a norm. Parameters use leading terms, and running statistics keep all terms."""
    given = named_arguments(func, args, kwargs)
    trains = given.get("training", func not in _READING)
    dtype = _dtype_beside(given, trains)
    if dtype is None:
        return _of_long_values(func, args, kwargs)
    operands = _plain(given, dtype)
    share = next(name for name in _SHARES if name in given)
    scratch = {}
    if trains:
        for name in _STATISTICS:
            if given[name] is not None and operands[name] is not given[name]:
                scratch[name] = operands[name] = torch.zeros_like(operands[name])
    if scratch:
        operands[share] = 1.0
    results = func(**operands)
    for name, of_batch in scratch.items():
        average = given[name]
        kept = isinstance(average, MCFTensor)
        average.lerp_(of_batch if kept else of_batch.to(average.dtype), given[share])
    x = given["input"]
    return tuple([_like(x, result) for result in results]) if _is_value(x) else results


@implements(
    aten.native_batch_norm_backward.default,  # loss.backward()
    aten.batch_norm_backward.default,  # of the norms of torch.export
    aten.cudnn_batch_norm_backward.default,  # on a GPU
    aten.miopen_batch_norm_backward.default,  # on one of AMD
)
def differentiate(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the gradients of a norm. Gradients of parameters are plain, in their dtype."""
    given = named_arguments(func, args, kwargs)
    trains = given.get("train", given.get("update", True))
    dtype = _dtype_beside(given, trains)
    if dtype is None:
        return _of_long_values(func, args, kwargs)
    of_input, *others = func(**_plain(given, dtype))
    weight = given["weight"]
    if weight is not None:
        others = [_like(weight, x) for x in others]
    return _like(given["input"], of_input), *others


def _is_value(x: Any) -> TypeGuard[MCFTensor]:
    return isinstance(x, MCFTensor) and x.acts_as == "value"


def _like(operand: Tensor, result: Tensor | None) -> Tensor | None:
    """Return a result in the kind of an operand: a value, or plain in its dtype."""
    if result is None:
        return None
    if _is_value(operand):
        return value_of(result, operand.format) if result.is_floating_point() else result
    return result.to(operand.dtype)


def _dtype_beside(given: dict[str, Any], trains: bool) -> torch.dtype | None:
    """Return the dtype for weight and statistics, or None for values of more than 48 bits."""
    x = given["input"]
    if _is_value(x):
        return WIDE if x.format.precision <= PRECISION else None
    weight = given.get("weight", x)
    is_alike = "weight" in given and (weight is None or weight.dtype == x.dtype)
    dtype: torch.dtype = x.dtype
    return torch.float32 if dtype in NARROW and not (trains and is_alike) else dtype


def _plain(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the operands as plain tensors."""

    def convert(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, MCFTensor) and not _is_value(x) and name not in _STATISTICS:
            x = x.compute_tensor
        stays = name in _OF_INPUT and not isinstance(x, MCFTensor)
        return x if stays or (x.dtype == dtype and type(x) is Tensor) else plainly(x, dtype)

    return {name: convert(name, x) for name, x in given.items()}


def _of_long_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return func.decompose(*args, **kwargs)
    return compute(func, *args, **kwargs)
