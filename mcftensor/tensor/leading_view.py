"""Decoded leading components of parameters whose leading component is a code with a shared scale.

A model computes with code times scale, decoded at each use, so that neither a graph nor a shard
keeps a copy. A view of such a parameter across rows, such as `weight.t()`, is a read-only
`LentTensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mcftensor.formats import lent as LENT
from mcftensor.kernels.custom_ops import is_bare
from mcftensor.passes.format_conversion import recode
from mcftensor.tensor.components import wrapper
from mcftensor.tensor.tensor import MCFTensor, each_view


class LentTensor(MCFTensor):
    """A read-only view of a decoded parameter. Only the parameter takes memory."""

    _source: MCFTensor
    _view: Callable[[Tensor], Tensor]

    @staticmethod
    def over(source: MCFTensor, view: Callable[[Tensor], Tensor]) -> MCFTensor:
        """Return the view of a parameter, given a function that views plain tensors."""
        codes = source._component0
        if not is_bare([codes]):  # a tensor of a compiler
            return MCFTensor.of([view(source.lent), view(source.dequantize())], LENT, "parameter")
        made = wrapper(LentTensor, view(codes), LENT)
        made._format, made._role = LENT, "parameter"
        made._source, made._view = source, view
        return made

    def views(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of a view operator."""
        return lent_views(func, self, args, kwargs)

    @property
    def _component0(self) -> Tensor:  # type: ignore[override]
        return self._view(self._source.lent)

    @property
    def _component1(self) -> Tensor:  # type: ignore[override]
        return self._view(self._source.dequantize())

    def _lying(self) -> Tensor:
        return self._view(self._source._lying())


def lent_views(func: Any, x: MCFTensor, args: Any, kwargs: Any) -> Any:
    """Return the results of a view operator on a decoded parameter, or on a view of one."""

    def over(_: Tensor, view: Callable[[Tensor], Tensor]) -> MCFTensor:
        if not isinstance(x, LentTensor):
            return LentTensor.over(x, view)
        first = x._view
        return LentTensor.over(x._source, lambda t: view(first(t)))

    return each_view(over, func, x._component0, args, kwargs)


def holding(x: MCFTensor, numbers: Tensor) -> MCFTensor:
    """Return a copy of decoded numbers as a parameter in the format of x.

    If that format has blocks of rows and the numbers have no rows, the copy is in the format of the
    states.
    """
    source = x._source if isinstance(x, LentTensor) else x
    format, writes = source._format, source._count
    if format is LENT or numbers.dim() < 2:
        format, writes = format.of_states, None
    made = recode([numbers], "float32", format.nearest.name, None)
    writes = None if writes is None else writes.clone()
    return MCFTensor.of(made, format, "parameter", own=True, writes=writes)
