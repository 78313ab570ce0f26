"""Triton kernels made, given their tables, and launched."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels import triton
from mcftensor.kernels.calls import by_rows, number_of, repeated
from mcftensor.kernels.compiler import digest, directory, write_whole
from mcftensor.kernels.program import Program

# Tables on a device, by what is in them; those that a CUDA graph was captured with stay.
_TABLES: dict[Any, Tensor] = {}
_MOST_TABLES = 256
_CAPTURED: list[Tensor] = []


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
    table = _table(tuple(by_rows(words)), device)
    owners = _owners(tuple(counts), device)
    aligned = not any(address % 16 for column in addresses for address in column)
    kernel = _kernel(program, there)
    options = {"num_warps": triton.warps(program), "enable_fp_fusion": False}
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[(sum(counts),)](table, owners, BLOCK=triton.BLOCK, ALIGNED=aligned, **options)


def _address(x: Tensor | float) -> int:
    assert isinstance(x, Tensor)
    return x.data_ptr()


def _bits(x: Tensor | float, dtype: torch.dtype) -> int:
    value = number_of(x)
    if dtype == torch.int64:
        return int(value)
    return struct.unpack("q", struct.pack("d", value))[0]


def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """For each block the row it works on."""
    key = ("owners", counts, device)
    if key not in _TABLES:
        rows = torch.arange(len(counts), dtype=torch.int32)
        _keep(key, rows.repeat_interleave(torch.tensor(counts)), device)
    return _TABLES[key]


def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    key = (values, device)
    if key not in _TABLES:
        _keep(key, torch.tensor(values, dtype=torch.int64), device)
    return _TABLES[key]


def _keep(key: Any, table: Tensor, device: torch.device) -> None:
    """Copy a table to its device without waiting for it."""
    if device.type == "cuda":
        host = table.pin_memory()
        table = host.to(device, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            _CAPTURED.extend((host, table))
    while len(_TABLES) >= _MOST_TABLES:
        _TABLES.pop(next(iter(_TABLES)))
    _TABLES[key] = table


@functools.cache
def _kernel(program: Program, there: tuple[bool, ...]) -> Any:
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
    return module.kernel
