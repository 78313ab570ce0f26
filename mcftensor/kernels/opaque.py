"""Functions that compilers must not look into.

A compiler that evaluates bf16 chains in fp32 removes the roundings that error-free
transformations measure: the error terms become zero, and nothing is said. Every function here
whose result depends on a rounding is therefore an operator of its own in PyTorch's registry.
Tracing records one call and runs the same eager code later: eager, compiled, and inlined in a
user's compiled function give the same bits.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from mcftensor.kernels.layout import laid_out

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("mcftensor", "DEF")

# Types of arguments that are what they seem.
_BARE = {Tensor, torch.nn.Parameter, bool, int, float, str, type(None)}

DEFINITIONS: dict[str, Callable[..., Any]] = {}
"""The plain Python function behind each operator."""


def opaque(
    fake: Callable[P, R],
    tags: Sequence[torch.Tag] = (),
    *,
    mutates: Sequence[str] = (),
    lays_out: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as the operator `mcftensor::<name>`, and return a caller of it.

    The arguments and results are tensors, lists of tensors, numbers and strings. The function must
    not return its inputs, and mutates those named in `mutates` alone. `fake` has the same arguments
    and says shape, layout and dtype of the results, by tensors without data. `lays_out` says that
    the function itself sees to the layout.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        DEFINITIONS[name] = function
        schema = _schema(function, mutates)
        _LIBRARY.define(name + schema, tags=tags)
        kernel = function if lays_out or mutates else laid_out(function)
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mcftensor::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.mcftensor, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, operator(*args, **kwargs))

        return call

    return register


def _schema(function: Callable[..., Any], mutates: Sequence[str]) -> str:
    """PyTorch's text for the signature of a function; it infers none for lists of strings."""
    parameters = inspect.signature(function).parameters
    names = [name for name, x in parameters.items() if x.annotation == "Sequence[str]"]

    @functools.wraps(function, updated=())
    def prototype() -> None: ...

    annotations = dict.fromkeys(names, "Sequence[int]")
    prototype.__annotations__ = {**function.__annotations__, **annotations}
    prototype.__signature__ = inspect.signature(function).replace(  # type: ignore[attr-defined]
        parameters=[
            x.replace(annotation=annotations.get(name, x.annotation))
            for name, x in parameters.items()
        ]
    )
    schema = torch.library.infer_schema(prototype, mutates_args=tuple(mutates))
    for name in names:
        schema = schema.replace(f"SymInt[] {name}", f"str[] {name}")
    return schema


def is_bare(*lists: Sequence[Any]) -> bool:
    """Whether nothing but eager PyTorch would see a call with the elements of these lists."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.autograd._profiler_enabled()
        and _BARE.issuperset(map(type, itertools.chain.from_iterable(lists)))
    )


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """The plain Python function behind an opaque one, for use inside another opaque one."""
    return cast(Callable[P, R], function.__wrapped__)  # type: ignore[attr-defined]
