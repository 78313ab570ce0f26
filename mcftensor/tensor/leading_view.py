"""Decoded leading components of parameters whose leading component is a code with a shared scale.

A model computes with code times scale, decoded at each use, so that neither a graph nor a shard
keeps a copy. A view of such a parameter across rows, such as `weight.t()`, is a read-only
`ComputeView`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mcftensor.formats import compute_view as COMPUTE_VIEW
from mcftensor.kernels.columns import is_bare
from mcftensor.passes.format_conversion import recode
from mcftensor.tensor.components import wrapper
from mcftensor.tensor.step_tensors import each_view
from mcftensor.tensor.tensor import MCFTensor


class ComputeView(MCFTensor):
    """A read-only view of a decoded parameter. Only the parameter takes memory."""

    _source: MCFTensor
    _view: Callable[[Tensor], Tensor]

    @staticmethod
    def over(source: MCFTensor, view: Callable[[Tensor], Tensor]) -> MCFTensor:
        """Return the view of a parameter, given a function that views plain tensors."""
        codes = source._component0
        if not is_bare([codes]):  # a tensor of a compiler
            return MCFTensor.of(
                [view(source.compute_tensor), view(source.dequantize())], COMPUTE_VIEW, "parameter"
            )
        made = wrapper(ComputeView, view(codes), COMPUTE_VIEW)
        made._format, made._role = COMPUTE_VIEW, "parameter"
        made._source, made._view = source, view
        return made

    def views(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of a view operator."""
        return compute_views(func, self, args, kwargs)

    @property
    def _component0(self) -> Tensor:  # type: ignore[override]
        return self._view(self._source.compute_tensor)

    @property
    def _component1(self) -> Tensor:  # type: ignore[override]
        return self._view(self._source.dequantize())

    def _lying(self) -> Tensor:
        return self._view(self._source._lying())


def compute_views(func: Any, x: MCFTensor, args: Any, kwargs: Any) -> Any:
    """Return the results of a view operator on a decoded parameter, or on a view of one."""

    def over(_: Tensor, view: Callable[[Tensor], Tensor]) -> MCFTensor:
        if not isinstance(x, ComputeView):
            return ComputeView.over(x, view)
        first = x._view
        return ComputeView.over(x._source, lambda t: view(first(t)))

    return each_view(over, func, x._component0, args, kwargs)


def holding(x: MCFTensor, numbers: Tensor) -> MCFTensor:
    """Return a copy of decoded numbers as a parameter in the format of x.

    If that format has blocks of rows and the numbers have no rows, the copy is in the format of the
    states.
    """
    source = x._source if isinstance(x, ComputeView) else x
    format, writes = source._format, source._count
    if format is COMPUTE_VIEW or numbers.dim() < 2:
        format, writes = format.of_states, None
    made = recode([numbers], "float32", format.nearest.name, None)
    writes = None if writes is None else writes.clone()
    return MCFTensor.of(made, format, "parameter", own=True, writes=writes)
