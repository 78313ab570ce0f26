"""Kernels that are called as compiled code is, by addresses, and run by eager PyTorch."""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from mcftensor.kernels import execute
from mcftensor.kernels.block_scales import BLOCK_SIZE


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _launch(kernel: execute.Kernel) -> Callable[[int, int, int, int], None]:
    signature = kernel.signature
    dtypes = (*signature.vectors, *signature.outputs)
    wholes = signature.scalars.count(torch.int64)
    first = 1 + len(dtypes) + bool(signature.shared)  # the lengths of rows, too

    def launch(words: int, numbers: int, count: int, threads: int) -> None:
        columns = _at(words, (first + wholes) * count, torch.int64).view(-1, count)
        floats = [] if wholes == len(signature.scalars) else _at(
            numbers, (len(signature.scalars) - wholes) * count, torch.float64
        ).view(-1, count)  # fmt: skip
        for row in range(count):
            length, *left = columns[:, row].tolist()
            shape = (-1, BLOCK_SIZE) if signature.shared else (length,)
            tensors = []
            for i, dtype in enumerate(dtypes):
                width = BLOCK_SIZE if i in signature.shared else 2 if i in signature.packed else 1
                own = _at(left[i], length // width, dtype)
                tensors.append(own.view((-1, BLOCK_SIZE // width) if width > 1 else shape))
            integers = iter(columns[first:, row])
            others = iter([x[row] for x in floats])
            scalars = [next(integers if x == torch.int64 else others) for x in signature.scalars]
            vectors = tensors[: len(signature.vectors)]
            index = torch.arange(math.prod(vectors[0].shape)).view(vectors[0].shape)
            if signature.shared:
                index = torch.arange(length).view(shape)
            results = kernel.body(vectors, scalars, index)
            for x, y in zip(results, tensors[len(vectors) :], strict=True):
                y.copy_(x)

    return launch


@contextmanager
def eager_kernels() -> Iterator[list[object]]:
    """Within it all kernels are compiled, as it seems; yields the bodies of those that ran."""
    ran: list[object] = []

    def compiled(self: execute.Kernel, elements: int, calls: int = 1) -> object:
        ran.append(self.body)
        return _launch(self)

    with (
        mock.patch.object(execute.Kernel, "compiled", compiled),
        mock.patch.object(execute.Kernel, "run_rows", return_value=False),
    ):
        yield ran
