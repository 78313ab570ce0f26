"""Every function of formats beyond 53 bits at ordinary points, and its gradient, against mpmath.

A formula with a constant of 53 bits, such as a float64 1/n, pi or log 2, is wrong by 2^-54 here,
where it is allowed 2^-100 in fp64x2.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import mcftensor as mcf
from common.oracle import fractions
from mcftensor.kernels.without_float64 import has_float64
from support.no_float64 import Float64Error, no_float64
from support.rotation import rotated

mpmath = pytest.importorskip("mpmath")
pytest.importorskip("expecttest")  # of which torch's operator database makes use
functions = pytest.importorskip("common.functions")
elementary = pytest.importorskip("common.elementary")
operators = pytest.importorskip("common.operators")

pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning"),
]

mp = mpmath.mp
BITS, STEP = 900, mpmath.mpf(2) ** -250
OF_NUMBERS, OF_SLOPES, OF_ARRAYS, OF_GRADIENTS = 2, 12, 16, 32
"""Bounds in u^n: of elements and their derivatives relative to each; of tensors relative to their
largest elements; of derivatives along a direction relative to the sum of magnitudes."""

FORMATS = [
    pytest.param((mcf.fp32x3, False), id="fp32x3"),
    pytest.param((mcf.Format(torch.float64, 3), False), id="fp64x3", marks=pytest.mark.slow),
    pytest.param((mcf.fp32x2, True), id="fp32x2, without", marks=pytest.mark.slow),
    pytest.param((mcf.fp32x3, True), id="fp32x3, without", marks=pytest.mark.slow),
]


@pytest.fixture(params=FORMATS)
def format(request):
    """A format, with float64 or without it."""
    made, is_without = request.param
    with no_float64(of_all=False) if is_without else contextlib.nullcontext(), mp.workprec(BITS):
        yield made


# ---------------------------------------------------------- oracles over arrays of mpmath's numbers


class Case(NamedTuple):
    """A function of tensors and the same of arrays, and the shapes and range of its arguments."""

    function: Callable[..., Any]
    exact: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    low: float = 0.1
    high: float = 0.9
    gradients: int = 9  # of so many first arguments


exp, log, root, log1p, gamma = (
    np.frompyfunc(f, 1, 1) for f in (mp.exp, mp.log, mp.sqrt, mp.log1p, mp.loggamma)
)
num = mp.mpf
ROWS, ROW, VECTOR = ((3, 5),), (3, 5), ((7,),)
LABELS, WEIGHTED = torch.tensor([2, 0, 4]), (ROW, (5,))


def relu(x):
    return np.maximum(x, num(0))


def softmax(x, axis=-1):
    powers = exp(x)
    return powers / powers.sum(axis, keepdims=True)


def log_of_sum(x, axis=-1):
    return log(exp(x).sum(axis))


def var(x, axis=None, ddof=1):
    count = x.size if axis is None else x.shape[axis]
    return ((x - x.mean(axis, keepdims=True)) ** 2).sum(axis) / (count - ddof)


def std(x, axis=None, ddof=1):
    return root(np.asarray(var(x, axis, ddof)))


def power(x, exponent):
    return np.frompyfunc(lambda y: y ** num(exponent), 1, 1)(x)


def norm(x, p=2, axis=None):
    return power((np.abs(x) ** p).sum(axis), num(1) / p)


def normalized(x, axes, weight=1, bias=0, eps=1e-5):
    middle = x.mean(axes, keepdims=True)
    spread = ((x - middle) ** 2).mean(axes, keepdims=True)
    return (x - middle) / root(spread + num(eps)) * weight + bias


def groups(x, count):
    y = x.reshape(x.shape[0], count, -1)
    return normalized(y, 2).reshape(x.shape)


def attended(q, k, v):
    return softmax(q @ np.swapaxes(k, -1, -2) / mp.sqrt(q.shape[-1])) @ v


def heads(q, k, v, weight, out, bias=None):
    """Attention of two heads, of (steps, 1, features)."""
    size = q.shape[-1]
    bias = np.full(3 * size, Z) if bias is None else bias
    parts = [
        x[:, 0] @ a.T + b
        for x, a, b in zip((q, k, v), np.split(weight, 3), np.split(bias, 3), strict=True)
    ]
    found = [attended(*(x[:, i : i + size // 2] for x in parts)) for i in range(0, size, size // 2)]
    return (np.concatenate(found, 1) @ out.T)[:, None]


def windows(x, *sizes):
    """Views of windows over the last dimensions of an array, their positions first."""
    return np.lib.stride_tricks.sliding_window_view(x, sizes, tuple(range(-len(sizes), 0)))


def pooled(x, *sizes, stride=None):
    """Averages over windows."""
    steps = tuple(slice(None, None, stride or n) for n in sizes)
    found = windows(x, *sizes)[(..., *steps, *(slice(None) for _ in sizes))]
    return found.reshape(*found.shape[: -len(sizes)], -1).mean(-1)


def across_channels(x):
    """Averages over three channels, zeros beyond the ends."""
    wide = np.pad(x, [(0, 0), (1, 1), (0, 0)], constant_values=Z)
    return (wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]) / 3


def pieces(x, count, axis=-1):
    """Averages of a row's adaptive pieces."""
    n = x.shape[axis]
    ends = [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
    return np.stack([np.take(x, range(a, b), axis).mean(axis) for a, b in ends], axis)


def convolved(x, weight):
    """A convolution of (samples, channels, places) with (new channels, channels, places)."""
    dims = weight.ndim - 2
    parts = windows(x, *weight.shape[2:])  # samples, channels, places, window
    axes = (1, *range(parts.ndim - dims, parts.ndim))
    found = np.tensordot(parts, weight, (axes, (1, *range(2, 2 + dims))))
    return np.moveaxis(found, -1, 1)


def transposed(x, weight):
    """The gradient of a convolution with respect to its input."""
    dims = weight.ndim - 2
    wide = np.pad(
        x,
        [(0, 0), (0, 0), *((n - 1, n - 1) for n in weight.shape[2:])],
        constant_values=num(0),
    )
    turned = np.flip(np.swapaxes(weight, 0, 1), tuple(range(2, 2 + dims)))
    return convolved(wide, turned)


def differences(x, h):
    inner = (x[2:] - x[:-2]) / (2 * h)
    return np.concatenate([[(x[1] - x[0]) / h], inner, [(x[-1] - x[-2]) / h]])


def of_matrix(function):
    """A function of mpmath's matrices as one of arrays."""

    def on_arrays(*arrays):
        made = function(*(mp.matrix(x.tolist()) for x in arrays))
        return np.array(made.tolist() if isinstance(made, mp.matrix) else made, object)

    return on_arrays


def symmetric(a):
    return a @ a.T + np.array([[num(3 * (i == j)) for i in range(3)] for j in range(3)], object)


def triangular(a):
    """The triangular factor of orthogonalization."""
    return of_matrix(lambda m: mp.cholesky(m.T * m).T)(a)


def positive(a):
    """A positive definite matrix."""
    return a @ a.mT + 3 * torch.eye(3)


def smooth(d, beta):
    return np.where(np.abs(d) < beta, d * d / (2 * beta), np.abs(d) - beta / 2)


def margins(x, labels, p):
    rows = [relu(1 - row[k] + np.delete(row, k)) ** p for row, k in zip(x, labels, strict=True)]
    return np.stack(rows).sum() / x.size


def scattered(combine, x, source):
    """Rows of x combined with those of a source at rows 2, 0, 2."""
    found = x.copy()
    for i, row in zip((2, 0, 2), source, strict=True):
        found[i] = combine(found[i], row)
    return found


def averaged(x, source):
    found = scattered(lambda a, b: a + b, x, source)
    return np.stack([found[0] / 2, found[1], found[2] / 3])


INDEX = torch.tensor([2, 0, 2])
COLUMNS = INDEX[:, None].expand(3, 5)
MASK = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
VECTORS, MATRIX = ((7,), (7,)), ((3, 3),)
A, Z, CHANNELS = num(0.3), num(0), (3, 2, 5)


def rows_of(function):
    """A function over what a mask keeps of each row."""
    return lambda x: np.array([function(row[keep]) for row, keep in zip(x, MASK, strict=True)])


DROPPED: list[Any] = []


def drop(x):
    found = F.dropout(x, 0.25)
    DROPPED[:] = [(found == 0).numpy()]
    return found


def quantile(x, q):
    """Interpolation between two of five sorted elements of each row."""
    place = q * 4
    low = int(place)
    y = np.sort(x, 1)
    return y[:, low] + (place - low) * (y[:, low + 1] - y[:, low])


def bce(p, t):
    return -(t * log(p) + (1 - t) * log1p(-p))


def cosine(x, y, eps=0.0):
    sizes = [(z * z).sum(-1) + num(eps) for z in (x, y)]
    return (x * y).sum(-1) / root(sizes[0] * sizes[1])


def triplet(x, y, z):
    distances = [norm(x - other + num(1e-6), 2, -1) for other in (y, z)]
    return relu(distances[0] - distances[1] + 1).mean()


def singular_values(a):
    return np.sort(of_matrix(lambda a: mp.svd_r(a, compute_uv=False))(a)[:, 0])[::-1]


def cubed(values, vectors):
    """The third power of a symmetric matrix, of its eigenvectors."""
    return (vectors * values**3) @ vectors.mT


def cubed_singular(u, s, v):
    return (u * s**3) @ v


CASES = {
    "sqrt": Case(torch.sqrt, root, ROWS),
    "square": Case(torch.square, lambda x: x * x, ROWS),
    "reciprocal": Case(torch.reciprocal, lambda x: 1 / x, ROWS),
    "rad2deg": Case(torch.rad2deg, lambda x: x * 180 / mp.pi, ROWS),
    "leaky_relu": Case(
        lambda x: F.leaky_relu(x, 0.3), lambda x: np.where(x > 0, x, A * x), ROWS, -0.9
    ),
    "softshrink": Case(
        lambda x: F.softshrink(x, 0.3),
        lambda x: np.where(np.abs(x) > A, x - A * np.where(x > 0, 1, -1), Z),
        ROWS,
        -0.9,
    ),
    "remainder": Case(torch.remainder, lambda x, y: x - np.floor(x / y) * y, (ROW, ROW)),
    "fmod": Case(torch.fmod, lambda x, y: x - np.floor(x / y) * y, (ROW, ROW)),
    "frac": Case(torch.frac, lambda x: x - np.floor(x), ROWS, 1.1, 5.0),
    "quantile": Case(lambda x: x.quantile(0.3, 1), lambda x: quantile(x, num(0.3)), ROWS),
    "dropout": Case(drop, lambda x: np.where(DROPPED[0], Z, x * 4 / 3), ROWS),
    "round.decimals_3": Case(
        lambda x: x.round(decimals=3),
        np.frompyfunc(lambda x: mp.nint(x * 1000) / 1000, 1, 1),
        ROWS,
        gradients=0,
    ),
    "add": Case(lambda x, y: x.add(y, alpha=0.3), lambda x, y: x + A * y, (ROW, ROW)),
    "sub": Case(lambda x, y: x.sub(y, alpha=0.3), lambda x, y: x - A * y, (ROW, ROW)),
    "addcmul": Case(
        lambda x, y, z: x.addcmul(y, z, value=0.3), lambda x, y, z: x + A * y * z, (ROW, ROW, ROW)
    ),
    "addcdiv": Case(
        lambda x, y, z: x.addcdiv(y, z, value=0.3), lambda x, y, z: x + A * y / z, (ROW, ROW, ROW)
    ),
    "lerp": Case(lambda x, y: x.lerp(y, 0.3), lambda x, y: x + A * (y - x), (ROW, ROW)),
    "lerp by a tensor": Case(torch.lerp, lambda x, y, w: x + w * (y - x), (ROW, ROW, ROW)),
    "mcf.fma": Case(mcf.functional.fma, lambda x, y, z: x * y + z, (ROW, ROW, ROW)),
    "gradient": Case(
        lambda x: torch.gradient(x, spacing=0.3)[0], lambda x: differences(x, A), VECTOR
    ),
    "mvlgamma": Case(
        lambda x: torch.mvlgamma(x, 3),
        lambda x: mp.log(mp.pi) * num(1.5) + gamma(x) + gamma(x - num(0.5)) + gamma(x - 1),
        ((3,),),
        1.1,
        3.0,
    ),
    # Sums and moments.
    "sum": Case(lambda x: x.sum(1), lambda x: x.sum(1), ROWS),
    "nansum": Case(lambda x: x.nansum(1), lambda x: x.sum(1), ROWS),
    "sum_to_size": Case(lambda x: x.sum_to_size(3, 1), lambda x: x.sum(1, keepdims=True), ROWS),
    "mean": Case(torch.mean, np.mean, ROWS),
    "mean over rows": Case(lambda x: x.mean(0), lambda x: x.mean(0), ROWS),
    "nanmean": Case(lambda x: x.nanmean(1), lambda x: x.mean(1), ROWS),
    "prod": Case(lambda x: x.prod(1), lambda x: x.prod(1), ROWS),
    "cumsum": Case(lambda x: x.cumsum(1), lambda x: x.cumsum(1), ROWS),
    "cumprod": Case(lambda x: x.cumprod(1), lambda x: x.cumprod(1), ROWS),
    "trace": Case(torch.trace, np.trace, ROWS),
    "diff": Case(torch.diff, np.diff, ROWS),
    "var": Case(lambda x: x.var(1, correction=0), lambda x: var(x, 1, 0), ROWS),
    "std": Case(lambda x: x.std(1, correction=0), lambda x: std(x, 1, 0), ROWS),
    "var_mean": Case(
        lambda x: torch.stack(torch.var_mean(x)), lambda x: np.array([var(x), x.mean()]), ROWS
    ),
    "std_mean": Case(
        lambda x: torch.stack(torch.std_mean(x)),
        lambda x: np.array([std(x), x.mean()]),
        ROWS,
    ),
    "cov": Case(
        torch.cov, lambda x: (d := x - x.mean(1, keepdims=True)) @ d.T / (x.shape[1] - 1), ROWS
    ),
    "corrcoef": Case(
        torch.corrcoef,
        lambda x: (d := x - x.mean(1, keepdims=True)) @ d.T / np.outer(*[norm(d, 2, 1)] * 2),
        ROWS,
    ),
    "norm": Case(lambda x: x.norm(dim=1), lambda x: norm(x, 2, 1), ROWS),
    "norm of order 3": Case(lambda x: x.norm(3, dim=1), lambda x: norm(x, 3, 1), ROWS),
    "linalg.vector_norm": Case(torch.linalg.vector_norm, norm, ROWS),
    "linalg.norm": Case(torch.linalg.norm, norm, ROWS),
    "linalg.matrix_norm": Case(torch.linalg.matrix_norm, norm, ROWS),
    "dist": Case(lambda x, y: torch.dist(x, y, 3), lambda x, y: norm(x - y, 3), (ROW, ROW)),
    "cdist": Case(torch.cdist, lambda x, y: norm(x[:, None] - y[None], 2, -1), ((3, 5), (2, 5))),
    "pdist": Case(
        F.pdist,
        lambda x: np.array([norm(x[i] - x[j]) for i, j in itertools.combinations(range(3), 2)]),
        ROWS,
    ),
    "pairwise_distance": Case(
        F.pairwise_distance, lambda x, y: norm(x - y + num(1e-6), 2, -1), (ROW, ROW)
    ),
    "renorm": Case(
        lambda x: x.renorm(2, 0, 0.3),
        lambda x: x * (A / (norm(x, 2, 1)[:, None] + num(1e-7))),
        ROWS,
    ),
    "normalize": Case(F.normalize, lambda x: x / norm(x, 2, 1)[:, None], ROWS),
    "cosine_similarity": Case(F.cosine_similarity, cosine, (ROW, ROW)),
    "trapezoid": Case(
        lambda x: torch.trapezoid(x, dx=0.3), lambda x: (x[:, 1:] + x[:, :-1]).sum(1) * A / 2, ROWS
    ),
    "trapz": Case(
        lambda x, y: torch.trapz(y, x),
        lambda x, y: ((y[1:] + y[:-1]) * (x[1:] - x[:-1])).sum() / 2,
        VECTORS,
    ),
    "cumulative_trapezoid": Case(
        lambda x: torch.cumulative_trapezoid(x, dx=0.3),
        lambda x: (x[:, 1:] + x[:, :-1]).cumsum(1) * A / 2,
        ROWS,
    ),
    "logsumexp": Case(lambda x: x.logsumexp(1), log_of_sum, ROWS),
    "logcumsumexp": Case(lambda x: x.logcumsumexp(1), lambda x: log(exp(x).cumsum(1)), ROWS),
    "softmax": Case(lambda x: x.softmax(1), softmax, ROWS),
    "softmin": Case(lambda x: F.softmin(x, 1), lambda x: softmax(-x), ROWS),
    "log_softmax": Case(lambda x: x.log_softmax(1), lambda x: log(softmax(x)), ROWS),
    "_safe_softmax": Case(lambda x: torch.ops.aten._safe_softmax(x, 1), softmax, ROWS, gradients=0),
    "_softmax_backward_data": Case(
        lambda g, y: torch._softmax_backward_data(g, y, 1, g.dtype),
        lambda g, y: y * (g - (g * y).sum(1, keepdims=True)),
        (ROW, ROW),
        gradients=0,
    ),
    # Products.
    "mm": Case(torch.mm, np.matmul, ((3, 5), (5, 2))),
    "mv": Case(torch.mv, np.matmul, ((3, 5), (5,))),
    "dot": Case(torch.dot, np.dot, VECTORS),
    "vdot": Case(torch.vdot, np.dot, VECTORS),
    "linalg.vecdot": Case(torch.linalg.vecdot, lambda x, y: (x * y).sum(-1), (ROW, ROW)),
    "bmm": Case(torch.bmm, np.matmul, ((2, 3, 5), (2, 5, 2))),
    "matmul": Case(torch.matmul, np.matmul, ((2, 3, 5), (5, 2))),
    "inner": Case(torch.inner, lambda x, y: x @ y.T, (ROW, (2, 5))),
    "outer": Case(torch.outer, np.outer, ((3,), (5,))),
    "kron": Case(torch.kron, np.kron, ((2, 2), (2, 3))),
    "tensordot": Case(
        lambda x, y: torch.tensordot(x, y, 1), lambda x, y: np.tensordot(x, y, 1), (ROW, (5, 2))
    ),
    "einsum": Case(
        lambda x, y: torch.einsum("ij,kj->ik", x, y), lambda x, y: x @ y.T, (ROW, (2, 5))
    ),
    "addmm": Case(
        lambda x, y, z: torch.addmm(x, y, z, beta=0.3, alpha=0.7),
        lambda x, y, z: A * x + num(0.7) * (y @ z),
        ((3, 2), (3, 5), (5, 2)),
    ),
    "addmv": Case(
        lambda x, y, z: torch.addmv(x, y, z, beta=0.3),
        lambda x, y, z: A * x + y @ z,
        ((3,), (3, 5), (5,)),
    ),
    "addr": Case(
        lambda x, y, z: torch.addr(x, y, z, alpha=0.3),
        lambda x, y, z: x + A * np.outer(y, z),
        (ROW, (3,), (5,)),
    ),
    "addbmm": Case(
        lambda x, y, z: torch.addbmm(x, y, z, beta=0.3),
        lambda x, y, z: A * x + (y @ z).sum(0),
        ((3, 2), (2, 3, 5), (2, 5, 2)),
    ),
    "baddbmm": Case(
        lambda x, y, z: torch.baddbmm(x, y, z, alpha=0.3),
        lambda x, y, z: x + A * (y @ z),
        ((2, 3, 2), (2, 3, 5), (2, 5, 2)),
    ),
    "linear": Case(F.linear, lambda x, w, b: x @ w.T + b, (ROW, (2, 5), (2,))),
    "bilinear": Case(
        F.bilinear,
        lambda x, y, w: np.stack([((x @ a) * y).sum(1) for a in w], 1),
        ((3, 2), (3, 4), (2, 2, 4)),
    ),
    "cross": Case(torch.linalg.cross, np.cross, ((2, 3), (2, 3))),
    "linalg.multi_dot": Case(
        lambda *x: torch.linalg.multi_dot(x), lambda x, y, z: x @ y @ z, ((2, 3), (3, 5), (5, 2))
    ),
    "linalg.matrix_power": Case(
        lambda x: torch.linalg.matrix_power(x, 3), lambda x: x @ x @ x, MATRIX
    ),
    "linalg.vander": Case(
        torch.linalg.vander, lambda x: np.stack([x**i for i in range(3)], 1), ((3,),)
    ),
    # Linear algebra.
    "linalg.det": Case(torch.linalg.det, of_matrix(mp.det), MATRIX),
    "linalg.slogdet": Case(
        lambda a: torch.linalg.slogdet(positive(a))[1],
        lambda a: mp.log(mp.det(mp.matrix(symmetric(a).tolist()))),
        MATRIX,
    ),
    "logdet": Case(
        lambda a: torch.logdet(positive(a)),
        lambda a: mp.log(mp.det(mp.matrix(symmetric(a).tolist()))),
        MATRIX,
    ),
    "linalg.inv": Case(
        lambda a: torch.linalg.inv(positive(a)),
        lambda a: of_matrix(mp.inverse)(symmetric(a)),
        MATRIX,
    ),
    "linalg.solve": Case(
        lambda a, b: torch.linalg.solve(positive(a), b),
        lambda a, b: of_matrix(lambda a, b: mp.inverse(a) * b)(symmetric(a), b),
        ((3, 3), (3, 2)),
    ),
    "linalg.cholesky": Case(
        lambda a: torch.linalg.cholesky(positive(a)),
        lambda a: of_matrix(mp.cholesky)(symmetric(a)),
        MATRIX,
    ),
    "cholesky": Case(
        lambda a: torch.cholesky(positive(a)),
        lambda a: of_matrix(mp.cholesky)(symmetric(a)),
        MATRIX,
    ),
    "linalg.eigvalsh": Case(
        lambda a: torch.linalg.eigvalsh(positive(a)),
        lambda a: of_matrix(lambda a: mp.eigsy(a, eigvals_only=True))(symmetric(a))[:, 0],
        MATRIX,
    ),
    "linalg.svdvals": Case(
        torch.linalg.svdvals,
        singular_values,
        ((3, 2),),
    ),
    "matrix_exp": Case(torch.matrix_exp, of_matrix(mp.expm), MATRIX),
    "linalg.pinv": Case(
        torch.linalg.pinv,
        of_matrix(lambda a: mp.inverse(a.T * a) * a.T),
        ((3, 2),),
    ),
    "linalg.eigh": Case(
        lambda a: cubed(*torch.linalg.eigh(positive(a))),
        lambda a: (b := symmetric(a)) @ b @ b,
        MATRIX,
    ),
    "linalg.svd": Case(
        lambda a: cubed_singular(*torch.linalg.svd(a, full_matrices=False)),
        lambda a: a @ a.T @ a,
        ((3, 2),),
    ),
    "linalg.qr": Case(lambda a: torch.mm(*torch.linalg.qr(a)), lambda a: a, MATRIX),
    "linalg.qr, triangular": Case(
        lambda a: torch.linalg.qr(a)[1].square(), lambda a: triangular(a) ** 2, MATRIX
    ),
    "linalg.lu": Case(lambda a: torch.linalg.multi_dot(torch.linalg.lu(a)), lambda a: a, MATRIX),
    "linalg.lu_solve": Case(
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(positive(a)), b),
        lambda a, b: of_matrix(lambda a, b: mp.inverse(a) * b)(symmetric(a), b),
        ((3, 3), (3, 2)),
    ),
    "linalg.solve_triangular": Case(
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False),
        lambda a, b: of_matrix(lambda a, b: mp.inverse(a) * b)(np.tril(a) + Z, b),
        ((3, 3), (3, 2)),
    ),
    "cholesky_solve": Case(
        lambda b, a: torch.cholesky_solve(b, a.tril()),
        lambda b, a: of_matrix(lambda a, b: mp.inverse(a * a.T) * b)(np.tril(a) + Z, b),
        ((3, 2), (3, 3)),
    ),
    "cholesky_inverse": Case(
        lambda a: torch.cholesky_inverse(a.tril()),
        lambda a: of_matrix(lambda a: mp.inverse(a * a.T))(np.tril(a) + Z),
        MATRIX,
    ),
    "linalg.lstsq": Case(
        lambda a, b: torch.linalg.lstsq(a, b).solution,
        of_matrix(lambda a, b: mp.inverse(a.T * a) * a.T * b),
        ((3, 2), (3, 2)),
    ),
    "linalg.cond": Case(
        torch.linalg.cond,
        lambda a: (s := singular_values(a))[0] / s[-1],
        ((3, 2),),
    ),
    # Accumulation.
    "index_add": Case(
        lambda x, y: x.index_add(0, INDEX, y, alpha=0.3),
        lambda x, y: scattered(lambda a, b: a + A * b, x, y),
        (ROW, ROW),
    ),
    "index_put": Case(
        lambda x, y: x.index_put((INDEX,), y, accumulate=True),
        lambda x, y: scattered(lambda a, b: a + b, x, y),
        (ROW, ROW),
    ),
    "put": Case(
        lambda x, y: x.put(torch.tensor([3, 3]), y, accumulate=True),
        lambda x, y: np.array([*x[:3], x[3] + y.sum(), *x[4:]]),
        ((7,), (2,)),
    ),
    "scatter_add": Case(
        lambda x, y: x.scatter_add(0, COLUMNS, y),
        lambda x, y: scattered(lambda a, b: a + b, x, y),
        (ROW, ROW),
    ),
    "scatter_reduce.sum": Case(
        lambda x, y: x.scatter_reduce(0, COLUMNS, y, "sum"),
        lambda x, y: scattered(lambda a, b: a + b, x, y),
        (ROW, ROW),
    ),
    "scatter_reduce.prod": Case(
        lambda x, y: x.scatter_reduce(0, COLUMNS, y, "prod"),
        lambda x, y: scattered(lambda a, b: a * b, x, y),
        (ROW, ROW),
    ),
    "scatter_reduce.mean": Case(
        lambda x, y: x.scatter_reduce(0, COLUMNS, y, "mean"), averaged, (ROW, ROW)
    ),
    "index_reduce.prod": Case(
        lambda x, y: x.index_reduce(0, INDEX, y, "prod"),
        lambda x, y: scattered(lambda a, b: a * b, x, y),
        (ROW, ROW),
    ),
    "index_reduce.mean": Case(
        lambda x, y: x.index_reduce(0, INDEX, y, "mean"), averaged, (ROW, ROW)
    ),
    # Losses.
    "mse_loss": Case(F.mse_loss, lambda x, y: ((x - y) ** 2).mean(), (ROW, ROW)),
    "l1_loss": Case(F.l1_loss, lambda x, y: np.abs(x - y).mean(), (ROW, ROW)),
    "smooth_l1_loss": Case(
        lambda x, y: F.smooth_l1_loss(x, y, beta=0.3),
        lambda x, y: smooth(x - y, A).mean(),
        (ROW, ROW),
    ),
    "huber_loss": Case(
        lambda x, y: F.huber_loss(x, y, delta=0.3),
        lambda x, y: (smooth(x - y, A) * A).mean(),
        (ROW, ROW),
    ),
    "kl_div": Case(F.kl_div, lambda x, t: (t * (log(t) - x)).mean(), (ROW, ROW)),
    "kl_div of logarithms": Case(
        lambda x, t: F.kl_div(x, t, reduction="batchmean", log_target=True),
        lambda x, t: (exp(t) * (t - x)).sum() / 3,
        (ROW, ROW),
    ),
    "nll_loss": Case(
        lambda x, w: F.nll_loss(x, LABELS, w),
        lambda x, w: -(x[range(3), LABELS] * w[LABELS]).sum() / w[LABELS].sum(),
        WEIGHTED,
        gradients=1,
    ),
    "cross_entropy of smooth labels": Case(
        lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.3),
        lambda x: -(1 - A) * log(softmax(x))[range(3), LABELS].mean() - A * log(softmax(x)).mean(),
        ROWS,
    ),
    "cross_entropy with weights": Case(
        lambda x, w: F.cross_entropy(x, LABELS, w),
        lambda x, w: -(log(softmax(x))[range(3), LABELS] * w[LABELS]).sum() / w[LABELS].sum(),
        WEIGHTED,
        gradients=1,
    ),
    "linear_cross_entropy": Case(
        lambda x, w: F.linear_cross_entropy(x, w, LABELS),
        lambda x, w: -log(softmax(x @ w.T))[range(3), LABELS].mean(),
        ((3, 2), (5, 2)),
    ),
    "binary_cross_entropy": Case(F.binary_cross_entropy, lambda p, t: bce(p, t).mean(), (ROW, ROW)),
    "binary_cross_entropy_with_logits": Case(
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w),
        lambda x, t, w: ((1 - t) * x + (1 + (w - 1) * t) * log1p(exp(-x))).mean(),
        (ROW, ROW, (5,)),
        gradients=2,
    ),
    "soft_margin_loss": Case(
        F.soft_margin_loss, lambda x, t: log1p(exp(-t * x)).mean(), (ROW, ROW), -0.9, gradients=1
    ),
    "margin_ranking_loss": Case(
        lambda x, y, t: F.margin_ranking_loss(x, y, t, margin=2.0),
        lambda x, y, t: relu(-t * (x - y) + 2).mean(),
        (ROW, ROW, ROW),
    ),
    "multi_margin_loss": Case(
        lambda x: F.multi_margin_loss(x, LABELS), lambda x: margins(x, LABELS.tolist(), 1), ROWS
    ),
    "multi_margin_loss of squares": Case(
        lambda x: F.multi_margin_loss(x, LABELS, p=2),
        lambda x: margins(x, LABELS.tolist(), 2),
        ROWS,
    ),
    "multilabel_margin_loss": Case(
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[2, 0, -1, 1, 1]] * 3)),
        lambda x: (
            sum(relu(1 - x[:, j] + x[:, i]).sum() for j in (2, 0) for i in (1, 3, 4)) / x.size
        ),
        ROWS,
    ),
    "multilabel_soft_margin_loss": Case(
        F.multilabel_soft_margin_loss,
        lambda x, t: (t * log1p(exp(-x)) + (1 - t) * log1p(exp(x))).mean(),
        (ROW, ROW),
    ),
    "hinge_embedding_loss": Case(
        lambda x: F.hinge_embedding_loss(x, torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])),
        lambda x: np.where(np.array([1, 0, 1, 1, 0]), x, relu(1 - x)).mean(),
        ROWS,
    ),
    "cosine_embedding_loss": Case(
        lambda x, y: F.cosine_embedding_loss(x, y, torch.tensor([1.0, -1.0, 1.0])),
        lambda x, y: (
            cosine(x, y, float(np.float32(1e-12))) * np.array([-1, 1, -1]) + np.array([1, 0, 1])
        ).mean(),
        (ROW, ROW),
    ),
    "gaussian_nll_loss": Case(
        lambda x, t, v: F.gaussian_nll_loss(x, t, v, full=True),
        lambda x, t, v: ((log(v) + (x - t) ** 2 / v + mp.log(2 * mp.pi)) / 2).mean(),
        (ROW, ROW, ROW),
    ),
    "poisson_nll_loss": Case(F.poisson_nll_loss, lambda x, t: (exp(x) - t * x).mean(), (ROW, ROW)),
    "poisson_nll_loss in full": Case(
        lambda x, t: F.poisson_nll_loss(x, t, log_input=False, full=True),
        lambda x, t: (x - t * log(x + num(1e-8)) + t * log(t) - t + log(2 * mp.pi * t) / 2).mean(),
        (ROW, ROW),
        1.1,
        3.0,
    ),
    "triplet_margin_loss": Case(F.triplet_margin_loss, triplet, (ROW, ROW, ROW)),
    "triplet_margin_with_distance_loss": Case(
        F.triplet_margin_with_distance_loss, triplet, (ROW, ROW, ROW)
    ),
    # Norms of layers.
    "layer_norm": Case(
        lambda x, w, b: F.layer_norm(x, (5,), w, b),
        lambda x, w, b: normalized(x, 1, w, b),
        (ROW, (5,), (5,)),
    ),
    "rms_norm": Case(
        lambda x, w: F.rms_norm(x, (5,), w, 0.3),
        lambda x, w: x / root((x * x).mean(1, keepdims=True) + A) * w,
        WEIGHTED,
    ),
    "group_norm": Case(lambda x: F.group_norm(x, 2), lambda x: groups(x, 2), ((2, 6, 5),)),
    "instance_norm": Case(F.instance_norm, lambda x: normalized(x, 2), (CHANNELS,)),
    "batch_norm": Case(
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: normalized(x, (0, 2)),
        (CHANNELS,),
    ),
    "batch_norm of given statistics": Case(
        lambda x, m, v: F.batch_norm(x, m, v, eps=0.3),
        lambda x, m, v: (x - m) / root(v + A),
        (ROW, (5,), (5,)),
        gradients=1,
    ),
    "local_response_norm": Case(
        lambda x: F.local_response_norm(x, 3, alpha=0.3, beta=0.7),
        lambda x: x / power(1 + A * across_channels(x * x), 0.7),
        ((2, 3, 2),),
    ),
    # Windows.
    "avg_pool1d": Case(lambda x: F.avg_pool1d(x, 3), lambda x: pooled(x, 3), ((1, 2, 7),)),
    "avg_pool2d": Case(
        lambda x: F.avg_pool2d(x, 3, 1), lambda x: pooled(x, 3, 3, stride=1), ((1, 4, 5),)
    ),
    "avg_pool3d": Case(lambda x: F.avg_pool3d(x, 3), lambda x: pooled(x, 3, 3, 3), ((1, 3, 4, 3),)),
    "adaptive_avg_pool1d": Case(
        lambda x: F.adaptive_avg_pool1d(x, 3), lambda x: pieces(x, 3), ((1, 2, 7),)
    ),
    "adaptive_avg_pool2d": Case(
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        lambda x: pieces(pieces(x, 3), 2, -2),
        ((1, 3, 7),),
    ),
    "adaptive_avg_pool3d": Case(
        lambda x: F.adaptive_avg_pool3d(x, (1, 2, 2)),
        lambda x: pieces(pieces(pieces(x, 2), 2, -2), 1, -3),
        ((1, 3, 3, 3),),
    ),
    "interpolate.area": Case(
        lambda x: F.interpolate(x, 3, mode="area"), lambda x: pieces(x, 3), ((1, 2, 7),)
    ),
    "lp_pool1d": Case(
        lambda x: F.lp_pool1d(x, 3, 3),
        lambda x: norm(windows(x, 3)[..., ::3, :], 3, -1),
        ((1, 2, 6),),
    ),
    "conv1d": Case(F.conv1d, convolved, ((2, 3, 7), (2, 3, 3))),
    "conv2d": Case(F.conv2d, convolved, ((1, 2, 4, 4), (2, 2, 3, 2))),
    "conv3d": Case(F.conv3d, convolved, ((1, 1, 3, 3, 3), (2, 1, 2, 3, 2))),
    "conv_transpose1d": Case(F.conv_transpose1d, transposed, ((2, 3, 4), (3, 2, 3))),
    "conv_transpose2d": Case(F.conv_transpose2d, transposed, ((1, 2, 3, 3), (2, 2, 3, 2))),
    "conv_transpose3d": Case(F.conv_transpose3d, transposed, ((1, 1, 2, 2, 2), (1, 2, 2, 3, 2))),
    # Layers.
    "prelu": Case(F.prelu, lambda x, w: np.where(x > 0, x, w * x), (ROW, (5,)), -0.9),
    "glu": Case(F.glu, lambda x: x[:, :3] / (1 + exp(-x[:, 3:])), ((3, 6),)),
    "scaled_dot_product_attention": Case(
        F.scaled_dot_product_attention, attended, ((2, 3, 5), (2, 4, 5), (2, 4, 2))
    ),
    "multi_head_attention_forward": Case(
        lambda q, k, v, w, o: F.multi_head_attention_forward(
            q, k, v, 6, 2, w, None, None, None, False, 0.0, o, None
        )[0],
        heads,
        ((3, 1, 6), (4, 1, 6), (4, 1, 6), (18, 6), (6, 6)),
    ),
    "multi_head_attention_forward without weights": Case(
        lambda q, k, v, w, o, b: F.multi_head_attention_forward(
            q, k, v, 6, 2, w, b, None, None, False, 0.0, o, None, need_weights=False
        )[0],
        heads,
        ((3, 1, 6), (4, 1, 6), (4, 1, 6), (18, 6), (6, 6), (18,)),
    ),
    "multi_head_attention_forward of separate weights": Case(
        lambda q, k, v, a, b, c, o: F.multi_head_attention_forward(
            *(q, k, v, 6, 2, None, None, None, None, False, 0.0, o, None),
            use_separate_proj_weight=True,
            q_proj_weight=a,
            k_proj_weight=b,
            v_proj_weight=c,
        )[0],
        lambda q, k, v, a, b, c, o: heads(q, k, v, np.concatenate([a, b, c]), o),
        ((3, 1, 6), (4, 1, 6), (4, 1, 6), (6, 6), (6, 6), (6, 6), (6, 6)),
    ),
    # Of what a mask keeps.
    "masked.mean": Case(lambda x: torch.masked.mean(x, 1, mask=MASK), rows_of(np.mean), ROWS),
    "masked.var": Case(lambda x: torch.masked.var(x, 1, mask=MASK), rows_of(var), ROWS),
    "masked.std": Case(lambda x: torch.masked.std(x, 1, mask=MASK), rows_of(std), ROWS),
    "masked.norm": Case(lambda x: torch.masked.norm(x, 2, 1, mask=MASK), rows_of(norm), ROWS),
    "masked.logsumexp": Case(
        lambda x: torch.masked.logsumexp(x, 1, mask=MASK), rows_of(log_of_sum), ROWS
    ),
    "masked.softmax": Case(
        lambda x: torch.masked.softmax(x, 1, mask=MASK)[MASK],
        lambda x: np.concatenate([softmax(row[k]) for row, k in zip(x, MASK, strict=True)]),
        ROWS,
    ),
}


