"""The text to train on, as two tensors of bytes: one to learn from and one to be judged by."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10  # One part in ten is for validation.

# Tests are repetitive, and installed packages differ from one machine to the next.
NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class TextError(Exception):
    """The text cannot be used; the message is one line for the user."""


def standard_library() -> Path:
    """The folder of Python's own standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def load(path: Path | None, window: int) -> tuple[Tensor, Tensor]:
    """Return the training and validation bytes of `path`, by default of the standard library.

    A folder is split by file and a single file by position. Each part holds at least `window`
    bytes, or `TextError` is raised.
    """
    try:
        if path is None:
            root = standard_library()
            parts = split_files(root, library_files(root))
        elif path.is_dir():
            parts = split_files(path, text_files(path))
        else:
            parts = split_bytes(path.read_bytes())
    except OSError as error:
        raise TextError(f"cannot read {error.filename or path}: {error.strerror}") from None
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) < window:
            source = "the standard library" if path is None else path
            raise TextError(
                f"the text in {source} is too small: "
                f"{len(part)} bytes for {name}, and at least {window} are needed"
            )
    training, validation = (torch.frombuffer(bytearray(p), dtype=torch.uint8) for p in parts)
    return training, validation


def library_files(root: Path) -> list[Path]:
    """The Python sources of the standard library under `root`, without its tests."""
    return [f for f in root.rglob("*.py") if NOT_THE_LIBRARY.isdisjoint(f.relative_to(root).parts)]


def text_files(root: Path) -> list[Path]:
    """The files under `root` that hold UTF-8 text, hidden ones aside."""
    return [
        f
        for f in root.rglob("*")
        if f.is_file()
        and not any(part.startswith(".") for part in f.relative_to(root).parts)
        and is_utf8(f.read_bytes())
    ]


def is_utf8(content: bytes) -> bool:
    """Whether `content` is UTF-8 text."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def split_files(
    root: Path, files: list[Path], read: Callable[[Path], bytes] = Path.read_bytes
) -> tuple[bytes, bytes]:
    """Split by file: the tenth with the lowest hashes of their relative paths is held out."""
    if len(files) == 1:
        return split_bytes(read(files[0]))

    def digest(file: Path) -> bytes:
        return hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()

    files = sorted(files, key=digest)
    held_out = -(-len(files) // HELD_OUT)
    training, validation = files[held_out:], files[:held_out]
    return b"".join(map(read, training)), b"".join(map(read, validation))


def split_bytes(content: bytes) -> tuple[bytes, bytes]:
    """Split by position: the last tenth is held out."""
    cut = len(content) - len(content) // HELD_OUT
    return content[:cut], content[cut:]
