"""The files of the package that an operation passes, and the number of its climbs.

A climb is a call from a layer of the package into a layer imported later. Python calls are
counted by `sys.setprofile`; each operation has run before, so that caches are filled and kernels
are compiled.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.kernels.cpu import BUILD_AFTER
from mcftensor.kernels.execute import OF_A_CALL

PACKAGE = Path(str(mcf.__file__)).parent
# Folders in the order in which they are imported; modules at the top of the package are last.
LAYERS = (
    *("kernels", "arithmetic", "formats", "passes", "tensor", "dispatch", "operators"),
    *("patches", "sums"),
    *("checkpoint", "training", "meters", "wide", "scaling", "."),
)


class Walk:
    """What a call passes: files in order, functions, calls, climbs."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.functions: set[Any] = set()
        self.calls = self.climbs = 0

    def follow(self, call: Callable[[], Any]) -> Walk:
        """Call a function and record the files that it passes."""
        stack: list[str | None] = []

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "return" and stack:
                stack.pop()
            if event != "call":
                return
            file = _file(frame)
            caller = next((x for x in reversed(stack) if x is not None), None)
            stack.append(file)
            if file is None:
                return
            self.calls += 1
            self.functions.add(frame.f_code)
            if file not in self.files:
                self.files.append(file)
            self.climbs += caller is not None and _layer(file) > _layer(caller)

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self


def _file(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def _layer(file: str) -> int:
    return LAYERS.index(file.partition("/")[0] if "/" in file else ".")


def walks() -> dict[str, Callable[[], Any]]:
    """The operations."""
    torch.manual_seed(0)
    x, y = (mcf.as_expansion(torch.randn(8, 64), mcf.bf16x2) for _ in range(2))
    single = mcf.as_expansion(torch.randn(8, dtype=torch.float64), mcf.fp32x2)
    double = mcf.as_expansion(torch.randn(4, 4, dtype=torch.float64), mcf.fp64x2)
    scaled = mcf.as_expansion(torch.randn(8), mcf.scaling.scaled(torch.float16))
    found: dict[str, Callable[[], Any]] = {
        "x * y": lambda: x * y,
        "x.mul_(0.9)": lambda: x.mul_(0.9),
        "_foreach_mul_, 2 rows": lambda: torch._foreach_mul_([x, y], 0.9),
        "sin, fp32x2": single.sin,
        "layer_norm, fp64x2": lambda: F.layer_norm(double, (4,)),
        "solve, fp64x2": lambda: torch.linalg.solve(double, double),
        "x * x, scaled": lambda: scaled * scaled,
        "as_expansion(module)": lambda: mcf.as_expansion(nn.Linear(64, 64)),
    }
    paths: dict[str, dict[str, bool]] = {
        "for-loop": {"foreach": False, "fused": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
    formats = {"bf16x2": mcf.bf16x2, "bf16i16": mcf.bf16i16, "compact": mcf.bf16i8}
    for name, format in formats.items():
        for path, options in paths.items():
            values = [mcf.as_expansion(torch.randn(8, 64), format) for _ in range(2)]
            parameters = list(map(nn.Parameter, values))
            for p in parameters:
                p.grad = torch.randn(8, 64, dtype=torch.bfloat16)
            optimizer = torch.optim.AdamW(parameters, **options)  # type: ignore[arg-type]
            if name == "compact":
                mcf.collage(optimizer, "compact")
            found[f"{path} step, {name}"] = optimizer.step
    folder = tempfile.mkdtemp()
    model = mcf.as_expansion(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    file = Path(folder, "model.safetensors")
    mcf.save_file(model, file)
    found["save_file"] = lambda: mcf.save_file(model, file)
    found["load_file"] = lambda: mcf.load_file(file, model)
    return found


def main() -> None:
    """Print a table of all operations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="name the files, in order")
    arguments = parser.parse_args()
    table = Table("operation", "files", "calls", "functions", "climbs")
    for name, call in walks().items():
        with torch.no_grad():
            for _ in range(BUILD_AFTER // OF_A_CALL):  # until kernels are compiled
                call()
            walk = Walk().follow(call)
        figures = (len(walk.files), walk.calls, len(walk.functions), walk.climbs)
        table.add_row(name, *map(str, figures))
        if arguments.files:
            table.add_row(", ".join(walk.files))
    Console().print(table)


if __name__ == "__main__":
    main()
