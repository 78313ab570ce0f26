"""The directory of compiled code, which later processes find, and which does not grow for ever."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

# Bytes of files, after which those used longest ago are removed: some thousand programs.
MOST_BYTES = 1 << 28

_PREFIX = "mcftensor_kernel_"


def directory() -> Path:
    """MCFTENSOR_CACHE_DIR, or mcftensor in the user's cache."""
    named = os.environ.get("MCFTENSOR_CACHE_DIR")
    if named:
        return Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mcftensor"


def path_of(*parts: object, suffix: str) -> Path:
    """Where the file stands that is made of these parts."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]
    return directory() / f"{_PREFIX}{digest}{suffix}"


def is_kept(path: Path) -> bool:
    """Whether a file is there; if so, it is now the last to go."""
    try:
        os.utime(path)
    except OSError:
        return path.exists()  # in a directory of another user
    return True


def keep(path: Path, make: Callable[[Path], Path]) -> None:
    """Have a file made in an empty folder, and appear whole or not at all, other processes being
    at it too."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        make(Path(scratch)).replace(path)
    _tidy(path)


def _tidy(newest: Path) -> None:
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
