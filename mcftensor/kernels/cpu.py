"""Compiled C++ given its tables, and launched."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

import torch

from mcftensor.kernels.calls import Rows, number_of
from mcftensor.kernels.compiler import Launch

T = TypeVar("T")

# Elements a thread is worth starting for.
_GRAIN = 1 << 15


def launch(function: Launch, rows: Rows, scalars: Sequence[torch.dtype]) -> None:
    """Run compiled code on sets of dense tensors, whose scalars are of these dtypes."""
    words = rows.columns
    numbers = []
    columns = zip(*[call.scalars for call in rows.calls], strict=True)
    for dtype, column in zip(scalars, columns, strict=True):
        values = [x if type(x) is float else number_of(x) for x in column]
        if dtype == torch.int64:
            words.append(list(map(int, values)))
        else:
            numbers.append(values)
    table, fractions = array("q", _by_rows(words)), array("d", _by_rows(numbers))
    threads = max(1, min(torch.get_num_threads(), sum(rows.lengths) // _GRAIN))
    function(table.buffer_info()[0], fractions.buffer_info()[0], len(rows.calls), threads)


def _by_rows(columns: Sequence[Sequence[T]]) -> Iterator[T]:
    """The elements of columns, row by row."""
    return chain.from_iterable(zip(*columns, strict=True))
