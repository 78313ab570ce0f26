"""What waits until the process makes its first expansion or scaled tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable

WAITING: list[Callable[[], None]] = []
"""Functions to call before the first tensor is made; empty from then on. Both tensor classes call
`prepare` before they make a tensor if this list is not empty."""

_lock = threading.RLock()


def prepare() -> None:
    """Call the waiting functions; one that raises is called again with the next tensor."""
    with _lock:
        while WAITING:
            WAITING[0]()
            del WAITING[0]
