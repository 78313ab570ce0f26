"""The comparison of compiled code with eager PyTorch before its first use, on hard operands.

If compiled code has other bits, or does not run, eager PyTorch is used, with one warning.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mcftensor.kernels import eager
from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.columns import Columns, Scalar
from mcftensor.kernels.program import PATTERNS, Body, Program, Signature
from mcftensor.kernels.without_float64 import widest

# Elements of the sets of tensors: whole blocks of a GPU's threads, and a partial block.
LENGTHS = (1024, 512)

Launch = Callable[[list[int], Sequence[list[int]], Sequence[Sequence[Scalar]]], None]
"""A call of compiled code on tensors with these lengths and addresses, by columns, and scalars."""


class Arrangement(NamedTuple):
    """The properties of operands by which compiled code differs."""

    device: torch.device = torch.device("cpu")
    there: tuple[bool, ...] = ()
    """Which scalars are tensors on the device."""
    aligned: bool = True
    """Whether all addresses are multiples of 16."""
    own: bool = False
    """Whether each set of tensors has its scalars."""


def is_right(body: Body, program: Program, launch: Launch, arrangement: Arrangement) -> bool:
    """Whether compiled code gives the bits of eager PyTorch on the CPU.

    The comparison is with the CPU, since eager PyTorch on GPUs may have other bits: it multiplies
    by the reciprocal of a divisor that is a number of the host.
    """
    if any(map(program.is_undefined, program.instructions)):
        return True  # processors differ on such operands
    calls = _calls(program.signature, arrangement._replace(device=Arrangement().device))
    expected: list[Tensor] = []
    for call in map(eager.flat, calls):
        is_packed = len(call.vectors) in call.packed
        index, scalars = eager.indices(call.outputs[0][0], is_packed), [x for (x,) in call.scalars]
        expected += body([x for (x,) in call.vectors], scalars, index)
    calls = _calls(program.signature, arrangement)
    addresses = [[x.data_ptr() for x in column] for column in (*calls.vectors, *calls.outputs)]
    launch([*LENGTHS], addresses, calls.scalars)
    got = [x for call in map(eager.flat, calls) for (x,) in call.outputs]
    return all(are_alike(x.cpu(), y.to(x.dtype)) for x, y in zip(got, expected, strict=True))


def _calls(signature: Signature, arrangement: Arrangement) -> Columns:
    """Return calls with hard operands, and outputs with other contents."""
    dtypes, count = (*signature.vectors, *signature.outputs), len(signature.vectors)
    made = Columns([], [], [], (), signature.shared, packed=signature.packed)
    columns = [hard_vectors(x, i, made.per_block(i), arrangement) for i, x in enumerate(dtypes)]
    scalars = [_scalars(x, i, arrangement) for i, x in enumerate(signature.scalars)]
    return dataclasses.replace(
        made, vectors=columns[:count], scalars=scalars, outputs=columns[count:]
    )


def hard_numbers(dtype: torch.dtype, number: int, count: int) -> Tensor:
    """Return `count` numbers of a dtype; they differ by `number`.

    Half of them are random patterns: of all magnitudes, subnormal, infinite and NaN. The other half
    have similar sizes, so that sums and products are rounded.
    """
    generator = torch.Generator().manual_seed(number)
    bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu")
    x = bits > 0 if dtype == torch.bool else bits.to(PATTERNS[dtype.itemsize]).view(dtype)
    if dtype.is_floating_point:
        exponents = bits[::2] % 16 - 8
        half = x[::2]
        wide = widest()
        half.copy_(torch.ldexp(bits[1::2].to(wide) * 2.0**-63, exponents)[: len(half)])
    return x


def hard_vectors(
    dtype: torch.dtype, number: int, per_block: int, arrangement: Arrangement
) -> list[Tensor]:
    """Return hard numbers for each set, with some number of values for a block.

    In the second set floats are positive and of similar sizes, as programs for usual numbers need.
    """
    whole, part = [length // BLOCK_SIZE * per_block for length in LENGTHS]
    x = hard_numbers(dtype, number, (sum(LENGTHS) // BLOCK_SIZE + 1) * per_block)
    if dtype.is_floating_point:
        x[whole:] = x[::2].abs()[: len(x) - whole]
    x = x.to(arrangement.device)[0 if arrangement.aligned else 1 :]
    return [x[:whole], x[whole : whole + part]]


def _scalars(dtype: torch.dtype, number: int, arrangement: Arrangement) -> list[Scalar]:
    """Return one scalar of a dtype, or one per set; a float64 may be a Python number."""
    is_there = number < len(arrangement.there) and arrangement.there[number]
    numbers: list[Scalar] = []
    for i in range(number, number + (len(LENGTHS) if arrangement.own else 1)):
        value = 0x9E3779B97F4A7C1 + i if dtype == torch.int64 else 1 / (i + 3)
        if dtype == torch.float64 and not is_there:
            numbers.append(value)
        else:
            x = torch.tensor(value, dtype=dtype, device="cpu")
            numbers.append(x.to(arrangement.device) if is_there else x)
    return numbers


def are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether numbers are equal, including signs of zeros; all NaNs are equal."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


_SAID: set[str] = set()


def say_eager(where: str, reason: str) -> None:
    """Warn once that eager PyTorch computes from now on.

    Reasons are not compared, since they contain names of temporary files. If warnings are errors,
    each call raises.
    """
    if where not in _SAID:
        warnings.warn(
            f"mcftensor runs without compiled code on {where}, several times slower: {reason}",
            stacklevel=2,
        )
        _SAID.add(where)
