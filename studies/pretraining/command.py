"""What the commands have in common: checked options, and mistakes told in one line."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import mcftensor as mcf
from pretraining import processes, text
from pretraining.resuming import ResumeError
from pretraining.training import SHAPES


class FolderError(Exception):
    """The results cannot be written; the message is one line for the user."""


def complain(program: str, message: object) -> None:
    """Tell of a mistake, once on each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: {message}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, and shows its texts with their own lines."""

    def __init__(self, prog: str, description: str | None, epilog: str | None = None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, epilog=epilog, formatter_class=layout)

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        complain(self.prog, message)
        self.exit(2)


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


def add_common(parser: Parser, out: str, files: str) -> None:
    """Add the options that say where to train, on what, and where `files` go."""
    add = parser.add_argument
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
        default=Path(out),
        metavar="DIR",
        help=f"folder for {files} (default: {out})",
    )


def check_processes(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse what several processes cannot do."""
    count = processes.count()
    if count > 1 and options.batch_size % count:
        parser.error(
            f"--batch-size {options.batch_size}: {count} processes need a multiple of {count}"
        )
    divided = count > 1 and options.parallel == "fsdp"
    if divided and (options.optimizer, options.path) == ("sgd", "fused"):
        parser.error(
            "--parallel fsdp: the fused SGD of PyTorch takes no divided parameters; "
            "choose --path foreach or forloop, or --parallel ddp"
        )


def check_device(parser: Parser, device: str) -> None:
    """Refuse a GPU that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")


def selected(
    parser: Parser, kind: str, arguments: Iterable[str], known: Sequence[str]
) -> list[str]:
    """The names in `arguments`, separated by commas or spaces, each once and all of them known."""
    named = [name for part in arguments for name in part.split(",") if name]
    for name in named or [""]:
        if name not in known:
            parser.error(f"unknown {kind} {name!r}: choose from {', '.join(known)}")
    return list(dict.fromkeys(named))


def make_folder(path: Path) -> None:
    """Create the folder for the results, before the time goes into what it cannot hold."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"cannot write to {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise FolderError(f"cannot write to {path}")


def exit_status(program: str, job: Callable[[], None], interrupted: str = "interrupted") -> int:
    """Do the job, and return the exit status: 2, after one line, for a mistake of the user."""
    try:
        with mcf.fast_products():
            job()
    except (text.TextError, FolderError, ResumeError) as error:
        complain(program, error)
        return 2
    except KeyboardInterrupt:
        complain(program, interrupted)
        return 130
    return 0
