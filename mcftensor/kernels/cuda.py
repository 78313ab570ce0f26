"""Triton kernels made, given their tables, and launched."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels import triton
from mcftensor.kernels.columns import by_rows, number_of, repeated
from mcftensor.kernels.compiler import digest, directory, write_whole
from mcftensor.kernels.program import Program

# Tables on a device, by what is in them and the stream that they were copied on; those that a CUDA
# graph was captured with stay.
_TABLES: dict[Any, Tensor] = {}
_MOST_TABLES = 256
_CAPTURED: list[Tensor] = []


@dataclass
class _Kernel:
    """A compiled program, and how many warps a block of it has."""

    function: Any
    warps: int

    def launch(self, blocks: int, *tables: Tensor, aligned: bool) -> None:
        """Launch it; if its registers did not suffice, it has more threads from the next time on.

        How many registers a program takes differs from release to release of NVIDIA's compiler.
        """
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        ran = self.function[(blocks,)](*tables, BLOCK=triton.BLOCK, ALIGNED=aligned, **options)
        if getattr(ran, "n_spills", 0) and self.warps < triton.MOST_WARPS:
            self.warps *= 2


@functools.cache
def is_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def launch(
    program: Program,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Tensor | float]],
    device: torch.device,
) -> None:
    """Run a program on dense tensors of these lengths and addresses, given by columns, and on
    scalars, of which the kernel reads those of a device there and the others in its table."""
    there = tuple([isinstance(x, Tensor) and x.device == device for x, *_ in scalars])
    counts = [-(-length // triton.BLOCK) for length in lengths]
    starts = [0, *itertools.accumulate(counts[:-1])]
    words: list[Sequence[int]] = [lengths, starts, *addresses]
    dtypes = program.signature.scalars
    for column, is_there, dtype in zip(scalars, there, dtypes, strict=True):
        found = [_address(x) if is_there else _bits(x, dtype) for x in column]
        words.append(repeated(found, len(lengths)))
    aligned = not any(address % 16 for column in addresses for address in column)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        table = _on_device(tuple(by_rows(words)), _table, device)
        owners = _on_device(tuple(counts), _owners, device)
        _kernel(program, there).launch(sum(counts), table, owners, aligned=aligned)


def _address(x: Tensor | float) -> int:
    assert isinstance(x, Tensor)
    return x.data_ptr()


def _bits(x: Tensor | float, dtype: torch.dtype) -> int:
    value = number_of(x)
    if dtype == torch.int64:
        return int(value)
    return struct.unpack("q", struct.pack("d", value))[0]


def _table(words: Sequence[int]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64)


def _owners(counts: Sequence[int]) -> Tensor:
    """For each block the row it works on."""
    rows = torch.arange(len(counts), dtype=torch.int32)
    return rows.repeat_interleave(torch.tensor(counts))


def _on_device(
    content: tuple[int, ...], make: Callable[[Sequence[int]], Tensor], device: torch.device
) -> Tensor:
    """A table, which is copied to its device without waiting for it, if it is not there."""
    stream, capturing = current_stream(device), is_capturing(device)
    key = (make, content, device, stream)
    table = _TABLES.get(key)
    if table is None:
        host = make(content)
        if stream is None:
            table = host
        else:
            host = host.pin_memory()
            table = host.to(device, non_blocking=True)
        if capturing:  # the graph will copy what is there when it is replayed
            _CAPTURED.append(host)
        else:
            while len(_TABLES) >= _MOST_TABLES:
                _TABLES.pop(next(iter(_TABLES)))
            _TABLES[key] = table
    if capturing:
        _CAPTURED.append(table)
    return table


def current_stream(device: torch.device) -> int | None:
    """The stream of a GPU that is now launched on."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def is_capturing(device: torch.device) -> bool:
    """Whether launches are written into a CUDA graph, to be carried out later."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _kernel(program: Program, there: tuple[bool, ...]) -> _Kernel:
    """The kernel of a program, from a module in the cache: Triton reads the source of functions."""
    source = triton.source(program, there)
    name = f"mcftensor_kernel_{digest(source)}"
    path = directory() / f"{name}.py"
    if not path.exists():
        write_whole(path, source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return _Kernel(module.kernel, triton.warps(program))
