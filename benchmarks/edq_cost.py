"""What the EDQ meter costs: time of steps with and without it, and memory of a sampled step.

Steps without a meter, with a meter that does not sample, and sampled ones are taken in turn, on
the same model; the figures are medians, and ratios to the step without a meter. The model is of
the shape of GPT-2, of `--layers` layers, `--width` wide.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import mcftensor as mcf
from speed.gpt import GPT2, Shape
from speed.machine import describe

CASES: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any], str | None]] = {
    "bf16, foreach": (nn.Module.bfloat16, {"foreach": True}, None),
    "bf16, fused": (nn.Module.bfloat16, {"fused": True}, None),
    "fp32, fused": (nn.Module.float, {"fused": True}, None),
    "bf16 expansions, plus, fused": (mcf.as_expansion, {"fused": True}, "plus"),
}


def build(case: str, shape: Shape, device: str) -> tuple[list[Tensor], Optimizer]:
    """The parameters, with gradients, and an optimizer that has its states already."""
    convert, flags, mode = CASES[case]
    parameters = list(convert(GPT2(shape).to(device)).parameters())
    optimizer = AdamW(parameters, lr=1e-4, **flags)
    if mode is not None:
        mcf.collage(optimizer, mode)
    for p in parameters:
        p.grad = torch.randn(p.shape, device=device).to(p.dtype) * 1e-3
    optimizer.step()
    return parameters, optimizer


def seconds(optimizer: Optimizer, device: str) -> float:
    """Time of one step."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    optimizer.step()
    synchronize()
    return time.perf_counter() - start


def step_times(case: str, shape: Shape, device: str, rounds: int) -> dict[str, float]:
    """Return medians of steps without a meter, with one, and sampled, taken in turn."""
    _, optimizer = build(case, shape, device)
    times: dict[str, list[float]] = {"without": [], "not sampled": [], "sampled": []}
    for turn in range(rounds + 1):
        found = {"without": seconds(optimizer, device)}
        with mcf.EDQ(optimizer, every=3):
            found["sampled"] = seconds(optimizer, device)
            found["not sampled"] = seconds(optimizer, device)
        if turn:  # the first one warms up
            for name, time_ in found.items():
                times[name].append(time_)
    return {name: statistics.median(found) for name, found in times.items()}


def hook_overhead(rounds: int = 20_000) -> float:
    """Seconds that a meter adds to a step which it does not sample."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.1)  # without gradients, nothing but the call
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(20):
        for metered in (False, True):
            meter = mcf.EDQ(optimizer, every=10**9) if metered else None
            optimizer.step()
            start = time.perf_counter()
            for _ in range(rounds // 20):
                optimizer.step()
            found[metered].append((time.perf_counter() - start) / (rounds // 20))
            if meter is not None:
                meter.remove()
    return statistics.median(found[True]) - statistics.median(found[False])


def peak_copies(size: int, device: str) -> float:
    """Memory that sampling one bf16 parameter under AdamW takes, in float64 copies of it."""
    p = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16, device=device))
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], foreach=False)
    optimizer.step()
    before = _peak(device)
    with mcf.EDQ(optimizer):
        optimizer.step()
    return (_peak(device) - before) / (8 * size)


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=11, help="steps of each kind")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/edq-cost.json"))
    options = parser.parse_args()

    # Before all else: on a CPU the peak is that of the whole process.
    copies = peak_copies(2**25, options.device)
    shape = Shape(options.layers, options.width, options.width // 64, 128, 256)
    count = sum(p.numel() for p in GPT2(shape).parameters())
    times = {
        case: step_times(case, shape, options.device, options.rounds)
        for case in track(CASES, "steps")
    }
    overhead = hook_overhead()

    console = Console()
    table = Table(
        "AdamW over",
        "milliseconds a step",
        "with a meter, not sampled",
        "sampled",
        title=f"GPT of {count:,} parameters, {options.device}, {torch.get_num_threads()} threads",
    )
    for case, found in times.items():
        table.add_row(
            case,
            f"{1e3 * found['without']:.1f}",
            *(f"{found[kind] / found['without']:.2f} times" for kind in ("not sampled", "sampled")),
        )
    console.print(table)
    console.print(f"The hooks take {1e6 * overhead:.1f} µs a step that is not sampled.")
    console.print(f"Memory of a sample: {copies:.1f} float64 copies of the largest parameter.")
    record = {
        "machine": describe(options.device),
        "parameters": count,
        "rounds": options.rounds,
        "seconds": times,
        "hook_seconds": overhead,
        "float64_copies": copies,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
