"""torch's fused steps, such as `_fused_adam_`; with expansions, the steps of `optimizer_steps.py`.

Lists may mix formats, plain parameters and plain states. Gradients are unscaled here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.noise import draw_key
from mcftensor.dispatch.operands import component_columns, first_count
from mcftensor.dispatch.registry import SHORTCUTS, TABLE, implements
from mcftensor.dispatch.store import count_write
from mcftensor.formats import PLAIN, Format
from mcftensor.formats.promotion import require_one_base
from mcftensor.kernels.columns import is_bare, places_of
from mcftensor.passes.optimizer_steps import RULES, setting, step_, take, unscale_
from mcftensor.tensor.step_tensors import GradientTensor, TapedGradient
from mcftensor.tensor.tensor import MCFTensor

aten = torch.ops.aten
_format = attrgetter("_format")

# The formats of a gradient, its parameter and its states.
Formats = tuple[Format, ...]


@dataclass(frozen=True)
class StepCall:
    """The arguments of a fused step by name: lists of tensors, with one row per parameter.

    Attributes:
        name: the name of PyTorch's operator.
        params: the parameters.
        grads: their gradients.
        states: the lists of states by their names; a list that this step does not need is empty.
        counts: the number of steps of each parameter, this one included; empty for SGD.
        options: the settings by PyTorch's names.
    """

    name: str
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: dict[str, Sequence[Tensor]]
    counts: Sequence[Tensor]
    options: dict[str, Any]

    @staticmethod
    def of(name: str, lists: Sequence[Sequence[Tensor]], options: dict[str, Any]) -> StepCall:
        """Return a call from lists in PyTorch's order."""
        params, grads, *others = lists
        names = RULES[name].states
        states, counts = dict(zip(names, others, strict=False)), others[len(names) :]
        if options.get("amsgrad") is False:
            states["max_exp_avg_sqs"] = []
        if not {GradientTensor, TapedGradient}.isdisjoint(map(type, grads)):
            grads = [_plain_gradient(x) for x in grads]
        return StepCall(name, params, grads, states, counts[0] if counts else [], options)

    def rows(self, chosen: Sequence[int]) -> StepCall:
        """Return the call for some of the parameters."""
        if len(chosen) == len(self.params):
            return self

        def of(column: Sequence[Tensor]) -> Sequence[Tensor]:
            return [column[i] for i in chosen] if column else []

        states = {name: of(x) for name, x in self.states.items()}
        return StepCall(
            *(self.name, of(self.params), of(self.grads), states, of(self.counts), self.options)
        )

    def lists(self) -> list[Sequence[Tensor]]:
        """Return the lists in PyTorch's order."""
        counts = [] if RULES[self.name].by_step is None else [self.counts]
        return [self.params, self.grads, *self.states.values(), *counts]

    def written(self) -> list[Sequence[Tensor]]:
        """Return the lists that the step writes to."""
        return [self.params, *filter(len, self.states.values())]

    def settings(self) -> dict[str, Any]:
        """Return the numbers that have an effect, by the library's names."""
        names = {"weight_decay": RULES[self.name].decay, "is_first_step": "first"}
        return {
            names.get(name, name): x
            for name, x in self.options.items()
            if name == "lr" or isinstance(x, Tensor) or x not in (None, 0)
        }


@implements(*(getattr(aten, name) for name in RULES))  # optimizers with fused=True
def fused_step(func: Any, *lists: Sequence[Tensor], **options: Any) -> None:
    """Take the library's step for rows with an expansion, and torch's own for other rows."""
    call = StepCall.of(func.overloadpacket.__name__, lists, options)
    count = len(call.params)
    if len(set(map(id, call.params))) == count:
        _step(func, call)
    else:  # a parameter given twice takes two steps
        for i in range(count):
            _step(func, call.rows([i]))


def _step(func: Any, call: StepCall) -> None:
    """Take the step of parameters that are all different."""
    scale, found_inf = call.options.get("grad_scale"), call.options.get("found_inf")
    if call.options.get("is_first_step") and found_inf is not None:
        for buffer in call.states["momentum_buffer_list"]:
            buffer.zero_()  # SGD makes it without values, and a skipped step leaves it so
    groups = _groups([call.grads, *call.written()])
    for formats in groups:  # before anything is written
        require_one_base("fused step", tuple([f for f in formats if f.arithmetic != "plain"]))
    keys = _keys(groups, call.written())
    settings = call.settings()
    taken: list[tuple[list[Tensor], Format]] = []
    for formats, rows in groups.items():
        part = call.rows(rows)
        if all(f.arithmetic == "plain" for f in formats):
            func(*part.lists(), **part.options)
            continue
        gradients = _take(part, formats, [keys[i] for i in rows if i in keys], settings)
        taken.append(([*chain(*gradients)], formats[0]))
    if scale is not None:
        for flat, format in taken:
            unscale_(flat, format.name, scale)


