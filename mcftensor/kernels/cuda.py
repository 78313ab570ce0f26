"""Triton kernels made, given their tables, and launched."""

from __future__ import annotations

import functools
import importlib.util
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcftensor.kernels import triton
from mcftensor.kernels.compiler import digest, directory, write_whole
from mcftensor.kernels.program import Program

if TYPE_CHECKING:
    from mcftensor.kernels.running import Call

# Tables on a device, by what is in them; those that a CUDA graph was captured with stay.
_TABLES: dict[Any, Tensor] = {}
_MOST_TABLES = 256
_CAPTURED: list[Tensor] = []


@functools.cache
def is_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def on_device(call: Call, device: torch.device) -> tuple[bool, ...]:
    """Which scalars a kernel reads from its device; the others travel in its table."""
    return tuple(isinstance(x, Tensor) and x.device == device for x in call.scalars)


def launch(program: Program, calls: Sequence[Call], device: torch.device) -> None:
    """Run a program on sets of dense tensors that have as many scalars on the device."""
    there = on_device(calls[0], device)
    words: list[int] = []
    counts: list[int] = []
    blocks = 0
    aligned = True
    for call in calls:
        length = call.outputs[0].numel()
        counts.append(-(-length // triton.BLOCK))
        words += (length, blocks)
        addresses = [x.data_ptr() for x in (*call.vectors, *call.outputs)]
        aligned = aligned and not any(address % 16 for address in addresses)
        words += addresses
        for x, is_there, dtype in zip(call.scalars, there, program.signature.scalars, strict=True):
            words.append(x.data_ptr() if is_there else _bits(x, dtype))  # type: ignore[union-attr]
        blocks += counts[-1]
    rows = _table(tuple(words), device)
    owners = _owners(tuple(counts), device)
    kernel = _kernel(program, there)
    options = {"num_warps": triton.WARPS, "enable_fp_fusion": False}
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[(blocks,)](rows, owners, BLOCK=triton.BLOCK, ALIGNED=aligned, **options)


def _bits(x: Tensor | float, dtype: torch.dtype) -> int:
    value = x.item() if isinstance(x, Tensor) else x
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
