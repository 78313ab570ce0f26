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
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("mcftensor", "DEF")


def opaque(fake: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as the operator `mcftensor::<name>`, and return a caller of it.

    The arguments and results are tensors, lists of tensors, numbers and strings. The function must
    not mutate or return its inputs. `fake` has the same arguments and says shape and dtype of the
    results, by tensors without data.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mcftensor::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.mcftensor, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, operator(*args, **kwargs))

        return call

    return register


def empty_terms(operands: Sequence[Tensor], dtype: torch.dtype, terms: int) -> list[Tensor]:
    """Tensors without data, of the shape to which the operands broadcast."""
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    device = next((x.device for x in operands if x.dim() > 0), operands[0].device)
    return [torch.empty(shape, dtype=dtype, device=device) for _ in range(terms)]


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """The plain Python function behind an opaque one, for use inside another opaque one."""
    return cast(Callable[P, R], function.__wrapped__)  # type: ignore[attr-defined]


def regroup(tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[list[Tensor]]:
    """A flat list of tensors as consecutive lists of these lengths."""
    rest = iter(tensors)
    return [list(itertools.islice(rest, length)) for length in lengths]


# Elements whose intermediate tensors fit into the second-level cache of a CPU core together.
_BLOCK = 32768


def in_blocks(
    function: Callable[[Sequence[Tensor]], list[Tensor]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """An elementwise function of tensors, on a CPU block by block, so that memory is read once.

    Tensors without dimensions go to every block.
    """
    whole = [x for x in tensors if x.dim() > 0]
    if (
        not whole
        or whole[0].device.type != "cpu"
        or whole[0].numel() <= _BLOCK
        or any(x.shape != whole[0].shape or not x.is_contiguous() for x in whole)
    ):
        return function(tensors)
    pieces = [x.view(-1).split(_BLOCK) if x.dim() > 0 else None for x in tensors]
    blocks = []
    for i in range(-(-whole[0].numel() // _BLOCK)):
        block = [x if p is None else p[i] for x, p in zip(tensors, pieces, strict=True)]
        blocks.append(function(block))
    return [torch.cat(parts).view(whole[0].shape) for parts in zip(*blocks, strict=True)]
