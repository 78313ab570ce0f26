"""State dicts of weights: safetensors and files of torch.save, whole or in shards.

Layouts: those of this library, of safetensors, and of `torch.save(model.state_dict(), path)`, also
where the state dict is nested in a larger one; several files with an index as transformers writes
them, `model.safetensors.index.json` and `pytorch_model.bin.index.json`. float32 weights of mixed
precision are these: the model's under torch.amp, and the output of DeepSpeed's `zero_to_fp32.py`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mcftensor.checkpoint.bridge.entries import Contents, Request, entries_in, entries_of
from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.checkpoint.open_checkpoint import in_shards, is_safetensors
from mcftensor.checkpoint.safetensors_files import opened
from mcftensor.checkpoint.shards import files_in
from mcftensor.checkpoint.state_dicts import ties


def read_safetensors(path: Path, request: Request) -> Contents:
    """A file, or those of an index."""
    stored = opened(path, request.verify)
    known = request.verify and stored.seal is not None
    weights = entries_in(stored.terms, request, known)
    return Contents("safetensors", weights, tied=_checked_ties(path, weights, stored.tied))


def read_shards(index: Path, request: Request) -> Contents:
    """The files of an index, of either kind."""
    files = files_in(index, json.loads(index.read_text(encoding="utf-8")))
    places = [index.parent / file for file in dict.fromkeys(files.values())]
    if all(map(is_safetensors, places)):
        return read_safetensors(index, request)
    if request.verify:
        for place in places:
            require_whole(place)
    shards = in_shards(index)
    return Contents("torch.save in shards", entries_of(shards, request))


def of_state_dict(layout: str, state_dict: Mapping[str, Tensor], request: Request) -> Contents:
    """A state dict at hand, of which tied weights share memory."""
    tied = ties(state_dict)
    weights = entries_of({name: x for name, x in state_dict.items() if name not in tied}, request)
    return Contents(layout, weights, tied=tied)


def require_whole(path: Path) -> None:
    """Check the CRC-32 of everything in a file of torch.save, which PyTorch does not."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                raise CheckpointError(f"{path} is damaged: it is cut short")
        return  # before torch 1.6 there was none
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged, or was altered: {damaged} in it does not have the CRC-32 that it "
            "says. verify=False reads it all the same"
        )


def _checked_ties(
    path: Path, weights: Mapping[str, object], tied: dict[str, str]
) -> dict[str, str]:
    for alias, name in tied.items():
        if alias in weights or name not in weights:
            raise CheckpointError(f"{path} says that {alias} is tied to {name}, which cannot be")
    return tied
