"""DeepSpeed's checkpoints: universal ones, and the files that each process of ZeRO writes.

*Universal*: a folder for each parameter, a file for each of its tensors,
`global_step10_universal/zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt`, as `ds_to_universal.py`
writes them; the folder above them may be given, whose file `latest_universal` says which is the
last. A file holds `{"param": tensor}`, or, from ZeRO stage 3 without tensor parallelism, the tensor
itself, flat; its shape is then in `param_shapes` of a `*_model_states.pt` there. Parameters
that are not trained, and buffers, are not there.

*ZeRO's own*, masters and moments in flat parts of groups: `global_step7/`, and next to it `latest`,
which names the last. In it a file for each process, `zero_pp_rank_R_mp_rank_00_optim_states.pt`,
and the rest in `*_model_states.pt`, which names the parameters of each group, in their order, with
their shapes. In stages 1 and 2 a group is one flat tensor, cut into one part for each process, with
zeros at the end; in stage 3 each parameter is cut by itself. Tensor, pipeline and expert
parallelism, and what `BF16_Optimizer` saves, are left to `ds_to_universal.py`. Read: DeepSpeed
0.19.6. `zero_to_fp32.py` makes float32 weights, which are files like others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading, some
from mcftensor.checkpoint.entries import Contents, Entry, Request, entry_of
from mcftensor.checkpoint.pickle_checks import unpickled
from mcftensor.formats import PLAIN

_LATEST, _LATEST_UNIVERSAL = "latest", "latest_universal"
_OF_OPTIMIZER = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class _Unused:
    """In the place of DeepSpeed's own classes, whose contents are not needed."""


_ALLOWED: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unused, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Unused, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Unused, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Unused, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
]


def universal_in(path: Path) -> Path | None:
    """Return the folder of the universal checkpoint that the folder of a run names."""
    if (path / "zero").is_dir():
        return path
    return _named_by(path / _LATEST_UNIVERSAL)


def parts_in(path: Path) -> Path | None:
    """Return the folder of ZeRO's files that the folder of a run names."""
    path = _named_by(path / _LATEST) or path
    return path if any(path.glob("*_optim_states.pt")) else None


def _named_by(file: Path) -> Path | None:
    return file.parent / file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _loaded(file: Path, verify: bool) -> Any:
    with torch.serialization.safe_globals(_ALLOWED):
        return unpickled(file, verify)


# ------------------------------------------------------------------------------------ universal


def read_universal(path: Path, request: Request) -> Contents:
    """Read all parameters, and the moments of their optimizer."""
    path = universal_in(path) or path
    folders = sorted(file.parent for file in (path / "zero").glob("*/fp32.pt"))
    if not folders:
        raise CheckpointError(f"{path / 'zero'} holds no fp32.pt of any parameter")
    shapes = _Shapes(path)
    contents = Contents("DeepSpeed universal", {})
    for folder in folders:
        name = folder.name
        contents.weights[name] = weight = shapes.entry(name, folder / "fp32.pt", request.verify)
        if not request.optimizer:
            continue
        state: dict[str, Any] = {}
        for file in sorted(folder.glob("*.pt")):
            if file.stem == "step":
                with reading(file):
                    state["step"] = float(unpickled(file, verify=False))
            elif file.stem != "fp32":
                state[file.stem] = shapes.entry(name, file, request.verify)
        wrong = [x.name for x in state.values() if isinstance(x, Entry) and x.shape != weight.shape]
        if wrong:
            raise CheckpointError(f"{some(wrong)}: not of the shape of the weight, {weight.shape}")
        contents.states[name] = state
    return contents


