"""The machine code of kernels, and predictions of their limits on processors that are not at hand.

Every kernel is compiled for x86-64 with AVX-512 and with AVX2, and by Triton for NVIDIA's and AMD's
GPUs. Its instructions are counted by kind, registers and spills are read from what the compilers
say, and the time of computing follows from the throughput that makers publish, for CPUs by the
models of LLVM's llvm-mca. The time of memory follows from the bytes to move. On the CPU at hand
both are compared with measurements.

It needs a C++ compiler, llvm-mca, and Triton.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from machine_code import cpus, gpus
from machine_code.kernels import SIDE, Kernel, kernels
from machine_code.processors import PROCESSORS, predict, processor_at_hand
from mcftensor.kernels import cpu
from speed import clocks, gpu_report, machine

ELEMENTS = 1 << 24
ROUNDS = 9


def investigate(options: argparse.Namespace) -> dict[str, Any]:
    """Return predictions for every kernel, and measurements."""
    found = kernels()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["TRITON_CACHE_DIR"] = folder
        result: dict[str, Any] = {
            "machine": machine.describe("cpu", ("triton",)),
            "processors": [asdict(p) for p in PROCESSORS],
            "kernels": {
                kernel.name: analyzed(kernel, scratch)
                for kernel in tqdm(found, desc="compiling", disable=None)
            },
        }
        if not options.no_measure:
            result["measured"] = measured(found, scratch)
    if options.before:
        result["before"] = before(json.loads(options.before.read_text()))
    return result


def before(earlier: dict[str, Any]) -> dict[str, Any]:
    """What an earlier file of this program had, for the steps of optimizers."""
    return {
        name: {
            "instructions": found["instructions"],
            "computing": {p: x["computing"] for p, x in found["processors"].items()},
        }
        for name, found in earlier["kernels"].items()
    }


def at_hand(device: str, elements: int) -> dict[str, Any]:
    """Measure each kernel on the device at hand, and predict its time.

    The prediction is the longer of the time of its bytes, by the bandwidth of copies, and of its
    instructions.
    """
    clock = clocks.clock_of(device)
    speed = clocks.bandwidth(device, clock, None if device == "cuda" else 1 << 26)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        processor = processor_at_hand(speed / 1e9) if device == "cuda" else None
        for kernel in kernels():
            if kernel.prepare is None:
                continue
            x = {"memory": 1e12 * (kernel.read + kernel.written) / speed, "computing": 0.0}
            if processor is not None:
                code = gpus.code_of(kernel.program, processor.code, Path(folder))
                x["computing"] = predict(kernel, processor, code).computing
            with torch.device(device):
                run = kernel.prepare(elements // SIDE)
            for _ in range(4):  # compile, and warm up
                run()
            seconds = statistics.median([clock.seconds(run) for _ in range(ROUNDS)])
            x["measured"] = 1e12 * seconds / elements
            x["ratio"] = x["measured"] / max(x["memory"], x["computing"])
            found[kernel.name] = x
    return {"bandwidth": speed, "kernels": found}


def analyzed(kernel: Kernel, scratch: Path) -> dict[str, Any]:
    """Return the machine code of one kernel, and its predicted times."""
    codes: dict[str, cpus.Loop | gpus.Code] = {
        name: cpus.loop_of(kernel.program, target, scratch) for name, target in cpus.SETS.items()
    }
    for target in dict.fromkeys(p.code for p in PROCESSORS if p.rates):
        codes[target] = gpus.code_of(kernel.program, target, scratch)
    predictions = {p.name: predict(kernel, p, codes[p.code]) for p in PROCESSORS}
    return {
        "read": kernel.read,
        "written": kernel.written,
        "instructions": {name: code.instructions for name, code in codes.items()},
        "kinds": {name: code.counts for name, code in codes.items()},
        "processors": {name: asdict(x) | {"bound": x.bound} for name, x in predictions.items()},
    }


# ------------------------------------------------------------------------------- the CPU at hand


def measured(found: list[Kernel], scratch: Path) -> dict[str, Any]:
    """Measure each kernel over a large tensor, by one thread and by all, and predict its time."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = "AVX-512" if "avx512bw" in flags else "AVX2"
    is_amd = "AuthenticAMD" in flags
    model = {"AVX-512": ("icelake-server", "znver4"), "AVX2": ("skylake", "znver3")}[name][is_amd]
    clock, threads = clock_of(scratch), torch.get_num_threads()
    result: dict[str, Any] = {"model": model, "clock": clock, "kernels": {}}
    timed = [(kernel, kernel.prepare) for kernel in found if kernel.prepare]
    loops = {k.name: cpus.loop_of(k.program, cpus.SETS[name], scratch) for k, _ in timed}
    cycles = {name: cpus.cycles(loop, model) for name, loop in loops.items()}
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        for kernel, prepare in timed:
            bandwidth = bandwidth_of()  # which other work on the machine takes a part of
            moved = kernel.read + (1 if kernel.is_in_place else 2) * kernel.written
            computing = cycles[kernel.name] / clock / count
            seconds = median_of(prepare(ELEMENTS // SIDE))
            result["kernels"].setdefault(kernel.name, {})[count] = {
                "computing": 1000 * computing,
                "memory": 1000 * moved / bandwidth,
                "measured": 1e12 * seconds / ELEMENTS,
                "bandwidth": bandwidth,
            }
    torch.set_num_threads(threads)
    return result


def median_of(run: Callable[[], Any]) -> float:
    """Seconds of a call, after some that compile and warm up."""
    for _ in range(4):
        run()
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bandwidth_of() -> float:
    """GB/s of an operation in place, which reads and writes as much."""
    x = torch.zeros(1 << 26)
    return 2 * x.nbytes / median_of(x.neg_) / 1e9


_CHAIN = """
extern "C" long chain(long steps) {
  long x = 3;
  for (long i = 0; i < steps; ++i) {
    __asm__ volatile("imul %0, %0\\n imul %0, %0\\n imul %0, %0\\n imul %0, %0\\n"
                     "imul %0, %0\\n imul %0, %0\\n imul %0, %0\\n imul %0, %0" : "+r"(x));
  }
  return x;
}
"""


def clock_of(scratch: Path) -> float:
    """GHz of a core at work, by products that wait for each other, three cycles each."""
    (scratch / "chain.cpp").write_text(_CHAIN)
    command = [*(cpu.find() or ["c++"]), "-O2", "-shared", "-fPIC", "chain.cpp", "-o", "chain.so"]
    subprocess.run(command, cwd=scratch, check=True)
    chain = ctypes.CDLL(str(scratch / "chain.so")).chain
    chain.argtypes = [ctypes.c_long]
    steps, best = 1 << 20, float("inf")
    for _ in range(20):
        start = time.perf_counter()
        chain(steps)
        best = min(best, time.perf_counter() - start)
    return 3 * 8 * steps / best / 1e9


# ------------------------------------------------------------------------------------------ shown


def table(result: dict[str, Any]) -> Table:
    """Return the limit of each kernel: its time of computing over the time of memory."""
    screen = Table(title="Time of computing over that of memory: above 1, bound by computing")
    screen.add_column("kernel")
    for processor in result["processors"]:
        screen.add_column(processor["name"].replace(" (", "\n("), justify="right")
    for name, found in result["kernels"].items():
        ratios = [x["computing"] / x["memory"] for x in found["processors"].values()]
        screen.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
    return screen


def measurements(result: dict[str, Any]) -> Table:
    """Return predictions and measurements."""
    screen = Table(title="Picoseconds an element on this machine")
    for heading in ("kernel", "threads", "computing", "memory", "measured", "over predicted"):
        screen.add_column(heading, justify="left" if heading == "kernel" else "right")
    for name, found in result["kernels"].items():
        for threads, x in found.items():
            over = x["measured"] / max(x["computing"], x["memory"])
            figures = [f"{x[k]:.0f}" for k in ("computing", "memory", "measured")]
            screen.add_row(name, str(threads), *figures, f"{over:.2f}")
    return screen


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="roofline.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-measure", action="store_true", help="predict only")
    parser.add_argument("--before", type=Path, help="an earlier JSON file, to be kept beside")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="measure here alone, beside what is predicted"
    )
    parser.add_argument("--elements", type=int, default=1 << 26, help="with --device")
    options = parser.parse_args(arguments)
    if options.device:
        found = {
            "machine": machine.describe(options.device, ("triton",)),
            "at hand": at_hand(options.device, options.elements),
        }
        print(gpu_report.kernels(found))
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    try:
        result = investigate(options)
    except (FileNotFoundError, ImportError) as error:
        print(f"roofline.py: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(table(result))
    if "measured" in result:
        console.print(measurements(result["measured"]))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
