"""Convolutions beyond 48 bits against sums of fractions over all pairs of a window."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch.nn import functional

import mcftensor as mcf

CASES = {
    "1d": {"x": (2, 3, 9), "weight": (4, 3, 3)},
    "1d, strided": {"x": (1, 2, 10), "weight": (3, 2, 3), "stride": 2, "padding": 1},
    "1d, dilated": {"x": (1, 2, 11), "weight": (2, 2, 3), "stride": 3, "dilation": 2, "padding": 2},
    "2d, grouped": {"x": (2, 4, 5, 6), "weight": (6, 2, 3, 2), "groups": 2, "stride": (2, 1)},
    "2d, depthwise": {"x": (1, 3, 5, 4), "weight": (3, 1, 2, 3), "groups": 3, "padding": (1, 2)},
    "3d": {"x": (1, 2, 3, 4, 3), "weight": (2, 2, 2, 1, 3), "padding": 1, "dilation": (1, 2, 1)},
    "1d, transposed": {
        "x": (2, 3, 4),
        "weight": (3, 2, 3),
        "stride": 2,
        "padding": 1,
        "output_padding": 1,
    },
    "2d, transposed": {
        "x": (1, 4, 3, 2),
        "weight": (4, 2, 3, 2),
        "groups": 2,
        "stride": (3, 2),
        "dilation": (1, 2),
    },
    "2d, transposed, cut": {"x": (1, 2, 4, 4), "weight": (2, 1, 3, 3), "padding": 2},
}


def pairs(case, shape):
    """Places in the output, the input and the weight whose elements are multiplied."""
    transposed, groups = "output" in case, case.get("groups", 1)
    x, weight = case["x"], case["weight"]
    space = len(x) - 2

    def each(name, value):
        given = case.get(name, value)
        return given if isinstance(given, tuple) else (given,) * space

    stride, padding, dilation = each("stride", 1), each("padding", 0), each("dilation", 1)
    # A transposed convolution exchanges the roles of input and output.
    large, small = (shape, x) if transposed else (x, shape)
    for batch, at, window in itertools.product(
        range(x[0]),
        itertools.product(*map(range, small[2:])),
        itertools.product(*map(range, weight[2:])),
    ):
        there = tuple(
            s * a + d * k - p
            for s, a, d, k, p in zip(stride, at, dilation, window, padding, strict=True)
        )
        if any(not 0 <= i < n for i, n in zip(there, large[2:], strict=True)):
            continue
        inner = weight[1]  # channels of the large one, in a group
        for first in range(weight[0]):  # channels of the small one
            for second in range(inner):
                group = first // (weight[0] // groups)
                in_large = batch, group * inner + second, *there
                in_small = batch, first, *at
                ends = (in_large, in_small) if transposed else (in_small, in_large)
                yield *ends, (first, second, *window)


def hard(shape, format, seed):
    """Numbers of all bits of the format, of sizes from 2^-20 to 2^20."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(shape, dtype=torch.float64)
    result = mcf.as_expansion(x, format)
    base = torch.randn(shape, generator=generator, dtype=torch.float64)
    base = base * 2.0 ** torch.randint(-20, 20, shape, generator=generator)
    for i in range(3):
        result = result + base * 2.0 ** (-50 * i) * torch.randn(shape, generator=generator)
    return result


def exact(x):
    terms = [t.detach().double().flatten().tolist() for t in x.components]
    values = [sum(map(Fraction, column)) for column in zip(*terms, strict=True)]
    places = itertools.product(*map(range, x.shape))
    return dict(zip(places, values, strict=True))


def assert_close(found, products, bits):
    sums, sizes = {}, {}
    for place, value in products:
        sums[place] = sums.get(place, 0) + value
        sizes[place] = sizes.get(place, 0) + abs(value)
    for place, value in exact(found).items():
        off = abs(value - sums.get(place, 0))
        assert off <= sizes.get(place, 0) * Fraction(2) ** (4 - bits), place


def function_of(case):
    space = len(case["x"]) - 2
    options = {k: v for k, v in case.items() if k not in ("x", "weight")}
    name = f"conv_transpose{space}d" if case["transposed"] else f"conv{space}d"
    del options["transposed"]
    return lambda x, weight, bias=None: getattr(functional, name)(x, weight, bias, **options)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("format", [mcf.fp64x2, mcf.fp32x3], ids=lambda f: f.name)
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_and_its_gradients(name, format):
    case = CASES[name] | {"transposed": "transposed" in name}
    x, weight = hard(case["x"], format, 1), hard(case["weight"], format, 2)
    x.requires_grad_(), weight.requires_grad_()
    convolve = function_of(case)
    y = convolve(x, weight)
    assert y.format is format
    double = [mcf.as_plain(t.detach(), torch.float64) for t in (x, weight)]
    torch.testing.assert_close(mcf.as_plain(y, torch.float64), convolve(*double))
    gradient = hard(tuple(y.shape), format, 3)
    y.backward(gradient)
    oracle = CASES[name] | ({"output": True} if case["transposed"] else {})
    triples = list(pairs(oracle, tuple(y.shape)))
    a, b, g = exact(x), exact(weight), exact(gradient)
    bits = format.precision
    assert_close(y, ((o, a[i] * b[k]) for o, i, k in triples), bits)
    assert_close(x.grad, ((i, g[o] * b[k]) for o, i, k in triples), bits)
    assert_close(weight.grad, ((k, g[o] * a[i]) for o, i, k in triples), bits)


def test_without_float64():
    name = "2d, grouped"
    x, weight = hard(CASES[name]["x"], mcf.fp32x2, 7), hard(CASES[name]["weight"], mcf.fp32x2, 8)
    with mcf.without_float64():
        y = function_of(CASES[name] | {"transposed": False})(x, weight)
    a, b = exact(x), exact(weight)
    triples = pairs(CASES[name], tuple(y.shape))
    assert_close(y, ((o, a[i] * b[k]) for o, i, k in triples), mcf.fp32x2.precision)


def test_a_module_with_a_bias():
    layer = mcf.as_expansion(torch.nn.Conv2d(2, 3, 3, padding="same").double(), mcf.fp64x2)
    x = hard((1, 2, 4, 4), mcf.fp64x2, 4)
    y = layer(x)
    without = functional.conv2d(x, layer.weight, padding="same")
    assert torch.equal(y, without + layer.bias.view(-1, 1, 1))
    y.sum().backward()
    assert torch.equal(mcf.as_plain(layer.bias.grad), torch.full((3,), 16.0, dtype=torch.float64))


def test_without_a_batch():
    x, weight = hard((2, 5), mcf.fp64x2, 5), hard((3, 2, 2), mcf.fp64x2, 6)
    assert torch.equal(
        functional.conv1d(x, weight), functional.conv1d(x.unsqueeze(0), weight).squeeze(0)
    )
