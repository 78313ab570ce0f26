"""The published matrix of operators: what computes, in which format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mcftensor as mcf

MATRIX = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/operator-matrix.json").read_text()
)
SAME_RELEASE = torch.__version__.split("+")[0] == MATRIX["machine"]["torch"].split("+")[0]
"""Whether torch has the operators and samples of the matrix."""


def published(name: str, format: mcf.Format) -> dict[str, Any]:
    """What the matrix says of an operator; nothing of what another release has added."""
    if name not in MATRIX["operators"] and not SAME_RELEASE:
        pytest.skip("the matrix is of another release of torch")
    return MATRIX["operators"][name][format.name]
