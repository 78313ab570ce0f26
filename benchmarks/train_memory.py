"""Peak memory of a whole training of GPT-2 with 124 million parameters, activations included.

Each strategy of train.py takes two steps for each length of windows, in two processes of its own:
one tells by how much the process grew at most (resident memory, Linux only), the other what
PyTorch's allocator had out at most. Both count from before the model is made.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import train
from speed import machine, memory, report
from speed.gpt import SHAPES

MODEL = "124M"
STRATEGIES = ("master", "autocast", "bf16", "light", "plus", "full", "exact", "compact", "released")
WINDOWS = ("1x128", "1x512", "1x1024", "4x1024")
STEPS = 2
STATUS = Path("/proc/self/status")


def steps(strategy: str, batch: int, length: int, model: str) -> None:
    """A training of two steps."""
    job = train.Training(strategy, SHAPES[model], batch, "cpu")
    job.windows = job.windows[:, : length + 1]
    for _ in range(STEPS):
        job.step()


def resident(strategy: str, batch: int, length: int, model: str, threads: int) -> int:
    """Bytes by which the process grows at most."""
    torch.set_num_threads(threads)
    steps(strategy, 1, 2, "tiny")  # libraries and kernels are loaded by now
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = status("VmRSS")
    steps(strategy, batch, length, model)
    return status("VmHWM") - before


def status(name: str) -> int:
    """Bytes, by what the kernel says of this process."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def allocated(strategy: str, batch: int, length: int, model: str, threads: int) -> int:
    """Bytes that PyTorch's allocator has out at most."""
    torch.set_num_threads(threads)
    return memory.peak("cpu", lambda: steps(strategy, batch, length, model))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all strategies and windows, for JSON."""
    alone = multiprocessing.get_context("spawn")
    windows: dict[str, Any] = {}
    with ProcessPoolExecutor(1, mp_context=alone, max_tasks_per_child=1) as pool:
        for window in options.windows:
            batch, length = map(int, window.split("x"))
            windows[window] = {}
            for name in options.strategies:
                arguments = (name, batch, length, options.model, options.threads)
                windows[window][name] = {
                    "resident": pool.submit(resident, *arguments).result(),
                    "allocated": pool.submit(allocated, *arguments).result(),
                }
                Console().print(window, name, windows[window][name])
    shapes = train.parameter_shapes(SHAPES[options.model])
    return {
        "machine": machine.describe("cpu"),
        "model": options.model,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes),
        "steps": STEPS,
        "windows": windows,
    }


def table(record: dict[str, Any]) -> Table:
    """One strategy a row."""
    screen = Table(title=f"Peak of the process, and of the allocator, GB: {record['model']}")
    screen.add_column("strategy")
    for window in record["windows"]:
        screen.add_column(window, justify="right")
    for name in next(iter(record["windows"].values())):
        screen.add_row(
            name,
            *(
                " / ".join(f"{found[name][kind] / 1e9:.2f}" for kind in ("resident", "allocated"))
                for found in record["windows"].values()
            ),
        )
    return screen


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="train_memory.py", description=__doc__)
    add = parser.add_argument
    add("--model", default=MODEL, choices=SHAPES)
    add("--strategies", nargs="+", default=STRATEGIES, choices=train.STRATEGIES, metavar="NAME")
    add("--windows", nargs="+", default=WINDOWS, metavar="BATCHxLENGTH")
    add("--threads", type=int, default=1)
    add("--json", type=Path, default=Path("out/bench/train-memory.json"))
    options = parser.parse_args(arguments)
    if not STATUS.exists():
        parser.error("this system has no /proc/self/status")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    record = run(options)
    Console().print(table(record))
    report.write(options.json, record)


if __name__ == "__main__":
    main()
