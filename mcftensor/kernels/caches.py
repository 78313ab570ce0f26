"""Caches that do not grow without end."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """What was used last, as long as it costs no more than `most` together; for several threads.

    Args:
        most: number of entries, or of whatever `cost` counts, such as bytes.
        cost: of an entry, by its value. One that costs more than `most` is not kept.
    """

    def __init__(self, most: int, cost: Callable[[V], int] = lambda value: 1) -> None:
        self.most = most
        self.cost = cost
        self.total = 0
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value of a key, which is then the last to go."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> V:
        """Keep a value, return it, and let go of those used longest ago."""
        with self._lock:
            if key in self._entries:
                self.total -= self.cost(self._entries.pop(key))
            if self.cost(value) <= self.most:
                self._entries[key] = value
                self.total += self.cost(value)
            while self.total > self.most:
                self.total -= self.cost(self._entries.popitem(last=False)[1])
        return value

    def values(self) -> list[V]:
        """All values, those used longest ago first."""
        with self._lock:
            return list(self._entries.values())

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._entries.clear()
            self.total = 0

    def __len__(self) -> int:
        return len(self._entries)
