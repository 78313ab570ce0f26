"""Where a tensor operation goes, by the kind it is of.

1. `structure`: views, copies, factories; the same operation on each term.
2. `arithmetic`, `select`, and their `foreach` and `fused` forms: kernels of their own.
3. `collectives`: between processes; every term moves.
4. `variants`: what else writes in place or to `out=`, by way of its functional form.
5. `compute`: whatever else a parameter meets uses its leading term; a value goes by float64.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mcftensor.dispatch import collectives as collectives
from mcftensor.dispatch import elementwise as elementwise
from mcftensor.dispatch import fused as fused
from mcftensor.dispatch import models as models
from mcftensor.dispatch import nextafter as nextafter
from mcftensor.dispatch import placement as placement
from mcftensor.dispatch import ranks as ranks
from mcftensor.dispatch import scaling as scaling
from mcftensor.dispatch import select as select
from mcftensor.dispatch import stored as stored
from mcftensor.dispatch import structure as structure
from mcftensor.dispatch.compute import compute
from mcftensor.dispatch.float64 import is_view
from mcftensor.dispatch.foreach import foreach
from mcftensor.dispatch.functions import WHOLE, evaluate_whole
from mcftensor.dispatch.registry import SHORTCUTS, TABLE, Handler
from mcftensor.dispatch.variants import evaluate_into, functional, write
from mcftensor.tensor import MCFTensor

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out one of PyTorch's operators on arguments that hold an expansion."""
    handler = _handler(func)
    if handler in stored.OF_TERMS and stored.are_among((args, kwargs)):
        return stored.on_numbers(func, args, kwargs)
    return handler(func, *args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _handler(func: Any) -> Handler:
    handler = TABLE.get(func) or TABLE.get(func.name())
    if handler is not None:
        return handler
    if func.namespace in collectives.NAMESPACES:
        return collectives.refuse
    if func.overloadpacket.__name__.startswith("_foreach_"):
        return foreach
    if func.has_kernel_for_dispatch_key(_COMPOSITE):  # arrives whole in inference mode
        return _decompose
    if is_view(func):
        return structure.view
    return write if functional(func) else compute


def _decompose(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func.decompose(*args, **kwargs)


MCFTensor._dispatch = staticmethod(dispatch)
MCFTensor._whole = WHOLE
MCFTensor._evaluate_whole = staticmethod(evaluate_whole)
MCFTensor._shortcuts = SHORTCUTS
MCFTensor._evaluate_into = staticmethod(evaluate_into)
