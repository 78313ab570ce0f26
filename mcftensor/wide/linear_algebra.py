"""Linear algebra beyond 48 bits, on matrices of twice the bits of the format.

Without float64, formats up to 48 bits take the same way, and float32 is the machine type. Equations
are solved by an approximate inverse R, made of inverses in the machine type: R A is inverted again
until it is close to the identity (S. M. Rump, "Inversion of extremely ill-conditioned matrices in
floating-point", Japan J. Indust. Appl. Math. 26, 2009), and solutions are refined with residuals of
twice the bits (N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 12;
E. Carson and N. J. Higham, SIAM J. Sci. Comput. 40(2), 2018). Triangular factors are eliminated
column by column. Eigenvectors of the machine type are refined by products (after T. Ogita and
K. Aishima, "Iterative refinement for symmetric eigenvalue decomposition", Japan J. Indust. Appl.
Math. 35, 2018). Eigenvalues that are too close for that are separated by eigenvectors of their
block. Singular vectors are eigenvectors of A^T A, which is exact enough in twice the bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES
from mcftensor.dispatch.operands import plainly, value_of
from mcftensor.formats import Format
from mcftensor.kernels.without_float64 import widest
from mcftensor.tensor import MCFTensor
from mcftensor.wide.elementary import in_longer, nearest_value

_MOST_STEPS = 100
"""The most steps of a refinement; each gains at least two bits."""


def _wide(x: Tensor, format: Format) -> MCFTensor:
    return nearest_value(x, format.doubled_in(_machine_of(x)))  # type: ignore[attr-defined]


def _machine_of(x: Tensor) -> torch.dtype:
    """Return the machine type: float64, or float32 for terms of float32 where it is missing."""
    return torch.promote_types(x.dtype, widest(x.device))


def _plain(x: Tensor) -> Tensor:
    return plainly(x, _machine_of(x))


def _identity(like: Tensor, size: int) -> Tensor:
    return torch.eye(size, dtype=_machine_of(like), device=like.device)


def _largest(x: Tensor) -> float:
    return float(_plain(x).abs().max()) if x.numel() else 0.0


Algorithm = Callable[..., tuple[Tensor, ...]]


def batched(of_squares: str | None = None) -> Callable[[Algorithm], Algorithm]:
    """Return a decorator that extends a function of matrices to batches.

    Expansions among the results are rounded to the format of the first operand.

    Args:
        of_squares: the name of an operation whose first operand must be square matrices.
    """

    def extended(function: Algorithm) -> Algorithm:
        def run(*operands: Tensor, **options: Any) -> tuple[Tensor, ...]:
            format: Format = operands[0]._format  # type: ignore[attr-defined]
            *_, rows, columns = operands[0].shape
            if of_squares and rows != columns:
                raise RuntimeError(
                    f"{of_squares}: a tensor of shape {tuple(operands[0].shape)} has matrices of "
                    f"{rows} by {columns}, which must be square"
                )
            batch = torch.broadcast_shapes(*(x.shape[:-2] for x in operands))
            count = math.prod(batch)
            whole = [x.expand(*batch, *x.shape[-2:]) for x in operands]
            # Of no matrices, the shapes of results are those of one.
            flat = [x.reshape(count, *x.shape[-2:]) if count else _example(x) for x in whole]
            found = [
                function(*(_wide(x, format) for x in row), bits=format.precision, **options)
                for row in zip(*flat, strict=True)
            ]
            results = []
            for column in zip(*found, strict=True):
                stacked = torch.stack(column)[:count]
                result = stacked.reshape([*batch, *stacked.shape[1:]])
                results.append(value_of(result, format) if result.is_floating_point() else result)
            return tuple(results)

        return run

    return extended


def _example(x: Tensor) -> Tensor:
    """Return a batch of one regular matrix."""
    return value_of(torch.eye(*x.shape[-2:], device=x.device)[None], x._format)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------- equations


def _require_condition(name: str, condition: float, bits: int) -> None:
    if not condition < 2.0**bits:
        raise torch.linalg.LinAlgError(
            f"{name}: the matrix has an estimated condition of {condition:.1e}, and a format of "
            f"{bits} bits solves up to {2.0**bits:.1e}. Convert it to a longer format, or use "
            "torch.linalg.pinv of mcf.as_plain(x, torch.float64)"
        )


def _approximate_inverse(name: str, a: MCFTensor, bits: int) -> Tensor:
    """Return R with a norm of I - R A below 1/4.

    Raises:
        LinAlgError: the condition is beyond the bits of the format.
    """
    size, identity = len(a), _identity(a, len(a))
    inverse: Tensor = _wide_like(identity, a)
    condition = 1.0
    norm = float(_plain(a).abs().sum(1).max()) if size else 0.0
    if not norm < torch.inf:
        raise torch.linalg.LinAlgError(f"{name}: the matrix has elements that are not finite")
    for _ in range(len(a.components) + 2):
        near = inverse @ a
        defect = float(_plain(near - identity).abs().sum(1).max()) if size else 0.0
        if defect < 0.25:
            _require_condition(name, condition, bits)
            return inverse
        wanted = _plain(near)
        step, info = torch.linalg.inv_ex(wanted)
        if int(info) or not bool(step.isfinite().all()):
            shift = 8 * torch.finfo(wanted.dtype).eps * float(wanted.abs().max())
            step = torch.linalg.inv_ex(wanted + shift * identity).inverse
        if not bool(step.isfinite().all()):
            break
        inverse = _wide_like(step, a) @ inverse
        condition = norm * float(_plain(inverse).abs().sum(1).max())
        if not condition < 2.0 ** (bits + 40):
            break
    _require_condition(name, torch.inf if condition < 2.0**bits else condition, bits)
    raise AssertionError("unreachable")


def _wide_like(x: Tensor, a: MCFTensor) -> MCFTensor:
    return nearest_value(x, a._format)


def _solved(name: str, a: MCFTensor, b: Tensor, bits: int) -> Tensor:
    """Return the solution X of A X = B, refined to the precision of the format."""
    inverse = _approximate_inverse(name, a, bits)
    x = inverse @ b
    for _ in range(_MOST_STEPS):
        change = inverse @ (b - a @ x)
        x = x + change
        sizes, changes = (
            _plain(y).abs().amax(0) if len(a) else y.new_zeros(0) for y in (x, change)
        )
        if bool((changes <= sizes * 2.0 ** -(bits + 8)).all()):
            break
    return x


@batched("linalg.solve")
def _solve(a: MCFTensor, b: Tensor, bits: int) -> tuple[Tensor, ...]:
    return (
        _solved("linalg.solve", a, b, bits),
        a,
        torch.zeros(len(a), dtype=torch.int32, device=a.device),
        _done(a),
    )


@batched("linalg.inv")
def _inverse(a: MCFTensor, bits: int) -> tuple[Tensor, ...]:
    return _solved("linalg.inv", a, _wide_like(_identity(a, len(a)), a), bits), _done(a)


def _done(a: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=a.device)


def solve_ex(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """Return solutions; in place of factors the matrices themselves, with pivots of 0."""
    is_vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    if is_vector:
        b = b.unsqueeze(-1)
    if not left:
        x, _, pivots, info = _of_regular(_solve, a.mT, b.mT)
        return x.mT, _as_solved(a), pivots, info
    x, _, pivots, info = _of_regular(_solve, a, b)
    return x.squeeze(-1) if is_vector else x, _as_solved(a), pivots, info


def _as_solved(a: Tensor) -> Tensor:
    """Return the matrix whose factors PyTorch's gradients of solutions expect."""
    return _as_factored(a) if _solves_by_transposes() else a


