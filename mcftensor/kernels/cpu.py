"""The C++ compiler of the CPU: found, run, its libraries kept for later processes, and loaded."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mcftensor.kernels import first_use, kernel_cache

FLAGS = (
    "-std=c++17",
    "-O3",
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

# The number of elements from which looking for compiled code, and compiling it, is worthwhile. To
# look, the function is recorded and printed, which takes the time of five to nine calls of it, and
# most often no earlier process has compiled it.
LOOK_AFTER = 1 << 18
BUILD_AFTER = 1 << 20

_HERE = "the CPU"


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


def load(source: str, *, build: bool, is_right: Callable[[Launch], bool]) -> Launch | None:
    """Return the function `launch` of a translation unit, or None without a compiler.

    With `build=False`, load only code that an earlier call of any process has compiled. Compiled
    code is kept if it `is_right`.
    """
    command = find()
    if command is None:
        return None
    status = Path(command[0]).resolve().stat()
    flags = (*FLAGS, "-march=x86-64-v3" if _is_restricted() else "-march=native")
    key = kernel_cache.key_of(
        source, *flags, *command, status.st_size, status.st_mtime_ns, _processor()
    )

    def make(scratch: Path) -> Path:
        (scratch / "kernel.cpp").write_text(source)
        whole = [*command, *flags, "kernel.cpp", "-o", "kernel.so"]
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
        return " ".join(platform.uname())
    return next((x for x in lines if x.startswith(("flags", "Features"))), platform.machine())


def _is_restricted() -> bool:
    """Whether `ATEN_CPU_CAPABILITY=avx2` restricts PyTorch, and the library too, to AVX2."""
    return os.environ.get("ATEN_CPU_CAPABILITY") == "avx2" and "avx2" in _processor().split()


@functools.cache
def vector_bytes() -> int:
    """Return the size of the vectors to use, in bytes."""
    flags = _processor().split()
    if "avx512bw" in flags and not _is_restricted():
        return 64
    return 32 if "avx2" in flags else 16
