"""Arithmetic on expansions by error-free transformations, in the base type alone.

A function reads as its algorithm: one line a transformation. Expansions are tuples of plain
tensors of one dtype, leading term first, normalized; so are the results. Formats with a base of
32 or 64 bits compute with these networks; bases of 16 bits have a cheaper and sharper way
(`wide.py`), but the networks hold for them as well, with u = 2^-8 or 2^-11.

References, cited below by their initials:

- JMP: M. Joldes, J.-M. Muller, V. Popescu, "Tight and rigorous error bounds for basic building
  blocks of double-word arithmetic", ACM TOMS 44(2), 2017.
- MR: J.-M. Muller, L. Rideau, "Formalization of double-word arithmetic, and comments on [JMP]",
  ACM TOMS 48(1), 2022.
- LLMPR: V. Lefèvre, N. Louvet, J.-M. Muller, J. Picot, L. Rideau, "Accurate calculation of
  Euclidean norms using double-word arithmetic", ACM TOMS 49(1), 2023.
- ORO: T. Ogita, S. Rump, S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26(6),
  2005.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor import eft
from mcftensor.operators import inline

two_sum = inline(eft.two_sum)
fast_two_sum = inline(eft.fast_two_sum)
two_prod = inline(eft.two_prod)
fma = inline(eft.fma)
correct_sqrt = inline(eft.sqrt)

Terms = tuple[Tensor, ...]


def distill(values: Sequence[Tensor], terms: int) -> Terms:
    """The sum of any tensors, however ordered and overlapping, as `terms` normalized terms.

    Each pass is ORO's VecSum: a chain of two_sums from the last value to the first, without any
    error. As many passes as there are values leave no two neighbours that overlap, whatever
    cancelled. Then ties are resolved, and what stands behind the wanted terms is dropped: at most
    half an ulp of the last term, or u^n / 2^(n - 1) for n terms. The last fast_two_sum restores a
    tie that had been resolved by no more than what was dropped.
    """
    x = list(values)
    for _ in range(len(x)):
        for i in range(len(x) - 1, 0, -1):
            x[i - 1], x[i] = two_sum(x[i - 1], x[i])
    x += [torch.zeros_like(x[0])] * (terms + 1 - len(x))
    for i in range(terms - 1):
        x[i : i + 3] = resolve_tie(*x[i : i + 3])
    return *x[: terms - 2], *fast_two_sum(x[terms - 2], x[terms - 1])


def resolve_tie(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make a the rounding of a + b + c, where it is that of a + b, by what c says on ties.

    a + b lies halfway between two floats exactly where a + 2b is a float too.
    """
    other, inexact = two_sum(a, b + b)
    flip = (inexact == 0) & (b != 0) & (torch.sign(b) == torch.sign(c)) & torch.isfinite(other)
    a, b = torch.where(flip, other, a), torch.where(flip, -b, b)
    b, c = fast_two_sum(b, c)
    return a, b, c


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
    t = fma(xl, yh, fma(xh, yl, xl * yl))
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
    sh = correct_sqrt(xh)
    low = xl + fma(-sh, sh, xh)
    return settle(fast_two_sum(sh, low / (sh + sh)), sh)


# ---------------------------------------------------------------------------------- three terms


def add3(x: Terms, y: Terms) -> Terms:
    """u³/4: exact sums, then only what stands behind the third term is dropped."""
    (x0, x1, x2), (y0, y1, y2) = x, y
    s0, e0 = two_sum(x0, y0)
    s1, e1 = two_sum(x1, y1)
    s2, e2 = two_sum(x2, y2)
    return settle(distill((s0, s1, e0, s2, e1, e2), 3), x0 + y0)


def products3(x: Terms, y: Terms) -> list[Tensor]:
    """x * y as ten values, with an error below 16u⁴ |x * y|."""
    (x0, x1, x2), (y0, y1, y2) = x, y
    p00, e00 = two_prod(x0, y0)
    p01, e01 = two_prod(x0, y1)
    p10, e10 = two_prod(x1, y0)
    p11, e11 = two_prod(x1, y1)
    p02, e02 = two_prod(x0, y2)
    p20, e20 = two_prod(x2, y0)
    low = (e11 + e02 + e20) + (x1 * y2 + x2 * y1)
    return [p00, p01, p10, e00, p11, p02, p20, e01, e10, low]


def mul3(x: Terms, y: Terms) -> Terms:
    """u³/4 + 16u⁴: the products of orders 1, u and u² exactly, those of order u³ rounded."""
    return settle(distill(products3(x, y), 3), x[0] * y[0])


def fma3(x: Terms, y: Terms, z: Terms) -> Terms:
    """x * y + z with an error of u³/4 |result| + 16u⁴ |x * y|."""
    return settle(distill([*products3(x, y), *z], 3), x[0] * y[0] + z[0])


# ------------------------------------------------------------------------------- any number


def scale(x: Sequence[Tensor], a: Tensor) -> list[Tensor]:
    """x * a exactly, as twice as many values as x has terms."""
    return [value for term in x for value in two_prod(term, a)]


def div(x: Terms, y: Terms) -> Terms:
    """u²/2 + 30u³ for two terms, u³/4 + 90u⁴ for three: long division, with one digit to spare.

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
    """u³/4 + 60u⁴ for three terms: extraction by digits, with one digit to spare.

    The remainder x - (root + digit)^2 = (x - root^2) - digit * (2 root + digit) is formed from
    exact products, and gives the next digit by Newton's correction, right to 4u.
    """
    terms = len(x)
    leading = correct_sqrt(x[0])
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
