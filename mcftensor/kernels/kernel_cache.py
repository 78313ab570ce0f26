"""The directory of compiled code, of bounded size, shared with later processes.

Files there are executed. So they are used only if no user other than this one and root can write to
them and their folders, and only if they are intact: a file's name ends in a digest of its contents.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

# The largest total size in bytes, some thousand programs; the least recently used files are
# removed.
MOST_BYTES = 1 << 28

_PREFIX = "mcftensor_kernel_"
_PRIVATE: list[Path] = []


def key_of(*parts: object) -> str:
    """Return the key of a file made from these parts."""
    return _digest("\n".join(map(str, parts)).encode())


def kept(key: str) -> Path | None:
    """Return a cached file if it can be trusted, and mark it as the most recently used."""
    for path in _directory().glob(f"{_PREFIX}{key}_*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_safe = stat.S_ISREG(status.st_mode) and _is_safe(status)
            if is_safe and path.stem.endswith(f"_{_digest(path.read_bytes())}"):
                os.utime(path)
                return path
    return None


def keep(key: str, make: Callable[[Path], Path]) -> Path:
    """Make a file in an empty folder and move it to the cache atomically.

    Other processes may write at the same time. If the directory cannot be written, the file is kept
    until this process ends.

    Raises:
        OSError: nothing can be written.
    """
    try:
        _named().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = _directory()
        scratch = tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        folder = _private(str(error))
        scratch = tempfile.TemporaryDirectory(dir=folder)
    with scratch as empty:
        made = make(Path(empty))
        path = folder / f"{_PREFIX}{key}_{_digest(made.read_bytes())}{made.suffix}"
        made.replace(path)
    _tidy(path)
    return path


def _named() -> Path:
    """Return MCFTENSOR_CACHE_DIR, or mcftensor in the user's cache."""
    named = os.environ.get("MCFTENSOR_CACHE_DIR")
    if named:
        return Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mcftensor"


def _directory() -> Path:
    """Return the named directory, or a private one if others could write to it or replace it."""
    directory = _named().resolve()
    for folder in (directory, *directory.parents):
        with contextlib.suppress(OSError):  # the directory may not exist
            status = folder.stat()
            is_sticky = folder != directory and status.st_mode & stat.S_ISVTX
            if not (_is_safe(status) or (is_sticky and _is_own(status))):
                return _private(f"other users can write to {folder}")
    return directory


def _is_safe(status: os.stat_result) -> bool:
    """Whether a file belongs to this user or root, and no other user can write to it."""
    if os.name != "posix":  # folders of users are closed to other users
        return True
    is_shared = status.st_mode & stat.S_IWGRP and not _is_of_this_user_alone(status.st_gid)
    return _is_own(status) and not is_shared and not status.st_mode & stat.S_IWOTH


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _is_of_this_user_alone(group: int) -> bool:
    """Whether a group contains this user alone, as the group that some systems give each user."""
    import grp  # noqa: PLC0415  # only POSIX has these modules
    import pwd  # noqa: PLC0415

    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


def _private(reason: str) -> Path:
    """Return a directory that only this process knows, removed when it ends."""
    if not _PRIVATE:
        _PRIVATE.append(Path(tempfile.mkdtemp(prefix="mcftensor_")))
        atexit.register(shutil.rmtree, _PRIVATE[0], ignore_errors=True)
        warnings.warn(
            f"mcftensor compiles anew in each process, as it does not use {_named()} for compiled "
            f"code: {reason}. MCFTENSOR_CACHE_DIR can name a directory that is yours alone",
            stacklevel=2,
        )
    return _PRIVATE[0]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


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