# ------------------------------------------------------------------------------------- elementwise

RANGES = ((0.1, 0.9), (1.1, 3.0), (-0.9, -0.1), (-3.0, -1.1))
OWN = {
    "mcf.sinpi": (mcf.functional.sinpi, mp.sinpi),
    "mcf.cospi": (mcf.functional.cospi, mp.cospi),
    "mcf.cbrt": (mcf.functional.cbrt, lambda x: mp.sign(x) * mp.cbrt(abs(x))),
    "mcf.gamma": (mcf.functional.gamma, mp.gamma),
    "polygamma 3": (lambda x: torch.polygamma(3, x), functions.polygamma(3)),
}
ELEMENTWISE = {
    **{name: (*row, 1) for name, row in (functions.FUNCTIONS | OWN).items()},
    **{name: (*row, 2) for name, row in functions.OF_TWO.items()},
}
del ELEMENTWISE["mvlgamma"]  # of arguments above these ranges
GRADIENTS = {"floor_divide": 0, "heaviside": 0, "soft_margin_loss": 1}
"""Of so many arguments PyTorch has gradients, where not of all."""

# Functions without an algorithm.
REFUSED = {
    *("erfcx", "gammainc", "gammaincc", "i0", "i0e", "i1", "i1e", "log_ndtr"),
    *("modified_bessel_k0", "modified_bessel_k1"),
    *("scaled_modified_bessel_k0", "scaled_modified_bessel_k1"),
    *("zeta", "zeta(3, x)", "zeta(x, 1)"),
}


