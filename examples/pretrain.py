"""Pretrain a small GPT in several precision strategies and compare them.

Every strategy starts from the same weights, sees the same batches and runs a stock
`torch.optim` optimizer. They differ only in how parameters and optimizer states are kept:

  master  bf16 parameters; the optimizer has fp32 master weights and fp32 states
  bf16    bf16 parameters and states
  light   parameters are expansions; states are plain bf16
  plus    parameters and second moments are expansions
  full    parameters and all states are expansions
"""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import mcftensor as mcf
from pretraining import report, text
from pretraining.model import GPT, Shape, loss
from pretraining.strategies import (
    LEARNING_RATES,
    OPTIMIZERS,
    PATHS,
    STRATEGIES,
    bytes_per_parameter,
    prepare,
    stock_optimizer,
)

SHAPES = {
    "cpu": Shape(context=128, layers=4, width=160, heads=5),
    "cuda": Shape(context=512, layers=12, width=768, heads=12),
}
BATCH_SIZES = {"cpu": 4, "cuda": 32}
EVALUATIONS = 10
VALIDATION_WINDOWS = 64


def compare(training: Tensor, validation: Tensor, options: argparse.Namespace) -> None:
    """Train every strategy, then show and save what came of it."""
    console = Console()
    shape = SHAPES[options.device]
    parameters = sum(p.numel() for p in GPT(shape).parameters())
    optimizer = OPTIMIZERS[options.optimizer].__name__
    title = f"GPT of {parameters:,} parameters, stock {optimizer}, {options.steps} steps"
    console.print(
        f"{title}\n{len(training):,} bytes of text to train on, {len(validation):,} to validate"
    )
    # On a CPU the flash backward in bf16 takes several times as long as plain matmuls.
    on_cpu = options.device == "cpu"
    with sdpa_kernel(SDPBackend.MATH) if on_cpu else contextlib.nullcontext():
        results = {s: train(s, training, validation, options) for s in options.strategies}

    console.print(report.table(results, title))
    report.write_json(
        options.out / "results.json",
        results,
        settings={
            **vars(options),
            "training_bytes": len(training),
            "validation_bytes": len(validation),
            "model": asdict(shape),
            "parameters": parameters,
        },
        machine=machine(options.device),
    )
    report.draw(options.out / "loss.png", results, title)
    console.print(f"Wrote results.json and loss.png to {options.out}", soft_wrap=True)


def train(
    strategy: str, training: Tensor, validation: Tensor, options: argparse.Namespace
) -> report.Result:
    """Train one model and return its losses, its memory and its speed."""
    torch.manual_seed(options.seed)
    shape = SHAPES[options.device]
    # Rounded to bf16 here, so that every strategy starts from exactly the same numbers.
    model = GPT(shape).to(options.device, torch.bfloat16)
    stock = stock_optimizer(options.optimizer, options.path, options.lr, options.beta2)
    optimizer = prepare(strategy, model, stock)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
    held_out = evenly_spaced(validation, shape.context + 1).to(options.device)
    evaluated = {round(options.steps * i / EVALUATIONS) for i in range(EVALUATIONS + 1)}

    result = report.Result(validation=[(0, evaluate(model, held_out, options.batch_size))])
    seconds = []
    # A terminal has its bar redrawn ten times a second, a log file gets a line twice a minute.
    redraw = 0.1 if sys.stderr.isatty() else 30
    stream = batches(training, shape.context + 1, options)
    bar = tqdm(stream, strategy, options.steps, unit="step", mininterval=redraw)
    for step, batch in enumerate(bar, start=1):
        start = time.perf_counter()
        model.zero_grad()
        objective = loss(model, batch)
        objective.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        result.training.append(objective.item())  # On a GPU this also waits for the step.
        seconds.append(time.perf_counter() - start)
        if step in evaluated:
            result.validation.append((step, evaluate(model, held_out, options.batch_size)))
        bar.set_postfix(
            training=f"{result.training[-1]:.3f}", validation=f"{result.final:.3f}", refresh=False
        )
    result.bytes_per_parameter = bytes_per_parameter(model, optimizer)
    result.seconds_per_step = statistics.median(seconds)
    return result


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to 10 %."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