def _take(
    call: StepCall, formats: Formats, keys: list[Tensor], settings: dict[str, Any]
) -> list[Sequence[Tensor]]:
    """Take the step of parameters in the same formats; return the components of the gradients."""
    written = call.written()
    gradients = component_columns(call.grads, formats[0])
    columns = [component_columns(x, f) for x, f in zip(written, formats[1:], strict=True)]
    targets = [*chain(*columns)]
    if is_bare(*gradients, *targets, call.counts, keys, list(settings.values())):
        take(call.name, formats, gradients, targets, call.counts, keys, settings)
    else:
        step_(
            call.name,
            [f.name for f in formats],
            [*chain(*targets)],
            [*chain(*gradients)],
            call.counts,
            keys,
            [*settings],
            list(map(setting, settings.values())),
        )
    counted = [x for x, f in zip(written, formats[1:], strict=True) if f.rounding == "balanced"]
    count_write([*chain(*counted)])
    return gradients


def _plain_gradient(x: Tensor) -> Tensor:
    """Return the plain tensor of a gradient tensor, if the step has not written to it."""
    return x._component0 if isinstance(x, GradientTensor) else x


def _keys(
    groups: dict[Formats, list[int]], targets: Sequence[Sequence[Tensor]]
) -> dict[int, Tensor]:
    """Return a key for each row whose rounding takes one, drawn in the order of rows. Balanced
    rounding uses the first count of a row, or the random key of its other tensors."""
    drawing = [
        rows
        for (_, *written), rows in groups.items()
        if any(f.rounding == "stochastic" for f in written)
    ]
    keys = {i: draw_key(targets[0][i].device) for i in sorted(chain(*drawing))}
    for (_, *written), rows in groups.items():
        if any(f.rounding == "balanced" for f in written):
            for i in rows:
                counted = first_count(x[i] for x in targets)
                assert counted is not None
                keys.setdefault(i, counted)
    return keys


def _formats(tensors: Sequence[Tensor]) -> list[Format]:
    """Return the format of each tensor; a list may have thousands."""
    if set(map(type, tensors)) == {MCFTensor}:
        return list(map(_format, tensors))
    return [x._format if isinstance(x, MCFTensor) else PLAIN[x.dtype] for x in tensors]


def _groups(quantities: Sequence[Sequence[Tensor]]) -> dict[Formats, list[int]]:
    """Return the rows of lists of tensors, grouped by their formats."""
    columns = [_formats(quantity) for quantity in quantities]
    if all(len(set(column)) == 1 for column in columns):  # mostly
        return {tuple([column[0] for column in columns]): list(range(len(columns[0])))}
    return places_of(zip(*columns, strict=True))


def _directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the handler of a step without PyTorch's dispatcher, which is slow for long lists; return
    NotImplemented if the dispatcher is needed."""
    if len(args) < 2 or torch.is_grad_enabled() or not is_bare():
        return NotImplemented
    # The dispatcher orders lists, converts numbers to their types, and rejects negative views.
    named = [x for name, x in kwargs.items() if name not in ("lr", "grad_scale", "found_inf")]
    gradients = [x for x in args[1] if type(x) is Tensor]
    if any(isinstance(x, (list, tuple, Tensor)) for x in named) or any(
        map(Tensor.is_neg, gradients)
    ):
        return NotImplemented
    packet = getattr(aten, func.__name__)
    operator = packet.tensor_lr if isinstance(kwargs["lr"], Tensor) else packet.default
    return TABLE[operator](operator, *args, **kwargs)


SHORTCUTS.update({getattr(torch, name): _directly for name in RULES})


@implements(aten._amp_foreach_non_finite_check_and_unscale_.default)  # GradScaler
def unscale(func: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place, and set `found_inf` on its device if one is infinite."""
    others = [x for x in grads if not isinstance(x, MCFTensor)]
    if others:
        func(others, found_inf, inv_scale)
    for x in grads:
        if isinstance(x, MCFTensor):
            infinite = ~x.components[0].isfinite().all()
            found_inf.copy_(torch.maximum(found_inf, infinite.to(found_inf.dtype)))
            x.mul_(inv_scale)
