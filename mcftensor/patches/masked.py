"""Functions of `torch.masked` on tensors in storage formats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mcftensor.patches.table import row
from mcftensor.tensor.tensor import MCFTensor


def _in_all_bits(found: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(found)
    def masked(input: Any, *args: Any, dtype: Any = None, **options: Any) -> Any:
        if isinstance(input, MCFTensor) and input.acts_as == "value":
            format = input.format
            if format.arithmetic == "numbers" and dtype in (None, format.dtype):
                input, dtype = input.to(format.result.dtype), None
        return found(input, *args, dtype=dtype, **options)

    return masked


for _name in ("amax", "amin", "cumsum", "cumprod", "logsumexp", "logaddexp", "std", "var"):
    row(
        f"torch.masked.{_name}",
        why="They round results to the dtype of their input, which for a storage format is that of "
        "the leading component.",
        loss="these functions of values in storage formats have 8 or 11 bits; give them "
        "mcf.as_plain(x, torch.float32).",
        change=_in_all_bits,
    )
