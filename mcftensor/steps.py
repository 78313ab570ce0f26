"""The fused steps of SGD, Adam, AdamW and Adagrad: one rounding a step for each result.

A step reads terms, computes on numbers and writes terms, in one pass over memory for all tensors.
What a number is depends on the format: a tensor of the wide type for bases of 16 bits, `Number`
for the others. The update rules are written once, for both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor import eft, wide
from mcftensor.conversion import convert_terms
from mcftensor.formats import Format
from mcftensor.kernels import Body, Calls, run
from mcftensor.noise import uniform
from mcftensor.number import Number
from mcftensor.operators import columns, opaque, regroup
from mcftensor.rounding import collapse_terms, round_to, split_terms

# ------------------------------------------------------------------------------- update rules

# Of a parameter, a gradient and states: the change of the parameter, and the new states. `s` holds
# the numbers of a step; those that are zero and so without effect are not in it.
Rule = Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], tuple[Any, Sequence[Any]]]


def adam(p: Any, g: Any, states: Sequence[Any], s: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    """Adam and AdamW, with the larger second moment as a third state for AMSGrad."""
    m, v, *v_max = states
    if "l2" in s:
        g = g + p * s["l2"]
    m = m + (g - m) * s["1 - beta1"]
    v = v * s["beta2"] + g * g * s["1 - beta2"]
    v_max = [_maximum(x, v) for x in v_max]
    denominator = _sqrt(v_max[0] if v_max else v) * s["1 / root_correction"] + s["eps"]
    change = m / denominator * s["-rate"]
    if "decay" in s:
        change = change - p * s["decay"]
    return change, [m, v, *v_max]


def sgd(p: Any, g: Any, states: Sequence[Any], s: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    """SGD, with a momentum buffer or without."""
    if "l2" in s:
        g = g + p * s["l2"]
    if not states:
        return g * s["-rate"], []
    first = "momentum" not in s
    buffer = g if first else states[0] * s["momentum"] + g * s["1 - dampening"]
    g = g + buffer * s["nesterov"] if "nesterov" in s else buffer
    return g * s["-rate"], [buffer]


def adagrad(
    p: Any, g: Any, states: Sequence[Any], s: Mapping[str, Any]
) -> tuple[Any, Sequence[Any]]:
    """Adagrad."""
    if "l2" in s:
        g = g + p * s["l2"]
    total = states[0] + g * g
    return g / (_sqrt(total) + s["eps"]) * s["-rate"], [total]


_RULES: dict[str, Rule] = {"adam": adam, "sgd": sgd, "adagrad": adagrad}


def _sqrt(x: Any) -> Any:
    return x.sqrt() if isinstance(x, Number) else eft.sqrt(x)


def _maximum(x: Any, y: Any) -> Any:
    return x.maximum(y) if isinstance(x, Number) else torch.maximum(x, y)


# ---------------------------------------------------------------------------- numbers of a step


def integer_power(base: Any, exponent: Any) -> Any:
    """base ** exponent in float64 for a whole number, by repeated squaring.

    The same bits on every device, which the power functions of mathematics libraries do not give.
    Both may be tensors.
    """
    factors: list[Any] = []
    for i in range(32):
        if isinstance(exponent, Tensor):
            bit = (exponent.to(torch.int64) >> i) & 1
            factors.append(torch.where(bit == 1, base, 1.0))
        else:
            factors.append(base if int(exponent) >> i & 1 else 1.0)
        base = base * base
    while len(factors) > 1:
        factors = [a * b for a, b in zip(factors[0::2], factors[1::2], strict=True)]
    return factors[0]


def adam_corrections(step: Any, lr: Any, beta1: Any, beta2: Any) -> tuple[Any, Any]:
    """-lr / (1 - beta1^t), and one over the root of 1 - beta2^t."""
    rate = lr / (1 - integer_power(beta1, step))
    correction = 1 - integer_power(beta2, step)
    root = eft.sqrt(correction) if isinstance(correction, Tensor) else math.sqrt(correction)
    return -rate, 1 / root


def adagrad_rate(step: Any, lr: Any, lr_decay: Any) -> tuple[Any]:
    """-lr / (1 + (t - 1) * lr_decay)."""
    return (-lr / (1 + (step - 1) * lr_decay),)


def _numbers_of_steps(
    formula: Callable[..., Sequence[Any]],
    steps: Sequence[Tensor],
    numbers: Sequence[Tensor | float],
    fixed: Iterable[Tensor | float],
) -> list[Sequence[Tensor | float]]:
    """What a formula gives for each step count and some numbers, and after it what is fixed: a
    column for each, or one number where it is the same for all.

    Floats on a CPU; on other devices tensors, without waiting.
    """
    device = steps[0].device
    if device.type == "cpu":
        counts = [x.item() for x in steps]
        known = {count: formula(count, *numbers) for count in set(counts)}
        rows = list(known.values()) if len(known) == 1 else [known[count] for count in counts]
        return [*zip(*rows, strict=True), *([x] for x in fixed)]
    width = len(formula(1.0, *[0.5] * len(numbers)))
    found = torch.empty(len(steps), width, 1, dtype=torch.float64, device=device)
    results = [list(column.unbind()) for column in found.unbind(1)]
    run(_on_device(formula, device), Calls([steps], [[x] for x in numbers], results))
    return [*([x[0] for x in column] for column in results), *([x] for x in fixed)]


@functools.cache
def _on_device(formula: Callable[..., Sequence[Any]], device: torch.device) -> Body:
    """A formula as a function of tensors of step counts."""

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        tensors = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in scalars]
        return formula(vectors[0].to(torch.float64), *tensors)

    return body


# ------------------------------------------------------------------------- terms and numbers


def _format(like: Sequence[Tensor], stochastic: bool = False) -> Format | None:
    """The format of a quantity; None of a plain tensor."""
    if len(like) < 2:
        return None
    return Format(like[0].dtype, len(like), "stochastic" if stochastic else "nearest")


def _evaluation(
    formats: Sequence[Format | None], quantities: Sequence[Sequence[Tensor]]
) -> tuple[torch.dtype | None, Format | None]:
    """The type to evaluate in, or None and the format that networks compute with."""
    found = [f for f in formats if f is not None]
    if not found:
        return torch.float64, None
    kinds = {f.wide for f in found}
    if None in kinds:
        terms = max(f.terms + (f.rounding == "stochastic") for f in found)
        return None, Format(found[0].base, terms)
    plain = [q[0] for q in quantities if len(q) == 1]
    in_float32 = kinds == {torch.float32} and all(x.dtype.itemsize == 2 for x in plain)
    return torch.float32 if in_float32 else torch.float64, found[0]


def _number(
    quantity: Sequence[Tensor], wide_type: torch.dtype | None, format: Format | None
) -> Any:
    if wide_type is None:
        assert format is not None
        return Number.of(quantity, format)
    return wide.total(wide.levels(quantity, wide_type))


def _terms_of(number: Any, like: Sequence[Tensor], noise: Tensor | None = None) -> Sequence[Tensor]:
    """A number in the format of a quantity, which is an expansion or one plain tensor."""
    dtype = like[0].dtype
    if isinstance(number, Number):
        if len(like) == 1:
            return [collapse_terms(number.terms, dtype)]
        return convert_terms(number.terms, dtype, len(like), noise)
    if len(like) == 1:
        return [round_to(number, dtype)]
    return split_terms(number, dtype, len(like), noise)


def _added(p: Sequence[Tensor], number: Any, change: Any, wide_type: torch.dtype | None) -> Any:
    if wide_type is None:
        return number + change
    leading, *tails = wide.levels(p, wide_type)
    return leading + (wide.total(tails) + change if tails else change)


# --------------------------------------------------------------------------------- one for all


@functools.cache
def _step(
    rule: str,
    maximize: bool,
    lengths: tuple[int, ...],
    stochastic: tuple[bool, ...],
    names: tuple[str, ...],
) -> Body:
    """A step of one tensor: of its gradient, itself and its states, each of so many terms.

    The scalars are those that `names` says, and a key, if one of the results rounds
    stochastically; they draw from streams of it.
    """

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        gradient, *targets = regroup(vectors, lengths)
        s = dict(zip(names, scalars, strict=False))
        formats = [_format(q, flag) for q, flag in zip(targets, stochastic, strict=True)]
        wide_type, format = _evaluation([_format(gradient), *formats], targets)
        g = _number(gradient, wide_type, format)
        if "grad_scale" in s:
            g = g / s["grad_scale"]
        if maximize:
            g = -g
        p, *states = (_number(q, wide_type, format) for q in targets)
        change, new = _RULES[rule](p, g, states, s)
        results: list[Tensor] = []
        updated = [_added(targets[0], p, change, wide_type), *new]
        for stream, (number, target) in enumerate(zip(updated, targets, strict=True)):
            noise = uniform(scalars[-1], index, stream) if stochastic[stream] else None
            results += _terms_of(number, target, noise)
        if "found_inf" in s:
            old = itertools.chain(*targets)
            results = [
                torch.where(s["found_inf"] == 1, o, n) for o, n in zip(old, results, strict=True)
            ]
        return results

    return body


def _run_steps(
    rule: str,
    maximize: bool,
    targets: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lengths: Sequence[int],
    stochastic: Sequence[bool],
    keys: Sequence[Tensor],
    names: Sequence[str],
    numbers: Sequence[Sequence[Tensor | float]],
) -> None:
    """Steps of tensors in the same formats, with columns of numbers."""
    count = len(gradients) // lengths[0]
    outputs = columns(targets, count)
    scalars = [*numbers, keys] if keys else numbers
    body = _step(rule, maximize, tuple(lengths), tuple(stochastic), tuple(names))
    run(body, Calls([*columns(gradients, count), *outputs], scalars, outputs))


def _at_hand(x: Tensor) -> Tensor | float:
    """A number for a step: as a float where that takes no waiting for the device."""
    return x.item() if x.device.type == "cpu" else x.to(torch.float64)


def _given(**numbers: Tensor | float | None) -> dict[str, Tensor | float]:
    """The numbers that have an effect."""
    return {
        name: x for name, x in numbers.items() if isinstance(x, Tensor) or x not in (None, 0)
    }  # fmt: skip


@opaque(lambda *args: None, mutates=["targets"], direct=True)
def adam_(
    targets: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lengths: Sequence[int],
    keys: Sequence[Tensor],
    stochastic: Sequence[bool],
    steps: Sequence[Tensor],
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled: bool,
) -> None:
    """A step of Adam or AdamW of tensors in the same formats.

    Args:
        targets: the terms of the parameters: the leading terms of all, then their second ones, and
            so on; then in the same way those of first, second and, for AMSGrad, largest second
            moments.
        gradients: theirs.
        lengths: the numbers of terms of gradients, parameters and each of the states.
        keys: one for each parameter, if something rounds stochastically.
        stochastic: which of parameters and states do.
        steps: how many steps each parameter has taken, this one counted.
    """
    rate = _at_hand(lr)
    fixed = {
        "1 - beta1": 1 - beta1,
        "beta2": beta2,
        "1 - beta2": 1 - beta2,
        "eps": eps,
        **_given(
            l2=None if decoupled else weight_decay,
            decay=rate * weight_decay if decoupled and weight_decay != 0 else None,
            grad_scale=grad_scale,
            found_inf=found_inf,
        ),
    }
    names = ("-rate", "1 / root_correction", *fixed)
    numbers = _numbers_of_steps(adam_corrections, steps, (rate, beta1, beta2), fixed.values())
    _run_steps("adam", maximize, targets, gradients, lengths, stochastic, keys, names, numbers)


@opaque(lambda *args: None, mutates=["targets"], direct=True)
def sgd_(
    targets: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lengths: Sequence[int],
    keys: Sequence[Tensor],
    stochastic: Sequence[bool],
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    """A step of SGD, as that of Adam. The state is a momentum buffer, or there is none; on the
    first step it takes the gradient as it is."""
    numbers: dict[str, Tensor | float] = {"-rate": -_at_hand(lr)}
    if not first:
        numbers |= {"momentum": momentum, "1 - dampening": 1 - dampening}
    if nesterov:
        numbers["nesterov"] = momentum
    numbers |= _given(l2=weight_decay, grad_scale=grad_scale, found_inf=found_inf)
    scalars = [[x] for x in numbers.values()]
    _run_steps("sgd", maximize, targets, gradients, lengths, stochastic, keys, [*numbers], scalars)


@opaque(lambda *args: None, mutates=["targets"], direct=True)
def adagrad_(
    targets: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lengths: Sequence[int],
    keys: Sequence[Tensor],
    stochastic: Sequence[bool],
    steps: Sequence[Tensor],
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """A step of Adagrad, as that of Adam. The state is the sum of squares."""
    fixed = {
        "eps": eps,
        **_given(l2=weight_decay, grad_scale=grad_scale, found_inf=found_inf),
    }
    numbers = _numbers_of_steps(adagrad_rate, steps, (_at_hand(lr), lr_decay), fixed.values())
    names = ("-rate", *fixed)
    _run_steps("adagrad", maximize, targets, gradients, lengths, stochastic, keys, names, numbers)


@opaque(lambda *args: None, mutates=["gradients"], direct=True)
def unscale_(gradients: Sequence[Tensor], terms: int, grad_scale: Tensor) -> None:
    """Gradients, each of so many terms, over the scale of a loss."""
    count = len(gradients) // terms
    own = columns(gradients, count)
    run(_unscaled, Calls(own, [[grad_scale]], own))


def _unscaled(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
    wide_type, format = _evaluation([_format(vectors)], [vectors])
    return _terms_of(_number(vectors, wide_type, format) / scalars[0], vectors)
