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

from mcftensor import wings

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("mcftensor", "DEF")


class _Operators(torch._ops._OpNamespace):
    """The library's operators. Saved programs name those of wings before anything else does."""

    __module__ = torch._ops._OpNamespace.__module__  # PyTorch makes names of operators of it

    def __getattr__(self, name: str) -> Any:
        wings.import_operator(name)
        return super().__getattr__(name)


_operators: Any = torch.ops.mcftensor
_operators.__class__ = _Operators

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
        LIBRARY.define(name + signature, tags=tags)
        kernel = function if lays_out else laid_out(function, *[_first] if of_one else [])
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mcftensor::{name}", fake, lib=LIBRARY)
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


# ---------------------------------------------------------------------- the layout of results


def empty_terms(operands: Sequence[Tensor], dtype: torch.dtype, terms: int) -> list[Tensor]:
    """Return uninitialized tensors of the shape to which the operands broadcast."""
    template = template_of(operands)
    return [torch.empty_like(template, dtype=dtype) for _ in range(terms)]


def template_of(operands: Sequence[Tensor]) -> Tensor:
    """Return the first operand of the broadcast shape, or a new tensor of this shape."""
    first = next((x for x in operands if x.dim() > 0), operands[0])
    if all(x.dim() == 0 or x.shape == first.shape for x in operands):
        return first
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    for x in operands:
        if x.shape == shape and x.device == first.device:
            return x
    return torch.empty(shape, dtype=operands[0].dtype, device=first.device)


def laid_out(
    function: Callable[P, R], template_of: Callable[[Sequence[Tensor]], Tensor] = template_of
) -> Callable[P, R]:
    """Return results in the layout that `empty_terms` predicts, the layout of the first operand.
    Results of another shape are unchanged.

    For operands with different strides, torch's layout depends on the order of operations.
    """

    def kernel(*args: P.args, **kwargs: P.kwargs) -> R:
        results = function(*args, **kwargs)
        operands = [x for a in args for x in (a if isinstance(a, list) else [a])]
        tensors = [x for x in operands if isinstance(x, Tensor)]
        if not tensors:
            return results
        template = template_of(tensors)

        def fitted(x: Tensor) -> Tensor:
            if x.stride() == template.stride() or x.shape != template.shape:
                return x
            like = torch.empty_like(template, dtype=x.dtype)
            return x if x.stride() == like.stride() else like.copy_(x)

        if isinstance(results, Tensor):
            return cast(R, fitted(results))
        return type(results)(fitted(x) for x in results)  # type: ignore[call-arg, attr-defined]

    return kernel
