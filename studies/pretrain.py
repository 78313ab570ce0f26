"""Pretrain a small GPT in several precision strategies and compare them.

Every strategy starts from the same weights, sees the same batches and runs a stock
`torch.optim` optimizer. They differ only in how parameters and optimizer states are kept:

  master   bf16 parameters; the optimizer has fp32 master weights and fp32 states
  bf16     bf16 parameters and states
  light    parameters are expansions; states are plain bf16
  plus     parameters and second moments are expansions
  full     parameters and all states are expansions
  exact    parameters and states are bfloat16 with an int16 tail: float32, to the bit
  tail8    matrices have an int8 tail; vectors and states as in exact
  round    parameters are bfloat16 alone, in balanced rounding; states as in exact
  compact  matrices as in tail8, their moments in codes of one byte; vectors as in exact
  released the same, and each parameter steps in backward, which frees its gradient; a first pass
           measures the norm to clip by. Not under DistributedDataParallel
  half16   parameters are float16 with an int16 tail, and the model computes in float16; gradients
           are bf16, scaled by GradScaler; states as in exact. In one process
  half8    matrices have an int8 tail; all else as in half16

If named, compact4 runs too: as compact, with moments in codes of half a byte.

With --strategies peers, AdamW of other libraries steps bf16 parameters, in one process: kahan
(optimi), flash24 and flash32 (pytorch_optimizer), heavyball8, torchao, torchao8, torchaofp8 and
torchao4, bnb32 and bnb8 (bitsandbytes).

On several processes, which share every batch, each strategy runs under DistributedDataParallel or
divided by fully_shard; with --checkpoint, what was stopped goes on, to the bit:

  torchrun --nproc-per-node 2 studies/pretrain.py --parallel fsdp --checkpoint out/checkpoint
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from mcftensor.kernels.fast_products import slow_dtypes
from pretraining import processes, report, text
from pretraining.command import (
    BETA,
    COUNT,
    RATE,
    Parser,
    add_common,
    check_device,
    check_processes,
    exit_status,
    make_folder,
    selected,
)
from pretraining.resuming import Checkpoint
from pretraining.run import Result, Run
from pretraining.side_by_side import side_by_side
from pretraining.strategies import (
    LEARNING_RATES,
    NOT_UNDER,
    OPTIMIZERS,
    OTHERS,
    PATHS,
    PEERS,
    STRATEGIES,
)
from pretraining.training import (
    BATCH_SIZES,
    SHAPES,
    count_parameters,
    machine,
    progress_bar,
    train,
)

WITHOUT_PRODUCTS = (
    "This processor has no bf16 products: products of bf16 operands are computed in float32 and "
    "rounded to bf16"
)


def compare(options: argparse.Namespace) -> None:
    """Train every strategy, then show and save what came of it."""
    training, validation = text.load(options.data, SHAPES[options.device].context + 1)
    make_folder(options.out)
    console = Console(quiet=not processes.is_first())
    parameters = count_parameters(options.device)
    optimizer = OPTIMIZERS[options.optimizer].__name__
    title = f"GPT of {parameters:,} parameters, stock {optimizer}, {options.steps} steps"
    if processes.count() > 1:
        title += f", {processes.count()} processes ({options.parallel})"
    console.print(
        f"{title}\n{len(training):,} bytes of text to train on, {len(validation):,} to validate"
    )
    if options.device == "cpu" and torch.bfloat16 in slow_dtypes():
        console.print(WITHOUT_PRODUCTS, soft_wrap=True)
    runs = [
        Run(
            strategy=strategy,
            steps=options.steps,
            lr=options.lr,
            beta2=options.beta2,
            batch_size=options.batch_size,
            device=options.device,
            seed=options.seed,
            optimizer=options.optimizer,
            path=options.path,
            parallel=options.parallel,
        )
        for strategy in options.strategies
    ]
    checkpoints, done = {}, 0
    if options.checkpoint:
        make_folder(options.checkpoint)
        for run in runs:
            checkpoint = Checkpoint(
                options.checkpoint, run, (training, validation), options.save_every
            )
            if saved := checkpoint.load():
                console.print(f"{run.strategy}: {saved['step']} of {run.steps} steps are done")
                done += saved["step"]
            checkpoints[run] = checkpoint
    started, results = time.perf_counter(), dict[str, Result]()
    bar = progress_bar(options.steps * len(runs), done)
    tasks = {
        run.strategy: functools.partial(
            train,
            run,
            training,
            validation,
            checkpoint=checkpoints.get(run),
            witness=options.witness,
        )
        for run in runs
    }
    jobs = min(options.jobs, len(runs))
    if jobs > 1:
        bar.set_description(f"{jobs} at once", refresh=False)
        threads = max(1, torch.get_num_threads() // jobs)
        found = side_by_side([*tasks.values()], jobs, bar, threads=threads)
        results = dict(zip(tasks, found, strict=True))
    else:
        for i, (strategy, task) in enumerate(tasks.items(), start=1):
            bar.set_description(f"{i}/{len(runs)} {strategy}", refresh=False)
            results[strategy] = task(bar)
    bar.close()
    if not processes.is_first():
        return

    for table in report.tables(results, title):
        console.print(table)
    report.write_json(
        options.out / "results.json",
        results,
        settings={
            **vars(options),
            "training_bytes": len(training),
            "validation_bytes": len(validation),
            "model": asdict(SHAPES[options.device]),
            "parameters": parameters,
            "processes": processes.count(),
        },
        machine=machine(options.device),
    )
    report.draw(options.out / "loss.png", results, title)
    console.print(report.in_one_line(results, time.perf_counter() - started), soft_wrap=True)
    console.print(f"Wrote results.json and loss.png to {options.out}", soft_wrap=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, checked and complete."""
    description, _, strategies = (__doc__ or "").partition("\n\n")
    parser = Parser("pretrain.py", description, strategies)
    add = parser.add_argument
    add(
        "--steps",
        type=COUNT,
        default=500,
        help="training steps of each strategy (default: 500; a long form is "
        'make train ARGS="--steps 5000", which takes ten times as long)',
    )
    add(
        "--strategies",
        nargs="+",
        default=STRATEGIES,
        metavar="NAME",
        help="which to run, separated by commas or spaces (default: all)",
    )
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default: adamw)")
    add("--path", choices=PATHS, default="fused", help="the optimizer's code path (default: fused)")
    add("--lr", type=RATE, help="peak learning rate (default: 3e-4 for adamw, 0.05 for sgd)")
    add("--beta2", type=BETA, default=0.999, help="of adamw (default: 0.999)")
    add("--batch-size", type=COUNT, help="windows a step (default: 4, on a GPU 32)")
    add(
        "--parallel",
        choices=processes.PARALLEL,
        default="ddp",
        help="on several processes: a copy of the model on each, or a part (default: ddp)",
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save every run in this folder, and go on with what is there; the number of processes "
        "and --parallel may change, other options may not",
    )
    add(
        "--jobs",
        type=COUNT,
        metavar="N",
        help="trainings at once, which share the threads; their times are longer than alone "
        "(default: on a CPU one for each thread)",
    )
    add("--save-every", type=COUNT, default=100, metavar="STEPS", help="(default: 100)")
    add(
        "--witness",
        action="store_true",
        help="take every step in float64, too, and compare states and weights with it",
    )
    add_common(parser, "out/pretrain", "results.json and loss.png")
    options = parser.parse_args(arguments)

    given = ",".join(options.strategies).replace("peers", ",".join(PEERS))
    options.strategies = selected(parser, "strategy", [given], (*STRATEGIES, *OTHERS, *PEERS))
    check_device(parser, options.device)
    options.lr = options.lr or LEARNING_RATES[options.optimizer]
    options.batch_size = options.batch_size or BATCH_SIZES[options.device]
    check_processes(parser, options)
    alone = options.device != "cpu" or processes.count() > 1
    options.jobs = 1 if alone else options.jobs or torch.get_num_threads()
    if processes.count() > 1:
        without = NOT_UNDER[options.parallel]
        options.strategies = [x for x in options.strategies if x not in without]
    if options.witness and (options.checkpoint or processes.count() > 1):
        parser.error("--witness: it runs in one process, and without --checkpoint")
    return options


def how_to_go_on(options: argparse.Namespace) -> str:
    """What is told of a run that was interrupted."""
    if options.checkpoint:
        return f"interrupted; the same command goes on from what is in {options.checkpoint}"
    return (
        "interrupted, and nothing is kept; with --checkpoint DIR the same command would go on "
        f'where it was (make train ARGS="--checkpoint {options.out / "checkpoint"}")'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    with processes.joined(options.device):
        return exit_status("pretrain.py", lambda: compare(options), how_to_go_on(options))


if __name__ == "__main__":
    sys.exit(main())
