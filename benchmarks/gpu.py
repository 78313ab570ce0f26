"""Measure this library on the GPU at hand, in some twenty minutes: `make gpu`.

Stages, each a separate program, in this order:

  selfcheck  are the results right there?
  tests      the tests that need a GPU
  kernels    time of each kernel, and the prediction from its bytes and instructions
  steps      optimizer steps of this library, PyTorch and other libraries
  training   tokens a second, peak memory and loss of GPT-2's shape in five strategies

Finished stages are kept in the folder --out, and a restart continues with the next one. The results
are results.json and report.md, with instructions to publish them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speed import gpu_report, machine

ROOT = Path(__file__).parents[1]
STRATEGIES = ("plus", "exact", "compact", "autocast", "master")
STEPS = (
    *("fused", "optimi", "FlashOptim", "torchao", "bitsandbytes", "TransformerEngine"),
    *("mcf plus, foreach", "torch bf16, foreach"),
)


@dataclass(frozen=True)
class Stage:
    """A program, and the place of its figures.

    Attributes:
        name: the name of the stage.
        command: the command, run from the root of the repository.
        limit: seconds after which it is stopped, and the next stage begins.
        figures: the JSON file that it writes; None if it only prints.
    """

    name: str
    command: list[str]
    limit: float
    figures: Path | None = None


def stages(options: argparse.Namespace) -> list[Stage]:
    """In order; quick ones do as little as shows that they work."""
    device, folder, quick = options.device, options.out, options.quick
    python = [sys.executable]

    def program(name: str, *arguments: str) -> list[str]:
        return [*python, f"benchmarks/{name}.py", "--device", device, *arguments]

    def figures(name: str) -> tuple[Path, list[str]]:
        path = folder / f"{name}-figures.json"
        return path, ["--json", str(path)]

    kernels = folder / "kernels-figures.json"
    to_kernels = ["--out", str(kernels)]
    steps, to_steps = figures("steps")
    training, to_training = figures("training")
    few = ["--only", "mcf plus, fused", "--workloads", "tiny", "--rounds", "1"]
    workloads = ["--workloads", "one tensor", "GPT-2", "many tensors"]
    many = ["--only", *STEPS, *workloads, "--patience", "60"]
    fewer = ["--elements", "65536"] if quick else []
    small = ["--model", "tiny", "--steps", "1", "--rounds", "1"]
    large = ["--model", "124M", "--batch", str(batch(device)), "--steps", "10", "--rounds", "2"]
    shape = small if quick else large
    tests = ["tests/test_options.py"] if quick else ["-m", "cuda", "tests"]
    return [
        Stage(
            "selfcheck",
            [*python, "-m", "mcftensor", "selfcheck", "--device", device, *["--eager"] * quick],
            180,
        ),
        Stage("tests", [*python, "-m", "pytest", "-q", *tests], 600),
        Stage("kernels", program("roofline", *to_kernels, *fewer), 240, kernels),
        Stage(
            "steps", program("steps", *(few if quick else many), *to_steps, "--out", str(folder)),
            600, steps,
        ),
        Stage(
            "training",
            program("train", *shape, "--strategies", *STRATEGIES, *to_training),
            600, training,
        ),
    ]  # fmt: skip


def batch(device: str) -> int:
    """Windows of 1,024 tokens that fit: of a GPU of 8 GB two, of one of 80 GB sixteen."""
    if device == "cpu":
        return 1
    size = torch.cuda.get_device_properties(0).total_memory / 2**30
    return 2 if size < 12 else 4 if size < 20 else 8 if size < 40 else 16


def run(stage: Stage, folder: Path) -> dict[str, Any]:
    """What came of a stage, which is looked up if it is done already."""
    path = folder / f"{stage.name}.json"
    if path.exists():
        print(f"{stage.name}: done before", flush=True)
        return dict(json.loads(path.read_text()))
    print(f"{stage.name}: at most {stage.limit / 60:.0f} minutes", flush=True)
    start = time.perf_counter()
    status, text = carried_out(stage)
    result: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "status": status,
        "text": text.splitlines()[-40:],
    }
    if stage.figures is not None and stage.figures.exists():
        result["figures"] = json.loads(stage.figures.read_text())
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def carried_out(stage: Stage) -> tuple[int | str, str]:
    """The exit status, or that it took too long, and what was printed."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "COLUMNS": "140",
    }
    process = subprocess.Popen(
        stage.command, cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=stage.limit)
    except subprocess.TimeoutExpired:
        end(process)
        return f"broken off after {stage.limit:.0f} s", process.communicate()[0]
    except BaseException:
        end(process)
        raise
    return process.returncode, text


def end(process: subprocess.Popen[str]) -> None:
    """End a stage with all that it has started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def described(device: str) -> dict[str, Any]:
    """The device: what tables and predictions name."""
    if device == "cpu":
        return {"name": machine.processor(), "memory": 0, "capability": "cpu", "runtime": ""}
    found = torch.cuda.get_device_properties(0)
    amd = getattr(found, "gcnArchName", "").partition(":")[0] if torch.version.hip else ""
    return {
        "name": found.name,
        "memory": found.total_memory,
        "capability": amd or f"sm_{found.major}{found.minor}",
        "runtime": f"ROCm {torch.version.hip}" if amd else f"CUDA {torch.version.cuda}",
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--by", default="", metavar="NAME", help="who measures, for the table of devices")
    add("--out", type=Path, default=ROOT / "out/gpu", help="folder (default: out/gpu)")
    add("--again", nargs="*", default=[], metavar="STAGE", help="stages to run once more")
    # For the test of this program, on a machine without a GPU.
    add("--device", default="cuda", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    add("--quick", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages and write the report; 1 if a stage failed, 2 without a GPU."""
    options = parse(arguments)
    options.out = options.out.absolute()
    if options.device == "cuda" and not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        made = f"is built for {build}, which the driver does not run" if build else "is for CPUs"
        print(
            f"gpu.py: PyTorch finds no GPU: torch {torch.__version__} {made}; install a PyTorch "
            "for the driver, remove .venv, and name its Python: make gpu PYTHON=path",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.again:
        (options.out / f"{name}.json").unlink(missing_ok=True)
    record: dict[str, Any] = {
        "by": options.by,
        "machine": machine.describe(options.device),
        "device": described(options.device),
        "stages": {},
    }
    for stage in stages(options):
        record["stages"][stage.name] = run(stage, options.out)
        # What is done is kept, should a later one be broken off.
        (options.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "report.md").write_text(gpu_report.page(record))
    print(gpu_report.page(record))
    print(f"Wrote {options.out / 'results.json'} and {options.out / 'report.md'}")
    return int(any(x["status"] != 0 for x in record["stages"].values()))


if __name__ == "__main__":
    sys.exit(main())
