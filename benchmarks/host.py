"""Optimizer steps on the host: time beside float32 on the same CPU, bytes, and what a link adds.

    python benchmarks/host.py --elements 1e9 --out benchmarks/results/host.json

Each contender has a process of its own, one after the other, which has all memory to itself. Where
memory lies makes processes faster or slower, float32 above all, so each contender has several, in
turn, and a median of their medians. A step
begins with bf16 gradients on the host and ends with bf16 weights that can go up. Float32 has master
weights and states on the CPU: a gradient is converted, in memory that stays; torch's fused AdamW
(or DeepSpeed's CPUAdam, where its package is installed) steps; the weight is rounded; and so on,
tensor by tensor. The bytes are those that the operating system counts.

The model of the link: a gradient goes down as backward makes it, and its step begins when it has
arrived; leading terms go up after it. With the step in backward the three overlap, and what remains
is the longest of backward, link and step, and a last bucket; without, the step follows backward.

With ATEN_CPU_CAPABILITY=avx2 in the environment, PyTorch and the library take vectors of 256 bits.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import mcftensor as mcf
from speed.machine import describe

SIDE = 5792
"""Of the square matrices: 33.5 million elements each."""
LINKS = {"PCIe 4.0 x16": 25e9, "PCIe 5.0 x16": 55e9}
"""Bytes a second, each way."""
BASE = "float32, fused"


def on_host(format: mcf.Format, mode: str, matrices: list[nn.Parameter]) -> Callable[[], None]:
    """Steps over `mcf.host.weights`; the leading terms are copied to the model, as they go up."""
    model = nn.ParameterList(matrices)
    host = mcf.host.weights(model, format)
    optimizer = mcf.collage(torch.optim.AdamW(host.parameters(), lr=1e-4, fused=True), mode)

    def step() -> None:
        optimizer.step()

    for h, p in zip(host.parameters(), matrices, strict=True):
        h.grad = p.grad
        p.grad = None
    return step


def in_float32(make: Callable[[Any], torch.optim.Optimizer], matrices: Any) -> Callable[[], None]:
    """Steps over float32 master weights, tensor by tensor."""
    masters = [nn.Parameter(p.detach().float()) for p in matrices]
    optimizers = [make([master]) for master in masters]
    gradient = torch.empty_like(masters[0])  # made once: new memory costs more than the step

    def step() -> None:
        for p, master, optimizer in zip(matrices, masters, optimizers, strict=True):
            master.grad = gradient.copy_(p.grad)
            optimizer.step()
            master.grad = None
            p.data.copy_(master.data)

    return step


def of_deepspeed(parameters: Any) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for CPUs, compiled at its first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 (it may not be installed)

    return DeepSpeedCPUAdam(parameters, lr=1e-4, weight_decay=1e-2, adamw_mode=True)


CONTENDERS: dict[str, Callable[[Any], Callable[[], None]]] = {
    BASE: lambda ps: in_float32(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), ps),
    "DeepSpeed CPUAdam": lambda ps: in_float32(of_deepspeed, ps),
    "mcf exact (bf16i16)": lambda ps: on_host(mcf.bf16i16, "full", ps),
    "mcf compact (bf16i8)": lambda ps: on_host(mcf.bf16i8, "compact", ps),
    "mcf plus (bf16x2)": lambda ps: on_host(mcf.bf16x2, "plus", ps),
}


def work(name: str, count: int, threads: int, connection: Connection) -> None:
    """Step whenever asked, and answer with the seconds; at last with the bytes."""
    torch.set_num_threads(threads)
    gc.collect()
    before = resident()
    matrices = []
    drawn = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for _ in range(count):
        p = nn.Parameter((0.02 * drawn).bfloat16())
        p.grad = (1e-3 * drawn.T).bfloat16().contiguous()
        matrices.append(p)
    del drawn
    try:
        step = CONTENDERS[name](matrices)
        step()
    except ImportError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while connection.recv():
        start = time.perf_counter()
        step()
        connection.send(time.perf_counter() - start)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free, and that the C library keeps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    connection.send((resident() - before, peak))


def resident() -> int:
    """Bytes of this process in memory, by the operating system."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measured(count: int, threads: int, rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each contender in a process of its own, one after the other, since all memory is needed."""
    context = multiprocessing.get_context("spawn")
    for name in CONTENDERS:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(name, count, threads, theirs))
        process.start()
        if (error := ours.recv()) is not None:
            yield name, {"left out": error}
            continue
        times = []
        for _ in range(rounds):
            ours.send(True)
            times.append(ours.recv())
        ours.send(False)
        held, peak = ours.recv()
        process.join()
        # The model, in the same memory here, is the device's.
        elements = count * SIDE * SIDE
        yield (
            name,
            {
                "seconds": times,
                "host_bytes": (held - 2 * elements) / elements,
                "peak_bytes": (peak - 2 * elements) / elements,
            },
        )


def beside_backward(step: float, elements: int, backward: float) -> dict[str, Any]:
    """Seconds that an iteration takes after the start of backward, by the model of the link."""
    found = {}
    for name, rate in LINKS.items():
        link = 2 * elements / rate  # each way
        found[name] = {
            "link each way": link,
            "step after backward": max(backward, link) + step + link,
            "step in backward": max(backward, link, step) + (link + step) / 100,
        }
    return found


def main() -> None:
    """Measure, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=float, default=1e9, help="default: 1e9")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=3, help="of each contender")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    options = parser.parse_args()
    count = max(round(options.elements / SIDE**2), 1)
    elements = count * SIDE * SIDE
    found: dict[str, Any] = {"machine": describe("cpu", ("deepspeed",)), "elements": elements}
    found["threads"] = options.threads
    found["contenders"] = {}
    for _ in range(options.processes):
        for name, x in measured(count, options.threads, options.rounds):
            own = found["contenders"].setdefault(name, x | {"seconds": []})
            own["seconds"].append(statistics.median(x.get("seconds", [math.nan])))

    table = Table("", "seconds", "slowest", "of float32", "bytes on the host", "largest")
    base = statistics.median(found["contenders"][BASE]["seconds"])
    for name, x in found["contenders"].items():
        if "left out" in x:
            table.add_row(name, x["left out"])
            continue
        x["median"] = statistics.median(x["seconds"])
        x["ratio"] = x["median"] / base
        x["model"] = beside_backward(x["median"], elements, backward=base)
        table.add_row(
            name,
            f"{x['median']:.2f}",
            f"{max(x['seconds']):.2f}",
            f"{x['ratio']:.2f}",
            f"{x['host_bytes']:.2f}",
            f"{x['peak_bytes']:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(f"{elements:,} elements, {options.threads} threads, {describe('cpu')['cpu']}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
