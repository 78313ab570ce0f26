"""Functions of differences of numbers with terms that lie far apart, against mpmath."""

import contextlib
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import mcftensor as mcf
from support.no_float64 import no_float64

mp = pytest.importorskip("mpmath")
np = pytest.importorskip("numpy")

UNITS = 4
BITS = 1200
FORMATS = pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16x2], ids=lambda f: f.name)

LARGE, SMALL = 2**66, Fraction(1, 2**40)
X = [
    [LARGE + 1, LARGE - 1, LARGE, LARGE + 3],
    [1 + SMALL / 2**16, 1 - SMALL / 2**16, 1, 1 + SMALL / 2**14],
    [3, 0.5, -2, 2**-20],
]
Y = [
    [LARGE, LARGE, LARGE + 1, LARGE - 2],
    [1, 1, 1 + SMALL / 2**16, 1 - SMALL / 2**16],
    [2, 1, -2, 1],
]
SLOPES = [[1, 2, -1, 3], [0.5, 1, 2, -1], [1, -1, 2, 0.25]]
CLASSES = torch.tensor([0, 1, 2])


@pytest.fixture(autouse=True)
def precision():
    with mp.workprec(BITS):
        yield


def numbers(x):
    """The numbers of an expansion or of lists, as an array of mpmath's."""
    if isinstance(x, torch.Tensor):
        terms = [t.double().numpy() for t in x.components]
        return sum((np.vectorize(mp.mpf, otypes=[object])(t) for t in terms[1:]), of(terms[0]))
    return of(x)


def of(x):
    def entered(v):
        return mp.mpf(Fraction(v).numerator) / Fraction(v).denominator

    return np.vectorize(entered, otypes=[object])(np.array(x, dtype=object))


sqrt, log, exp, sign = (
    np.vectorize(f, otypes=[object]) for f in (mp.sqrt, mp.log, mp.exp, mp.sign)
)


def centered(x):
    return x - x.mean(axis=1, keepdims=True)


def variance(x, correction=1):
    return (centered(x) ** 2).sum(axis=1) / (x.shape[1] - correction)


def normalized(x, eps=1e-5):
    return centered(x) / sqrt(variance(x, 0) + mp.mpf(eps))[:, None]


def normalized_gradient(x):
    slopes, y = of(SLOPES), normalized(x)
    along = (slopes * y).mean(axis=1, keepdims=True)
    return (centered(slopes) - y * along) / sqrt(variance(x, 0) + mp.mpf(1e-5))[:, None]


def distances(x, y, p):
    d = abs(x[:, None] - y[None])
    return d.max(axis=-1) if p == math.inf else (d**p).sum(axis=-1) ** (1 / mp.mpf(p))


def distances_gradient(x, y, p):
    d, result = x[:, None] - y[None], distances(x, y, p)[..., None]
    return (sign(d) * abs(d) ** (p - 1) / result ** (p - 1)).sum(axis=1)


def huber(d):
    return np.where(abs(d) > 1, abs(d) - mp.mpf(0.5), d * d / 2)


def clipped(d):
    return np.where(abs(d) > 1, sign(d), d)


def covariances(x):
    return centered(x).dot(centered(x).T) / (x.shape[1] - 1)


def correlations(x):
    c = covariances(x)
    return c / sqrt(np.outer(c.diagonal(), c.diagonal()))


def margins(x):
    found = [[max(0, 1 - r[t] + v) for i, v in enumerate(r) if i != t] for t, r in enumerate(x)]
    return np.array([sum(row) / 4 for row in found], dtype=object)


def sums_of_exponentials(x):
    def row(r):
        return [max(r[: i + 1]) + mp.log(sum(exp(r[: i + 1] - max(r[: i + 1])))) for i in range(4)]

    return np.array([row(r) for r in x], dtype=object)


