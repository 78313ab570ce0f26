"""Triton kernels made, tried, given their tables, and launched."""

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
from mcftensor.kernels.columns import Scalar, number_of, repeated
from mcftensor.kernels.first_use import Arrangement, Launch
from mcftensor.kernels.program import Program

_NUMBERS = itertools.count()


class _Tables:
    """Tables on a device, by what is in them and the stream that they were copied on: those used
    last, as long as they take no more than `most` bytes together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self.kept: OrderedDict[object, Tensor] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """The table of a key, which is then the last to go."""
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
    return 2 * table.nbytes  # its key takes as much of the host's memory


_TABLES = _Tables(1 << 28)


@dataclass(eq=False)
class _Kernel:
    """A compiled program.

    Attributes:
        function: Triton's.
        warps: of a block.
        most: warps of a block at most.
        key: a digest of its source.
    """

    function: Any
    warps: int
    most: int
    key: str = ""

    def launch(self, blocks: int, *tables: Tensor, **constants: int) -> None:
        """Launch it; if its registers did not suffice, it has more threads from the next time on.

        How many registers a program takes differs from release to release of NVIDIA's compiler.
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
    """Run a program on dense tensors of these lengths and addresses, given by columns, and on
    scalars, of which the kernel reads those of a device there and the others in its table.

    Return whether it ran. It is tried before its first use; where it fails then or later, or is not
    right, or cannot be tried since a CUDA graph is captured, the caller has to compute.
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
        while found.get(arrangement) != kernel.warps:  # which a trial may find to be too few
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
    except Exception as error:  # noqa: BLE001  # of compilers, drivers and much else
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
    """At how many warps a program was found right, by how operands lie; 0 where it failed."""
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
    """Whether an earlier process found it right."""
    key = _trial(kernel, arrangement, kernel.warps)
    return key is not None and kernel_cache.kept(key) is not None


def _keep(kernel: _Kernel, arrangement: Arrangement, warps: int) -> None:
    """Have later processes know that it is right."""

    def make(scratch: Path) -> Path:
        (scratch / "right").write_bytes(b"")
        return scratch / "right"

    key = _trial(kernel, arrangement, warps)
    if key is not None:
        with contextlib.suppress(OSError):  # they will try again
            kernel_cache.keep(key, make)


def _trial(kernel: _Kernel, arrangement: Arrangement, warps: int) -> str | None:
    """What the result of a trial is kept by; None where it is not."""
    machine = _machine(arrangement.device)
    return kernel_cache.key_of(kernel.key, *arrangement[1:], warps, *machine) if machine else None


@functools.lru_cache(maxsize=64)
def _machine(device: torch.device) -> tuple[object, ...]:
    """The device, its driver and compilers; nothing for Triton's interpreter."""
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
    """Scalars, or their addresses on the device, by columns: of one for all sets, or one for each.

    They change from launch to launch, and so are in no table that is kept.
    """
    rows = max(map(len, scalars), default=0)
    return [
        repeated([_word(x, is_there, dtype) for x in column], rows)
        for column, is_there, dtype in zip(scalars, there, program.signature.scalars, strict=True)
    ]


def _word(x: Scalar, is_there: bool, dtype: torch.dtype) -> int:
    if is_there:
        return x.data_ptr()  # type: ignore[union-attr]
    value = number_of(x)
    return int(value) if dtype == torch.int64 else struct.unpack("q", struct.pack("d", value))[0]


def _words(columns: Sequence[Sequence[int]]) -> array[int]:
    return array("q", itertools.chain.from_iterable(zip(*columns, strict=True)))


def _tensor(words: array[int]) -> Tensor:
    return torch.frombuffer(words, dtype=torch.int64)


def _owners(counts: array[int]) -> Tensor:
    """For each block the row it works on."""
    rows = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    return rows.repeat_interleave(_tensor(counts))


def _kept(words: array[int], make: Callable[[array[int]], Tensor], device: torch.device) -> Tensor:
    """A table on its device, where it may be already.

    While a CUDA graph is captured it is a new one: the graph copies it whenever it is replayed, and
    PyTorch keeps what was allocated meanwhile, on the device and pinned on the host, for the graph.
    """
    if is_capturing(device):
        return _on_device(make(words), device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = (make, words.tobytes(), device, stream)
    return _TABLES.get(key, lambda: _on_device(make(words), device))


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    """A table copied to a device, without waiting for it."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def is_capturing(device: torch.device) -> bool:
    """Whether launches are written into a CUDA graph, to be carried out later."""
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
    """The kernel of a program. Triton reads the source of its functions, which is in no file."""
    source = triton.source(program, there, rounds)
    name = f"<mcftensor kernel {next(_NUMBERS)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    module = {"__name__": "mcftensor_kernel"}
    exec(compile(source, name, "exec"), module)
    warps, most = triton.warps(program, lanes), triton.MOST_THREADS // lanes
    kernel = _Kernel(module["kernel"], warps, most, kernel_cache.key_of(source))
    weakref.finalize(kernel, linecache.cache.pop, name, None)
    return kernel
