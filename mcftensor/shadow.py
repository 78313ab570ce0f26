"""Shadow steps: one step of any optimizer, carried out on copies in another precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mcftensor.convert import as_plain
from mcftensor.dispatch.operands import terms_in
from mcftensor.formats import Format, fp64x2
from mcftensor.tensor import MCFTensor

Wide: TypeAlias = torch.dtype | Format
Conversion = Callable[[Tensor, Tensor, str], Tensor]
"""What becomes of a tensor, the parameter that it belongs to, and the tensor's name."""

# Bound to the instance, or to its parameters; a copy gets its own.
_BOUND = ("step", "state", "param_groups", "_init_group", "_collage")


class CannotShadow(Exception):
    """A step cannot be carried out on copies; the message says why."""


def shadow_step(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    conversion: Conversion,
    loss: Callable[[], Any] | None = None,
) -> list[Tensor]:
    """Take the step that an optimizer is about to take, on copies of some of its parameters.

    Parameters, gradients and states are read and stay as they are, and so do the optimizer, its
    groups and the random state.

    Args:
        optimizer: any optimizer.
        parameters: those to step, of any of its groups.
        conversion: `same` or `widened`.
        loss: what the step gets for its closure, if it takes one; gradients are there already.

    Returns:
        The copies of the parameters, after the step.

    Raises:
        CannotShadow: it asks for its closure more than once.
        Exception: whatever the step raises on the copies.
    """
    shadow = object.__new__(type(optimizer))
    twins = {p: _twin(p, conversion) for p in parameters}
    memo: dict[int, Any] = {id(p): twin for p, twin in twins.items()}
    memo[id(optimizer)] = shadow
    shadow.__dict__ = attributes(optimizer, memo)
    shadow.param_groups = [_group(group, twins, memo) for group in optimizer.param_groups]
    shadow.param_groups = [group for group in shadow.param_groups if group["params"]]
    shadow.state = copy.copy(optimizer.state)
    shadow.state.clear()
    known = {p for group in optimizer.param_groups for p in group["params"]}
    for key, state in list(optimizer.state.items()):
        if key in twins:
            shadow.state[twins[key]] = {
                name: tree_map(lambda x: _copied(x, key, name, conversion, memo), value)  # noqa: B023
                for name, value in state.items()
            }
        elif key not in known:
            shadow.state[_deepcopied(key, memo)] = _deepcopied(state, memo)
    plan = optimizer.__dict__.get("_collage")
    if plan is not None and conversion is same:
        plan.bind(shadow)

    cuda = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(cuda):
        plain_step(optimizer)(shadow, *(() if loss is None else (_once(loss),)))
    for twin in twins.values():
        twin.grad = None
    return list(twins.values())


def same(x: Tensor, parameter: Tensor, name: str) -> Tensor:
    """A copy in the tensor's own format."""
    return x.detach().clone()


def widened(x: Tensor, parameter: Tensor, name: str) -> Tensor:
    """A copy in the format that resolves what updates of the parameter lose.

    Integers stay integers, and step counts what they are: fused kernels require float32.

    Raises:
        CannotShadow: no format is wide enough.
    """
    x = x.detach()
    if x.is_complex():
        return x.to(torch.complex128, copy=True)
    if name == "step" or not x.is_floating_point():
        return x.clone()
    wide = wide_type(parameter)
    if isinstance(wide, Format) and x.shape == parameter.shape and name != "grad":
        return MCFTensor([t.clone() for t in terms_in(x, wide, x.device)], wide)
    if isinstance(x, MCFTensor):
        return as_plain(x, torch.float64)
    return x.to(torch.float64, copy=True)


def widened_parameters(x: Tensor, parameter: Tensor, name: str) -> Tensor:
    """As `widened` for parameters and gradients; states stay as they are.

    For optimizers that choose the dtype of their states themselves.
    """
    return (widened if name in ("parameter", "grad") else same)(x, parameter, name)


def wide_type(parameter: Tensor) -> Wide:
    """The type with bits enough beyond those of a parameter: float64, or terms of it.

    Raises:
        CannotShadow: there is none.
    """
    if isinstance(parameter, MCFTensor):
        precision, name = parameter.format.precision, parameter.format.name
    else:
        precision = 53 if parameter.dtype in (torch.float64, torch.complex128) else 24
        name = str(parameter.dtype)
    if precision <= 48:
        return torch.complex128 if parameter.is_complex() else torch.float64
    if precision > 2 * 53 or parameter.is_complex():
        raise CannotShadow(f"no format is wide enough to tell what {name} loses")
    return fp64x2 if precision <= 80 else Format(torch.float64, 3)


def plain_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The step as its class defines it, with its own decorators but without the hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def attributes(optimizer: Optimizer, memo: dict[int, Any]) -> dict[str, Any]:
    """Copies of the attributes of an optimizer, without hooks and what is bound to it."""
    return {
        name: type(value)() if "_hooks" in name else _deepcopied(value, memo)
        for name, value in optimizer.__dict__.items()
        if name not in _BOUND
    }


def reaches_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer holds parameters elsewhere than in its groups and states."""
    memo: dict[int, Any] = {}
    attributes(optimizer, memo)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return any(id(p) in memo for p in parameters)


def _twin(p: Tensor, conversion: Conversion) -> Tensor:
    twin = conversion(p, p, "parameter")
    if isinstance(p, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=p.requires_grad)
    else:
        twin.requires_grad_(p.requires_grad)
    for name, value in p.__dict__.items():
        twin.__dict__.setdefault(name, value)
    if p.grad is not None:
        twin.grad = conversion(p.grad, p, "grad")
    return twin


def _group(
    group: Mapping[str, Any], twins: Mapping[Tensor, Tensor], memo: dict[int, Any]
) -> dict[str, Any]:
    chosen = [i for i, p in enumerate(group["params"]) if p in twins]
    copied = {k: _deepcopied(v, memo) for k, v in group.items() if k != "params"}
    if "param_names" in copied:
        copied["param_names"] = [copied["param_names"][i] for i in chosen]
    return {"params": [twins[group["params"][i]] for i in chosen], **copied}


def _copied(x: Any, p: Tensor, name: str, conversion: Conversion, memo: dict[int, Any]) -> Any:
    if isinstance(x, Tensor) and id(x) not in memo:
        return conversion(x, p, name)
    return _deepcopied(x, memo)


def _deepcopied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, or the thing itself where it has none, as a process group."""
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        return value


def _once(loss: Callable[[], Any]) -> Callable[[], Any]:
    """A closure for the shadow, which may call it once: the gradients of one point are known."""
    calls: list[None] = []

    def closure(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) > 1:
            raise CannotShadow("its step asks for the loss at more than one point")
        return loss()

    return closure
