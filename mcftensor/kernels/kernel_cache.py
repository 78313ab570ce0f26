"""The directory of compiled code for later processes, which has a bounded size.

Files there are executed. So they are used only if no other user than this one and root can write to
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

# Bytes of files, after which those used longest ago are removed: some thousand programs.
MOST_BYTES = 1 << 28

_PREFIX = "mcftensor_kernel_"
_PRIVATE: list[Path] = []


def key_of(*parts: object) -> str:
    """What a file is found by that is made of these parts."""
    return _digest("\n".join(map(str, parts)).encode())


def kept(key: str) -> Path | None:
    """A file that was kept, if it is to be trusted; it is now the last to go."""
    for path in _directory().glob(f"{_PREFIX}{key}_*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_safe = stat.S_ISREG(status.st_mode) and _is_safe(status)
            if is_safe and path.stem.endswith(f"_{_digest(path.read_bytes())}"):
                os.utime(path)
                return path
    return None


def keep(key: str, make: Callable[[Path], Path]) -> Path:
    """Have a file made in an empty folder, and appear whole or not at all, other processes being
    at it too. Where the directory cannot be written, it is kept as long as this process lives.

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
    """MCFTENSOR_CACHE_DIR, or mcftensor in the user's cache."""
    named = os.environ.get("MCFTENSOR_CACHE_DIR")
    if named:
        return Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mcftensor"


def _directory() -> Path:
    """The named directory; a private one, if others can write there or put another in its place."""
    directory = _named().resolve()
    for folder in (directory, *directory.parents):
        with contextlib.suppress(OSError):  # as it may not be there
            status = folder.stat()
            is_sticky = folder != directory and status.st_mode & stat.S_ISVTX
            if not (_is_safe(status) or (is_sticky and _is_own(status))):
                return _private(f"other users can write to {folder}")
    return directory


def _is_safe(status: os.stat_result) -> bool:
    """Return whether it belongs to this user or root, and no other user can write to it."""
    if os.name != "posix":  # where each user's folders are closed to others
        return True
    is_shared = status.st_mode & stat.S_IWGRP and not _is_of_this_user_alone(status.st_gid)
    return _is_own(status) and not is_shared and not status.st_mode & stat.S_IWOTH


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _is_of_this_user_alone(group: int) -> bool:
    """Some systems give each user a group, and let it write."""
    import grp  # noqa: PLC0415  # POSIX has these two
    import pwd  # noqa: PLC0415

    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


def _private(reason: str) -> Path:
    """A directory that this process alone knows, until it ends."""
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
