"""Expansions with a guard term, in which elementary functions are evaluated.

A function of n terms is evaluated in m = n + 1 terms of the same base. The operations cost less
than in `networks.py`: operands and results lie near 1, so that nothing overflows, and the error of
an operation, a few u^m, lies far below the last term of the function's result. Only `finish`
returns normalized terms. All operations are additions, products and quotients of the base. So
float32 needs no float64, and compiled code has the bits of eager PyTorch.

References:

- D: T. J. Dekker, "A floating-point technique for extending the available precision", Numerische
  Mathematik 18, 1971.
- ORO: T. Ogita, S. M. Rump, S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26(6),
  2005.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mcftensor.arithmetic import eft, networks
from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.wide.exact_constants import Constant, floats_of, log2_of

Terms = tuple[Tensor, ...]

SPARE = 20
"""Bits of an evaluation beyond those of the result."""


def precision_of(x: Tensor) -> int:
    """Significand bits of a term."""
    return BASES[x.dtype].precision


def constant(value: float, like: Tensor) -> Tensor:
    """A 0-d tensor of the base of `like`."""
    return torch.scalar_tensor(value, dtype=like.dtype, device=like.device)


def constants(value: Constant, count: int, like: Tensor) -> Terms:
    """A constant as `count` terms."""
    return tuple(constant(x, like) for x in floats_of(value, precision_of(like), count))


# ------------------------------------------------------------------------------------ operations


def two_prod(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The product and its error, without the scaling that large operands need (D)."""
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    product = a * b
    return product, al * bl - (((product - ah * bh) - al * bh) - ah * bl)


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    c = a * (2.0 ** ((precision_of(a) + 1) // 2) + 1)
    high = c - (c - a)
    return high, a - high


def gathered(values: Sequence[Tensor], count: int) -> Terms:
    """Sum values, given roughly in descending order, to `count` terms.

    Each pass of two_sums from the last value to the first gathers the next term (ORO's VecSum).
    """
    x = list(values)
    for first in range(min(count, len(x) - 1)):
        for i in range(len(x) - 1, first, -1):
            x[i - 1], x[i] = networks.two_sum(x[i - 1], x[i])
    x += [torch.zeros_like(x[0])] * (count - len(x))
    return tuple(x[:count])


def _by_levels(levels: list[list[Tensor]], count: int) -> Terms:
    """Sum values listed by powers of u; exact up to the last level."""
    sums: list[Tensor] = []
    for level, values in enumerate(levels[:count]):
        if not values:
            continue
        total, *others = values
        for value in others:
            if level + 1 < count:
                total, error = networks.two_sum(total, value)
                levels[level + 1].append(error)
            else:
                total = total + value
        sums.append(total)
    return gathered(sums, count)


def add(x: Terms, y: Terms, count: int) -> Terms:
    """x + y, with an error of a few u^count of the larger one."""
    levels: list[list[Tensor]] = [[] for _ in range(count + 1)]
    for z in (x, y):
        for level, term in enumerate(z[:count]):
            levels[level].append(term)
    return _by_levels(levels, count)


def mul(x: Terms, y: Terms, count: int) -> Terms:
    """x * y, with an error of a few u^count."""
    levels: list[list[Tensor]] = [[] for _ in range(count + 1)]
    for i, a in enumerate(x[:count]):
        for j, b in enumerate(y[: count - i]):
            if i + j + 1 == count:
                levels[i + j].append(a * b)
            else:
                product, error = two_prod(a, b)
                levels[i + j].append(product)
                levels[i + j + 1].append(error)
    return _by_levels(levels, count)


def times(x: Terms, factor: float | Tensor) -> Terms:
    """x times a power of two."""
    return tuple(term * factor for term in x)


def neg(x: Terms) -> Terms:
    """-x."""
    return tuple(-term for term in x)


def size_of(x: Terms) -> Terms:
    """|x|."""
    return where(torch.signbit(x[0]), neg(x), x)


def sub(x: Terms, y: Terms, count: int) -> Terms:
    """x - y, with an error of a few u^count of the larger one."""
    return add(x, neg(y), count)


def div(x: Terms, y: Terms, count: int) -> Terms:
    """x / y by long division, with an error of a few u^count."""
    digits: list[Tensor] = []
    rest = x
    for i in range(count):
        digit = rest[0] / y[0]
        digits.append(digit)
        if i + 1 < count:
            rest = sub(rest, mul((digit,), y, count), count)
    return gathered(digits, count)


def sqrt(x: Terms, count: int) -> Terms:
    """The square root of a number above 0, by Newton steps, with an error of a few u^count."""
    leading = eft.sqrt(x[0])
    root: Terms = (leading,)
    for _ in range(count - 1):
        rest = sub(x, mul(root, root, count), count)
        root = gathered([*root, rest[0] / (leading + leading)], len(root) + 1)
    return root


def where(condition: Tensor, x: Terms, y: Terms) -> Terms:
    """x where the condition holds, else y; missing terms are zero."""
    count = max(len(x), len(y))
    x, y = ((*z, *[torch.zeros_like(z[0])] * (count - len(z))) for z in (x, y))
    return tuple(torch.where(condition, a, b) for a, b in zip(x, y, strict=True))


def finish(x: Terms, terms: int, plain: Tensor) -> Terms:
    """Return normalized terms, or the plain result where it is zero or not finite.

    Tails more than 12 bits below the last of these terms are noise. They are replaced by zero, so
    that integer results are exact.
    """
    leading, *tails = x
    least = leading.abs() * 2.0 ** -(terms * precision_of(leading) + 12)
    tails = [torch.where(term.abs() < least, 0.0, term) for term in tails]
    decides = (plain == 0) | ~torch.isfinite(plain)
    values = [torch.where(decides, plain, leading), *(torch.where(decides, 0.0, t) for t in tails)]
    return networks.replace_nonfinite(networks.distill(values, terms), plain)


# ------------------------------------------------------------------------- integers and exponents


def _magic(like: Tensor) -> float:
    return 1.5 * 2.0 ** (precision_of(like) - 1)


def to_integer(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest integer of a number below 2^(p - 2), and a pattern that ends with it."""
    shifted = x + _magic(x)
    return shifted - _magic(x), shifted.view(BASES[x.dtype].integer)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, for integer exponents of normal numbers."""
    base = BASES[exponent.dtype]
    shifted = exponent + (_magic(exponent) + base.max_exponent)
    return (shifted.view(base.integer) << (base.precision - 1)).view(exponent.dtype)


def scaled(x: Terms, exponent: Tensor) -> Terms:
    """x * 2^exponent, even where 2^exponent is out of range."""
    half, _ = to_integer(exponent * 0.5)
    return times(times(x, power_of_two(half)), power_of_two(exponent - half))


def exponent_of(x: Tensor) -> Tensor:
    """The exponent e of normal numbers x, with 2^e <= |x| < 2^(e + 1)."""
    base = BASES[x.dtype]
    bits = (x.abs().view(base.integer) >> (base.precision - 1)) - base.max_exponent
    return bits.to(x.dtype)


# --------------------------------------------------------------------- tables and polynomials


def chosen(table: Sequence[Constant], bits: Tensor, count: int, like: Tensor) -> Terms:
    """Look up entries of a table of at most 2^k constants by the last k bits of `bits`."""
    entries = [floats_of(value, precision_of(like), count) for value in table]
    masks = [(bits & (1 << i)) != 0 for i in range((len(table) - 1).bit_length())]
    return tuple(_chosen([x[i] for x in entries], masks, like) for i in range(count))


def _chosen(values: Sequence[float], masks: Sequence[Tensor], like: Tensor) -> Tensor:
    found = [constant(x, like) for x in values]
    for mask in masks:
        last = found[len(found) & ~1 :]
        pairs = zip(found[::2], found[1::2], strict=False)
        found = [*(torch.where(mask, b, a) for a, b in pairs), *last]
    return found[0]


Coefficients = Callable[[int, Base, int], Sequence[Constant]]
"""The coefficients of a power in each of some polynomials, for a base and a number of terms."""


def polynomial(
    x: Terms,
    coefficients: Coefficients,
    log2_x: float,
    terms: int,
    bits: Tensor | None = None,
) -> Terms:
    """Sum c_k x^k for |x| <= 2^log2_x, to the bits that a function of `terms` terms needs.

    The last bits of `bits` choose one of several polynomials. One of the first two parts of a sum
    must have its magnitude.
    """
    like = x[0]
    rows, widths = _affecting(coefficients, log2_x, BASES[like.dtype], terms)

    def coefficient(k: int) -> Terms:
        if bits is None:
            return constants(rows[k][0], widths[k], like)
        return chosen(rows[k], bits, widths[k], like)

    total = coefficient(len(rows) - 1)
    for k in range(len(rows) - 2, -1, -1):
        total = add(coefficient(k), mul(x, total, widths[k + 1]), widths[k])
    return total


@functools.lru_cache(maxsize=64)
def _affecting(
    coefficients: Coefficients, log2_x: float, base: Base, terms: int
) -> tuple[list[Sequence[Constant]], list[int]]:
    """Return the coefficients that affect the result, and the number of terms that each needs."""
    wanted = terms * base.precision + SPARE
    first = [[log2_of(c) + k * log2_x for c in coefficients(k, base, terms)] for k in range(2)]
    sizes = list(map(max, *first))
    rows: list[Sequence[Constant]] = []
    parts: list[float] = []
    while len(rows) < 3 or max(parts[-2:]) > -wanted:
        row = coefficients(len(rows), base, terms)
        own = [log2_of(c) + len(rows) * log2_x for c in row]
        parts.append(max(part - size for part, size in zip(own, sizes, strict=True)))
        rows.append(row)
    while parts[-1] <= -wanted:
        parts.pop()
        rows.pop()
    widths = [
        min(max(math.ceil((wanted + max(parts[k:])) / base.precision), 1), terms + 1)
        for k in range(len(parts))
    ]
    return rows, widths
