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
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from pretraining import report, text
from pretraining.command import (
    BETA,
    COUNT,
    RATE,
    Parser,
    add_common,
    check_device,
    exit_status,
    make_folder,
    selected,
)
from pretraining.strategies import LEARNING_RATES, OPTIMIZERS, PATHS, STRATEGIES
from pretraining.training import BATCH_SIZES, SHAPES, Run, count_parameters, machine, train


def compare(options: argparse.Namespace) -> None:
    """Train every strategy, then show and save what came of it."""
    training, validation = text.load(options.data, SHAPES[options.device].context + 1)
    make_folder(options.out)
    console = Console()
    parameters = count_parameters(options.device)
    optimizer = OPTIMIZERS[options.optimizer].__name__
    title = f"GPT of {parameters:,} parameters, stock {optimizer}, {options.steps} steps"
    console.print(
        f"{title}\n{len(training):,} bytes of text to train on, {len(validation):,} to validate"
    )
    results = {}
    for strategy in options.strategies:
        run = Run(
            strategy=strategy,
            steps=options.steps,
            lr=options.lr,
            beta2=options.beta2,
            batch_size=options.batch_size,
            device=options.device,
            seed=options.seed,
            optimizer=options.optimizer,
            path=options.path,
        )
        results[strategy] = train(run, training, validation)

    console.print(report.table(results, title))
    report.write_json(
        options.out / "results.json",
        results,
        settings={
            **vars(options),
            "training_bytes": len(training),
            "validation_bytes": len(validation),
            "model": asdict(SHAPES[options.device]),
            "parameters": parameters,
        },
        machine=machine(options.device),
    )
    report.draw(options.out / "loss.png", results, title)
    console.print(f"Wrote results.json and loss.png to {options.out}", soft_wrap=True)


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
    add_common(parser, "out/pretrain", "results.json and loss.png")
    options = parser.parse_args(arguments)

    options.strategies = selected(parser, "strategy", options.strategies, STRATEGIES)
    check_device(parser, options.device)
    options.lr = options.lr or LEARNING_RATES[options.optimizer]
    options.batch_size = options.batch_size or BATCH_SIZES[options.device]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    return exit_status("pretrain.py", lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