def batches(content: Tensor, window: int, options: argparse.Namespace) -> Iterator[Tensor]:
    """Random windows of `content`, (batch, window): the same ones for the same seed."""
    generator = torch.Generator().manual_seed(options.seed)
    windows = content.unfold(0, window, 1)
    for _ in range(options.steps):
        chosen = torch.randint(len(windows), (options.batch_size,), generator=generator)
        yield windows[chosen].long().to(options.device)


def evenly_spaced(content: Tensor, window: int) -> Tensor:
    """`VALIDATION_WINDOWS` windows from all over `content`, the same for every seed."""
    windows = content.unfold(0, window, 1)
    chosen = torch.linspace(0, len(windows) - 1, VALIDATION_WINDOWS, dtype=torch.float64)
    return windows[chosen.long()].long()


@torch.no_grad()
def evaluate(model: GPT, windows: Tensor, batch_size: int) -> float:
    """Mean loss over `windows`."""
    total = sum(loss(model, part).item() * len(part) for part in windows.split(batch_size))
    return total / len(windows)


def machine(device: str) -> dict[str, Any]:
    """The hardware and the versions that the numbers belong to."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mcftensor": mcf.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def number(kind: type, valid: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """An argparse type: a `kind` of number for which `valid` holds."""

    def parse(argument: str) -> Any:
        with contextlib.suppress(ValueError):
            if valid(value := kind(argument)):
                return value
        raise argparse.ArgumentTypeError(f"must be {wanted}, not {argument!r}")

    return parse


COUNT = number(int, lambda n: n >= 1, "a whole number from 1 on")
SEED = number(int, lambda n: 0 <= n < 2**63, "a whole number from 0 on")
RATE = number(float, lambda x: 0 < x < math.inf, "a number above 0")
BETA = number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, checked and complete."""
    description, _, strategies = (__doc__ or "").partition("\n\n")
    parser = Parser(
        prog="pretrain.py",
        description=description,
        epilog=strategies,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=COUNT, default=500, help="training steps (default: 500)")
    add(
        "--strategies",
        nargs="+",
        default=STRATEGIES,
        metavar="NAME",
        help="which to run, separated by commas or spaces (default: all five)",
    )
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default: adamw)")
    add("--path", choices=PATHS, default="fused", help="the optimizer's code path (default: fused)")
    add("--lr", type=RATE, help="peak learning rate (default: 3e-4 for adamw, 0.05 for sgd)")
    add("--beta2", type=BETA, default=0.999, help="of adamw (default: 0.999)")
    add("--batch-size", type=COUNT, help="windows a step (default: 4, on a GPU 32)")
    add("--device", choices=SHAPES, default="cpu", help="a GPU gets a larger model (default: cpu)")
    add("--seed", type=SEED, default=0, help="of initial weights and batches (default: 0)")
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="text to train on instead of Python's standard library: a folder, a tenth of whose "
        "files are held out for validation, or a single file, whose last tenth is",
    )
    add(
        "--out",
        type=Path,
        default=Path("out/pretrain"),
        metavar="DIR",
        help="folder for results.json and loss.png (default: out/pretrain)",
    )
    options = parser.parse_args(arguments)

    named = [name for part in options.strategies for name in part.split(",") if name]
    options.strategies = list(dict.fromkeys(named))
    for name in options.strategies or [""]:
        if name not in STRATEGIES:
            parser.error(f"unknown strategy {name!r}: choose from {', '.join(STRATEGIES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    options.lr = options.lr or LEARNING_RATES[options.optimizer]
    options.batch_size = options.batch_size or BATCH_SIZES[options.device]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    try:
        training, validation = text.load(options.data, SHAPES[options.device].context + 1)
        report.make_folder(options.out)
        compare(training, validation, options)
    except (text.TextError, report.FolderError) as error:
        print(f"pretrain.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
