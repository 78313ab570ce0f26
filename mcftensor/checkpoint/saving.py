"""Expansions into safetensors files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mcftensor.checkpoint.atomic_files import beside, remove_abandoned, synchronize
from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.checkpoint.safetensors_files import (
    DELTA_KEY,
    DTYPES,
    KEY,
    RESERVED,
    index_of,
    sealed,
    write,
)
from mcftensor.checkpoint.state_dicts import as_terms, from_terms, is_sharded, names_of_terms, ties
from mcftensor.tensor import MCFTensor
from mcftensor.wings import wing


def save_file(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    since: str | os.PathLike[str] | None = None,
) -> None:
    """Save a model, or tensors by name, in a safetensors file, with all terms of expansions.

    Leading terms have the plain names, so every program that reads safetensors finds a valid file
    of the base dtype. The other terms have the names of `as_terms`, and so have the exponents of
    scaled tensors, whose data are integers to other programs. Tied tensors are stored once. The
    metadata contains a digest of each tensor.

    The file is replaced atomically: if the process is killed, the old file is intact, and the next
    save removes the temporary one. The same holds for checkpoints in several files; their index is
    replaced last.

    Args:
        model_or_state_dict: a module, or plain tensors and expansions by name.
        path: the file, `model.safetensors` say, or a folder, where it gets this name.
        metadata: strings by name, to be stored in the file.
        max_shard_size: size from which the checkpoint is divided into several files, in bytes or
            as `"5GB"`. The files are in the folder of `path`, and their index is `path` with
            `.index.json` appended, as in checkpoints of Hugging Face. By default it is one file.
        since: another checkpoint by `save_file`, which must remain where it is: only what changed
            since then is saved, element by element, in all components. It may have been saved with
            `since` itself. `load_file` reads the whole chain, with the bits of a whole file.
            The base is read to compare with it, one tensor in memory at a time.

    Raises:
        CheckpointError: an object that safetensors does not store: no tensor, or a tensor that is
            sparse, sharded, or without memory (meta); a base that is missing, damaged, without
            digests, or that needs the file of this path.
        ValueError: metadata that are not strings; an invalid size; `since` and `max_shard_size`.

    Examples:
        >>> import tempfile, torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mcf.save_file(model, f"{folder}/model.safetensors")
        ...     mcf.load_file(f"{folder}/model.safetensors")["weight"].format
        mcf.bf16x2

        What changed since then, in a file of its own:

        >>> with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ...     mcf.save_file(model, f"{folder}/1.safetensors")
        ...     model.bias += 0.5
        ...     mcf.save_file(model, f"{folder}/2.safetensors", since=f"{folder}/1.safetensors")
        ...     torch.equal(mcf.load_file(f"{folder}/2.safetensors")["bias"], model.bias)
        True
    """
    metadata = _metadata(metadata)
    most = None if max_shard_size is None else size_in_bytes(max_shard_size)
    if since is not None and most is not None:
        raise ValueError(
            "save_file: with since, what changed is one file; leave out max_shard_size, which the "
            "base may have been saved with"
        )
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if isinstance(model_or_state_dict, nn.Module):
        model_or_state_dict = model_or_state_dict.state_dict()
    state_dict = dict(model_or_state_dict)
    for name, x in state_dict.items():
        _require_storable(name, x)
    state_dict = from_terms(as_terms(state_dict))  # tied tensors share all terms
    tied = ties(state_dict)
    terms = as_terms({n: x for n, x in state_dict.items() if n not in tied}, sums=True)
    if since is not None:
        terms, said = wing("serving").changes_since(since, terms, tied, path)
        metadata |= said
        tied = {}  # said there
    save_terms(terms, lambda names: ((n, terms[n]) for n in names), tied, metadata, path, most)


Producer = Callable[[list[str]], Iterable[tuple[str, Tensor]]]
"""Gives tensors of some names, in any order; those of one number are asked for together."""


def save_terms(
    likes: Mapping[str, Tensor],
    produce: Producer,
    tied: dict[str, str],
    metadata: dict[str, str],
    path: Path,
    most: int | None,
) -> None:
    """Save plain tensors, in files of at most so many bytes, one in memory at a time."""
    shards, index = divide(likes, most), index_of(path)
    old = next((x for x in (path, index) if x.exists()), None)  # whose mode the files get
    previous = files_named(index) or set()
    token, count = secrets.token_hex(4), len(shards)
    names_of_files = [
        path.name if count == 1 else f"{path.stem}-{token}-{i:05}-of-{count:05}{path.suffix}"
        for i in range(1, count + 1)
    ]
    seals: dict[str, str] = {}
    where: dict[str, str] = {}
    try:
        # Locked until the index names them, so that no other writer takes them for abandoned.
        with contextlib.ExitStack() as locks:
            moves = []
            for file, names in zip(names_of_files, shards, strict=True):
                temporary, put = locks.enter_context(beside(path.with_name(file), old))
                moves.append(put)
                shard = {name: likes[name] for name in names}
                its_ties = {alias: name for alias, name in tied.items() if name in shard}
                with temporary.open("wb") as opened:
                    seals[file] = write(opened, shard, produce(names), its_ties, metadata)
                where |= dict.fromkeys(names, file)
            for put in moves:
                put()
            synchronize(temporary.parent)
            if count == 1:
                index.unlink(missing_ok=True)
                return
            seal = sealed({"shards": seals, "weight_map": where})
            del seal["weight_map"]  # already in the index
            size = sum(x.nbytes for x in likes.values())
            content = {"metadata": {**metadata, "total_size": size, KEY: seal}, "weight_map": where}
            with beside(index, old) as (temporary, put):
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
                put()
                synchronize(temporary.parent)
            path.unlink(missing_ok=True)
    finally:
        if path.parent.is_dir():
            remove_stale(path, {*previous, *seals})


def _require_storable(name: object, x: object) -> None:
    if not isinstance(name, str) or not isinstance(x, Tensor):
        raise CheckpointError(
            f"save_file: {name!r} is a {type(x).__name__}, and safetensors holds tensors by name; "
            "leave it out, or use torch.save"
        )
    if name == RESERVED:
        raise CheckpointError(f"save_file: no tensor can be called {RESERVED} in safetensors")
    if is_lazy(x):
        raise CheckpointError(
            f"save_file: {name} has no shape yet; run the module once before it is saved"
        )
    obstacle = None
    if is_sharded(x):
        obstacle = (
            "sharded over processes (a DTensor); use torch.distributed.checkpoint, or gather it "
            "first, as by torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "full_state_dict=True"
        )
    elif x.layout != torch.strided or x.is_quantized or x.is_nested or x.is_meta:
        kind = "on the meta device" if x.is_meta else f"of {x.layout}"
        obstacle = f"{kind}; only dense tensors that have memory can be stored"
    elif is_traceable_wrapper_subclass(x) and not isinstance(x, MCFTensor):
        obstacle = f"a {type(x).__name__}; only plain tensors and expansions can be stored"
    elif x.dtype not in DTYPES:
        obstacle = (
            f"of {x.dtype}, which safetensors does not store; save it in another form, as "
            "torch.view_as_real gives it"
        )
    if obstacle:
        raise CheckpointError(f"save_file: {name} of shape {tuple(x.shape)} is {obstacle}")


def _metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    metadata = dict(metadata or {})
    wrong = [k for k, v in metadata.items() if not (isinstance(k, str) and isinstance(v, str))]
    taken = [k for k in (KEY, DELTA_KEY) if k in metadata]
    if wrong or taken:
        raise ValueError(
            f"save_file: metadata[{(wrong or taken)[0]!r}]: metadata are texts by name, and the "
            f"names {KEY!r} and {DELTA_KEY!r} are taken"
        )
    # Without it, loaders of Hugging Face take the file for one of another framework.
    return {"format": "pt", **metadata}


# ------------------------------------------------------------------------------ several files

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 2 ** (10 * i) for i, unit in enumerate("KMGT", 1)}


def size_in_bytes(size: int | str, of: str = "save_file: max_shard_size") -> int:
    """Return the bytes of a size such as 5_000_000_000, "5GB" or "512MiB", or raise ValueError."""
    text = str(size).strip().upper()
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)\s*([KMGT]I?)B", text)
    number, unit = (match[1] or match[2], match[3] or "") if match else ("0", "")
    found = int(float(number) * _UNITS[unit])
    if found <= 0:
        raise ValueError(f"{of} is {size!r}; give bytes, or a size such as '5GB'")
    return found


def divide(terms: Mapping[str, Tensor], most: int | None) -> list[list[str]]:
    """Divide names of terms, in their order, into shards of at most so many bytes.

    The terms of one number stay together, also where they are more than that.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for names in names_of_terms(terms).values():
        size = sum(terms[name].nbytes for name in names)
        if most is not None and shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].extend(names)
        filled += size
    return shards


def remove_stale(path: Path, previous: Iterable[str]) -> None:
    """Remove what no index names: shards of the last one, and what killed writers have left."""
    stem, suffix = re.escape(path.stem), re.escape(path.suffix)
    shard = rf"{stem}-([0-9a-f]{{8}}-)?\d{{5}}-of-\d{{5}}{suffix}"
    unfinished = rf"\.({shard}|{stem}{suffix}(\.index\.json)?)\.[0-9a-f]{{8}}\.tmp"

    def is_named(file: Path) -> bool:
        named = files_named(index_of(path))
        return named is None or file.name in named

    for file in path.parent.iterdir():
        match = re.fullmatch(shard, file.name)
        if match and file.name in previous and not is_named(file):
            file.unlink(missing_ok=True)
        elif (match and match[1]) or re.fullmatch(unfinished, file.name):
            remove_abandoned(file, is_named)
    synchronize(path.parent)


def files_named(index: Path) -> set[str] | None:
    """Return the files that an index names, for a missing or damaged index too; None if it cannot
    be read, for example with too many open files."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return set()
    except OSError:
        return None
