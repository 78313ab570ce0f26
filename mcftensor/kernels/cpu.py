"""Compiled C++ given its tables, and launched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from mcftensor.kernels.calls import Rows, by_rows, number_of
from mcftensor.kernels.compiler import Launch

# Elements a thread is worth starting for.
_GRAIN = 1 << 15


def launch(function: Launch, rows: Rows, scalars: Sequence[torch.dtype]) -> None:
    """Run compiled code on sets of dense tensors, whose scalars are of these dtypes."""
    words = rows.columns
    numbers = []
    for dtype, column in zip(scalars, rows.scalars, strict=True):
        values = [x if type(x) is float else number_of(x) for x in column]
        if dtype == torch.int64:
            words.append(list(map(int, values)))
        else:
            numbers.append(values)
    table, fractions = array("q", by_rows(words)), array("d", by_rows(numbers))
    threads = max(1, min(torch.get_num_threads(), sum(rows.lengths) // _GRAIN))
    function(table.buffer_info()[0], fractions.buffer_info()[0], len(rows.calls), threads)
