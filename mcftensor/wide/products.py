"""Matrix products of expansions by slices, whose products the machine's own product sums exactly.

Let A have rows and B columns of numbers that are sums of terms, and let k be the inner length. Rows
of A and columns of B are cut into slices (`slices.py`): A = 2^e (A_0 + 2^-w A_1 + 2^-2w A_2 ...)
with a different e for each row, and B alike with f for each column. A product A_s B_t of slices is
exact in the machine type, for any order of summation, blocking and number of threads in BLAS.
Products with the same s + t = d have the same unit. T *diagonals* d = 0 ... T - 1 are computed,
exactly, and added by error-free transformations in one fixed order. So the bits of the result
depend on the numbers alone, and the bits of an element on its row, its column and k alone.

**Truncation.** For one element, with elements divided by 2^e and 2^f, the sum of all omitted
products is

    sum over s < T of A_s 2^(-w s) (B - sum over t < T - s of B_t 2^(-w t)) + (A - its slices) B.

The remainder of B after T - s slices is at most 2^(-w (T - s)), and the remainder of A after T
slices at most 2^(-w T). So the magnitude of the omitted products is at most

    2^(-w T) (R + C),  R = sum over s < T of sum |A_s|,  C = sum |B| <= sum |B_0| + k 2^-w.

R and C are sums of integers, exact. Let P be the product of |A_0| and |B_0|, each less one unit and
at least 0. It is a lower bound of |A||B|, and a product of integers too, so exact. Each element
takes as many diagonals as it needs:

    2^(-w T) 1.01 (R + C) <= 15 * 2^-bits P.

T starts from a number that depends on w and `bits` alone. It grows if exponents in a row or a
column are spread, or if large elements meet small ones. If P = 0, slices do not help: large
elements of the row meet only small ones of the column, as in a graded matrix. Such an element is
computed as an exact sum of all products of terms (`exact_dots`), unless all are zeros.

**Error.** The omitted products are at most 15 * 2^-bits |A||B|. N matrices are summed to n terms by
n + 1 chains of two_sum and a plain sum, which loses at most (N u)^(n + 2) M, where M is the sum of
their magnitudes. M is at most (T + 1) k 2^w |A||B|, since P >= 2^(2 - 2w) and |A_s|, |B_t| <= 1;
so this is below u^n / 4 |A||B|. Rounding to n terms loses at most u^n / 2 of the result. Together
the error is at most 2^(4 - bits) |A||B|, if n terms hold `bits` bits.

**Special values.** Rows and columns are scaled by powers of two, so that no product overflows or
underflows where the result does not. An element is infinite or NaN exactly as the sum of products
of leading terms is. A zero is +0.

Sources: K. Ozaki, T. Ogita, S. Oishi and S. M. Rump, "Error-free transformations of matrix
multiplication by using fast routines of matrix multiplication and its applications", Numerical
Algorithms 59(1), 2012; D. Mukunoki, K. Ozaki, T. Ogita and T. Imamura, "DGEMM using Tensor Cores,
and its accurate and reproducible versions", ISC 2020; Y. Uchino, K. Ozaki and T. Imamura,
"Performance enhancement of the Ozaki scheme on integer matrix multiplication unit", 2024,
arXiv:2409.13313 (a group of products of one unit summed by the machine); T. Ogita, S. M. Rump and
S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26(6), 2005 (SumK).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic import networks
from mcftensor.arithmetic.rounding import quiet
from mcftensor.dispatch.operands import value_of
from mcftensor.kernels.custom_ops import opaque
from mcftensor.kernels.without_float64 import widest
from mcftensor.sums.accumulators import accumulate
from mcftensor.sums.correct_rounding import rounded_sum
from mcftensor.sums.digits import WIDEST
from mcftensor.tensor import MCFTensor
from mcftensor.wide.slices import by_powers, cut, exponents, width_for

# Numbers of elements: of a block of an operand, of one step of a summation, and of pairs of rows.
_BLOCK = 1 << 22
_AT_ONCE = 1 << 15
_PAIRS = 1 << 20


def _shaped(
    x: Sequence[Tensor], y: Sequence[Tensor], terms: int, bits: int, machine: torch.dtype
) -> list[Tensor]:
    shape = (*x[0].shape[:2], y[0].shape[2])
    return [x[0].new_empty(shape, dtype=machine) for _ in range(terms)]


@opaque(_shaped, lays_out=True)
def sliced_product(
    x: Sequence[Tensor], y: Sequence[Tensor], terms: int, bits: int, machine: torch.dtype
) -> list[Tensor]:
    """Return the batched matrix products of expansions.

    *Requires*: normalized terms of one dtype, of shapes (b, m, k) and (b, k, n), whose numbers have
    at most `bits` bits in all. `machine`, the dtype of the result, is float64, or float32 for terms
    of at most 32 bits. At most 2^40 products in a sum in float64, and 2^18 in float32.

    *Returns*: `terms` normalized terms of dtype `machine`, of shape (b, m, n).

    *Error*: 2^(4 - bits) |A||B|, proved above.

    *Cost*: T (T + 1) / 2 products of matrices of dtype `machine`, and one to check that they
    suffice. With `bits` = 106 and 513 to 2048 products in a sum, T is 5 in float64.

    *Special values*: see above.
    """
    (b, m, inner), n = x[0].shape, y[0].shape[2]
    result = _shaped(x, y, terms, bits, machine)
    if inner == 0:
        return [part.zero_() for part in result]
    high, wide = (max(1, _BLOCK // inner) for _ in range(2))
    for i in range(b):
        for left in range(0, n, wide):
            columns = _Operand([part[i, :, left : left + wide].T for part in y], bits, machine)
            for top in range(0, m, high):
                rows = _Operand([part[i, top : top + high] for part in x], bits, machine)
                block = (i, slice(top, top + high), slice(left, left + wide))
                for whole, part in zip(result, _product(rows, columns, terms), strict=True):
                    whole[block] = part
    return result


class _Operand:
    """Rows of A, or the columns of B as rows: terms of shape (rows, k)."""

    def __init__(self, given: Sequence[Tensor], bits: int, machine: torch.dtype) -> None:
        self.leading = given[0].to(machine)
        self.width = width_for(given[0].shape[1], machine)
        self.enough = -(-(bits + 4) // self.width.bits)
        """The number of slices that are always cut."""
        self.demand = 1.01 / 15 * 2.0**bits
        """The factor by which P has to exceed the omitted products."""
        self.is_finite = bool(self.leading.isfinite().all())
        self.terms = [x.to(machine) for x in given]
        if not self.is_finite:
            finite = self.leading.isfinite()
            self.terms = [torch.where(finite, x, 0) for x in self.terms]
        self.exponent = exponents(self.terms[0])
        self._slices = cut(self.terms, self.exponent, self.width, self.enough)

    def slices(self, count: int) -> Tensor:
        """Return at least `count` slices, of shape (count, rows, k)."""
        if count > len(self._slices):
            self._slices = cut(self.terms, self.exponent, self.width, count)
        return self._slices

    def magnitudes(self) -> Tensor:
        """Return lower bounds of the magnitudes of the elements, as short as slices."""
        return (self._slices[0].abs() - 2.0 ** (1 - self.width.bits)).clamp_(min=0)


def _product(a: _Operand, b: _Operand, terms: int) -> list[Tensor]:
    values = [part for d in range(a.enough) for part in _diagonal(a, b, d)]
    suffices = a.magnitudes() @ b.magnitudes().T
    for d, takes in _further(a, b, suffices):
        values += [part.mul_(takes) for part in _diagonal(a, b, d)]
    exponent = a.exponent + b.exponent.T
    result = [by_powers(x, exponent) for x in _summed(values, terms)]
    for rows, columns in _unmatched(a, b, suffices):
        left, right = [x[rows] for x in a.terms], [x[columns] for x in b.terms]
        for whole, part in zip(
            result, exact_dots(left, right, terms, result[0].dtype), strict=True
        ):
            whole[rows, columns] = part
    plain = result[0]
    if not (a.is_finite and b.is_finite):
        special = _kinds(a.leading) @ _kinds(b.leading).T
        plain = torch.where(special.isfinite(), plain, quiet(special))
    # Adding zero turns -0 into +0: the sign of a zero of BLAS is not defined.
    return [plain + 0.0, *(torch.where(plain.isfinite(), x, 0) for x in result[1:])]


def _diagonal(a: _Operand, b: _Operand, d: int) -> Iterator[Tensor]:
    """Yield matrices that add up exactly to the sum of all A_s B_t with s + t = d."""
    left, right = a.slices(d + 1), b.slices(d + 1)
    for first in range(0, d + 1, a.width.together):
        part = left[first] @ right[d - first].T
        for s in range(first + 1, min(first + a.width.together, d + 1)):
            part.addmm_(left[s], right[d - s].T)
        yield part.mul_(2.0 ** (-d * a.width.bits))


def _further(a: _Operand, b: _Operand, suffices: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the diagonals beyond the first `enough`, and a mask of the elements that need them."""
    inner = a.leading.shape[1]
    sizes = a.slices(a.enough).abs().sum((0, 2)).unsqueeze(1)
    sizes = sizes + b.slices(1)[0].abs().sum(1) + inner * 2.0**-a.width.bits
    d, takes = a.enough, suffices > 0
    while True:
        left_out = (sizes + inner * (d - a.enough)) * 2.0 ** (-d * a.width.bits)
        takes = takes & (left_out * a.demand > suffices)
        if not takes.any():
            return
        yield d, takes
        d += 1


