"""Numbers with a guard term, in which elementary functions are evaluated.

A function of n terms is evaluated in n + 1 terms of the same base. The operations cost less than in
`networks.py`: operands and results lie near 1, so that nothing overflows, and the error of an
operation, a few u^(n + 1), lies far below the last term of the function's result. Only `finish`
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
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic import eft, networks
from mcftensor.arithmetic.base_types import BASES, Base
from mcftensor.wide.exact_constants import Constant, floats_of, log2_of

Terms = tuple[Tensor, ...]

SPARE = 20
"""Bits of an evaluation beyond those of the result."""


class Guarded:
    """A number as terms of a base, leading term first.

    The results of operations have `count` terms, and operands at most as many. Other operands are
    floats of the base, as tensors or Python numbers, and fractions.
    """

    __slots__ = ("count", "terms")

    def __init__(self, terms: Sequence[Tensor], count: int) -> None:
        self.terms, self.count = tuple(terms), count

    @property
    def leading(self) -> Tensor:
        """The leading term."""
        return self.terms[0]

    @property
    def base(self) -> Base:
        """The base of the terms."""
        return BASES[self.leading.dtype]

    @property
    def bits(self) -> int:
        """The bits to which constants are needed."""
        return self.count * self.base.precision + 32

    @property
    def wanted(self) -> int:
        """The bits of an evaluation."""
        return (self.count - 1) * self.base.precision + SPARE

    def like(self, terms: Sequence[Tensor]) -> Guarded:
        """Terms as a number that is computed to as many terms."""
        return Guarded(terms, self.count)

    def of(self, value: Guarded | Tensor | Constant | Callable[[int], Fraction]) -> Guarded:
        """An operand as a number; a function of a number of bits is a constant."""
        if isinstance(value, Guarded):
            return value
        if isinstance(value, Tensor):
            return self.like([value])
        if isinstance(value, (int, float)):
            return self.like([constant(value, self.leading)])
        exact = value if isinstance(value, Fraction) else value(self.bits)
        floats = floats_of(exact, self.base.precision, self.count)
        return self.like([constant(x, self.leading) for x in floats])

    def chosen(self, table: Sequence[Constant], bits: Tensor) -> Guarded:
        """The entry of a table at each element, by the last bits of `bits`."""
        return self.like(chosen(table, bits, self.count, self.leading))

    def __neg__(self) -> Guarded:
        return self.like([-x for x in self.terms])

    def __abs__(self) -> Guarded:
        return where(torch.signbit(self.leading), -self, self)

    def __add__(self, y: Guarded | Tensor | Constant) -> Guarded:
        """x + y, with an error of a few u^count of the larger one."""
        return self.like(_sum(self.terms, self.of(y).terms, self.count))

    __radd__ = __add__

    def __sub__(self, y: Guarded | Tensor | Constant) -> Guarded:
        return self + -self.of(y)

    def __rsub__(self, y: Tensor | Constant) -> Guarded:
        return self.of(y) + -self

    def __mul__(self, y: Guarded | Tensor | Constant) -> Guarded:
        """x * y, with an error of a few u^count."""
        return self.like(_product(self.terms, self.of(y).terms, self.count))

    __rmul__ = __mul__

    def __truediv__(self, y: Guarded | Tensor | Constant) -> Guarded:
        """x / y by long division, with an error of a few u^count."""
        y, digits, rest = self.of(y), [], self
        for i in range(self.count):
            digit = rest.leading / y.leading
            digits.append(digit)
            if i + 1 < self.count:
                rest = rest - y.of(digit) * y
        return self.like(gathered(digits, self.count))

    def __rtruediv__(self, y: Tensor | Constant) -> Guarded:
        return self.of(y) / self

    def sqrt(self) -> Guarded:
        """The square root of a number above 0, by Newton steps, with an error of a few u^count."""
        leading = eft.sqrt(self.leading)
        root = self.like([leading])
        for _ in range(self.count - 1):
            rest = self - root * root
            terms = [*root.terms, rest.leading / (leading + leading)]
            root = self.like(gathered(terms, len(terms)))
        return root

    def times(self, factor: float | Tensor) -> Guarded:
        """The number times a power of two."""
        return self.like([x * factor for x in self.terms])

    def scaled(self, exponent: Tensor) -> Guarded:
        """The number times 2^exponent, even where 2^exponent is out of range."""
        half, _ = to_integer(exponent * 0.5)
        return self.times(power_of_two(half)).times(power_of_two(exponent - half))


def constant(value: float, like: Tensor) -> Tensor:
    """A 0-d tensor of the base of `like`."""
    return torch.scalar_tensor(value, dtype=like.dtype, device=like.device)


def where(
    condition: Tensor, x: Guarded | Tensor | Constant, y: Guarded | Tensor | Constant
) -> Guarded:
    """x where the condition holds, else y; missing terms are zero."""
    like = x if isinstance(x, Guarded) else y
    assert isinstance(like, Guarded)
    rows = [like.of(z).terms for z in (x, y)]
    count = max(map(len, rows))
    rows = [(*z, *[torch.zeros_like(z[0])] * (count - len(z))) for z in rows]
    return like.like([torch.where(condition, a, b) for a, b in zip(*rows, strict=True)])


def finish(x: Guarded, plain: Tensor) -> Terms:
    """Return normalized terms, or the plain result where it is zero or not finite.

    Tails more than 12 bits below the last of these terms are noise. They are replaced by zero, so
    that integer results are exact.
    """
    leading, *tails = x.terms
    terms = x.count - 1
    least = leading.abs() * 2.0 ** -(terms * x.base.precision + 12)
    tails = [torch.where(term.abs() < least, 0.0, term) for term in tails]
    decides = (plain == 0) | ~torch.isfinite(plain)
    values = [torch.where(decides, plain, leading), *(torch.where(decides, 0.0, t) for t in tails)]
    return networks.replace_nonfinite(networks.distill(values, terms), plain)


# ------------------------------------------------------------------------------------------ terms


def two_prod(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The product and its error, without the scaling that large operands need (D)."""
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    product = a * b
    return product, al * bl - (((product - ah * bh) - al * bh) - ah * bl)


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    c = a * (2.0 ** ((BASES[a.dtype].precision + 1) // 2) + 1)
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


def _sum(x: Terms, y: Terms, count: int) -> Terms:
    levels: list[list[Tensor]] = [[] for _ in range(count + 1)]
    for z in (x, y):
        for level, term in enumerate(z[:count]):
            levels[level].append(term)
    return _by_levels(levels, count)


def _product(x: Terms, y: Terms, count: int) -> Terms:
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


# ------------------------------------------------------------------------- integers and exponents


def _magic(like: Tensor) -> float:
    return 1.5 * 2.0 ** (BASES[like.dtype].precision - 1)


def to_integer(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest integer of a number below 2^(p - 2), and a pattern that ends with it."""
    shifted = x + _magic(x)
    return shifted - _magic(x), shifted.view(BASES[x.dtype].integer)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, for integer exponents of normal numbers."""
    base = BASES[exponent.dtype]
    shifted = exponent + (_magic(exponent) + base.max_exponent)
    return (shifted.view(base.integer) << (base.precision - 1)).view(exponent.dtype)


def exponent_of(x: Tensor) -> Tensor:
    """The exponent e of normal numbers x, with 2^e <= |x| < 2^(e + 1)."""
    base = BASES[x.dtype]
    bits = (x.abs().view(base.integer) >> (base.precision - 1)) - base.max_exponent
    return bits.to(x.dtype)


# --------------------------------------------------------------------- tables and polynomials


def chosen(table: Sequence[Constant], bits: Tensor, count: int, like: Tensor) -> Terms:
    """Look up entries of a table of at most 2^k constants by the last k bits of `bits`."""
    entries = [floats_of(value, BASES[like.dtype].precision, count) for value in table]
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
    x: Guarded, coefficients: Coefficients, log2_x: float, bits: Tensor | None = None
) -> Guarded:
    """Sum c_k x^k for |x| <= 2^log2_x, to the bits that a function needs.

    The last bits of `bits` choose one of several polynomials. One of the first two parts of a sum
    must have its magnitude.
    """
    like, base = x.leading, x.base
    rows, widths = _affecting(coefficients, log2_x, base, x.count - 1)

    def coefficient(k: int) -> Terms:
        if bits is not None:
            return chosen(rows[k], bits, widths[k], like)
        floats = floats_of(rows[k][0], base.precision, widths[k])
        return tuple(constant(value, like) for value in floats)

    total = coefficient(len(rows) - 1)
    for k in range(len(rows) - 2, -1, -1):
        total = _sum(coefficient(k), _product(x.terms, total, widths[k + 1]), widths[k])
    return x.like(total)


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
        if len(rows) > wanted:
            raise ValueError(f"a series in numbers of 2^{log2_x} does not get below 2^-{wanted}")
    while parts[-1] <= -wanted:
        parts.pop()
        rows.pop()
    widths = [
        min(max(math.ceil((wanted + max(parts[k:])) / base.precision), 1), terms + 1)
        for k in range(len(parts))
    ]
    return rows, widths
