"""What the storage of moments loses: AdamW with states of a byte and half, against float64.

Seven streams of gradients: as ever; with beta2 0.95; of one size; a hundredth in size; one gradient
of 3000 times the rest; sizes that differ more; mostly zeros. Weights are float32, so that only the
states' own storage counts. Prints the error of what weights moved by, the largest update over the
largest one in float64, and the second moment over the exact one, and writes them as JSON. Other
libraries' classes run as they are where they are installed and run on a CPU; of the others the
formats are emulated in float64, after their sources.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import mcftensor as mcf
from common.probes import PATHS
from mcftensor.arithmetic.noise import noise_of
from speed.machine import describe

LR, STEPS = 1e-4, 1500

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scenario:
    """Normally distributed gradients, of a different size for each weight, with a drift."""

    name: str
    size: float = 1e-4
    beta2: float = 0.999
    spread: float = 1.0  # of the logarithm of sizes
    outlier: float = 1.0  # what one gradient in 64 is multiplied by, once
    share: float = 1.0  # of gradients that are not zero

    def gradients(self, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """In bfloat16."""
        generator = torch.Generator().manual_seed(1)

        def draw() -> Tensor:
            return torch.randn(shape, generator=generator)

        sizes, drift = self.size * torch.exp(self.spread * draw()), 0.3 * draw()
        for step in range(STEPS):
            gradient = (draw() + drift) * sizes
            if self.outlier != 1 and step == STEPS // 3:
                hit = torch.rand(shape, generator=generator) < 1 / 64
                gradient = torch.where(hit, self.outlier * gradient, gradient)
            if self.share < 1:
                gradient = gradient * (torch.rand(shape, generator=generator) < self.share)
            yield gradient.bfloat16()


SCENARIOS = [
    Scenario("beta2 0.999"),
    Scenario("beta2 0.95", beta2=0.95),
    Scenario("one size", spread=0.0),
    Scenario("gradients of 1e-6", size=1e-6),
    Scenario("one gradient x 3000", outlier=3000.0),
    Scenario("spread 2", spread=2.0),
    Scenario("2 % not zero", share=0.02),
]


@dataclass(frozen=True)
class Contender:
    """A way to store moments: bytes of both, and AdamW with them over some weights."""

    name: str
    bytes: float
    make: Callable[..., Optimizer]


@dataclass(frozen=True)
class Finding:
    """Of one contender and one scenario."""

    displacement: float
    largest: float
    second_moment: float | None


# ----------------------------------------------------------------------------- moments, stored


def ours(name: str, size: float, mode: Any, path: str) -> Contender:
    """A mode of ours, under one of torch's paths; weights are bf16i16, which is float32."""

    def make(start: Tensor, **settings: Any) -> Optimizer:
        weight = nn.Parameter(mcf.as_expansion(start, mcf.bf16i16))
        return mcf.collage(AdamW([weight], **settings, **PATHS[path]), mode)

    return Contender(f"{name}, {path}", size, make)


def peer(name: str, size: float, package: str, cls: str, **keywords: Any) -> Contender:
    """A class of another library over float32 weights."""

    def make(start: Tensor, **settings: Any) -> Optimizer:
        optimizer = getattr(importlib.import_module(package), cls)
        return optimizer([nn.Parameter(start.clone())], **settings, **keywords)

    return Contender(name, size, make)


def emulated(name: str, size: float, first: Rounding, second: Rounding) -> Contender:
    """Moments that each step computes in float64 and then rounds to what would be stored."""

    def make(start: Tensor, **settings: Any) -> Optimizer:
        optimizer = AdamW([nn.Parameter(start.double())], **settings, **PATHS["for-loop"])

        def store(*unused: object) -> None:
            for state in optimizer.state.values():
                state["exp_avg"].copy_(first(state["exp_avg"]))
                state["exp_avg_sq"].copy_(second(state["exp_avg_sq"]))

        optimizer.register_step_post_hook(store)
        return optimizer

    return Contender(f"{name}, emulated", size, make)


def blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Blocks of a flat tensor, and the largest magnitude of each."""
    parts = x.reshape(-1, size)
    return parts, parts.abs().amax(1, keepdim=True)


def flashoptim_first(x: Tensor) -> Tensor:
    """int8 of 2x / (1 + |x|) over the largest of 32, which is a float16."""
    parts, largest = blocks(x, 32)
    scale = largest.clamp(min=1e-12).half().double()
    y = (parts / scale).nan_to_num(0.0, 0.0, 0.0)
    codes = (2 * y / (1 + y.abs()) * 127 + 0.5).floor().clamp(-127, 127) / 127
    return (codes / (2 - codes.abs()) * scale).view_as(x)


def flashoptim_second(x: Tensor) -> Tensor:
    """uint8 of the root over the largest of 32, which is a float16."""
    parts, largest = blocks(x.sqrt(), 32)
    scale = largest.clamp(min=1e-12).half().double()
    codes = (parts / scale).nan_to_num(0.0, 0.0, 0.0).mul(255).round().clamp(0, 255)
    return (codes / 255 * scale).square().view_as(x)


def dynamic_map(*, signed: bool) -> Tensor:
    """The 8-bit numbers of bitsandbytes: decades, and ever more of them towards 1."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        numbers += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float64)


