"""Where an operation goes, by its kind, and the modules of this folder in the order it meets them.

First of all `functions` takes a few functions whole, and `models` those of models without
gradients. Any other operator is looked up in the table of `registry`; `operands` says what its
tensors and numbers mean, and `stored` decodes those of formats that only store.

1. Structure, on each term alike: `structure` moves, copies and makes elements, `placement` puts
   them into places, and `collectives` moves them between processes.
2. Arithmetic, by kernels of its own: `elementwise`, as `plans` works it out; `foreach` for lists;
   `fused` for steps of optimizers; `scaling` for GradScaler, and `sparse` for sparse gradients.
   What only compares elements is exact: `select` between operands, `ranks` within one,
   `nextafter` for neighbours.
3. Compute on a parameter: `compute`, with the leading term.
4. All else, on a value: `compute` sends it to `float64`, or beyond 48 bits to the algorithms of
   `long`. `variants` makes of what writes in place or to `out=` the form that returns its result,
   and `writing` writes that, into all targets or none.
5. What cannot carry the precision raises the refusal that `writing` words.
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
from mcftensor.dispatch.variants import by_functional_form, evaluate_into, functional
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
    return by_functional_form if functional(func) else compute


def _decompose(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func.decompose(*args, **kwargs)


MCFTensor._dispatch = staticmethod(dispatch)
MCFTensor._whole = WHOLE
MCFTensor._evaluate_whole = staticmethod(evaluate_whole)
MCFTensor._shortcuts = SHORTCUTS
MCFTensor._evaluate_into = staticmethod(evaluate_into)
