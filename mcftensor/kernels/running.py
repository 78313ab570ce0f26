"""Which way a function runs, and on which sets of tensors together."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcftensor.kernels import blocks, compiler, cpp, cuda
from mcftensor.kernels.program import Body, Program, Signature, record

# Elements after which the time to look for compiled code, and to make it, is well spent.
LOOK_AFTER = 1 << 14
BUILD_AFTER = 1 << 20

# Types of devices that Triton's kernels run on.
TRITON_DEVICES = ["cuda"]

# Elements a thread is worth starting for.
_GRAIN = 1 << 15


@dataclass(eq=False)
class Call:
    """One set of tensors for an elementwise function.

    Outputs are of one shape, vectors too or of one that broadcasts; scalars are Python floats or
    tensors without dimensions. An output may be one of the vectors, and overlaps no other.
    """

    vectors: Sequence[Tensor]
    scalars: Sequence[Tensor | float]
    outputs: Sequence[Tensor]


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

    @functools.cached_property
    def program(self) -> Program:
        return record(self.body, self.signature)


_KERNELS: dict[Hashable, _Kernel] = {}


def run(calls: Iterable[tuple[Hashable, Callable[[], Body], Call]]) -> None:
    """Write elementwise functions of vectors and scalars into outputs, alike ones together.

    Each call comes with a name for its function and all that this has been given, and with what
    makes the function: used once for each name and combination of dtypes.
    """
    groups: dict[Hashable, tuple[_Kernel, list[Call]]] = {}
    for name, make, call in calls:
        if call.outputs[0].numel() == 0:
            continue
        dtypes = (
            tuple([x.dtype for x in call.vectors]),
            tuple([x.dtype if isinstance(x, Tensor) else torch.float64 for x in call.scalars]),
            tuple([x.dtype for x in call.outputs]),
        )
        device = call.outputs[0].device
        there = cuda.on_device(call, device) if device.type in TRITON_DEVICES else ()
        key = (name, dtypes, device, there)
        group = groups.get(key)
        if group is None:
            kernel = _KERNELS.get(key)
            if kernel is None:
                kernel = _KERNELS[key] = _Kernel(make(), Signature(*dtypes))
            group = groups[key] = (kernel, [])
        group[1].append(call)
    for kernel, together in groups.values():
        _run_group(kernel, together)


def _run_group(kernel: _Kernel, calls: list[Call]) -> None:
    in_order = torch.int64 in kernel.signature.scalars  # a key, for the index of each element
    flat: list[Call] = []
    for call in calls:
        if _is_flat([*call.vectors, *call.outputs], in_order):
            flat.append(call)
        else:
            blocks.run_whole(kernel.body, call.vectors, call.scalars, call.outputs)
    device = calls[0].outputs[0].device
    if flat and device.type in TRITON_DEVICES and cuda.is_available():
        cuda.launch(kernel.program, flat, device)
        return
    if flat and device.type == "cpu":
        elements = sum([call.outputs[0].numel() for call in flat])
        launch = kernel.compiled(elements)
        if launch is not None:
            _launch(launch, kernel.signature, flat, elements)
            return
    for call in flat:
        blocks.run(kernel.body, call.vectors, call.scalars, call.outputs)


def _is_flat(tensors: Sequence[Tensor], in_order: bool) -> bool:
    """Whether all are dense, and elements of the same index lie at the same place of memory."""
    if len({x.numel() for x in tensors}) == 1 and all(map(Tensor.is_contiguous, tensors)):
        return True
    shape, strides = tensors[0].shape, tensors[0].stride()
    return (
        not in_order
        and _is_dense(tensors[0])
        and all(x.shape == shape and x.stride() == strides for x in tensors)
    )


def _is_dense(x: Tensor) -> bool:
    """Whether the elements, in some order of dimensions, fill their memory without gaps."""
    expected = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _launch(
    launch: compiler.Launch, signature: Signature, calls: list[Call], elements: int
) -> None:
    whole = [dtype == torch.int64 for dtype in signature.scalars]
    words: list[int] = []
    numbers: list[float] = []
    for call in calls:
        words.append(call.outputs[0].numel())
        words += [x.data_ptr() for x in call.vectors]
        words += [x.data_ptr() for x in call.outputs]
        for is_whole, x in zip(whole, call.scalars, strict=True):
            value = x.item() if isinstance(x, Tensor) else x
            if is_whole:
                words.append(int(value))
            else:
                numbers.append(value)
    rows, table = array("q", words), array("d", numbers)
    threads = max(1, min(torch.get_num_threads(), elements // _GRAIN))
    launch(rows.buffer_info()[0], table.buffer_info()[0], len(calls), threads)
