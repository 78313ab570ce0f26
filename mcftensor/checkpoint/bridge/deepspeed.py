"""DeepSpeed's universal checkpoints: a folder for each parameter, a file for each of its tensors.

Layout: `global_step10_universal/zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt`, as
`ds_to_universal.py` writes them; the folder above them may be given, whose file `latest_universal`
says which is the last. A file holds `{"param": tensor}`, or, from ZeRO stage 3 without tensor
parallelism, the tensor itself, flat; its shape is then among `param_shapes` of a
`*_model_states.pt` beside. Parameters that are not trained, and buffers, are not there. Read:
DeepSpeed 0.19.6.

`ds_to_universal.py` makes these of ZeRO's own files, which `zero.py` reads where they are of data
parallelism alone; `zero_to_fp32.py` makes float32 weights, which are files like others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.bridge.entries import Contents, Entry, Request
from mcftensor.checkpoint.bridge.weight_files import require_whole
from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading, some
from mcftensor.checkpoint.open_checkpoint import unpickled
from mcftensor.formats import PLAIN

_LATEST = "latest_universal"


@dataclass
class SubparamShape:
    """In the place of DeepSpeed's own class, which says how a parameter had been divided."""

    patterns: Any = None
    shape: Any = None
    partition_dim: Any = None


_ALLOWED: list[Any] = [
    (SubparamShape, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
]


def matches(path: Path) -> bool:
    """Whether a folder is one of these."""
    return (path / "zero").is_dir() or (path / _LATEST).is_file()


def read(path: Path, request: Request) -> Contents:
    """All parameters, and the moments of their optimizer."""
    if not (path / "zero").is_dir():
        path = path / (path / _LATEST).read_text(encoding="utf-8").strip()
    folders = sorted(file.parent for file in (path / "zero").glob("*/fp32.pt"))
    if not folders:
        raise CheckpointError(f"{path / 'zero'} holds no fp32.pt of any parameter")
    shapes = _Shapes(path)
    contents = Contents("DeepSpeed universal", {})
    for folder in folders:
        name = folder.name
        weight = _entry(name, folder / "fp32.pt", shapes, request)
        contents.weights[name] = weight
        if request.optimizer:
            files = [f for f in sorted(folder.glob("*.pt")) if f.name != "fp32.pt"]
            contents.states[name] = {f.stem: _state(name, f, shapes, request) for f in files}
            _require_shapes(weight, contents.states[name])
    return contents


def _state(name: str, file: Path, shapes: _Shapes, request: Request) -> Any:
    if file.stem != "step":
        return _entry(name, file, shapes, request)
    with reading(file):
        return float(unpickled(file))


def _entry(name: str, file: Path, shapes: _Shapes, request: Request) -> Entry:
    def load() -> Tensor:
        with reading(file), torch.serialization.safe_globals(_ALLOWED):
            content = unpickled(file)
            x = content["param"] if isinstance(content, dict) else content
            return x if isinstance(content, dict) else x.view(shapes.of(name, x))

    def read() -> Tensor:
        if request.verify:
            with reading(file):
                require_whole(file)
        return load().clone()

    like = load()
    return Entry(f"{file.stem} of {name}", PLAIN[like.dtype], like.shape, read)


class _Shapes:
    """Shapes by name, which are looked up where tensors are flat."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, torch.Size] | None = None

    def of(self, name: str, x: Tensor) -> torch.Size:
        if self.found is None:
            self.found = {}
            for file in sorted(self.path.glob("*model_states.pt")):
                with reading(file):
                    parts = unpickled(file)["param_shapes"]
                for part in parts if isinstance(parts, list) else [parts]:
                    self.found |= part
        shape = self.found.get(name)
        if shape is None or shape.numel() != x.numel():
            raise CheckpointError(
                f"{name} is flat in {self.path / 'zero'}, as ZeRO stage 3 leaves it, and no "
                "*_model_states.pt beside says its shape; put those there, or take the weights "
                "that zero_to_fp32.py writes"
            )
        return shape


def _require_shapes(weight: Entry, state: dict[str, Any]) -> None:
    wrong = [x.name for x in state.values() if isinstance(x, Entry) and x.shape != weight.shape]
    if wrong:
        raise CheckpointError(f"{some(wrong)}: not of the shape of the weight, {weight.shape}")
