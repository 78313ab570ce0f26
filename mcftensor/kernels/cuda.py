"""Triton kernels: compilation, trials, argument tables and launches."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import linecache
import struct
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels import first_use, kernel_cache, triton
from mcftensor.kernels.columns import Scalar, repeated
from mcftensor.kernels.first_use import Arrangement, Launch
from mcftensor.kernels.program import Program

_NUMBERS = itertools.count()


class _Tables:
    """A cache of tables on a device, keyed by their contents and the stream of their copy.

    It keeps the most recently used tables, up to `most` bytes in total.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self.kept: OrderedDict[object, Tensor] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """Return the table of a key, made if needed, as the most recently used one."""
        with self.lock:
            if key not in self.kept:
                self.kept[key] = make()
                self.total += _bytes(self.kept[key])
            self.kept.move_to_end(key)
            table = self.kept[key]
            while self.total > self.most:
                self.total -= _bytes(self.kept.popitem(last=False)[1])
        return table


def _bytes(table: Tensor) -> int:
    return 2 * table.nbytes  # the key takes as much host memory as the table


_TABLES = _Tables(1 << 28)


@dataclass(eq=False)
class _Kernel:
    """A compiled program.

    Attributes:
        function: the function of Triton.
        warps: the number of warps of a block.
        most: the largest number of warps of a block.
        key: a digest of the source.
    """

    function: Any
    warps: int
    most: int
    key: str = ""

    def launch(self, blocks: int, *tables: Tensor, **constants: int) -> None:
        """Launch the kernel; if it spilled registers, use more warps from the next launch on.

        The number of registers of a program differs between releases of NVIDIA's compiler.
        """
        options = {"num_warps": self.warps, "enable_fp_fusion": False}
        ran = self.function[(blocks,)](*tables, BLOCK=triton.THREAD_BLOCK, **constants, **options)
        if getattr(ran, "n_spills", 0) and self.warps < self.most:
            self.warps *= 2


@functools.cache
def is_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def launch(
    program: Program,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Scalar]],
    device: torch.device,
    is_right: Callable[[Launch, Arrangement], bool],
) -> bool:
    """Run a program on dense tensors and scalars; return whether it ran.

    Lengths and addresses of tensors are given by columns. The kernel reads scalars
    of its device there, and other scalars in its table. The program is tried before its first use.
    The caller must compute if the program fails, has wrong bits, or cannot be tried because a CUDA
    graph is being captured.
    """
    there = tuple([isinstance(x, Tensor) and x.device == device for x, *_ in scalars])
    aligned = not any(address % 16 for column in addresses for address in column)
    own = max(map(len, scalars), default=0) > 1
    arrangement, found = Arrangement(device, there, aligned, own), _found(program)
    if found.get(arrangement) == 0:
        return False
    try:
        kernel = _kernel(program, there, _rounds(device), _lanes(device))
        run = functools.partial(_run, kernel, program, arrangement)
        while found.get(arrangement) != kernel.warps:  # a trial may change the number of warps
            warps = kernel.warps
            if not _is_kept(kernel, arrangement):
                if is_capturing(device):
                    return False
                if not is_right(run, arrangement):
                    raise ArithmeticError("a Triton kernel has other bits than PyTorch")
                _keep(kernel, arrangement, warps)
            found[arrangement] = warps
        run(lengths, addresses, scalars)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # compilers and drivers raise many types
        found[arrangement] = 0
        said = f"{type(error).__name__}: {error}"[:500].rstrip(".")
        first_use.say_eager(
            device.type,
            f"{said}. Results are right all the same. Please report this with what "
            f"`python -m mcftensor selfcheck --device {device.type}` prints, at "
            "https://github.com/mcftensor/mcftensor/issues",
        )
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _found(program: Program) -> dict[Arrangement, int]:
    """Return the tested numbers of warps by arrangement of operands; 0 if the program failed."""
    return {}


