"""Sums whose bits depend on the multiset of their terms alone.

**Grid.** The exponent range of float32 is divided into bins of W bits. A float x with 2^(E - 149)
<= |x| < 2^(E - 148) has the *code* b = 1 + floor(E / W); +0 has the code 1. Under code b the quanta
are q_j = 2^((b - 1 - j) W - 148), j = 0 to K - 1, each 2^W of the next one. By definition of the
code, |x| < q_0 2^(W - 1), and the largest term has |x| >= q_0 / 2.

**Slices.** Let T_j(x) be x / q_j rounded to the nearest integer, ties to even. The slice of x in
bin j is s_j = T_j - 2^W T_(j-1), with T_(-1) = 0. It depends on x and the bin alone, not on the
other bins that are kept. The slices telescope: the sum of s_j q_j is T_(K-1) q_(K-1), which is x
rounded once to the last quantum. And |s_j| <= 2^(W - 1), since T_(j-1) is the nearest integer.

**State.** The accumulator of a multiset of terms holds the largest code b of its terms and, for
each of the K highest bins under b, the sum of all slices in that bin. A term of a lower code has
slices of zero in bins above its own. When b grows by d, the lowest d bins are dropped entirely. The
state is a function of the multiset alone, for any order of terms and any merges: maxima and sums of
integers are associative and commutative, and dropping a bin before or after adding to it makes no
difference.

**Result.** V = the sum of T_(K-1)(x), and the result is V q_(K-1), rounded once.

**Error.** Before that rounding, each term is off by at most q_(K-1) / 2 <= 2^(-(K-1) W) M, where M
is the largest magnitude among the terms. So N terms are off by at most N 2^(-(K-1) W) M. A term
loses nothing if its last bit is at least q_(K-1); as q_(K-1) <= 2^(1 - (K-1) W) M, the result is
the exact sum, rounded once, if the last bits of all terms are at least 2^(1 - (K-1) W) M. The bound
is for finite terms; if M = 0, there is no error.

**Packing.** A sum of N slices is at most N 2^(W - 1) < 2^(F - 1) with F = W + L, where N < 2^L. K
fields of F bits and a code of 5 bits fit 64: an accumulator is one int64, and sums of slices are
sums of integers. Codes reach 1 + floor(276 / W) <= 28 for W >= 10.

**Two ways.** V < 2^53 is exact in float64, and so is every step. Without float64 the same bits come
from float32: a term times a power of two is exact, except where it rounds to zero as an integer
anyway; V is rounded to float32 to nearest or to odd. A sum is a multiple of 2^-149 as its terms
are, so that a quantum below leaves zeros at the end of V, and subnormal sums need no rounding.

**Special values.** -0 has the code 0 and no slices, and so does an empty accumulator. As in IEEE
754, the result is -0 if all terms are -0, and +0 if the terms cancel. Infinities and NaN have the
code 31: +inf adds one to the last field, -inf one to the field before, NaN one to both. So they
displace all finite terms, and infinities of both signs give NaN, in any order. A sum overflows only
if its result does.

Sources: J. Demmel and H. D. Nguyen, "Parallel reproducible summation", IEEE Transactions on
Computers 64(7), 2015 (bins on a fixed grid, kept from the largest down); W. Ahrens, J. Demmel and
H. D. Nguyen, "Algorithms for efficient reproducible floating point summation", ACM TOMS 46(3),
2020; R. M. Neal, "Fast exact summation using small and large superaccumulators", 2015,
arXiv:1505.05571.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, power_of_two
from mcftensor.arithmetic.rounding import as_floats, collapse_odd, narrow, quiet, round_to
from mcftensor.kernels.without_float64 import widest

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Supported dtypes of terms."""

MOST = 2**19 - 1
"""The largest number of terms in a sum."""

_CODE_BITS = 5
_FIELDS = 64 - _CODE_BITS
_SPECIAL = 2**_CODE_BITS - 1
_LOWEST = -149  # the exponent of the smallest float32
SHIFTER = 1.5 * 2.0**52  # added to a number below 2^51, it leaves an integer
SHIFTER_BITS = 0x4338 << 48


@dataclass(frozen=True)
class Layout:
    """The layout of accumulators for sums of up to some number of terms.

    Attributes:
        bins: K, the number of bins kept.
        width: W, the bits of a bin.
        field: F, the bits of the sum of slices in a bin.
    """

    bins: int
    width: int
    field: int

    @property
    def guaranteed(self) -> int:
        """(K - 1) W: the error of a term is at most 2^-((K - 1) W) times the largest magnitude."""
        return (self.bins - 1) * self.width


