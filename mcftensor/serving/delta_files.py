"""Deltas: which elements of parameters changed and to what, as safetensors files, and their use.

Of a parameter that changed in few places a delta has the gaps between these and the new codes, of
any other the whole. The page `docs/guides/rl.md` says it in twenty lines of NumPy.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading
from mcftensor.checkpoint.safetensors_files import (
    DELTA_KEY,
    DTYPE_OF,
    DTYPES,
    KEY,
    RESERVED,
    digest,
    unsealed,
    write,
)
from mcftensor.serving.changes import digest_of, digest_of_change, indices_of

# --------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class DeltaEntry:
    """The entry of a parameter in a delta.

    Attributes:
        dtype: of the plain parameter.
        shape: of the whole parameter.
        start: the place of the first element of this part, where it is one of a shard; else 0.
        length: how many elements the part has.
        width: the bits of a gap; 0 where nothing changed or all elements are there.
        before: the digest of the part before; None where any base will do.
        after: the digest afterwards.
    """

    dtype: str
    shape: list[int]
    start: int
    length: int
    width: int
    before: int | None
    after: int


class WeightPatch(NamedTuple):
    """The changes of a parameter, in the order of vLLM's `CheckpointWeightPatch`.

    Attributes:
        name: of the parameter.
        shape: of the whole parameter.
        dtype: of the parameter.
        values: the new values, in one dimension.
        indices: where they are in the flat parameter, int32 where that is enough; None for all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None


