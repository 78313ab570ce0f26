"""torch's fused steps, `_fused_adam_` and its like: those of `steps.py` where expansions take part.

Lists may mix formats, plain parameters and plain states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mcftensor.deferred import compute_readers
from mcftensor.dispatch.operands import require_one_base, term_columns
from mcftensor.dispatch.table import SHORTCUTS, TABLE, implements
from mcftensor.formats import Format
from mcftensor.noise import draw_key
from mcftensor.operators import is_bare, places_of
from mcftensor.steps import adagrad_, adam_, sgd_, unscale_
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten


def _fused(
    func: Any,
    lists: Sequence[list[Tensor]],
    counts: Sequence[list[Tensor]],
    options: dict[str, Any],
    step: Callable[..., None],
    *settings: Any,
) -> None:
    """A step of ours for what holds an expansion, and torch's own for the rest.

    Args:
        func: torch's operator.
        lists: parameters, gradients and lists of states, which are empty where there are none.
        counts: a list of step counts, or nothing.
        options: the keywords of the operator.
        step: one of `steps.py`.
        settings: its last arguments.
    """
    groups = _groups([x for x in lists if x])
    if len(set(map(id, lists[0]))) < len(lists[0]):  # a parameter given twice takes two steps
        for i in range(len(lists[0])):
            one = [[x[i]] if x else [] for x in (*lists, *counts)]
            _fused(func, one[: len(lists)], one[len(lists) :], options, step, *settings)
        return
    for formats in groups:  # before anything is written
        require_one_base("fused step", [f for f in formats if f is not None])
    keys = _keys(groups, lists[0])
    scale, scaled = options.get("grad_scale"), []
    for formats, rows in groups.items():
        own: Sequence[list[Tensor]] = (*lists, *counts)
        if len(groups) > 1:
            own = [[x[i] for i in rows] if x else [] for x in own]
        if not any(formats):
            func(*own, **options)
            continue
        quantities = zip([x for x in own[: len(lists)] if x], formats, strict=True)
        targets, gradients, *states = (term_columns(x, f) for x, f in quantities)
        written = [targets, *states]
        flat = list(chain(*gradients))
        scaled.append((flat, len(gradients)))
        flat_targets = list(chain(*chain(*written)))
        compute_readers(flat + flat_targets)  # before they are written to
        lr = options["lr"]
        step(
            flat_targets,
            flat,
            [len(gradients), *map(len, written)],
            [keys[i] for i in rows] if any(_are_stochastic(formats)) else [],
            _are_stochastic(formats),
            *own[len(lists) :],
            lr if isinstance(lr, Tensor) else torch.scalar_tensor(lr, dtype=torch.float64),
            scale,
            options.get("found_inf"),
            *settings,
        )
    if scale is not None:
        for flat, terms in scaled:
            unscale_(flat, terms, scale)


# The formats of a parameter, its gradient and its states.
Formats = tuple[Format | None, ...]


def _are_stochastic(formats: Formats) -> list[bool]:
    """Which of a parameter and its states round so."""
    parameter, _, *states = formats
    return [f is not None and f.rounding == "stochastic" for f in (parameter, *states)]


def _keys(groups: dict[Formats, list[int]], params: Sequence[Tensor]) -> dict[int, Tensor]:
    """A key for each row that rounds stochastically, drawn in the order of rows."""
    drawing = [rows for formats, rows in groups.items() if any(_are_stochastic(formats))]
    return {i: draw_key(params[i].device) for i in sorted(chain(*drawing))}


def _groups(quantities: Sequence[list[Tensor]]) -> dict[Formats, list[int]]:
    """Which rows of lists of tensors are in which formats; a plain tensor is in none."""
    columns = [
        [x._format if isinstance(x, MCFTensor) else None for x in quantity]
        for quantity in quantities
    ]
    if all(len(set(map(id, column))) == 1 for column in columns):  # mostly
        return {tuple([column[0] for column in columns]): list(range(len(columns[0])))}
    return places_of(zip(*columns, strict=True))


@implements(aten._fused_adam_, aten._fused_adamw_)
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
    _fused(
        func,
        [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if options["amsgrad"] else []],
        [steps],
        options,
        adam_,
        options["beta1"],
        options["beta2"],
        options["weight_decay"],
        options["eps"],
        options["maximize"],
        func.overloadpacket is aten._fused_adamw_,
    )


@implements(aten._fused_sgd_)
def fused_sgd(
    func: Any, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], **options: Any
) -> None:
    """torch.optim.SGD with fused=True."""
    _fused(
        func,
        [params, grads, buffers],
        [],
        options,
        sgd_,
        options["momentum"],
        options["dampening"],
        options["weight_decay"],
        options["nesterov"],
        options["maximize"],
        options["is_first_step"],
    )


@implements(aten._fused_adagrad_)
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
        [params, grads, sums],
        [steps],
        options,
        adagrad_,
        options["lr_decay"],
        options["weight_decay"],
        options["eps"],
        options["maximize"],
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
