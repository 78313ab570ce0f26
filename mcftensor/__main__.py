"""The command line: `python -m mcftensor audit`, `convert`, `memory` and `selfcheck`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from mcftensor import __version__
from mcftensor.checkpoint.bridge.conversion import Conversion, Progress, convert_checkpoint
from mcftensor.checkpoint.errors import CheckpointError
from mcftensor.checkpoint.shards import size_in_bytes
from mcftensor.formats import named
from mcftensor.meters import fitting
from mcftensor.meters.auditing import Audit, audit
from mcftensor.meters.estimating import MakeOptimizer, estimate
from mcftensor.selfcheck import SelfCheckError, selfcheck
from mcftensor.tensor import showing


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def share(argument: str) -> float:
    """An argparse type: a number above 0 and at most 1."""
    try:
        value = float(argument)
    except ValueError:
        value = 0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and at most 1, not {argument!r}"
        )
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, checked."""
    parser = Parser(
        prog="python -m mcftensor",
        description="Checks and conversions of weights, what fits into memory, checks of machines.",
    )
    parser.add_argument("--version", action="version", version=f"mcftensor {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "audit",
        help="find weights that silently froze between two checkpoints",
        description="Find weights that silently froze between two checkpoints of one training "
        "run, as bf16 weights do under small updates. A checkpoint is a file of torch.save, a "
        "safetensors file, the index of a sharded checkpoint, or a folder that holds one of these "
        "as Hugging Face names them.",
        epilog="Exit status: 0 if nothing looks frozen, 1 if something does, 2 for a mistake. "
        "Weights that are frozen on purpose, and constant buffers, look frozen too: --ignore "
        "them. Checkpoints only a few steps apart show far more unchanged elements than ones far "
        "apart.",
    )
    add = command.add_argument
    add("before", metavar="BEFORE", help="the earlier checkpoint")
    add("after", metavar="AFTER", help="the later one")
    add(
        "--threshold",
        type=share,
        default=0.5,
        metavar="SHARE",
        help="share of unchanged elements from which a tensor is mostly frozen (default: 0.5)",
    )
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out tensors whose names match, such as '*.inv_freq'; may be repeated",
    )
    add("--all", action="store_true", help="show tensors that move, too")
    add("--json", action="store_true", help="print all numbers of all tensors as JSON instead")
    command = commands.add_parser(
        "convert",
        help="convert a checkpoint, of this library or another one, into a format",
        description="Convert a checkpoint with the states of its optimizer: of torch.save, "
        "safetensors, transformers, DeepSpeed, torchtitan, Megatron-Core (torch_dist), Transformer "
        "Engine, flashoptim, optimi, or of this library. The new one is a folder, with "
        "model.safetensors and optimizer.safetensors.",
        epilog="Exit status: 0 if it was converted, 2 for a mistake, a damaged file, or bits that "
        "would be lost; then there is no folder.",
    )
    add = command.add_argument
    add("source", metavar="IN", help="a file, the index of several, or a folder")
    add("destination", metavar="OUT", help="the folder to make")
    add("--format", default="bf16i16", metavar="NAME", help="of the weights (default: bf16i16)")
    add(
        "--states",
        metavar="NAME",
        help="of the optimizer's states (default: as the weights); 'compact': as the mode does",
    )
    add("--weights-only", action="store_true", help="leave the states out")
    add("--lossy", action="store_true", help="round what the format does not hold")
    add("--max-shard-size", metavar="SIZE", help="divide the weights into files, of '5GB' say")
    add(
        "--parameters",
        type=Path,
        metavar="FILE",
        help="names of the parameters, one a line, in the order in which the optimizer got them",
    )
    add("--step", type=int, metavar="N", help="steps taken, where the source does not say it")
    add("--no-verify", action="store_true", help="read files whose digests are not right")
    command = commands.add_parser(
        "memory",
        help="say what a model takes in training, and what of that fits",
        description="Say what parameters, gradients and states of a model take in training, by "
        "strategy, and which of them fit into a memory. Nothing is allocated. Activations are not "
        "counted, and come on top.",
        epilog="Exit status: 0 if something fits, 1 if nothing does, 2 for a mistake.",
    )
    add = command.add_argument
    add(
        "sources",
        nargs="+",
        metavar="MODEL",
        help="a checkpoint; a config.json of transformers or the name of a model on the hub; "
        "shapes of parameters such as 4096x4096 or 32:4096x11008; or their number, such as 7B",
    )
    add("--memory", metavar="SIZE", help="'80GB', say (default: the GPU's, or this machine's)")
    add(
        "--optimizer",
        default="AdamW",
        metavar="NAME",
        help="of torch.optim (default: AdamW); SGD is with momentum",
    )
    add("--mode", metavar="NAME", help="show the formats of one Collage mode, layer by layer")
    add(
        "--format",
        metavar="NAME",
        help="of the weights, with --mode (default: bf16i8 in compact, by shape in the others)",
    )
    command = commands.add_parser(
        "selfcheck",
        help="check the arithmetic on a device against exact rationals",
        description="Run the error-free transformations and the arithmetic of expansions on a "
        "device, eager and compiled, and hold them against exact rationals.",
        epilog="Exit status: 0 if all is well, 1 if something is broken, which is named, 2 for a "
        "mistake.",
    )
    command.add_argument("--device", default="cpu", metavar="NAME", help="(default: cpu)")
    command.add_argument("--eager", action="store_true", help="leave compiled code out, in seconds")
    return parser.parse_args(arguments)


