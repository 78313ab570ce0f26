"""Gradient accumulation without rounding: gradients of microbatches are summed in expansions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mcftensor.convert import as_expansion
from mcftensor.dispatch.operands import value_of
from mcftensor.formats import Format, require_format
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import local, on_local
from mcftensor.training.ddp_buckets import holds_fsdp1
from mcftensor.training.gradient_hooks import GradientHook, Handle, trained


class Accumulation(Handle, GradientHook):
    """The handle of `accumulate_gradients`; as a context manager it ends with the block.

    After `remove()` gradients are plain again, from the next `zero_grad` on.
    """

    def __init__(self, format: Format | None) -> None:
        self._format = format

    def __call__(self, p: Tensor) -> None:
        """Have the gradient be an expansion."""
        if self._active and p.grad is not None:
            p.grad = _whole(p.grad, self._format)


def accumulate_gradients(module: nn.Module, format: Format | str | None = None) -> Accumulation:
    """Have `backward` sum the gradients of a module's parameters in expansions.

    A sum of many bf16 numbers in bf16 stops growing: each microbatch adds 1/n of the sum, and is
    rounded to 8 bits of it. Here `p.grad` becomes an expansion after the first backward
    pass, and autograd adds the following ones to all its terms. Clipping, gradient scaling and
    optimizers take the sum with all its terms. Parameters may be expansions or plain, and
    `zero_grad` of either kind may stand between the sums. In bf16x2 gradients take twice their
    memory.

    The gradient of one microbatch is rounded to the dtype of its parameter, as ever.

    Args:
        module: a module, in DDP or not; after `fully_shard`, if that is used.
        format: of the sums, for parameters of its base. Others, and all by default, get two terms
            of their dtype.

    Returns:
        A handle. Its `remove()` ends this; so does the end of a `with` block.

    Raises:
        TypeError: `module` is not a module, `format` is not a format, or FullyShardedDataParallel
            wraps the module.
        ValueError: no parameter that requires grad (is of the base of `format`).

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(1, 1, bias=False))
        >>> accumulation = mcf.accumulate_gradients(model)
        >>> for x in (256.0, 1.0, 1.0):
        ...     model(torch.full((1, 1), x).bfloat16()).sum().backward()
        >>> model.weight.grad  # plain, it would be 256
        MCFTensor([[258.]], format=bf16x2)

    !!! note
        - DDP: accumulate under `no_sync()`. The backward pass that follows reduces the whole sum,
          rounded once to the dtype of the parameter. Without `no_sync()` every pass rounds it.
        - `fully_shard`: the sums of sharded gradients are expansions. With
          `set_requires_gradient_sync(False)`, FSDP sums whole gradients itself; give its
          `MixedPrecisionPolicy` a `reduce_dtype` of float32 then.
        - Scaled gradients are summed in scaled expansions.
        - Sums of sparse gradients are dense, and optimizers for sparse gradients refuse them.
        - Complex gradients, and such with a graph (`create_graph=True`), are left as they are.
        - Compiled autograd raises for plain parameters, and works for expansions.
        - A module that is frozen in part or grows later needs another call for its new parameters.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"accumulate_gradients: got {type(module).__name__}; give a module")
    if format is not None:
        format = require_format(format, "accumulate_gradients")
    if holds_fsdp1(module):
        raise TypeError(
            "accumulate_gradients: FullyShardedDataParallel keeps gradients in memory of its own, "
            "where they cannot be expansions; shard with torch.distributed.fsdp.fully_shard"
        )
    parameters = trained(module)
    if not any(format is None or p.dtype == format.dtype for p in parameters):
        of_base = f" of {format.dtype}" if format else ""
        raise ValueError(
            f"accumulate_gradients: {type(module).__name__} has no parameter{of_base} that "
            "requires grad"
        )

    accumulation = Accumulation(format)
    accumulation.attach(parameters)
    return accumulation


def _whole(grad: Tensor, format: Format | None) -> Tensor:
    """Return a gradient as an expansion, if possible."""
    if isinstance(grad, MCFTensor) and not grad.requires_grad:
        sums = grad.format.of_sums
        return grad if sums is grad.format else as_expansion(grad, sums)
    if grad.requires_grad or grad.is_complex():
        return grad
    if local(grad) is not grad:
        whole = _whole(local(grad), format)
        return grad if whole is local(grad) else on_local(lambda _: whole, grad)
    if format is None or format.dtype != grad.dtype:
        format = Format(grad.dtype, 2)
    start = torch.zeros_like(grad, layout=torch.strided) if grad.is_sparse else grad
    sum_ = value_of(start, format)
    if grad.is_sparse:
        sum_.add_(grad)
    return sum_