NEEDS_FLOAT64 = {"float_power": 48}
"""Functions that PyTorch evaluates or differentiates in float64, and up to how many bits."""


def filled(format, shape, low, high, seed):
    """Return an expansion of random numbers in a range, with all bits in every term."""
    generator = torch.Generator().manual_seed(seed)
    leading = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    terms = [
        leading * (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5) * format.u**i
        if i
        else leading
        for i in range(format.terms)
    ]
    return mcf.MCFTensor(mcf.expansion.renormalize([t.to(format.base) for t in terms]), format)


def numbers(x):
    """Return an array of the exact numbers of an expansion."""
    total = [sum(column) for column in zip(*map(fractions, x.components), strict=True)]
    found = np.empty(len(total), object)
    found[:] = [num(q.numerator) / q.denominator for q in total]
    return found.reshape(x.shape)


def gradients(made, inputs, format):
    """Return a cotangent, and the numbers of the gradients of its product with a result."""
    cotangent = filled(format, made.shape, 0.1, 0.9, 77)
    found = torch.autograd.grad(made, inputs, cotangent, allow_unused=True)
    return numbers(cotangent), [
        np.full(x.shape, Z) if g is None else numbers(mcf.as_expansion(g, format))
        for x, g in zip(inputs, found, strict=True)
    ]


