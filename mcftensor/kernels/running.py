"""Which way a function runs, and on which sets of tensors together."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels import blocks, compiler, cpp, cpu, cuda
from mcftensor.kernels.calls import Call, Rows, dtype_of
from mcftensor.kernels.program import Body, Program, Signature, record

# Elements after which the time to look for compiled code, and to make it, is well spent.
LOOK_AFTER = 1 << 14
BUILD_AFTER = 1 << 20

_is_contiguous = Tensor.is_contiguous

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

    @classmethod
    def of(cls, body: Body, call: Call) -> _Kernel:
        """What a function becomes that is called so."""
        dtypes = [tuple([x.dtype for x in xs]) for xs in (call.vectors, call.outputs)]
        scalars = tuple([dtype_of(x) for x in call.scalars])
        return cls(body, Signature(dtypes[0], scalars, dtypes[1]))

    def compiled(self, elements: int) -> compiler.Launch | None:
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
        return record(self.body, self.signature)


_KERNELS: dict[Any, _Kernel] = {}


def run(calls: Iterable[tuple[Body, Call]]) -> None:
    """Write elementwise functions of vectors and scalars into outputs, alike ones together.

    A function is recorded and compiled once for each combination of dtypes, so it has to be the
    same object at every call.
    """
    # There may be thousands of small tensors: all that is asked of one is asked here, while it is
    # in the caches, and little of it by functions of ours.
    groups: dict[Any, _Group] = {}
    scalars: Any = None
    kinds: tuple[Any, ...] = ()
    where: torch.device | None = None
    for body, call in calls:
        vectors, outputs = call.vectors, call.outputs
        length = outputs[0].numel()
        if length == 0:
            continue
        device = outputs[0].device
        if call.scalars is not scalars or device != where:  # many share them
            scalars, where, kinds = call.scalars, device, _kinds(call.scalars, device)
        start = _start(outputs, vectors)
        tensors = [*vectors, *outputs] if start is None else vectors
        key = (body, tuple([x.dtype for x in tensors]), start, kinds, device)
        group = groups.get(key)
        if group is None:
            kernel = _KERNELS.get(key)
            if kernel is None:
                kernel = _KERNELS[key] = _Kernel.of(body, call)
            group = groups[key] = _Group(kernel, device)
        lengths = [x.numel() for x in tensors]
        alike = lengths.count(length) == len(lengths) and all(map(_is_contiguous, tensors))
        if alike or group.is_flat(tensors):
            addresses = [x.data_ptr() for x in tensors]
            if start is not None:
                addresses += addresses[start : start + len(outputs)]
            group.rows.add(call, length, addresses)
        else:
            group.others.append(call)
    for group in groups.values():
        group.run()


def _start(outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> int | None:
    """Where outputs stand among the vectors, as those of a change in place do."""
    for i, x in enumerate(vectors):
        if x is outputs[0]:
            return i if all(map(operator.is_, vectors[i : i + len(outputs)], outputs)) else None
    return None


def _kinds(scalars: Sequence[Tensor | float], device: torch.device) -> tuple[Any, ...]:
    """What kernels distinguish: dtypes, and for Triton's which scalars they read from a device."""
    there = cuda.on_device(scalars, device) if device.type in TRITON_DEVICES else ()
    return (*map(dtype_of, scalars), *there)


@dataclass
class _Group:
    """What one kernel runs on together."""

    kernel: _Kernel
    device: torch.device
    rows: Rows = field(default_factory=Rows)
    others: list[Call] = field(default_factory=list)

    def is_flat(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all are dense, and elements of the same index lie at the same place of memory."""
        in_order = torch.int64 in self.kernel.signature.scalars  # a key, for each element's index
        shape, strides = tensors[0].shape, tensors[0].stride()
        return (
            not in_order
            and _is_dense(tensors[0])
            and all(x.shape == shape and x.stride() == strides for x in tensors)
        )

    def run(self) -> None:
        body, rows = self.kernel.body, self.rows
        for call in self.others:
            blocks.run_whole(body, call.vectors, call.scalars, call.outputs)
        if rows.calls and self.device.type in TRITON_DEVICES and cuda.is_available():
            cuda.launch(self.kernel.program, rows, self.device)
            return
        if rows.calls and self.device.type == "cpu":
            launch = self.kernel.compiled(sum(rows.lengths))
            if launch is not None:
                cpu.launch(launch, rows, self.kernel.signature.scalars)
                return
        for call in rows.calls:
            blocks.run(body, call.vectors, call.scalars, call.outputs)


def _is_dense(x: Tensor) -> bool:
    """Whether the elements, in some order of dimensions, fill their memory without gaps."""
    expected = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
