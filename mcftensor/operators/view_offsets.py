"""Offsets of the pieces that a view cuts from a tensor, in elements after its first one.

They are computed from the arguments, since tensors of compilers have no addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

from torch import Tensor

from mcftensor.dispatch.operands import named_arguments


def starts_of_pieces(
    func: Any, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterable[int]:
    """Return the offset of each result of a view. Views other than cuts start at 0."""
    cut = _CUTS.get(func.overloadpacket.__name__)
    if cut is None:
        return repeat(0)
    named = named_arguments(func, (x, *args), kwargs)
    dim = named.get("dim", 0)
    stride = int(x.stride(dim))
    return [int(row) * stride for row in cut(int(x.shape[dim]), named)]


def _within(row: int, rows: int) -> int:
    return min(max(row + rows if row < 0 else row, 0), rows)


# By aten's names: the rows of a dimension at which pieces begin.
_CUTS: dict[str, Callable[[int, dict[str, Any]], Iterable[Any]]] = {
    "slice": lambda rows, named: [_within(int(named.get("start") or 0), rows)],
    "select": lambda rows, named: [_within(int(named["index"]), rows)],
    "unbind": lambda rows, named: range(rows),
    "split": lambda rows, named: range(0, max(rows, 1), int(named["split_size"]) or 1),
    "split_with_sizes": lambda rows, named: accumulate(chain([0], named["split_sizes"][:-1])),
}
