"""Thirds of a list in turn: each commit runs another third by default, `make test-all` runs all."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TURNS = 3
VARIABLE = "MCFTENSOR_ROTATION"


@functools.cache
def rotation() -> int:
    """Return the turn of this run: the environment variable, or the number of commits, modulo 3.

    Set the variable to the turn that a failure names, and the same third runs again.
    """
    chosen = os.environ.get(VARIABLE)
    return int(chosen if chosen is not None else _commits()) % TURNS


def rotated(values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters of a test; two thirds of them are marked slow."""
    return [
        pytest.param(value, marks=() if i % TURNS == rotation() else pytest.mark.slow)
        for i, value in enumerate(values)
    ]


def _commits() -> str:
    """Return the number of commits before this one, or 0 without git."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "0"
    return done.stdout if done.returncode == 0 else "0"
