"""Caches with a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A mapping that forgets what was not asked for longest, once it holds more than so many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._found: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: K) -> V | None:
        """What was put under a key, if it is still there."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, key: K, value: V) -> V:
        """Put a value under a key, and return it."""
        with self._lock:
            self._found[key] = value
            while len(self._found) > self.most:
                self._found.popitem(last=False)
        return value
