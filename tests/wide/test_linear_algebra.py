"""Linear algebra beyond 48 bits, and without float64, against exact rationals and mpmath."""

import contextlib
from fractions import Fraction
from math import comb

import mpmath
import pytest
import torch
from torch.utils._pytree import tree_leaves

import mcftensor as mcf
from support.helpers import sample
from support.no_float64 import no_float64
from support.rotation import rotated

SLOW = pytest.mark.slow
CASES = [
    pytest.param((mcf.fp64x2, False), id="fp64x2"),
    pytest.param((mcf.fp32x3, False), id="fp32x3", marks=SLOW),
    pytest.param((mcf.fp32x2, True), id="fp32x2, without", marks=SLOW),
    pytest.param((mcf.fp32x3, True), id="fp32x3, without", marks=SLOW),
]
BITS = 600


@pytest.fixture(params=CASES)
def format(request):
    """A format that the machine type does not hold, which may be any up to 48 bits without
    float64.
    """
    made, is_without = request.param
    with no_float64(of_all=False) if is_without else contextlib.nullcontext():
        yield made


def order_of(format):
    """The order of the worst matrices of a condition below 1 / u^n."""
    return 12 if format.precision > 48 else 10


@pytest.fixture(autouse=True)
def _precision():
    with mpmath.workprec(BITS):
        yield


def matrix(rows, format):
    flat = [x for row in rows for x in row]
    return mcf.exact.from_exact(flat, format).view(len(rows), -1)


def hilbert(n, format):
    return matrix([[Fraction(1, i + j + 1) for j in range(n)] for i in range(n)], format)


def pascal(n, format):
    return matrix([[comb(i + j, i) for j in range(n)] for i in range(n)], format)


def vandermonde(n, format):
    return matrix([[Fraction(i + 1, n) ** j for j in range(n)] for i in range(n)], format)


def kahan(n, format):
    """Of Higham's gallery, with rational s and c: upper triangular, ill-conditioned."""
    s, c = Fraction(4, 5), Fraction(3, 5)
    rows = [[-c * s**i if j > i else s**i * (i == j) for j in range(n)] for i in range(n)]
    return matrix(rows, format)


def entries(x):
    """A matrix, or a vector as a column, exactly."""
    columns = x.detach() if x.dim() == 2 else x.detach().view(-1, 1)
    terms = [t.tolist() for t in columns.components]
    rows = zip(*terms, strict=True)
    return mpmath.matrix([[sum(map(mpmath.mpf, t)) for t in zip(*r, strict=True)] for r in rows])


def assert_near(x, expected, format, units=8):
    """Errors of at most so many u^n of the largest element."""
    difference = entries(x) - expected
    size = max(abs(e) for e in expected)
    assert max(abs(e) for e in difference) <= units * size * mpmath.mpf(2) ** -format.precision


GALLERY = {"hilbert": hilbert, "pascal": pascal, "vandermonde": vandermonde, "kahan": kahan}
over_gallery = pytest.mark.parametrize(
    "made", [pytest.param(f, id=n, marks=[SLOW] * (n != "hilbert")) for n, f in GALLERY.items()]
)


@over_gallery
def test_equations(format, made):
    size = order_of(format)
    a = made(size, format)
    b = matrix([[Fraction(i + 1, 3), 1] for i in range(size)], format)
    exact = entries(a)
    inverse = exact**-1
    assert_near(torch.linalg.solve(a, b), inverse * entries(b), format)
    assert_near(torch.linalg.solve(a, b[:, 0]), inverse * entries(b[:, 0]), format)
    assert_near(torch.linalg.solve(a.T, b.T, left=False).T, inverse * entries(b), format)
    assert_near(torch.linalg.inv(a), inverse, format)


@over_gallery
def test_triangular_factors(format, made):
    a = made(6, format)
    exact = entries(a)
    p, lower, upper = torch.linalg.lu(a)
    assert_near(p @ (lower @ upper), exact, format, 64)
    assert lower.abs().max() <= 1
    assert lower.triu(1).eq(0).all()
    assert upper.tril(-1).eq(0).all()
    expected = mpmath.det(exact)
    assert_near(torch.linalg.det(a).view(1, 1), mpmath.matrix([[expected]]), format)
    sign, logarithm = torch.linalg.slogdet(a)
    assert float(sign) == mpmath.sign(expected)
    bound = 64 * mpmath.mpf(2) ** -format.precision * 20
    assert abs(entries(logarithm.view(1, 1))[0] - mpmath.log(abs(expected))) <= bound
    factors, pivots = torch.linalg.lu_factor(a)
    b = sample(format, 6, 2)
    assert_near(a @ torch.linalg.lu_solve(factors, pivots, b), entries(b), format, 2.0**60)


@pytest.mark.parametrize("made", [hilbert, pascal])
def test_cholesky_factors(format, made):
    a = made(10, format)
    expected = mpmath.cholesky(entries(a))
    assert_near(torch.linalg.cholesky(a), expected, format)
    assert_near(torch.linalg.cholesky(a, upper=True), expected.T, format)
    with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
        torch.linalg.cholesky(-a)


