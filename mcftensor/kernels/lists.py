"""Lists of rows and columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K")


def regroup(flat: Sequence[T], lengths: Sequence[int]) -> list[list[T]]:
    """A flat list as consecutive lists of these lengths."""
    rest = iter(flat)
    return [list(itertools.islice(rest, length)) for length in lengths]


def columns_of(flat: Sequence[T], length: int) -> list[Sequence[T]]:
    """A flat list as consecutive lists of this length."""
    return [flat[i : i + length] for i in range(0, len(flat), length)]


def places_of(keys: Iterable[K]) -> dict[K, list[int]]:
    """Where each key stands in a list of them."""
    found: dict[K, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found
