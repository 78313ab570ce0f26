"""What the storage of weights loses: formats of 2 to 4 bytes a weight, against AdamW in float64.

Moments are float32, or exact, so that only the weights' own storage counts. Prints the error of
what weights moved by and writes it as JSON. `--count` weights for each of the two kinds, normal
ones with deviation 0.02 and ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW

import mcftensor as mcf
from common.probes import PATHS, gradient_stream, starting_weights
from speed.machine import describe

STATES = {"exp_avg": mcf.bf16i16, "exp_avg_sq": mcf.bf16i16}  # float32, to the bit
SETTINGS = [(1e-4, 0.999), (1e-5, 0.95), (1e-6, 0.95)]
KINDS = ("small", "ones")


@dataclass(frozen=True)
class Contender:
    """A way to store weights: bytes of one, and AdamW over some of them."""

    name: str
    bytes: float
    make: Callable[..., AdamW]


# ------------------------------------------------------------------------------ weights, stored


def stored(name: str, format: mcf.Format, path: str) -> Contender:
    """A format of ours, under one of torch's paths."""

    def make(start: Tensor, **settings: Any) -> AdamW:
        rows = start.view(-1, 128) if format.shared else start
        weight = nn.Parameter(mcf.as_expansion(rows, format))
        return mcf.collage(AdamW([weight], **settings, **PATHS[path]), STATES)

    scales = 1 / 32 if format.shared else 0
    return Contender(f"{name}, {path}", format.bytes + scales, make)


def plain(dtype: torch.dtype, path: str) -> Contender:
    """A plain tensor."""

    def make(start: Tensor, **settings: Any) -> AdamW:
        return AdamW([nn.Parameter(start.to(dtype, copy=True))], **settings, **PATHS[path])

    return Contender(f"torch {str(dtype)[6:]}, {path}", dtype.itemsize, make)


def emulated(name: str, size: int, rounded: Callable[[Tensor], Tensor]) -> Contender:
    """Weights that each step computes in float64 and then rounds to what would be stored."""

    def make(start: Tensor, **settings: Any) -> AdamW:
        weight = nn.Parameter(start.double())
        optimizer = AdamW([weight], **settings, **PATHS["for-loop"])
        optimizer.register_step_post_hook(lambda *_: weight.data.copy_(rounded(weight.data)))
        return optimizer

    return Contender(f"{name}, emulated", size, make)


def flashoptim(x: Tensor) -> Tensor:
    """Return the nearest bfloat16, and the rest in 127ths of half its ulp, ties away from zero."""
    leading, half = _split(x)
    scaled = ((x - leading) / half).clamp(-1, 1) * 127
    return leading + scaled.sign() * (scaled.abs() + 0.5).floor() / 127 * half


def heavyball(x: Tensor) -> Tensor:
    """The same, rounded up or down at random."""
    leading, half = _split(x)
    scaled = ((x - leading) / half).clamp(-1, 1) * 127
    tail = (scaled + torch.rand_like(scaled)).floor().clamp(-127, 127)
    return leading + tail / 127 * half


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16, and half its ulp, of normal numbers."""
    leading = x.float().bfloat16().double()
    _, exponent = leading.frexp()
    return leading, torch.ldexp(torch.ones_like(x), exponent - 9)


ALONE = mcf.Format(torch.bfloat16, 1, rounding="balanced")
FORMATS = {
    "bf16i16": mcf.bf16i16,
    "bf16x2": mcf.bf16x2,
    "bf16x2 balanced": mcf.bf16x2.with_rounding("balanced"),
    "bf16i8 nearest": mcf.bf16i8.with_rounding("nearest"),
    "bf16i8 stochastic": mcf.bf16i8.with_rounding("stochastic"),
    "bf16i8 balanced": mcf.bf16i8,
    "fp16i16": mcf.fp16i16,
    "fp16i8 balanced": mcf.fp16i8,
    "bf16 stochastic": ALONE.with_rounding("stochastic"),
    "bf16 balanced": ALONE,
    "e4m3i16 balanced": mcf.e4m3i16,
    "e4m3i8 nearest": mcf.e4m3i8.nearest,
    "e4m3i8 balanced": mcf.e4m3i8,
}
CONTENDERS = [
    *(plain(torch.float32, path) for path in ("fused", "for-loop")),
    *(
        stored(name, format, path)
        for name, format in FORMATS.items()
        for path in ("fused", "for-loop")
    ),
    emulated("flashoptim, 24 bits", 3, flashoptim),
    emulated("heavyball, bf16+8", 3, heavyball),
]

# ------------------------------------------------------------------------------------- measuring


def moved(contender: Contender, kind: str, lr: float, beta2: float, count: int) -> Tensor:
    """What 1000 steps move weights by, in float64."""
    start = starting_weights(kind, count)
    optimizer = contender.make(start, lr=lr, betas=(0.9, beta2), weight_decay=0.1)
    (weight,) = optimizer.param_groups[0]["params"]
    for gradient in gradient_stream(count, 1000):
        weight.grad = gradient.to(weight.dtype).view(weight.shape)
        optimizer.step()
    return mcf.as_plain(weight.detach(), torch.float64).view(-1) - start.double()


def measure(count: int) -> dict[str, Any]:
    """Of each contender, by setting and kind: the error, and the way along the exact one."""
    results: dict[str, Any] = {}
    for lr, beta2 in SETTINGS:
        for kind in KINDS:
            exact = moved(plain(torch.float64, "for-loop"), kind, lr, beta2, count)
            found = results[f"lr {lr:g}, beta2 {beta2:g}, {kind}"] = {}
            for contender in track(CONTENDERS, f"lr {lr:g}, {kind}"):
                way = moved(contender, kind, lr, beta2, count)
                found[contender.name] = {
                    "error": ((way - exact).norm() / exact.norm()).item(),
                    "moved": ((way * exact).sum() / exact.square().sum()).item(),
                }
    return results


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=8192, help="weights of each kind")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/storage.json"))
    options = parser.parse_args()
    torch.manual_seed(0)  # of stochastic rounding
    results = measure(options.count)
    table = Table("weights", "bytes", *results, title="Error of the displacement, 1000 steps")
    for contender in CONTENDERS:
        errors = (found[contender.name]["error"] for found in results.values())
        table.add_row(contender.name, f"{contender.bytes:.3g}", *(f"{x:.1e}" for x in errors))
    Console(width=160).print(table)
    record = {
        "machine": describe("cpu", packages=()),
        "count": options.count,
        "bytes": {contender.name: contender.bytes for contender in CONTENDERS},
        "displacement": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