@functools.cache
def _solves_by_transposes() -> bool:
    """Return whether PyTorch factors the transposes of contiguous matrices, as before 2.11."""
    a = torch.tensor([[2.0, 1.0], [0.0, 2.0]], device="cpu")
    return bool(torch.ops.aten._linalg_solve_ex(a, a)[1][1, 0])


def inv_ex(a: Tensor, *, check_errors: bool = False) -> Any:
    """Return inverses."""
    return _of_regular(_inverse, a)


def _of_regular(function: Callable[..., Any], a: Tensor, *others: Tensor) -> Any:
    """Return results of a function of matrices; NaN and the first zero pivot for singular ones."""
    try:
        return function(a, *others)
    except torch.linalg.LinAlgError:
        pivots = _lu_factor(a)[-1]
        is_singular = pivots > 0
        if not is_singular.any():
            raise
    identity = torch.zeros_like(a) + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    x, *rest, info = function(torch.where(is_singular[..., None, None], identity, a), *others)
    x = x.masked_fill(is_singular[..., None, None], math.nan)
    return x, *rest, torch.where(is_singular, pivots.to(info.dtype), info)


def solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """Return solutions with triangular matrices."""
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    return _triangular(a, b, upper=upper, unit=unitriangular)[0]


def _substituted(a: Tensor, b: Tensor, upper: bool, unit: bool) -> Tensor:
    size, rows, left = len(a), {}, b
    for i in reversed(range(size)) if upper else range(size):
        row = left[i] if unit else left[i] / a[i, i]
        rows[i] = row
        left = left - a[:, i].unsqueeze(1) * row
    return torch.stack([rows[i] for i in range(size)]) if size else b


