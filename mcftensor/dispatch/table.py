"""The table from PyTorch's operators to the functions that carry them out on expansions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Handler = Callable[..., Any]

TABLE: dict[Any, Handler] = {}


def implements(*operators: Any) -> Callable[[Handler], Handler]:
    """Register a handler, called as `handler(func, *args, **kwargs)`.

    An operator named without its overload stands for all its overloads.
    """

    def register(handler: Handler) -> Handler:
        for operator in operators:
            if isinstance(operator, torch._ops.OpOverloadPacket):
                for overload in operator.overloads():
                    TABLE[getattr(operator, overload)] = handler
            else:
                TABLE[operator] = handler
        return handler

    return register
