"""Dispatch of operators on scaled tensors: the table of rules, and the storage of their results.

A rule is a function that takes the arguments of a PyTorch operator. It returns an `Unrounded`,
which is then rounded to the format of the operands or written to the operator's output; or a
complete tensor; or a tuple of these. So one rule serves both `add` and `add_`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mcftensor.dispatch.foreach import ListCall
from mcftensor.dispatch.operands import is_float, leaves
from mcftensor.dispatch.registry import TABLE, Handler, handler_of
from mcftensor.scaling.exponents import Exponent
from mcftensor.scaling.scaled import each_made_of, is_scaled
from mcftensor.scaling.scaled_format import ScaledFormat, promoted
from mcftensor.scaling.scaled_numbers import (
    Placing,
    Unrounded,
    aligned,
    by_size,
    count,
    number,
    stored,
    write_to,
)
from mcftensor.tensor.implicit_rounding import rounding
from mcftensor.tensor.tensor import MCFTensor

aten = torch.ops.aten
_BETWEEN_PROCESSES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp")
_FALLBACK: ContextVar[bool] = ContextVar("scaling_fallback", default=False)


@dataclass(frozen=True)
class ScalingRule:
    """The function of an operator, and whether its result keeps the tails of operands."""

    function: Callable[..., Any]
    keeps_tails: bool = False


RULES: dict[Any, ScalingRule] = {}


def rule(
    *operators: Any, keeps_tails: bool = False, takes_operator: bool = False
) -> Callable[[Any], Any]:
    """Register a rule; an operator without overload stands for all its overloads but out=.

    A rule of several operators may take the overload as its first argument.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for operator in operators:
            overloads = (
                [getattr(operator, name) for name in operator.overloads() if "out" not in name]
                if isinstance(operator, torch._ops.OpOverloadPacket)
                else [operator]
            )
            for overload in overloads:
                own = functools.partial(function, overload) if takes_operator else function
                RULES[overload] = ScalingRule(own, keeps_tails)
        return function

    return register


def homogeneous(
    *operators: Any,
    degree: int | None = 1,
    jointly: bool = False,
    placing: Placing = "by rule",
    keeps_tails: bool = False,
) -> None:
    """Register operators with f(2^k · x, …) = 2^(degree · k) · f(x, …) for their first operand x.

    They are applied to its mantissa, and to the values of other operands in float32. Functions
    without a degree (None) are applied to values alone. Operators with f(2^k · x, 2^k · y, …) =
    2^k · f(x, y, …) are applied to mantissas at the largest exponent of their operands (`jointly`).
    """

    @rule(*operators, keeps_tails=keeps_tails, takes_operator=True)
    def compute(operator: Any, *args: Any, **also: Any) -> Any:
        s: Exponent = 0
        own: dict[int, Unrounded] = {}
        if jointly:
            places = _places_of_numbers(operator)
            s, numbers = aligned([args[i] for i in places])
            own = dict(zip(places, numbers, strict=True))
        elif degree is not None:
            own = {0: number(args[0])}
            s = own[0].exponent
        operands = [own[i].at(s) if i in own else plain_operand(x) for i, x in enumerate(args)]
        exponent = s if degree == 1 else s * (degree or 0)
        made = operator(*operands, **also)

        def as_number(y: Tensor) -> Any:
            return Unrounded(y, exponent, placing) if y.is_floating_point() else y

        return tuple(map(as_number, made)) if isinstance(made, tuple) else as_number(made)


def handled_by(*handlers: Handler) -> list[Any]:
    """Return the operators that expansions without scales carry out by some handlers."""
    return [func for func, handler in TABLE.items() if handler in handlers]


def _register_gradient(func: Any) -> None:
    """Register the backward operator of an operator with a rule.

    It is proportional to its first operand, the gradient.
    """
    first, *others = func._schema.arguments
    name = func.overloadpacket.__name__
    if name.endswith("_backward") and first.name.startswith("grad"):
        forward = name.removesuffix("_backward")
        packets = [getattr(aten, x, None) for x in (forward, f"{forward}_forward")]
        overloads = [getattr(x, y) for x in packets if x is not None for y in x.overloads()]
        if not RULES.keys().isdisjoint(overloads):
            is_of_loss = any(x.name == "reduction" for x in others)
            homogeneous(func, placing="by size" if is_of_loss else "by rule")


@functools.lru_cache(maxsize=256)
def _places_of_numbers(operator: Any) -> list[int]:
    names = ("self", "other", "src", "source", "min", "max")
    return [i for i, x in enumerate(operator._schema.arguments) if x.name in names]


def plain_operand(x: Any) -> Any:
    """Return an operand in float32; indices and masks unchanged."""
    if is_scaled(x):
        return number(x).plain()
    return x.to(torch.float32) if is_float(x) else x


