"""Measure again what the Collage paper (arXiv:2405.03637) found about lost updates.

The model and the text are those of `pretrain.py`, and the optimizer is stock AdamW. EDQ,
effective descent quality, compares how weights move with how the optimizer means to move them.

  strategies  EDQ of every strategy over a training
  beta2       light and plus at several beta2
  layers      which layers lose most, in plain bf16 and in the leading terms of expansions
  rates       bf16, light and plus at several peak learning rates
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from pretraining import report, study, text
from pretraining.command import (
    COUNT,
    Parser,
    add_common,
    check_device,
    exit_status,
    make_folder,
    selected,
)
from pretraining.run import Run
from pretraining.strategies import COLLAGE
from pretraining.study import Measured
from pretraining.training import BATCH_SIZES, SHAPES, count_parameters, machine, progress_bar, train

EVALUATIONS = 2  # The study asks where losses end, and not how they get there.
LR, BETA2 = 3e-4, 0.999
BETA2S = (0.95, 0.98, 0.99, 0.999)
LRS = (1e-3, LR, 1e-4, 1e-5, 1e-6)

# Strategy, peak learning rate and beta2 of the runs that answer each question.
PARTS: dict[str, list[tuple[str, float, float]]] = {
    "strategies": [(strategy, LR, BETA2) for strategy in COLLAGE],
    "beta2": [(strategy, LR, beta2) for beta2 in BETA2S for strategy in ("light", "plus")],
    "layers": [(strategy, LR, BETA2) for strategy in ("bf16", "light", "plus")],
    "rates": [(strategy, lr, BETA2) for lr in LRS for strategy in ("bf16", "light", "plus")],
}
TOP = 10


def investigate(options: argparse.Namespace) -> None:
    """Train what the questions need, then show and save the answers."""
    training, validation = text.load(options.data, SHAPES[options.device].context + 1)
    make_folder(options.out)
    console = Console()
    parameters = count_parameters(options.device)
    title = f"GPT of {parameters:,} parameters, stock AdamW, {options.steps} steps"
    # A dict: what several questions need is trained once.
    configurations = list(dict.fromkeys(c for part in options.only for c in PARTS[part]))
    console.print(f"{title}, {len(configurations)} times")
    measured = {}
    bar = progress_bar(options.steps * len(configurations))
    for i, (strategy, lr, beta2) in enumerate(configurations, start=1):
        run = Run(
            strategy=strategy,
            steps=options.steps,
            lr=lr,
            beta2=beta2,
            batch_size=BATCH_SIZES[options.device],
            device=options.device,
            seed=options.seed,
            evaluations=EVALUATIONS,
        )
        label = f"{i}/{len(configurations)} {strategy}, lr {lr:g}, beta2 {beta2:g}"
        one = Measured(run)
        bar.set_description(label, refresh=False)
        one.result = train(run, training, validation, bar, watch=one.watch)
        measured[strategy, lr, beta2] = one
    bar.close()

    findings: dict[str, Any] = {}
    files = ["edq-study.json"]
    for part in options.only:
        runs = [measured[configuration] for configuration in PARTS[part]]
        findings[part] = answer(part, runs, title, console, options.out / f"edq-{part}.png")
        files.append(f"edq-{part}.png")
    report.write_record(
        options.out / "edq-study.json",
        {
            "settings": {
                **vars(options),
                "training_bytes": len(training),
                "validation_bytes": len(validation),
                "model": asdict(SHAPES[options.device]),
                "parameters": parameters,
            },
            "machine": machine(options.device),
            "findings": findings,
            "runs": [one.record() for one in measured.values()],
        },
    )
    console.print(f"Wrote {', '.join(files)} to {options.out}", soft_wrap=True)


def answer(part: str, runs: list[Measured], title: str, console: Console, path: Path) -> Any:
    """Show and draw what runs say about one question, and return it."""
    if part == "layers":
        kinds, parameters = study.by_kind(runs), study.by_parameter(runs)
        console.print(study.kinds_table(kinds), study.top_table(parameters[:TOP]))
        study.draw_layers(path, runs, kinds, parameters, title)
        return {"kinds": kinds, "parameters": parameters}
    rows = [one.summary() for one in runs]
    if part == "strategies":
        console.print(study.table(rows, f"EDQ of every strategy, lr {LR:g}, beta2 {BETA2:g}"))
        study.draw_strategies(path, runs, title)
    elif part == "beta2":
        console.print(study.table(rows, f"EDQ and beta2, lr {LR:g}", "beta2"))
        study.draw_beta2(path, rows, title)
    else:
        console.print(study.table(rows, f"EDQ and the peak learning rate, beta2 {BETA2:g}", "lr"))
        study.draw_rates(path, rows, title)
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, checked and complete."""
    description, _, parts = (__doc__ or "").rpartition("\n\n")
    parser = Parser("edq_study.py", description, parts)
    add = parser.add_argument
    add("--steps", type=COUNT, default=100, help="training steps of each run (default: 100)")
    add(
        "--only",
        nargs="+",
        default=PARTS,
        metavar="PART",
        help="which questions to answer, separated by commas or spaces (default: all four)",
    )
    add_common(parser, "out/edq_study", "edq-study.json and the pictures")
    options = parser.parse_args(arguments)
    options.only = selected(parser, "part", options.only, list(PARTS))
    check_device(parser, options.device)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    return exit_status("edq_study.py", lambda: investigate(options))


if __name__ == "__main__":
    sys.exit(main())
