"""Optimizer steps by any number of threads, in several processes at once, and with a data loader.

One tensor of 33.6 million elements, the contenders taking turns. Processes are as many as there are
processors, each with one thread, as training with copies of a model has them; all step at the same
moment. The data loader has as many workers, which make batches of images all the while.

With ATEN_CPU_CAPABILITY=avx2 in the environment, PyTorch and the library take vectors of 256 bits
on a processor with longer ones too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from speed.clocks import HostClock
from speed.contenders import BASELINES, KNOWN
from speed.machine import describe
from speed.measuring import WARM_UP, order
from speed.workloads import make_workload

BASE = BASELINES["AdamW"]
CHOSEN = (
    BASE.name,
    "torch bf16, fused",
    *(f"mcf {mode}, fused" for mode in ("light", "plus", "full", "exact", "compact")),
)

Times = dict[str, list[float]]


def take_turns(
    threads: int, rounds: int, before_each: Callable[[], object], shapes: str = "one tensor"
) -> Times:
    """Seconds of the steps of each contender, something being waited for before each."""
    torch.set_num_threads(threads)
    workload, clock = make_workload(shapes, "cpu"), HostClock()
    running = {name: KNOWN[name].build(workload) for name in CHOSEN}
    times: Times = {name: [] for name in CHOSEN}
    for turn in range(-1 - WARM_UP, rounds):
        for name in order(CHOSEN, turn):
            running[name].prepare()
            before_each()
            seconds = clock.seconds(running[name].step)
            if turn >= 0:
                times[name].append(seconds)
    return times


def by_threads(threads: int, rounds: int) -> list[Times]:
    """In one process, alone."""
    return [take_turns(threads, rounds, lambda: None)]


def by_processes(count: int, rounds: int) -> list[Times]:
    """In several processes of one thread, which begin each step together."""
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(count), context.SimpleQueue()
    arguments = (rounds, barrier, found)
    processes = [context.Process(target=one_of_several, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    results = [found.get() for _ in processes]
    for process in processes:
        process.join()
    return results


def one_of_several(rounds: int, barrier: Any, found: Any) -> None:
    """Have the others wait for each step."""
    found.put(take_turns(1, rounds, barrier.wait))


class Images(Dataset[Tensor]):
    """Images that take a millisecond or so each to make."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, i: int) -> Tensor:
        image = torch.randint(256, (3, 256, 256), dtype=torch.uint8).float()
        return (image - image.mean()) / image.std()


def beside_a_loader(threads: int, workers: int, rounds: int) -> list[Times]:
    """Measure steps in one process while workers make batches."""
    batches: Iterator[Tensor] = iter(DataLoader(Images(), batch_size=64, num_workers=workers))
    return [take_turns(threads, rounds, lambda: next(batches))]


def summarized(found: list[Times]) -> dict[str, dict[str, float]]:
    """Medians over rounds and processes: seconds, and the ratio to the baseline in its round."""
    result = {}
    for name in CHOSEN:
        seconds = [x for times in found for x in times[name]]
        pairs = [(x, y) for t in found for x, y in zip(t[name], t[BASE.name], strict=True)]
        ratio = statistics.median(x / y for x, y in pairs)
        result[name] = {"seconds": statistics.median(seconds), "ratio": ratio}
    return result


def main() -> None:
    """Run the command."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, *range(2, cores + 1)])
    parser.add_argument("--processes", type=int, default=cores, help="0 for none")
    parser.add_argument("--workers", type=int, default=cores, help="0 for none")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/threads.json"))
    options = parser.parse_args()
    console = Console()
    ways: dict[str, Callable[[], list[Times]]] = {
        f"{n} thread{'s' if n > 1 else ''}": partial(by_threads, n, options.rounds)
        for n in options.threads
    }
    if options.processes:
        ways[f"{options.processes} processes of 1 thread"] = partial(
            by_processes, options.processes, options.rounds
        )
    if options.workers:
        ways[f"{cores} threads, a loader with {options.workers} workers"] = partial(
            beside_a_loader, cores, options.workers, options.rounds
        )
    machine = describe("cpu")
    del machine["threads"]  # they differ
    record: dict[str, Any] = {"machine": machine, "rounds": options.rounds, "ways": {}}
    table = Table("", *CHOSEN, title="ms, and the ratio to master weights")
    for way, run in ways.items():
        with console.status(way):
            record["ways"][way] = found = summarized(run())
        cells = (f"{1000 * x['seconds']:.1f} ({x['ratio']:.2f})" for x in found.values())
        table.add_row(way, *cells)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
