"""Functions of PyTorch that round to the dtype of a tensor, or whose operators cancel."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from mcftensor.patches.table import by_name, patch, wherever_imported
from mcftensor.tensor.tensor import MCFTensor, number_in


def _like(x: Any, other: Any) -> Any:
    """Return a number or a plain tensor in the format of an expansion, and x in other cases."""
    if not isinstance(other, MCFTensor) or isinstance(x, (bool, MCFTensor)):
        return x
    if isinstance(x, (int, float)):
        return number_in(x, other.format, other.role, other.device)
    return x.to(other) if isinstance(x, Tensor) else x


@patch(
    "torch.distributions.utils.broadcast_all",
    why="Numbers among the parameters of a distribution, as in `Normal(x, 0.1)`, are rounded to "
    "the dtype of its tensors.",
    loss="distributions round numbers to the base dtype of expansions; give them tensors.",
)
@wherever_imported
def _numbers_in_the_format(found: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(found)
    def broadcast_all(*values: Any) -> Any:  # compilers trace it
        for x in values:
            if isinstance(x, MCFTensor):
                return found(*[y if isinstance(y, Tensor) else _like(y, x) for y in values])
        return found(*values)

    return broadcast_all


@patch(
    "torch.distributions.Wishart.__init__",
    why="The same of the number of degrees of freedom.",
    loss="Wishart rounds its degrees of freedom to the base dtype; give it a tensor.",
    takes=("df", "covariance_matrix", "precision_matrix", "scale_tril"),
)
@by_name
def _df_in_the_format(make: Callable[[], None], given: dict[str, Any]) -> None:
    if isinstance(given["df"], (int, float)):
        for name in ("covariance_matrix", "precision_matrix", "scale_tril"):
            given["df"] = _like(given["df"], given.get(name))
    make()


_CONVERTING: dict[str, Any] = {
    "why": "The density converts its argument to the dtype of a parameter.",
    "loss": "densities of this distribution round arguments to the base dtype; convert them, "
    "value.to(parameter).",
    "takes": ("self", "value"),
}


@patch("torch.distributions.Gamma.log_prob", **_CONVERTING)
def _of_gamma(density: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(density)
    def log_prob(self: Any, value: Any) -> Tensor:  # compilers trace it
        if isinstance(value, MCFTensor):
            self = copy.copy(self)
            self.rate = _like(self.rate, value)
        return density(self, _like(value, self.rate))

    return log_prob


@patch("torch.distributions.HalfCauchy.log_prob", **_CONVERTING)
def _of_half_cauchy(density: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(density)
    def log_prob(self: Any, value: Any) -> Tensor:
        if isinstance(value, MCFTensor):
            self = copy.copy(self)
            self.base_dist = copy.copy(self.base_dist)
            self.base_dist.scale = _like(self.scale, value)
        return density(self, _like(value, self.scale))

    return log_prob


_ROUNDED = ("amax", "amin", "cumsum", "cumprod", "logsumexp", "logaddexp", "std", "var")


@patch(
    *(f"torch.masked.{name}" for name in _ROUNDED),
    why="They round results to the dtype of their input, which for a storage format is that of "
    "the leading component.",
    loss="these functions of values in storage formats have 8 or 11 bits; give them "
    "mcf.as_plain(x, torch.float32).",
)
def _in_all_bits(found: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(found)
    def masked(input: Any, *args: Any, dtype: Any = None, **options: Any) -> Any:
        if isinstance(input, MCFTensor) and input.acts_as == "value":
            format = input.format
            if format.arithmetic == "numbers" and dtype in (None, format.dtype):
                input, dtype = input.to(format.result.dtype), None
        return found(input, *args, dtype=dtype, **options)

    return masked


@patch(
    "torch.special.ndtr",
    why="PyTorch decomposes it into a sum of 1 and `erf`, which cancels. Tensors with scale rules "
    "are dispatched afterwards.",
    loss="ndtr of scaled tensors is 0 where it is small; write "
    "torch.special.erfc(-x / 2**0.5) / 2.",
    kind=BuiltinFunctionType,
)
def _by_its_tail(found: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(found)
    def ndtr(input: Any, *args: Any, **kwargs: Any) -> Tensor:  # compilers trace it
        if isinstance(input, MCFTensor) and input._has_rules:
            twice = torch.special.erfc(input.float() * -(0.5**0.5)).to(input.dtype)
            return torch.div(twice, 2, *args, **kwargs)
        return found(input, *args, **kwargs)

    torch.jit._builtins._register_builtin(ndtr, "aten::special_ndtr")
    return ndtr