def gradient(function, place=0):
    """The gradient of a function, in one of its operands."""

    def of_operands(x, y):
        operands = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        result = function(*operands)
        (result * torch.tensor(SLOPES) if result.shape == x.shape else result).sum().backward()
        return operands[place].grad

    return of_operands


def by_columns(x):
    return F.batch_norm(x.t().contiguous(), None, None, training=True).t()


def running_mean(x, y):
    mean = y[:, 0].clone()
    F.batch_norm(x.t().contiguous(), mean, torch.ones(3), training=True, momentum=1.0)
    return mean - x[:, 0]


def grouped(x):
    return F.group_norm(x.unsqueeze(-1), 2).squeeze(-1)


# The function, its oracle, and the size to which errors are relative; by default the result's.
ONES = lambda x, y: 1 + 0 * x  # noqa: E731
STEEP = lambda x, y: 1 + abs(normalized_gradient(x))  # noqa: E731
OPERATIONS = {
    "var": (lambda x, y: x.var(1), lambda x, y: variance(x)),
    "var of all": (lambda x, y: x[:1].var(), lambda x, y: variance(x[:1])[0]),
    "std": (lambda x, y: x.std(1, correction=0), lambda x, y: sqrt(variance(x, 0))),
    "var_mean": (lambda x, y: torch.var_mean(x, 1)[0], lambda x, y: variance(x)),
    "std_mean": (lambda x, y: torch.std_mean(x, 1)[0], lambda x, y: sqrt(variance(x))),
    "mean": (
        lambda x, y: x - x.mean(1, keepdim=True),
        lambda x, y: centered(x),
        lambda x, y: abs(centered(x)).max(axis=1, keepdims=True) + 0 * x,
    ),
    "var, gradient": (
        gradient(lambda x, y: x.var(1)),
        lambda x, y: 2 * centered(x) / 3,
        lambda x, y: abs(centered(x)).max(axis=1, keepdims=True) + 0 * x,
    ),
    "cov": (lambda x, y: torch.cov(x[:1].repeat(2, 1)), lambda x, y: covariances(x[[0, 0]])),
    "corrcoef": (
        lambda x, y: torch.corrcoef(torch.stack([x[0], y[0]])),
        lambda x, y: correlations(np.stack([x[0], y[0]])),
        lambda x, y: 1 + 0 * x[:2, :2],
    ),
    "mse_loss": (F.mse_loss, lambda x, y: ((x - y) ** 2).mean()),
    "mse_loss, none": (
        lambda x, y: F.mse_loss(x, y, reduction="none"),
        lambda x, y: (x - y) ** 2,
    ),
    "mse_loss, gradient": (gradient(F.mse_loss), lambda x, y: (x - y) / 6),
    "huber_loss": (F.huber_loss, lambda x, y: huber(x - y).mean()),
    "huber_loss, gradient": (gradient(F.huber_loss), lambda x, y: clipped(x - y) / 12),
    "smooth_l1_loss": (F.smooth_l1_loss, lambda x, y: huber(x - y).mean()),
    "smooth_l1_loss, gradient": (
        gradient(F.smooth_l1_loss, 1),
        lambda x, y: -clipped(x - y) / 12,
    ),
    "dist": (torch.dist, lambda x, y: mp.sqrt(((x - y) ** 2).sum())),
    "dist, gradient": (
        gradient(torch.dist),
        lambda x, y: (x - y) / mp.sqrt(((x - y) ** 2).sum()),
    ),
    "cdist": (lambda x, y: torch.cdist(x[:1], y[:1]), lambda x, y: distances(x[:1], y[:1], 2)),
    "cdist, many": (
        lambda x, y: torch.cdist(x.repeat(9, 1), y.repeat(9, 1), 1),
        lambda x, y: distances(np.tile(x, (9, 1)), np.tile(y, (9, 1)), 1),
    ),
    "cdist, inf": (
        lambda x, y: torch.cdist(x, y, math.inf),
        lambda x, y: distances(x, y, math.inf),
    ),
    "cdist, gradient": (
        gradient(lambda x, y: torch.cdist(x, y, 3), 1),
        lambda x, y: distances_gradient(y, x, 3),
        ONES,
    ),
    "pdist": (
        lambda x, y: F.pdist(torch.stack([x[0], y[0]])),
        lambda x, y: distances(x[:1], y[:1], 2)[0],
    ),
    "pdist, gradient": (
        gradient(lambda x, y: F.pdist(torch.stack([x[0], y[0]])), 1),
        lambda x, y: np.concatenate([distances_gradient(y[:1], x[:1], 2), 0 * x[1:]]),
    ),
    "layer_norm": (lambda x, y: F.layer_norm(x, (4,)), lambda x, y: normalized(x), ONES),
    "layer_norm, gradient": (
        gradient(lambda x, y: F.layer_norm(x, (4,))),
        lambda x, y: normalized_gradient(x),
        STEEP,
    ),
    "group_norm": (
        lambda x, y: grouped(x),
        lambda x, y: normalized(x.reshape(6, 2)).reshape(3, 4),
        ONES,
    ),
    "group_norm, gradient": (
        gradient(lambda x, y: F.group_norm(x.unsqueeze(-1), 1).squeeze(-1)),
        lambda x, y: normalized_gradient(x),
        STEEP,
    ),
    "instance_norm": (
        lambda x, y: F.instance_norm(x.unsqueeze(0)).squeeze(0),
        lambda x, y: normalized(x),
        ONES,
    ),
    "batch_norm": (
        lambda x, y: by_columns(x),
        lambda x, y: normalized(x),
        ONES,
    ),
    "batch_norm, gradient": (
        gradient(lambda x, y: by_columns(x)),
        lambda x, y: normalized_gradient(x),
        STEEP,
    ),
    "batch_norm, eval": (
        lambda x, y: F.batch_norm(x.t(), y[:, 0].clone(), torch.ones(3), eps=1e-30).t(),
        lambda x, y: x - y[:, :1],
    ),
    "softmax": (
        lambda x, y: x.softmax(1),
        lambda x, y: (
            exp(x - x.max(axis=1)[:, None]) / exp(x - x.max(axis=1)[:, None]).sum(axis=1)[:, None]
        ),
    ),
    "logcumsumexp": (lambda x, y: x.logcumsumexp(1), lambda x, y: sums_of_exponentials(x)),
    "multi_margin_loss": (
        lambda x, y: F.multi_margin_loss(x, CLASSES, reduction="none"),
        lambda x, y: margins(x),
    ),
    "multilabel_margin_loss": (
        lambda x, y: F.multilabel_margin_loss(x[0], torch.tensor([0, 1, -1, 0])),
        lambda x, y: sum(max(0, 1 - x[0, j] + x[0, i]) for j in (0, 1) for i in (2, 3)) / 4,
    ),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(x[1, 1:2], torch.zeros(1)),
        lambda x, y: -mp.log(1 - x[1, 1]),
    ),
    "binary_cross_entropy, 1": (
        lambda x, y: F.binary_cross_entropy(x[1, 1:3], torch.ones(2), reduction="sum"),
        lambda x, y: -mp.log(x[1, 1]),
    ),
    "floor_divide": (
        lambda x, y: x[:2] // y[:2],
        lambda x, y: np.vectorize(mp.floor, otypes=[object])(x[:2] / y[:2]),
    ),
    "hardtanh, gradient": (
        gradient(lambda x, y: F.hardtanh(x, -1.0, 1.0).sum(1)),
        lambda x, y: np.where(abs(x) < 1, mp.mpf(1), mp.mpf(0)),
    ),
}


