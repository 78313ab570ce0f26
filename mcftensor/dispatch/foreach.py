"""`torch._foreach_*`: the operations of the table on lists, and other operations tensor by tensor.

Lists may mix formats, plain parameters and plain states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcftensor.dispatch import storage_formats
from mcftensor.dispatch.evaluate import evaluate_rows, evaluate_rows_into, require_writable
from mcftensor.dispatch.inplace_and_out import as_values
from mcftensor.dispatch.operands import are_lifted, check_update, computes_plainly, leading
from mcftensor.dispatch.store import assign
from mcftensor.passes.operators import OPERATORS
from mcftensor.tensor.tensor import MCFTensor

aten = torch.ops.aten

# These take a number as their second operand only under another name.
_WITH_NUMBER = {"maximum": "clamp_min", "minimum": "clamp_max"}


def foreach(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `_foreach_name` as `name` on each element of its lists.

    A list of tensors or of numbers supplies one element a row; other arguments apply to every row.
    """
    lists = ListCall(func, args, kwargs)
    targets = lists.columns[0]
    if not lists.in_place:
        made = lists.evaluated()
        return lists.by_torch(made)
    if not any(isinstance(x, MCFTensor) for x in targets) and are_lifted(args):
        return func(*leading(args), **leading(kwargs))
    require_writable(lists.name, targets)
    if not lists.evaluated_into():
        lists.by_torch([None] * lists.count)
    if torch._C._len_torch_dispatch_stack() == 0:  # list operators do not increment versions
        torch.autograd.graph.increment_version(args[0])
    return None


class ListCall:
    """The arguments of a function of lists as columns; a single value serves every row."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        full_name = func.overloadpacket.__name__.removeprefix("_foreach_")
        name = full_name.removesuffix("_")
        self.in_place = full_name != name
        if name in _WITH_NUMBER and func._overloadname.startswith("Scalar"):
            name = _WITH_NUMBER[name]
        self.name = name
        self.keywords = tuple(kwargs)
        operator = OPERATORS.get(name)
        if operator is not None and len(args) > operator.operands:
            assert operator.keyword is not None
            self.keywords = (operator.keyword,)
            if func._overloadname == "Tensor":
                args = (*args[:-1], args[-1].tolist())
        lengths = [len(a) for a in args if isinstance(a, Sequence)]
        if len(set(lengths)) > 1:
            raise ValueError(f"{func}: lists of lengths {lengths}; all must be alike")
        self.count = lengths[0]
        self.columns = [a if isinstance(a, Sequence) else [a] for a in (*args, *kwargs.values())]

    def evaluated(self) -> list[Any]:
        """Return the results of rows that have kernels for expansions, and None for other rows."""
        if self.name not in OPERATORS:
            return [None] * self.count
        return evaluate_rows(self.name, self.columns, self.keywords, self.count)

    def evaluated_into(self) -> bool:
        """Write into the first column if all rows have such kernels, and return whether it was
        done.
        """
        are_ours = all(isinstance(x, MCFTensor) for x in self.columns[0])
        return (
            are_ours
            and self.name in OPERATORS
            and bool(evaluate_rows_into(self.name, self.columns, self.keywords, self.count))
        )

    def by_torch(self, made: list[Any]) -> list[Any]:
        """Carry out the rows without results, with rows of stored numbers together."""
        left = [i for i in range(self.count) if made[i] is None]
        if storage_formats.are_among(self.columns):
            is_in_order = (
                self.in_place and self.count > 1 and not storage_formats.are_apart(self.columns)
            )
            rows = [] if is_in_order else [i for i in left if self._is_stored(i)]
            if self.name == "copy":
                for i in rows:
                    target, source, *_ = self._row(i)
                    check_update(self.func, target, source)
            if rows:
                given = self.func, rows, self.args, self.kwargs, self._single
                for i, result in storage_formats.foreach_on_numbers(*given):
                    made[i] = result
            left = [i for i in left if i not in {*rows}]
        for i in left:  # a row may read the result that an earlier row wrote in place
            made[i] = self._single(i)
        return made

    def _row(self, i: int) -> list[Any]:
        return [x[i % len(x)] for x in self.columns]

    def _is_stored(self, i: int) -> bool:
        row = self._row(i)
        return storage_formats.are_numbers(row) and (self.in_place or not computes_plainly(row))

    def _single(self, i: int) -> Any:
        operands = self._row(i)
        own = operands[: len(operands) - len(self.keywords)]
        named = dict(zip(self.keywords, operands[len(own) :], strict=True))
        function = getattr(aten, self.name + "_" * self.in_place, None)
        if function is not None:
            return function(*own, **named)
        # _foreach_maximum_ exists, maximum_ does not
        assign(self.func, own[:1], [getattr(aten, self.name)(*as_values(own), **named)])
        return own[0]
