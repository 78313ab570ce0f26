"""torch's fused steps, `_fused_adam_` and its like: those of `steps.py` where expansions take part.

Lists may mix formats, plain parameters and plain states.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.noise import draw_key
from mcftensor.dispatch.operands import component_columns, require_one_base
from mcftensor.dispatch.registry import SHORTCUTS, TABLE, implements
from mcftensor.formats import PLAIN, Format, PlainFormat
from mcftensor.kernels.columns import places_of
from mcftensor.kernels.opaque import is_bare
from mcftensor.passes.steps import step_, take, unscale_
from mcftensor.tensor.deferred import compute_readers
from mcftensor.tensor.tensor import MCFTensor

aten = torch.ops.aten


# The formats of a parameter, its gradient and its states.
Formats = tuple[Format, ...]


def _fused(
    func: Any,
    rule: str,
    lists: Sequence[list[Tensor]],
    counts: list[Tensor],
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """A step of ours for what holds an expansion, and torch's own for the rest.

    Args:
        func: torch's operator.
        rule: that of ours.
        lists: parameters, gradients and lists of states, which are empty where there are none.
        counts: step counts, or nothing.
        options: the keywords of the operator.
        settings: what the rule makes of them; zeros and falsehoods have no effect.
    """
    columns = [*lists, counts] if counts else [*lists]
    if len(set(map(id, lists[0]))) < len(lists[0]):  # a parameter given twice takes two steps
        for i in range(len(lists[0])):
            one, count = [[x[i : i + 1] for x in lists], counts[i : i + 1]]
            _fused(func, rule, one, count, options, settings)
        return
    groups = _groups([x for x in lists if x])
    for formats in groups:  # before anything is written
        require_one_base("fused step", [f for f in formats if not isinstance(f, PlainFormat)])
    keys = _keys(groups, lists[0])
    scale = options.get("grad_scale")
    given = settings | {"grad_scale": scale, "found_inf": options.get("found_inf")}
    numbers = {"lr": options["lr"]} | {name: x for name, x in given.items() if _has_effect(x)}
    scaled: list[tuple[list[Tensor], Format]] = []
    for formats, rows in groups.items():
        own = columns
        if len(groups) > 1:
            own = [[x[i] for i in rows] if x else [] for x in columns]
        if all(isinstance(f, PlainFormat) for f in formats):
            func(*own, **options)
            continue
        found = [x for x in own[: len(lists)] if x]
        _compute_readers(formats, found)
        parts = [component_columns(x, f) for x, f in zip(found, formats, strict=True)]
        parameters, gradients, *states = parts
        scaled.append(([x for column in gradients for x in column], formats[1]))
        targets = [*parameters, *chain(*states)]
        order = (formats[1], formats[0], *formats[2:])
        steps = own[len(lists)] if counts else []
        own_keys = [keys[i] for i in rows if i in keys]
        if is_bare(*gradients, *targets, steps, own_keys, list(numbers.values())):
            take(rule, order, gradients, targets, steps, own_keys, numbers)
        else:
            step_(
                rule,
                [f.name for f in order],
                [*chain(*targets)],
                [*chain(*gradients)],
                [*steps],
                own_keys,
                [*numbers],
                list(map(_as_tensor, numbers.values())),
            )
    if scale is not None:
        for flat, format in scaled:
            unscale_(flat, format.name, scale)


def _as_tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.scalar_tensor(x, dtype=torch.float64)


def _has_effect(x: Any) -> bool:
    return isinstance(x, Tensor) or x not in (None, 0)


def _compute_readers(formats: Formats, lists: Sequence[list[Tensor]]) -> None:
    """Compute what waits for tensors that are to be written to, gradients too."""
    for format, found in zip(formats, lists, strict=True):
        if not isinstance(format, PlainFormat):
            for x in found:
                if x._readers:  # type: ignore[attr-defined]
                    compute_readers(x)


def _keys(groups: dict[Formats, list[int]], params: Sequence[Tensor]) -> dict[int, Tensor]:
    """A key for each row that rounds stochastically, drawn in the order of rows."""
    drawing = [
        rows
        for (parameter, _, *states), rows in groups.items()
        if any(f.rounding == "stochastic" for f in (parameter, *states))
    ]
    return {i: draw_key(params[i].device) for i in sorted(chain(*drawing))}


def _format(x: Tensor) -> Format:
    return x._format if isinstance(x, MCFTensor) else PLAIN[x.dtype]


def _groups(quantities: Sequence[list[Tensor]]) -> dict[Formats, list[int]]:
    """Which rows of lists of tensors are in which formats."""
    columns = [list(map(_format, quantity)) for quantity in quantities]
    if all(len(set(column)) == 1 for column in columns):  # mostly
        return {tuple([column[0] for column in columns]): list(range(len(columns[0])))}
    return places_of(zip(*columns, strict=True))


@implements(aten._fused_adam_, aten._fused_adamw_)  # Adam and AdamW with fused=True
def fused_adam(
    func: Any,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    **options: Any,
) -> None:
    """torch.optim.Adam and AdamW with fused=True."""
    decay = "decay" if func.overloadpacket is aten._fused_adamw_ else "l2"
    _fused(
        func,
        "adam",
        [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if options["amsgrad"] else []],
        steps,
        options,
        {name: options[name] for name in ("beta1", "beta2", "eps", "maximize")}
        | {decay: options["weight_decay"]},
    )


@implements(aten._fused_sgd_)  # SGD with fused=True
def fused_sgd(
    func: Any, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], **options: Any
) -> None:
    """torch.optim.SGD with fused=True."""
    _fused(
        func,
        "sgd",
        [params, grads, buffers],
        [],
        options,
        {name: options[name] for name in ("momentum", "dampening", "nesterov", "maximize")}
        | {"l2": options["weight_decay"], "first": options["is_first_step"]},
    )


@implements(aten._fused_adagrad_)  # Adagrad with fused=True
def fused_adagrad(
    func: Any,
    params: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    steps: list[Tensor],
    **options: Any,
) -> None:
    """torch.optim.Adagrad with fused=True."""
    _fused(
        func,
        "adagrad",
        [params, grads, sums],
        steps,
        options,
        {name: options[name] for name in ("lr_decay", "eps", "maximize")}
        | {"l2": options["weight_decay"]},
    )


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