@batched("linalg.solve_triangular")
def _triangular(a: MCFTensor, b: Tensor, upper: bool, unit: bool, bits: int) -> tuple[Tensor, ...]:
    return (_substituted(a, b, upper, unit),)


def lu_solve(
    factors: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    """Return solutions by factors, or by matrices in their place."""
    if bool((pivots == 0).all()):
        a = factors.mT if adjoint else factors
        found: Tensor = solve_ex(a, b, left=left)[0]
        return found
    if not left:
        return lu_solve(factors, pivots, b.mT, adjoint=not adjoint).mT
    order = _order_of(pivots, factors.shape[-1]).unsqueeze(-1)
    if adjoint:
        x = solve_triangular(factors.mT, b, upper=False)
        x = solve_triangular(factors.mT, x, upper=True, unitriangular=True)
        return torch.take_along_dim(x, order.argsort(-2), -2)
    x = torch.take_along_dim(b, order, -2)
    x = solve_triangular(factors, x, upper=False, unitriangular=True)
    return solve_triangular(factors, x, upper=True)


def _order_of(pivots: Tensor, size: int) -> Tensor:
    """Return the permutation that row exchanges make."""
    lower = torch.lu_unpack(
        pivots.new_zeros(*pivots.shape, size).float(), pivots, unpack_data=False
    )
    return lower[0].argmax(-2)


# --------------------------------------------------------------------------------------- factors


class _Factors(NamedTuple):
    packed: Tensor
    pivots: Tensor
    info: Tensor


def _eliminated(a: MCFTensor) -> _Factors:
    """Return factors of a matrix of any shape, by Gaussian elimination with row exchanges."""
    left, pivots, info = a.clone(), [], 0
    for i in range(min(a.shape)):
        at = i + int(left[i:, i].abs().argmax())
        pivots.append(at + 1)
        if at != i:
            order = list(range(len(a)))
            order[i], order[at] = at, i
            left = left[order]
        if not bool(left[i, i] != 0):
            info = info or i + 1
            continue
        if i + 1 < len(a):
            column = left[i + 1 :, i] / left[i, i]
            left[i + 1 :, i] = column
            if i + 1 < a.shape[1]:
                rest = left[i + 1 :, i + 1 :] - column.unsqueeze(1) * left[i, i + 1 :]
                left[i + 1 :, i + 1 :] = rest
    return _Factors(
        left,
        torch.tensor(pivots, dtype=torch.int32, device=a.device),
        torch.tensor(info, dtype=torch.int32, device=a.device),
    )


@batched()
def _lu_factor(a: MCFTensor, bits: int) -> tuple[Tensor, ...]:
    return _eliminated(a)


def lu_factor_ex(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    """Return packed factors, pivots and the first zero pivot."""
    _require_pivots(pivot)
    return _lu_factor(a)


def lu(a: Tensor, *, pivot: bool = True) -> Any:
    """Return P, L and U."""
    _require_pivots(pivot)
    packed, pivots, _ = _lu_factor(a)
    return lu_unpack(packed, pivots)


def lu_unpack(
    packed: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> Any:
    """Return P, L and U of packed factors."""
    rows, columns = packed.shape[-2:]
    size = min(rows, columns)
    plain = pivots.new_zeros(*pivots.shape[:-1], rows, columns).float()
    exchange = torch.lu_unpack(plain, pivots, unpack_data=False)[0]
    lower = packed[..., :size].tril(-1) + torch.eye(
        rows, size, dtype=torch.float32, device=packed.device
    )
    return exchange_in(exchange, packed), lower, packed[..., :size, :].triu()


def exchange_in(exchange: Tensor, like: Tensor) -> Tensor:
    """Return a permutation as a matrix in the format of `like`."""
    return value_of(exchange, like._format)  # type: ignore[attr-defined]


def _require_pivots(pivot: bool) -> None:
    if not pivot:
        raise NotImplementedError("factors without row exchanges in formats beyond 48 bits")


@batched("linalg.det")
def _determinant(a: MCFTensor, bits: int) -> tuple[Tensor, ...]:
    """Return a number from 1/2 to 1 in magnitude, or 0, the exponent of its power of two, and
    factors.
    """
    packed, pivots, _ = _eliminated(a)
    number: Tensor = _wide_like(torch.ones((), device=a.device), a)
    exponent = torch.zeros((), dtype=torch.int64, device=a.device)
    for i, pivot in enumerate(pivots.tolist()):
        number = number * packed[i, i] * (1 if pivot == i + 1 else -1)
        more = _plain(number).frexp().exponent
        number, exponent = _by_power(number, -more), exponent + more
    return number, exponent, packed, pivots


def _by_power(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x * 2^exponent, even where 2^exponent is out of range."""
    for part in (exponent // 2, exponent - exponent // 2):
        x = x * _power_of_two(part, x)
    return x


def _power_of_two(exponent: Tensor, like: Tensor) -> Tensor:
    """Return a power in the machine type; the largest or smallest one beyond its range."""
    dtype = _machine_of(like)
    most = BASES[dtype].max_exponent - 3
    ones = torch.ones(exponent.shape, dtype=dtype, device=exponent.device)
    return torch.ldexp(ones, exponent.clamp(-most, most))


def _as_factored(a: Tensor) -> Tensor:
    """Return the matrix whose factors PyTorch's gradients of determinants expect."""
    return a.mT if a.is_contiguous() else a


def det(a: Tensor) -> Any:
    """Return determinants, packed factors and pivots."""
    number, exponent, packed, pivots = _determinant(_as_factored(a))
    return _by_power(number, exponent), packed, pivots


def slogdet(a: Tensor) -> Any:
    """Return signs of determinants, logarithms of magnitudes, packed factors and pivots."""
    number, exponent, packed, pivots = _determinant(_as_factored(a))
    two = torch.full_like(number, 2.0)
    return number.sign(), number.abs().log() + two.log() * exponent, packed, pivots


def _rooted(a: Tensor) -> tuple[Tensor, int]:
    """Return the lower Cholesky factor, and the first leading minor that is not positive, or 0."""
    left, columns = a, []
    for i in range(len(a)):
        if not bool(left[0, 0] > 0):
            return a, i + 1
        column = left[:, 0] / left[0, 0].sqrt()
        columns.append(torch.nn.functional.pad(column, (i, 0)))
        left = left[1:, 1:] - column[1:].unsqueeze(1) * column[1:]
    return torch.stack(columns, 1) if columns else a, 0


@batched("linalg.cholesky")
def _cholesky(a: MCFTensor, bits: int) -> tuple[Tensor, ...]:
    lower, info = _rooted(a)
    return lower, torch.tensor(info, dtype=torch.int32, device=a.device)


def cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """Return Cholesky factors, and the first leading minor that is not positive, or 0."""
    lower, info = _cholesky(a.mT if upper else a)
    return (lower.mT if upper else lower), info


def cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """Return solutions with matrices that are given by their Cholesky factors."""
    lower = factor.mT if upper else factor
    return solve_triangular(lower.mT, solve_triangular(lower, b, upper=False), upper=True)


def cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    """Return the inverses of matrices that are given by their Cholesky factors."""
    ones = torch.zeros_like(factor) + _identity(factor, factor.shape[-1])
    return cholesky_solve(ones, factor, upper)


def _orthonormal(name: str, a: MCFTensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return Q and R of a matrix with no more columns than rows.

    Two Cholesky factors of Q^T Q make it orthonormal.
    """
    q: Tensor = a
    r: Tensor = _wide_like(_identity(a, a.shape[1]), a)
    for _ in range(2):
        lower, info = _rooted(q.T @ q)
        if info:
            _require_condition(name, torch.inf, bits)
        q = _substituted(lower, q.T, upper=False, unit=False).T
        r = lower.T @ r
    diagonal = _plain(r.diagonal()).abs()
    if len(diagonal):
        _require_condition(name, float(diagonal.max() / diagonal.min()), bits)
    return q, r


@batched()
def _qr(a: MCFTensor, bits: int) -> tuple[Tensor, ...]:
    size = min(a.shape)
    q, r = _orthonormal("linalg.qr", a[:, :size], bits)  # type: ignore[arg-type]
    signs = _as_signs(torch.linalg.qr(_plain(a), mode="r").R.diagonal())
    q, r, rest = q * signs, r * signs.unsqueeze(1), a[:, size:]
    return q, torch.cat([r, q.T @ rest], 1) if rest.shape[1] else r


def _as_signs(x: Tensor) -> Tensor:
    """Return 1 or -1: factors that are unique up to signs have those of the machine type."""
    return torch.where(x < 0, -1.0, 1.0)


def qr(a: Tensor, mode: str = "reduced") -> Any:
    """Return Q and R, with the signs of the machine type."""
    rows, columns = a.shape[-2:]
    if mode == "complete" and rows > columns:
        raise NotImplementedError("a complete QR of tall matrices in formats beyond 48 bits")
    q, r = _qr(a)
    return (q.new_empty(0) if mode == "r" else q), r


@batched()
def _least_squares(a: MCFTensor, b: Tensor, bits: int) -> tuple[Tensor, ...]:
    is_tall = len(a) >= a.shape[1]
    q, r = _orthonormal("linalg.lstsq", a if is_tall else a.T, bits)  # type: ignore[arg-type]
    if is_tall:
        x = _substituted(r, q.T @ b, upper=True, unit=False)
        x = x + _substituted(r, q.T @ (b - a @ x), upper=True, unit=False)
    else:
        x = q @ _substituted(r.T, b, upper=False, unit=False)
    return x, (b - a @ x).square().sum(0), torch.tensor(min(a.shape), device=a.device)


def lstsq(a: Tensor, b: Tensor, rcond: Any = None, *, driver: str | None = None) -> Any:
    """Return least-squares solutions, sums of squares of residuals, ranks, which are full, and
    singular values, each where PyTorch's driver returns it.
    """
    is_vector = b.dim() == a.dim() - 1
    x, residuals, rank = _least_squares(a, b.unsqueeze(-1) if is_vector else b)
    if a.shape[-2] <= a.shape[-1]:
        residuals = residuals.new_empty(0)
    rank = rank.new_empty(0) if driver == "gels" else rank
    values = svd(a)[1] if driver in ("gelsd", "gelss") else x.new_empty(0)
    return x.squeeze(-1) if is_vector else x, residuals, rank, values


# ---------------------------------------------------------------------------------- eigenvectors


def _eigenvectors(a: MCFTensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in ascending order and eigenvectors of a symmetric matrix."""
    size, norm = len(a), _largest(a)
    scale = torch.tensor(math.frexp(norm)[1] if 0 < norm < math.inf else 0, device=a.device)
    small = a * _power_of_two(-scale, a)
    identity = _identity(a, size)
    least = 2.0 ** (10 - a._format.precision) * max(size, 1)  # smaller elements are rounding errors
    x: Tensor = _wide_like(torch.linalg.eigh(_plain(small)).eigenvectors, a)
    for _ in range(_MOST_STEPS):
        x = _orthogonal(x)
        s = x.T @ (small @ x)
        values = s.diagonal()
        gaps, off = values.unsqueeze(0) - values.unsqueeze(1), s - torch.diag(values)
        off = torch.where(_plain(off).abs() > least, off, 0.0)
        bound = 2 * float(_plain(off).norm())
        is_close = _plain(gaps).abs() <= bound
        is_close.fill_diagonal_(True)
        change = torch.where(is_close, 0.0, off / torch.where(is_close, 1.0, gaps))
        x = x + x @ change
        loose = _largest(torch.where(is_close, off, 0.0))
        if loose:
            for block in _connected(is_close):
                part = s[block][:, block] - values[block[0]] * identity[: len(block), : len(block)]
                unit = _largest(part)
                if len(block) > 1 and unit:
                    turned = torch.linalg.eigh(_plain(part / unit)).eigenvectors
                    x[:, block] = x[:, block] @ _wide_like(turned, a)
        elif _largest(change) <= 2.0 ** -(bits + 8):
            break
    else:
        raise torch.linalg.LinAlgError(
            f"linalg.eigh: no convergence for a matrix of shape {tuple(a.shape)}"
        )
    order = values.argsort()
    return values[order] * _power_of_two(scale, a), x[:, order]


def _orthogonal(x: Tensor) -> Tensor:
    """Return the orthogonal matrix nearest to a nearly orthogonal one."""
    identity, bits = _identity(x, len(x)), x._format.precision  # type: ignore[attr-defined]
    for _ in range(_MOST_STEPS):
        defect = identity - x.T @ x
        x = x + x @ (defect / 2)
        if not _largest(defect) > 2.0 ** (12 - bits / 2):
            break
    return x


def _connected(is_close: Tensor) -> list[list[int]]:
    """Return the sets of indices that are connected by pairs."""
    left, found = set(range(len(is_close))), []
    rows = is_close.tolist()
    while left:
        block, new = set(), {left.pop()}
        while new:
            block |= new
            new = {j for i in new for j in left if rows[i][j]}
            left -= new
        found.append(sorted(block))
    return found


@batched("linalg.eigh")
def _eigh(a: MCFTensor, upper: bool, bits: int) -> tuple[Tensor, ...]:
    half = a.triu() if upper else a.tril()
    whole = half + half.T - torch.diag(a.diagonal())
    values, vectors = _eigenvectors(whole, bits)  # type: ignore[arg-type]
    like = torch.linalg.eigh(_plain(whole), "U" if upper else "L").eigenvectors
    return values, vectors * _as_signs((like * _plain(vectors)).sum(0))


def eigh(a: Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    """Return eigenvalues and eigenvectors."""
    values, vectors = _eigh(a, upper=UPLO == "U")
    return values, vectors if compute_v else vectors.new_empty(0)


@batched()
def _svd(a: MCFTensor, full: bool, bits: int) -> tuple[Tensor, ...]:
    is_wide = len(a) < a.shape[1]
    u, s, vh = _singular(a.T if is_wide else a, full, bits)  # type: ignore[arg-type]
    u, vh = (vh.T, u.T) if is_wide else (u, vh)
    count = len(s)
    like = torch.linalg.svd(_plain(a), full_matrices=False).Vh
    signs = _as_signs((like * _plain(vh[:count])).sum(1))
    u = torch.cat([u[:, :count] * signs, u[:, count:]], 1)
    return u, s, torch.cat([vh[:count] * signs.unsqueeze(1), vh[count:]])


def _singular(a: MCFTensor, full: bool, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular vectors and values of a matrix with no more columns than rows."""
    rows, columns = a.shape
    values, v = _eigenvectors(a.T @ a, bits)  # type: ignore[arg-type]
    v = v[:, (-values).argsort()]  # equal ones in their order, as in the machine type
    images = a @ v
    s = images.square().sum(0).sqrt()
    sizes = _plain(s)
    rank = int((sizes > sizes.max() * 2.0 ** (4 - bits) * rows).sum()) if columns else 0
    # Small singular values magnify the remaining products of eigenvectors.
    u, _ = _orthonormal("linalg.svd", images[:, :rank] / s[:rank], bits)  # type: ignore[arg-type]
    wanted = rows if full else columns
    if rank < wanted:
        _, others = _eigenvectors(_identity(a, rows) - u @ u.T, bits)  # type: ignore[arg-type]
        u = torch.cat([u, others[:, rows - wanted + rank :]], 1)
    return u, s, v.T


def svd(
    a: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> Any:
    """Return singular vectors and values."""
    u, s, vh = _svd(a, full=full_matrices and compute_uv)
    return (u, s, vh) if compute_uv else (u.new_empty(0), s, vh.new_empty(0))


# ------------------------------------------------------------------------- functions of matrices


def pinv(
    a: Tensor,
    *,
    atol: Tensor | None = None,
    rtol: Tensor | None = None,
    hermitian: bool = False,
) -> Tensor:
    """Return pseudo-inverses; singular values up to a limit are zeros."""
    if rtol is None:
        has_atol = atol is not None and bool((atol > 0).any())
        epsilon = 2.0 ** (1 - a._format.precision)  # type: ignore[attr-defined]
        rtol = a.new_tensor(0.0 if has_atol else epsilon * max(a.shape[-2:]))
    if hermitian:
        a = a.tril() + a.tril(-1).mT
    return _pinv(a, torch.zeros_like(rtol) if atol is None else atol, rtol)


@in_longer
def _pinv(a: Tensor, atol: Tensor, rtol: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    limit = torch.maximum(atol.unsqueeze(-1), rtol.unsqueeze(-1) * s[..., :1])
    inverses = torch.where(s > limit, 1 / s, 0.0)
    return vh.mT @ (inverses.unsqueeze(-1) * u.mT)


def matrix_exp(a: Tensor) -> Tensor:
    """Return exponentials of square matrices."""
    return _exponential(a)[0]


@batched("linalg.matrix_exp")
def _exponential(a: Tensor, *, bits: int) -> tuple[Tensor]:
    """Sum the Taylor series of a / 2^k, whose norm is below 1/16, and square it k times."""
    norm = float(a.abs().sum(0).amax()) if len(a) else 0.0
    if not math.isfinite(norm):
        return (torch.full_like(a, math.nan),)
    k = max(math.frexp(norm)[1] + 4, 0)
    a = _by_power(a, torch.tensor(-k, device=a.device))
    wanted = bits + 2 * k + 16
    count = next(i for i in range(wanted) if 4 * i + math.lgamma(i + 1) / math.log(2) > wanted)
    identity = torch.eye(len(a), dtype=a.dtype, device=a.device)
    result = identity + torch.zeros_like(a)
    for i in range(count, 0, -1):
        result = identity + a @ result / i
    for _ in range(k):
        result = result @ result
    return (result,)
