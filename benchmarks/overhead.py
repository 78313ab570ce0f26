"""The overhead of expansions in forward and backward, which compute in plain bf16.

Operations on a few elements show the overhead of a parameter for one operation. A model of the
shape of GPT-2, `--layers` layers, `--width` wide, shows the overhead in eager and in compiled
passes. Expansions and plain bf16 take turns. Figures are medians; for single operations the least
of many means.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import mcftensor as mcf
from speed.gpt import GPT2, Shape, loss
from speed.machine import describe

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bf16": nn.Module.bfloat16,
    "expansions": mcf.as_expansion,
}


class Small(nn.Module):
    """Parameters of a few elements, so that overhead is all that shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))


def operations(m: Small) -> dict[str, Callable[[], Tensor]]:
    """Calls in which a parameter takes part."""
    x = torch.randn(2, 4, 8, dtype=torch.bfloat16)
    tokens = torch.randint(8, (4,))
    return {
        "linear": lambda: F.linear(x, m.weight),
        "linear with bias": lambda: F.linear(x, m.weight, m.bias),
        "layer_norm": lambda: F.layer_norm(x, (8,), m.bias, m.bias),
        "embedding": lambda: F.embedding(tokens, m.weight),
        "addition": lambda: x + m.bias,
        "slice and addition": lambda: x + m.weight[:4],
    }


def microseconds(call: Callable[[], Any], calls: int = 100) -> float:
    """The mean time of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - start) / calls


def operation_times(rounds: int) -> dict[str, dict[str, float]]:
    """Least microseconds of forward and backward, or of forward without gradients, by operation and
    kind of parameters."""
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for kind, convert in CONVERSIONS.items():
        module = Small()
        convert(module)
        for name, operation in operations(module).items():

            def both(operation: Callable[[], Tensor] = operation, m: nn.Module = module) -> None:
                operation().sum().backward()
                m.zero_grad()

            calls.setdefault(name, {})[kind] = both
            calls.setdefault(f"{name}, no gradients", {})[kind] = torch.no_grad()(operation)
    times: dict[str, dict[str, float]] = {}
    for name, kinds in calls.items():
        turns = [[microseconds(call) for call in kinds.values()] for _ in range(rounds)]
        times[name] = dict(zip(kinds, map(min, zip(*turns, strict=True)), strict=True))
    return times


def passes(model: GPT2, tokens: Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to use a model."""
    compiled = torch.compile(model)

    def train(model: Any) -> None:
        loss(model, tokens).backward()
        model.zero_grad()

    forward = torch.no_grad()(compiled)
    return {
        "forward, compiled": lambda: forward(tokens),
        "forward and backward, compiled": lambda: train(compiled),
        "forward and backward, eager": lambda: train(model),
    }


def pass_times(shape: Shape, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of passes through a model, by way and kind of parameters."""
    tokens = torch.randint(shape.vocabulary, (batch, shape.context))
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for kind, convert in CONVERSIONS.items():
        torch.manual_seed(0)
        model = GPT2(shape)
        convert(model)
        for way, call in passes(model, tokens).items():
            calls.setdefault(way, {})[kind] = call
    times: dict[str, dict[str, list[float]]] = {}
    for turn, (way, kinds) in itertools.product(range(rounds + 2), calls.items()):
        for kind in sorted(kinds, reverse=turn % 2 == 1):
            start = time.perf_counter()
            kinds[kind]()
            if turn >= 2:  # the first ones compile
                found = times.setdefault(way, {}).setdefault(kind, [])
                found.append(time.perf_counter() - start)
    return {
        way: {kind: statistics.median(found) for kind, found in kinds.items()}
        for way, kinds in times.items()
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overhead.json"))
    options = parser.parse_args()

    shape = Shape(options.layers, options.width, options.width // 64, options.context, 1024)
    record: dict[str, Any] = {
        "machine": describe("cpu"),
        "shape": asdict(shape) | {"batch": options.batch},
        "microseconds": operation_times(options.rounds),
        "seconds": pass_times(shape, options.batch, options.rounds),
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")

    table = Table("", *CONVERSIONS, "ratio", title="Expansions beside plain bf16, CPU")
    rows = {f"{name}, µs": found for name, found in record["microseconds"].items()}
    rows |= {
        f"{name}, ms": {kind: 1e3 * x for kind, x in found.items()}
        for name, found in record["seconds"].items()
    }
    for name, found in rows.items():
        ratio = found["expansions"] / found["bf16"]
        table.add_row(name, *(f"{found[kind]:.1f}" for kind in CONVERSIONS), f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
