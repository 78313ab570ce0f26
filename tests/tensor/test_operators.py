"""The whole operator set on values: at the precision of the format, or refused by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.kernels.without_float64 import has_float64
from support.helpers import assert_same_terms, exact, gappy, sample
from support.matrix import MATRIX, SAME_RELEASE, published, refuses

pytest.importorskip("expecttest")  # of which torch's operator database makes use
operators = pytest.importorskip("common.operators")

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2]


@pytest.mark.slow  # test_seams.py takes operators by turns
@pytest.mark.parametrize("name", operators.OPERATORS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_operator(name, format):
    expected = published(name, format)
    outcome = operators.run(name, format, limit=MATRIX["samples"])
    assert (outcome.computed > 0) == (expected["computed"] > 0 and not refuses(name, format))
    if SAME_RELEASE and has_float64():
        assert outcome.computed == expected["computed"]
        assert outcome.refused == expected["refused"]
        assert (round(outcome.units, 3) == 0) == (expected["units"] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("name", operators.OPERATORS)
def test_every_sample_of_an_operator(name, format):
    expected = published(name, format)
    outcome = operators.run(name, format)
    if SAME_RELEASE and has_float64():
        assert outcome.computed >= expected["computed"]
        assert outcome.refused >= expected["refused"]


WIDE_RANGE = [f for f in mcf.formats.FORMATS if f.min_exponent < -100]
by_format = pytest.mark.parametrize("format", WIDE_RANGE, ids=lambda f: f.name)


def key(x, i):
    """An element as a tuple that sorts as it does."""
    return tuple(term[i].item() for term in x.components)


@by_format
def test_order_is_exact_on_all_terms(format):
    x = gappy(format)
    keys = [key(x, i) for i in range(6)]
    ordered = sorted(keys)
    values, indices = x.sort()
    assert [key(values, i) for i in range(6)] == ordered
    assert [keys[i] for i in indices] == ordered
    top = x.topk(3)
    assert [key(top.values, i) for i in range(3)] == ordered[:-4:-1]
    assert key(x.max().reshape(1), 0) == ordered[-1]
    assert key(x.amin(0, keepdim=True), 0) == ordered[0]
    assert x.argmax().item() == keys.index(ordered[-1])
    assert key(x.kthvalue(3).values.reshape(1), 0) == ordered[2]
    assert key(x.median().reshape(1), 0) == ordered[2]
    unique = torch.cat([x, x]).unique()
    assert [key(unique, i) for i in range(len(unique))] == sorted(set(keys))
    running = x.cummax(0).values
    assert [key(running, i) for i in range(6)] == [max(keys[: i + 1]) for i in range(6)]
    pooled = F.max_pool1d(x.view(1, 1, 6), 2).flatten()
    assert [key(pooled, i) for i in range(3)] == [max(keys[i : i + 2]) for i in (0, 2, 4)]


def test_order_of_what_is_not_a_number(format):
    x = mcf.as_expansion(torch.tensor([1.0, float("nan"), 3.0]), format)
    plain = exact(x)
    for name in ("max", "min", "sort", "nanmedian", "argmax", "amax"):
        found, expected = getattr(x, name)(), getattr(plain, name)()
        if not isinstance(expected, tuple):
            found, expected = (found,), (expected,)
        for a, b in zip(found, expected, strict=True):
            a = exact(a) if b.is_floating_point() else a
            torch.testing.assert_close(a, b, equal_nan=True)


@by_format
def test_placement_keeps_all_terms(format):
    x, y = gappy(format), gappy(format).flip(0)
    indices = torch.tensor([4, 0])
    cases = {
        "index_copy": lambda t, s: t.index_copy(0, indices, s[:2]),
        "index_put": lambda t, s: t.index_put((indices,), s[:2]),
        "scatter": lambda t, s: t.scatter(0, indices, s),
        "masked_scatter": lambda t, s: t.masked_scatter(t > 1, s),
        "slice_scatter": lambda t, s: t.slice_scatter(s[:2], 0, 3, 5),
        "select_scatter": lambda t, s: t.select_scatter(s[1], 0, 3),
        "pad": lambda t, s: F.pad(t, (1, 2)),
        "put": lambda t, s: t.put(indices, s[:2]),
        "gather": lambda t, s: t.gather(0, indices),
        "reflect": lambda t, s: F.pad(t.view(1, 6), (2, 2), mode="reflect"),
        "embedding": lambda t, s: F.embedding(indices.clamp(max=2), t.view(3, 2)),
        "upsample": lambda t, s: F.interpolate(t.view(1, 1, 6), scale_factor=2),
    }
    mask = x > 1
    for name, case in cases.items():
        found = case(x, y)
        for i, term in enumerate(found.components):
            if name == "masked_scatter":
                expected = x.components[i].masked_scatter(mask, y.components[i])
            else:
                expected = case(x.components[i], y.components[i])
            assert torch.equal(term, expected), name


@by_format
def test_numbers_are_placed_with_all_their_bits(format):
    x = sample(format, 4)
    number = mcf.as_expansion(torch.tensor(0.1, dtype=torch.float64), format)
    for found in (
        F.pad(x, (0, 1), value=0.1)[4],
        x.index_fill(0, torch.tensor([2]), 0.1)[2],
        x.scatter(0, torch.tensor([1]), 0.1)[1],
    ):
        assert_same_terms(found, number)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["exp_", "sqrt_", "sigmoid_", "cumsum_", "floor_", "erfinv_"])
def test_in_place(name, format):
    x = mcf.as_expansion(torch.rand(8, dtype=torch.float64) * 0.9, format)
    args = (0,) if name == "cumsum_" else ()
    expected = getattr(exact(x), name)(*args)
    view = x[2:6]
    assert getattr(x, name)(*args) is x
    torch.testing.assert_close(exact(x), expected, rtol=4 * format.u**format.terms, atol=0)
    assert torch.equal(exact(view), exact(x)[2:6])


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_out(format):
    x = sample(format, 4, 3)
    out = torch.empty_like(x)
    assert torch.exp(x, out=out) is out
    assert_same_terms(out, x.exp())
    plain = torch.empty(4, 3)
    with mcf.when_rounded("ignore"):
        torch.exp(x, out=plain)
    torch.testing.assert_close(plain, exact(x).exp().float(), rtol=2**-20, atol=0)
    product = mcf.as_expansion(torch.zeros(4, 4, dtype=torch.float64), format)
    torch.mm(x, x.T, out=product)
    assert_same_terms(product, x @ x.T)
    with pytest.raises(NotImplementedError, match="shape"):
        torch.mm(x, x.T, out=torch.empty_like(x))


def test_views_in_place_change_the_shape():
    x = sample(mcf.bf16x2, 1, 3)
    terms = [term.clone() for term in x.components]
    assert x.squeeze_(0) is x
    assert x.shape == (3,)
    assert x.unsqueeze_(1).t_().shape == (1, 3)
    for term, before in zip(x.components, terms, strict=True):
        assert term.shape == (1, 3)
        assert torch.equal(term, before)
    assert (x * 1).shape == (1, 3)


DRAWS = ["normal_", "uniform_", "exponential_", "log_normal_", "cauchy_"]


@pytest.mark.with_float64("the numbers are those of float64")
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_use_all_terms(name, format):
    p = nn.Parameter(mcf.as_expansion(torch.zeros(1000), format))
    torch.manual_seed(3)
    with torch.no_grad():
        getattr(p, name)()
    torch.manual_seed(3)
    expected = getattr(torch.zeros(1000, dtype=torch.float64), name)()
    assert p.role == "parameter"
    if format.precision <= 48:  # longer formats draw numbers of their own
        rtol = 2 * format.u**format.terms
        torch.testing.assert_close(exact(p), expected, rtol=rtol, atol=2**-24)
    assert (p.components[-1] != 0).float().mean() > 0.5


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_the_published_matrix_has_every_operator_and_most_compute(format):
    if SAME_RELEASE:
        assert set(MATRIX["operators"]) == set(operators.OPERATORS)
    entries = [entry[format.name] for entry in MATRIX["operators"].values()]
    assert all(entry["units"] <= operators.UNITS for entry in entries)
    assert sum(entry["computed"] > 0 for entry in entries) >= 620


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16i16, mcf.fp32x2, mcf.mxfp8])
def test_nested_tensors_of_values_are_refused(format, layout):
    x = mcf.as_expansion(torch.randn(3, 32), format)
    with pytest.raises(NotImplementedError, match="nested tensors are of plain tensors"):
        torch.nested.as_nested_tensor([x, x], layout=layout)


@pytest.mark.parametrize("name", ["rand_like", "randn_like", "randint_like"])
def test_random_numbers_like_a_tensor_are_those_of_the_generator(name, format):
    x, generator = mcf.as_expansion(torch.zeros(400), format), torch.Generator()
    ends = (100,) if name == "randint_like" else ()
    made = [getattr(torch, name)(x, *ends, generator=generator.manual_seed(i)) for i in (0, 0, 1)]
    assert_same_terms(made[0], made[1])
    assert not made[0].eq(made[2]).all()
    low, high = {"rand_like": (0, 1), "randn_like": (-6, 6), "randint_like": (0, 99)}[name]
    assert low <= made[0].min() <= made[0].max() <= high
    middle = 0 if name == "randn_like" else high / 2
    assert abs(exact(made[0]).mean() - middle) < (high - low) / 10


@pytest.mark.parametrize("function", [torch.cov, torch.corrcoef])
def test_covariances_of_a_named_input(function, format):
    x = sample(format, 2, 5)
    assert_same_terms(function(input=x), function(x))


@pytest.mark.parametrize("function", [torch.fmod, torch.remainder])
def test_remainders_of_integer_tensors(function, format):
    x = mcf.as_expansion(torch.tensor([7.25, -7.25, 2.0]), format)
    divisors = torch.tensor([3, 3, 5])
    expected = function(torch.tensor([7.25, -7.25, 2.0]), divisors)
    assert exact(function(x, divisors)).equal(expected.double())
    swapped = function(torch.tensor([7, -7, 9]), mcf.as_expansion(torch.tensor(2.5), format))
    assert exact(swapped).equal(function(torch.tensor([7, -7, 9]), 2.5).double())


def test_backward_takes_its_arguments_by_place():
    p = nn.Parameter(mcf.as_expansion(torch.ones(3)))
    made, gradient = p * 2, torch.ones(3).bfloat16()
    for _ in range(2):
        made.backward(gradient, True)  # retain_graph
    assert p.grad.tolist() == [4, 4, 4]
