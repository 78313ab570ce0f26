"""Functions that compilers must not look into.

A compiler that evaluates bf16 chains in fp32 removes the roundings that error-free
transformations measure: the error terms become zero, and nothing is said. Every function here
whose result depends on a rounding is therefore an operator of its own in PyTorch's registry.
Tracing records one call and runs the same eager code later: eager, compiled, and inlined in a
user's compiled function give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("mcftensor", "DEF")


def opaque(function: Callable[P, R]) -> Callable[P, R]:
    """Register `function` as the operator `mcftensor::<name>` and return a caller of it.

    The arguments and results are tensors, lists of tensors, numbers and strings. The function
    must not mutate or return its inputs, nor read values of tensors on the host: run on tensors
    without data it serves as its own shape rule.
    """
    name = getattr(function, "_operator_name", function.__name__)
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    operator = getattr(torch.ops.mcftensor, name).default

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, operator(*args, **kwargs))

    return call


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """The plain Python function behind an opaque one, for use inside another opaque one."""
    return cast(Callable[P, R], function.__wrapped__)  # type: ignore[attr-defined]
