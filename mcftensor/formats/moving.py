"""Operators that move elements, applied to each component.

Blocks that share a scale lie within rows, which the first dimension indexes. So operations along
this dimension apply to each component alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from mcftensor.formats.format import Component

_COPIES = ("alias", "detach", "clone", "_to_copy", "_pin_memory")
# The position of the dimension in the arguments after the tensor, and its default.
_ALONG = {
    "slice": (0, 0),
    "split": (1, 0),
    "split_with_sizes": (1, 0),
    "index_select": (0, None),
}
_DIMENSIONS = {"flip": 0, "roll": 1}
_VIEWS = ("view", "_unsafe_view", "reshape")


def move_component(func: Any, stored: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply an operator that moves elements to a component of any dtype."""
    bits = movable(stored)
    if bits is stored:
        return func(stored, *args, **kwargs)
    return tree_map(lambda x: x.view(stored.dtype), func(bits, *args, **kwargs))


def movable(stored: Tensor) -> Tensor:
    """Return a component, viewed as bytes if it holds 8-bit floats.

    Most of PyTorch's operators that move elements, its pickles and its collectives do not take
    8-bit floats.
    """
    return stored.view(torch.uint8) if stored.dtype in _FLOATS_OF_8_BITS else stored


def unmoved(moved: Tensor, component: Component) -> Tensor:
    """Return the result of `movable`, viewed in the dtype of the component."""
    return moved.view(component.dtype) if component.dtype in _FLOATS_OF_8_BITS else moved


_FLOATS_OF_8_BITS = frozenset(
    x
    for x in vars(torch).values()
    if isinstance(x, torch.dtype) and x.is_floating_point and x.itemsize == 1
)


def move_rows(
    func: Any, stored: Sequence[Tensor], shape: torch.Size, args: Any, kwargs: Any, *, own: bool
) -> list[Any] | None:
    """Apply an operator that moves whole rows to each component of a format with shared blocks.

    Returns results with their memory if `own` is set, else possibly views; None if the operator
    would cut a block.
    """
    name = func.overloadpacket.__name__.removesuffix("_copy") or "_to_copy"
    if (name in _VIEWS and _keeps_rows(shape, args)) or (
        name == "slice" and _takes_all(shape, *args)
    ):
        return [
            func(x, *args) if x.shape == shape else x.clone() if own else x.detach() for x in stored
        ]
    if func.overloadpacket.__name__ in _COPIES or _takes_rows(name, shape, args, kwargs):
        return [move_component(func, x, args, options_for(x, shape, kwargs)) for x in stored]
    return None


def _takes_rows(name: str, shape: torch.Size, args: Any, kwargs: Any) -> bool:
    if name in _ALONG:
        place, default = _ALONG[name]
        dim = kwargs.get("dim", args[place] if len(args) > place else default)
        return dim in (0, -len(shape))
    if name in _DIMENSIONS:
        place = _DIMENSIONS[name]
        return len(args) > place and list(args[place]) in ([0], [-len(shape)])
    if name == "index":
        (indices,) = args
        return len(indices) == 1 and indices[0] is not None and indices[0].dim() == 1
    return False


def view_of_rows(name: str, shape: torch.Size, args: Any) -> torch.Size | None:
    """Return the shape of a view by an operator of this name if it has the same rows, else None."""
    if name not in _VIEWS or not _keeps_rows(shape, args):
        return None
    return torch.empty(shape, device="meta").view(args[0]).shape


def _keeps_rows(shape: torch.Size, args: Any) -> bool:
    """Whether a view with another shape has the same rows."""
    other = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    known = torch.Size(n for n in other if n != -1).numel()
    first = other[0] if other else None
    if first == -1:
        first = shape.numel() // known if known else None
    return len(other) > 1 and first == shape[0]


def _takes_all(
    shape: torch.Size, dim: int = 0, start: Any = None, end: Any = None, *step: int
) -> bool:
    """Whether a slice is the whole tensor, as when shards are cut along any dimension."""
    return start in (None, 0) and (end is None or end >= shape[dim]) and step in ((), (1,))


def options_for(stored: Tensor, shape: torch.Size, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an operation on a component, which may differ in dimensions."""
    if stored.shape == shape:
        return kwargs
    return {name: option for name, option in kwargs.items() if name != "memory_format"}
