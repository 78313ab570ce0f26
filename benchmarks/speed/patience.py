"""An end to what takes too long, such as compiling one function of thousands of tensors."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when a block takes longer than `seconds`."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"given up after {seconds:g} s of building and first steps")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