@contextlib.contextmanager
def fallback() -> Iterator[None]:
    """Compute operators without a rule in plain float32, and scale the results by size.

    Outside of this context, such operators raise. The backward pass must also be within it, if that
    has no rule. Numbers beyond the range of float32 are lost.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor([0.5, 1.0]), mcf.scaling.scaled(torch.float16))
        >>> with mcf.scaling.fallback():
        ...     torch.special.i0(x)
        MCFTensor([1.0635, 1.2656], format=scaled(float16), exponent=0)
    """
    token = _FALLBACK.set(True)
    try:
        yield
    finally:
        _FALLBACK.reset(token)


def follow_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a PyTorch operator on arguments with scaled tensors."""
    return _handler(func)(func, *args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _handler(func: Any) -> Handler:
    own: Handler | None = None
    if func not in RULES and not func._schema.is_mutable:
        _register_gradient(func)
    if func in RULES:
        own = functools.partial(_finished, RULES[func])
    elif "out" in func._overloadname.split("_"):
        own = _given_out
    elif (functional := _functional(func)) in RULES:
        own = functools.partial(_written, RULES[functional])
    return handler_of(func, own, _foreach, _viewed) or _without_rule


def _foreach(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an operation to each tensor in turn, since every tensor has its scale."""
    call = ListCall(func, args, kwargs)
    made = call.by_torch([None] * call.count)
    return None if call.in_place else made


def _functional(func: Any) -> Any:
    """Return `add` for `add_`, or None for an operator that writes to nothing."""
    name, is_written = func.overloadpacket.__name__, func._schema.is_mutable
    packet = getattr(aten, name[:-1], None) if is_written and name.endswith("_") else None
    return getattr(packet, func._overloadname, None)


def result_format(tree: Any, *, keep_tails: bool) -> ScaledFormat:
    """Return the format of results from the scaled tensors in a tree of arguments."""
    found = [x for x in leaves(tree) if is_scaled(x)]
    formats = [x.format for x in found if x.dim()] or [x.format for x in found]
    return promoted(formats, keep_tails=keep_tails)


def _finished(found: ScalingRule, func: Any, *args: Any, **kwargs: Any) -> Any:
    result = found.function(*args, **kwargs)
    if isinstance(result, Tensor):
        return result
    name = func.overloadpacket.__name__
    format = result_format((args, kwargs), keep_tails=found.keeps_tails)
    if isinstance(result, Unrounded):
        return stored(result, format, name)
    if isinstance(result, tuple):
        return tuple(stored(x, format, name) if isinstance(x, Unrounded) else x for x in result)
    return result


def _written(found: ScalingRule, func: Any, target: Tensor, *others: Any, **kwargs: Any) -> Tensor:
    if not is_scaled(target):
        rounding(func, filter(is_scaled, leaves((others, kwargs))), target)
    result = found.function(target, *others, **kwargs)
    if isinstance(result, Tensor):
        result = number(result)
    return write_to(target, result)


def _given_out(func: Any, *args: Any, out: Tensor, **inputs: Any) -> Tensor:
    """Carry out an operator with out=, as amsgrad calls it."""
    result = func.overloadpacket(*args, **inputs)
    if out.shape != result.shape:
        raise ValueError(
            f"{func}: out= has the shape {tuple(out.shape)}, and the result "
            f"{tuple(result.shape)}; a scaled tensor cannot be resized"
        )
    return out.copy_(result)


def _viewed(func: Any, base: Tensor, *others: Any, **kwargs: Any) -> Any:
    """Return views of each component, with the exponent of the base."""
    if not is_scaled(base):
        return _without_rule(func, base, *others, **kwargs)
    *data, s = base._held()
    views = [func(part, *others, **kwargs) for part in data]
    return each_made_of(views, s, base._format, base._base_components or tuple(data))


def _without_rule(func: Any, *args: Any, **kwargs: Any) -> Any:
    if not _FALLBACK.get() or func._schema.is_mutable or func.namespace in _BETWEEN_PROCESSES:
        formats = [
            f"{x.format.name} of shape {tuple(x.shape)}"
            if is_scaled(x)
            else f"plain {x.dtype} of shape {tuple(x.shape)}"
            for x in leaves((args, kwargs))
            if isinstance(x, Tensor)
        ]
        if func.namespace in _BETWEEN_PROCESSES:
            raise NotImplementedError(
                f"{func}: scales do not travel between processes, given {', '.join(formats)}; "
                "train a scaled model in one process, send what mcf.as_plain(x, torch.float32) "
                "gives, or shard a model in mcf.bf16i8, whose range needs no scales"
            )
        repair = (
            "use the form that does not write in place"
            if func._schema.is_mutable
            else "compute it in float32 within `with mcf.scaling.fallback():`"
        )
        raise NotImplementedError(
            f"{func}: there is no rule for scales, given {', '.join(formats)}; {repair}, or take "
            "plain tensors with mcf.as_plain(x, torch.float32)"
        )
    name = func.overloadpacket.__name__
    count("fallback", name)
    plain_args, plain_kwargs = tree_map_only(MCFTensor, lambda x: number(x).plain(), (args, kwargs))
    format = result_format((args, kwargs), keep_tails=False)

    def back(x: Tensor) -> Tensor:
        return by_size(x, format) if x.is_floating_point() else x

    return tree_map_only(Tensor, back, func(*plain_args, **plain_kwargs))
