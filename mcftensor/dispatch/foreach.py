"""`torch._foreach_*`: arithmetic on lists in one pass, other operations tensor by tensor.

Lists may mix formats, plain parameters and plain states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcftensor.dispatch.elementwise import evaluated, evaluated_into
from mcftensor.dispatch.operands import computes_plainly
from mcftensor.dispatch.plans import FORMULAS
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
    columns: list[Sequence[Any]] = [a if isinstance(a, Sequence) else [a] for a in args]
    named: dict[str, Sequence[Any]] = {key: [x] for key, x in kwargs.items()}
    if name in _VALUED and len(columns) == 4:
        named["value"] = columns.pop()
    rows = _Rows(name, full_name, columns, named, lengths[0])
    if not in_place:
        return rows.results()
    rows.write()
    if torch._C._len_torch_dispatch_stack() == 0:  # lists do not do it by themselves
        torch.autograd.graph.increment_version(args[0])
    return None


class _Rows:
    """What an operation is to be applied to, row by row, by columns."""

    def __init__(
        self,
        name: str,
        full_name: str,
        columns: list[Sequence[Any]],
        named: dict[str, Sequence[Any]],
        count: int,
    ) -> None:
        self.name, self.full_name = name, full_name
        self.columns, self.named, self.count = columns, named, count

    def results(self) -> list[Any]:
        """New results, all that are expansions at once."""
        own = [i for i in range(self.count) if self._is_ours(i)]
        results = (
            [None if i in own else self._single(i) for i in range(self.count)]
            if (len(own) < self.count)
            else [None] * self.count
        )
        if own:
            every = self._only(own)
            for i, x in zip(
                own, evaluated(self.name, every, (*self.named,), len(own)), strict=True
            ):
                results[i] = x  # type: ignore[call-overload]
        return results

    def write(self) -> None:
        """Write into the first column, all at once where that is possible."""
        if self.name in FORMULAS and all(isinstance(x, MCFTensor) for x in self.columns[0]):
            every = self._only(range(self.count))
            if evaluated_into(self.name, every, (*self.named,), self.count):
                return
        for i in range(self.count):
            self._single(i)

    def _is_ours(self, i: int) -> bool:
        if self.name not in FORMULAS:
            return False
        args, kwargs = self._row(i)
        return any(isinstance(x, MCFTensor) for x in args) and not computes_plainly(
            (*args, *kwargs.values())
        )

    def _only(self, rows: Sequence[int]) -> list[Sequence[Any]]:
        every = [*self.columns, *self.named.values()]
        if len(rows) == self.count:
            return every
        return [[x[i] for i in rows] if len(x) == self.count else x for x in every]

    def _row(self, i: int) -> tuple[list[Any], dict[str, Any]]:
        """The operands of a row, and its keywords."""
        args = [x[i % len(x)] for x in self.columns]
        return args, {name: x[i % len(x)] for name, x in self.named.items()}

    def _single(self, i: int) -> Any:
        args, kwargs = self._row(i)
        single = getattr(aten, self.full_name, None)
        if single is not None:
            return single(*args, **kwargs)
        # _foreach_maximum_ exists, maximum_ does not
        return args[0].copy_(getattr(aten, self.name)(*args, **kwargs))
