"""Arithmetic on one row of tensors that lie alike: what `elementwise` does, without its columns.

An optimizer that goes from tensor to tensor asks for some ten such operations on each, and where
tensors are small the time goes to what has to be found out about them. Here that is what an
operation is, looked up by the kinds of its operands, and where these lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.operands import after, count_write, rounding_key
from mcftensor.dispatch.plans import Plan, kind_of, plan
from mcftensor.formats import Format, PlainFormat
from mcftensor.kernels import Columns, run_alike
from mcftensor.kernels.opaque import is_bare
from mcftensor.tensor.deferred import compute_readers, is_worth_deferring
from mcftensor.tensor.tensor import LiftedTensor, MCFTensor

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (float, int)


@dataclass(slots=True)
class _Row:
    """An operation on operands that lie alike: contiguous, of one shape, on one device."""

    plan: Plan
    vectors: list[Tensor]
    scalars: list[float]
    addresses: list[int]
    """Of the vectors."""

    def run(self, outputs: Sequence[Tensor], places: Sequence[int], keys: list[Tensor]) -> None:
        """Write the result into components, which lie at these places as operands do."""
        columns = Columns(
            [[x] for x in self.vectors],
            [[x] for x in self.scalars],
            [[x] for x in outputs],
            keys,
        )
        addresses = [[x] for x in (*self.addresses, *places)]
        assert self.plan.on_whole is not None
        run_alike(*self.plan.on_whole, columns, [outputs[0].numel()], addresses)

    def overlaps(self, targets: Sequence[Tensor], places: Sequence[int]) -> bool:
        """Whether an operand shares memory with a target other than element by element."""
        length, width = targets[0].numel(), targets[0].element_size()
        for x, address in zip(self.vectors, self.addresses, strict=True):
            own = x.element_size()
            for place in places:
                if address < place + length * width and place < address + length * own:
                    if address == place and own == width:
                        break
                    return True
        return False


def evaluated_alone(name: str, operands: Sequence[Any], keywords: tuple[str, ...]) -> Tensor | None:
    """The result that `elementwise.evaluated` gives; None where operands do not lie alike."""
    row = _row(name, operands, keywords, None)
    if row is None:
        return None
    format = row.plan.expression.format
    outputs = format.empty_like(row.vectors[0])
    key = rounding_key(format, operands)
    row.run(outputs, [x.data_ptr() for x in outputs], [] if key is None else [key])
    if isinstance(format, PlainFormat):
        return outputs[0]
    return MCFTensor.of(outputs, format, row.plan.role, own=True, writes=after(format, key))


def evaluated_alone_into(name: str, operands: Sequence[Any], keywords: tuple[str, ...]) -> bool:
    """Write the result into the first operand, an expansion, or do nothing and return False."""
    target = operands[0]
    row = _row(name, operands, keywords, target._format)
    if row is None:
        return False
    if type(target) is LiftedTensor:
        target.grow_tails()
    written = target._read()
    places = [x.data_ptr() for x in written]
    if row.overlaps(written, places):
        return False
    if target._readers:
        compute_readers(target)
    key = rounding_key(target._format, operands)
    row.run(written, places, [] if key is None else [key])
    count_write([target])
    return True


def _row(
    name: str, operands: Sequence[Any], keywords: tuple[str, ...], target: Format | None
) -> _Row | None:
    """Operands in the order of the operation; None where they do not lie alike, or where the result
    had better wait."""
    components: list[Sequence[Tensor]] = []
    for x in operands:
        kind = type(x)
        if kind is MCFTensor:
            components.append(x._read())
        elif kind is LiftedTensor:
            components.append((x._component0,))
        elif kind in _PLAIN:
            components.append((x,))
        elif kind in _NUMBERS:
            components.append(())
        else:
            return None
    if not is_bare(*components):
        return None
    leading = [x[0] for x in components if x]
    like = leading[0]
    shape, device = like.shape, like.get_device()
    if not shape:
        return None
    for x in leading:
        if (
            x.shape != shape
            or x.get_device() != device
            or x.layout is not torch.strided
            or not (x.dtype.is_floating_point and x.is_contiguous())
        ):
            return None
    found = plan(name, tuple([kind_of(x) for x in operands]), keywords, target)
    if found.may_wait and is_worth_deferring([like]):
        return None
    vectors: list[Tensor] = []
    scalars: list[float] = []
    for i in found.order:
        if isinstance(i, float):
            scalars.append(i)
        elif components[i]:
            vectors += components[i]
        else:
            scalars.append(float(operands[i]))
    return _Row(found, vectors, scalars, [x.data_ptr() for x in vectors])
