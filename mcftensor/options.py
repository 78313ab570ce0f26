"""Options and output of the command line, without PyTorch, which takes seconds to import."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def share(argument: str) -> float:
    """Parse a number above 0 and at most 1, as an argparse type."""
    try:
        value = float(argument)
    except ValueError:
        value = 0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and at most 1, not {argument!r}"
        )
    return value


def whole_number(argument: str) -> int:
    """Parse a whole number above 0, as an argparse type."""
    if not argument.isdecimal() or not int(argument):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {argument!r}")
    return int(argument)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line, checked."""
    from mcftensor import __version__  # noqa: PLC0415  # which is being imported

    parser = Parser(
        prog="python -m mcftensor",
        description="Checks and conversions of weights, what fits into memory, checks of machines.",
    )
    parser.add_argument("--version", action="version", version=f"mcftensor {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_audit, _convert, _doctor, _export, _memory, _selfcheck):
        add(commands)
    return parser.parse_args(arguments)


def _audit(commands: argparse._SubParsersAction[Parser]) -> None:
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


def _convert(commands: argparse._SubParsersAction[Parser]) -> None:
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
        help="of the optimizer's states (default: as the weights); 'compact' or 'compact4': as "
        "the mode does",
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


def _doctor(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "doctor",
        help="run a training script, and say what its updates lose and what helps",
        usage="%(prog)s [-h] [--steps N] [-m] PROGRAM ...",
        description="Run a training script for some steps, unchanged, with a meter on each of its "
        "optimizers. Say what is stored in 16 bits, which updates are lost, by kind of layer, and "
        "what helps. `audit` needs no run: it compares two checkpoints.",
        epilog="Exit status: 0 if nothing is lost, 1 if something is, 2 for a mistake, a script "
        "that fails, or one without a step that can be measured.",
    )
    add = command.add_argument
    add(
        "--steps",
        type=whole_number,
        default=100,
        metavar="N",
        help="stop after N steps (default: 100)",
    )
    add("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as python -m")
    add("program", metavar="PROGRAM", help="the script")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _export(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "export",
        help="print an optimizer as one file that needs PyTorch alone",
        description="Print an optimizer over bfloat16 parameters as one readable file, which needs "
        "torch 2.4 or newer and nothing of this library, and has the bits of its steps with torch "
        "2.9 to 2.15.",
        epilog="Exit status: 0 if it was printed, 2 for an optimizer or a format without a file.",
    )
    add = command.add_argument
    add("optimizer", metavar="OPTIMIZER", help="adamw, sgd (with momentum), muon or adafactor")
    add(
        "--format",
        default="bf16i16",
        metavar="NAME",
        help="of the weights: bf16i16 (exact, the default), bf16x2 (states as in the mode plus), "
        "bf16i8 (states as in the mode compact)",
    )


def _memory(commands: argparse._SubParsersAction[Parser]) -> None:
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
        "--host",
        action="store_true",
        help="with weights, gradients and states on the host, as by mcf.host.weights: --memory is "
        "the device's, which has the leading terms; without it, this machine is the host",
    )
    add(
        "--format",
        metavar="NAME",
        help="of the weights, with --mode (default: bf16i8 in compact modes, else by shape)",
    )


def _selfcheck(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "selfcheck",
        help="check arithmetic, kernels and steps on a device",
        description="Run the arithmetic of the library on a device, eager and compiled, against "
        "exact rationals; kernels, conversions and optimizer steps against digests of what a CPU "
        "gives; and on a GPU large tensors, streams and graphs.",
        epilog="Exit status: 0 if all is well, 1 if something is broken, which is named, 2 for a "
        "mistake.",
    )
    add = command.add_argument
    add("--device", default="cpu", metavar="NAME", help="(default: cpu)")
    add("--eager", action="store_true", help="leave compiled code out, in seconds")


def say(output: str) -> None:
    """Print to a reader who may have seen enough."""
    try:
        print(output, flush=True)
    except BrokenPipeError:
        # Python flushes once more on leaving, to no one.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_the_command() -> bool:
    """Whether the process was started as `python -m mcftensor`, whose module Python is looking for
    when it imports the package, or as the script that is installed."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":
        return sys.orig_argv[-len(sys.argv)] == "mcftensor"
    scripts = Path(sysconfig.get_path("scripts"))
    return Path(program).stem == "mcftensor" and Path(program).parent.resolve() == scripts.resolve()


if _is_the_command():
    parse(sys.argv[1:])
