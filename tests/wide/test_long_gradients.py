"""Gradients in formats that no machine type represents, against numeric ones in mpmath and exact
sums of rationals."""

import contextlib
import itertools
from fractions import Fraction

import mpmath as mp
import pytest
import torch
from torch.nn import functional as F

import mcftensor as mcf
from common.oracle import value
from support.helpers import sample
from support.no_float64 import no_float64

CASES = [
    pytest.param((mcf.fp64x2, False), id="fp64x2"),
    pytest.param((mcf.fp32x3, False), id="fp32x3"),
    pytest.param((mcf.fp32x2, True), id="fp32x2, without"),
    pytest.param((mcf.fp32x3, True), id="fp32x3, without"),
]
SOME = [
    x if i == 0 else pytest.param(*x.values, id=x.id, marks=pytest.mark.slow)
    for i, x in enumerate(CASES)
]
"""The same for what takes long."""

BITS = 500
STEP = mp.mpf(2) ** -120
SHAPE = (3, 4)


@pytest.fixture(params=CASES)
def format(request):
    """A format, with float64 or without it."""
    made, is_without = request.param
    with no_float64(of_all=False) if is_without else contextlib.nullcontext(), mp.workprec(BITS):
        yield made


def rationals(x):
    return [value([t.reshape(-1)[i : i + 1] for t in x.components]) for i in range(x.numel())]


def numbers(x):
    return [mp.mpf(y.numerator) / y.denominator for y in rationals(x)]


def gradient(loss, x):
    x = x.detach().requires_grad_()
    loss(x).backward()
    return x.grad


def numeric(loss, x):
    """The gradient of a function of a list of numbers by central differences."""
    found = []
    for i in range(len(x)):
        ends = [loss([*x[:i], x[i] + step, *x[i + 1 :]]) for step in (STEP, -STEP)]
        found.append((ends[0] - ends[1]) / (2 * STEP))
    return found


def assert_near(found, expected, units):
    """Errors of at most so many u^n of the largest element."""
    size = max(map(abs, expected))
    bits = found.format.precision
    errors = [abs(a - b) / size * 2**bits for a, b in zip(numbers(found), expected, strict=True)]
    assert max(errors) <= units, [mp.nstr(e, 4) for e in errors]


def mean(values):
    return mp.fsum(values) / len(values)


def smooth(d, beta):
    return d * d / (2 * beta) if abs(d) < beta else abs(d) - beta / 2


def huber(d, delta):
    return d * d / 2 if abs(d) <= delta else delta * (abs(d) - delta / 2)


LOSSES = {
    "mse": (F.mse_loss, lambda x, t: (x - t) ** 2),
    "smooth_l1": (lambda x, t: F.smooth_l1_loss(x, t, beta=0.5), lambda x, t: smooth(x - t, 0.5)),
    "huber": (lambda x, t: F.huber_loss(x, t, delta=0.5), lambda x, t: huber(x - t, 0.5)),
    "soft_margin": (F.soft_margin_loss, lambda x, t: mp.log(1 + mp.exp(-x * t))),
}


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, format):
    loss, exact = LOSSES[name]
    x, t = sample(format, *SHAPE), sample(format, *SHAPE, seed=1)
    own = numbers(t)
    expected = numeric(
        lambda y: mean([exact(a, b) for a, b in zip(y, own, strict=True)]), numbers(x)
    )
    assert_near(gradient(lambda y: loss(y, t), x), expected, 2)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin_loss(p, format):
    x, weight = sample(format, *SHAPE), sample(format, 4, seed=1).abs()
    labels, own = [2, 0, 3], numbers(weight)

    def exact(y):
        total = 0
        for i, label in enumerate(labels):
            row = y[4 * i : 4 * i + 4]
            margins = [max(0.5 - row[label] + a, 0) ** p for j, a in enumerate(row) if j != label]
            total += mp.fsum(margins) * own[label] / 4
        return total / 3

    def loss(y):
        return F.multi_margin_loss(y, torch.tensor(labels), p=p, margin=0.5, weight=weight)

    assert_near(gradient(loss, x), numeric(exact, numbers(x)), 4)


