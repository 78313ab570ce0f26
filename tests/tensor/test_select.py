"""Comparisons and choices are exact on all terms."""

import operator

import pytest
import torch

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, parameter, sample


def near_pairs(format: mcf.Format) -> tuple[mcf.MCFTensor, mcf.MCFTensor]:
    """Pairs that differ in any one term, or not at all."""
    x = sample(format, 4, 8)
    terms = [t.clone() for t in x.components]
    for i, term in enumerate(terms):
        term[i + 1] *= 1.5
    return x, mcf.MCFTensor(mcf.expansion.renormalize(terms), format)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(name):
    for format in (mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2):
        x, y = near_pairs(format)
        compare = getattr(operator, name)
        assert torch.equal(compare(x, y), compare(exact(x), exact(y)))
        assert torch.equal(compare(x, 0.5), compare(exact(x), 0.5))
        assert torch.equal(compare(y, torch.zeros(8)), compare(exact(y), torch.zeros(8)))


def test_comparisons_below_float64():
    one = mcf.MCFTensor([torch.ones(1).double(), torch.tensor([2.0**-80]).double()], mcf.fp64x2)
    assert (one > 1).all()
    assert not (one <= 1).any()
    assert (one != torch.ones(1)).all()


def test_equal_on_all_terms(format):
    x = sample(format, 5)
    y = mcf.MCFTensor([*x.components[:-1], -x.components[-1]], format)
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, y)


def test_not_a_number_compares_with_nothing():
    x = mcf.as_expansion(torch.tensor([float("nan"), float("inf")]), mcf.bf16x2)
    assert (x == x).tolist() == [False, True]
    assert (x != x).tolist() == [True, False]
    assert (x <= x).tolist() == [False, True]
    assert torch.isnan(x).tolist() == [True, False]
    assert torch.isfinite(x).tolist() == [False, False]


def test_parameters_compare_by_their_leading_term_with_plain_tensors():
    p = parameter(mcf.bf16x2, 5)
    assert (p == p.components[0]).all()
    assert torch.equal(p, p.components[0])
    assert torch.equal(p, p.clone())
    assert not torch.equal(p.detach(), sample(mcf.bf16x2, 5, seed=4))
    assert not torch.equal(p.detach(), p.detach()[:2])


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_maximum_and_minimum(name, format):
    x, y = near_pairs(format)
    choose = getattr(torch, name)
    bigger = choose(x, y)
    assert ((bigger == x) | (bigger == y)).all()
    assert ((bigger >= x) & (bigger >= y) if name == "maximum" else bigger <= x).all()
    out = torch.zeros_like(x)
    choose(x, y, out=out)
    assert_same_terms(out, bigger)
    (by_list,) = getattr(torch, f"_foreach_{name}")([x], [y])
    assert_same_terms(by_list, bigger)
    target = x.clone()
    getattr(torch, f"_foreach_{name}_")([target], [y])
    assert_same_terms(target, bigger)
    nan = mcf.as_expansion(torch.tensor([float("nan"), 1.0]), format)
    for a, b in ((nan, nan.flip(0)), (nan.flip(0), nan)):
        assert torch.isnan(choose(a, b)).all()


def test_clamp_abs_neg_sign(format):
    x = sample(format, 30)
    low = mcf.as_expansion(torch.tensor(-0.3, dtype=torch.float64), format)
    for y in (x.clamp(-0.3, 0.5), x.clamp(min=-0.3, max=0.5), x.clone().clamp_(-0.3, 0.5)):
        assert (y >= low).all()
        assert (y <= 0.5).all()
        inside = (x > low) & (x < 0.5)
        assert torch.equal(y[inside], x[inside])
    assert (x.clamp_min(0) >= 0).all()
    assert (x.clamp(max=0) <= 0).all()
    assert_same_terms(x.abs(), torch.where(x < 0, -x, x))
    assert torch.equal(x.sign(), x.components[0].sign())
    assert_same_terms(x.neg().neg(), x)
    zero = mcf.as_expansion(torch.tensor([-0.0]), format)
    assert not torch.signbit(zero.abs().components[0]).any()


def test_where(format):
    x, y = near_pairs(format)
    mask = torch.arange(8) % 2 == 0
    z = torch.where(mask, x, y)
    assert torch.equal(z[:, mask], x[:, mask])
    assert torch.equal(z[:, ~mask], y[:, ~mask])
    with_plain = torch.where(mask, x, torch.zeros(8))
    assert with_plain.format == format
    assert (with_plain[:, ~mask] == 0).all()


@pytest.mark.parametrize(("name", "single"), [("maximum", "clamp_min"), ("minimum", "clamp_max")])
def test_foreach_maximum_and_minimum_with_numbers(name, single, format):
    x = sample(format, 4, 8)
    (new,) = getattr(torch, f"_foreach_{name}")([x], 0.1)
    assert_same_terms(new, getattr(x, single)(0.1))
    getattr(torch, f"_foreach_{name}_")([x], [0.1])
    assert_same_terms(x, new)
