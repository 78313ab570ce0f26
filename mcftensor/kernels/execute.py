"""The choice of how a function runs, on which tensors together, and its launch on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcftensor.kernels import cpp, cpu, cuda, eager, first_use
from mcftensor.kernels.block_scales import BLOCK_SIZE, shape_of_codes, shape_of_shared
from mcftensor.kernels.columns import (
    Columns,
    Scalar,
    places,
    places_of,
    repeated,
)
from mcftensor.kernels.cpp import GRAIN
from mcftensor.kernels.facts import facts_of
from mcftensor.kernels.program import Body, Program, Signature, record
from mcftensor.kernels.without_float64 import (
    CONTEXTS,
    Pieces,
    has_float64,
    pieces,
    run_without_float64,
)

# The number of elements that a call on one set of tensors counts as. In eager PyTorch an AdamW step
# of one element takes the time of 5,000 to 28,000 elements.
OF_A_CALL = 1 << 13

LOCK = threading.RLock()
"""Held while components are written or copied, and while a tape is, since another thread may read
its tensors: it gets the numbers before or after a write, and never some terms of both."""

if hasattr(os, "register_at_fork"):  # a thread that holds the lock does not exist in the child
    os.register_at_fork(
        before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )

# Device types on which Triton kernels run.
TRITON_DEVICES = ["cuda"]


_call: Callable[[partial[None]], None] = partial.__call__


def prepared(
    function: cpu.Launch,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Scalar]],
    dtypes: Sequence[torch.dtype],
    widths: list[int] | None = None,
) -> partial[None]:
    """Return compiled code as a call on dense tensors and scalars.

    Lengths and addresses of tensors are given by columns, scalars by their dtypes. If blocks share
    components, `widths` are the lengths of rows, and `lengths` those of rows of whole blocks.
    """
    count = len(lengths)
    words, numbers = array("q", lengths), array("d")
    for column_of_words in addresses if widths is None else (*addresses, widths):
        words.fromlist(column_of_words)
    for dtype, column in zip(dtypes, scalars, strict=True):
        values = [x if type(x) is float or not isinstance(x, Tensor) else x.item() for x in column]
        times = count // len(values)  # a single value serves all sets
        if dtype == torch.int64:
            words.fromlist([*map(int, values)] * times)
        else:
            numbers.fromlist(values * times)
    worth = sum(lengths) // GRAIN
    threads = min(torch.get_num_threads(), worth) if worth > 1 else 1
    call = partial(function, words.buffer_info()[0], numbers.buffer_info()[0], count, threads)
    call.holds = words, numbers  # type: ignore[attr-defined]
    return call


def launch(
    function: cpu.Launch,
    lengths: list[int],
    addresses: Sequence[list[int]],
    scalars: Sequence[Sequence[Scalar]],
    dtypes: Sequence[torch.dtype],
    widths: list[int] | None = None,
    done: list[tuple[int, None]] | None = None,
) -> None:
    """Run a prepared call, and record its elements in `done`, as in `Columns`."""
    call = prepared(function, lengths, addresses, scalars, dtypes, widths)
    if done is None:
        call()
    else:
        done.extend(zip((sum(lengths),), map(_call, (call,)), strict=True))


class Kernel(cpu.OnDemand):
    """A function compiled for one signature, or to be compiled."""

    def __init__(self, body: Body, signature: Signature) -> None:
        super().__init__(self._source_here, self._is_right_here)
        self.body, self.signature = body, signature

    def run(self, columns: Columns, lengths: list[int], addresses: Sequence[list[int]]) -> None:
        """Run on dense tensors with these lengths and addresses, by columns."""
        device = columns.outputs[0][0].device
        scalars = columns.every_scalar() if columns.keys else columns.scalars
        has_data = 0 not in itertools.chain.from_iterable(addresses)  # false for meta tensors
        if has_data and device.type == "cpu" and "cpu" not in TRITON_DEVICES:
            compiled = self.compiled(sum(lengths), len(lengths))
            if compiled is not None:
                dtypes = self.signature.scalars
                widths = lengths if columns.shared else None
                launch(compiled, lengths, addresses, scalars, dtypes, widths, columns.done)
                return
        elif (
            has_data
            and device.type in TRITON_DEVICES
            and cuda.is_available()
            and self.has_program
            and cuda.launch(self.program, lengths, addresses, scalars, device, self._is_right)
        ):
            if columns.done is not None:
                columns.done.append((sum(lengths), None))
            return
        eager.run(self.body, columns)

    def run_rows(
        self, columns: Columns, lengths: list[int], addresses: Sequence[list[int]]
    ) -> bool:
        """Run on contiguous tensors whose rows may end in a part of a block, if there is compiled
        code for that, and return whether there is.
        """
        device = columns.outputs[0][0].device
        if device.type != "cpu" or "cpu" in TRITON_DEVICES:
            return False
        compiled = self.compiled(sum(lengths), len(lengths))
        if compiled is None:
            return False
        tensors = [*columns.vectors, *columns.outputs]
        whole = [i for i in range(len(tensors)) if columns.per_block(i) == BLOCK_SIZE]
        shapes = [x.shape if whole else shape_of_codes(x.shape) for x in tensors[min(whole or [0])]]
        blocks = [shape_of_shared(shape).numel() for shape in shapes]
        if any(list(map(Tensor.numel, tensors[i])) != blocks for i in columns.shared):
            return False
        padded, widths = [BLOCK_SIZE * x for x in blocks], [shape[1:].numel() for shape in shapes]
        scalars, dtypes = columns.every_scalar(), self.signature.scalars
        launch(compiled, padded, addresses, scalars, dtypes, widths)
        return True

    def compiled(self, elements: int, calls: int = 1) -> cpu.Launch | None:
        """Return the compiled form, if work so far is worth it and there is a compiler."""
        return self.get(elements + OF_A_CALL * calls)

    def _source_here(self) -> str | None:
        return cpp.source(self.program, cpu.vector_bytes()) if self.has_program else None

    def _is_right_here(self, compiled: cpu.Launch) -> bool:
        widths = [*first_use.LENGTHS] if self.signature.shared else None
        run = partial(launch, compiled, dtypes=self.signature.scalars, widths=widths)
        return self._is_right(run, first_use.Arrangement())

    def _is_right(self, run: first_use.Launch, arrangement: first_use.Arrangement) -> bool:
        return first_use.is_right(self.body, self.program, run, arrangement)

    @functools.cached_property
    def has_program(self) -> bool:
        """Whether programs support all operations of the function; else eager PyTorch runs it."""
        try:
            return bool(self.program.instructions)
        except NotImplementedError:
            return False

    @functools.cached_property
    def program(self) -> Program:
        """The recorded function."""
        return record(self.body, self.signature)


@functools.lru_cache(maxsize=1024)  # more than any training uses
def kernel_of(body: Body, signature: Signature) -> Kernel:
    """Return the one kernel of a function for operands and results of these dtypes."""
    return Kernel(body, signature)


def run_alike(
    body: Body,
    signature: Signature,
    columns: Columns,
    lengths: list[int],
    addresses: Sequence[list[int]],
) -> None:
    """`run` for contiguous tensors of one device with known dtypes, lengths and addresses."""
    if columns.outputs[0][0].is_meta:
        return
    if not has_float64(columns.outputs[0][0].device):
        vectors, outputs = ([list(x) for x in y] for y in (columns.vectors, columns.outputs))
        run(body, dataclasses.replace(columns, vectors=vectors, outputs=outputs))
        return
    with LOCK:
        kernel_of(body, signature).run(columns, lengths, addresses)


def run(body: Body, columns: Columns) -> None:
    """Run an elementwise function on vectors and scalars, writing to the outputs.

    A function is recorded and compiled once for each combination of dtypes, so callers must pass
    the same object at every call.
    """
    if columns.outputs[0][0].is_meta:  # there is nothing to compute
        return
    with LOCK:
        if has_float64(columns.outputs[0][0].device):
            _run(body, columns)
        else:
            run_without_float64(partial(_run, *_in_pieces(body, columns)))


def _in_pieces(body: Body, columns: Columns) -> tuple[Body, Columns]:
    """Return the call with Python numbers and float64 as three float32 tensors each."""
    are_split = tuple([_is_wide(column[0]) for column in columns.scalars])
    if not any(are_split):
        return body, columns
    scalars: list[Sequence[Scalar]] = []
    for column, is_split in zip(columns.scalars, are_split, strict=True):
        split = [pieces(x.item() if isinstance(x, Tensor) else x) for x in column if is_split]
        scalars += zip(*split, strict=True) if is_split else [column]
    made = dataclasses.replace(columns, scalars=scalars)
    return _with_pieces(body, are_split), made


def _is_wide(x: Scalar) -> bool:
    return not isinstance(x, Tensor) or x.dtype == torch.float64


@functools.lru_cache(maxsize=1024)
def _with_pieces(body: Body, are_split: tuple[bool, ...]) -> Body:
    def regrouped(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Any:
        left = iter(scalars)
        found = [Pieces(*itertools.islice(left, 3)) if x else next(left) for x in are_split]
        return body(vectors, [*found, *left], index)

    return regrouped


def _run(body: Body, columns: Columns) -> None:
    tensors, outputs = places(columns.vectors, columns.outputs)
    dtypes, devices, lengths, addresses, are_contiguous = zip(*map(facts_of, tensors), strict=True)
    kinds = [_kind(column) for column in columns.every_scalar()]
    if None in dtypes or None in kinds or None in devices or len(set(devices)) > 1:
        _run_by_kind(body, columns)
        return
    count = len(columns.vectors)
    scalars = tuple([dtype for dtype, _ in kinds])  # type: ignore[misc]
    written = tuple([dtypes[i] for i in outputs])
    signature = Signature(
        dtypes[:count], scalars, written, columns.shared, not CONTEXTS.depth, packed=columns.packed
    )
    kernel = kernel_of(body, signature)
    asked = [*addresses[:count], *[addresses[i] for i in outputs]]
    place = [*range(count), *outputs]
    per_block = {place[i]: columns.per_block(i) for i in range(len(place))}
    elements = [_elements(x, per_block[i]) for i, x in enumerate(lengths)]
    own = elements[outputs[0]]
    if 0 not in own and all(are_contiguous):
        if elements.count(own) == len(lengths):
            kernel.run(columns, own, asked)
            return
        # None broadcasts: rows are read from every tensor.
        are_alike = columns.shared and all(
            x == own for i, x in enumerate(elements) if per_block[i] > 1
        )
        if are_alike and kernel.run_rows(columns, own, asked):
            return
    flat: list[int] = []
    others: list[int] = []
    for i, row in enumerate(zip(*tensors, strict=True)):
        if own[i]:
            (flat if _lie_alike(row, per_block, bool(columns.keys)) else others).append(i)
    if others:
        eager.run_whole(body, columns.only(others))
    if flat:
        own, *asked = ([column[i] for i in flat] for column in (own, *asked))
        kernel.run(columns.only(flat), own, asked)


_FLOAT = (torch.float64, None)


def _run_by_kind(body: Body, columns: Columns) -> None:
    """Run calls that differ in dtypes or devices, group by group."""
    tensors = [*columns.vectors, *columns.outputs]
    every: list[Sequence[Any]] = [[(x.dtype, x.device) for x in column] for column in tensors]
    every += [repeated([_kind([x]) for x in y], len(columns)) for y in columns.every_scalar()]
    for kinds, rows in places_of(zip(*every, strict=True)).items():
        part = columns.only(rows)
        if len({device for _, device in kinds[: len(tensors)]}) == 1:
            _run(body, part)
        else:  # PyTorch raises the error
            eager.run_whole(body, part)


def _kind(column: Sequence[Scalar]) -> tuple[torch.dtype, torch.device | None] | None:
    """Return the dtype and device of a column of scalars, or None if they differ."""
    first = column[0]
    if type(first) is float and len(column) == 1:
        return _FLOAT
    kinds = {(x.dtype, x.device) if isinstance(x, Tensor) else _FLOAT for x in column}
    return kinds.pop() if len(kinds) == 1 else None


def _elements(lengths: list[int], per_block: int) -> list[int]:
    """Return numbers of elements from lengths; shared components count whole blocks."""
    return lengths if per_block == BLOCK_SIZE else [BLOCK_SIZE // per_block * x for x in lengths]


def _lie_alike(tensors: Sequence[Tensor], per_block: dict[int, int], in_order: bool) -> bool:
    """Whether the tensors have the same layout without gaps.

    Their elements must also be in order if indices are used or blocks, which are then whole, share
    components.
    """
    counts = [BLOCK_SIZE // per_block[i] * x.numel() for i, x in enumerate(tensors)]
    first = tensors[0]
    if len(set(counts)) == 1 and all(map(Tensor.is_contiguous, tensors)):
        return True
    return (
        not in_order
        and min(per_block.values()) == BLOCK_SIZE
        and is_dense(first)
        and all(x.shape == first.shape and x.stride() == first.stride() for x in tensors)
    )


def is_dense(x: Tensor) -> bool:
    """Whether the elements, in some order of dimensions, fill their memory without gaps."""
    expected = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
