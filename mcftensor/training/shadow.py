"""Shadow steps: one step of any optimizer, carried out on copies in another precision."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._python_dispatch import TensorWithFlatten, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from mcftensor.convert import as_plain
from mcftensor.dispatch.operands import stored_in
from mcftensor.formats import Format, fp64x2
from mcftensor.kernels.without_float64 import widest
from mcftensor.patches.optimizers import plan_of
from mcftensor.tensor.components import format_of, local, on_local
from mcftensor.tensor.pickling import attributes_of_users
from mcftensor.tensor.tensor import MCFTensor

_WIDEST = (torch.float64, torch.complex128)

Conversion = Callable[[Tensor, Tensor, str], Tensor]
"""A conversion of a tensor, given the parameter that it belongs to and the name of the tensor."""

# Bound to the instance, or to its parameters; a copy gets its own.
_BOUND = ("step", "state", "param_groups", "_collage", "__deepcopy__", "__reduce_ex__")

# Stand for processes and devices, and have no copies.
_SHARED = (torch.device, DeviceMesh, getattr(torch.distributed, "ProcessGroup", DeviceMesh))


class CannotShadow(Exception):
    """A step cannot be carried out on copies; the message says why."""


class Original:
    """An optimizer whose step is to be taken on copies.

    Parameters, gradients and states are read and stay as they are, and so do the optimizer, its
    groups and the random state. What a step changes elsewhere (global variables, files) it changes
    on copies, too.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.group_of: dict[Tensor, int] = {}
        for g, group in enumerate(optimizer.param_groups):
            self.group_of.update(dict.fromkeys(group["params"], g))
        self.takes_float64 = type(optimizer).__module__.startswith("torch.optim.")
        self.other_states = [key for key in optimizer.state if key not in self.group_of]

    def step(
        self, parameters: Sequence[Tensor], conversion: Conversion, loss: Callable[[], Any] | None
    ) -> list[tuple[Tensor, dict[str, Any]]]:
        """Take the step that the optimizer is about to take, on copies of some parameters.

        `loss` becomes its closure, if it takes one; gradients are there already. Returns the
        copies of the parameters after the step, and of their states.
        """
        optimizer = self.optimizer
        shadow = object.__new__(type(optimizer))
        memo: dict[int, Any] = {id(optimizer): shadow}
        twins = {p: _twin(p, conversion, memo) for p in parameters}
        memo |= {id(p): twin for p, twin in twins.items()}
        try:
            shadow.__dict__ = attributes(optimizer, memo)
            shadow.param_groups = self._groups(twins, memo)
            shadow.state = copy.copy(optimizer.state)
            shadow.state.clear()
            for p, twin in twins.items():
                if isinstance(optimizer.state.get(p), dict):
                    shadow.state[twin] = copy.copy(optimizer.state[p])
                    for name, value in optimizer.state[p].items():
                        shadow.state[twin][name] = _converted(value, p, name, conversion, memo)
                elif p in optimizer.state:
                    shadow.state[twin] = deepcopied(optimizer.state[p], memo)
            for key in self.other_states:
                shadow.state[deepcopied(key, memo)] = deepcopied(optimizer.state[key], memo)
            plan = plan_of(optimizer) if conversion is same else None
            if plan is not None:
                shadow.__dict__["_collage"] = plan
            if conversion is not same and not any(map(format_of, twins.values())):
                _leave_fused(shadow)
            versions = self._versions(parameters)
            with torch.no_grad(), same_randomness(parameters):
                plain_step(optimizer)(shadow, *(() if loss is None else (_once(loss),)))
            if self._versions(parameters) != versions:
                raise CannotShadow(
                    "its step reaches its parameters otherwise than by groups and states, and has "
                    "changed them: this step was taken more than once"
                )
            if plan is not None:
                plan.apply(shadow)
            for twin in twins.values():
                twin.grad = None
            return [(twin, dict(shadow.state.get(twin) or {})) for twin in twins.values()]
        finally:
            shadow.__dict__.clear()  # cycles would keep the copies until they are collected

    def states_of(self, p: Tensor) -> Mapping[str, Any]:
        """Return the states of a parameter by name, before the step."""
        state = self.optimizer.state.get(p)
        return state if isinstance(state, dict) else {}

    def _groups(self, twins: Mapping[Tensor, Tensor], memo: dict[int, Any]) -> list[dict[str, Any]]:
        groups = []
        for g in sorted({self.group_of[p] for p in twins}):
            group = self.optimizer.param_groups[g]
            chosen = [i for i, p in enumerate(group["params"]) if p in twins]
            copied = {k: deepcopied(v, memo) for k, v in options_of(group).items()}
            if isinstance(self.optimizer, torch.optim.Adafactor) and copied["eps"][0] is None:
                # The default depends on the dtype: use the same in every precision.
                stepped = [p for p in group["params"] if p.grad is not None]
                dtypes = [
                    f.dtype_of_numbers(p.device) if (f := format_of(p)) else p.dtype
                    for p in stepped
                ]
                if dtypes:
                    copied["eps"] = (torch.finfo(dtypes[0]).eps, *copied["eps"][1:])
            copied["params"] = [twins[group["params"][i]] for i in chosen]
            if len(group.get("param_names", ())) == len(group["params"]):
                copied["param_names"] = [group["param_names"][i] for i in chosen]
            groups.append(copied)
        return groups

    def _versions(self, parameters: Sequence[Tensor]) -> list[int]:
        states = [self.optimizer.state.get(p) for p in parameters]
        tensors = [*parameters, *(p.grad for p in parameters), *tree_leaves(states)]
        return [x._version for x in tensors if isinstance(x, Tensor) and not x.is_inference()]


