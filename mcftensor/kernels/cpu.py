"""Compiled C++ given its tables, and launched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.kernels.columns import number_of
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
    words, numbers = array("q", lengths), array("d")
    for addresses_of_one in addresses:
        words += array("q", addresses_of_one)
    for dtype, column in zip(dtypes, scalars, strict=True):
        values = [x if type(x) is float else number_of(x) for x in column]
        times = count // len(values)  # one for each set, or one for all
        if dtype == torch.int64:
            words += array("q", map(int, values)) * times
        else:
            numbers += array("d", values) * times
    threads = max(1, min(torch.get_num_threads(), sum(lengths) // _GRAIN))
    function(words.buffer_info()[0], numbers.buffer_info()[0], count, threads)
