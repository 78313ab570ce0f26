"""Handlers of PyTorch's operators on expansions; README.md lists them in their order."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mcftensor.dispatch import batch_norm as batch_norm
from mcftensor.dispatch import collectives as collectives
from mcftensor.dispatch import comparison as comparison
from mcftensor.dispatch import defer as defer
from mcftensor.dispatch import dtype_in_step as dtype_in_step
from mcftensor.dispatch import elementwise as elementwise
from mcftensor.dispatch import floor_and_remainder as floor_and_remainder
from mcftensor.dispatch import format_as_dtype as format_as_dtype
from mcftensor.dispatch import fused as fused
from mcftensor.dispatch import powers_of_two as powers_of_two
from mcftensor.dispatch import structure as structure
from mcftensor.dispatch.default_handler import compute
from mcftensor.dispatch.foreach import foreach
from mcftensor.dispatch.inplace_and_out import (
    by_functional_form,
    computes_in_place,
    evaluate_into,
    onto_plain,
)
from mcftensor.dispatch.registry import SHORTCUTS, TABLE, Handler, handler_of
from mcftensor.dispatch.torch_functions import WHOLE, evaluate_whole
from mcftensor.dispatch.write_results import functional
from mcftensor.tensor import MCFTensor


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out one of PyTorch's operators on arguments with an expansion among them."""
    return _handler(func)(func, *args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _handler(func: Any) -> Handler:
    handler = _own_handler(func)
    return onto_plain(handler) if computes_in_place(func) else handler


def _own_handler(func: Any) -> Handler:
    own = TABLE.get(func) or TABLE.get(func.name())
    if own is None and func.namespace == "prims":
        own = _of_prims(func)
    if own is None and func.namespace in collectives.NAMESPACES:
        own = collectives.refuse
    found = handler_of(func, own, foreach, structure.view)
    return found or (by_functional_form if functional(func) else compute)


def _of_prims(func: Any) -> Handler | None:
    """Return a handler that calls aten's operator of the same name and arguments, or None.

    Forward derivatives call prims, the building blocks of PyTorch's references.
    """
    if func is torch.ops.prims.convert_element_type.default:
        return lambda func, x, dtype: x.to(dtype)
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__, None)
    if packet is None or any(x.alias_info is not None for x in func._schema.returns):
        return None
    wanted = [a.type for a in func._schema.arguments]
    for name in packet.overloads():
        given = getattr(packet, name)._schema
        required = [a.type for a in given.arguments if not a.has_default_value()]
        if required == wanted and not given.is_mutable:
            return lambda func, *args: packet(*args)
    return None


MCFTensor._dispatch = staticmethod(dispatch)
MCFTensor._whole = WHOLE
MCFTensor._evaluate_whole = staticmethod(evaluate_whole)
MCFTensor._shortcuts = SHORTCUTS
MCFTensor._evaluate_into = staticmethod(evaluate_into)