def ordinary(format):
    """Return two columns of arguments, each of a range beside another one."""
    ends = RANGES, RANGES[1::-1] + RANGES[:1:-1]
    return [
        torch.cat([filled(format, (2,), *ends, 10 * i + j) for j, ends in enumerate(column)])
        for i, column in enumerate(ends)
    ]


def require(error, size, units, format, where):
    """Require that an error is at most so many u^n of a size."""
    found = (error - STEP) / max(size, STEP) * 2**format.precision
    assert found <= units, f"{mp.nstr(found, 4)} u^n in {where}"


def check_elements(function, exact, arguments, format, with_gradients):
    """Compare a function of numbers, and its derivatives, element by element."""
    columns = ordinary(format)[:arguments]
    rows = [*zip(*map(numbers, columns), strict=True)]
    kept = [i for i, row in enumerate(rows) if exact(*row) is not None]
    assert kept
    columns = [
        column[kept].detach().requires_grad_(i < with_gradients) for i, column in enumerate(columns)
    ]
    rows = [rows[i] for i in kept]
    made = function(*columns)
    for row, y in zip(rows, numbers(made.detach()), strict=True):
        expected = exact(*row)
        require(abs(y - expected), abs(expected), OF_NUMBERS, format, f"the result of {row}")
    if not made.requires_grad:
        return
    cotangent, found = gradients(made, columns[:with_gradients], format)
    for k, slopes in enumerate(found):
        for g, row, slope in zip(cotangent, rows, slopes, strict=True):
            ends = [exact(*row[:k], row[k] + step, *row[k + 1 :]) for step in (STEP, -STEP)]
            expected = g * (ends[0] - ends[1]) / (2 * STEP)
            require(
                abs(slope - expected),
                abs(expected),
                OF_SLOPES,
                format,
                f"the gradient {k} of {row}",
            )


