"""Scaled tensors decode to float64, whose range any of their scales fits."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.with_float64("scaled formats need it"))
