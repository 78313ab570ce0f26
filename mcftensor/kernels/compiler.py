"""C++ for the CPU at hand: compiled at first use, kept for later processes."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

from mcftensor.kernels.directory import is_kept, keep, path_of

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # a product and a sum are two roundings
    "-fwrapv",  # integers wrap around
    "-fno-math-errno",  # without this and the next, loops with roots and choices stay scalar
    "-fno-trapping-math",
    "-Wno-psabi",
    "-fopenmp",
    "-shared",
    "-fPIC",
)

Launch = Callable[[int, int, int, int], None]


def load(source: str, *, build: bool) -> Launch | None:
    """The function `launch` of a translation unit; None where there is none, or no compiler.

    With `build=False` only what an earlier call has compiled, in whatever process, is loaded.
    """
    compiler = find()
    if compiler is None:
        return None
    status = Path(compiler).resolve().stat()
    parts = (source, *FLAGS, compiler, status.st_size, status.st_mtime_ns, _processor())
    library = path_of(*parts, suffix=".so")
    if not is_kept(library) and not (build and _compile(source, compiler, library)):
        return None
    try:
        launch = ctypes.CDLL(str(library)).launch
    except OSError as error:
        _give_up(str(error))
        return None
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    launch.restype = None
    return launch


@functools.cache
def find() -> str | None:
    """The path of a C++ compiler: what the environment's CXX says, or the system's own."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = name and shutil.which(name)
        if path:
            return str(Path(path).absolute())  # it runs in another directory
    _give_up("found neither c++, g++ nor clang++; the environment variable CXX can name one")
    return None


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(os.uname())
    return next((x for x in lines if x.startswith(("flags", "Features"))), os.uname().machine)


def _compile(source: str, compiler: str, library: Path) -> bool:
    def make(scratch: Path) -> Path:
        (scratch / "kernel.cpp").write_text(source)
        command = [compiler, *FLAGS, "kernel.cpp", "-o", "kernel.so"]
        subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True)
        return scratch / "kernel.so"

    try:
        keep(library, make)
    except subprocess.CalledProcessError as error:
        _give_up(f"{compiler} failed: {error.stderr.strip()[:500]}")
        return False
    except OSError as error:
        _give_up(f"cannot keep compiled code: {error}; MCFTENSOR_CACHE_DIR can name a directory")
        return False
    return True


_REASONS: list[str] = []


def _give_up(reason: str) -> None:
    """Warn, but once: reasons differ in the names of temporary files."""
    if _REASONS:
        return
    _REASONS.append(reason)
    warnings.warn(
        f"mcftensor runs without compiled code on the CPU, several times slower: {reason}",
        stacklevel=2,
    )
