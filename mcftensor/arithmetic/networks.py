"""Arithmetic on expansions by error-free transformations, in the base type alone.

A function reads as its algorithm: one line a transformation. Expansions are tuples of plain
tensors of one dtype, leading term first, normalized; so are the results. Formats with a base of
32 or 64 bits compute with these networks; bases of 16 bits have a cheaper and sharper way
(`machine_numbers.py`), but the networks hold for them as well, with u = 2^-8 or 2^-11.

References, cited below by their initials:

- JMP: M. Joldes, J.-M. Muller, V. Popescu, "Tight and rigorous error bounds for basic building
  blocks of double-word arithmetic", ACM TOMS 44(2), 2017.
- MR: J.-M. Muller, L. Rideau, "Formalization of double-word arithmetic, and comments on [JMP]",
  ACM TOMS 48(1), 2022.
- LLMPR: V. Lefèvre, N. Louvet, J.-M. Muller, J. Picot, L. Rideau, "Accurate calculation of
  Euclidean norms using double-word arithmetic", ACM TOMS 49(1), 2023.
- S: J. R. Shewchuk, "Adaptive precision floating-point arithmetic and fast robust geometric
  predicates", Discrete & Computational Geometry 18, 1997.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.arithmetic import eft
from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.rounding import move
from mcftensor.kernels.custom_ops import inline

two_sum = inline(eft.two_sum)
fast_two_sum = inline(eft.fast_two_sum)
two_prod = inline(eft.two_prod)

Terms = tuple[Tensor, ...]


def distill(values: Sequence[Tensor], terms: int) -> Terms:
    """The sum of any tensors, however ordered and overlapping, as `terms` normalized terms.

    The values are entered one by one, each by a chain of two_sums from the last place to the
    first (S's Grow-Expansion). That loses nothing, and what stands in the places afterwards has
    no adjacent bits in common (S's theorem 10, for p >= 3 and any number of values). From there
    one more chain gathers the whole in the first place, up to half an ulp and a little, a second
    chain the rest in the second place, and so on; a round of chains over the places in use makes
    each the nearest float to itself and all that follow, up to ties. Ties are resolved from the
    first place on, and gaps closed that this leaves. What stands behind the wanted terms is
    dropped: at most half an ulp of the last term, or u^n / 2^(n - 1) for n terms. The last
    fast_two_sum restores a tie that had been resolved by no more than what was dropped.
    """
    x = list(values)
    last = len(x) - 1
    for entered in range(1, last + 1):
        _chain(x, entered, 0)
    for place in range(min(terms + 1, last)):
        _chain(x, last, place)
    last = min(terms, last)
    for place in range(last):
        _chain(x, last, place)
    x += [torch.zeros_like(x[0])] * (terms + 1 - len(x))
    for i in range(terms - 1):
        x[i : i + 2] = resolve_tie(*x[i : i + 3])
        for j in range(i + 1, terms):
            x[j : j + 2] = fast_two_sum(x[j], x[j + 1])
    return *x[: terms - 2], *fast_two_sum(x[terms - 2], x[terms - 1])


def _chain(x: list[Tensor], last: int, first: int) -> None:
    """Sum the places from the last to the first, and leave every error behind."""
    for i in range(last, first, -1):
        x[i - 1], x[i] = two_sum(x[i - 1], x[i])


def resolve_tie(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Make a the rounding of a + b + c, where it is that of a + b, by what c says on ties.

    a + b lies halfway between two floats exactly where a + 2b is a float too.
    """
    other, inexact = two_sum(a, b + b)
    flip = (inexact == 0) & (b != 0) & (torch.sign(b) == torch.sign(c)) & torch.isfinite(other)
    return torch.where(flip, other, a), torch.where(flip, -b, b)


def settle(result: Terms, plain: Tensor) -> Terms:
    """Repair special values: where the result is not finite, the plain one with zero tails.

    A zero gets the sign of the plain result.
    """
    leading, *tails = result
    finite = torch.isfinite(leading)
    for tail in tails:
        finite = finite & torch.isfinite(tail)
    leading = torch.where(finite & ~((leading == 0) & (plain == 0)), leading, plain)
    return leading, *(torch.where(finite, tail, 0) for tail in tails)


def shorten(x: Terms, noise: Noise | None) -> Terms:
    """x without its last term: rounded to nearest, or by noise."""
    *kept, rest = x
    if noise is not None:
        kept[-1] = move(kept[-1], rest, noise)
    return settle(distill(kept, len(kept)), x[0])


# ------------------------------------------------------------------------------------ two terms


def add2(x: Terms, y: Terms) -> Terms:
    """3u² / (1 - 4u), p >= 3, 20 flops: JMP algorithm 6 (AccurateDWPlusDW), proof in MR."""
    (xh, xl), (yh, yl) = x, y
    sh, sl = two_sum(xh, yh)
    th, tl = two_sum(xl, yl)
    vh, vl = fast_two_sum(sh, sl + th)
    return settle(fast_two_sum(vh, tl + vl), xh + yh)


def mul2(x: Terms, y: Terms) -> Terms:
    """4u², p >= 5, 9 flops: JMP algorithm 12 (DWTimesDW3), bound from MR."""
    (xh, xl), (yh, yl) = x, y
    ch, cl = two_prod(xh, yh)
    t = eft.fma(xl, yh, eft.fma(xh, yl, xl * yl))
    return settle(fast_two_sum(ch, cl + t), xh * yh)


def fma2(x: Terms, y: Terms, z: Terms) -> Terms:
    """x * y + z with an error of u²/2 |result| + 40u³ (|x * y| + |z|).

    All products of order u are kept exactly; the sums of order u² are rounded.
    """
    (xh, xl), (yh, yl), (zh, zl) = x, y, z
    ph, pl = two_prod(xh, yh)
    qh, ql = two_prod(xh, yl)
    rh, rl = two_prod(xl, yh)
    s, e0 = two_sum(ph, zh)
    t, e1 = two_sum(pl, zl)
    c, e2 = two_sum(qh, rh)
    t, e3 = two_sum(t, c)
    t, e4 = two_sum(e0, t)
    low = (e1 + e2) + (e3 + e4) + ((ql + rl) + xl * yl)
    return settle(distill((s, t, low), 2), xh * yh + zh)


def sqrt2(x: Terms) -> Terms:
    """25/8 u²: LLMPR algorithm 8 (SQRTDWtoDW), one Newton step from a correct square root."""
    xh, xl = x
    sh = eft.sqrt(xh)
    low = xl + eft.fma(-sh, sh, xh)
    return settle(fast_two_sum(sh, low / (sh + sh)), sh)


# ------------------------------------------------------------------------- three terms and more


def add(x: Terms, y: Terms) -> Terms:
    """u^n / 2^(n - 1): exact sums, then only what stands behind the last term is dropped."""
    values: list[Tensor] = []
    for a, b in zip(x, y, strict=True):
        values += two_sum(a, b)
    return settle(distill(values, len(x)), x[0] + y[0])


def products(x: Terms, y: Terms) -> list[Tensor]:
    """x * y as n² + 1 values, with an error below 2n (n + 1) u^(n + 1) |x * y|.

    The product of terms i and j is of order u^(i + j), and its error of the next order. All up to
    u^(n - 1) is kept exactly; what is of order u^n is summed with roundings.
    """
    terms = len(x)
    exact: list[list[Tensor]] = [[] for _ in range(terms)]
    low = [x[i] * y[terms - i] for i in range(1, terms)]
    for i in range(terms):
        for j in range(terms - i):
            product, error = two_prod(x[i], y[j])
            exact[i + j].append(product)
            (low if i + j + 1 == terms else exact[i + j + 1]).append(error)
    rest = low[0]
    for value in low[1:]:
        rest = rest + value
    return [*itertools.chain(*exact), rest]


def mul(x: Terms, y: Terms) -> Terms:
    """u^n / 2^(n - 1) + 2n (n + 1) u^(n + 1)."""
    return settle(distill(products(x, y), len(x)), x[0] * y[0])


def fma(x: Terms, y: Terms, z: Terms) -> Terms:
    """x * y + z with an error of u^n / 2^(n - 1) |result| + 2n (n + 1) u^(n + 1) |x * y|."""
    return settle(distill([*products(x, y), *z], len(x)), x[0] * y[0] + z[0])


# --------------------------------------------------------------------------- any number of terms


def scale(x: Sequence[Tensor], a: Tensor) -> list[Tensor]:
    """x * a exactly, as twice as many values as x has terms."""
    return [value for term in x for value in two_prod(term, a)]


def div(x: Terms, y: Terms) -> Terms:
    """u^n / 2^(n - 1) + 10 * 3^n u^(n + 1): long division, with one digit to spare.

    A digit is the quotient of leading terms, right to 3u; the remainder x - digit * y is formed
    from exact products. No reciprocal is taken, so that nothing overflows or underflows on the way.
    """
    terms = len(x)
    digits = []
    remainder = x
    for _ in range(terms):
        digit = remainder[0] / y[0]
        remainder = distill([*remainder, *scale(y, -digit)], terms)
        digits.append(digit)
    digits.append(remainder[0] / y[0])
    return settle(distill(digits, terms), x[0] / y[0])


def sqrt(x: Terms) -> Terms:
    """u^n / 2^(n - 1) + 4^n u^(n + 1): extraction by digits, with one digit to spare.

    The remainder x - (root + digit)^2 = (x - root^2) - digit * (2 root + digit) is formed from
    exact products, and gives the next digit by Newton's correction, right to 4u.
    """
    terms = len(x)
    leading = eft.sqrt(x[0])
    twice = leading + leading
    root = [leading]
    remainder = distill([*x, *scale(root, -leading)], terms)
    for _ in range(terms - 1):
        digit = remainder[0] / twice
        doubled = [term + term for term in root]
        remainder = distill([*remainder, *scale([*doubled, digit], -digit)], terms)
        root.append(digit)
    root.append(remainder[0] / twice)
    return settle(distill(root, terms), leading)


def neg(x: Terms) -> Terms:
    """-x, exactly."""
    return tuple(-term for term in x)
