"""Gradients at arguments where the result is rounded to its limit come from the argument."""

import mpmath
import pytest
import torch

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
