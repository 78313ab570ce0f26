"""Lists and tables of torch, in which types and operators have to stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mcftensor.patches.table import patch
from mcftensor.tensor import MCFTensor


@patch(
    "torch.optim.optimizer._foreach_supported_types",
    "torch.utils._foreach_utils._foreach_supported_types",
    why="Optimizers and clipping choose foreach kernels by default, as on CUDA, for listed types "
    "of parameters.",
    loss="optimizers and clipping use the for-loop over expansions, unless foreach=True or "
    "fused=True is given.",
    kind=list,
)
def _with_expansions(types: list[type]) -> list[type]:
    types.append(MCFTensor)  # in place: others have imported the list
    return types


@patch(
    "torch.utils.data._utils.collate.default_collate_fn_map",
    why="The workers of data loaders would stack expansions into plain tensors in shared memory.",
    loss="data loaders with workers cannot collate expansions; give them a collate_fn.",
    kind=dict,
)
def _stacking_expansions(functions: dict[Any, Callable[..., Any]]) -> dict[Any, Any]:
    functions[MCFTensor] = lambda batch, **unused: torch.stack(list(batch))
    return functions


@patch(
    "torch._functorch.compile_utils.rand_ops",
    why="Compilers merge equal calls, except calls of operators listed as random.",
    loss="stochastic roundings of one compiled graph may share their random numbers.",
    when="import torch._dynamo",
    kind=list,
)
def _with_draws(operators: list[Any]) -> list[Any]:
    operators.append(torch.ops.mcftensor.draw_key)
    return operators
