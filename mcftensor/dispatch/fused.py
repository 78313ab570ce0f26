"""The fused steps of SGD, Adam and AdamW: one rounding a step for each parameter and state.

A step reads terms, computes on numbers and writes terms. What a number is depends on the format:
a plain tensor of the wide type for bases of 16 bits, an expansion for the others. The update
rules below are written once, for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor import eft, expansion, wide
from mcftensor.conversion import convert_terms
from mcftensor.dispatch.operands import expansions, require_one_base, store, terms
from mcftensor.dispatch.table import implements
from mcftensor.formats import Format
from mcftensor.noise import draw_key, uniform
from mcftensor.operators import inline, opaque, regroup
from mcftensor.rounding import round_to, split_terms
from mcftensor.tensor import MCFTensor

aten = torch.ops.aten
correct_sqrt = inline(eft.sqrt)


# ------------------------------------------------------------------------------- update rules


def integer_power(base: float, exponent: Tensor) -> Tensor | float:
    """base ** exponent in float64 for a whole number in a tensor, by repeated squaring.

    The same bits on every device, which the power functions of mathematics libraries do not give.
    On a CPU the number is at hand, and the same products are formed without tensors.
    """
    squares = [base]
    for _ in range(31):
        squares.append(squares[-1] * squares[-1])
    if exponent.device.type == "cpu":
        whole = int(exponent.item())
        numbers = [square if whole >> i & 1 else 1.0 for i, square in enumerate(squares)]
        while len(numbers) > 1:
            numbers = [a * b for a, b in zip(numbers[0::2], numbers[1::2], strict=True)]
        return numbers[0]
    places = torch.arange(32, device=exponent.device)
    bits = (exponent.to(torch.int64) >> places) & 1
    table = torch.tensor(squares, dtype=torch.float64, device=exponent.device)
    factors = torch.where(bits == 1, table, 1.0)
    while len(factors) > 1:
        factors = factors[0::2] * factors[1::2]
    return factors[0]


def adam_update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    v_max: Tensor | None,
    *,
    rate: Tensor | float,
    root_correction: Tensor | float,
    beta1: float,
    beta2: float,
    l2: float,
    decay: Tensor | float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Adam's and AdamW's change of p, and the new moments.

    `rate` is lr / (1 - beta1^t), `root_correction` the root of 1 - beta2^t, `decay` lr times the
    decoupled weight decay.
    """
    if l2 != 0:
        g = g + p * l2
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    if v_max is not None:
        v_max = torch.maximum(v_max, v)
    denominator = _sqrt(v if v_max is None else v_max) / root_correction + eps
    change = m / denominator * -rate
    if decay is not None:
        change = change - p * decay
    return change, m, v, v_max


def _sqrt(x: Tensor) -> Tensor:
    return torch.sqrt(x) if isinstance(x, MCFTensor) else correct_sqrt(x)


def _root_correction(beta2: float, step: Tensor) -> Tensor | float:
    correction = 1 - integer_power(beta2, step)
    return correct_sqrt(correction) if isinstance(correction, Tensor) else math.sqrt(correction)


