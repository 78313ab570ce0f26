"""Gradients of expansions: what they read as within a step, and where backward begins."""

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
_SETS_UNTRACED = torch.__version__ >= "2.14"  # whose compiler fails where a descriptor of C is set


@torch._disable_dynamo
def _untraced_grad(x: Tensor) -> Tensor | None:
    found: Tensor | None = _get_grad(x)
    return found


@torch._disable_dynamo
def _set_grad(x: Tensor, value: Tensor | None) -> None:
    _GRAD.__set__(x, value)


class GradedTensor(ComponentTensor):
    """The part of `MCFTensor` that has to do with its gradient."""

    def _lifted(self, gradient: Tensor) -> Tensor:
        """A gradient of it as it reads within a step; `MCFTensor` defines it."""
        raise NotImplementedError

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As of any tensor; from a parameter it starts with a plain gradient."""
        if self._role == "parameter" and gradient is None and self.numel() == 1:
            gradient = torch.ones_like(self.lent)
        elif self._role == "parameter" and isinstance(gradient, ComponentTensor):
            gradient = gradient.lent
        elif self._has_rules and not isinstance(gradient, ComponentTensor | None):
            # Autograd would round it to the dtype of the data.
            gradient = torch.empty_like(self.detach()).copy_(gradient)
        super().backward(gradient, *args, **kwargs)

    @property
    def grad(self) -> Tensor | None:
        """As of any tensor; within a step of an optimizer a plain gradient reads as an expansion,
        whose changes in place reach the plain one, rounded.

        Optimizers ask for it at every turn, and torch's own way to it goes by
        `__torch_function__`.
        """
        if is_compiling():  # what reads it in a graph would come here again
            return _untraced_grad(self)
        found: Tensor | None = _without_function(_get_grad, (), (self,))
        step = current_step()
        if step is None or found is None:
            return found
        if found.requires_grad and torch.is_grad_enabled():
            return found  # a part of the graph
        held, read = step.gradients.get(id(self), (None, None))
        if held is not found:
            read = self._lifted(found)
            step.gradients[id(self)] = found, read
        return read

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        step = current_step()
        held = None if step is None else _without_function(_get_grad, (), (self,))
        if step is not None and value is not None and not isinstance(held, ComponentTensor):
            plain = _rounded_gradient(value, self._format)  # which it is after the step
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
    """The plain gradient of what one is to read as."""
    if isinstance(read, ComponentTensor):
        return read._component0
    return read.to(format.dtype) if read.dtype == format.dtype_of_numbers else read