def _run(
    kernel: _Kernel,
    program: Program,
    arrangement: Arrangement,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Scalar]],
) -> None:
    device = arrangement.device
    counts = [-(-length // triton.THREAD_BLOCK) for length in lengths]
    starts = [0, *itertools.accumulate(counts[:-1])]
    numbers = _numbers(program, scalars, arrangement.there)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        table = _kept(_words([lengths, starts, *addresses]), _tensor, device)
        owners = _kept(array("q", counts), _owners, device)
        kernel.launch(
            sum(counts),
            table,
            owners,
            _on_device(_tensor(_words(numbers)), device) if numbers else table,
            STEP=len(numbers) if arrangement.own else 0,
            ALIGNED=arrangement.aligned,
        )


def _is_kept(kernel: _Kernel, arrangement: Arrangement) -> bool:
    """Whether an earlier process found the kernel right."""
    key = _trial(kernel, arrangement, kernel.warps)
    return key is not None and kernel_cache.kept(key) is not None


def _keep(kernel: _Kernel, arrangement: Arrangement, warps: int) -> None:
    """Record for later processes that the kernel is right."""

    def make(scratch: Path) -> Path:
        (scratch / "right").write_bytes(b"")
        return scratch / "right"

    key = _trial(kernel, arrangement, warps)
    if key is not None:
        with contextlib.suppress(OSError):  # later processes try again
            kernel_cache.keep(key, make)


def _trial(kernel: _Kernel, arrangement: Arrangement, warps: int) -> str | None:
    """Return the cache key of a trial's result, or None if results are not cached."""
    machine = _machine(arrangement.device)
    return kernel_cache.key_of(kernel.key, *arrangement[1:], warps, *machine) if machine else None


@functools.lru_cache(maxsize=64)
def _machine(device: torch.device) -> tuple[object, ...]:
    """Return the device, its driver and compilers; nothing for Triton's interpreter."""
    if device.type != "cuda":
        return ()
    drivers = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
    return (
        importlib.metadata.version("triton"),
        torch.__version__,
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        *(path.read_text() for path in drivers if path.exists()),
    )


def _numbers(
    program: Program, scalars: Sequence[Sequence[Scalar]], there: Sequence[bool]
) -> list[Sequence[int]]:
    """Return scalars, or their addresses on the device, by columns of one value or one per set.

    They change from launch to launch, so they are not in cached tables.
    """
    rows = max(map(len, scalars), default=0)
    return [
        repeated([_word(x, is_there, dtype) for x in column], rows)
        for column, is_there, dtype in zip(scalars, there, program.signature.scalars, strict=True)
    ]


def _word(x: Scalar, is_there: bool, dtype: torch.dtype) -> int:
    if is_there:
        return x.data_ptr()  # type: ignore[union-attr]
    value = x.item() if isinstance(x, Tensor) else x
    return int(value) if dtype == torch.int64 else struct.unpack("q", struct.pack("d", value))[0]


def _words(columns: Sequence[Sequence[int]]) -> array[int]:
    return array("q", itertools.chain.from_iterable(zip(*columns, strict=True)))


def _tensor(words: array[int]) -> Tensor:
    return torch.frombuffer(words, dtype=torch.int64)


def _owners(counts: array[int]) -> Tensor:
    """Return the row that each block of threads works on."""
    rows = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    return rows.repeat_interleave(_tensor(counts))


def _kept(words: array[int], make: Callable[[array[int]], Tensor], device: torch.device) -> Tensor:
    """Return a table on its device, cached if possible.

    While a CUDA graph is captured, a new table is made: the graph copies it at every replay, and
    PyTorch keeps memory allocated during capture, on the device and pinned on the host, for the
    graph.
    """
    if is_capturing(device):
        return _on_device(make(words), device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = (make, words.tobytes(), device, stream)
    return _TABLES.get(key, lambda: _on_device(make(words), device))


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to a device without waiting for the copy."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def is_capturing(device: torch.device) -> bool:
    """Whether launches are captured in a CUDA graph, which runs them later."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=64)
def _rounds(device: torch.device) -> bool:
    """Whether one instruction rounds to bfloat16: on NVIDIA's GPUs, from compute capability 8.0."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.lru_cache(maxsize=64)
def _lanes(device: torch.device) -> int:
    """Threads of a warp: 64 on AMD's GPUs for data centers, else 32."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


@functools.lru_cache(maxsize=1024)
def _kernel(program: Program, there: tuple[bool, ...], rounds: bool, lanes: int) -> _Kernel:
    """Return the kernel of a program. Triton reads the source of its functions from memory."""
    source = triton.source(program, there, rounds)
    name = f"<mcftensor kernel {next(_NUMBERS)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    module = {"__name__": "mcftensor_kernel"}
    exec(compile(source, name, "exec"), module)
    warps, most = triton.warps(program, lanes), triton.MOST_THREADS // lanes
    kernel = _Kernel(module["kernel"], warps, most, kernel_cache.key_of(source))
    weakref.finalize(kernel, linecache.cache.pop, name, None)
    return kernel