@pytest.mark.thinned(of=8)
@FORMATS
@pytest.mark.parametrize("name", OPERATIONS)
def test_functions_of_differences(name, format):
    assert_exact(name, format)


LONG = ["std", "std_mean", "dist", "dist, gradient", "cdist, gradient", "pdist, gradient"]


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", LONG)
def test_functions_of_differences_without_float64(name):
    assert_exact(name, mcf.fp32x2, no_float64())


@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16x2], ids=str)
def test_places_without_float64(format):
    x, y = (mcf.exact.from_exact(rows, format) for rows in (X, Y))
    with no_float64():
        found = torch.searchsorted(x[1].sort().values, y[1])
    assert found.tolist() == [sum(v < w for v in X[1]) for w in Y[1]]


def assert_exact(name, format, context=None):
    x, y = (mcf.exact.from_exact(rows, format) for rows in (X, Y))
    a, b = numbers(x), numbers(y)
    assert (a == of(X)).all()
    assert (b == of(Y)).all()
    function, oracle, *size = OPERATIONS[name]
    with context or contextlib.nullcontext():
        result = function(x, y)
    found = np.asarray(numbers(result), dtype=object)
    expected = np.asarray(oracle(a, b), dtype=object)
    assert found.shape == expected.shape
    sizes = abs(expected) if not size else size[0](a, b)
    errors = abs(found - expected) / np.maximum(sizes, mp.mpf(format.full_precision_min))
    assert float(np.max(errors)) <= UNITS * 2.0**-format.precision