def same(x: Tensor, parameter: Tensor, name: str) -> Tensor:
    """Return a copy in the tensor's own format."""
    x = x.detach()
    if not is_of_others(x):
        return x.clone()
    inner, context = x.__tensor_flatten__()
    copies = {name: same(getattr(x, name), parameter, name) for name in inner}
    return type(x).__tensor_unflatten__(copies, context, x.shape, x.stride())


def is_of_others(x: Tensor) -> TypeGuard[TensorWithFlatten]:
    """Whether a tensor is of a class of another package, which stores its numbers in tensors."""
    known = isinstance(x, MCFTensor) or local(x) is not x
    return not known and is_traceable_wrapper_subclass(x)


def chooses_types(parameter: Tensor, state: Any) -> bool:
    """Whether an optimizer has chosen the types of a parameter's states by itself: codes, tensors
    of a class of its own, or numbers of another dtype than the parameter's.

    Its kernels take these types alone, some without asking.
    """
    if format_of(parameter):
        return False
    for x in tree_leaves(state):
        if isinstance(x, Tensor) and not format_of(x) and x.numel() > 1:
            if is_of_others(x):
                return True
            as_many = x.numel() >= parameter.numel()
            if as_many and not x.is_complex() and x.dtype not in (parameter.dtype, torch.bool):
                return True
    return False


def _leave_fused(optimizer: Optimizer) -> None:
    """Select the for-loop instead of torch's fused kernels.

    These round an element in one of their vectors and one behind the last vector differently, so
    that a shard would have other bits than the same part of the whole.
    """
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return  # only fused kernels remove a scale
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = group["foreach"] = False


def widened(x: Tensor, parameter: Tensor, name: str) -> Tensor:
    """Return a copy in a format wide enough to resolve the losses of updates.

    Integers stay integers, and step counts keep their dtype: fused kernels require float32.
    """
    x = x.detach()
    if x.is_complex():
        return x.to(torch.complex128, copy=True)
    if name == "step" or not x.is_floating_point() or is_of_others(x):
        return same(x, parameter, name)
    wide = wide_type(parameter)
    has_shape = x.dim() or not parameter.dim()  # factors of moments have another shape
    if not isinstance(wide, torch.dtype) and has_shape and name != "grad":
        return on_local(
            lambda own: MCFTensor.of(
                [t.clone() for t in stored_in(own, wide, own.device)], wide, own=True
            ),
            x,
        )
    plain = wide if isinstance(wide, torch.dtype) else wide.dtype
    return as_plain(x, plain) if format_of(x) else x.to(plain, copy=True)


def sums_in(x: Tensor) -> torch.dtype:
    """Return the machine type of figures: float64 if the device has it."""
    return torch.float64 if x.dtype in _WIDEST else widest(x.device)


def widened_parameters(x: Tensor, parameter: Tensor, name: str) -> Tensor:
    """Widen parameters and gradients as `widened`; states stay unchanged.

    For optimizers that choose the dtype of their states themselves.
    """
    return (widened if name in ("parameter", "grad") else same)(x, parameter, name)


def wide_type(parameter: Tensor) -> torch.dtype | Format:
    """Return a type with more bits than a parameter: float64, or terms of it or of float32."""
    format = format_of(parameter)
    name = format.name if format else str(parameter.dtype)
    if parameter.dtype.itemsize < 2:
        raise CannotShadow(f"parameters of {name} are not supported")
    precision = format.precision if format else 53 if parameter.dtype in _WIDEST else 24
    if sums_in(parameter) == torch.float32:
        if precision > 3 * 24 or parameter.is_complex():
            raise CannotShadow(f"without float64 no format tells what {name} loses")
        return Format(torch.float32, 2 + (precision > 24) + 2 * (precision > 48))
    if precision <= 48:
        return torch.complex128 if parameter.is_complex() else torch.float64
    if precision > 2 * 53 or parameter.is_complex():
        raise CannotShadow(f"no format is wide enough to tell what {name} loses")
    return fp64x2 if precision <= 80 else Format(torch.float64, 3)


