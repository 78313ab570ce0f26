"""The fused steps of SGD, Adam, AdamW and Adagrad, with one rounding a step for each result.

A step reads components, computes on numbers and writes components, in one pass over memory for all
tensors. Each rule is written once, for every kind of numbers and every format.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mcftensor.arithmetic import eft
from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.network_numbers import Network
from mcftensor.arithmetic.noise import noise_of
from mcftensor.arithmetic.number_protocol import Number, Numbers
from mcftensor.formats import Format, named
from mcftensor.kernels import Body, Column, Columns, Scalar, run
from mcftensor.kernels.columns import columns_of, regroup
from mcftensor.kernels.custom_ops import opaque
from mcftensor.kernels.without_float64 import widest

Settings = Mapping[str, Any]
"""The numbers of a step by name; numbers without effect are left out."""

Change = tuple[Number, Sequence[Number]]
"""The change of a parameter, and its new states."""


# ------------------------------------------------------------------------------- update rules


def adam(p: Number, g: Number, states: Sequence[Number], s: Settings) -> Change:
    """Adam and AdamW; AMSGrad has the maximum of second moments as third state."""
    m, v, *v_max = states
    if "l2" in s:
        g = g + p * s["l2"]
    m = m + (g - m) * s["1 - beta1"]
    v = v * s["beta2"] + g * g * s["1 - beta2"]
    v_max = [x.maximum(v) for x in v_max]
    denominator = (v_max[0] if v_max else v).sqrt() * s["1 / root_correction"] + s["eps"]
    change = m / denominator * s["-rate"]
    if "decay" in s:
        change = change - p * s["decay"]
    return change, [m, v, *v_max]


def sgd(p: Number, g: Number, states: Sequence[Number], s: Settings) -> Change:
    """SGD with or without a momentum buffer; the first step copies the gradient into it."""
    if "l2" in s:
        g = g + p * s["l2"]
    if not states:
        return g * s["-rate"], []
    first = "momentum" not in s
    buffer = g if first else states[0] * s["momentum"] + g * s["1 - dampening"]
    g = g + buffer * s["nesterov"] if "nesterov" in s else buffer
    return g * s["-rate"], [buffer]


def adagrad(p: Number, g: Number, states: Sequence[Number], s: Settings) -> Change:
    """Adagrad, with the sum of squared gradients as state."""
    if "l2" in s:
        g = g + p * s["l2"]
    total = states[0] + g * g
    return g / (total.sqrt() + s["eps"]) * s["-rate"], [total]


# ---------------------------------------------------------------------------- numbers of a step


def integer_power(base: Any, exponent: Any) -> Any:
    """Return base ** exponent in float64 for an integer exponent, by repeated squaring.

    It has the same bits on every device, unlike the power functions of mathematics libraries. Both
    may be tensors.
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
    """Return -lr / (1 - beta1^t), and 1 / sqrt(1 - beta2^t)."""
    rate = lr / (1 - integer_power(beta1, step))
    correction = 1 - integer_power(beta2, step)
    root = eft.sqrt(correction) if isinstance(correction, Tensor) else math.sqrt(correction)
    return -rate, 1 / root


def adagrad_rate(step: Any, lr: Any, lr_decay: Any) -> tuple[Any]:
    """Return -lr / (1 + (t - 1) * lr_decay)."""
    return (-lr / (1 + (step - 1) * lr_decay),)


def _of_adam(s: Settings) -> dict[str, Any]:
    beta1, beta2 = s.get("beta1", 0.0), s.get("beta2", 0.0)
    return {
        "1 - beta1": 1 - beta1,
        "beta2": beta2,
        "1 - beta2": 1 - beta2,
        "eps": s.get("eps", 0.0),
    }


def _of_sgd(s: Settings) -> dict[str, Any]:
    found = {"-rate": -s["lr"]}
    if "first" not in s:
        found |= {"momentum": s.get("momentum", 0.0), "1 - dampening": 1 - s.get("dampening", 0.0)}
    if "nesterov" in s:
        found["nesterov"] = s["momentum"]
    return found


@dataclass(frozen=True)
class Rule:
    """One of PyTorch's fused steps: its optimizer, its lists of states, and its computation.

    The fixed numbers of a rule follow from the settings. The varying ones follow from the step
    count and the settings that they are computed from.

    Attributes:
        optimizer: the class that calls the step with `fused=True`.
        states: the names of its lists of states, which follow the lists of parameters and
            gradients; a list of step counts comes last if some numbers vary.
        squares: the states that hold squares of gradients.
        decay: `"l2"` if weight decay is added to gradients, `"decay"` if it is decoupled.
    """

    optimizer: type[Optimizer]
    update: Callable[[Number, Number, Sequence[Number], Settings], Change]
    fixed: Callable[[Settings], dict[str, Any]]
    by_step: Callable[..., Sequence[Any]] | None = None
    varying: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    squares: tuple[str, ...] = ()
    decay: str = "l2"


