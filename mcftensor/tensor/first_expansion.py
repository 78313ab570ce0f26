"""Functions that wait for the first expansion or scaled tensor of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable

WAITING: list[Callable[[], None]] = []
"""Functions to call before the first tensor is made; empty from then on. `wrapper` in
`components.py` calls `prepare` if this list is not empty."""

_lock = threading.RLock()


def prepare() -> None:
    """Call the waiting functions. A function that raises is called again with the next tensor."""
    with _lock:
        while WAITING:
            WAITING[0]()
            del WAITING[0]
