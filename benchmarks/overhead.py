"""What expansions cost where plain bf16 does the work: forward and backward.

Small operations show what a parameter adds to one; a compiled GPT of `--layers` layers, `--width`
wide, what is left of it in a forward pass. Expansions and plain bf16 are taken in turn; the figures
are medians, of small operations the least.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import mcftensor as mcf
from pretraining.model import GPT, Shape

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


def operation_times(rounds: int = 15) -> dict[str, dict[str, float]]:
    """Least microseconds of forward and backward, by operation and kind of parameters."""
    calls: dict[str, dict[str, Callable[[], None]]] = {}
    for kind, convert in CONVERSIONS.items():
        module = Small()
        convert(module)
        for name, operation in operations(module).items():

            def both(operation: Callable[[], Tensor] = operation, m: nn.Module = module) -> None:
                operation().sum().backward()
                m.zero_grad()

            calls.setdefault(name, {})[kind] = both
    times: dict[str, dict[str, float]] = {}
    for name, kinds in calls.items():
        turns = [[microseconds(call) for call in kinds.values()] for _ in range(rounds)]
        times[name] = dict(zip(kinds, map(min, zip(*turns, strict=True)), strict=True))
    return times


def forward_times(shape: Shape, batch: int, rounds: int) -> dict[str, float]:
    """Median seconds of a compiled forward pass."""
    tokens = torch.randint(256, (batch, shape.context))
    compiled = {}
    for kind, convert in CONVERSIONS.items():
        torch.manual_seed(0)
        compiled[kind] = torch.compile(convert(GPT(shape)))
    times: dict[str, list[float]] = {kind: [] for kind in compiled}
    with torch.no_grad():
        for turn in range(rounds + 2):
            for kind, model in compiled.items():
                start = time.perf_counter()
                model(tokens)
                if turn >= 2:  # the first ones compile
                    times[kind].append(time.perf_counter() - start)
    return {kind: statistics.median(found) for kind, found in times.items()}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11, help="forward passes of each kind")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overhead.json"))
    options = parser.parse_args()

    shape = Shape(
        context=128, layers=options.layers, width=options.width, heads=options.width // 64
    )
    small = operation_times()
    forward = forward_times(shape, options.batch, options.rounds)

    table = Table("", *CONVERSIONS, "ratio", title="Expansions beside plain bf16, CPU")
    rows = {f"{name}, forward and backward, µs": found for name, found in small.items()}
    rows["compiled forward, ms"] = {kind: 1e3 * t for kind, t in forward.items()}
    for name, found in rows.items():
        ratio = found["expansions"] / found["bf16"]
        table.add_row(name, *(f"{found[kind]:.1f}" for kind in CONVERSIONS), f"{ratio:.2f}")
    Console().print(table)
    record = {
        "machine": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
        "operation_microseconds": small,
        "forward_seconds": forward,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
