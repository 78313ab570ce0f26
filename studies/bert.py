"""Masked language modelling in two phases, after the first experiment of the Collage paper.

A small BERT with random weights learns from Python's standard library and PyTorch's docstrings, in
tokens of its own: first in short windows, then in long ones. Rates rise and fall as in the scripts
of the paper (arXiv:2405.03637), over fewer steps. All strategies have the same weights and batches.
The runs take hours: the program stops after some minutes, and the same command goes on, to the bit.

  master, bf16, light, plus, full, exact, compact, released   as in pretrain.py
  kahan    bf16 parameters and states of optimi, with Kahan's sum
  fp16     float32 parameters, float16 by autocast, gradients scaled by GradScaler

If named, compact4 runs too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

from masked.training import BertRun, MaskedTraining, Phase, Size, described
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
from pretraining.pieces import Piece, add_options, work

# The most informative first.
STRATEGIES = (
    "master",
    "bf16",
    "plus",
    "exact",
    "compact",
    "kahan",
    "light",
    "full",
    "released",
    "fp16",
)
OTHERS = ("compact4",)  # run only if named


def phases(steps: int) -> tuple[Phase, Phase]:
    """Both phases. Rates, warm-ups and the share of steps are those of the paper's scripts."""
    return (
        Phase(steps, length=128, batch_size=8, rate=1.0, warm_up=2000 / 28125, held_out=256),
        Phase(
            max(2, round(steps * 1563 / 28125)),
            length=512,
            batch_size=4,
            rate=0.7,
            warm_up=781 / 1563,
            held_out=64,
        ),
    )


def pretrain(options: argparse.Namespace) -> None:
    """Go on with the runs."""
    make_folder(options.checkpoints)
    size, both = Size(*options.size), phases(options.steps)
    window = max(phase.length for phase in both)
    content = corpus.load(options.checkpoints, options.data, options.vocabulary, window)
    pieces = []
    for beta2, seed, strategy in product(options.beta2, options.seeds, options.strategies):
        run = BertRun(
            strategy=strategy,
            steps=sum(phase.steps for phase in both),
            lr=options.lr,
            beta2=beta2,
            batch_size=both[0].batch_size,
            device="cpu",
            seed=seed,
            evaluations=5,
            phases=both,
            size=size,
            vocabulary=content.vocabulary,
        )
        make = partial(MaskedTraining, run, content.training, content.validation)
        pieces.append(Piece(f"{strategy}-{beta2:g}-{seed}", run, make, described(run)))
    work(
        pieces,
        (content.training, content.validation),
        options,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, checked and complete."""
    description, _, strategies = (__doc__ or "").partition("\n\n")
    parser = Parser("bert.py", description, strategies)
    add = parser.add_argument
    add("--steps", type=COUNT, default=1500, help="of the first phase (default: 1500)")
    add("--lr", type=RATE, default=4e-4, help="peak learning rate (default: 4e-4)")
    add("--strategies", nargs="+", default=STRATEGIES, metavar="NAME", help="(default: all)")
    add("--beta2", nargs="+", type=BETA, default=[0.999, 0.98], help="(default: 0.999 0.98)")
    add("--seeds", nargs="+", type=SEED, default=[0, 1, 2], help="(default: 0 1 2)")
    add("--vocabulary", type=COUNT, default=4096, help="tokens (default: 4096)")
    add(
        "--size",
        nargs=4,
        type=COUNT,
        default=[4, 256, 4, 512],
        metavar=("LAYERS", "WIDTH", "HEADS", "CONTEXT"),
        help="(default: 4 256 4 512)",
    )
    add_options(parser, "bert", 250)
    options = parser.parse_args(arguments)
    options.strategies = selected(parser, "strategy", options.strategies, (*STRATEGIES, *OTHERS))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    return exit_status("bert.py", lambda: pretrain(options))


if __name__ == "__main__":
    sys.exit(main())
