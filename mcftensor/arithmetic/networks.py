"""Arithmetic on expansions by error-free transformations, in the base type alone.

Each function reads as its algorithm, with one transformation a line. Expansions are tuples of plain
tensors of one dtype, leading term first, normalized; so are the results. Formats with a base of 32
or 64 bits compute with these networks. For 16-bit bases `machine_numbers.py` is cheaper and more
accurate, but the networks are valid for them as well, with u = 2^-8 or 2^-11.

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
    """Sum tensors, in any order and overlapping, to `terms` normalized terms.

    The values enter one by one, each by a chain of two_sums from the last place to the first (S's
    Grow-Expansion). This loses nothing, and afterwards the places hold values that share no
    adjacent bits (S's theorem 10, for p >= 3 and any number of values). One more chain gathers the
    sum in the first place, to slightly more than half an ulp. The next chain gathers the rest in
    the second place, and so on. A round of chains over the places in use makes each place the
    nearest float to itself and all that follow, up to ties. Ties are resolved from the first place
    on, and the gaps that this leaves are closed. Places behind the last term are dropped: at most
    half an ulp of the last term, or u^n / 2^(n - 1) for n terms. The last fast_two_sum restores a
    tie that had been resolved by a dropped place alone.
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
    """Add the places from the last to the first, and leave each error in its place."""
    for i in range(last, first, -1):
        x[i - 1], x[i] = two_sum(x[i - 1], x[i])


def resolve_tie(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Given a = RN(a + b), return a = RN(a + b + c), with ties resolved by c, and the new b.

    a + b lies halfway between two floats exactly where a + 2b is a float too.
    """
    other, inexact = two_sum(a, b + b)
    flip = (inexact == 0) & (b != 0) & (torch.sign(b) == torch.sign(c)) & torch.isfinite(other)
    return torch.where(flip, other, a), torch.where(flip, -b, b)


def replace_nonfinite(result: Terms, plain: Tensor) -> Terms:
    """Replace results that are not finite by the plain result with zero tails.

    A zero result takes the sign of a plain zero.
    """
    leading, *tails = result
    finite = torch.isfinite(leading)
    for tail in tails:
        finite = finite & torch.isfinite(tail)
    leading = torch.where(finite & ~((leading == 0) & (plain == 0)), leading, plain)
    return leading, *(torch.where(finite, tail, 0) for tail in tails)


def shorten(x: Terms, noise: Noise | None) -> Terms:
    """Round off the last term of x, to nearest or by noise."""
    *kept, rest = x
    if noise is not None:
        kept[-1] = move(kept[-1], rest, noise)
    return replace_nonfinite(distill(kept, len(kept)), x[0])


# ------------------------------------------------------------------------------------ two terms


def add2(x: Terms, y: Terms) -> Terms:
    """x + y with a relative error of at most 3u² / (1 - 4u), for p >= 3, in 20 flops.

    Source: JMP algorithm 6 (AccurateDWPlusDW), proof in MR.
    """
    (xh, xl), (yh, yl) = x, y
    sh, sl = two_sum(xh, yh)
    th, tl = two_sum(xl, yl)
    vh, vl = fast_two_sum(sh, sl + th)
    return replace_nonfinite(fast_two_sum(vh, tl + vl), xh + yh)


def mul2(x: Terms, y: Terms) -> Terms:
    """x * y with a relative error of at most 4u², for p >= 5, in 9 flops.

    Source: JMP algorithm 12 (DWTimesDW3), bound from MR.
    """
    (xh, xl), (yh, yl) = x, y
    ch, cl = two_prod(xh, yh)
    t = eft.fma(xl, yh, eft.fma(xh, yl, xl * yl))
    return replace_nonfinite(fast_two_sum(ch, cl + t), xh * yh)


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
    return replace_nonfinite(distill((s, t, low), 2), xh * yh + zh)


def sqrt2(x: Terms) -> Terms:
    """The square root with a relative error of at most 25/8 u².

    Source: LLMPR algorithm 8 (SQRTDWtoDW), one Newton step from a correctly rounded square root.
    """
    xh, xl = x
    sh = eft.sqrt(xh)
    low = xl + eft.fma(-sh, sh, xh)
    return replace_nonfinite(fast_two_sum(sh, low / (sh + sh)), sh)


# ------------------------------------------------------------------------- three terms and more


def add(x: Terms, y: Terms) -> Terms:
    """x + y with a relative error of at most u^n / 2^(n - 1).

    The sums are exact; only places behind the last term are dropped.
    """
    values: list[Tensor] = []
    for a, b in zip(x, y, strict=True):
        values += two_sum(a, b)
    return replace_nonfinite(distill(values, len(x)), x[0] + y[0])


def products(x: Terms, y: Terms) -> list[Tensor]:
    """x * y as n² + 1 values, with an error below 2n (n + 1) u^(n + 1) |x * y|.

    The product of terms i and j is of order u^(i + j), and its error of the next order. Values up
    to order u^(n - 1) are kept exactly. Values of order u^n are summed with roundings.
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
    """x * y with a relative error of at most u^n / 2^(n - 1) + 2n (n + 1) u^(n + 1)."""
    return replace_nonfinite(distill(products(x, y), len(x)), x[0] * y[0])


def fma(x: Terms, y: Terms, z: Terms) -> Terms:
    """x * y + z with an error of u^n / 2^(n - 1) |result| + 2n (n + 1) u^(n + 1) |x * y|."""
    return replace_nonfinite(distill([*products(x, y), *z], len(x)), x[0] * y[0] + z[0])


# --------------------------------------------------------------------------- any number of terms


def scale(x: Sequence[Tensor], a: Tensor) -> list[Tensor]:
    """x * a exactly, as twice as many values as x has terms."""
    return [value for term in x for value in two_prod(term, a)]


def div(x: Terms, y: Terms) -> Terms:
    """x / y with a relative error of at most u^n / 2^(n - 1) + 10 * 3^n u^(n + 1).

    The algorithm is long division with one spare digit. A digit is the quotient of leading terms,
    right to 3u. The remainder x - digit * y is formed from exact products. No reciprocal is formed,
    so that no intermediate result overflows or underflows.
    """
    terms = len(x)
    digits = []
    remainder = x
    for _ in range(terms):
        digit = remainder[0] / y[0]
        remainder = distill([*remainder, *scale(y, -digit)], terms)
        digits.append(digit)
    digits.append(remainder[0] / y[0])
    return replace_nonfinite(distill(digits, terms), x[0] / y[0])


def sqrt(x: Terms) -> Terms:
    """The square root with a relative error of at most u^n / 2^(n - 1) + 4^n u^(n + 1).

    The algorithm extracts digits, with one spare digit. The remainder x - (root + digit)^2 =
    (x - root^2) - digit * (2 root + digit) is formed from exact products. It gives the next digit
    by a Newton step, right to 4u.
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
    return replace_nonfinite(distill(root, terms), leading)


def neg(x: Terms) -> Terms:
    """-x, exactly."""
    return tuple(-term for term in x)
