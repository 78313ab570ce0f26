"""The command line: `python -m mcftensor audit`, `convert`, `doctor` and others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mcftensor.errors import CheckpointError
from mcftensor.options import parse

_COMMANDS = {
    **dict.fromkeys(("audit", "doctor", "memory", "selfcheck"), "tools.commands"),
    "export": "export.exporting",
    "convert": "bridge.checkpoint_conversion",
}
"""The module of each command, whose function `run_COMMAND` returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    try:
        commands = importlib.import_module(f"mcftensor.{_COMMANDS[options.command]}")
        return int(getattr(commands, f"run_{options.command}")(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (CheckpointError, ImportError, OSError, TypeError, ValueError) as error:
        reason = str(error)
        for prefix in ("audit: ", "convert_checkpoint: ", "collage: "):
            reason = reason.removeprefix(prefix)
        if options.command == "audit":
            reason = reason.removesuffix(". verify=False reads it all the same")
        for argument, option in _BY_OPTION.items():
            reason = reason.replace(argument, option)
        print(f"python -m mcftensor {options.command}: {reason}", file=sys.stderr)
        return 2


_BY_OPTION = {
    "lossy=True (--lossy)": "--lossy",
    "verify=False": "--no-verify",
    "optimizer=False": "--weights-only",
    "give parameters,": "give --parameters, a file with",
    "give step,": "give --step,",
}
"""Advice in error messages of functions, and the same advice by options of the command."""


if __name__ == "__main__":
    sys.exit(main())
