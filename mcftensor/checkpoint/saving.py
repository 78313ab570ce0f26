"""Expansions into safetensors files."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mcftensor.checkpoint.atomic import Replacement, replacing, synchronize
from mcftensor.checkpoint.digests import KEY, sealed
from mcftensor.checkpoint.errors import CheckpointError
from mcftensor.checkpoint.safetensors import DTYPES, RESERVED, write
from mcftensor.checkpoint.shards import (
    divide,
    files_named,
    index_of,
    remove_stale,
    shard_name,
    size_in_bytes,
)
from mcftensor.checkpoint.state_dicts import as_terms, from_terms, is_sharded, names_of_terms
from mcftensor.checkpoint.ties import ties
from mcftensor.tensor import MCFTensor


def save_file(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Save a model, or tensors by name, in a safetensors file, with all terms of expansions.

    Leading terms have the plain names, so that every program that reads safetensors finds a valid
    file of the base dtype. The other terms stand beside them as `as_terms` names them. Tensors that
    are tied are stored once. A digest of each tensor is among the metadata.

    The file is replaced whole: if the process is killed meanwhile, the one from before is there,
    and what is left of the new one goes when the file is next saved. The same holds for
    checkpoints in several files, of which the index is replaced last.

    Args:
        model_or_state_dict: a module, or plain tensors and expansions by name.
        path: the file, `model.safetensors` say, or a folder, where it gets this name.
        metadata: texts by name, to be stored in the file.
        max_shard_size: size from which the checkpoint is divided into several files, in bytes or
            as `"5GB"`. They stand beside `path`, and `path` with `.index.json` after it says what
            is where, as in checkpoints of Hugging Face. By default it is one file.

    Raises:
        CheckpointError: something that safetensors does not store: what is no tensor, tensors that
            are sparse, sharded, or without memory (meta).
        ValueError: metadata that are not texts; a size that is none.

    Examples:
        >>> import tempfile, torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mcf.save_file(model, f"{folder}/model.safetensors")
        ...     mcf.load_file(f"{folder}/model.safetensors")["weight"].format
        mcf.bf16x2
    """
    metadata = _metadata(metadata)
    most = None if max_shard_size is None else size_in_bytes(max_shard_size)
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if isinstance(model_or_state_dict, nn.Module):
        model_or_state_dict = model_or_state_dict.state_dict()
    state_dict = dict(model_or_state_dict)
    for name, x in state_dict.items():
        _require_storable(name, x)
    state_dict = from_terms(as_terms(state_dict))  # what is tied is so with all its terms
    tied = ties(state_dict)
    stored = {name: x for name, x in state_dict.items() if name not in tied}
    terms = as_terms(stored)
    groups = names_of_terms(terms).values()
    shards = divide(((sum(terms[n].nbytes for n in names), names) for names in groups), most)
    if len(shards) == 1:
        with replacing(path) as temporary:
            _write(terms, tied, metadata, temporary)
        previous = files_named(index_of(path))
        index_of(path).unlink(missing_ok=True)
        remove_stale(path, previous)
    else:
        _save_shards(terms, shards, tied, metadata, path)


def _save_shards(
    terms: Mapping[str, Tensor],
    shards: list[list[str]],
    tied: Mapping[str, str],
    metadata: Mapping[str, str],
    path: Path,
) -> None:
    token = secrets.token_hex(4)
    files = [shard_name(path, token, i, len(shards)) for i in range(len(shards))]
    previous = files_named(index_of(path))
    try:
        # Locked until the index names them, so that no other writer takes them for abandoned.
        with contextlib.ExitStack() as locks:
            replacements, seals = [], {}
            for file, names in zip(files, shards, strict=True):
                replacement = locks.enter_context(Replacement(path.with_name(file)))
                replacements.append(replacement)
                shard = {name: terms[name] for name in names}
                its_ties = {alias: name for alias, name in tied.items() if name in shard}
                seals[file] = _write(shard, its_ties, metadata, replacement.temporary)
            for replacement in replacements:
                replacement.put()
            synchronize(path.parent)
            where = {n: file for file, names in zip(files, shards, strict=True) for n in names}
            size = sum(x.nbytes for x in terms.values())
            with replacing(index_of(path)) as temporary:
                content = _index(where, seals, {**metadata, "total_size": size})
                temporary.write_text(content, encoding="utf-8")
            path.unlink(missing_ok=True)
    finally:
        remove_stale(path, {*previous, *files})


def _index(
    where: Mapping[str, str], seals: Mapping[str, str], metadata: Mapping[str, str | int]
) -> str:
    seal = sealed({"shards": seals, "weight_map": where})
    del seal["weight_map"]  # It stands beside.
    content = {"metadata": {**metadata, KEY: seal}, "weight_map": where}
    return json.dumps(content, indent=2) + "\n"


def _write(
    terms: Mapping[str, Tensor], tied: Mapping[str, str], metadata: Mapping[str, str], path: Path
) -> str:
    """Write one file, and return the digest of its metadata, those of its tensors among them."""
    seal: dict[str, Any] = {}

    def describe(digests: Mapping[str, str]) -> dict[str, str]:
        seal.update(sealed({"tied": dict(tied), "tensors": dict(digests)}))
        return {**metadata, KEY: json.dumps(seal)}

    with path.open("wb") as file:
        write(file, terms, describe)
    return str(seal["crc32"])


def _require_storable(name: object, x: object) -> None:
    if not isinstance(name, str) or not isinstance(x, Tensor):
        raise CheckpointError(
            f"save_file: {name!r} is a {type(x).__name__}, and safetensors holds tensors by name; "
            "leave it out, or use torch.save"
        )
    if is_lazy(x):
        raise CheckpointError(
            f"save_file: {name} has no shape yet; run the module once before it is saved"
        )
    if is_sharded(x):
        raise CheckpointError(
            f"save_file: {name} of shape {tuple(x.shape)} is sharded over processes (a DTensor); "
            "use torch.distributed.checkpoint, or gather it first, as by "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True"
        )
    if x.layout != torch.strided or x.is_quantized or x.is_nested or x.is_meta:
        kind = "on the meta device" if x.is_meta else f"of {x.layout}"
        raise CheckpointError(
            f"save_file: {name} of shape {tuple(x.shape)} is {kind}; only dense tensors that have "
            "memory can be stored"
        )
    if is_traceable_wrapper_subclass(x) and not isinstance(x, MCFTensor):
        raise CheckpointError(
            f"save_file: {name} of shape {tuple(x.shape)} is a {type(x).__name__}; only plain "
            "tensors and expansions can be stored"
        )
    if x.dtype not in DTYPES:
        raise CheckpointError(
            f"save_file: {name} of shape {tuple(x.shape)} is of {x.dtype}, which safetensors does "
            "not store; save it in another form, as torch.view_as_real gives it"
        )
    if name == RESERVED:
        raise CheckpointError(f"save_file: no tensor can be called {RESERVED} in safetensors")


def _metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    metadata = dict(metadata or {})
    wrong = [k for k, v in metadata.items() if not (isinstance(k, str) and isinstance(v, str))]
    if wrong or KEY in metadata:
        raise ValueError(
            f"save_file: metadata[{wrong[0] if wrong else KEY!r}]: metadata are texts by name, and "
            f"the name {KEY!r} is taken"
        )
    # Without it, loaders of Hugging Face take the file for one of another framework.
    return {"format": "pt", **metadata}