@over_gallery
def test_orthogonal_factors(format, made):
    a = made(7, format)[:, :4]
    q, r = torch.linalg.qr(a)
    assert_near(q @ r, entries(a), format, 64)
    assert_near(q.T @ q, mpmath.eye(4), format, 64)
    assert r.tril(-1).eq(0).all()
    b = sample(format, 7)
    found = torch.linalg.lstsq(a, b.view(7, 1))
    exact = entries(a)
    expected = mpmath.lu_solve(exact.T * exact, exact.T * entries(b))
    assert_near(found.solution, expected, format)
    left = entries(b) - exact * expected
    assert_near(found.residuals.view(1, 1), left.T * left, format, 64)
    short = torch.linalg.lstsq(a.T, b[:4].view(4, 1)).solution
    assert_near(short, exact * mpmath.lu_solve(exact.T * exact, entries(b[:4])), format)


@pytest.mark.parametrize("made", [hilbert, pascal])
def test_eigenvectors(format, made):
    a = made(8, format)
    values, vectors = torch.linalg.eigh(a)
    exact = entries(a)
    expected = mpmath.matrix(sorted(mpmath.eigsy(exact, eigvals_only=True)))
    assert_near(values, expected, format)
    assert_near(vectors.T @ vectors, mpmath.eye(8), format, 64)
    assert_near(vectors @ torch.diag(values) @ vectors.T, exact, format, 64)
    assert_near(torch.linalg.eigvalsh(a), expected, format)


def test_eigenvalues_that_are_equal(format):
    numbers = torch.tensor([1.0, 1, 1, 2, 2, 0], dtype=torch.float64)
    q, _ = torch.linalg.qr(sample(format, 6, 6))
    a = q @ torch.diag(mcf.as_expansion(numbers, format)) @ q.T
    a = (a + a.T) / 2
    values, vectors = torch.linalg.eigh(a)
    assert_near(values, mpmath.matrix(sorted(numbers.tolist())), format, 64)
    assert_near(vectors.T @ vectors, mpmath.eye(6), format, 64)
    assert_near(vectors @ torch.diag(values) @ vectors.T, entries(a), format, 64)


@pytest.mark.parametrize(
    "shape", [(6, 3), pytest.param((6, 6), marks=SLOW), pytest.param((3, 6), marks=SLOW)]
)
def test_singular_vectors(format, shape):
    a = hilbert(6, format)[: shape[0], : shape[1]]
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    size = min(shape)
    assert_near(u @ torch.diag(s) @ vh, entries(a), format, 64)
    assert_near(u.T @ u, mpmath.eye(size), format, 64)
    assert_near(vh @ vh.T, mpmath.eye(size), format, 64)
    expected = mpmath.svd(entries(a), compute_uv=False)
    assert_near(torch.linalg.svdvals(a), mpmath.matrix([abs(x) for x in expected]), format, 64)
    u, _, vh = torch.linalg.svd(a)
    assert_near(u.T @ u, mpmath.eye(shape[0]), format, 64)
    assert_near(vh @ vh.T, mpmath.eye(shape[1]), format, 64)


def test_singular_vectors_of_zeros_are_those_of_the_machine_type(format):
    plain = torch.zeros(3, 3, dtype=format.dtype)
    for x, y in zip(
        torch.linalg.svd(mcf.as_expansion(plain, format)), torch.linalg.svd(plain), strict=True
    ):
        assert torch.equal(mcf.as_plain(x, format.dtype), y)


def test_singular_vectors_of_a_rank_that_is_not_full(format):
    a = sample(format, 6, 2) @ sample(format, 2, 4, seed=1)
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    assert_near(u @ torch.diag(s) @ vh, entries(a), format, 64)
    assert_near(u.T @ u, mpmath.eye(4), format, 64)


def test_a_condition_beyond_the_format_is_named(format):
    a = hilbert(30, format)
    for call in (lambda: torch.linalg.solve(a, a[:, :1]), lambda: torch.linalg.inv(a)):
        with pytest.raises(torch.linalg.LinAlgError, match=r"estimated condition of \d\.\de\+"):
            call()
    ones = mcf.as_expansion(torch.ones(3, 3, dtype=torch.float64), format)
    with pytest.raises(torch.linalg.LinAlgError, match="condition"):
        torch.linalg.qr(ones)
    with pytest.raises(torch.linalg.LinAlgError, match="element 2 is zero"):
        torch.linalg.inv(ones)
    inverse, info = torch.linalg.inv_ex(torch.stack([ones, torch.eye(3, dtype=format)]))
    assert info.tolist() == [2, 0]
    assert torch.isnan(inverse[0]).all()
    assert mcf.as_plain(inverse[1], torch.float64).equal(torch.eye(3, dtype=torch.float64))
    infinite = mcf.as_expansion(torch.full((2, 2), torch.inf, dtype=torch.float64), format)
    with pytest.raises(torch.linalg.LinAlgError, match="finite"):
        torch.linalg.inv(infinite)


