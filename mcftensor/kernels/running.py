"""Which way a function runs, and on which tensors together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels import blocks, compiler, cpp, cpu, cuda
from mcftensor.kernels.caches import Bounded
from mcftensor.kernels.columns import Columns, Facts, Scalar, are_same, dtype_of, places, repeated
from mcftensor.kernels.lists import places_of
from mcftensor.kernels.program import Body, Program, Signature, record

# Elements after which the time to look for compiled code, and to make it, is well spent.
LOOK_AFTER = 1 << 14
BUILD_AFTER = 1 << 20

# Types of devices that Triton's kernels run on.
TRITON_DEVICES = ["cuda"]


@dataclass
class Kernel:
    """What a function has become for one signature."""

    body: Body
    signature: Signature
    worked: int = 0
    looked: bool = False
    built: bool = False
    launch: compiler.Launch | None = None

    def run(self, columns: Columns, lengths: list[int], addresses: Sequence[list[int]]) -> None:
        """Run on dense tensors of these lengths, at these addresses by columns."""
        device = columns.outputs[0][0].device
        scalars = columns.every_scalar()
        has_data = not any(0 in column for column in addresses)  # as it has not on meta
        if has_data and device.type == "cpu" and "cpu" not in TRITON_DEVICES:
            launch = self._compiled(sum(lengths))
            if launch is not None:
                cpu.launch(launch, lengths, addresses, scalars, self.signature.scalars)
                return
        elif has_data and device.type in TRITON_DEVICES and cuda.is_available():
            cuda.launch(self.program, lengths, addresses, scalars, device)
            return
        blocks.run(self.body, columns)

    def _compiled(self, elements: int) -> compiler.Launch | None:
        """The compiled form, if work so far is worth it and there is a compiler."""
        if self.launch is None:
            self.worked += elements
            build = self.worked >= BUILD_AFTER and not self.built
            if build or (self.worked >= LOOK_AFTER and not self.looked):
                self.looked, self.built = True, build
                self.launch = compiler.load(cpp.source(self.program), build=build)
        return self.launch

    @functools.cached_property
    def program(self) -> Program:
        """The function, recorded."""
        return record(self.body, self.signature)


# By function, dtypes, which vectors are outputs, and devices. More kinds than any training has.
KERNELS: Bounded[object, Kernel] = Bounded(1024)


def run(body: Body, columns: Columns) -> None:
    """Write an elementwise function of vectors and scalars into outputs.

    A function is recorded and compiled once for each combination of dtypes, so it has to be the
    same object at every call.
    """
    tensors, outputs = places(columns.vectors, columns.outputs, are_same)
    facts = [Facts.of(column) for column in tensors]
    scalars = columns.every_scalar()
    kinds = [_kind(column) for column in scalars]
    device = facts[0].device
    if device is None or None in kinds or any(x.dtype is None or x.device != device for x in facts):
        _run_by_kind(body, columns)
        return
    dtypes = [x.dtype for x in facts]
    key = (body, *dtypes, *outputs, *kinds, device)
    kernel = KERNELS.get(key)
    if kernel is None:
        signature = Signature(
            tuple(dtypes[: len(columns.vectors)]),  # type: ignore[arg-type]
            tuple(dtype_of(x[0]) for x in scalars),
            tuple(dtypes[i] for i in outputs),  # type: ignore[misc]
        )
        kernel = KERNELS.put(key, Kernel(body, signature))
    lengths = facts[outputs[0]].lengths
    addresses = [
        x.addresses for x in (*facts[: len(columns.vectors)], *(facts[i] for i in outputs))
    ]
    if 0 not in lengths and all(x.are_contiguous and x.lengths == lengths for x in facts):
        kernel.run(columns, lengths, addresses)
        return
    flat: list[int] = []
    others: list[int] = []
    for i, row in enumerate(zip(*tensors, strict=True)):
        if lengths[i]:
            (flat if _lie_alike(row, in_order=bool(columns.keys)) else others).append(i)
    if others:
        blocks.run_whole(body, columns.only(others))
    if flat:
        lengths, *addresses = ([column[i] for i in flat] for column in (lengths, *addresses))
        kernel.run(columns.only(flat), lengths, addresses)


def _run_by_kind(body: Body, columns: Columns) -> None:
    """The same for calls that are not all of the same dtypes and devices."""
    tensors = [*columns.vectors, *columns.outputs]
    every: list[Sequence[Any]] = [[(x.dtype, x.device) for x in column] for column in tensors]
    every += [repeated([_kind([x]) for x in y], len(columns)) for y in columns.every_scalar()]
    for kinds, rows in places_of(zip(*every, strict=True)).items():
        part = columns.only(rows)
        if len({device for _, device in kinds[: len(tensors)]}) == 1:
            run(body, part)
        else:  # torch says what is wrong
            blocks.run_whole(body, part)


def _kind(column: Sequence[Scalar]) -> tuple[torch.dtype, torch.device | None] | None:
    """Dtype and device of a column of scalars; None where they are not alike."""
    kinds = {(dtype_of(x), x.device if isinstance(x, Tensor) else None) for x in column}
    return kinds.pop() if len(kinds) == 1 else None


def _lie_alike(tensors: Sequence[Tensor], *, in_order: bool) -> bool:
    """Whether elements of the same index lie at the same place of memory without gaps, and in
    order, where indices are drawn by."""
    first = tensors[0]
    length = first.numel()
    if all(x.numel() == length and x.is_contiguous() for x in tensors):
        return True
    return (
        not in_order
        and _is_dense(first)
        and all(x.shape == first.shape and x.stride() == first.stride() for x in tensors)
    )


def _is_dense(x: Tensor) -> bool:
    """Whether the elements, in some order of dimensions, fill their memory without gaps."""
    expected = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