def normalized(rows, eps):
    """Rows of numbers, each less its mean and divided by its deviation."""
    found = []
    for row in rows:
        middle = mean(row)
        spread = mp.sqrt(mean([(a - middle) ** 2 for a in row]) + eps)
        found.append([(a - middle) / spread for a in row])
    return found


@pytest.mark.thinned(of=2)
def test_norms_of_batches_and_groups(format):
    shape = (3, 4, 2)
    x, factors = sample(format, *shape), sample(format, *shape, seed=1)
    weight = sample(format, 4, seed=2)
    g, w = numbers(factors), numbers(weight)
    channels = [[(n * 4 + c) * 2 + k for n in range(3) for k in range(2)] for c in range(4)]
    groups = [
        [(n * 4 + c) * 2 + k for c in half for k in range(2)]
        for n in range(3)
        for half in ((0, 1), (2, 3))
    ]

    def total(parts):
        def exact(y):
            rows = normalized([[y[i] for i in part] for part in parts], mp.mpf(1e-5))
            flat = zip(itertools.chain(*parts), itertools.chain(*rows), strict=True)
            return mp.fsum(g[i] * w[i // 2 % 4] * a for i, a in flat)

        return exact

    def batch(y):
        return (F.batch_norm(y, None, None, weight, training=True) * factors).sum()

    def group(y):
        return (F.group_norm(y, 2, weight) * factors).sum()

    assert_near(gradient(batch, x), numeric(total(channels), numbers(x)), 12)
    assert_near(gradient(group, x), numeric(total(groups), numbers(x)), 12)


@pytest.mark.thinned(of=2)
def test_norms_of_given_statistics(format):
    x, factors = sample(format, 5, 4), sample(format, 5, 4, seed=1)
    means, spreads, weight = (
        sample(format, 4, seed=2),
        sample(format, 4, seed=3).abs(),
        sample(format, 4, seed=4),
    )

    def loss(x, weight):
        return (F.batch_norm(x, means, spreads, weight) * factors).sum()

    m, s, w, g, y = map(numbers, (means, spreads, weight, factors, x))
    scale = [1 / mp.sqrt(a + mp.mpf(1e-5)) for a in s]
    of_x = [a * w[i % 4] * scale[i % 4] for i, a in enumerate(g)]
    of_weight = [
        mp.fsum(g[i] * (y[i] - m[c]) * scale[c] for i in range(c, 20, 4)) for c in range(4)
    ]
    assert_near(gradient(lambda z: loss(z, weight), x), of_x, 4)
    assert_near(gradient(lambda z: loss(x, z), weight), of_weight, 12)


def test_the_gradient_of_a_sum_is_expanded(format):
    x, weight = sample(format, 3, 4, 2), sample(format, 4, seed=1)
    found = gradient(lambda w: F.batch_norm(x, None, None, w, training=True).sum(), weight)
    assert max(map(abs, numbers(found))) < 2.0 ** (8 - format.precision)
    found = gradient(lambda b: F.batch_norm(x, None, None, weight, b, training=True).sum(), weight)
    assert numbers(found) == [6] * 4


COLUMNS = torch.tensor([[1, 0, 2, 2]] * 3)
SELECTIONS = {
    "take": ((3, 4), lambda x: x.take(torch.tensor([[0, 5], [5, -1]]))),
    "diagonal": ((3, 4), lambda x: x.diagonal(1)),
    "replicate 1d": ((2, 3, 4), lambda x: F.pad(x, (2, 1), mode="replicate")),
    "replicate 2d": ((2, 3, 4), lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate")),
    "replicate 3d": ((1, 2, 3, 2), lambda x: F.pad(x, (1, 1, 2, 0, 0, 1), mode="replicate")),
    "max_pool2d": ((1, 5, 5), lambda x: F.max_pool2d(x, 3, 1, 1)),
    "max_pool3d": ((1, 3, 4, 4), lambda x: F.max_pool3d(x, 2, 1)),
    "adaptive_max_pool1d": ((2, 7), lambda x: F.adaptive_max_pool1d(x, 3)),
    "adaptive_max_pool3d": ((1, 3, 4, 3), lambda x: F.adaptive_max_pool3d(x, 2)),
    "nearest 1d": ((1, 2, 5), lambda x: F.interpolate(x, size=8)),
    "nearest 2d": ((1, 2, 3, 4), lambda x: F.interpolate(x, scale_factor=(2.5, 0.7))),
    "nearest-exact 2d": ((1, 1, 3, 4), lambda x: F.interpolate(x, (7, 3), mode="nearest-exact")),
    "scatter_reduce": ((3, 4), lambda x: x.scatter_reduce(0, COLUMNS, x, "sum")),
    "amax": ((3, 4), lambda x: x.scatter_reduce(0, COLUMNS, x.flip(0), "amax")),
    "relu": ((3, 4), torch.relu),
}  # fmt: skip


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("name", SELECTIONS)
def test_selected_elements(name, format):
    shape, select = SELECTIONS[name]
    x = sample(format, *shape)
    plain = mcf.as_plain(x, torch.float32).requires_grad_()
    jacobian = torch.autograd.functional.jacobian(select, plain).reshape(-1, plain.numel())
    made = select(x)
    factors = sample(format, *made.shape, seed=1)
    g = rationals(factors)
    expected = [
        sum(a * Fraction(b) for a, b in zip(g, column, strict=True))
        for column in jacobian.T.tolist()
    ]
    found = gradient(lambda y: (select(y) * factors).sum(), x)
    assert_near(found, [mp.mpf(y.numerator) / y.denominator for y in expected], 3)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_reduced_elements(reduce, include_self, format):
    x, source = sample(format, *SHAPE), sample(format, 5, 4, seed=1)
    rows = [2, 0, 2, 2, 0]
    combine = {
        "sum": sum,
        "mean": lambda y: sum(y) / len(y),
        "prod": lambda y: y[0] * combine["prod"](y[1:]) if y else 1,
        "amax": max,
        "amin": min,
    }
    own, new = rationals(x), rationals(source)
    expected = []
    for i, j in itertools.product(range(3), range(4)):
        values = [new[4 * k + j] for k, row in enumerate(rows) if row == i]
        kept = [own[4 * i + j]] if include_self or not values else []
        expected.append(combine[reduce](kept + values))
    expected = [mp.mpf(y.numerator) / y.denominator for y in expected]
    index = torch.tensor(rows)
    for found in (
        x.index_reduce(0, index, source, reduce, include_self=include_self)
        if reduce != "sum"
        else None,
        x.scatter_reduce(
            0, index.unsqueeze(1).expand(5, 4), source, reduce, include_self=include_self
        ),
    ):
        if found is not None:
            assert_near(found, expected, 4)


def filled(y, rows, columns):
    made = mp.matrix(rows, columns)
    for i, a in enumerate(y):
        made[i // columns, i % columns] = a
    return made


def check_matrices(function, exact, x, units, of_gradient):
    """Compare a function of a matrix, and the gradient of a weighted sum of its elements."""
    made = function(x)
    factors = sample(x.format, *made.shape, seed=1)
    own = numbers(factors)

    def total(y):
        return mp.fsum(a * b for a, b in zip(own, exact(filled(y, *x.shape)), strict=True))

    assert_near(made, list(exact(filled(numbers(x), *x.shape))), units)
    found = gradient(lambda y: (function(y) * factors).sum(), x)
    assert_near(found, numeric(total, numbers(x)), of_gradient)


@pytest.mark.parametrize("format", SOME, indirect=True)
def test_exponentials_of_matrices(format):
    check_matrices(torch.matrix_exp, mp.expm, sample(format, 2, 2), 2, 60)


@pytest.mark.parametrize("format", SOME, indirect=True)
def test_exponentials_of_large_and_of_no_matrices(format):
    x = sample(format, 2, 3, 3) * 40
    expected = [a for y in x for a in mp.expm(filled(numbers(y), 3, 3))]
    assert_near(torch.matrix_exp(x), expected, 8)
    assert torch.matrix_exp(x[:0]).shape == (0, 3, 3)
    assert torch.matrix_exp(x[:, :0, :0]).shape == (2, 0, 0)
    assert torch.matrix_exp(x * torch.inf).isnan().all()
    with pytest.raises(RuntimeError, match="square"):
        torch.matrix_exp(x[:, :2])


@pytest.mark.slow
@pytest.mark.parametrize("format", SOME, indirect=True)
def test_pseudo_inverses(format):
    check_matrices(
        torch.linalg.pinv, lambda a: (a.T * a) ** -1 * a.T, sample(format, 3, 2, seed=2), 30, 200
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", SOME, indirect=True)
def test_pseudo_inverses_of_deficient_matrices(format):
    a = sample(format, 3, 1) @ sample(format, 1, 2, seed=1)
    size = sum(x * x for x in numbers(a))
    assert_near(torch.linalg.pinv(a), [x / size for x in numbers(a.T.contiguous())], 200)
    assert torch.linalg.pinv(a, rtol=torch.tensor(2.0)).eq(0).all()
    assert torch.linalg.pinv(a[:0]).shape == (2, 0)
    square = sample(format, 2, 2) + sample(format, 2, 2).mT
    symmetric = torch.linalg.pinv(square.tril(), hermitian=True)
    assert_near(symmetric, list(filled(numbers(square), 2, 2) ** -1), 200)


def test_matrices_along_a_diagonal(format):
    a, b, c = sample(format, 2, 3), sample(format, 2, seed=1), sample(format, seed=2)
    found = torch.block_diag(a, b, c)
    x, y = numbers(a), numbers(b)
    rows = [[*x[:3], 0, 0, 0], [*x[3:], 0, 0, 0], [0, 0, 0, *y, 0], [0] * 5 + numbers(c.view(1))]
    assert_near(found, list(itertools.chain(*rows)), 0)


@pytest.mark.thinned(of=2)
def test_logit_and_bilinear(format):
    x = sample(format, 3).abs() / 8 + 0.25
    expected = [1 / (a * (1 - a)) for a in numbers(x)]
    assert_near(gradient(lambda y: torch.logit(y).sum(), x), expected, 2)
    a, b, weight = (
        sample(format, 2, 3),
        sample(format, 2, 2, seed=1),
        sample(format, 2, 3, 2, seed=2),
    )
    u, v, w = map(numbers, (a, b, weight))
    expected = [
        mp.fsum(
            u[3 * n + i] * w[(o * 3 + i) * 2 + j] * v[2 * n + j] for i in range(3) for j in range(2)
        )
        for n in range(2)
        for o in range(2)
    ]
    assert_near(F.bilinear(a, b, weight), expected, 6)


@pytest.mark.parametrize("format", [mcf.fp64x2, mcf.fp32x3], ids=str)
def test_gradients_of_nothing_and_of_one_element(format):
    x = mcf.as_expansion(torch.zeros(0, 2), format).requires_grad_()
    weight = mcf.as_expansion(torch.ones(2), format).requires_grad_()
    F.group_norm(x, 1, weight, weight).sum().backward()
    assert x.grad.shape == (0, 2)
    assert weight.grad.tolist() == [0, 0]
    one = mcf.as_expansion(torch.tensor(3.0), format).requires_grad_()
    one.unfold(0, 1, 1).sum().backward()
    assert one.grad == 1
    assert one.grad.format is format


@pytest.mark.parametrize("function", [F.logsigmoid, lambda x: F.layer_norm(x, [3])])
def test_results_of_several_tensors_have_the_format(function):
    x = mcf.as_expansion(torch.arange(6.0).view(2, 3), mcf.fp64x2).requires_grad_()
    y = function(x)
    assert y.format is mcf.fp64x2
    y.sum().backward()
    assert x.grad.format is mcf.fp64x2