def test_running_statistics_keep_all_terms():
    x, y = (mcf.exact.from_exact(rows, mcf.fp32x2) for rows in (X, Y))
    expected = numbers(x).mean(axis=1) - numbers(x)[:, 0]
    assert (abs(numbers(running_mean(x, y)) - expected) <= abs(expected) * 2.0**-22).all()


@FORMATS
def test_comparisons_with_tolerance_and_places_are_exact(format):
    x, y = (mcf.exact.from_exact(rows, format) for rows in (X, Y))
    difference = abs(of(X) - of(Y))
    assert torch.isclose(x, y, rtol=0.0, atol=2.0).tolist() == (difference <= 2).tolist()
    near = 2.0**-56
    assert torch.isclose(x, y, rtol=0.0, atol=near).tolist() == (difference <= near).tolist()
    assert torch.allclose(x[:1], y[:1], rtol=0.0, atol=2.0) == bool((difference[0] <= 2).all())
    row, wanted = x[1].sort().values, y[1]
    places = [sum(v < w for v in X[1]) for w in Y[1]]
    assert torch.searchsorted(row, wanted).tolist() == places
    assert torch.bucketize(wanted, row).tolist() == places
    assert torch.searchsorted(row, 1.0).item() == 1
    assert torch.searchsorted(row, 1.0, right=True).item() == 2


def same(x, y):
    return all(map(torch.equal, x.components, y.components))


PATHS = {
    "std": lambda x, y: x.std(1),
    "mean": lambda x, y: x.mean(1),
    "softmax": lambda x, y: x.softmax(1),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "mse_loss": F.mse_loss,
    "layer_norm": lambda x, y: F.layer_norm(x, (4,)),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, training=True),
    "dist": torch.dist,
    "cdist": torch.cdist,
    "isclose": lambda x, y: torch.isclose(x, y, rtol=0.0, atol=2.0).to(x.dtype) * x,
}


ROUNDED = pytest.mark.with_float64("mapped, it is a norm of rounded differences without it")


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=ROUNDED if x == "dist" else ()) for x in PATHS]
)
def test_compiled_code_and_transforms_give_the_same(name):
    function = PATHS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    ordinary = mcf.as_expansion(torch.rand(3, 4, dtype=torch.float64), mcf.fp32x2)
    far = [mcf.exact.from_exact(rows, mcf.fp32x2) for rows in (X, Y)]
    for x, y in (far, (ordinary, ordinary.flip(0))):
        expected = function(x, y)
        assert same(compiled(x, y), expected)
        if name != "isclose":
            mapped = torch.func.vmap(function)(torch.stack([x, y]), torch.stack([y, y]))
            assert same(mapped[0], expected)


