"""Functions that run in a copy of this process: a program of its own takes seconds to import
PyTorch."""

import os
import traceback
import warnings
from collections.abc import Callable

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def fork(function: Callable[[], object]) -> int:
    """Run a function in a copy of this process; return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Later versions of Python warn where threads exist.
        child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        os._exit(1)
    return child


def exit_status(function: Callable[[], object]) -> int:
    """Return the status with which a copy of this process leaves that runs a function."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(function), 0)[1])
