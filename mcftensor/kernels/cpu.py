"""C++ for the CPU at hand: compiled at first use, kept for later processes, and launched."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mcftensor.kernels.columns import Scalar, number_of

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

# Bytes of files, after which those used longest ago are removed: some thousand programs.
MOST_BYTES = 1 << 28

# Elements a thread is worth starting for.
_GRAIN = 1 << 15

_PREFIX = "mcftensor_kernel_"

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
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]
    library = _directory() / f"{_PREFIX}{digest}.so"
    if not is_kept(library) and not (build and _compile(source, compiler, library)):
        return None
    try:
        function = ctypes.CDLL(str(library)).launch
    except OSError as error:
        _give_up(str(error))
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.restype = None
    return function


@functools.cache
def find() -> str | None:
    """The path of a C++ compiler: what the environment's CXX says, or the system's own."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = name and shutil.which(name)
        if path:
            return str(Path(path).absolute())  # it runs in another directory
    _give_up("found neither c++, g++ nor clang++; the environment variable CXX can name one")
    return None


def _directory() -> Path:
    """MCFTENSOR_CACHE_DIR, or mcftensor in the user's cache."""
    named = os.environ.get("MCFTENSOR_CACHE_DIR")
    if named:
        return Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mcftensor"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(os.uname())
    return next((x for x in lines if x.startswith(("flags", "Features"))), os.uname().machine)


def is_kept(library: Path) -> bool:
    """Whether a file is there; if so, it is now the last to go."""
    try:
        os.utime(library)
    except OSError:
        return library.exists()  # in a directory of another user
    return True


def _compile(source: str, compiler: str, library: Path) -> bool:
    """Whether it worked; the file appears whole or not at all, other processes being at it too."""
    command = [compiler, *FLAGS, "kernel.cpp", "-o", "kernel.so"]
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            (Path(scratch) / "kernel.cpp").write_text(source)
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True)
            (Path(scratch) / "kernel.so").replace(library)
        tidy(library)
    except subprocess.CalledProcessError as error:
        _give_up(f"{compiler} failed: {error.stderr.strip()[:500]}")
        return False
    except OSError as error:
        _give_up(f"cannot keep compiled code: {error}; MCFTENSOR_CACHE_DIR can name a directory")
        return False
    return True


def tidy(newest: Path) -> None:
    """Remove the files used longest ago from a directory that holds too much."""
    found = []
    for path in newest.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total > MOST_BYTES and path != newest:
            path.unlink(missing_ok=True)
            total -= size


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


def launch(
    function: Launch,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Scalar]],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Run compiled code on dense tensors of these lengths and addresses, given by columns, and on
    scalars of these dtypes."""
    count = len(lengths)
    words, numbers = array("q", lengths), array("d")
    for addresses_of_one in addresses:
        words += array("q", addresses_of_one)
    for dtype, column in zip(dtypes, scalars, strict=True):
        values = [x if type(x) is float else number_of(x) for x in column]
        times = count // len(values)  # one for each set, or one for all
        if dtype == torch.int64:
            words += array("q", map(int, values)) * times
        else:
            numbers += array("d", values) * times
    threads = max(1, min(torch.get_num_threads(), sum(lengths) // _GRAIN))
    function(words.buffer_info()[0], numbers.buffer_info()[0], count, threads)
