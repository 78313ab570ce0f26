"""Triton kernels made, given their tables, and launched."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import linecache
import struct
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels import triton
from mcftensor.kernels.caches import Bounded
from mcftensor.kernels.columns import by_rows, number_of, repeated
from mcftensor.kernels.program import Program

# Tables on a device, by what is in them and the stream that they were copied on. With its key each
# takes as much of the host's memory again.
_TABLES: Bounded[Any, Tensor] = Bounded(1 << 28, cost=lambda table: 2 * table.nbytes)
_KERNELS: Bounded[Any, _Kernel] = Bounded(1024)


@dataclass(eq=False)
class _Kernel:
    """A compiled program, and how many warps a block of it has."""

    function: Any
    warps: int

    def launch(self, blocks: int, *tables: Tensor, **constants: int) -> None:
        """Launch it; if its registers did not suffice, it has more threads from the next time on.

        How many registers a program takes differs from release to release of NVIDIA's compiler.
        """
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        ran = self.function[(blocks,)](*tables, BLOCK=triton.BLOCK, **constants, **options)
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
    numbers = _numbers(program, scalars, there)
    aligned = not any(address % 16 for column in addresses for address in column)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        table = _kept(_words([lengths, starts, *addresses]), _tensor, device)
        owners = _kept(array("q", counts), _owners, device)
        _kernel(program, there).launch(
            sum(counts),
            table,
            owners,
            _on_device(_tensor(_words(numbers)), device) if numbers else table,
            STEP=len(numbers) if numbers and len(numbers[0]) > 1 else 0,
            ALIGNED=aligned,
        )


def _numbers(
    program: Program, scalars: Sequence[Sequence[Tensor | float]], there: Sequence[bool]
) -> list[Sequence[int]]:
    """Scalars, or their addresses on the device, by columns: of one for all sets, or one for each.

    They change from launch to launch, and so are in no table that is kept.
    """
    rows = max(map(len, scalars), default=0)
    columns = []
    for column, is_there, dtype in zip(scalars, there, program.signature.scalars, strict=True):
        columns.append(
            repeated([_address(x) if is_there else _bits(x, dtype) for x in column], rows)
        )
    return columns


def _address(x: Tensor | float) -> int:
    assert isinstance(x, Tensor)
    return x.data_ptr()


def _bits(x: Tensor | float, dtype: torch.dtype) -> int:
    value = number_of(x)
    if dtype == torch.int64:
        return int(value)
    return struct.unpack("q", struct.pack("d", value))[0]


def _words(columns: Sequence[Sequence[int]]) -> array[int]:
    return array("q", by_rows(columns))


def _tensor(words: array[int]) -> Tensor:
    return torch.frombuffer(words, dtype=torch.int64)


def _owners(counts: array[int]) -> Tensor:
    """For each block the row it works on."""
    rows = torch.arange(len(counts), dtype=torch.int32)
    return rows.repeat_interleave(_tensor(counts))


def _kept(words: array[int], make: Callable[[array[int]], Tensor], device: torch.device) -> Tensor:
    """A table on its device, where it may be already.

    While a CUDA graph is captured it is a new one: the graph copies it whenever it is replayed, and
    PyTorch keeps what was allocated meanwhile, on the device and pinned on the host, for the graph.
    """
    if is_capturing(device):
        return _on_device(make(words), device)
    key = (make, words.tobytes(), device, current_stream(device))
    table = _TABLES.get(key)
    return _TABLES.put(key, _on_device(make(words), device)) if table is None else table


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    """A table copied to a device, without waiting for it."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def current_stream(device: torch.device) -> int | None:
    """The stream of a GPU that is now launched on."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def is_capturing(device: torch.device) -> bool:
    """Whether launches are written into a CUDA graph, to be carried out later."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _kernel(program: Program, there: tuple[bool, ...]) -> _Kernel:
    """The kernel of a program, in no file: Triton reads the source of functions by `linecache`."""
    kernel = _KERNELS.get((program, there))
    if kernel is None:
        source = triton.source(program, there)
        name = f"<mcftensor kernel {hashlib.sha256(source.encode()).hexdigest()}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        names: dict[str, Any] = {"__name__": "mcftensor.kernels.made"}
        exec(compile(source, name, "exec"), names)
        kernel = _KERNELS.put((program, there), _Kernel(names["kernel"], triton.warps(program)))
        weakref.finalize(kernel, linecache.cache.pop, name, None)
    return kernel
