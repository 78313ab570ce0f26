"""Checks of components that callers, pickles and checkpoints supply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.formats import Format
from mcftensor.tensor.components import ComponentTensor


def normalized(components: Sequence[Tensor], format: Format) -> tuple[Sequence[Tensor], int]:
    """Return components normalized by `Format.normalized`, and the number of misfits: elements
    whose components do not belong together.

    Components of fake and meta tensors, which have no elements, are returned unchanged.

    Raises:
        ValueError: a tail is not finite while the leading component is.
    """
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in components):
        return components, 0
    if any(hasattr(x.untyped_storage(), "_torch_load_uninitialized") for x in components):
        return components, 0  # the legacy format of torch.save fills storages later
    found, misfits = format.normalized(components)
    if misfits:
        leading, *others = components
        tails = [x for x in others if x.shape == leading.shape]  # scales are whole numbers
        if any((leading.isfinite() & ~x.isfinite()).any() for x in tails):
            raise ValueError(
                f"a {format.components[-1].name} is not finite while its leading component is"
            )
    return found, misfits


def check_components(components: Sequence[Tensor], format: Format) -> None:
    """Raise TypeError or ValueError if tensors are not valid components of a format."""
    wanted = format.components
    if len(components) != len(wanted) or any(
        isinstance(x, ComponentTensor) or not isinstance(x, Tensor) for x in components
    ):
        raise ValueError(
            f"MCFTensor: {len(components)} components given where {len(wanted)} plain tensors make "
            f"{format.name}; see mcf.as_expansion, which makes the components from a tensor"
        )
    leading = components[0]
    for component, x in zip(wanted, components, strict=True):
        if x.dtype != component.dtype:
            raise TypeError(
                f"MCFTensor: a component of {x.dtype} in a format of {component.dtype}: the "
                f"{component.name} of {format.name}"
            )
        if x.shape != component.shape(leading.shape) or (
            x.shape == leading.shape and x.stride() != leading.stride()
        ):
            raise ValueError(
                f"MCFTensor: components of shapes {[tuple(t.shape) for t in components]} and "
                f"strides {[t.stride() for t in components]}; all must be alike"
            )
        if x.device != leading.device:
            raise ValueError(
                f"MCFTensor: components on {leading.device} and {x.device}; move them to one device"
            )


def check_writes(writes: Any, format: Format) -> None:
    """Raise ValueError if `writes` is not a valid write count for a tensor in this format."""
    if writes is None:
        return
    is_count = isinstance(writes, Tensor) and writes.shape == () and writes.dtype == torch.int64
    if not is_count or format.rounding != "balanced":
        raise ValueError(f"{writes!r} as the count of writes to {format.name}")
