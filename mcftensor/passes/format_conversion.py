"""Conversion between formats, and to plain numbers, with one rounding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.noise import draw_key, noise_of
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.arithmetic.rounding import collapse_terms
from mcftensor.formats import Format, named
from mcftensor.kernels import LOCK, Body, Column, Columns, Signature, run, run_alike
from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.columns import Flat
from mcftensor.kernels.custom_ops import opaque
from mcftensor.kernels.eager import CHUNK, indices
from mcftensor.kernels.program import COMPUTED, PATTERNS
from mcftensor.kernels.without_float64 import (
    format_of_numbers,
    is_long_int,
    pieces,
    terms_of_int,
    widest,
)


@opaque(
    lambda stored, source, format, key: named(format).empty_like(_template(stored, source)),
    of_one=True,
)
def recode(stored: Sequence[Tensor], source: str, format: str, key: Tensor | None) -> list[Tensor]:
    """Convert components of one format to components of another."""
    s, f = named(source), named(format)
    if _are_zeros(stored):
        made = f.empty_like(s.template(stored[0]))
        return [x.fill_(zero) for x, zero in zip(made, _zero(s, f), strict=True)]
    if _is_large(stored):
        keys = [] if key is None else [key]
        made = f.empty_like(s.template(stored[0]))
        shared = s.shared | {len(stored) + i for i in f.shared}
        scalars = [[_START]] if keys else []
        packed = s.packed | {len(stored) + i for i in f.packed}
        columns = Columns(
            _columns(stored), scalars, _columns(made), keys, frozenset(shared), packed=packed
        )
        run(_recoding(s, f), columns)
        return made
    noise = None if key is None else noise_of(f.rounding, key, indices(s.template(stored[0])))
    with LOCK:
        found = f.encode(Sum(s.decode(stored)), noise)
        return [x.clone() if any(x is y for y in stored) else x for x in found]


def _template(stored: Sequence[Tensor], source: str) -> Tensor:
    return named(source).template(stored[0])


def of_number(x: float, format: Format, device: torch.device | None) -> list[Tensor]:
    """Return a Python number as components of a format, rounded to nearest."""
    source, terms = number_terms(x, device)
    return recode(terms, source, format.nearest.name, None)


def number_terms(x: float, device: torch.device | None) -> tuple[str, list[Tensor]]:
    """Return a Python number with all its bits: the name of a format, and components on the CPU.

    Everything that takes a number takes it here.
    """
    if widest(device) == torch.float32:
        return format_of_numbers(device), list(pieces(x))
    numbers, name = [x], "float64"
    if is_long_int(x):
        numbers, name = terms_of_int(int(x)), format_of_numbers(device)
    return name, [torch.scalar_tensor(y, dtype=torch.float64, device="cpu") for y in numbers]


def machine_number(x: float, device: torch.device | None = None) -> Tensor:
    """Return a Python number in float64; without it in float32, rounded to odd, to be rounded once
    more.
    """
    if widest(device) == torch.float64:
        return torch.scalar_tensor(x, dtype=torch.float64, device="cpu")
    return Sum(pieces(x)).to_odd()


def compute_tensor(stored: Sequence[Tensor], format: Format) -> Tensor:
    """Return the tensor that a model computes with, from the components of a format."""
    if format.computes_as is None:
        return stored[0]
    name, places = format.computes_as
    return collapse([stored[i] for i in places], name, format.dtype)


def decode_columns(format: Format, components: Sequence[Column], outputs: Column) -> None:
    """Decode columns of components into plain tensors."""
    body = decoding(format, outputs[0].dtype)
    _run(body, Columns(components, [], [outputs], shared=format.shared, packed=format.packed))


def encode_columns(
    format: Format,
    numbers: Column,
    components: Sequence[Column],
    keys: Column = (),
    start: int = 0,
) -> None:
    """Encode plain numbers into a format; `start` is the index of the first element."""
    first = torch.tensor(start, device="cpu") if start and keys else _START
    _run(*_encoded(format, numbers, components, keys, first))


def _run(body: Body, columns: Columns) -> None:
    every = [*columns.vectors, *columns.outputs]
    flat = next((x for x in every if isinstance(x, Flat)), None)
    if flat is None:
        run(body, columns)
        return
    vectors = tuple([x[0].dtype for x in columns.vectors])
    outputs = tuple([x[0].dtype for x in columns.outputs])
    scalars = tuple([x[0].dtype for x in columns.every_scalar()])  # type: ignore[union-attr]
    addresses = [
        x.addresses() if isinstance(x, Flat) else list(map(Tensor.data_ptr, x)) for x in every
    ]
    signature = Signature(vectors, scalars, outputs, columns.shared, packed=columns.packed)
    run_alike(body, signature, columns, list(flat.lengths), addresses)


_START = torch.tensor(0, device="cpu")


def _encoded(
    format: Format,
    numbers: Column,
    components: Sequence[Column],
    keys: Column,
    start: Tensor,
) -> tuple[Body, Columns]:
    scalars = [[start]] if keys else []
    shared, packed = (frozenset(1 + i for i in x) for x in (format.shared, format.packed))
    columns = Columns([numbers], scalars, components, keys, shared, packed=packed)
    return encoding(format, numbers[0].dtype), columns


@functools.lru_cache(maxsize=64)
def decoding(format: Format, dtype: torch.dtype) -> Body:
    """Return the body that decodes components to plain numbers."""
    return lambda vectors, scalars, index: [Sum(format.decode(vectors)).to(dtype)]


@functools.lru_cache(maxsize=64)
def _recoding(source: Format, format: Format) -> Body:
    encode = encoding(format, format.dtype)
    return lambda vectors, scalars, index: encode(source.decode(vectors), scalars, index)


def _are_zeros(stored: Sequence[Tensor]) -> bool:
    """Whether all numbers are +0, as in states before the first step; reads one element first."""
    are_plain = all(
        x.device.type == "cpu"
        and x.layout is torch.strided
        and not x.is_quantized
        and x.dtype.itemsize in PATTERNS
        for x in stored
    )
    if not are_plain or not stored[0].numel():
        return False
    patterns = [x.view(PATTERNS[x.dtype.itemsize]) for x in stored]
    return not any(x[(0,) * x.dim()].item() or x.any() for x in patterns)


@functools.lru_cache(maxsize=64)
def _zero(source: Format, format: Format) -> list[float]:
    """Return the components of +0 in a format."""
    stored = [x.zero_() for x in source.empty_like(torch.empty(1, BLOCK_SIZE, device="cpu"))]
    return [x.flatten()[0].item() for x in format.encode(Sum(source.decode(stored)), None)]


def _is_large(stored: Sequence[Tensor]) -> bool:
    """Whether a conversion is large, and of dtypes that programs compute with.

    Intermediate results of its size should not be allocated.
    """
    return stored[0].numel() > CHUNK and all(x.dtype in COMPUTED for x in stored)


def _columns(tensors: Sequence[Tensor]) -> list[Column]:
    return [[x] for x in tensors]


@functools.lru_cache(maxsize=64)
def encoding(format: Format, dtype: torch.dtype) -> Body:
    """Return the body that encodes numbers of a dtype.

    If its rounding takes a key, the scalars are the index of the first element and the key.
    """

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        noise = None
        if format.takes_key:
            start, key = scalars
            places = index.to(torch.int32) + start.to(torch.int32)
            noise = noise_of(format.rounding, key, places)
        return format.encode(Sum(vectors), noise)

    return body


@opaque(
    lambda stored, source, dtype: torch.empty_like(_template(stored, source), dtype=dtype),
    of_one=True,
)
def collapse(stored: Sequence[Tensor], source: str, dtype: torch.dtype) -> Tensor:
    """Decode components to plain floats."""
    if _is_large(stored) and dtype in COMPUTED:
        made = torch.empty_like(_template(stored, source), dtype=dtype)
        decode_columns(named(source), _columns(stored), [made])
        return made
    with LOCK:
        return collapse_terms(named(source).decode(stored), dtype)


def collapse_with_rest(stored: Sequence[Tensor], source: str) -> tuple[Tensor, Tensor]:
    """Decode terms to float64, and return what float64 lacks of their sum, too.

    The rest is zero only if nothing is lacking, and NaN if the terms are not finite. For large
    tensors it is bfloat16, and times a power of two.
    """
    if not _is_large(stored):
        number = collapse(stored, source, torch.float64)
        return number, rest_of(number, stored)
    made = [torch.empty_like(stored[0], dtype=x) for x in (torch.float64, torch.bfloat16)]
    run(_decoding_with_rest(named(source)), Columns(_columns(stored), [], _columns(made)))
    return made[0], made[1]


def rest_of(number: Tensor, stored: Sequence[Tensor]) -> Tensor:
    """Return what a float64 number lacks of the sum of terms that it is."""
    rest = stored[0] - number
    for term in stored[1:]:
        rest = rest + term
    return rest


@functools.lru_cache(maxsize=64)
def _decoding_with_rest(format: Format) -> Body:
    decode = decoding(format, torch.float64)

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        (number,) = decode(vectors, scalars, index)
        # Rests are at most 2^75. Times 2^50, the smallest are bfloat16 numbers, too.
        rest = rest_of(number, [x.to(torch.float64) for x in vectors]) * 2.0**50
        return [number, rest.to(torch.bfloat16)]

    return body


def part_of(format: Format, components: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
    """Return the components of elements that follow each other; one block a row, if it has any."""
    part = []
    for i, x in enumerate(components):
        width = BLOCK_SIZE if i in format.shared else 2 if i in format.packed else 1
        own = x.view(-1)[start // width : (start + length) // width]
        part.append(own.view(length // BLOCK_SIZE, -1) if format.shared else own)
    return part


def key_for(format: Format, device: torch.device, writes: Tensor | None = None) -> Tensor | None:
    """Return what the rounding of a format needs: a drawn key, or a count of previous writes.

    The count is `writes`, or 0 by default. The result is None for rounding to nearest.
    """
    if format.rounding == "nearest":
        return None
    if format.rounding == "stochastic":
        return draw_key(device)
    return torch.zeros((), dtype=torch.int64, device=device) if writes is None else writes
