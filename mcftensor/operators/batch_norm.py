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
from mcftensor.dispatch.default_handler import compute
from mcftensor.dispatch.operands import named_arguments, plainly, value_of
from mcftensor.dispatch.registry import implements
from mcftensor.dispatch.rounded_arguments import WidenedArguments, is_recorded
from mcftensor.dispatch.system import WIDE, may_round, serves
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten

_STATISTICS = ("running_mean", "running_var")
_SHARES = ("momentum", "exponential_average_factor")  # of the batch in the average
_READING = (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)
_OF_INPUT = ("input", "grad_out", "grad_output", "counts", "reserve", "reserveSpace")


@implements(
    aten.native_batch_norm.default,  # nn.BatchNorm2d, nn.InstanceNorm2d
    aten._native_batch_norm_legit.default,  # its form in compiled code
    aten._native_batch_norm_legit.no_stats,  # the same of the batch alone
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
        return _of_long_values(func, args, kwargs, trains)
    numbers = _of_long_input(func, given, trains)
    operands = _plain(given, dtype, numbers)
    share = next(name for name in _SHARES if name in given)
    scratch: dict[str, Any] = {}
    if trains:
        for name in _STATISTICS:
            if given.get(name) is not None and operands[name] is not given[name]:
                scratch[name] = operands[name] = torch.zeros_like(operands[name])
    if scratch:
        operands[share] = 1.0
    results = func(**operands)
    if numbers is not None:
        results = (*numbers.corrected(results[:3]), *results[3:])
        if isinstance(results[1], MCFTensor) and "running_mean" in scratch:
            scratch["running_mean"] = _like(given["running_mean"], results[1])
    for name, of_batch in scratch.items():
        average = given[name]
        if not isinstance(average, MCFTensor):
            of_batch = of_batch.to(average.dtype)
        elif average.format.arithmetic == "numbers":
            of_batch = plainly(of_batch, average.format.result.dtype)
        average.lerp_(of_batch, given[share])
    x = given["input"]
    return tuple([_like(x, result) for result in results]) if _is_value(x) else results


_BACKWARD = (
    aten.native_batch_norm_backward.default,  # loss.backward()
    aten.batch_norm_backward.default,  # of the norms of torch.export
    aten.cudnn_batch_norm_backward.default,  # on a GPU
    aten.miopen_batch_norm_backward.default,  # on one of AMD
)


@implements(*_BACKWARD)  # loss.backward()
def differentiate(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the gradients of a norm. Gradients of parameters are plain, in their dtype."""
    given = named_arguments(func, args, kwargs)
    trains = given.get("train", given.get("update", True))
    dtype = _dtype_beside(given, trains)
    if dtype is None:
        return _of_long_values(func, args, kwargs)
    numbers = _of_long_input(func, given, trains)
    results = func(**_plain(given, dtype, numbers))
    of_input, *others = results if numbers is None else numbers.corrected(results)
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
    """Return the dtype for weight and statistics, or None for values that no dtype serves."""
    x = given["input"]
    if _is_value(x):
        return WIDE if serves(x.format, x.device) else None
    weight = given.get("weight", x)
    is_alike = "weight" in given and (weight is None or weight.dtype == x.dtype)
    dtype: torch.dtype = x.dtype
    return torch.float32 if dtype in NARROW and not (trains and is_alike) else dtype


def _of_long_input(func: Any, given: dict[str, Any], trains: bool) -> WidenedArguments | None:
    """Return the arguments of a norm of values that float64 may round, or None.

    In training, norms are of the batch alone: running statistics are updated afterwards.
    """
    x = given["input"]
    if not _is_value(x) or not may_round(x) or not (func in _BACKWARD or "bias" in given):
        return None
    own = {name: _of_role(name, y) for name, y in given.items()}
    if func not in (*_BACKWARD, aten.native_batch_norm.default):
        func = aten.native_batch_norm.default
        own |= dict.fromkeys(_STATISTICS) if trains else {}
        names = ("input", "weight", "bias", *_STATISTICS)
        eps = own.get("eps", own.get("epsilon"))
        own = {name: own.get(name) for name in names}
        own |= {"training": trains, "momentum": 0.0, "eps": eps}
    return WidenedArguments(func, [*own.values()], {}, is_recorded(own))


def _of_role(name: str, x: Any) -> Any:
    """Return an operand; of a parameter other than statistics, its leading component."""
    is_leading = isinstance(x, MCFTensor) and not _is_value(x) and name not in _STATISTICS
    return x.compute_tensor if is_leading else x


def _plain(
    given: dict[str, Any], dtype: torch.dtype, numbers: WidenedArguments | None
) -> dict[str, Any]:
    """Return the operands as plain tensors."""

    def convert(name: str, x: Any) -> Any:
        x = _of_role(name, x)
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, MCFTensor) and numbers is not None:
            return numbers.enter(x)
        stays = name in _OF_INPUT and not isinstance(x, MCFTensor)
        return x if stays or (x.dtype == dtype and type(x) is Tensor) else plainly(x, dtype)

    return {name: convert(name, x) for name, x in given.items()}


def _of_long_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool = False
) -> Any:
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return func.decompose(*args, **kwargs)
    given = named_arguments(func, args, kwargs)
    averages = [given.get(name) for name in _STATISTICS]
    if averages == [None, None] or "grad_out" in given:
        return compute(func, *args, **kwargs)
    given["training"] = trains
    *results, mean, var = compute(aten._native_batch_norm_legit_functional.default, **given)
    for average, new in zip(averages, (mean, var), strict=True) if trains else ():
        is_kept = isinstance(average, MCFTensor)
        average.copy_(new if is_kept else plainly(new, average.dtype))  # type: ignore[union-attr]
    if len(func._schema.returns) > len(results):  # memory that kernels reserve for gradients
        results.append(torch.empty(0, dtype=torch.uint8, device=given["input"].device))
    return tuple(results)
