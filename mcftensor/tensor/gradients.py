"""Gradients of expansions: `grad` within a step, and `backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from mcftensor.formats import Format
from mcftensor.tensor.components import ComponentTensor
from mcftensor.tensor.step_context import current_step

_without_function: Any = torch._C._disabled_torch_function_impl
_GRAD: Any = torch.Tensor.grad
_get_grad = _GRAD.__get__
_SETS_UNTRACED = torch.__version__ >= "2.14"  # its compiler fails to set a descriptor written in C


@torch._disable_dynamo
def _untraced_grad(x: Tensor) -> Tensor | None:
    found: Tensor | None = _get_grad(x)
    return found


@torch._disable_dynamo
def _set_grad(x: Tensor, value: Tensor | None) -> None:
    _GRAD.__set__(x, value)


class GradedTensor(ComponentTensor):
    """The part of `MCFTensor` that implements `grad` and `backward`."""

    def _wrapped(self, gradient: Tensor) -> Tensor:
        """Return a gradient as it reads within a step. `MCFTensor` defines it."""
        raise NotImplementedError

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, as `torch.Tensor.backward`. Parameters start from a plain gradient."""
        if self._role == "parameter" and gradient is None and self.numel() == 1:
            gradient = torch.ones_like(self.compute_tensor)
        elif self._role == "parameter" and isinstance(gradient, ComponentTensor):
            gradient = gradient.compute_tensor
        elif self._has_rules and not isinstance(gradient, ComponentTensor | None):
            # Autograd would round a plain gradient to the dtype of the data.
            gradient = torch.empty_like(self.detach()).copy_(gradient)
        super().backward(gradient, *args, **kwargs)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, as `torch.Tensor.grad`; within a step a plain gradient reads as an
        expansion.

        In-place changes of that expansion reach the plain gradient, rounded.
        """
        if is_compiling():  # reading it in a graph would call this property again
            return _untraced_grad(self)
        # Optimizers read it often, and torch's own getter would go through __torch_function__.
        found: Tensor | None = _without_function(_get_grad, (), (self,))
        step = current_step()
        if step is None or found is None:
            return found
        if found.requires_grad and torch.is_grad_enabled():
            return found  # part of an autograd graph
        held, read = step.gradients.get(id(self), (None, None))
        if held is not found:
            read = self._wrapped(found)
            step.gradients[id(self)] = found, read
        return read

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        step = current_step()
        held = None if step is None else _without_function(_get_grad, (), (self,))
        if step is not None and value is not None and not isinstance(held, ComponentTensor):
            plain = _rounded_gradient(value, self._format)  # the gradient after the step
            if plain is not value:
                step.gradients[id(self)] = plain, value
                value = plain
        with torch._C.DisableTorchFunctionSubclass():
            if _SETS_UNTRACED and is_compiling():
                _set_grad(self, value)
            else:
                _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _rounded_gradient(read: Tensor, format: Format) -> Tensor:
    """Return the plain gradient that a gradient tensor wraps."""
    if isinstance(read, ComponentTensor):
        return read._component0
    is_wide = read.dtype == format.dtype_of_numbers(read.device)
    return read.to(format.dtype) if is_wide else read
