"""Distributions of torch.distributions keep the precision of their parameters and arguments."""

import mpmath
import pytest
import torch
from torch import distributions as D

import mcftensor as mcf
from support.helpers import exact, sample

THIRD = 1 / 3


def ones(x):
    return torch.ones(1, dtype=x.abs().dtype)


COUNTS = torch.tensor([1.0, 200.0, 301.0], dtype=torch.float64)

DENSITIES = {
    "number as scale": lambda x, y: D.Normal(x, THIRD).log_prob(y),
    "number as mean": lambda x, y: D.Normal(THIRD, x.abs()).cdf(y),
    "number as bound": lambda x, y: D.Uniform(-10 * THIRD, x.abs() + 3).log_prob(y * 0),
    "counts": lambda x, y: D.Binomial(301, logits=x).log_prob(COUNTS),
    "shape": lambda x, y: D.NegativeBinomial(THIRD, logits=x).log_prob(COUNTS),
    "shape in float64": lambda x, y: D.NegativeBinomial(
        torch.tensor(THIRD, dtype=torch.float64), logits=x
    ).log_prob(COUNTS),
    "Student": lambda x, y: D.StudentT(9 * THIRD, x, y.abs()).log_prob(x + 1),
    "argument in float64": lambda x, y: D.Gamma(x.abs(), y.abs()).log_prob(COUNTS / 3),
    "argument alone": lambda x, y: D.Gamma(ones(x) * 2, ones(x)).log_prob(x.abs()),
    "scale alone": lambda x, y: D.HalfCauchy(x.abs()).log_prob(COUNTS / 3),
    "argument of HalfCauchy": lambda x, y: D.HalfCauchy(ones(x)).log_prob(x.abs()),
    "degrees": lambda x, y: D.Wishart(5 + THIRD, scale_tril=torch.diag(x.abs())).log_prob(
        torch.diag(y.abs())
    ),
    "divergence": lambda x, y: D.kl_divergence(D.Normal(x, THIRD), D.Normal(y, 0.7)),
}


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16i16, mcf.fp32x2], ids=lambda f: f.name)
@pytest.mark.parametrize("name", DENSITIES)
def test_density(name, format):
    x, y = sample(format, 3), sample(format, 3, seed=1)
    made = exact(DENSITIES[name](x, y))
    expected = DENSITIES[name](exact(x), exact(y))
    # a rounded number moves a density by more than the format does
    error = (made - expected).abs().max() / expected.abs().max()
    assert error <= 32 * 2.0**-format.precision


def test_beyond_float64():
    x = sample(mcf.fp64x2, 1)
    density = D.Normal(x, THIRD).log_prob(torch.zeros(1))
    with mpmath.workprec(300):
        mean = sum(mpmath.mpf(t.item()) for t in x.components)
        scale = mpmath.mpf(THIRD)
        expected = -((mean / scale) ** 2) / 2 - mpmath.log(scale)
        expected -= mpmath.log(2 * mpmath.pi) / 2
        found = sum(mpmath.mpf(t.item()) for t in density.components)
        assert abs(found - expected) < 1e-15  # PyTorch's constant is a float64


def test_parameters_of_a_model_are_as_they_compute():
    weight = torch.nn.Parameter(sample(mcf.bf16x2, 3))
    x = torch.ones(3, dtype=torch.bfloat16)
    density = D.Normal(weight, 0.5).log_prob(x)
    assert torch.equal(density, D.Normal(weight.detach().components[0], 0.5).log_prob(x))
    density.sum().backward()
    assert type(weight.grad) is torch.Tensor


def test_plain_distributions_are_those_of_torch():
    x = torch.rand(3)
    for make in (lambda: D.Normal(x, 0.1), lambda: D.Gamma(x, 2.0), lambda: D.HalfCauchy(x)):
        assert make().log_prob(x).dtype == torch.float32
    compiled = torch.compile(
        lambda x: D.Normal(x, 0.1).log_prob(x) + D.Gamma(x, 2.0).log_prob(x),
        backend="eager",
        fullgraph=True,
    )
    assert torch.equal(compiled(x), D.Normal(x, 0.1).log_prob(x) + D.Gamma(x, 2.0).log_prob(x))