def check_arrays(case, format):
    """Compare a function of tensors relative to its largest element, and a derivative along a
    random direction relative to the sum of magnitudes."""
    inputs = [
        filled(format, shape, case.low, case.high, i).requires_grad_(i < case.gradients)
        for i, shape in enumerate(case.shapes)
    ]
    arrays = [numbers(x.detach()) for x in inputs]
    made = case.function(*inputs)
    expected = np.asarray(case.exact(*arrays), object)
    assert made.shape == expected.shape
    error = np.abs(numbers(made.detach()) - expected)
    require(np.max(error), np.max(np.abs(expected)), OF_ARRAYS, format, "the result")
    inputs = inputs[: case.gradients]
    if not inputs:
        return
    cotangent, found = gradients(made, inputs, format)
    rng = np.random.default_rng(0)
    directions = [np.vectorize(num, [object])(rng.uniform(-1, 1, x.shape)) for x in inputs]
    ends = []
    for h in (STEP, -STEP):
        moved = [x + h * v for x, v in zip(arrays, directions, strict=False)]
        ends.append(np.sum(cotangent * case.exact(*moved, *arrays[len(moved) :])))
    parts = [g * v for g, v in zip(found, directions, strict=True)]
    size = sum(np.sum(np.abs(part)) for part in parts)
    error = abs(sum(map(np.sum, parts)) - (ends[0] - ends[1]) / (2 * STEP))
    require(error, size, OF_GRADIENTS, format, "the gradient")


