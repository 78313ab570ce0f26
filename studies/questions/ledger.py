"""The file of what has been measured: what is there is not done again, whoever asks for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pretraining.resuming import ResumeError

Key = Mapping[str, Any]


class Ledger:
    """Keys and what they came to, a line each.

    Args:
        path: of the file, which need not be there yet.
        given: what all of it depends on: the text and the model.

    Raises:
        ResumeError: the file is there, and of something else.
    """

    def __init__(self, path: Path, given: Key) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        lines = path.read_text().split("\n") if path.exists() else [""]
        *whole, cut = lines
        if cut:  # a line that was being written as the program was stopped
            path.write_text("".join(line + "\n" for line in whole))
        for line in whole:
            entry = json.loads(line)
            self.values[_name(entry["key"])] = entry["value"]
        if self.measure({"given": True}, lambda: given) != json.loads(json.dumps(given)):
            raise ResumeError(f"{path} is of another text or model: give another folder to --out")

    def measure(self, key: Key, make: Callable[[], Any]) -> Any:
        """What is written under a key; if nothing is, it is made, and written at once."""
        name = _name(key)
        if name not in self.values:
            line = json.dumps({"key": key, "value": make()})
            with self.path.open("a") as file:
                file.write(line + "\n")
            self.values[name] = json.loads(line)["value"]
        return self.values[name]

    def measure_all(self, keys: Iterable[Key], make: Callable[[Key], Any], label: str) -> list[Any]:
        """The same of many, with a bar for those that are missing."""
        keys = list(keys)
        missing = [key for key in keys if _name(key) not in self.values]
        # A log file gets a line twice a minute.
        interval = 0.1 if sys.stderr.isatty() else 30
        for key in tqdm(missing, label, disable=not missing, mininterval=interval):
            self.measure(key, lambda: make(key))  # noqa: B023 (it is called at once)
        return [self.values[_name(key)] for key in keys]


def _name(key: Key) -> str:
    return json.dumps(key, sort_keys=True)