def require_single(caller: str, optimizer: object, repair: str) -> None:
    """Raise TypeError if this is not an optimizer, and ValueError, with the repair, if it steps
    other optimizers."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{caller}: got {name}; give a torch.optim.Optimizer")
    for attribute, value in vars(optimizer).items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(part, Optimizer) for part in parts):
            found = f"optimizer.{attribute}"
            raise ValueError(f"{caller}: {name} steps other optimizers; {repair.format(found)}")


def trial_of(optimizer: Optimizer, stand_ins: Mapping[int, Sequence[Tensor]]) -> Any:
    """Return a copy of an optimizer without states and hooks, over parameters on the CPU that stand
    in for those of its groups.
    """
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__ = attributes(optimizer, {id(optimizer): trial})
    trial.state = type(optimizer.state)(dict)
    trial.param_groups = []
    for g, parameters in stand_ins.items():
        options = tree_map(_on_cpu, options_of(optimizer.param_groups[g]))
        if "capturable" in options:
            options["capturable"] = False
        trial.param_groups.append({"params": list(parameters), **options})
    return trial


def _on_cpu(option: Any) -> Any:
    return option.detach().cpu().clone() if isinstance(option, Tensor) else deepcopied(option, {})


@contextlib.contextmanager
def trying(parameters: Sequence[Tensor] = ()) -> Iterator[None]:
    """Return a context in which trial steps leave neither warnings nor changes of random states."""
    with torch.no_grad(), warnings.catch_warnings(), same_randomness(parameters):
        warnings.simplefilter("ignore")
        yield


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group."""
    return {name: x for name, x in group.items() if name not in ("params", "param_names")}


def plain_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step as its class defines it, with its decorators but without the hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def attributes(optimizer: Optimizer, memo: dict[int, Any]) -> dict[str, Any]:
    """Copy the attributes of an optimizer, without hooks and bound methods."""
    copied = {}
    for name, value in optimizer.__dict__.items():
        if name in _BOUND:
            continue
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            copied[name] = type(value)()
            continue
        if isinstance(value, FunctionType) and _closes_over(value, optimizer):
            raise CannotShadow(f"its attribute {name} is a function that holds the optimizer")
        try:
            copied[name] = deepcopied(value, memo)
        except CannotShadow as error:
            raise CannotShadow(f"its attribute {name} cannot be copied: {error}") from error
    return copied


def deepcopied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy; objects that stand for processes and devices are not copied."""
    if isinstance(value, _SHARED):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # copying may run any code
        raise CannotShadow(f"{type(error).__name__}: {error}") from error


def reaches_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer holds parameters elsewhere than in its groups and states."""
    memo: dict[int, Any] = {}
    with contextlib.suppress(CannotShadow):
        attributes(optimizer, memo)
    return any(id(p) in memo for group in optimizer.param_groups for p in group["params"])


def _twin(p: Tensor, conversion: Conversion, memo: dict[int, Any]) -> Tensor:
    twin = conversion(p, p, "parameter")
    if isinstance(p, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=p.requires_grad)
    else:
        twin.requires_grad_(p.requires_grad)
    for name, value in attributes_of_users(p).items():
        if name not in twin.__dict__:
            twin.__dict__[name] = _converted(value, p, name, conversion, memo)
    if p.grad is not None:
        if p.grad.dtype != p.dtype:
            twin.grad_dtype = None
        twin.grad = conversion(p.grad, p, "grad")
    return twin


def _converted(
    value: Any, p: Tensor, name: str, conversion: Conversion, memo: dict[int, Any]
) -> Any:
    """Return a value with its tensors converted, and everything else copied deeply."""

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return deepcopied(x, memo)
        if id(x) not in memo:
            memo[id(x)] = conversion(x, p, name)
        return memo[id(x)]

    return tree_map(convert, value)


def _closes_over(function: FunctionType, optimizer: Optimizer) -> bool:
    contents = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            contents.append(cell.cell_contents)
    leaves = tree_leaves(contents)
    return any(x is optimizer or isinstance(x, (Tensor, nn.Module)) for x in leaves)


def _once(loss: Callable[[], Any]) -> Callable[..., Any]:
    """Return a closure that the shadow may call once: the gradients of one point are known."""
    calls: list[None] = []

    def closure(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) > 1:
            raise CannotShadow("its step asks for the loss at more than one point")
        return loss()

    return closure


@contextlib.contextmanager
def same_randomness(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restore the random states afterwards."""
    cuda = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(cuda):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