def check(name, format):
    if name in ELEMENTWISE:
        check_elements(*ELEMENTWISE[name], format, GRADIENTS.get(name, 2))
    if name in CASES:
        check_arrays(CASES[name], format)


if not hasattr(F, "linear_cross_entropy"):  # before torch 2.13
    del CASES["linear_cross_entropy"]

if torch.__version__ >= "2.14":  # which has removed it
    del CASES["cholesky"]
SCANNED = [*dict.fromkeys([*ELEMENTWISE, *CASES])]


@pytest.mark.with_float64("its terms are float64")
@pytest.mark.parametrize("name", SCANNED)
def test_function_of_fp64x2(name):
    with mp.workprec(BITS):
        check_or_refuse(name, mcf.fp64x2)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("name", SCANNED)
def test_function(name, format):
    check_or_refuse(name, format)


def check_or_refuse(name, format):
    if name in REFUSED:
        function, _, arguments = ELEMENTWISE[name]
        with pytest.raises(NotImplementedError):
            function(*ordinary(format)[:arguments])
    elif not has_float64() and format.precision <= NEEDS_FLOAT64.get(name, 0):
        with pytest.raises(Float64Error):
            check(name, format)
    else:
        check(name, format)


def second(function, columns, place):
    """Return the second derivative for one argument, or None if it is zero."""
    columns = [x.clone().requires_grad_(i == place) for i, x in enumerate(columns)]
    made = function(*columns)
    for _ in range(2):
        if made is None or not made.requires_grad:
            return None
        (made,) = torch.autograd.grad(
            made.sum(), columns[place], create_graph=True, allow_unused=True
        )
    return made


