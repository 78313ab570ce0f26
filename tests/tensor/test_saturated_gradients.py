"""Gradients at arguments where the result is rounded to its limit come from the argument."""

import contextlib

import mpmath
import pytest
import torch
from torch.nn import functional as F

import mcftensor as mcf

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.fp32x2, mcf.fp32x3, mcf.fp64x2]
SLOPES = {
    "sigmoid": lambda x: mpmath.exp(-abs(x)) / (1 + mpmath.exp(-abs(x))) ** 2,
    "tanh": lambda x: mpmath.sech(x) ** 2,
    "expm1": mpmath.exp,
}
POINTS = [10.0, -10.0, 20.0, -20.0, 30.0, 0.5, -3.0, 2.0**-20, 0.0]


@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("way", ["backward", "grad of grad", "without float64"])
@pytest.mark.with_float64("the points are float64")
def test_slopes(format, name, way):
    function = getattr(torch, name)
    x = mcf.as_expansion(torch.tensor(POINTS, dtype=torch.float64), format).requires_grad_()
    if way == "without float64":
        if format.dtype == torch.float64:
            return
        with mcf.without_float64():
            (slopes,) = torch.autograd.grad(function(x).sum(), x)
    else:
        (slopes,) = torch.autograd.grad(function(x).sum(), x, create_graph=way != "backward")
    if way == "grad of grad":
        (bend,) = torch.autograd.grad(slopes.sum(), x)
        assert torch.isfinite(mcf.as_plain(bend, torch.float64)).all()
    with mpmath.workprec(400):
        for point, found in zip(POINTS, mcf.exact.to_fraction(slopes.detach()), strict=True):
            right = SLOPES[name](mpmath.mpf(point))
            error = abs(mpmath.mpf(found.numerator) / found.denominator - right)
            least = mpmath.mpf(2) ** -148  # the tails of float32 end there
            assert error <= 8 * right * mpmath.mpf(2) ** -format.precision + least, point


def softmax(row):
    powers = [mpmath.exp(x) for x in row]
    return [x / sum(powers) for x in powers]


def of_one(row, k, weights):
    """The gradient of the product of weights with softmax, and with log_softmax."""
    p = softmax(row)
    return (
        p[k] * sum(q * (weights[k] - w) for q, w in zip(p, weights, strict=True)),
        sum(q * weights[k] - p[k] * w for q, w in zip(p, weights, strict=True)),
    )


CHOICES = {
    "softmax": (lambda x, w: (x.softmax(-1) * w).sum(), lambda *row: of_one(*row)[0]),
    "softmin": (lambda x, w: (F.softmin(-x, -1) * w).sum(), lambda *row: of_one(*row)[0]),
    "log_softmax": (lambda x, w: (x.log_softmax(-1) * w).sum(), lambda *row: of_one(*row)[1]),
    "cross_entropy": (
        lambda x, w: -F.cross_entropy(x, w, reduction="sum"),
        lambda *row: of_one(*row)[1],
    ),
    "nll_loss": (
        lambda x, w: -F.nll_loss(x.log_softmax(-1), w.argmax(-1), reduction="sum"),
        lambda *row: of_one(*row)[1],
    ),
    "logsumexp": (lambda x, w: x.logsumexp(-1).sum(), lambda row, k, w: softmax(row)[k]),
}
ROWS = [[40.0, 0.0, -3.0], [-2.0, 80.0, 1.0], [0.5, 12.0, 0.0], [0.5, 0.25, 0.0], [1.0, 1.0, -90.0]]
CLASSES = [0, 1, 1, 2, 1]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("way", ["backward", "grad of grad", "without float64"])
@pytest.mark.with_float64("the points are float64")
def test_rows(format, name, way):
    """Where one probability rounds to 1, its distance from 1 is kept."""
    function, exact = CHOICES[name]
    if way == "without float64" and format.dtype == torch.float64:
        return
    x = mcf.as_expansion(torch.tensor(ROWS, dtype=torch.float64), format).requires_grad_()
    chosen = F.one_hot(torch.tensor(CLASSES), 3)
    weights = mcf.as_expansion(chosen.double(), format)
    with mcf.without_float64() if way == "without float64" else contextlib.nullcontext():
        (found,) = torch.autograd.grad(function(x, weights), x, create_graph=way == "grad of grad")
    if way == "grad of grad":
        (bend,) = torch.autograd.grad(found.square().sum(), x)
        assert torch.isfinite(mcf.as_plain(bend, torch.float64)).all()
    require(
        mcf.exact.to_fraction(found.detach().flatten()),
        format,
        lambda i: exact([mpmath.mpf(y) for y in ROWS[i // 3]], i % 3, chosen[i // 3].tolist()),
    )


PAIRS = [(x, y) for x in POINTS for y in (0.0, 1.0, 0.25)]
LOSSES = {
    "glu": (
        lambda x, y: F.glu(torch.cat([y, x])).sum(),
        lambda x, y: y * SLOPES["sigmoid"](x),
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="sum"),
        lambda x, y: (1 - y) / (1 + mpmath.exp(-x)) - y / (1 + mpmath.exp(x)),
    ),
    "weighted": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, y + 1, pos_weight=y * 0 + 3) * len(y),
        lambda x, y: (y + 1) * ((1 - y) / (1 + mpmath.exp(-x)) - 3 * y / (1 + mpmath.exp(x))),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("way", ["backward", "without float64"])
@pytest.mark.with_float64("the points are float64")
def test_pairs(format, name, way):
    function, exact = LOSSES[name]
    if way == "without float64" and format.dtype == torch.float64:
        return
    x, y = (
        mcf.as_expansion(torch.tensor(column, dtype=torch.float64), format)
        for column in zip(*PAIRS, strict=True)
    )
    x.requires_grad_()
    with mcf.without_float64() if way == "without float64" else contextlib.nullcontext():
        (found,) = torch.autograd.grad(function(x, y), x)
    # Near zeros of the gradient, errors are relative to its two parts.
    require(
        mcf.exact.to_fraction(found.detach().flatten()),
        format,
        lambda i: exact(*map(mpmath.mpf, PAIRS[i])),
        lambda i: PAIRS[i][1] == 0.25,
    )


def require(found, format, exact, cancels=lambda i: False):
    """Require numbers within 8 u^n; where parts of size 1 cancel, of 1."""
    with mpmath.workprec(400):
        for i, number in enumerate(found):
            right = exact(i)
            error = abs(mpmath.mpf(number.numerator) / number.denominator - right)
            size = 1 if cancels(i) else abs(right)
            least = mpmath.mpf(2) ** (-133 if format.dtype == torch.bfloat16 else -148)
            assert error <= 8 * size * mpmath.mpf(2) ** -format.precision + least, i
