"""What waits until the process makes its first expansion or scaled tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable

WAITING: list[Callable[[], None]] = []
"""Functions to call before the first tensor is made; empty from then on. Who makes tensors looks
here, and calls `prepare` if there is something."""

_lock = threading.RLock()


def prepare() -> None:
    """Call what waits. A function that raises stays, and is called again with the next tensor."""
    with _lock:
        while WAITING:
            WAITING[0]()
            del WAITING[0]
