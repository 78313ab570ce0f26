"""Rules of what goes by the order of numbers: data has the same order, and keeps its scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mcftensor.scaling.reduction_rules import Dims, dims_of
from mcftensor.scaling.rule_table import aten, rule
from mcftensor.scaling.scaled_numbers import Unrounded, number


def _chosen_by(func: Any) -> Callable[..., Any]:
    """Numbers and the places where they are found."""

    def choose(x: Any, *how: Any, **also: Any) -> tuple[Unrounded, Tensor]:
        values, places = func(number(x).mantissa, *how, **also)
        return Unrounded(values, x.exponent), places

    return choose


for _operator in (
    aten.max.dim,
    aten.min.dim,
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.median.dim,
    aten.kthvalue.default,
    aten.cummax.default,
    aten.cummin.default,
):
    rule(_operator)(_chosen_by(_operator))


@rule(aten.amax)
def _amax(x: Any, dim: Dims = (), keepdim: bool = False) -> Unrounded:
    return Unrounded(number(x).mantissa.amax(dims_of(x, dim), keepdim), x.exponent)


@rule(aten.amin)
def _amin(x: Any, dim: Dims = (), keepdim: bool = False) -> Unrounded:
    return Unrounded(number(x).mantissa.amin(dims_of(x, dim), keepdim), x.exponent)


@rule(aten.max.default)
def _max(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.max(), x.exponent)


@rule(aten.min.default)
def _min(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.min(), x.exponent)


@rule(aten.median.default)
def _median(x: Any) -> Unrounded:
    return Unrounded(number(x).mantissa.median(), x.exponent)
