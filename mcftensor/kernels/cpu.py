"""Compiled C++ given its tables, and launched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from mcftensor.kernels.calls import by_rows, number_of, repeated
from mcftensor.kernels.compiler import Launch

# Elements a thread is worth starting for.
_GRAIN = 1 << 15


def launch(
    function: Launch,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Tensor | float]],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Run compiled code on dense tensors of these lengths and addresses, given by columns, and on
    scalars of these dtypes."""
    count = len(lengths)
    words: list[Sequence[int]] = [lengths, *addresses]
    numbers = []
    for dtype, column in zip(dtypes, scalars, strict=True):
        values = [x if type(x) is float else number_of(x) for x in column]
        if dtype == torch.int64:
            words.append(repeated([int(x) for x in values], count))
        else:
            numbers.append(values)
    table = array("q", by_rows(words))
    if all(len(values) == 1 for values in numbers):  # mostly
        fractions = array("d", chain.from_iterable(numbers)) * count
    else:
        fractions = array("d", by_rows([repeated(values, count) for values in numbers]))
    threads = max(1, min(torch.get_num_threads(), sum(lengths) // _GRAIN))
    function(table.buffer_info()[0], fractions.buffer_info()[0], count, threads)
