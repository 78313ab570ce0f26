"""Rules of fused optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.passes.optimizer_steps import RULES as STEPS
from mcftensor.scaling.exponents import known, largest
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled import is_scaled
from mcftensor.scaling.scaled_numbers import Placing, Unrounded, number, write_to


def _fused_by(func: Any, states: Sequence[str], squares: Sequence[str]) -> Any:
    """Return the rule of a fused step, which updates one tensor after the other.

    The step is computed in float64, which holds the squares of gradients of any scale in use. Each
    result is rounded to float32 and then to its data.

    Args:
        func: the operator, which takes a list for each operand.
        states: the names of its lists of states.
        squares: the names of lists of squares, which are placed high.
    """
    quantities = ("params", "grads", *states)  # step counts follow
    count = len(quantities)

    def step(*args: Any, **kwargs: Any) -> None:
        for i in range(len(args[0])):
            own = [x[i : i + 1] if isinstance(x, list | tuple) else x for x in args]
            operands = [[y.to(torch.float64, copy=True) for y in x] for x in own[:count]]
            func(*operands, *own[count:], **kwargs)
            for name, targets, results in zip(quantities, own, operands, strict=False):
                for target, made in zip(targets, results, strict=True):
                    if name != "grads":
                        _write(target, made, "high" if name in squares else "by rule")

    return step


def _write(target: Tensor, made: Tensor, placing: Placing) -> None:
    if is_scaled(target):
        measured = number(made)
        exponent = largest(known(target.exponent), measured.exponent)
        write_to(target, Unrounded(measured.at(exponent), exponent, placing))
    else:
        target.copy_(made)


for _name, _step in STEPS.items():
    _packet = getattr(aten, _name)
    for _overload in _packet.overloads():
        _operator = getattr(_packet, _overload)
        rule(_operator)(_fused_by(_operator, _step.states, _step.squares))
