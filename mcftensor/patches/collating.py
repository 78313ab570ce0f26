"""Batches of data loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.patches.table import patch
from mcftensor.tensor import MCFTensor


@patch(
    "torch.utils.data._utils.collate.default_collate_fn_map",
    why="The workers of data loaders would stack expansions into plain tensors in shared memory.",
    loss="data loaders with workers cannot collate expansions; give them a collate_fn.",
    kind=dict,
)
def with_expansions(functions: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The table, which torch documents as open to other types."""
    functions[MCFTensor] = _stack
    return functions


def _stack(batch: Sequence[Tensor], **unused: Any) -> Tensor:
    return torch.stack(list(batch))
