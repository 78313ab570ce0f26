"""The folder of code that tests compile, and what is kept in it between runs."""

import hashlib
import importlib.util
import os
import shutil
import time
from pathlib import Path


def folder() -> Path:
    """Return `MCFTENSOR_TEST_CACHE`, or a folder in the user's cache."""
    named = os.environ.get("MCFTENSOR_TEST_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named).absolute() if named else home / "mcftensor-tests"


def source() -> str:
    """Return a digest of the library's source."""
    digest = hashlib.sha256()
    package = Path(importlib.util.find_spec("mcftensor").origin).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def of_torch() -> Path:
    """Return the folder for code that PyTorch compiles, a new one each week.

    There is one for each restriction of vectors: code for narrower ones, found as that for wider
    ones, ends the process.

    Others are removed a day after their last run began.
    """
    restricted = os.environ.get("ATEN_CPU_CAPABILITY", "")
    own = folder() / f"torch-{int(time.time()) // (7 * 24 * 60 * 60)}{restricted}"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    own.touch()
    for path in folder().glob("torch-*"):
        if own.stat().st_mtime - path.stat().st_mtime > 24 * 60 * 60:
            shutil.rmtree(path, ignore_errors=True)
    return own