def _unmatched(a: _Operand, b: _Operand, suffices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows and columns, in parts, of elements whose large factors all meet small ones."""
    if suffices.all():
        return
    pattern = a.leading.bool().float() @ b.leading.bool().float().T
    rows, columns = ((suffices == 0) & (pattern > 0)).nonzero(as_tuple=True)
    at_once = max(1, _PAIRS // a.leading.shape[1])
    if len(rows):
        yield from zip(rows.split(at_once), columns.split(at_once), strict=True)


def _summed(values: list[Tensor], terms: int) -> list[Tensor]:
    """Sum matrices in this order, by chains of two_sum from the last to the first (SumK)."""
    result = [torch.empty_like(values[0]) for _ in range(terms)]
    for start in range(0, result[0].numel(), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        left = [x.view(-1)[part] for x in reversed(values)]
        found: list[Tensor] = []
        while len(left) > 1 and len(found) <= terms:
            for i in range(1, len(left)):
                left[i], left[i - 1] = networks.two_sum(left[i], left[i - 1])
            found.append(left.pop())
        for x in left[1:]:
            left[0] = left[0] + x
        summed = networks.distill([*found, left[0]], terms)
        for whole, x in zip(result, summed, strict=True):
            whole.view(-1)[part] = x
    return result


def _kinds(x: Tensor) -> Tensor:
    """The signs of finite numbers; infinities and NaN unchanged."""
    return torch.where(x.isfinite(), x.sign(), x)


def exact_dots(
    x: Sequence[Tensor], y: Sequence[Tensor], terms: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return the exact dot products of rows of expansions, rounded term by term.

    *Requires*: finite terms, each of shape (rows, n); x and y have one dtype.

    *Returns*: normalized terms of `dtype`, of shape (rows,).

    *Error*: each term is the exact remainder, rounded to nearest; only what follows the last is
    lost.

    *Cost*: one exact sum for each pair of terms.

    *Special values*: beyond the range of the dtype the leading term is infinite and the others 0.
    """
    rows = len(x[0])
    left = torch.cat([a for a in x for _ in y], 1)
    right = torch.cat([b for _ in x for b in y], 1)
    total = accumulate(left, right, WIDEST)
    found: list[Tensor] = []
    for _ in range(terms):
        rounded = rounded_sum(total, dtype, WIDEST)
        found.append(torch.where(found[0].isfinite(), rounded, 0) if found else rounded)
        rest = torch.where(rounded.isfinite(), -rounded, 0).view(rows, 1)
        total = total + accumulate(rest, None, WIDEST)
    return found


# ------------------------------------------------------------------------------------ operators


def multiplied(x: MCFTensor, y: MCFTensor) -> MCFTensor:
    """Return the products of matrices of one format, of shapes (b, m, k) and (b, k, n)."""
    format = x._format
    machine = widest(x.device)
    summed = format.sums_in(machine)  # type: ignore[attr-defined]
    made = sliced_product(
        list(x._read()), list(y._read()), len(summed.components), format.precision, machine
    )
    result = MCFTensor.of(made, summed, own=True)
    return result if summed is format else value_of(result, format, [x, y])


def mm(x: Any, y: Any) -> Tensor:
    """Return the product of two matrices."""
    return multiplied(x.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


def mv(x: Any, y: Any) -> Tensor:
    """Return the product of a matrix and a vector."""
    return mm(x, y.unsqueeze(1)).squeeze(1)


def inner(x: Any, y: Any) -> Tensor:
    """Return the dot product of two vectors."""
    return mv(x.unsqueeze(0), y).squeeze(0)


def added(product: Callable[[Any, Any], Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes beta * z + alpha * product(x, y)."""

    def add(z: Tensor, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        result = product(x, y) if alpha == 1 else product(x, y) * alpha
        return result if beta == 0 else result + (z if beta == 1 else z * beta)

    return add
