"""`torch._foreach_*`: arithmetic on lists in one pass, other operations tensor by tensor.

Lists may mix formats, plain parameters and plain states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcftensor.dispatch import stored
from mcftensor.dispatch.elementwise import evaluated, evaluated_into
from mcftensor.dispatch.operands import are_lifted, computes_plainly, leading
from mcftensor.dispatch.plans import FORMULAS
from mcftensor.dispatch.recording import some_rows
from mcftensor.tensor.tensor import MCFTensor

aten = torch.ops.aten

# The fourth argument of these is a keyword of the single operation.
_VALUED = ("addcmul", "addcdiv")

# These take a number as their second operand only under another name.
_WITH_NUMBER = {"maximum": "clamp_min", "minimum": "clamp_max"}


def foreach(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `_foreach_name` as `name` on each element of its lists.

    A list of tensors or of numbers supplies one element a row; all else goes to every row.
    """
    given = args
    full_name = func.overloadpacket.__name__.removeprefix("_foreach_")
    name = full_name.removesuffix("_")
    in_place = full_name != name
    if name in _WITH_NUMBER and func._overloadname.startswith("Scalar"):
        name = _WITH_NUMBER[name]
        full_name = name + "_" * in_place
    if name in _VALUED and func._overloadname == "Tensor":
        args = (*args[:3], args[3].tolist())
    lengths = [len(a) for a in args if isinstance(a, Sequence)]
    if len(set(lengths)) > 1:
        raise ValueError(f"{func}: lists of lengths {lengths}; all must be alike")
    count = lengths[0]
    keywords = ("value",) if name in _VALUED and len(args) == 4 else tuple(kwargs)
    columns = [a if isinstance(a, Sequence) else [a] for a in (*args, *kwargs.values())]

    def row(i: int) -> list[Any]:
        return [x[i % len(x)] for x in columns]

    def single(i: int) -> Any:
        operands = row(i)
        own = operands[: len(operands) - len(keywords)]
        named = dict(zip(keywords, operands[len(own) :], strict=True))
        if hasattr(aten, full_name):
            return getattr(aten, full_name)(*own, **named)
        # _foreach_maximum_ exists, maximum_ does not
        return own[0].copy_(getattr(aten, name)(*own, **named))

    onto_plain = in_place and not any(isinstance(x, MCFTensor) for x in columns[0])
    if onto_plain and are_lifted(given):
        return func(*leading(given), **leading(kwargs))
    if any(map(stored.are_among, columns)):
        if in_place and count > 1 and not stored.are_apart(columns):
            for i in range(count):  # a row may read what the one before has written
                single(i)
            return _written(given)
        whole = [i for i in range(count) if _is_stored(row(i))]
        made = dict(stored.foreach_on_numbers(func, whole, given, kwargs, single)) if whole else {}
        made |= {i: single(i) for i in range(count) if i not in made}
        return _written(given) if in_place else [made[i] for i in range(count)]
    if not in_place:
        ours = [i for i in range(count) if name in FORMULAS and _are_ours(row(i))]
        if not ours:
            return [single(i) for i in range(count)]
        results = evaluated(name, some_rows(columns, ours, count), keywords, len(ours))
        found = dict(zip(ours, results, strict=True))
        return [found[i] if i in found else single(i) for i in range(count)]
    are_ours = name in FORMULAS and all(isinstance(x, MCFTensor) for x in columns[0])
    if not (are_ours and evaluated_into(name, columns, keywords, count)):
        for i in range(count):
            single(i)
    return _written(args)


def _written(args: Sequence[Any]) -> None:
    """Tell autograd, which lists do not do by themselves."""
    if torch._C._len_torch_dispatch_stack() == 0:
        torch.autograd.graph.increment_version(args[0])


def _is_stored(operands: Sequence[Any]) -> bool:
    """Whether a row is for PyTorch's own operation on numbers."""
    return stored.are_numbers(operands) and not computes_plainly(operands)


def _are_ours(operands: Sequence[Any]) -> bool:
    return any(isinstance(x, MCFTensor) for x in operands) and not computes_plainly(operands)