@pytest.mark.with_float64("the format is fp64x2")
def test_batches():
    a, b = sample(mcf.fp64x2, 2, 3, 4, 4), sample(mcf.fp64x2, 3, 4, 2, seed=1)
    found = torch.linalg.solve(a, b)
    assert found.shape == (2, 3, 4, 2)
    assert found[1, 2].equal(torch.linalg.solve(a[1, 2], b[2]))
    assert torch.linalg.det(a).shape == (2, 3)


@pytest.mark.with_float64("the format is fp64x2")
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["rows", "columns"])
def test_gradients(contiguous, left):
    """Of x = inv(a) b with respect to a and b: - inv(a)^T g x^T and inv(a)^T g."""
    format = mcf.fp64x2
    a, b = sample(format, 4, 4), sample(format, 4, 2, seed=1).requires_grad_()
    a = (a if contiguous else a.mT).detach().requires_grad_()
    g = sample(format, 4, 2, seed=2)
    x = torch.linalg.solve(a, b) if left else torch.linalg.solve(a.mT, b.mT, left=False).mT
    x.backward(g)
    inverse = entries(a) ** -1
    assert_near(b.grad, inverse.T * entries(g), format, 64)
    assert_near(a.grad, -inverse.T * entries(g) * (inverse * entries(b)).T, format, 64)
    a.grad = None
    torch.linalg.det(a).backward()
    assert_near(a.grad, mpmath.det(entries(a)) * inverse.T, format, 64)
    a.grad = None
    torch.linalg.inv(a).backward(g @ g.T)
    assert_near(a.grad, -inverse.T * entries(g @ g.T) * inverse.T, format, 64)
    a.grad = None
    torch.linalg.eigvalsh(a + a.T).sum().backward()
    assert_near(a.grad, 2 * mpmath.eye(4), format, 64)


FACTORS = {
    "qr": torch.linalg.qr,
    "eigh": lambda x: torch.linalg.eigh(x + x.mT, "U"),
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_that_are_unique_up_to_signs_have_those_of_the_machine_type(name, format):
    torch.manual_seed(3)
    for shape in ((4, 4), (2, 3, 3)) if name == "eigh" else ((4, 4), (5, 3), (3, 5), (2, 3, 3)):
        plain = torch.randn(shape, dtype=format.dtype)
        found = FACTORS[name](mcf.as_expansion(plain, format))
        for x, y in zip(found, FACTORS[name](plain), strict=True):
            torch.testing.assert_close(mcf.as_plain(x, format.dtype), y, rtol=1e-3, atol=1e-4)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0), (2, 0, 3, 3)])
def test_no_matrices_and_matrices_of_no_elements(shape, format):
    plain = torch.zeros(shape, dtype=format.dtype)
    linalg = torch.linalg
    for function in (
        *(linalg.inv, linalg.det, linalg.slogdet, linalg.cholesky, linalg.qr, linalg.svd),
        *(linalg.eigh, linalg.eigvalsh, linalg.svdvals, linalg.lu_factor, torch.logdet),
        lambda x: linalg.solve(x, x),
        lambda x: linalg.lstsq(x, x),
        lambda x: linalg.solve_triangular(x, x, upper=True),
        lambda x: linalg.lu_solve(*linalg.lu_factor(x), x),
    ):
        expected = tree_leaves(function(plain))
        found = tree_leaves(function(mcf.as_expansion(plain, format)))
        assert [x.shape for x in found] == [x.shape for x in expected]


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (2, 3, 0)])
def test_matrices_that_must_be_square(shape, format):
    x = mcf.as_expansion(torch.ones(shape), format)
    linalg = torch.linalg
    for function in (
        *(linalg.inv, linalg.det, linalg.slogdet, linalg.cholesky, linalg.eigh),
        lambda x: linalg.solve(x, x),
        lambda x: linalg.solve_triangular(x, x, upper=True),
    ):
        with pytest.raises(RuntimeError, match="must be square"):
            function(x)


@pytest.mark.parametrize("driver", rotated([None, "gels", "gelsy", "gelsd", "gelss"]))
def test_least_squares_return_what_the_driver_returns(driver):
    for shape in ((4, 3), (3, 3), (2, 3)):
        torch.manual_seed(0)
        a, b = torch.randn(shape), torch.randn(shape[0], 2)
        expected = torch.linalg.lstsq(a, b, driver=driver)
        found = torch.linalg.lstsq(
            *(mcf.as_expansion(x, mcf.fp32x3) for x in (a, b)), driver=driver
        )
        assert found.rank.shape == expected.rank.shape
        values = mcf.as_plain(found.singular_values, torch.float32)
        torch.testing.assert_close(values, expected.singular_values)
