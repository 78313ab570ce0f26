"""Functions that compilers must not look into.

A compiler that evaluates bf16 chains in fp32 removes the roundings that error-free
transformations measure: the error terms become zero, and nothing is said. Every function here
whose result depends on a rounding is therefore an operator of its own in PyTorch's registry.
Tracing records one call and runs the same eager code later: eager, compiled, and inlined in a
user's compiled function give the same bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
K = TypeVar("K")

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
    direct: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as the operator `mcftensor::<name>`, and return a caller of it.

    The arguments and results are tensors, lists of tensors, numbers and strings. The function must
    not return its inputs, and mutates those named in `mutates` alone. `fake` has the same arguments
    and says shape, layout and dtype of the results, by tensors without data. `lays_out` says that
    the function itself sees to the layout, and `direct` that it is only called below autograd, so
    that without compilers, transformations and modes it may be called as it is: lists of thousands
    of tensors take PyTorch longer to pass on than the function to work.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        DEFINITIONS[name] = function
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        _LIBRARY.define(name + schema, tags=tags)
        kernel = function if lays_out or mutates else _laid_out(function)
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mcftensor::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.mcftensor, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not direct:
                return cast(R, operator(*args, **kwargs))
            if is_bare(*[x if isinstance(x, list) else (x,) for x in args]):
                return cast(Callable[..., R], function)(*args)
            return cast(R, operator(*map(_entered, args)))

        return call

    return register


def is_bare(*lists: Sequence[Any]) -> bool:
    """Whether nothing but eager PyTorch would see a call with the elements of these lists."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.autograd._profiler_enabled()
        and set().union(*[set(map(type, elements)) for elements in lists]) <= _BARE
    )


def _entered(x: Any) -> Any:
    """A list of tensors and numbers as one of tensors."""
    if not isinstance(x, list) or float not in map(type, x):
        return x
    return [torch.scalar_tensor(y, dtype=torch.float64) if type(y) is float else y for y in x]


def empty_terms(operands: Sequence[Tensor], dtype: torch.dtype, terms: int) -> list[Tensor]:
    """Tensors without data, of the shape to which the operands broadcast."""
    template = _template(operands)
    return [torch.empty_like(template, dtype=dtype) for _ in range(terms)]


def _template(operands: Sequence[Tensor]) -> Tensor:
    """A tensor of the shape to which operands broadcast; the first of that shape, if any."""
    first = next((x for x in operands if x.dim() > 0), operands[0])
    if all(x.dim() == 0 or x.shape == first.shape for x in operands):
        return first
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    for x in operands:
        if x.shape == shape and x.device == first.device:
            return x
    return torch.empty(shape, dtype=operands[0].dtype, device=first.device)


def _laid_out(function: Callable[P, R]) -> Callable[P, R]:
    """Results in the layout that `empty_terms` foretells: that of the first operand.

    What torch makes of operands with unlike strides depends on the order of operations.
    """

    def kernel(*args: P.args, **kwargs: P.kwargs) -> R:
        results = function(*args, **kwargs)
        operands = [x for a in args for x in (a if isinstance(a, list) else [a])]
        tensors = [x for x in operands if isinstance(x, Tensor)]
        if not tensors:
            return results
        template = _template(tensors)

        def laid_out(x: Tensor) -> Tensor:
            if x.stride() == template.stride():
                return x
            like = torch.empty_like(template, dtype=x.dtype)
            return x if x.stride() == like.stride() else like.copy_(x)

        if isinstance(results, Tensor):
            return cast(R, laid_out(results))
        return type(results)(laid_out(x) for x in results)  # type: ignore[call-arg, attr-defined]

    return kernel


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """The plain Python function behind an opaque one, for use inside another opaque one."""
    return cast(Callable[P, R], function.__wrapped__)  # type: ignore[attr-defined]


def regroup(tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[list[Tensor]]:
    """A flat list of tensors as consecutive lists of these lengths."""
    rest = iter(tensors)
    return [list(itertools.islice(rest, length)) for length in lengths]


def places_of(keys: Iterable[K]) -> dict[K, list[int]]:
    """Where each key stands in a list of them."""
    found: dict[K, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found


def columns(tensors: Sequence[T], length: int) -> list[Sequence[T]]:
    """A flat list as consecutive lists of this length."""
    return [tensors[i : i + length] for i in range(0, len(tensors), length)]