def check_second(name, format):
    """Compare second derivatives relative to the largest of a function and its derivatives."""
    function, exact, arguments = ELEMENTWISE[name]
    columns = ordinary(format)[:arguments]
    rows = [*zip(*map(numbers, columns), strict=True)]
    kept = [i for i, row in enumerate(rows) if exact(*row) is not None]
    columns, rows = [x[kept].detach() for x in columns], [rows[i] for i in kept]
    for k in range(min(arguments, GRADIENTS.get(name, 2))):
        plain = second(function, [mcf.as_plain(x, torch.float64) for x in columns], k)
        found = second(function, columns, k)
        if found is None:
            assert plain is None or plain.eq(0).all(), f"derivative {k} has no derivative"
            continue
        for row, y in zip(rows, numbers(found.detach()), strict=True):
            steps = (-STEP, 0, STEP)
            below, at, above = (exact(*row[:k], row[k] + d, *row[k + 1 :]) for d in steps)
            slope, bend = (above - below) / (2 * STEP), (above - 2 * at + below) / STEP**2
            size, where = max(abs(at), abs(slope), abs(bend)), f"second derivative {k} of {row}"
            require(abs(y - bend), size, 8 * OF_SLOPES, format, where)


@pytest.mark.with_float64("of a format whose terms are float64")
@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("name", [x for x in ELEMENTWISE if x not in {*REFUSED, "hardsigmoid"}])
def test_second_derivatives(name):
    with mp.workprec(BITS):
        check_second(name, mcf.fp64x2)


