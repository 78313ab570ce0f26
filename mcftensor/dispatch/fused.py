"""torch's fused steps, `_fused_adam_` and its like: those of `steps.py` where expansions take part.

Lists may mix formats, plain parameters and plain states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.operands import require_one_base, terms
from mcftensor.dispatch.table import implements
from mcftensor.noise import draw_key
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
    rows = list(zip(*[x for x in lists if x], strict=True))
    ours: list[int] = []
    others: list[int] = []
    for i, row in enumerate(rows):  # before anything is written
        formats = [x.format for x in row if isinstance(x, MCFTensor)]
        require_one_base("fused step", formats)
        (ours if formats else others).append(i)
    if others:
        func(*([x[i] for i in others] if x else [] for x in (*lists, *counts)), **options)
    if not ours:
        return
    if len({id(rows[i][0]) for i in ours}) < len(ours):  # a parameter given twice takes two steps
        for i in ours:
            one = [[x[i]] if x else [] for x in (*lists, *counts)]
            _fused(func, one[: len(lists)], one[len(lists) :], options, step, *settings)
        return
    targets: list[Tensor] = []
    gradients: list[Tensor] = []
    lengths: list[int] = []
    keys: list[Tensor] = []
    stochastic: list[bool] = []
    for i in ours:
        param, grad, *states = rows[i]
        gradient = terms(grad)
        gradients += gradient
        lengths.append(len(gradient))
        flags = []
        for x in (param, *states):
            is_expansion = isinstance(x, MCFTensor)
            own = x.components if is_expansion else (x,)  # to be written to
            targets += own
            lengths.append(len(own))
            flags.append(is_expansion and x.format.rounding == "stochastic")
        stochastic += flags
        if True in flags:
            keys.append(draw_key(param.device))
    lr, scale = options["lr"], options.get("grad_scale")
    step(
        targets,
        gradients,
        lengths,
        keys,
        stochastic,
        *([count[i] for i in ours] for count in counts),
        lr if isinstance(lr, Tensor) else torch.scalar_tensor(lr, dtype=torch.float64),
        scale,
        options.get("found_inf"),
        *settings,
    )
    if scale is not None:
        unscale_(gradients, lengths[:: len(rows[0])], scale)


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