@functools.lru_cache(maxsize=64)
def layout_of(count: int) -> Layout:
    """Return the layout for sums of `count` terms with the largest (K - 1) W that fits 64 bits.

    Raises:
        ValueError: if `count` is below 1 or above `MOST`.
    """
    if not 1 <= count <= MOST:
        raise ValueError(f"order-free sums have 1 to {MOST} terms, not {count}")
    room = count.bit_length()
    layouts = [Layout(k, min(_FIELDS // k - room, 52 // k), _FIELDS // k) for k in (2, 3)]
    return max(layouts, key=lambda x: x.guaranteed)


# The four bodies are cached, since each call must return the same object.


@functools.lru_cache(maxsize=64)
def add_body(layout: Layout) -> Any:
    """Return a body (accumulator, *terms) -> accumulator that adds the terms."""
    return lambda vectors, scalars, index: [_add(vectors[0], vectors[1:], layout)]


@functools.lru_cache(maxsize=64)
def merge_body(layout: Layout) -> Any:
    """Return a body (*accumulators) -> accumulator that adds the accumulators."""
    return lambda vectors, scalars, index: [_merge(vectors, layout)]


@functools.lru_cache(maxsize=64)
def round_body(layout: Layout, dtype: torch.dtype) -> Any:
    """Return a body (accumulator) -> float that rounds the sum once to `dtype`."""
    return lambda vectors, scalars, index: [_round(vectors[0], layout, dtype)]


@functools.lru_cache(maxsize=64)
def sum_body(layout: Layout, dtype: torch.dtype) -> Any:
    """Return a body (*terms) -> float that equals `round_body` of an accumulator of the terms."""
    return lambda vectors, scalars, index: [_sum(vectors, layout, dtype)]


def _add(accumulator: Tensor, terms: Sequence[Tensor], layout: Layout) -> Tensor:
    code, fields = _unpacked(accumulator)
    wide = [x.to(widest(x.device)) for x in terms]
    codes = [_code_of(x, layout) for x in wide]
    highest = functools.reduce(torch.maximum, codes, code)
    total = _dropped(fields, highest - code, layout)
    power = 148 - (highest - layout.bins) * layout.width
    for x in wide:
        total = total + _slices(x, power, layout)
    return _packed(highest, total)


def _merge(accumulators: Sequence[Tensor], layout: Layout) -> Tensor:
    parts = [_unpacked(x) for x in accumulators]
    highest = functools.reduce(torch.maximum, [code for code, _ in parts])
    dropped = [_dropped(fields, highest - code, layout) for code, fields in parts]
    return _packed(highest, functools.reduce(torch.add, dropped))


def _round(accumulator: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    code, fields = _unpacked(accumulator)
    sums = []
    for _ in range(layout.bins):
        low = _lowest_of(fields, layout)
        sums.append(low)
        fields = (fields - low) >> layout.field
    total = sums[-1]
    for low in reversed(sums[:-1]):
        total = (total << layout.width) + low
    power = (code - layout.bins) * layout.width - 148
    value = _scaled(total, power, dtype)
    negative, positive = sums[1] != 0, sums[0] != 0
    special = torch.where(positive, torch.where(negative, torch.nan, torch.inf), -torch.inf)
    value = torch.where(code == _SPECIAL, special.to(value.dtype), value)
    value = torch.where(code == 0, -0.0, value)
    return round_to(value, dtype)


def _sum(terms: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    """Sum terms without an accumulator.

    The codes of all terms are known, so their rounded values are added in float64, where every
    partial sum is exact. Two 16-bit terms need a single float32 addition.
    """
    singles = [x.to(torch.float32) for x in terms]
    if len(terms) == 2 and {x.dtype for x in terms} == {dtype} and _is_one_addition(layout, dtype):
        return quiet(singles[0] + singles[1]).to(dtype)
    if widest(singles[0].device) == torch.float32:
        none = torch.zeros_like(singles[0], dtype=torch.int64)
        return _round(_add(none, terms, layout), layout, dtype)
    largest = functools.reduce(torch.maximum, [x.abs() for x in singles])
    exponent = _exponent_of(largest.to(torch.float64)).to(torch.int32)
    lowest = (_bin_of(exponent, layout) - layout.bins) * layout.width - 148
    scale = power_of_two(-lowest, torch.float64)
    scaled = [(x.to(torch.float64) * scale + SHIFTER) - SHIFTER for x in terms]
    total = functools.reduce(torch.add, scaled) * power_of_two(lowest, torch.float64)
    # The result for zeros, infinities and NaN. The factor keeps finite partial sums from overflow.
    plain = quiet(functools.reduce(torch.add, [x * 2.0**-24 for x in singles]))
    is_finite = (largest > 0) & (largest < torch.inf)
    if {dtype, *(x.dtype for x in terms)} == {torch.bfloat16}:
        # A subnormal sum is a multiple of the smallest bfloat16 number, so it needs no rounding.
        bits = total.view(torch.int64)
        bits = (bits + ((1 << 44) - 1) + ((bits >> 45) & 1)) & -(1 << 45)
        single = bits.view(torch.float64).to(torch.float32)
        return narrow(torch.where(is_finite, single, plain), dtype)
    return round_to(torch.where(is_finite, total, plain.to(torch.float64)), dtype)


def _is_one_addition(layout: Layout, dtype: torch.dtype) -> bool:
    """Whether the sum of two terms of `dtype` is their float32 sum, rounded to `dtype`.

    Let p be the precision of the dtype, |b| <= |a| and 2^e <= |a| < 2^(e+1). Then q_(K-1) <=
    2^(1-g+e), with g = (K - 1) W, so a is a multiple of q_(K-1) if g >= p. If b is a multiple too,
    V q_(K-1) is the exact sum. If not, the last bit of b is below q_(K-1). Then b, before and after
    rounding to q_(K-1), is at most 2^(p-1) q_(K-1) <= 2^(p-g+e). With g >= 2p + 1 that is at most
    2^(e-p-1): a quarter of an ulp of a, and half of the next smaller ulp. So a + b rounds to a
    either way, also if a is a power of two, which is even.

    So the result is a + b, rounded once. Rounding a + b to the 24 bits of float32 first changes
    nothing if 24 >= 2p + 2 (S. A. Figueroa, "When is double rounding innocuous?", 1995).
    """
    precision = BASES[dtype].precision
    return 2 * precision + 2 <= 24 and layout.guaranteed >= 2 * precision + 1


# ------------------------------------------------------------------------------------- of terms


def _exponent_of(x: Tensor) -> Tensor:
    """E of a magnitude; 0 for the smallest float32 and for zero."""
    if x.dtype == torch.float64:
        field = (x.view(torch.int64) >> 52) & 0x7FF
        return torch.maximum(field - (1023 + _LOWEST), torch.zeros_like(field))
    is_small = x.abs() < 2.0**-100
    raised = torch.where(is_small, x * 2.0**49, x)  # no subnormal number
    field = ((raised.view(torch.int32) >> 23) & 0xFF).to(torch.int64)
    field = field - torch.where(is_small, 127 + _LOWEST + 49, 127 + _LOWEST)
    return torch.maximum(field, torch.zeros_like(field))


def _bin_of(exponent: Tensor, layout: Layout) -> Tensor:
    """1 + floor(E / W) of finite numbers, by a multiplication that is exact for E below 2^11."""
    return ((exponent * (2**22 // layout.width + 1)) >> 22) + 1


def _code_of(x: Tensor, layout: Layout) -> Tensor:
    code = _bin_of(_exponent_of(x), layout)
    code = torch.where(x.abs() < torch.inf, code, _SPECIAL)
    return torch.where((x == 0) & torch.signbit(x), 0, code)


def _slices(x: Tensor, power: Tensor, layout: Layout) -> Tensor:
    """The packed slices of a term under a code; 1 / q_(K-1) is two to a power."""
    scaled = _times_power(torch.nan_to_num(x, 0.0, 0.0, 0.0), power)
    width, field = layout.width, layout.field
    total = nearest_integer(scaled)
    for j in range(1, layout.bins):
        coarse = nearest_integer(scaled * 2.0 ** (-j * width))
        total = total + (coarse << (j * field)) - (coarse << ((j - 1) * field + width))
    negative = torch.where(x == torch.inf, 0, 1 << field)
    positive = torch.where(x == -torch.inf, 0, 1)
    return torch.where(x.abs() < torch.inf, total, negative + positive)


def nearest_integer(x: Tensor) -> Tensor:
    """Round a float below 2^51 to an integer, ties to even."""
    if x.dtype == torch.float64:
        return (x + SHIFTER).view(torch.int64) - SHIFTER_BITS
    size = x.abs()
    size = torch.where(size < 2.0**23, (size + 2.0**23) - 2.0**23, size)
    return torch.copysign(size, x).to(torch.int64)


def _times_power(x: Tensor, power: Tensor) -> Tensor:
    """Return x times two to a power, exactly where the result is normal."""
    if x.dtype == torch.float64:
        return x * power_of_two(power, torch.float64)
    power = torch.maximum(power, torch.full_like(power, -252))  # lower under the code of infinities
    half = power >> 1
    for part in (half, power - half):
        x = x * power_of_two(part, torch.float32)
    return x


def _scaled(total: Tensor, power: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an integer times two to a power, in a type that is rounded to `dtype` once more."""
    if widest(total.device) == torch.float64:
        return total.to(torch.float64) * power_of_two(power, torch.float64)
    is_single = dtype == torch.float32
    single = total.to(torch.float32) if is_single else collapse_odd(as_floats(total))
    return _times_power(single, power)


# ------------------------------------------------------------------------------ of accumulators


def _unpacked(accumulator: Tensor) -> tuple[Tensor, Tensor]:
    code = (accumulator >> _FIELDS) & _SPECIAL
    return code, (accumulator << _CODE_BITS) >> _CODE_BITS


def _packed(code: Tensor, fields: Tensor) -> Tensor:
    return (code << _FIELDS) | (fields & (2**_FIELDS - 1))


def _lowest_of(fields: Tensor, layout: Layout) -> Tensor:
    return (fields << (64 - layout.field)) >> (64 - layout.field)


def _dropped(fields: Tensor, count: Tensor, layout: Layout) -> Tensor:
    """Drop the `count` lowest fields."""
    kept = torch.where(count == 0, fields, 0)
    for i in range(1, layout.bins):
        fields = (fields - _lowest_of(fields, layout)) >> layout.field
        kept = torch.where(count == i, fields, kept)
    return kept
