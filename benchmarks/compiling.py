"""The time of `torch.compile` for a step of AdamW, with bf16 expansions and with plain bf16.

The parameters are 148 tensors of a GPT-2 of `--layers` layers, `--width` wide. Compiled are
`optimizer.step`, a function that calls it, and the step as one graph. The graph needs a step
without its decorators (torch cannot do so for fused steps). Each figure is the time of a first
step, in a separate process without caches, and then of the longest of the next three.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import AdamW

import mcftensor as mcf
from speed.gpt import Shape, parameter_shapes
from speed.machine import describe

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bf16": nn.Module.bfloat16,
    "expansions": mcf.as_expansion,
}
PATHS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}


def step_alone(optimizer: AdamW) -> Callable[[], Any]:
    """`torch.compile(optimizer.step)`."""
    return torch.compile(optimizer.step)


def within_a_function(optimizer: AdamW) -> Callable[[], Any]:
    """A function that takes a step."""

    @torch.compile
    def function() -> None:
        optimizer.step()

    return function


def one_graph(optimizer: AdamW) -> Callable[[], Any]:
    """The step without the ends of graphs that torch puts around it."""
    step = type(optimizer).step.__wrapped__.__wrapped__  # type: ignore[attr-defined]

    @torch.compile(fullgraph=True)
    def whole() -> None:
        step(optimizer)

    return torch.no_grad()(whole)


WAYS = {"step": step_alone, "function": within_a_function, "one graph": one_graph}


def figures(kind: str, path: str, way: str, shape: Shape) -> dict[str, float]:
    """Seconds of the first step, of the longest of the next three, and the number of graphs."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = nn.Module()
    for i, size in enumerate(parameter_shapes(shape)):
        module.register_parameter(f"p{i}", nn.Parameter(torch.randn(size)))
    parameters = list(CONVERSIONS[kind](module).parameters())
    for p in parameters:
        p.grad = torch.randn(p.shape).to(p.dtype)
    step = WAYS[way](AdamW(parameters, **PATHS[path]))
    before = counters["stats"]["unique_graphs"]
    times = []
    for _ in range(4):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    graphs = counters["stats"]["unique_graphs"] - before
    return {"first step": times[0], "later": max(times[1:]), "graphs": graphs}


def in_its_own_process(*arguments: Any) -> dict[str, float]:
    """The same, without anything compiled before."""
    with tempfile.TemporaryDirectory() as fresh:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = fresh
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        context = multiprocessing.get_context("spawn")
        quiet = {"initializer": logging.disable, "initargs": (logging.WARNING,)}
        with ProcessPoolExecutor(1, mp_context=context, **quiet) as process:
            return process.submit(figures, *arguments).result()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=list(PATHS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compiling.json"))
    options = parser.parse_args()

    shape = Shape(options.layers, options.width, heads=1, context=128, vocabulary=256)
    console = Console()
    table = Table("compiled", "path", *CONVERSIONS, "ratio", title="Compiling AdamW, seconds")
    record: dict[str, Any] = {
        "machine": describe("cpu"),
        "parameters": len(parameter_shapes(shape)),
        "rows": [],
    }
    for way, path in itertools.product(options.ways, options.paths):
        if (way, path) == ("one graph", "fused"):
            continue
        row: dict[str, Any] = {"compiled": way, "path": path}
        for kind in CONVERSIONS:
            with console.status(f"{way}, {path}, {kind}"):
                row[kind] = in_its_own_process(kind, path, way, shape)
        row["ratio"] = row["expansions"]["first step"] / row["bf16"]["first step"]
        cells = [f"{row[k]['first step']:.1f}, {row[k]['later']:.2f}" for k in CONVERSIONS]
        table.add_row(way, path, *cells, f"{row['ratio']:.2f}")
        record["rows"].append(row)
        options.out.write_text(json.dumps(record, indent=2) + "\n")  # should a later one break off
    console.print(table)


if __name__ == "__main__":
    main()
