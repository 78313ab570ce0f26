"""Reductions of gradients over processes, by gloo in bf16 and in float32, and without order.

The three are taken in turn, round by round, in the same processes, each over buckets of 25 MiB
as DistributedDataParallel makes them; the figures are medians of rounds, and of the ratios in each
round. Bytes are what a process sends to others. `python benchmarks/order_free.py` writes
`order-free.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mcftensor.reproducible.binned_sums import layout_of
from mcftensor.reproducible.order_free_exchange import BucketSum
from mcftensor.reproducible.order_free_leaves import Leaves
from speed.machine import describe

BUCKET = 25 * 2**20 // 2  # elements in bf16


def without_order(buckets: list[Tensor], leaves: list[list[Tensor]], memory: list[Tensor]) -> None:
    """As the hook of DistributedDataParallel does it: leaves of a bucket are under way while those
    of the one before are summed."""
    group = dist.group.WORLD
    assert group is not None
    count = len(leaves)
    layout = layout_of(count * group.size())
    accumulates = count > 4
    waiting: list[BucketSum] = []
    for i, bucket in enumerate(buckets):
        own = Leaves(bucket.numel(), layout, accumulates)
        own.add(*[leaf[i] for leaf in leaves])
        new = BucketSum(
            group,
            [own],
            [bucket],
            bucket,
            [count] * group.size(),
            accumulates,
            layout,
            count == 1,
            memory,
        )
        if waiting:
            waiting[-1].owned()
        waiting.append(new)
    waiting[-1].owned()
    for one in waiting:
        one.result()


def by_gloo(buckets: list[Tensor], dtype: torch.dtype) -> None:
    """All-reduces of all buckets at once, as torch's own; float32 goes there and back."""
    sent = buckets if dtype == torch.bfloat16 else [x.to(dtype) for x in buckets]
    works: list[Any] = [dist.all_reduce(x, async_op=True) for x in sent]
    for bucket, x, work in zip(buckets, sent, works, strict=True):
        work.wait()
        if x is not bucket:
            bucket.copy_(x)


def measure(rank: int, world: int, store: str, elements: int, rounds: int, out: str) -> None:
    """Time the three ways on one of the processes; the first one writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    sizes = [min(BUCKET, elements - i) for i in range(0, elements, BUCKET)]
    leaf = [torch.randn(n).bfloat16() for n in sizes]
    buckets = [torch.empty_like(x) for x in leaf]
    memory: list[Tensor] = []
    ways: dict[str, Callable[[], None]] = {
        "bf16": lambda: by_gloo(buckets, torch.bfloat16),
        "float32": lambda: by_gloo(buckets, torch.float32),
        "without order": lambda: without_order(buckets, [leaf], memory),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, list[float]] = {name: [] for name in ways}  # of the processor
    for i in range(rounds + 1):
        for name, way in ways.items():
            for x, y in zip(buckets, leaf, strict=True):
                x.copy_(y)
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            way()
            dist.barrier()
            if i:  # the first round compiles
                times[name].append(time.perf_counter() - start)
                work[name].append(time.process_time() - before)
    if rank == 0:
        ring = 2 * (world - 1) / world
        record = {
            "processes": world,
            "elements": elements,
            "seconds": {name: statistics.median(x) for name, x in times.items()},
            "rounds": times,
            "processor seconds": {name: statistics.median(x) for name, x in work.items()},
            "ratio of processor seconds": ratio(work, "bf16"),
            "ratio to bf16": ratio(times, "bf16"),
            "ratio to float32": ratio(times, "float32"),
            "bytes an element that a process sends": {
                "bf16": 2 * ring,
                "float32": 4 * ring,
                "without order": 2 * ring,
            },
        }
        Path(out).write_text(json.dumps(record))
    dist.destroy_process_group()


def ratio(times: dict[str, list[float]], to: str) -> float:
    """Of a reduction without order, in the same round: the median."""
    pairs = zip(times["without order"], times[to], strict=True)
    return statistics.median(own / other for own, other in pairs)


def main() -> None:
    """Run all sizes on all numbers of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=float, nargs="*", default=[25e6, 125e6])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    records = []
    for elements in map(int, args.elements):
        for world in args.processes:
            with tempfile.TemporaryDirectory() as folder:
                out = str(Path(folder, "out"))
                given = (world, str(Path(folder, "store")), elements, args.rounds, out)
                mp.spawn(measure, given, world)  # type: ignore[no-untyped-call]
                records.append(json.loads(Path(out).read_text()))
    table = Table("processes", "elements", "bf16", "float32", "without order", "to bf16")
    for x in records:
        seconds = [f"{1000 * t:.0f} ms" for t in x["seconds"].values()]
        table.add_row(
            str(x["processes"]), f"{x['elements']:,}", *seconds, f"{x['ratio to bf16']:.2f}"
        )
    Console().print(table)
    result = {"machine": describe("cpu"), "load": os.getloadavg(), "records": records}
    (args.out / "order-free.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
