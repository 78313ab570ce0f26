"""Files that are replaced atomically: a reader finds the old file or the new one, never a part.

The new file is written in the same folder, synchronized to disk, and renamed. A writer holds a
lock on it, which ends with its process, even if the process is killed. The lock tells the file of a
killed writer from a file in use, and the next write removes the former.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from mcftensor.checkpoint.checkpoint_error import CheckpointError

# Attempts to lock a new file, after which its file system counts as one without locks.
_ATTEMPTS = 16

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: what killed writers leave stays there, and does no harm.
    fcntl = None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` if the block ends without an error.

    At any moment `path` is the file from before or the whole new one, also if the process is
    killed or the machine stops. Data are on disk when the block has ended. The new file has the
    mode and, where the system permits it, the owner of the old one; of a symbolic link the target
    is replaced.

    Args:
        path: the file to replace or to make, in a folder that exists.

    Raises:
        FileExistsError: there is a folder or a device of this name.
        FileNotFoundError: the folder does not exist.

    Examples:
        >>> import tempfile, torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with mcf.checkpoint.replacing(f"{folder}/training.pt") as temporary:
        ...         torch.save({"model": model.state_dict(), "step": 3}, temporary)
        ...     torch.load(f"{folder}/training.pt", weights_only=True)["step"]
        3
    """
    path = Path(path)
    with beside(path) as (temporary, put):
        yield temporary
        put()
        synchronize(temporary.parent)


@contextlib.contextmanager
def beside(path: Path, previous: Path | None = None) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield a locked file in the same folder, and a function that moves it to `path` once on disk.

    It gets the mode and owner of a previous file, by default of the file that it replaces.
    """
    path = path.resolve()  # of a link
    previous = previous or path
    its = previous.stat() if previous.exists() else None
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no file that could be replaced")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it first")
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        remove_abandoned(leftover)
    temporary, file = _make_locked(path, ".tmp")
    with file:
        if its is not None:
            temporary.chmod(0o600)  # until it is whole

        def put() -> None:
            synchronize(temporary)
            if its is not None:
                _belong_alike(temporary, its)
            if fcntl is None:
                file.close()  # Windows renames no open file.
            temporary.replace(path)

        try:
            yield temporary, put
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def making(path: Path) -> Iterator[Path]:
    """Yield a folder to write to, which is moved to `path` if the block ends without an error."""
    path = path.resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} is there already; remove it, or give another name")
    parent = path.parent
    if not parent.is_dir():
        raise CheckpointError(f"{path}: there is no folder {parent}; make it first")
    for leftover in parent.glob(f".{glob.escape(path.name)}.*.tmp.lock"):
        _remove_abandoned_folder(leftover)
    lock, file = _make_locked(path, ".tmp.lock")
    folder = lock.with_suffix("")
    with file:
        try:
            folder.mkdir()
            yield folder
            synchronize(folder)
            if path.exists():
                _belong_alike(folder, path.stat())
                path.rmdir()
            folder.rename(path)
            synchronize(parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if fcntl is None:
                file.close()  # Windows removes no open file.
            lock.unlink(missing_ok=True)


def _make_locked(path: Path, suffix: str) -> tuple[Path, BinaryIO]:
    """Create a file next to a path, locked if its file system supports locks."""
    for left in reversed(range(_ATTEMPTS)):
        made = path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")
        file = made.open("xb")
        with contextlib.suppress(BlockingIOError):
            _lock(file)
            if made.exists():
                return made, file
        if left:  # before it was locked, another writer has taken it for abandoned
            file.close()
            made.unlink(missing_ok=True)
    return made, file


def _belong_alike(new: Path, its: os.stat_result) -> None:
    """Give a file or folder the mode of another one, and its owner, as far as one may."""
    mode = stat.S_IMODE(its.st_mode)
    if hasattr(os, "chown"):
        try:
            os.chown(new, -1, its.st_gid)
        except OSError:  # Members of another group get no more than anybody.
            mode = mode & ~0o070 | (mode & 0o007) << 3
        with contextlib.suppress(OSError):
            os.chown(new, its.st_uid, -1)
    new.chmod(mode)


def _remove_abandoned_folder(lock: Path) -> None:
    """Remove what a killed writer has left, unless another one holds its lock."""
    with contextlib.suppress(OSError), lock.open("rb+") as file:
        if _lock(file):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()


def remove_abandoned(path: Path, is_needed: Callable[[Path], bool] = lambda path: False) -> None:
    """Remove a file, unless its writer is running, or has finished and the file is needed."""
    # Another process may have removed it.
    with contextlib.suppress(OSError), path.open("rb+") as file:
        if _lock(file) and not is_needed(path):
            path.unlink()


def synchronize(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, reach the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders.
    file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _lock(file: BinaryIO) -> bool:
    """Lock a file if its system can; raise BlockingIOError if another writer has locked it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # There are file systems without locks.
        return False
    return True
