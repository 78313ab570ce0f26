"""Arguments of elementwise functions, as columns with one row per call.

An operation on one tensor, a `_foreach_` call on thousands of tensors and a fused step have the
same form here. Facts about tensors are determined once per column."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcftensor.kernels.block_scales import BLOCK_SIZE

T = TypeVar("T")
K = TypeVar("K")

Column = Sequence[Tensor]
Scalar = Tensor | float


# Types of arguments that need no further inspection.
_BARE = {Tensor, torch.nn.Parameter, bool, int, float, str, type(None)}


def is_wrapped(x: Tensor) -> bool:
    """Return whether a transform of `torch.func` wraps a tensor; False while Dynamo compiles."""
    return (
        not torch.compiler.is_dynamo_compiling()
        and torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def is_transformed(x: Tensor) -> bool:
    """Return whether a transform of `torch.func` wraps what is made of a tensor."""
    return is_wrapped(x) or (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_bare(*lists: Sequence[Any]) -> bool:
    """Whether a call with these lists is seen by eager PyTorch alone: no tracer or transform."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.autograd._profiler_enabled()
        and _BARE.issuperset(map(type, itertools.chain.from_iterable(lists)))
    )


@dataclass(eq=False, slots=True)
class Columns:
    """Calls of an elementwise function.

    The outputs of a call have one shape. Its vectors have the same shape or broadcast to it, except
    vectors with one value per block. Its scalars are Python floats or 0-d tensors; a column of one
    scalar serves all calls. A column of outputs may also be a column of vectors, and overlaps no
    other column.

    Attributes:
        vectors: columns of tensors that are read element by element.
        scalars: columns of values that are the same for all elements of a call.
        outputs: columns of tensors that are written.
        keys: one key for each call if random numbers are drawn, else none.
        shared: the indices of columns, vectors first and then outputs, with one value per block.
        packed: the indices of columns with two codes in a byte.
        done: None, or a list to which the numbers of written elements are appended, in order. The
            bytecode that writes the elements also appends, so that no signal handler of Python runs
            between the two.
    """

    vectors: Sequence[Column]
    scalars: Sequence[Sequence[Scalar]]
    outputs: Sequence[Column]
    keys: Column = ()
    shared: frozenset[int] = frozenset()
    done: list[tuple[int, None]] | None = None
    packed: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.outputs[0])

    def __iter__(self) -> Iterator[Columns]:
        """Iterate over single calls."""
        return (self.only([i]) for i in range(len(self))) if len(self) > 1 else iter((self,))

    def only(self, rows: Sequence[int]) -> Columns:
        """Return the calls of some rows."""
        return Columns(
            [[x[i] for i in rows] for x in self.vectors],
            [x if len(x) == 1 else [x[i] for i in rows] for x in self.scalars],
            [[x[i] for i in rows] for x in self.outputs],
            [self.keys[i] for i in rows] if self.keys else (),
            self.shared,
            self.done,
            self.packed,
        )

    def per_block(self, i: int) -> int:
        """Return the number of values that a column has for a block."""
        return 1 if i in self.shared else BLOCK_SIZE // 2 if i in self.packed else BLOCK_SIZE

    def every_scalar(self) -> list[Sequence[Scalar]]:
        """Return the columns of scalars, keys last."""
        return [*self.scalars, self.keys] if self.keys else [*self.scalars]


class Flat(Sequence[Tensor]):
    """Rows of scratch memory as a column, created on demand.

    The tensors in the other columns have the same lengths, and are contiguous.
    """

    def __init__(self, scratch: Tensor, lengths: Sequence[int], shapes: Sequence[Sequence[int]]):
        self._scratch, self.lengths, self._shapes = scratch, lengths, shapes
        self._starts = [0, *itertools.accumulate(lengths)]
        self.dtype = scratch.dtype

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: Any) -> Any:
        start = self._starts[i]
        return self._scratch[start : start + self.lengths[i]].view(self._shapes[i])

    def addresses(self) -> list[int]:
        """Return the addresses of the rows."""
        first, width = self._scratch.data_ptr(), self._scratch.element_size()
        return [first + width * x for x in self._starts[:-1]]


def places(vectors: Sequence[Column], outputs: Sequence[Column]) -> tuple[list[Column], list[int]]:
    """Return vectors and outputs without repetition, and the positions of the outputs in them."""
    found = list(vectors)
    where = []
    for output in outputs:
        i = 0
        while i < len(found) and not are_same(found[i], output):
            i += 1
        if i == len(found):
            found.append(output)
        where.append(i)
    return found, where


def are_same(a: Column, b: Column) -> bool:
    """Whether two columns hold the same tensors."""
    return a is b or all(map(operator.is_, a, b))


def repeated(column: Sequence[T], count: int) -> Sequence[T]:
    """Return a column of `count` elements; a column of one element is repeated."""
    return column if len(column) == count else [*column] * count


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a 0-d tensor on a device.

    A tensor of the host becomes a number in a kernel on the device, so that the host does not wait
    for a copy.
    """
    if x.device.type != "cpu" or device.type == "cpu" or not is_bare([x]):
        return x.to(device)
    return torch.full((), x.item(), dtype=x.dtype, device=device)


def regroup(flat: Sequence[T], lengths: Sequence[int]) -> list[list[T]]:
    """Return a flat list as consecutive lists of these lengths."""
    rest = iter(flat)
    return [list(islice(rest, length)) for length in lengths]


def columns_of(flat: Sequence[T], length: int) -> list[Sequence[T]]:
    """Return a flat list as consecutive lists of this length."""
    return [flat[i : i + length] for i in range(0, len(flat), length)]


def places_of(keys: Iterable[K]) -> dict[K, list[int]]:
    """Return the positions of each key in an iterable."""
    found: dict[K, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found
