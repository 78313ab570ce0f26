"""The hardware and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mcftensor as mcf

PACKAGES = (
    "triton",
    "torch-optimi",
    "torchao",
    "heavyball",
    "pytorch_optimizer",
    "bitsandbytes",
    "flashoptim",
    "transformer_engine",
)


def describe(device: str, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """The machine, and the versions of `packages`, None where one is not installed."""
    return {
        "platform": platform.platform(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        # How long freed memory stays in the process decides what temporaries cost on a CPU.
        "malloc": {name: x for name, x in os.environ.items() if name.startswith("MALLOC_")},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mcftensor": mcf.__version__,
        "packages": {name: version(name) for name in packages},
    }


def processor() -> str:
    """The name of the processor."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