def sgd_update(
    p: Tensor,
    g: Tensor,
    buffer: Tensor | None,
    lr: Tensor | float,
    *,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> tuple[Tensor, Tensor | None]:
    """SGD's change of p, and the new momentum buffer."""
    if weight_decay != 0:
        g = g + p * weight_decay
    if buffer is not None:
        buffer = g if first else buffer * momentum + g * (1 - dampening)
        g = g + buffer * momentum if nesterov else buffer
    return g * -lr, buffer


# ------------------------------------------------------------------------- terms and numbers


def _format(like: Sequence[Tensor], stochastic: bool = False) -> Format | None:
    """The format of a quantity; None of a plain tensor and of nothing."""
    if len(like) < 2:
        return None
    return Format(like[0].dtype, len(like), "stochastic" if stochastic else "nearest")


def _evaluation(
    formats: Sequence[Format | None], *quantities: Sequence[Tensor]
) -> tuple[torch.dtype | None, Format]:
    """The type to evaluate in, or None and the format that networks compute with."""
    found = [f for f in formats if f is not None]
    kinds = {f.wide for f in found}
    if None in kinds:
        terms = max(f.terms + (f.rounding == "stochastic") for f in found)
        return None, Format(found[0].base, terms)
    plain = [q[0] for q in quantities if len(q) == 1]
    in_float32 = kinds == {torch.float32} and all(x.dtype.itemsize == 2 for x in plain)
    return torch.float32 if in_float32 else torch.float64, found[0]


def _number(quantity: Sequence[Tensor], wide_type: torch.dtype | None, format: Format) -> Tensor:
    if wide_type is not None:
        return wide.total(wide.levels(quantity, wide_type))
    if len(quantity) == 1:
        return MCFTensor(split_terms(quantity[0], format.base, format.terms), format)
    return MCFTensor(convert_terms(tuple(quantity), format.base, format.terms, None), format)


def _gradient(quantity: Sequence[Tensor], wide_type: torch.dtype | None) -> Tensor:
    """A gradient as a number; a plain one stays plain, with more bits."""
    if len(quantity) == 1:
        return quantity[0].to(wide_type or torch.float64)
    if wide_type is not None:
        return wide.total(wide.levels(quantity, wide_type))
    return MCFTensor(list(quantity))


def _terms_of(number: Tensor, like: Sequence[Tensor], noise: Tensor | None = None) -> list[Tensor]:
    """A number in the format of a quantity, which is an expansion or one plain tensor."""
    if isinstance(number, MCFTensor):
        if len(like) == 1:
            return [expansion.collapse(number.components, like[0].dtype)]
        return list(convert_terms(number.components, like[0].dtype, len(like), noise))
    if len(like) == 1:
        return [round_to(number, like[0].dtype)]
    return split_terms(number, like[0].dtype, len(like), noise)


def _added(
    p: Sequence[Tensor], p_number: Tensor, change: Tensor, wide_type: torch.dtype | None
) -> Tensor:
    if wide_type is None:
        return p_number + change
    leading, *tails = wide.levels(p, wide_type)
    return leading + (wide.total(tails) + change if tails else change)


def _unless(found_inf: Tensor | None, new: list[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    if found_inf is None:
        return new
    return [torch.where(found_inf == 1, o, n) for n, o in zip(new, old, strict=True)]


def _rounded(
    numbers: Sequence[Tensor | None],
    quantities: Sequence[Sequence[Tensor]],
    noises: Sequence[Tensor | None],
    found_inf: Tensor | None,
) -> list[Tensor]:
    """New numbers in the formats of the quantities, one after the other; the old if one is inf."""
    results: list[Tensor] = []
    for new, old, noise in zip(numbers, quantities, noises, strict=True):
        if new is not None:
            results += _unless(found_inf, _terms_of(new, old, noise), old)
    return results


def _noises(
    key: Tensor | None, stochastic: Sequence[bool], shape: torch.Size, start: int
) -> list[Tensor | None]:
    """What rounds each quantity stochastically; None where it is rounded to nearest."""
    return [
        uniform(key, shape, start, stream) if key is not None and flag else None
        for stream, flag in enumerate(stochastic)
    ]


def _scalar(x: Tensor) -> Tensor | float:
    """A number that every block takes part in: on a CPU as a Python float, which is quicker."""
    return x.item() if x.device.type == "cpu" else x


def _like_all(*quantities: Sequence[Tensor]) -> list[Tensor]:
    layout = quantities[0][0]
    return [torch.empty_like(layout, dtype=term.dtype) for q in quantities for term in q]


def _empty_adam(
    p: Any,
    gradient: Any,
    m: Any,
    v: Any,
    v_max: Any,
    step: Any,
    lr: Any,
    grad_scale: Any,
    *rest: Any,
) -> list[Tensor]:
    return _like_all(p, m, v, v_max, [] if grad_scale is None else gradient)


def _empty_sgd(
    p: Any, gradient: Any, buffer: Any, lr: Any, grad_scale: Any, *rest: Any
) -> list[Tensor]:
    return _like_all(p, buffer, [] if grad_scale is None else gradient)


@opaque(_empty_adam)
def adam_step(
    p: Sequence[Tensor],
    gradient: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    v_max: Sequence[Tensor],
    step: Tensor,
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    key: Tensor | None,
    stochastic: Sequence[bool],
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled: bool,
) -> list[Tensor]:
    """The new terms of p, m, v and v_max, one after the other, then the unscaled gradient.

    `stochastic` says which of the four round so; they draw from streams of one key.
    """
    quantities = [p, m, v, v_max]
    formats = [_format(q, s) for q, s in zip(quantities, stochastic, strict=True)]
    wide_type, format = _evaluation([*formats, _format(gradient)], *quantities)
    rate = _scalar(lr.to(torch.float64))
    settings: dict[str, Any] = {
        "rate": rate / (1 - integer_power(beta1, step)),
        "root_correction": _root_correction(beta2, step),
        "beta1": beta1,
        "beta2": beta2,
        "l2": 0.0 if decoupled else weight_decay,
        "decay": rate * weight_decay if decoupled and weight_decay != 0 else None,
        "eps": eps,
    }

    lengths = [len(gradient), len(p), len(m), len(v), len(v_max)]

    def step_block(tensors: Sequence[Tensor], start: int) -> list[Tensor]:
        grad, p_, m_, v_, max_ = regroup(tensors, lengths)
        noises = _noises(key, stochastic, p_[0].shape, start)
        unscaled = _gradient(grad, wide_type)
        if grad_scale is not None:
            unscaled = unscaled / grad_scale
        g = -unscaled if maximize else unscaled
        number, m_old, v_old = (_number(q, wide_type, format) for q in (p_, m_, v_))
        max_old = _number(max_, wide_type, format) if max_ else None
        change, *moments = adam_update(number, g, m_old, v_old, max_old, **settings)
        updated = [_added(p_, number, change, wide_type), *moments]
        results = _rounded(updated, (p_, m_, v_, max_), noises, found_inf)
        return results + (_terms_of(unscaled, grad) if grad_scale is not None else [])

    return in_blocks(step_block, [*gradient, *p, *m, *v, *v_max])


@opaque(_empty_sgd)
def sgd_step(
    p: Sequence[Tensor],
    gradient: Sequence[Tensor],
    buffer: Sequence[Tensor],
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    key: Tensor | None,
    stochastic: Sequence[bool],
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> list[Tensor]:
    """The new terms of p and of the momentum buffer, then the unscaled gradient."""
    formats = [_format(q, s) for q, s in zip((p, buffer), stochastic, strict=True)]
    wide_type, format = _evaluation([*formats, _format(gradient)], p, buffer)
    settings: dict[str, Any] = {
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "first": first,
    }

    lengths = [len(gradient), len(p), len(buffer)]
    rate = _scalar(lr.to(torch.float64))

    def step_block(tensors: Sequence[Tensor], start: int) -> list[Tensor]:
        grad, p_, buffer_ = regroup(tensors, lengths)
        noises = _noises(key, stochastic, p_[0].shape, start)
        unscaled = _gradient(grad, wide_type)
        if grad_scale is not None:
            unscaled = unscaled / grad_scale
        g = -unscaled if maximize else unscaled
        number = _number(p_, wide_type, format)
        old = _number(buffer_, wide_type, format) if buffer_ else None
        change, new = sgd_update(number, g, old, rate, **settings)
        updated = [_added(p_, number, change, wide_type), new]
        results = _rounded(updated, (p_, buffer_), noises, found_inf)
        return results + (_terms_of(unscaled, grad) if grad_scale is not None else [])

    return in_blocks(step_block, [*gradient, *p, *buffer])


# ------------------------------------------------------------------------------ torch's operators


def _write_back(results: list[Tensor], targets: Sequence[Tensor], grad: Tensor) -> None:
    """Store new terms in their targets, and an unscaled gradient, if there is one, in its own."""
    *groups, unscaled = regroup(results, [len(terms(x)) for x in [*targets, grad]])
    for target, pieces in zip(targets, groups, strict=True):
        store(target, pieces) if isinstance(target, MCFTensor) else target.copy_(pieces[0])
    if unscaled:
        store(grad, unscaled)


def _rounding(quantities: Sequence[Tensor | None]) -> tuple[Tensor | None, list[bool]]:
    """A key, if one is needed, and which of the quantities round stochastically."""
    flags = [isinstance(x, MCFTensor) and x.format.rounding == "stochastic" for x in quantities]
    device = next(x.device for x in quantities if x is not None)
    return draw_key(device) if any(flags) else None, flags


def _number_tensor(lr: float | Tensor) -> Tensor:
    return lr if isinstance(lr, Tensor) else torch.scalar_tensor(lr, dtype=torch.float64)


def _divide(lists: Sequence[Sequence[Tensor]]) -> tuple[list[int], list[list[Tensor]]]:
    """The indices at which some list holds an expansion, and the lists without those."""
    found = [expansions([x[i] for x in lists if x]) for i in range(len(lists[0]))]
    for together in found:  # before anything is written
        require_one_base("fused step", [x.format for x in together])
    ours = [i for i, together in enumerate(found) if together]
    others = sorted(set(range(len(lists[0]))) - set(ours))
    return ours, [[x[i] for i in others] if x else [] for x in lists]


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
    maxima = max_exp_avg_sqs if options["amsgrad"] else []
    ours, rest = _divide([params, grads, exp_avgs, exp_avg_sqs, maxima, steps])
    if rest[0]:
        func(*rest, **options)
    for i in ours:
        states = [params[i], exp_avgs[i], exp_avg_sqs[i], *maxima[i : i + 1]]
        results = adam_step(
            terms(params[i]),
            terms(grads[i]),
            terms(exp_avgs[i]),
            terms(exp_avg_sqs[i]),
            terms(maxima[i]) if maxima else [],
            steps[i],
            _number_tensor(options["lr"]),
            options.get("grad_scale"),
            options.get("found_inf"),
            *_rounding([*states, None][:4]),
            options["beta1"],
            options["beta2"],
            options["weight_decay"],
            options["eps"],
            options["maximize"],
            func.overloadpacket is aten._fused_adamw_,
        )
        _write_back(results, states, grads[i])


@implements(aten._fused_sgd_)
def fused_sgd(
    func: Any,
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    **options: Any,
) -> None:
    """torch.optim.SGD with fused=True."""
    ours, rest = _divide([params, grads, buffers])
    if rest[0]:
        func(*rest, **options)
    for i in ours:
        results = sgd_step(
            terms(params[i]),
            terms(grads[i]),
            terms(buffers[i]) if buffers else [],
            _number_tensor(options["lr"]),
            options.get("grad_scale"),
            options.get("found_inf"),
            *_rounding([params[i], buffers[i] if buffers else None]),
            options["momentum"],
            options["dampening"],
            options["weight_decay"],
            options["nesterov"],
            options["maximize"],
            options["is_first_step"],
        )
        _write_back(results, [params[i], *buffers[i : i + 1]], grads[i])