def by_map(numbers: Tensor) -> Rounding:
    """The nearest of some numbers times the largest of 256."""
    middles = (numbers[1:] + numbers[:-1]) / 2

    def rounded(x: Tensor) -> Tensor:
        parts, largest = blocks(x, 256)
        scaled = parts / largest.clamp(min=1e-300)
        return (numbers[torch.bucketize(scaled, middles)] * largest).view_as(x)

    return rounded


class Balanced:
    """The neighbours among some numbers times a power of two, by balanced rounding, in blocks of
    32; linear in the number, or in its root if `to_zero` is not allowed.
    """

    def __init__(self, numbers: list[float], stream: int, *, to_zero: bool) -> None:
        self.numbers = torch.tensor([0.0, *numbers], dtype=torch.float64)
        self.stream, self.to_zero, self.writes = stream, to_zero, 0

    def __call__(self, x: Tensor) -> Tensor:
        """Round, as the next write of a tensor."""
        key, index = torch.tensor(self.writes), torch.arange(x.numel())
        self.writes = (self.writes + 1) % STEPS  # one course has that many
        noise = noise_of("balanced", key, index, self.stream)
        assert noise is not None
        parts, largest = blocks(x, 32)
        scale = torch.exp2((largest.clamp(min=1e-300) / self.numbers[-1]).log2().ceil())
        size = parts.abs() / scale
        above = torch.searchsorted(self.numbers, size).clamp(1, len(self.numbers) - 1)
        low, high = self.numbers[above - 1], self.numbers[above]
        if not self.to_zero:
            low = torch.where((above == 1) & (size > 0), high, low)
            size = size.maximum(low).sqrt()
        ends = (low, high) if self.to_zero else (low.sqrt(), high.sqrt())
        share = ((size - ends[0]) / (ends[1] - ends[0]).clamp(min=1e-300)).view(-1)
        found = torch.where(noise.uniform() < share, high.view(-1), low.view(-1)).view_as(parts)
        return (found * scale).copysign(parts).view_as(x)


def of_bits(mantissa: int, signed: bool) -> list[float]:
    """The numbers above zero of codes of four bits, with so many bits behind an exponent."""
    codes = range(1, 8 if signed else 16)
    return [
        math.ldexp((c >> mantissa > 0) + (c % 2**mantissa) / 2**mantissa, max(c >> mantissa, 1))
        for c in codes
    ]


def e4m3(x: Tensor) -> Tensor:
    """E4M3 over the largest of 256, as torchao's fp8 states are, second moments too."""
    parts, largest = blocks(x, 256)
    scale = (largest / 448).clamp(min=1e-300)
    return ((parts / scale).float().to(torch.float8_e4m3fn).double() * scale).view_as(x)


NEAREST = {"exp_avg": mcf.mxfp8.nearest, "exp_avg_sq": mcf.ue5m3.nearest}
RANDOM = {
    "exp_avg": mcf.mxfp8.with_rounding("stochastic"),
    "exp_avg_sq": mcf.ue5m3.with_rounding("stochastic"),
}
TORCHAO_4 = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
FOUR = {"exp_avg": mcf.q4.nearest, "exp_avg_sq": mcf.ue4.nearest}
CONTENDERS = [
    ours("bf16i16 (float32)", 8, "full", "fused"),
    ours("bf16 to nearest", 4, "light", "fused"),
    *(ours("compact", 2.06, "compact", path) for path in ("fused", "foreach", "for-loop")),
    ours("mxfp8, ue5m3 stochastic", 2.06, RANDOM, "fused"),
    ours("mxfp8, ue5m3 to nearest", 2.06, NEAREST, "fused"),
    *(ours("compact4", 1.12, "compact4", path) for path in ("fused", "foreach", "for-loop")),
    ours("q4, ue4 to nearest", 1.12, FOUR, "fused"),
    *(
        emulated(
            f"{first}, {second} balanced",
            1.06,
            Balanced(of_bits(mantissa, signed=True), 1, to_zero=True),
            Balanced(of_bits(other, signed=False), 2, to_zero=False),
        )
        for first, mantissa, second, other in (
            ("E2M1", 1, "UE4M0", 0),
            ("E3M0", 0, "UE3M1", 1),
            ("E2M1", 1, "UE3M1", 1),
        )
    ),
    emulated("flashoptim", 2.13, flashoptim_first, flashoptim_second),
    emulated(
        "bitsandbytes 8 bit",
        2.03,
        by_map(dynamic_map(signed=True)),
        by_map(dynamic_map(signed=False)),
    ),
    emulated("torchao fp8", 2.03, e4m3, e4m3),
    peer("torchao AdamW8bit", 2.03, "torchao.optim", "AdamW8bit", block_size=256),
    peer("torchao AdamWFp8", 2.03, "torchao.optim", "AdamWFp8", block_size=256),
    peer("torchao AdamW4bit", 1.06, "torchao.optim", "AdamW4bit", block_size=128),
    peer("bitsandbytes AdamW8bit", 2.03, "bitsandbytes.optim", "AdamW8bit"),
    peer("pytorch_optimizer FlashAdamW", 2.13, "pytorch_optimizer", "FlashAdamW"),
    peer("flashoptim FlashAdamW", 2.13, "flashoptim", "FlashAdamW"),
]

