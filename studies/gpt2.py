"""Train GPT-2 in its smallest published size, 124 million parameters, in a few strategies.

All strategies start from the same weights and see the same batches. The text is Python's standard
library and PyTorch's docstrings, in tokens of its own. A step takes seconds on a CPU: the program
stops after some minutes, and the same command goes on, to the bit. A checkpoint takes 2 GB.

With --shape a smaller model is trained, for more seeds: their spread says how much of a difference
between two strategies is chance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

from pretraining import corpus
from pretraining.command import (
    BETA,
    COUNT,
    RATE,
    SEED,
    Parser,
    exit_status,
    make_folder,
    selected,
)
from pretraining.gpt2 import SMALLEST, VOCABULARY, TokenRun, TokenTraining, count_parameters
from pretraining.model import Shape
from pretraining.pieces import Piece, add_options, work
from pretraining.strategies import STRATEGIES

CHOSEN = ("master", "bf16", "plus", "exact", "compact")


def pretrain(options: argparse.Namespace) -> None:
    """Go on with the runs."""
    make_folder(options.checkpoints)
    shape = Shape(*options.shape)
    content = corpus.load(options.checkpoints, options.data, options.vocabulary, options.length)
    pieces = []
    for seed, strategy in product(options.seeds, options.strategies):
        run = TokenRun(
            strategy=strategy,
            steps=options.steps,
            lr=options.lr,
            beta2=options.beta2,
            batch_size=options.batch_size,
            device="cpu",
            seed=seed,
            evaluations=6,
            shape=shape,
            vocabulary=content.vocabulary,
            length=options.length,
        )
        parameters = count_parameters(shape, content.vocabulary)
        described = {
            "parameters": parameters,
            "tokens": options.steps * options.batch_size * options.length,
        }
        make = partial(TokenTraining, run, content.training, content.validation)
        name = f"{parameters / 1e6:.0f}M-{strategy}-{seed}"
        pieces.append(Piece(name, run, make, described))
    work(
        pieces,
        (content.training, content.validation),
        options,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, checked and complete."""
    parser = Parser("gpt2.py", __doc__)
    add = parser.add_argument
    add("--steps", type=COUNT, default=300, help="(default: 300)")
    add("--lr", type=RATE, default=6e-4, help="peak learning rate (default: 6e-4)")
    add("--beta2", type=BETA, default=0.95, help="(default: 0.95)")
    add("--batch-size", type=COUNT, default=4, help="windows a step (default: 4)")
    add("--length", type=COUNT, default=256, help="tokens of a window (default: 256)")
    add("--strategies", nargs="+", default=CHOSEN, metavar="NAME", help=f"(default: {CHOSEN})")
    add("--seeds", nargs="+", type=SEED, default=[0], help="(default: 0)")
    add("--vocabulary", type=COUNT, default=VOCABULARY, help=f"tokens (default: {VOCABULARY})")
    add(
        "--shape",
        nargs=4,
        type=COUNT,
        default=[SMALLEST.context, SMALLEST.layers, SMALLEST.width, SMALLEST.heads],
        metavar=("CONTEXT", "LAYERS", "WIDTH", "HEADS"),
        help="(default: that of GPT-2)",
    )
    add_options(parser, "gpt2", 10000)
    options = parser.parse_args(arguments)
    options.strategies = selected(parser, "strategy", options.strategies, STRATEGIES)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    return exit_status("gpt2.py", lambda: pretrain(options))


if __name__ == "__main__":
    sys.exit(main())