def screen(found: Audit, *, moving: bool) -> str:
    """The table, if it has a row, and the summary in one line."""
    if not (moving or found.suspicious):
        return found.summary() + "\n"
    # Without a terminal there is no width to keep to, and names stay in one piece.
    width = None if sys.stdout.isatty() else 100_000
    console = importlib.import_module("rich.console").Console(width=width)
    with console.capture() as capture:
        console.print(found.table(moving=moving))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    equal = "; the two checkpoints are equal" if found.unchanged == 1 else ""
    return "\n".join([*(line for line in lines if line), "", found.summary() + equal, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    run = {
        "audit": run_audit,
        "convert": run_convert,
        "memory": run_memory,
        "selfcheck": run_selfcheck,
    }
    try:
        return run[options.command](options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run_selfcheck(options: argparse.Namespace) -> int:
    """Say whether the arithmetic of a device can be trusted."""
    try:
        count = selfcheck(options.device, compiled=not options.eager)
    except SelfCheckError as error:
        print(f"python -m mcftensor {error}", file=sys.stderr)
        return 1
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        print(f"python -m mcftensor selfcheck: {options.device}: {reason}", file=sys.stderr)
        return 2
    print(f"{count} checks passed on {options.device}")
    return 0


def run_audit(options: argparse.Namespace) -> int:
    """Show what froze between two checkpoints."""
    try:
        found = audit(
            options.before, options.after, threshold=options.threshold, ignore=options.ignore
        )
        output = found.to_json() + "\n" if options.json else screen(found, moving=options.all)
    except (CheckpointError, ImportError) as error:
        reason = (
            str(error).removeprefix("audit: ").removesuffix(". verify=False reads it all the same")
        )
        print(f"python -m mcftensor audit: {reason}", file=sys.stderr)
        return 2
    say(output)
    return 1 if found.suspicious else 0


def say(output: str) -> None:
    """Print to a reader who may have seen enough."""
    try:
        sys.stdout.write(output)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more on leaving, to no one.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_convert(options: argparse.Namespace) -> int:
    """Convert a checkpoint, and say what was done."""
    try:
        names = options.parameters and options.parameters.read_text(encoding="utf-8").split()
        with bar() as progress:
            done = convert_checkpoint(
                options.source,
                options.destination,
                options.format,
                states=options.states,
                optimizer=not options.weights_only,
                parameters=names,
                step=options.step,
                lossy=options.lossy,
                max_shard_size=options.max_shard_size,
                verify=not options.no_verify,
                progress=progress,
            )
    except (CheckpointError, ImportError, OSError, TypeError, ValueError) as error:
        reason = by_option(str(error).removeprefix("convert_checkpoint: "))
        print(f"python -m mcftensor convert: {reason}", file=sys.stderr)
        return 2
    say(said(done, options.destination) + "\n")
    return 0


def by_option(reason: str) -> str:
    """What a function says of its arguments, said of the options of a command."""
    options = {
        "lossy=True (--lossy)": "--lossy",
        "verify=False": "--no-verify",
        "optimizer=False": "--weights-only",
        "give parameters,": "give --parameters, a file with",
        "give step,": "give --step,",
    }
    for argument, option in options.items():
        reason = reason.replace(argument, option)
    return reason


def run_memory(options: argparse.Namespace) -> int:
    """Say what a model takes in training, and whether that fits."""
    try:
        model = fitting.model_of(options.sources)
        optimizer = optimizer_named(options.optimizer)
        size, owner = fitting.room()
        if options.memory:
            size, owner = size_in_bytes(options.memory, "--memory"), "given"
        if options.mode:
            own = fitting.format_for(options.mode)
            form = named(options.format) if options.format else own
            found = estimate(model, options.mode, format=form, optimizer=optimizer)
            shown, least = str(found), found.total
        else:
            ways = list(fitting.strategies(model, optimizer))
            shown, least = fitting.fits(ways, size), min(x.total for x in ways)
    except (CheckpointError, ImportError, OSError, TypeError, ValueError) as error:
        reason = str(error).removeprefix("collage: ")
        print(f"python -m mcftensor memory: {reason}", file=sys.stderr)
        return 2
    count = sum(p.numel() for p in model.parameters())
    verdict = "fits into" if least <= size else "does not fit into"
    what = f"mode {options.mode}" if options.mode else "the smallest"
    say(
        f"{count:,} parameters, {options.optimizer}, without activations\n{shown}\n"
        f"{what} {verdict} the {showing.size(size)} {owner}\n"
    )
    return int(least > size)


def optimizer_named(name: str) -> MakeOptimizer:
    """A class of torch.optim, with the momentum that SGD has in training."""
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {name!r}; AdamW is one")
    return partial(found, lr=1e-3, momentum=0.9) if found is torch.optim.SGD else found


def said(done: Conversion, destination: str) -> str:
    """What was done, in one line."""
    text = f"{destination}: {done.weights} weights"
    if done.states:
        text += f" and {done.states} states"
    text += f" in {done.format}, from {done.layout}"
    if done.lost:
        text += f"; {sum(done.lost.values())} elements of {len(done.lost)} tensors lost bits"
    return text


@contextlib.contextmanager
def bar() -> Iterator[Progress | None]:
    """A bar that shows what has been read, where there is a terminal to show it on."""
    if not sys.stderr.isatty():
        yield None
        return
    rich = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(stderr=True)
    columns = rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn()
    with rich.Progress(*columns, "{task.description}", console=console, transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda name, done, total: shown.update(
            task, completed=done, total=total, description=name
        )


if __name__ == "__main__":
    sys.exit(main())