# ------------------------------------------------------------------------------------ measuring


@dataclass
class Course:
    """What a run did."""

    moved: Tensor
    largest: float
    second_moment: Tensor | None


def course(contender: Contender, scenario: Scenario, shape: tuple[int, ...]) -> Course:
    """Take all steps."""
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(shape, generator=generator)).bfloat16().float()
    settings = {"lr": LR, "betas": (0.9, scenario.beta2), "weight_decay": 0.0, "eps": 1e-8}
    optimizer = contender.make(start, **settings)
    (weight,) = optimizer.param_groups[0]["params"]
    before, largest = start.double(), 0.0
    for gradient in scenario.gradients(shape):
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
        now = mcf.as_plain(weight.detach(), torch.float64).clone()
        largest = max(largest, (now - before).abs().max().item())
        before = now
    return Course(before - start.double(), largest, second_moment(optimizer, weight))


def second_moment(optimizer: Optimizer, weight: Tensor) -> Tensor | None:
    """As its class can say it."""
    found = optimizer.state[weight].get("exp_avg_sq")
    if not isinstance(found, Tensor) or found.shape != weight.shape:
        return None
    if hasattr(found, "dequantize") and not isinstance(found, mcf.MCFTensor):
        found = found.dequantize() if type(found) is not Tensor else found
    return mcf.as_plain(found, torch.float64) if found.is_floating_point() else None


EXACT = emulated("float64", 16, lambda x: x, lambda x: x)


def finding(contender: Contender, scenario: Scenario, exact: Course, shape: Any) -> Finding:
    """One contender against float64."""
    found = course(contender, scenario, shape)
    ratio = None
    if found.second_moment is not None and exact.second_moment is not None:
        ratio = (found.second_moment / exact.second_moment).median().item()
    return Finding(
        ((found.moved - exact.moved).norm() / exact.moved.norm()).item(),
        found.largest / exact.largest,
        ratio,
    )


def measure(
    shape: tuple[int, ...], known: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Findings by contender and scenario, and why others could not be had; some may be known."""
    results: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = known.get("missing", {})
    exact = {scenario.name: course(EXACT, scenario, shape) for scenario in SCENARIOS}
    for contender in track(CONTENDERS, "moments"):
        own = {}
        if contender.name in missing:
            continue
        if contender.name in known.get("moments", {}):
            results[contender.name] = known["moments"][contender.name]
            continue
        try:
            for scenario in SCENARIOS:
                own[scenario.name] = asdict(
                    finding(contender, scenario, exact[scenario.name], shape)
                )
        except Exception as error:  # noqa: BLE001 (of libraries that are not for CPUs)
            missing[contender.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            continue
        results[contender.name] = own
    return results, missing


def shown(x: dict[str, Any]) -> str:
    """Return error, largest update and second moment as text, as far as they are known."""
    moment = x["second_moment"]
    tail = "" if moment is None or math.isnan(moment) else f" ({moment:.3f})"
    return f"{x['displacement']:.3f} {x['largest']:.2f}{tail}"


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128, help="of 64 weights each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/states.json"))
    parser.add_argument("--add", action="store_true", help="measure what the file lacks alone")
    options = parser.parse_args()
    torch.manual_seed(0)  # of stochastic rounding
    known = json.loads(options.out.read_text()) if options.add else {}
    results, missing = measure((options.rows, 64), known)
    names = [scenario.name for scenario in SCENARIOS]
    table = Table("moments", "bytes", *names, title="Displacement, largest update (v over exact)")
    for contender in CONTENDERS:
        if contender.name in results:
            cells = (shown(results[contender.name][name]) for name in names)
            table.add_row(contender.name, str(contender.bytes), *cells)
    console = Console(width=200)
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name} does not run here: {reason}")
    record = {
        "machine": known.get("machine")
        or describe("cpu", packages=("torchao", "bitsandbytes", "flashoptim")),
        "rows": options.rows,
        "steps": STEPS,
        "bytes": {contender.name: contender.bytes for contender in CONTENDERS},
        "moments": results,
        "missing": missing,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
