"""C++ kernels on the CPU: compiled at first use, cached for later processes, and launched."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from mcftensor.kernels import first_use, kernel_cache
from mcftensor.kernels.columns import Scalar, number_of
from mcftensor.kernels.cpp import GRAIN

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-fast-math",  # this and the next undo what CXX may ask for
    "-fno-unsafe-math-optimizations",
    "-fno-associative-math",
    "-fno-reciprocal-math",
    "-fno-finite-math-only",
    "-fsigned-zeros",
    "-ffp-contract=off",  # a product and a sum are two roundings
    "-fwrapv",  # integer overflow wraps around
    "-fno-math-errno",  # without this flag and the next, loops with roots and choices stay scalar
    "-fno-trapping-math",
    "-Wno-psabi",
    "-fopenmp",
    "-shared",
    "-fPIC",
)

Launch = Callable[[int, int, int, int], None]

_HERE = "the CPU"

# The number of elements from which looking for compiled code, and compiling it, is worthwhile.
LOOK_AFTER = 1 << 14
BUILD_AFTER = 1 << 20


def load(source: str, *, build: bool, is_right: Callable[[Launch], bool]) -> Launch | None:
    """Return the function `launch` of a translation unit, or None without a compiler.

    With `build=False`, load only code that an earlier call of any process has compiled. Compiled
    code is kept if it `is_right`.
    """
    command = find()
    if command is None:
        return None
    status = Path(command[0]).resolve().stat()
    key = kernel_cache.key_of(
        source, *FLAGS, *command, status.st_size, status.st_mtime_ns, _processor()
    )

    def make(scratch: Path) -> Path:
        (scratch / "kernel.cpp").write_text(source)
        whole = [*command, *FLAGS, "kernel.cpp", "-o", "kernel.so"]
        subprocess.run(whole, cwd=scratch, check=True, capture_output=True, text=True)
        if not is_right(_opened(scratch / "kernel.so")):
            raise ArithmeticError(f"code of {shlex.join(command)} has other bits than PyTorch")
        return scratch / "kernel.so"

    try:
        library = kernel_cache.kept(key) or (kernel_cache.keep(key, make) if build else None)
        return _opened(library) if library else None
    except subprocess.CalledProcessError as error:
        first_use.say_eager(_HERE, f"{shlex.join(command)} failed: {error.stderr.strip()[:500]}")
    except (ArithmeticError, OSError) as error:
        first_use.say_eager(_HERE, str(error))
    return None


def _opened(library: Path) -> Launch:
    with _same_rounding():
        launch = ctypes.CDLL(str(library)).launch
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    launch.restype = None
    return launch


class OnDemand:
    """C++ that is loaded, or compiled, once it has worked on enough elements.

    Args:
        source: returns the translation unit, or None without one.
        is_right: whether the compiled code gives the right bits.
    """

    def __init__(
        self, source: Callable[[], str | None], is_right: Callable[[Launch], bool]
    ) -> None:
        self.source, self.is_right = source, is_right
        self.worked = 0
        self.launch: Launch | None = None

    def get(self, elements: int) -> Launch | None:
        """Return the compiled code for a call with `elements` elements, or None."""
        if self.launch is None:
            before, self.worked = self.worked, self.worked + elements
            build = before < BUILD_AFTER <= self.worked
            if (build or before < LOOK_AFTER <= self.worked) and (source := self.source()):
                self.launch = load(source, build=build, is_right=self.is_right)
        return self.launch


@contextlib.contextmanager
def _same_rounding() -> Iterator[None]:
    """Restore the handling of subnormal numbers after loading a library.

    Libraries that are linked for fast arithmetic make the processor flush subnormal numbers.
    """
    flushes = _flushes_subnormals()
    yield
    if _flushes_subnormals() != flushes:
        torch.set_flush_denormal(flushes)


def _flushes_subnormals() -> bool:
    return sys.float_info.min / 2 == 0


@functools.cache
def find() -> list[str] | None:
    """Return the command of a C++ compiler: the environment variable CXX, or the system's."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        program, *options = shlex.split(name) or [""]
        path = shutil.which(program)
        if path:
            return [str(Path(path).absolute()), *options]  # it runs in another directory
    first_use.say_eager(
        _HERE, "found neither c++, g++ nor clang++; the environment variable CXX can name one"
    )
    return None


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(os.uname())
    return next((x for x in lines if x.startswith(("flags", "Features"))), os.uname().machine)


@functools.cache
def vector_bytes() -> int:
    """Return the size of the processor's vectors in bytes."""
    flags = _processor().split()
    return 64 if "avx512bw" in flags else 32 if "avx2" in flags else 16


_call: Callable[[partial[None]], None] = partial.__call__


def prepared(
    function: Launch,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Scalar]],
    dtypes: Sequence[torch.dtype],
) -> partial[None]:
    """Return compiled code as a call on dense tensors and scalars.

    Lengths and addresses of tensors are given by columns, scalars by their dtypes.
    """
    count = len(lengths)
    words, numbers = array("q", lengths), array("d")
    for addresses_of_one in addresses:
        words.fromlist(addresses_of_one)
    for dtype, column in zip(dtypes, scalars, strict=True):
        values = [x if type(x) is float else number_of(x) for x in column]
        times = count // len(values)  # a single value serves all sets
        if dtype == torch.int64:
            words.fromlist([*map(int, values)] * times)
        else:
            numbers.fromlist(values * times)
    worth = sum(lengths) // GRAIN
    threads = min(torch.get_num_threads(), worth) if worth > 1 else 1
    call = partial(function, words.buffer_info()[0], numbers.buffer_info()[0], count, threads)
    call.holds = words, numbers  # type: ignore[attr-defined]
    return call


def launch(
    function: Launch,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Scalar]],
    dtypes: Sequence[torch.dtype],
    done: list[tuple[int, None]] | None = None,
) -> None:
    """Run a prepared call, and record its elements in `done`, as in `Columns`."""
    call = prepared(function, lengths, addresses, scalars, dtypes)
    if done is None:
        call()
    else:
        done.extend(zip((sum(lengths),), map(_call, (call,)), strict=True))