# ------------------------------------------------------------------------------- nothing forgotten

SAME = {
    "__rdiv__": "div",
    "__rmatmul__": "matmul",
    "__rmod__": "remainder",
    "__rpow__": "pow",
    "_batch_norm_with_update": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_unsafe_masked_index_put_accumulate": "index_put",
    "dropout2d": "dropout",
    "dropout3d": "dropout",
    "linalg.cholesky_ex": "linalg.cholesky",
    "linalg.cross": "cross",
    "linalg.inv_ex": "linalg.inv",
    "linalg.lu_factor": "linalg.lu",
    "linalg.lu_factor_ex": "linalg.lu",
    "linalg.solve_ex": "linalg.solve",
    "linalg.tensorinv": "linalg.inv",
    "linalg.tensorsolve": "linalg.solve",
    "lp_pool2d": "lp_pool1d",
    "lp_pool3d": "lp_pool1d",
    "lu": "linalg.lu",
    "lu_solve": "linalg.lu_solve",
    "masked.cumprod": "cumprod",
    "masked.cumsum": "cumsum",
    "masked.log_softmax": "log_softmax",
    "masked.logaddexp": "logaddexp",
    "masked.normalize": "normalize",
    "masked.prod": "prod",
    "masked.softmin": "masked.softmax",
    "masked.sum": "sum",
    "nanquantile": "quantile",
    "native_batch_norm": "batch_norm",
    "native_dropout_backward": "dropout",
    "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm",
    "pinverse": "linalg.pinv",
    "polygamma": "polygamma 1",
    "qr": "linalg.qr",
    "svd": "linalg.svd",
    "true_divide": "div",
}
"""Names of PyTorch's database, and the names here of functions with the same code."""

RANDOM = {
    *operators.RANDOM,
    *operators.DRAWN,
    *("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout.without_train"),
    *("svd_lowrank", "pca_lowrank"),
}
UNCOMPARED = RANDOM | {"nextafter"}  # a neighbour has a tail of its own
OF_LOGITS = {"cross_entropy", "kl_div", "log_softmax", "logsumexp", "selective_log_softmax"}


def is_scanned(name):
    for prefix in ("nn.functional.", "special.", "torch.ops.aten."):
        name = name.removeprefix(prefix)
    short = name.partition(".")[0]
    names = (
        name,
        name.rpartition(".")[0],
        short,
        SAME.get(name),
        SAME.get(short),
        short.strip("_").removeprefix("r"),
    )
    return any(x in SCANNED for x in names)


def test_the_library_s_own_functions_are_scanned():
    own = {name for name in mcf.functional.__all__ if f"mcf.{name}" in SCANNED}
    assert own == {*mcf.functional.__all__} - OF_LOGITS


def significands(x):
    """Return the elements of an expansion or the number x, without signs and powers of two."""
    columns = (
        x.components if isinstance(x, mcf.MCFTensor) else (torch.tensor([x], dtype=torch.float64),)
    )
    leading = columns[0].double().reshape(-1)
    size = torch.ldexp(torch.where(leading < 0, -1.0, 1.0), torch.frexp(leading).exponent)
    found = [(t.double().reshape(-1) / size).nan_to_num(7).tolist() for t in columns]
    return {row if len(row) > 1 else (*row, 0.0) for row in zip(*found, strict=True)}


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    "name", rotated(x for x in operators.OPERATORS if not is_scanned(x) and x not in UNCOMPARED)
)
def test_other_operators_only_move_elements(name):
    """Results consist of elements of the operands, their negatives and multiples by powers of two,
    of given numbers, and of counts."""
    op = operators.OPERATORS[name]
    for args, kwargs in operators.inputs(op, mcf.fp64x2, 3):
        args, kwargs = tree_map_only(mcf.MCFTensor, with_tails, (args, kwargs))
        wide = tree_map_only(mcf.MCFTensor, operators.as_wide, (args, kwargs))
        expected, found = (
            operators.attempt(functools.partial(op, *own[0], **own[1]))
            for own in (wide, (args, kwargs))
        )
        if isinstance(expected, Exception) or isinstance(found, NotImplementedError):
            continue
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, mcf.MCFTensor | float)]
        own = set().union(*map(significands, [*given, *range(99)]))
        for x in tree_leaves(found):
            if isinstance(x, mcf.MCFTensor):
                assert significands(x) <= own


def with_tails(x):
    """Return an expansion of the same leading terms, with tails that are neither zero nor ties."""
    leading = x.components[0]
    ramp = torch.linspace(0.1, 0.4, leading.numel(), dtype=torch.float64).view(x.shape)
    tail = torch.empty_like(leading).copy_(ramp).mul_(leading).mul_(2.0**-53)
    return mcf.MCFTensor([leading, tail], x.format)
