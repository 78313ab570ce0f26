"""Functions that are opaque to compilers.

A compiler that evaluates bf16 chains in fp32 removes the roundings that error-free transformations
measure. The error terms then become zero, without any message. So every function here whose result
depends on a rounding is registered as an operator of PyTorch. Tracing records one call, and runs
the same eager code later: eager, compiled, and inlined in a user's compiled function give the same
bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from mcftensor.kernels.result_layout import laid_out

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("mcftensor", "DEF")

DEFINITIONS: dict[str, Callable[..., Any]] = {}
"""The plain Python function of each operator."""


def opaque(
    fake: Callable[P, R],
    tags: Sequence[torch.Tag] = (),
    *,
    schema: str | None = None,
    lays_out: bool = False,
    of_one: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as the operator `mcftensor::<name>`, and return a caller of it.

    The arguments and results are tensors, lists of tensors, numbers and strings. The function must
    not return its inputs. `fake` takes the same arguments and returns tensors without data, with
    the shapes, layouts and dtypes of the results. `schema` is PyTorch's text for the signature; it
    is needed if arguments are mutated or are lists of strings, which PyTorch cannot infer.
    `lays_out` declares that the function handles the layout itself. `of_one` declares that the
    operands are components of one tensor, with the layout of the first one.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        DEFINITIONS[name] = function
        signature = schema or torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + signature, tags=tags)
        kernel = function if lays_out else laid_out(function, *[_first] if of_one else [])
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mcftensor::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.mcftensor, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, operator(*args, **kwargs))

        return call

    return register


def _first(operands: Sequence[Tensor]) -> Tensor:
    return operands[0]


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """Return the plain function behind an opaque one, for use inside another opaque function."""
    return cast(Callable[P, R], function.__wrapped__)  # type: ignore[attr-defined]