_ADAM = Rule(
    torch.optim.Adam,
    adam,
    _of_adam,
    by_step=adam_corrections,
    varying=("-rate", "1 / root_correction"),
    reads=("lr", "beta1", "beta2"),
    states=("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    squares=("exp_avg_sqs", "max_exp_avg_sqs"),
)
_ADAGRAD = Rule(
    torch.optim.Adagrad,
    adagrad,
    lambda s: {"eps": s.get("eps", 0.0)},
    by_step=adagrad_rate,
    varying=("-rate",),
    reads=("lr", "lr_decay"),
    states=("state_sums",),
    squares=("state_sums",),
)

RULES = {
    "_fused_adam_": _ADAM,
    "_fused_adamw_": dataclasses.replace(_ADAM, optimizer=torch.optim.AdamW, decay="decay"),
    "_fused_sgd_": Rule(torch.optim.SGD, sgd, _of_sgd, states=("momentum_buffer_list",)),
    "_fused_adagrad_": _ADAGRAD,
}
"""The fused steps by the names of PyTorch's operators."""

# Settings that every rule takes unchanged, if they have an effect.
_COMMON = ("l2", "grad_scale", "found_inf")


def _numbers(rule: Rule, s: Settings, steps: Column) -> tuple[list[str], list[Sequence[Scalar]]]:
    """Return the names of the numbers of a step, and a column for each number.

    A column has one element if all steps share the number. Numbers are floats on a CPU, and on
    other devices tensors, without synchronization.
    """
    fixed = rule.fixed(s) | {name: s[name] for name in _COMMON if name in s}
    if "decay" in s:
        fixed["decay"] = s["lr"] * s["decay"]
    names = [*rule.varying, *fixed]
    columns: list[Sequence[Scalar]] = [[x] for x in fixed.values()]
    if rule.by_step is None:
        return names, columns
    settings = [s.get(name, 0.0) for name in rule.reads]
    if _is_at_hand(steps[0].device):
        counts = [x.item() for x in steps]
        known = {count: rule.by_step(count, *settings) for count in set(counts)}
        rows = list(known.values()) if len(known) == 1 else [known[count] for count in counts]
        return names, [*zip(*rows, strict=True), *columns]
    device, width = steps[0].device, len(rule.varying)
    found = torch.empty(len(steps), width, 1, dtype=torch.float64, device=device)
    results = [list(column.unbind()) for column in found.unbind(1)]
    run(_on_device(rule.by_step), Columns([steps], [[x] for x in settings], results))
    return names, [*([x[0] for x in column] for column in results), *columns]


@functools.lru_cache(maxsize=64)
def _on_device(formula: Callable[..., Sequence[Any]]) -> Body:
    """Return a formula as a body on tensors of step counts."""

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        count = vectors[0].to(torch.float64)
        tensors = [torch.as_tensor(x, dtype=torch.float64, device=count.device) for x in scalars]
        return formula(count, *tensors)

    return body


# -------------------------------------------------------------------------- steps of all formats


def numbers_for(formats: Sequence[Format]) -> Numbers:
    """Return the kind of numbers in which a step is computed, from the formats of the gradient, the
    parameter and the states."""
    own = [f for f in formats if f.arithmetic != "plain"]
    kinds = [f.numbers_of_steps for f in own]
    networks = [x for x in kinds if isinstance(x, Network)]
    if networks:
        return max(networks, key=lambda x: x.terms)
    # Sizes in bytes of plain tensors for which float32 suffices: 16-bit ones next to terms, and
    # wider ones next to float32 numbers.
    limit = 4 if all(f.result is not f for f in own) else 2
    narrow = all(x.dtype == torch.float32 for x in kinds) and all(
        f.dtype.itemsize <= limit for f in formats[1:] if f.arithmetic == "plain"
    )
    return Machine(torch.float32 if own and narrow else torch.float64).available()


@functools.lru_cache(maxsize=1024)
def _body(rule: str, maximize: bool, formats: tuple[Format, ...], names: tuple[str, ...]) -> Body:
    """Return the body of a step: from the gradient, the parameter and its states, in these formats.

    The scalars are the numbers `names`, and a key if a result rounds stochastically. Results draw
    from different streams of the key.
    """
    update = RULES[rule].update
    lengths = [len(f.components) for f in formats]

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        numbers = numbers_for(formats)
        stored = regroup(vectors, lengths)
        s = dict(zip(names, scalars, strict=False))
        read = [numbers.of(f.decode(x)) for f, x in zip(formats, stored, strict=True)]
        g, p, *states = [x.summed() for x in read]
        if "grad_scale" in s:
            g = g / s["grad_scale"]
        if maximize:
            g = -g
        change, new = update(p, g, states, s)
        results: list[Tensor] = []
        for stream, (number, f) in enumerate(
            zip([read[1].moved_by(change), *new], formats[1:], strict=True)
        ):
            noise = noise_of(f.rounding, scalars[-1], index, stream) if f.takes_key else None
            results += f.encode(number, noise)
        if "found_inf" in s:
            old = itertools.chain(*stored[1:])
            results = [
                torch.where(s["found_inf"] == 1, o, n) for o, n in zip(old, results, strict=True)
            ]
        return results

    return body


def _is_at_hand(device: torch.device) -> bool:
    """Return whether a number is read as a float: without synchronization, or for want of
    float64."""
    return device.type == "cpu" or widest(device) == torch.float32


def _at_hand(x: Scalar) -> Scalar:
    """Return a number for a step, as a float if it is at hand, else as a float64 tensor."""
    if not isinstance(x, Tensor):
        return x
    return x.item() if _is_at_hand(x.device) else x.to(torch.float64)


def take(
    rule: str,
    formats: Sequence[Format],
    gradients: Sequence[Column],
    targets: Sequence[Column],
    steps: Column,
    keys: Column,
    settings: Settings,
) -> None:
    """Step tensors in the same formats, given by columns of components.

    Args:
        rule: its name in `RULES`.
        formats: the formats of gradients, parameters and each of the states.
        gradients: the components of the gradients.
        targets: the components of the parameters, then the components of each state.
        steps: the step count of each parameter, including this step; or nothing.
        keys: one key for each parameter, if a result rounds stochastically.
        settings: numbers that have an effect. Flags such as `maximize` are set by being present.
    """
    on_device = ("grad_scale", "found_inf")
    s = {name: x if name in on_device else _at_hand(x) for name, x in settings.items()}
    names, numbers = _numbers(RULES[rule], s, steps)
    body = _body(rule, "maximize" in s, tuple(formats), tuple(names))
    shared, packed = _shared(tuple(formats))
    run(body, Columns([*gradients, *targets], numbers, targets, keys, shared, packed=packed))


@functools.lru_cache(maxsize=1024)
def _shared(formats: tuple[Format, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the columns of inputs, then outputs, of a step with shared, and packed, components."""
    every = [x for f in formats for x in f.components]
    every += every[len(formats[0].components) :]
    return _places([x.is_shared for x in every]), _places([x.is_packed for x in every])


def _places(flags: Sequence[bool]) -> frozenset[int]:
    return frozenset(i for i, x in enumerate(flags) if x)


def setting(x: Scalar) -> Tensor:
    """Return a setting as a tensor for `step_`; without float64, a Python number as its bits."""
    if isinstance(x, Tensor):
        return x
    if widest() == torch.float64:
        return torch.scalar_tensor(x, dtype=torch.float64, device="cpu")
    (bits,) = struct.unpack("q", struct.pack("d", x))
    return torch.scalar_tensor(bits, dtype=torch.int64, device="cpu")


def _from_setting(x: Tensor) -> Scalar:
    if x.dtype != torch.int64:
        return x
    (number,) = struct.unpack("d", struct.pack("q", x.item()))
    return number


@opaque(
    lambda *args: None,
    schema="(str rule, str[] formats, Tensor(a!)[] targets, Tensor[] gradients, Tensor[] steps, "
    "Tensor[] keys, str[] names, Tensor[] settings) -> ()",
    lays_out=True,
)
def step_(
    rule: str,
    formats: Sequence[str],
    targets: Sequence[Tensor],
    gradients: Sequence[Tensor],
    steps: Sequence[Tensor],
    keys: Sequence[Tensor],
    names: Sequence[str],
    settings: Sequence[Tensor],
) -> None:
    """`take` as an operator, with columns joined in one list and settings as tensors."""
    found = [named(name) for name in formats]
    count = len(gradients) // len(found[0].components)
    given = dict(zip(names, map(_from_setting, settings), strict=True))
    take(rule, found, columns_of(gradients, count), columns_of(targets, count), steps, keys, given)


@opaque(
    lambda *args: None,
    schema="(Tensor(a!)[] gradients, str format, Tensor grad_scale) -> ()",
    lays_out=True,
)
def unscale_(gradients: Sequence[Tensor], format: str, grad_scale: Tensor) -> None:
    """Divide gradients in a format by the scale of the loss, in place."""
    f = named(format)
    own = columns_of(gradients, len(gradients) // len(f.components))
    run(_unscaled(f), Columns(own, [[grad_scale]], own))


@functools.lru_cache(maxsize=64)
def _unscaled(f: Format) -> Body:
    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        numbers = numbers_for([f])
        return f.nearest.encode(numbers.of(f.decode(vectors)).summed() / scalars[0], None)

    return body