def test_results_written_into_tensors():
    x = mcf.exact.from_exact(X, mcf.fp32x2)
    expected = torch.std(x, 1)
    assert same(torch.std(x, 1, out=torch.empty_like(expected)), expected)
    plain = torch.empty(0, dtype=torch.float64)
    with mcf.when_rounded("ignore"):
        torch.std(x, 1, out=plain)
    assert torch.equal(plain.float(), expected.components[0])
    means = torch.var_mean(x, 1)[1]
    assert same(torch.mean(x, 1, out=torch.empty_like(means)), means)


def test_distances_of_many_near_rows():
    """PyTorch's products of matrices would cancel."""
    rows = torch.rand(30, 4, dtype=torch.float64)
    x, y = (mcf.as_expansion(t, mcf.fp32x2) for t in (rows, rows + 1e-6))
    found = torch.cdist(x, y).diagonal()
    expected = ((y - x).square().sum(1)).sqrt()
    assert torch.allclose(mcf.as_plain(found), mcf.as_plain(expected), rtol=1e-7, atol=0)
    error = (mcf.as_plain(found, torch.float64) / mcf.as_plain(expected, torch.float64) - 1).abs()
    assert error.max() < 2.0**-44


def test_large_tensors_and_shapes():
    x = mcf.exact.from_exact(X, mcf.fp32x2)
    large = x[:1].repeat(5000, 1).unsqueeze(0)
    assert same(F.layer_norm(large, (4,))[0, :1], F.layer_norm(x[:1], (4,)))
    assert same(large.var((0, 2), correction=0)[:1], x[:1].var(1, correction=0))
    assert same(
        torch.cdist(large[0, :2000], large[0, :600])[7, :3], torch.cdist(x[:1], x[:1])[0].repeat(3)
    )


def test_gradients_of_hardsigmoid():
    x = mcf.as_expansion(torch.tensor([0.5, 2.0, 4.0]), mcf.fp32x2).requires_grad_()
    torch.nn.functional.hardsigmoid(x).sum().backward()
    assert (
        mcf.as_plain(x.grad, torch.float64)
        .sub(torch.tensor([1 / 6, 1 / 6, 0], dtype=torch.float64))
        .abs()
        .max()
        < 1e-14
    )


SPREADS = {
    "var": lambda x: x.var(),
    "var of rows": lambda x: x.view(1, -1).var(1),
    "var_mean": lambda x: torch.var_mean(x)[0],
    "std": lambda x: x.std() ** 2,
    "std_mean of rows": lambda x: torch.std_mean(x.view(1, -1), 1)[0] ** 2,
    "layer_norm": lambda x: F.layer_norm(x.view(1, -1), [len(x)], eps=0.0),
    "group_norm": lambda x: F.group_norm(x.view(1, -1), 1, eps=0.0),
}


@pytest.mark.with_float64("without it, differences are those of two float32 terms")
@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.fp32x3, mcf.fp64x2], ids=str)
def test_a_mean_that_is_large_beside_the_deviations(format, name):
    """Of numbers that float64 holds, and whose variance in float64 has 27 bits."""
    x = mcf.exact.from_exact([10**8 + Fraction(k, 128) for k in (1, 25, 3, 47, 5, 6, 75)], format)
    numbers = mcf.exact.to_fraction(x)
    mean = sum(numbers) / 7
    variance = sum((a - mean) ** 2 for a in numbers) / 6
    found = mcf.exact.to_fraction(
        SPREADS[name](x).flatten() if "norm" in name else SPREADS[name](x)
    )
    if "norm" not in name:
        found = found[0] if isinstance(found, list) else found
        assert abs(found / variance - 1) <= 4 * Fraction(2) ** -format.precision
        return
    for a, y in zip(numbers, found, strict=True):  # squared, to be without a root
        right = (a - mean) ** 2 / (variance * Fraction(6, 7))
        assert abs(y * y - right) <= 16 * Fraction(2) ** -format.precision * right
