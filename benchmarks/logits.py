"""Losses of 16-bit logits, by PyTorch in bf16 and with a float32 copy, and by mcftensor.

`python benchmarks/logits.py` writes `logits.json`: errors of the gradients of a divergence against
float64, processor time of a forward and a backward pass, the three ways in turn, and the memory of
such a pass beyond that of the logits, in a process of its own for each way.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import mcftensor as mcf
from speed.machine import describe

Loss = Callable[[Tensor, Tensor], Tensor]

ENTROPIES: dict[str, Loss] = {
    "bf16": F.cross_entropy,
    "float32 copy": lambda x, target: F.cross_entropy(x.float(), target),
    "mcftensor": mcf.functional.cross_entropy,
}


def _divergence(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(
        F.log_softmax(x, -1), F.log_softmax(y, -1), reduction="batchmean", log_target=True
    )


DIVERGENCES: dict[str, Loss] = {
    "bf16": _divergence,
    "float32 copy": lambda x, y: _divergence(x.float(), y.float()),
    "mcftensor": lambda x, y: mcf.functional.kl_div(x, y, "batchmean", log_target=True),
}
MEASURED = 128, 131072
"""Rows and logits of a row whose memory is measured: smaller tensors reuse what was freed."""

WAYS = {"cross entropy": ENTROPIES, "divergence": DIVERGENCES}


def operands(kind: str, rows: int, classes: int, distance: float = 0.3) -> tuple[Tensor, Tensor]:
    """Logits in bf16, and classes or logits at a distance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, classes, generator=generator).mul_(3).bfloat16()
    if kind == "cross entropy":
        return x, torch.randint(classes, (rows,), generator=generator)
    y = torch.randn(rows, classes, generator=generator).mul_(distance).add_(x.float())
    return x, y.bfloat16()


def passed(loss: Loss, x: Tensor, other: Tensor) -> Tensor:
    """The gradient of a loss."""
    leaf = x.detach().requires_grad_()
    loss(leaf, other).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def errors(rows: int, classes: int, distance: float) -> dict[str, Any]:
    """Of the gradient of a divergence, relative to the norm of the exact one."""
    x, y = operands("divergence", rows, classes, distance)
    exact = passed(_divergence, x.double(), y.double())
    found: dict[str, Any] = {"rows": rows, "classes": classes, "distance": distance}
    for name, loss in DIVERGENCES.items():
        error = passed(loss, x, y).double() - exact
        found[name] = (error.norm() / exact.norm()).item()
    found["rounded once"] = ((exact.bfloat16().double() - exact).norm() / exact.norm()).item()
    return found


def times(kind: str, rows: int, classes: int, rounds: int) -> dict[str, Any]:
    """Nanoseconds a logit on one thread, in turn: medians."""
    x, other = operands(kind, rows, classes)
    taken: dict[str, list[float]] = {name: [] for name in WAYS[kind]}
    for i in range(rounds + 2):
        for name, loss in WAYS[kind].items():
            start = time.thread_time()
            passed(loss, x, other)
            if i > 1:  # the first rounds compile
                taken[name].append(1e9 * (time.thread_time() - start) / x.numel())
    medians = {name: statistics.median(y) for name, y in taken.items()}
    return {"kind": kind, "rows": rows, "classes": classes, "nanoseconds": medians}


def memory(kind: str, way: str, rows: int, classes: int) -> float:
    """Bytes a logit at the peak of a pass, beyond what was there before."""
    x, other = operands(kind, rows, classes)
    small = x[:64].clone(), other[:64].clone()
    for _ in range(3):
        passed(WAYS[kind][way], *small)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = _peak()
    passed(WAYS[kind][way], x, other)
    return (_peak() - before) / x.numel()


def _peak() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def bytes_of(kind: str) -> dict[str, float]:
    """The memory of each way."""
    found = {}
    for way in WAYS[kind]:
        command = [sys.executable, __file__, "--memory-of", kind, way]
        found[way] = float(subprocess.check_output(command, text=True).split()[-1])
    return found


def main() -> None:
    """Measure all, or the memory of one way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, nargs="*", default=[32768, 262144])
    parser.add_argument("--logits", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-of", nargs=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory_of:
        print(memory(*args.memory_of, *MEASURED))
        return
    result: dict[str, Any] = {"machine": describe("cpu"), "load": os.getloadavg()}
    result["errors"] = [
        errors(max(args.logits // 8 // n, 4), n, d) for n in args.classes for d in (0.03, 0.3)
    ]
    result["passes"] = []
    for kind in WAYS:
        for classes in args.classes:
            record = times(kind, args.logits // classes, classes, args.rounds)
            result["passes"].append(record)
            print(record)
    result["bytes"] = {kind: bytes_of(kind) for kind in WAYS}
    (args.out / "logits.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
