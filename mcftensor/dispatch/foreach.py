"""`torch._foreach_*`: the operation of the same name, tensor by tensor.

Lists may mix formats, plain parameters and plain states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

# The fourth argument of these is a keyword of the single operation.
_VALUED = ("addcmul", "addcdiv")

# These take a number as their second operand only under another name.
_WITH_NUMBER = {"maximum": "clamp_min", "minimum": "clamp_max"}


def foreach(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `_foreach_name` as a loop over `name`.

    A list of tensors or of numbers supplies one element a step; all else goes to every step.
    """
    full_name = func.overloadpacket.__name__.removeprefix("_foreach_")
    name = full_name.removesuffix("_")
    in_place = full_name != name
    if name in _WITH_NUMBER and func._overloadname.startswith("Scalar"):
        name = _WITH_NUMBER[name]
        full_name = name + "_" * in_place
    single = getattr(aten, full_name, None)
    if name in _VALUED and func._overloadname == "Tensor":
        args = (*args[:3], args[3].tolist())
    lengths = [len(a) for a in args if isinstance(a, Sequence)]
    if len(set(lengths)) > 1:
        raise ValueError(f"{func}: lists of lengths {lengths}; all must be alike")
    results = []
    for i in range(lengths[0]):
        step = [a[i] if isinstance(a, Sequence) else a for a in args]
        keywords = kwargs | ({"value": step.pop()} if name in _VALUED and len(step) == 4 else {})
        if single is not None:
            results.append(single(*step, **keywords))
        else:  # _foreach_maximum_ exists, maximum_ does not
            step[0].copy_(getattr(aten, name)(*step, **keywords))
    return None if in_place else results