@dataclass(frozen=True)
class Delta:
    """A delta: created by `Deltas.take`, applied by `apply_deltas`.

    Attributes:
        data: the bytes of a safetensors file.
        number: how many deltas were taken before.
        is_anchor: whether all parameters are whole, so that any base will do.
        changed: how many elements it has, whole parameters counted whole.
        elements: how many elements the parameters have.
    """

    data: bytes
    number: int
    is_anchor: bool
    changed: int
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file."""
        Path(path).write_bytes(self.data)

    def patches(self) -> list[WeightPatch]:
        """Return the changes of each parameter that changed, in the form that vLLM takes.

        Patches of an anchor are whole, `indices` is None; patches of other deltas, and of shards,
        have indices. vLLM takes no mixture of the two.
        """
        found: list[WeightPatch] = []
        for name, entry, at, codes in _changes(*_parsed(self.data, "delta")):
            if codes is None:
                continue
            shape, size = tuple(entry.shape), entry.length
            if self.is_anchor and size == math.prod(shape):
                found.append(WeightPatch(name, shape, codes.dtype, codes, None))
                continue
            at = torch.arange(size, device=codes.device) if at is None else at
            is_short = math.prod(shape) <= 2**31
            indices = (at + entry.start).to(torch.int32 if is_short else torch.int64)
            found.append(WeightPatch(name, shape, codes.dtype, codes, indices))
        return found


def write_delta(
    parts: Mapping[str, tuple[DeltaEntry, Tensor | None, Tensor | None]],
    number: int,
    is_anchor: bool,
) -> Delta:
    """A file of entries, gaps and codes by the names of parameters."""
    tensors: dict[str, Tensor] = {}
    for name, (_, gaps, codes) in parts.items():
        if gaps is not None:
            tensors[f"{name}.gaps"] = gaps
        if codes is not None:
            tensors[f"{name}.codes"] = codes
    entries = {name: list(vars(entry).values()) for name, (entry, _, _) in parts.items()}
    said = {"number": number, "anchor": is_anchor, "parameters": entries}
    file = io.BytesIO()
    metadata = {"format": "pt", DELTA_KEY: json.dumps(said, separators=(",", ":"))}
    write(file, tensors, tensors.items(), {}, metadata)
    changed = sum(len(codes) for _, _, codes in parts.values() if codes is not None)
    elements = sum(entry.length for entry, _, _ in parts.values())
    return Delta(file.getvalue(), number, is_anchor, changed, elements)


def _parsed(data: bytes, where: str) -> tuple[dict[str, Tensor], dict[str, DeltaEntry]]:
    """The tensors and entries of a file, whose digests are checked."""
    with reading(Path(where)):
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        metadata = head.pop(RESERVED)
        if DELTA_KEY not in metadata:
            raise CheckpointError(f"{where} is no delta; load_file reads checkpoints")
        digests = unsealed(where, json.loads(metadata[KEY]))["tensors"]
        tensors: dict[str, Tensor] = {}
        for name, said in head.items():
            start, stop = (8 + length + x for x in said["data_offsets"])
            dtype = DTYPE_OF[said["dtype"]]
            content = bytearray(data[start:stop])
            x = (
                torch.frombuffer(content, dtype=dtype)
                if content
                else torch.empty(0, dtype=dtype, device="cpu")
            )
            tensors[name] = x.view(said["shape"])
            if digests.get(name) != digest(name, tensors[name]):
                raise CheckpointError(f"{where} is damaged: {name} does not have its digest")
        said = json.loads(metadata[DELTA_KEY])
        if "since" in said:
            raise CheckpointError(f"{where} is an incremental checkpoint; load_file reads it")
        return tensors, {name: DeltaEntry(*x) for name, x in said["parameters"].items()}


def _changes(
    tensors: Mapping[str, Tensor], entries: Mapping[str, DeltaEntry]
) -> Iterator[tuple[str, DeltaEntry, Tensor | None, Tensor | None]]:
    """Return the entry, indices and codes of each parameter; no indices if all elements are there,
    and no codes if nothing changed."""
    for name, entry in entries.items():
        gaps = tensors.get(f"{name}.gaps")
        at = None if gaps is None else indices_of(gaps, entry.width)
        yield name, entry, at, tensors.get(f"{name}.codes")


DeltaLike = Delta | bytes | str | os.PathLike[str]


def apply_deltas(
    model_or_state_dict: nn.Module | Mapping[str, Tensor],
    delta: DeltaLike | Sequence[DeltaLike],
) -> None:
    """Bring a plain model to the state after a delta of `mcf.deltas`, in place.

    Before anything is written, the digest of each parameter is compared with the one before the
    delta, and that of the result with the one after it. So a base that is not the right one, a
    delta that is left out of a chain, and changes that the trainer's side did not see are refused,
    and the model stays as it was.

    Args:
        model_or_state_dict: a plain module, or plain tensors by name.
        delta: what `take` returned, its bytes, or the path of its file; or a chain of these in
            order, as of several steps or of all ranks, of which each is applied whole or not at
            all.

    Raises:
        CheckpointError: a file that is damaged or no delta; a parameter that the model lacks, or
            that has another dtype or shape; a base that is not the one that the delta is of.
        TypeError: a model of expansions, whose tails a delta does not have.

    Examples:
        >>> import copy, torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(64, 64))
        >>> server = mcf.as_plain(copy.deepcopy(model))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        >>> deltas = mcf.deltas(optimizer, names=model)
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> mcf.apply_deltas(server, deltas.take())
        >>> torch.equal(server.weight, mcf.as_plain(model.weight))
        True
    """
    if isinstance(delta, (Delta, bytes, str, os.PathLike)):
        delta = [delta]
    if isinstance(model_or_state_dict, nn.Module):
        named = model_or_state_dict.named_parameters(remove_duplicate=False)
        targets: Mapping[str, Tensor] = dict(named)
    else:
        targets = model_or_state_dict
    for i, each in enumerate(delta):
        where = os.fspath(each) if isinstance(each, (str, os.PathLike)) else f"delta {i}"
        if isinstance(each, Delta):
            data = each.data
        else:
            data = each if isinstance(each, bytes) else Path(each).read_bytes()
        _apply(targets, *_parsed(data, where), where)


@torch.no_grad()
def _apply(
    targets: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    entries: Mapping[str, DeltaEntry],
    where: str,
) -> None:
    writes: list[tuple[Tensor, Tensor | None, Tensor]] = []
    for name, entry, at, codes in _changes(tensors, entries):
        x = _target(targets, name, entry, where)
        old = x.reshape(-1)[entry.start : entry.start + entry.length]
        before = digest_of(old)
        if entry.before is not None and before != entry.before:
            raise CheckpointError(
                f"apply_deltas: {name} is not the base of {where}, in which it has another digest; "
                "apply the deltas before it in order, or an anchor, as take(anchor=True) gives one"
            )
        if codes is not None:
            codes = codes.to(x.device)
            at = None if at is None else at.to(x.device)
            if at is None:
                after = digest_of(codes)
            else:
                after = (before + digest_of_change(at, old[at], codes)) % 2**64
            if after != entry.after:
                raise CheckpointError(
                    f"apply_deltas: {where} does not bring {name} to the digest that it says: "
                    "something wrote to the parameter that the recorder did not see; take an "
                    "anchor, take(anchor=True)"
                )
            writes.append((x, at, codes))
        elif entry.before != entry.after:
            raise CheckpointError(
                f"apply_deltas: {where} has no change of {name}, whose digest changed: something "
                "wrote to it that the recorder did not see; take an anchor, take(anchor=True)"
            )
    starts = {id(_target(targets, n, e, where)): e.start for n, e in entries.items()}
    for x, at, codes in writes:
        start, flat = starts[id(x)], x.detach().view(-1)
        if at is None:
            flat[start : start + len(codes)] = codes
        else:
            flat.index_copy_(0, at + start, codes)


def _target(targets: Mapping[str, Tensor], name: str, entry: DeltaEntry, where: str) -> Tensor:
    x = targets.get(name)
    if x is None:
        raise CheckpointError(
            f"apply_deltas: {where} has {name}, which the model lacks; give the recorder the names "
            "of the model, mcf.deltas(optimizer, names=model)"
        )
    if type(x) not in (Tensor, nn.Parameter):
        raise TypeError(
            f"apply_deltas: {name} is a {type(x).__name__}; a delta is for a plain model, as "
            "mcf.as_plain(model) gives it"
        )
    if DTYPES.get(x.dtype) != entry.dtype or list(x.shape) != entry.shape:
        raise CheckpointError(
            f"apply_deltas: {name} is of {DTYPES.get(x.dtype)} and shape {tuple(x.shape)}, and in "
            f"{where} of {entry.dtype} and shape {tuple(entry.shape)}"
        )
    if not x.is_contiguous():
        raise CheckpointError(
            f"apply_deltas: {name} of shape {tuple(x.shape)} is not contiguous; give its "
            "parameter, or a copy by contiguous()"
        )
    return x