class _Shapes:
    """Shapes by name, which are looked up where tensors are flat."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, torch.Size] | None = None

    def entry(self, name: str, file: Path, verify: bool) -> Entry:
        def load(verify: bool) -> Any:
            content = _loaded(file, verify)
            with reading(file):
                if isinstance(content, dict):
                    return content["param"]
                return content.view(self._of(name, content))

        like = load(verify=False)
        place = f"{file.stem} of {name}"
        return Entry(place, PLAIN[like.dtype], like.shape, lambda: load(verify).clone())

    def _of(self, name: str, x: Tensor) -> torch.Size:
        if self.found is None:
            self.found = {}
            for file in sorted(self.path.glob("*model_states.pt")):
                with reading(file):
                    parts = unpickled(file, verify=False)["param_shapes"]
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


# ------------------------------------------------------------------------------ parts of groups


def read_parts(path: Path, request: Request) -> Contents:
    """Return masters, the other tensors of the model, and the states of the optimizer."""
    path = parts_in(path) or path
    ranks = _ranks(path)
    saved = [_loaded(path / file, request.verify)["optimizer_state_dict"] for file in ranks]
    stage = saved[0].get("zero_stage")
    counts = saved[0].get("partition_count")
    counts = set(counts) if isinstance(counts, list) else {counts}
    if stage not in (1, 2, 3) or len(counts) != 1:
        raise _unread(path, f"parts of stage {stage}, in {some(map(str, counts))} parts by group")
    if counts != {len(ranks)}:
        raise CheckpointError(f"{path} has {len(ranks)} parts of {counts.pop()} that were saved")
    files = [f"zero_pp_rank_{i}_mp_rank_00_model_states.pt" for i in range(len(ranks))]
    if stage < 3:
        files = ["mp_rank_00_model_states.pt"]
    models = [_loaded(path / file, request.verify) for file in files]
    model = models[0]
    groups = model["param_shapes"]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    masters = [x[key] for x in saved]
    if not isinstance(model["module"], Mapping) or any(len(x) != len(groups) for x in masters):
        raise _unread(path, "parameters in other groups than its model")
    bases = [x["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] for x in saved]
    if request.optimizer and not all(isinstance(x, Mapping) for x in bases):
        raise _unread(path, "states of elastic checkpoints")

    contents = Contents(f"DeepSpeed ZeRO stage {stage}", {})
    names: list[list[str]] = []
    for i, shapes in enumerate(groups):
        places = _places(path, shapes, [x[i] for x in masters], stage)
        flat = {"": [x[i] for x in masters]}
        alike: dict[str, Any] = {}
        states = [base["state"].get(i, {}) for base in bases] if request.optimizer else [{}]
        for state, x in states[0].items():
            if isinstance(x, Tensor) and x.dim():
                flat[state] = [s[state] for s in states]
                for x, part in zip(flat[state], flat[""], strict=True):
                    if x.dim() != 1 or len(x) < len(part):
                        raise CheckpointError(
                            f"a state in {path} is of shape {tuple(x.shape)}, and its part has "
                            f"{len(part)} elements"
                        )
            else:
                alike[state] = entry_of(f"{state} of group {i}", x) if isinstance(x, Tensor) else x
        for name, place in places.items():
            entries = {k: _entry(f"{k} {name}".strip(), x, place) for k, x in flat.items()}
            contents.weights[name] = entries.pop("")
            if states[0]:
                contents.states[name] = {**alike, **entries}
        names.append(list(places))
    _add_rest(contents, models, stage)
    if request.optimizer:
        contents.groups = [
            {**group, "params": [name for i in group["params"] for name in names[i]]}
            for group in bases[0]["param_groups"]
        ]
    return contents


def _ranks(path: Path) -> list[str]:
    """Return the files of the processes, in order."""
    files = {f.name: _OF_OPTIMIZER.fullmatch(f.name) for f in path.glob("*_optim_states.pt")}
    foreign = [name for name, match in files.items() if match is None]
    if foreign:
        raise _unread(path, f"{some(foreign)}, of other processes than those of data parallelism")
    numbers = {int(match[1]): name for name, match in files.items() if match}
    missing = sorted(set(range(len(numbers))) - numbers.keys())
    if missing:
        raise CheckpointError(f"{path} lacks the part of process {missing[0]}")
    return [numbers[i] for i in sorted(numbers)]


def _unread(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds {what}, which is not read; DeepSpeed's ds_to_universal.py makes a "
        "checkpoint of it that is, with states, and zero_to_fp32.py the weights"
    )


@dataclass(frozen=True)
class _Place:
    """The place of a parameter in the flat parts of its group, one of each process."""

    shape: torch.Size
    slices: list[slice]


def _places(
    path: Path, shapes: Mapping[str, Any], parts: list[Tensor], stage: int
) -> dict[str, _Place]:
    places, used = {}, 0
    for name, given in shapes.items():
        shape = torch.Size(given)
        if stage == 3:
            length = -(-shape.numel() // len(parts))
            slices = [slice(used, used + length)] * len(parts)
        else:
            length = shape.numel()
            slices = list(_across(map(len, parts), used, used + length))
        places[name] = _Place(shape, slices)
        used += length
    # Groups are padded to a multiple of twice the number of processes, which may be cut off again.
    available = len(parts[0]) if stage == 3 else sum(map(len, parts))
    padding = 0 if stage == 3 else 2 * len(parts) - 1
    if not used <= available <= used + padding:
        raise CheckpointError(
            f"{path}: the parameters {some(shapes)} have {used} elements, and {available} are there"
        )
    return places


def _across(lengths: Iterable[int], start: int, stop: int) -> Iterator[slice]:
    """Return the slices of consecutive parts that make up a slice of the whole."""
    for length in lengths:
        yield slice(min(max(start, 0), length), min(max(stop, 0), length))
        start, stop = start - length, stop - length


def _entry(name: str, parts: list[Tensor], place: _Place) -> Entry:
    def read() -> Tensor:
        pieces = [x[where] for x, where in zip(parts, place.slices, strict=True)]
        return _joined(pieces, place.shape)

    return Entry(name, PLAIN[parts[0].dtype], place.shape, read)


def _joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """Join consecutive parts; the last may be longer than needed."""
    missing = shape.numel() - sum(map(len, parts))
    if missing > 0:
        raise CheckpointError(f"{missing} elements of a tensor of shape {shape} are missing")
    return torch.cat(parts)[: shape.numel()].view(shape)


def _add_rest(contents: Contents, models: list[Any], stage: int) -> None:
    """Add the tensors that are not trained, and the names of tied weights."""
    model = models[0]
    shared = dict(model.get("shared_params") or {})
    contents.tied = {alias: name for alias, name in shared.items() if name in contents.weights}
    known = contents.weights.keys() | contents.tied.keys()
    for name, x in model["module"].items():
        # In stage 3 parameters are empty here.
        if name not in known and (stage < 3 or name in model["buffer_names"]):
            contents.weights[name] = entry_of(name, x)
    frozen = model.get("frozen_param_shapes") or {}
    for name, shape in frozen.items():
        parts = [x["frozen_param_fragments"][name].reshape(-1) for x in models]
        if name not in contents.weights and name not in contents.tied:
            whole = _Place(torch.Size(shape), [slice(None)] * len(parts))
            contents.weights[name] = _entry(name, parts, whole)
