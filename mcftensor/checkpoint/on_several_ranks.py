"""State dicts of expansions on several processes: broadcast, and loaded in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcftensor.arithmetic.write_counts import moved
from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.checkpoint.state_dicts import (
    PARTS,
    WRITES,
    as_terms,
    component_in,
    format_said,
    from_terms,
    has_terms,
    names_of_terms,
    stored_components,
    tail_names,
)
from mcftensor.operators.collectives import carried
from mcftensor.patches.table import by_name, patch
from mcftensor.tensor.components import format_of, local, on_local
from mcftensor.tensor.dtensor import place_of


@patch(
    "torch.distributed.checkpoint.state_dict._broadcast_state_dict",
    why="With `broadcast_from_rank0`, the other ranks wait for plain tensors of the dtypes "
    "that the first rank announces.",
    loss="broadcast_from_rank0=True fails with expansions; give it plain float32 values.",
    when="import torch.distributed.checkpoint.state_dict",
    takes=("full_state_dict", "local_state_dict"),
)
@by_name
def _broadcast_as_terms(broadcast: Callable[[], None], given: dict[str, Any]) -> None:
    """The other ranks wait for plain tensors, of the dtypes that the first one names."""
    own: dict[str, Any] = given["local_state_dict"]
    if dist.get_rank() == 0:
        full = {n: _in_format_of(own.get(n), x) for n, x in given["full_state_dict"].items()}
        given["full_state_dict"] = _carried(as_terms(full))
    terms = as_terms(own)
    given["local_state_dict"] = travelling = _carried(terms)
    broadcast()
    arrived = {
        name: on_local(lambda part, dtype: part.view(dtype), x, terms[name].dtype)
        if isinstance(x, Tensor) and component_in(name)
        else x
        for name, x in travelling.items()
    }
    own.clear()
    own.update(from_terms(arrived))


def _carried(terms: dict[str, Any]) -> dict[str, Any]:
    """Return terms in dtypes that backends support."""
    return {n: on_local(carried, x) if component_in(n) else x for n, x in terms.items()}


@torch.no_grad()
def _in_format_of(own: Any, x: Any) -> Any:
    """Return a tensor of the first rank in the format of all ranks, rounded once if it differs."""
    if not (isinstance(own, Tensor) and isinstance(x, Tensor)) or format_of(own) == format_of(x):
        return x
    return local(own).new_empty(x.shape, device=x.device).copy_(x)


@patch(
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict",
    why="`dcp.load` writes into terms in place and calls nothing afterwards. Terms changed by "
    "another program must be normalized or refused.",
    loss="dcp.load into terms accepts the changes of another program unchecked; pass the "
    "loaded state dict to mcf.checkpoint.from_terms, and load the result.",
    when="import torch.distributed.checkpoint.state_dict_loader",
    takes=("state_dict", "storage_reader"),
)
@by_name
def _checking(load: Callable[[], None], given: dict[str, Any]) -> None:
    terms = given["state_dict"]
    if has_terms(terms):
        given["storage_reader"] = _CheckingReader(given["storage_reader"], terms)
    load()


class _CheckingReader:
    """A reader of checkpoints after which the terms that it has written are normalized.

    It then raises the first error of `from_terms`. If it raises on this rank, all ranks raise, as
    they do for errors of reading.
    """

    def __init__(self, reader: Any, terms: Mapping[Any, Any]) -> None:
        self._reader, self._terms = reader, terms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        reading = self._reader.read_data(*args, **kwargs)
        reading.wait()
        for error in list(_refusals(self._terms)):
            raise error
        return reading


@torch.no_grad()
def _refusals(terms: Mapping[Any, Any]) -> Iterator[CheckpointError]:
    for name, names in names_of_terms(terms).items():
        if isinstance(terms[name], Mapping):
            yield from _refusals(terms[name])
        format = format_said(names)
        if format is None:
            continue
        parts = [local(terms[n]) for n in (name, *tail_names(name, format))]
        try:
            whole: Any = local(from_terms({n: terms[n] for n in names})[name])
            found = stored_components(whole)
        except CheckpointError as error:
            yield error
            found, _ = format.normalized(parts)
        torch._foreach_copy_(parts, list(found))
        count = terms.get(f"{name}.{format.name}.{WRITES}")
        if count is not None and count in PARTS:
            part = PARTS[count]
            part._writes.copy_(moved(count, place_of(terms[name]) - part._first))
