"""C++ for the CPU at hand: compiled at first use, kept for later processes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

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
    library = directory() / f"{digest(*parts)}.so"
    if not library.exists() and not (build and _compile(source, compiler, library)):
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


def directory() -> Path:
    """Where compiled code is kept: MCFTENSOR_CACHE_DIR, or mcftensor in the user's cache."""
    named = os.environ.get("MCFTENSOR_CACHE_DIR")
    if named:
        return Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mcftensor"


def digest(*parts: object) -> str:
    """A name for what is made of these parts."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(os.uname())
    return next((x for x in lines if x.startswith(("flags", "Features"))), os.uname().machine)


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, other processes being at it too."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        draft = Path(scratch) / path.name
        draft.write_text(text)
        draft.replace(path)


def _compile(source: str, compiler: str, library: Path) -> bool:
    command = [compiler, *FLAGS, "kernel.cpp", "-o", "kernel.so"]
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            (Path(scratch) / "kernel.cpp").write_text(source)
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True)
            (Path(scratch) / "kernel.so").replace(library)
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
