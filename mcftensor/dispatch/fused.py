"""torch's fused steps, `_fused_adam_` and its like: those of `steps.py` where expansions take part.

Lists may mix formats, plain parameters and plain states. Gradients are unscaled here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.noise import draw_key
from mcftensor.dispatch.operands import (
    component_columns,
    count_write,
    plain,
    rounding_key,
)
from mcftensor.dispatch.registry import SHORTCUTS, TABLE, implements
from mcftensor.formats import PLAIN, Format
from mcftensor.formats.promotion import require_one_base
from mcftensor.kernels.columns import places_of
from mcftensor.kernels.opaque import is_bare
from mcftensor.passes.steps import step_, take, unscale_
from mcftensor.tensor.tensor import LiftedTensor, MCFTensor

aten = torch.ops.aten

# The formats of a parameter, its gradient and its states.
Formats = tuple[Format, ...]

# By torch's name: the rule of ours, and what it calls torch's decay of weights.
_RULES = {
    "_fused_adam_": ("adam", "l2"),
    "_fused_adamw_": ("adam", "decay"),
    "_fused_sgd_": ("sgd", "l2"),
    "_fused_adagrad_": ("adagrad", "l2"),
}


@implements(
    aten._fused_adam_,  # Adam with fused=True
    aten._fused_adamw_,  # AdamW with fused=True
    aten._fused_sgd_,  # SGD with fused=True
    aten._fused_adagrad_,  # Adagrad with fused=True
)
def fused_step(func: Any, *lists: list[Tensor], **options: Any) -> None:
    """A step of ours for what holds an expansion, and torch's own for the rest.

    The lists are of parameters, gradients, states and, but for SGD, counts of steps.
    """
    params, grads, *others = lists
    if LiftedTensor in map(type, grads):
        lists = (params, [_plain_gradient(x) for x in grads], *others)
    if len(set(map(id, params))) < len(params):  # a parameter given twice takes two steps
        for i in range(len(params)):
            fused_step(func, *[x[i : i + 1] for x in lists], **options)
        return
    if options.get("is_first_step") and options.get("found_inf") is not None:
        for buffer in lists[2]:  # which SGD makes without values, and a skipped step leaves so
            buffer.zero_()
    rule, decay = _RULES[func.overloadpacket.__name__]
    if options.get("amsgrad") is False:
        lists = (*lists[:4], [], lists[-1])
    quantities = lists if rule == "sgd" else lists[:-1]
    groups = _groups([x for x in quantities if x])
    for formats in groups:  # before anything is written
        require_one_base("fused step", [f for f in formats if f.arithmetic != "plain"])
    keys = _keys(groups, [x for x in (params, *quantities[2:]) if x])
    names = {"weight_decay": decay, "is_first_step": "first"}
    numbers = {
        names.get(name, name): x
        for name, x in options.items()
        if name == "lr" or isinstance(x, Tensor) or x not in (None, 0)  # others have no effect
    }
    scale = options.get("grad_scale")
    scaled: list[tuple[list[Tensor], Format]] = []
    for formats, rows in groups.items():
        own = lists
        if len(groups) > 1:
            own = tuple([x[i] for i in rows] if x else [] for x in lists)
        if all(f.arithmetic == "plain" for f in formats):
            func(*own, **options)
            continue
        found = [x for x in own[: len(quantities)] if x]
        parts = [component_columns(x, f) for x, f in zip(found, formats, strict=True)]
        parameters, gradients, *states = parts
        scaled.append(([x for column in gradients for x in column], formats[1]))
        targets = [*parameters, *chain(*states)]
        order = (formats[1], formats[0], *formats[2:])
        steps = [] if rule == "sgd" else own[-1]
        own_keys = [keys[i] for i in rows if i in keys]
        if is_bare(*gradients, *targets, steps, own_keys, list(numbers.values())):
            take(rule, order, gradients, targets, steps, own_keys, numbers)
        else:
            step_(
                rule,
                [f.name for f in order],
                [*chain(*targets)],
                [*chain(*gradients)],
                steps,
                own_keys,
                [*numbers],
                list(map(plain, numbers.values())),
            )
        count_write(list(chain(found[0], *found[2:])))
    if scale is not None:
        for flat, format in scaled:
            unscale_(flat, format.name, scale)


def _plain_gradient(x: Tensor) -> Tensor:
    """A gradient as it was before the step, if that has not written to it."""
    return x._component0 if isinstance(x, LiftedTensor) else x


def _keys(
    groups: dict[Formats, list[int]], targets: Sequence[Sequence[Tensor]]
) -> dict[int, Tensor]:
    """A key for each row whose rounding takes one, drawn in the order of rows. What is balanced
    goes by the first count of a row, or by the key that others beside it have drawn."""
    drawing = [
        rows
        for (parameter, _, *states), rows in groups.items()
        if any(f.rounding == "stochastic" for f in (parameter, *states))
    ]
    keys = {i: draw_key(targets[0][i].device) for i in sorted(chain(*drawing))}
    for (parameter, _, *states), rows in groups.items():
        balanced = next((f for f in (parameter, *states) if f.rounding == "balanced"), None)
        if balanced is not None:
            for i in rows:
                counted = rounding_key(balanced, [x[i] for x in targets])
                assert counted is not None
                keys.setdefault(i, counted)
    return keys


def _format(x: Tensor) -> Format:
    return x._format if isinstance(x, MCFTensor) else PLAIN[x.dtype]


def _groups(quantities: Sequence[list[Tensor]]) -> dict[Formats, list[int]]:
    """Which rows of lists of tensors are in which formats."""
    columns = [list(map(_format, quantity)) for quantity in quantities]
    if all(len(set(column)) == 1 for column in columns):  # mostly
        return {tuple([column[0] for column in columns]): list(range(len(columns[0])))}
    return places_of(zip(*columns, strict=True))


def _directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of a step without PyTorch's dispatcher, which takes long over long lists;
    NotImplemented where that has something to do."""
    if len(args) < 2 or torch.is_grad_enabled() or not is_bare():
        return NotImplemented
    # The dispatcher gives lists their places and numbers their types, and refuses negative views.
    named = [x for name, x in kwargs.items() if name not in ("lr", "grad_scale", "found_inf")]
    gradients = [x for x in args[1] if type(x) is Tensor]
    if any(isinstance(x, (list, tuple, Tensor)) for x in named) or any(
        map(Tensor.is_neg, gradients)
    ):
        return NotImplemented
    packet = getattr(aten, func.__name__)
    operator = packet.tensor_lr if isinstance(kwargs["lr"], Tensor) else packet.default
    return TABLE[operator](operator, *args, **kwargs)


for _step in (torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_):
    SHORTCUTS[_step] = _directly


@implements(aten._amp_foreach_non_finite_check_and_unscale_.default)  # GradScaler
def unscale(func: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place, and note in `found_inf`, on its device, that one is infinite."""
    others = [x for x in grads if not isinstance(x, MCFTensor)]
    if others:
        func(others, found_inf, inv_scale)
    for x in grads:
        if isinstance(x, MCFTensor):
            infinite = ~x.components[0].isfinite().all()
            found_inf.copy_(torch.maximum(found_inf, infinite.to(found_inf.dtype)))
            x.mul_(inv_scale)
