"""The table from PyTorch's operators to the functions that carry them out on expansions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Handler = Callable[..., Any]

TABLE: dict[Any, Handler] = {}

FAMILIES: dict[str, Handler] = {}
"""Handlers of operators without one of their own: of a namespace, by its name, and of "view"s."""

# Handlers of PyTorch's functions that bypass its dispatcher in eager code. Each is called with the
# function, args and kwargs, and returns NotImplemented if the dispatcher is needed.
Shortcut = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
SHORTCUTS: dict[Any, Shortcut] = {}
IN_STEP: dict[Any, Shortcut] = {}
"""Shortcuts of calls within an optimizer's step, tried first."""


def implements(*operators: Any) -> Callable[[Handler], Handler]:
    """Register a handler, called as `handler(func, *args, **kwargs)`.

    An operator named without its overload stands for all its overloads except those with `out=`.
    """

    def register(handler: Handler) -> Handler:
        for operator in operators:
            if isinstance(operator, torch._ops.OpOverloadPacket):
                for overload in operator.overloads():
                    if not overload.endswith("out"):
                        TABLE[getattr(operator, overload)] = handler
            else:
                TABLE[operator] = handler
        return handler

    return register


def register_forms(name: str, new: Handler, in_place: Handler, with_out: Handler) -> None:
    """Register handlers for all overloads of aten's `name`, `name_` and `name` with `out=`.

    Overloads with a rounding mode, which divide to whole numbers, are left out.
    """
    for packet_name in (name, name + "_"):
        packet = getattr(torch.ops.aten, packet_name, None)
        for overload in packet.overloads() if packet is not None else ():
            if "mode" not in overload:
                handler = with_out if overload.endswith("out") else new
                func = getattr(packet, overload)
                TABLE[func] = in_place if packet_name != name else handler


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# Derivatives whose parts underflow before the whole does.
_WHOLE = {torch.ops.aten.silu_backward.default, torch.ops.aten.mish_backward.default}


def handler_of(func: Any, own: Handler | None, foreach: Handler, view: Handler) -> Handler | None:
    """Return the handler of an operator, or None.

    It is the operator's own handler, or the handler of lists, of composite operators or of views.
    """
    if own is not None:
        return own
    if func.overloadpacket.__name__.startswith("_foreach_"):
        return foreach
    if func in _WHOLE:
        return None
    if func.has_kernel_for_dispatch_key(_COMPOSITE):  # arrives whole in inference mode
        return lambda func, *args, **kwargs: func.decompose(*args, **kwargs)
    if any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns):
        return view
    return None
