"""Which way a function runs, and on which sets of tensors together."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels import blocks, compiler, cpp, cpu, cuda
from mcftensor.kernels.calls import Calls, Column, Facts, are_same, dtype_of, places
from mcftensor.kernels.program import Body, Program, Signature, record
from mcftensor.operators import places_of

# Elements after which the time to look for compiled code, and to make it, is well spent.
LOOK_AFTER = 1 << 14
BUILD_AFTER = 1 << 20

# Types of devices that Triton's kernels run on.
TRITON_DEVICES = ["cuda"]


@dataclass
class _Kernel:
    """What a function has become for one signature."""

    body: Body
    signature: Signature
    worked: int = 0
    looked: bool = False
    built: bool = False
    launch: compiler.Launch | None = None

    def compiled(self, elements: int) -> compiler.Launch | None:
        """The compiled form, if work so far is worth it and there is a compiler."""
        if self.launch is None:
            self.worked += elements
            build = self.worked >= BUILD_AFTER and not self.built
            if build or (self.worked >= LOOK_AFTER and not self.looked):
                self.looked, self.built = True, build
                self.launch = compiler.load(cpp.source(self.program), build=build)
        return self.launch

    def takes(self, tensors: Column) -> bool:
        """Whether elements of the same index lie at the same place of memory without gaps."""
        first = tensors[0]
        length = first.numel()
        if all(x.numel() == length and x.is_contiguous() for x in tensors):
            return True
        in_order = torch.int64 in self.signature.scalars  # a key, for each element's index
        return (
            not in_order
            and _is_dense(first)
            and all(x.shape == first.shape and x.stride() == first.stride() for x in tensors)
        )

    def run(
        self,
        lengths: list[int],
        addresses: Sequence[list[int]],
        scalars: Sequence[Sequence[Tensor | float]],
        device: torch.device,
    ) -> bool:
        """Run on dense tensors of these lengths, at these addresses by columns, if there is a
        compiled form."""
        if any(0 in column for column in addresses):  # a tensor without data, say on meta
            return False
        if device.type == "cpu" and "cpu" not in TRITON_DEVICES:
            launch = self.compiled(sum(lengths))
            if launch is not None:
                cpu.launch(launch, lengths, addresses, scalars, self.signature.scalars)
            return launch is not None
        if device.type in TRITON_DEVICES and cuda.is_available():
            cuda.launch(self.program, lengths, addresses, scalars, device)
            return True
        return False

    def run_all(self, calls: Calls, lengths: list[int], addresses: Sequence[list[int]]) -> None:
        """Carry out calls on dense tensors, in whatever way there is."""
        if not self.run(lengths, addresses, calls.scalars, calls.outputs[0][0].device):
            for call in calls:
                blocks.run(self.body, *call)

    @functools.cached_property
    def program(self) -> Program:
        return record(self.body, self.signature)


_KERNELS: dict[Any, _Kernel] = {}


def run(body: Body, calls: Calls) -> None:
    """Write an elementwise function of vectors and scalars into outputs, alike calls together.

    A function is recorded and compiled once for each combination of dtypes, so it has to be the
    same object at every call.
    """
    if len(calls) < 2:
        for call in calls:
            run_one(body, *call)
        return
    columns, outputs = places(calls.vectors, calls.outputs, are_same)
    facts = [Facts.of(column) for column in columns]
    kinds = [set(map(_kind, column)) for column in calls.scalars]
    devices = {index for x in facts for index in x.devices}
    if len(devices) > 1 or any([len(x.dtypes) > 1 for x in facts] + [len(x) > 1 for x in kinds]):
        _run_by_kind(body, calls)
        return
    kernel = _kernel(
        body,
        len(calls.vectors),
        [dtype for x in facts for dtype in x.dtypes],
        outputs,
        [kind for column in kinds for kind in column],
        calls.outputs[0][0].device,
    )
    lengths = facts[outputs[0]].lengths
    addresses = [x.addresses for x in facts]
    addresses = [*addresses[: len(calls.vectors)], *[addresses[i] for i in outputs]]
    if 0 not in lengths and all(x.are_contiguous and x.lengths == lengths for x in facts):
        kernel.run_all(calls, lengths, addresses)
        return
    flat: list[int] = []
    others: list[int] = []
    for i, tensors in enumerate(zip(*columns, strict=True)):
        if lengths[i]:
            (flat if kernel.takes(tensors) else others).append(i)
    for call in calls.only(others):
        blocks.run_whole(body, *call)
    if flat:
        lengths, *addresses = ([column[i] for i in flat] for column in (lengths, *addresses))
        kernel.run_all(calls.only(flat), lengths, addresses)


def run_one(
    body: Body,
    vectors: Sequence[Tensor],
    scalars: Sequence[Tensor | float],
    outputs: Sequence[Tensor],
) -> None:
    """The same for a single call."""
    tensors, written = places(vectors, outputs, operator.is_)
    first = outputs[0]
    length, device = first.numel(), first.device
    if length == 0:
        return
    dtypes, kinds = [x.dtype for x in tensors], [_kind(x) for x in scalars]
    kernel = _kernel(body, len(vectors), dtypes, written, kinds, device)
    if not kernel.takes(tensors) or any(x.device != device for x in tensors):
        blocks.run_whole(body, vectors, scalars, outputs)
        return
    addresses = [[x.data_ptr()] for x in tensors]
    addresses = [*addresses[: len(vectors)], *[addresses[i] for i in written]]
    if not kernel.run([length], addresses, [[x] for x in scalars], device):
        blocks.run(body, vectors, scalars, outputs)


def _kernel(
    body: Body,
    vectors: int,
    dtypes: Sequence[torch.dtype],
    places: Sequence[int],
    scalars: Sequence[tuple[torch.dtype, torch.device | None]],
    device: torch.device,
) -> _Kernel:
    """The kernel for so many vectors, and outputs that are at these places among the tensors."""
    key = (body, tuple(dtypes), tuple(places), tuple(scalars), device)
    kernel = _KERNELS.get(key)
    if kernel is None:
        written = tuple([dtypes[i] for i in places])
        numbers = tuple([dtype for dtype, _ in scalars])
        kernel = _Kernel(body, Signature(tuple(dtypes[:vectors]), numbers, written))
        _KERNELS[key] = kernel
    return kernel


def _run_by_kind(body: Body, calls: Calls) -> None:
    """The same for calls that are not all of the same dtypes and devices."""
    columns = [*calls.vectors, *calls.outputs, *calls.every_scalar()]
    every = zip(*[map(_kind, column) for column in columns], strict=True)
    for kinds, rows in places_of(every).items():
        part = calls.only(rows)
        if len({device for _, device in kinds[: len(columns) - len(calls.scalars)]}) == 1:
            run(body, part)
        else:  # torch says what is wrong
            for call in part:
                blocks.run_whole(body, *call)


def _kind(x: Tensor | float) -> tuple[torch.dtype, torch.device | None]:
    return dtype_of(x), x.device if isinstance(x, Tensor) else None


def _is_dense(x: Tensor) -> bool:
    """Whether the elements, in some order of dimensions, fill their memory without gaps."""
    expected = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
