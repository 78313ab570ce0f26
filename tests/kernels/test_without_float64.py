"""What runs without float64: on a device as Apple's MPS is, by PyTorch's own operations, and in the
mode `mcf.without_float64()`. The table of the page is what is found here.
"""

import contextlib
import itertools
import math
import threading
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import mpmath
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import mcftensor as mcf
from mcftensor.kernels import without_float64
from mcftensor.kernels.without_float64 import has_float64
from mcftensor.reproducible import binned_sums
from mcftensor.training import shadow
from support.helpers import assert_same_terms
from support.kernel_cases import way
from support.no_float64 import Float64Error, no_float64
from support.pretended import Misplaced, pretended

PAGE = Path(__file__).parents[2] / "docs/reference/devices.md"
FORMATS = {
    f.name: f for f in (mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2, mcf.bf16i16, mcf.bf16i8)
} | {"bf16br": mcf.Format.from_name("bf16br")}


def entered(format):
    return mcf.as_expansion(torch.rand(8, 32).to("mps") + 1, format)


def trained(format, **flags):
    model = nn.Linear(32, 8, device="mps")
    model = mcf.as_expansion(model, format)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, **flags)
    for _ in range(2):
        model(torch.rand(4, 32).to("mps", format.dtype)).sum().backward()
        optimizer.step()


def adamw(format, **flags):
    p = nn.Parameter(entered(format))
    optimizer = torch.optim.AdamW([p], **flags)
    for _ in range(2):
        p.grad = torch.ones_like(p.detach().compute_tensor)
        optimizer.step()


FEATURES = {
    "Conversion": (entered, lambda f: mcf.as_plain(entered(f), torch.float32)),
    "copies between devices": (lambda f: entered(f).cpu().to("mps"),),
    "arithmetic": (
        lambda f: entered(f) + entered(f) - entered(f),
        lambda f: entered(f) * entered(f),
        lambda f: entered(f) / entered(f),
        lambda f: entered(f).sqrt(),
        lambda f: entered(f).mul_(0.999),
        lambda f: entered(f).__setitem__(0, 1.2),
    ),
    "`exp`": (lambda f: entered(f).exp(),),
    "gradients of a model": (lambda f: trained(f, lr=0.0),),
    "SGD with momentum": (
        lambda f: trained(f, lr=0.1),
        lambda f: trained(f, lr=0.1, fused=True),
    ),
    "AdamW": (
        adamw,
        lambda f: adamw(f, foreach=True),
        lambda f: adamw(f, fused=True),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_the_page_says_of_mps(format):
    page = " ".join(PAGE.read_text().split())
    features, _, formats = page.partition(" run on a simulated MPS in ")
    assert f"`{format.name}`" in formats.partition(". ")[0]
    for feature, actions in FEATURES.items():
        assert feature in features.rpartition(". ")[2]
        for action in actions:
            with pretended("mps", has_float64=False):
                action(format)


def test_scaled_formats_need_float64():
    with pretended("mps", has_float64=False), pytest.raises(Misplaced):
        mcf.as_expansion(torch.rand(8, 32).to("mps"), mcf.scaling.scaled(torch.float16))


# --------------------------------------------------------------- the mode, on any device

LONG = (mcf.bf16x2, mcf.bf16x3, mcf.fp32x2)
MORE = (mcf.fp16x2, mcf.bf16i16, mcf.bf16i8)
ROUNDED = tuple(map(mcf.Format.from_name, ("bf16x2sr", "bf16x3br", "fp32x2br", "bf16br")))


def made(format):
    return mcf.as_expansion(torch.rand(8, 32) + 1, format)


def stepped(make, format, **options):
    p = nn.Parameter(made(format))
    optimizer = make([p], **options)
    for i in range(3):
        p.grad = torch.full_like(p.detach().compute_tensor, 0.1 * (i + 1))
        optimizer.step()
    return p


OPTIMIZERS = {
    "SGD": lambda f, **kw: stepped(torch.optim.SGD, f, lr=0.1, momentum=0.9, **kw),
    "AdamW": lambda f, **kw: stepped(torch.optim.AdamW, f, **kw),
    "Adam": lambda f, **kw: stepped(torch.optim.Adam, f, amsgrad=True, weight_decay=0.1, **kw),
    "Adagrad": lambda f, **kw: stepped(torch.optim.Adagrad, f, **kw),
}
STEPS = {
    f"{name}, {path}": (lambda f, make=make, path=path: make(f, **{path: True}))
    for name, make in OPTIMIZERS.items()
    for path in ("foreach", "fused")
} | {
    f"{name}, for-loop": (lambda f, make=make: make(f, foreach=False))
    for name, make in OPTIMIZERS.items()
}
WORK = {
    "convert": lambda f: mcf.as_expansion(made(f), mcf.fp32x2),
    "collapse": lambda f: mcf.as_plain(made(f), torch.float32),
    "round twice": lambda f: mcf.as_plain(made(f), torch.float16),
    "+": lambda f: made(f) + made(f) - 0.1,
    "integers": lambda f: made(f) + torch.arange(32),
    "*": lambda f: made(f) * made(f) * 0.1,
    "/": lambda f: 1 / made(f),
    "sqrt": lambda f: made(f).sqrt(),
    "power": lambda f: made(f) ** 3,
    "lerp": lambda f: made(f).lerp(made(f), 0.1),
    "addcmul": lambda f: made(f).addcmul(made(f), made(f), value=0.1),
    "addcdiv": lambda f: made(f).addcdiv_(made(f), made(f), value=0.1),
    "setitem": lambda f: made(f).__setitem__(0, 1.2),
    "where": lambda f: torch.where(torch.rand(8, 32) > 0.5, made(f), 1.2),
    "compare": lambda f: (made(f) > 1.5) & (made(f) > made(f)),
    "clamp": lambda f: made(f).clamp(1.2, 1.5),
    "fill": lambda f: torch.full_like(made(f), 0.1).fill_(0.3),
    "sort": lambda f: made(f).sort(),
    "whole": lambda f: made(f).round(),
    "remainder": lambda f: made(f) % 0.3,
    "sum": lambda f: made(f).sum(1),
    "mean": lambda f: made(f).mean(),
    "norm": lambda f: made(f).norm(),
    "running sum": lambda f: made(f).cumsum(1),
    "list": lambda f: torch._foreach_mul_([made(f), made(f)], 0.9),
    "text": lambda f: repr(made(f)),
    "numbers": lambda f: made(f).tolist(),
    "fma": lambda f: mcf.fma(made(f), 0.1, 3),
    "item": lambda f: made(f)[0, 0].item(),
    "matrix product": lambda f: made(f) @ made(f).T,
    "norms": lambda f: (torch.norm(made(f), 3), torch.linalg.vector_norm(made(f), 0)),
    "elu": lambda f: nn.functional.elu(made(f) - 1.5),
    "celu": lambda f: nn.functional.celu(made(f) - 1.5, 0.3),
    "logsumexp": lambda f: made(f).logsumexp(1),
    "new numbers": lambda f: made(f).new_tensor([[0.1, 0.2], [0.3, torch.inf]]),
    "identity": lambda f: nn.init.eye_(made(f)),
    "random numbers": lambda f: [getattr(made(f), name)() for name in DRAWS],
    "plain target": lambda f: torch.rand(8, 32).add_(made(f)),
    "sparse rows": lambda f: made(f).add_(sparse(), alpha=0.1),
    "equations": lambda f: torch.linalg.solve(square(f), made(f)[:3, :2]),
    "inverse": lambda f: torch.linalg.inv(square(f)),
    "root of a matrix": lambda f: torch.linalg.cholesky(square(f)),
}
FACTORS = {
    "determinant": lambda f: torch.linalg.slogdet(square(f)),
    "least squares": lambda f: torch.linalg.lstsq(made(f)[:4, :2], made(f)[:4, :1]),
    "eigenvalues": lambda f: torch.linalg.eigh(square(f)),
    "singular values": lambda f: torch.linalg.svd(made(f)[:3, :2]),
}
DRAWS = ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "bernoulli_")


def square(format):
    x = made(format)[:3, :3]
    return x + x.T + 9 * torch.eye(3)


def sparse():
    places = torch.tensor([[0, 3, 0]])
    return torch.sparse_coo_tensor(places, torch.rand(3, 32), (8, 32), check_invariants=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mcftensor.errors.RoundedWarning")
@pytest.mark.parametrize(
    "format",
    [
        *(pytest.param(f, id=f.name) for f in LONG),
        *(pytest.param(f, marks=pytest.mark.slow, id=f.name) for f in (*MORE, *ROUNDED)),
    ],
)
def test_no_float64_tensor_is_made(format):
    for name, function in WORK.items():
        with no_float64():
            function(format)
        del name  # which the traceback shows


@pytest.mark.slow
@pytest.mark.parametrize("format", LONG, ids=lambda f: f.name)
@pytest.mark.parametrize("name", FACTORS)
def test_no_float64_tensor_is_made_by_factors(name, format):
    with no_float64():
        found = FACTORS[name](format)
    assert all(x.format is format for x in found if isinstance(x, mcf.MCFTensor))


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(f, marks=[] if f is mcf.bf16i8 else pytest.mark.slow, id=f.name)
        for f in (*LONG, mcf.bf16i16, mcf.bf16i8, *ROUNDED)
    ],
)
def test_no_float64_tensor_is_made_by_steps(format):
    for name, function in STEPS.items():
        with no_float64():
            function(format)
        del name


def test_the_harness_sees_float64():
    for function in (lambda: made(mcf.bf16x3) + 1, lambda: made(mcf.fp32x2).sum()):
        function()
        with no_float64(), pytest.raises(Float64Error):
            made(mcf.fp32x2).to(torch.float64)
    with pytest.raises(Float64Error), no_float64():
        torch.ones(2, dtype=torch.float64)


def drawn(format, seed=0, count=4096):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-8, 9, (count,), generator=generator).double().exp2()
    return mcf.as_expansion(
        (torch.rand(count, generator=generator, dtype=torch.float64) + 0.5) * sizes, format
    )


BITS = {
    "+": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "sqrt": lambda a, b: a.sqrt(),
    "numbers": lambda a, b: (a * 0.1 + 0.3) / 0.7,
    "lerp": lambda a, b: a.lerp(b, 0.3),
    "addcdiv": lambda a, b: a.addcdiv(b, a, value=0.3),
}


@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16x2, mcf.fp16x2], ids=lambda f: f.name)
def test_bits_are_those_of_float64(format):
    a, b = drawn(format), drawn(format, 1)
    for name, function in BITS.items():
        expected = function(a, b)
        with no_float64():
            found = function(a, b)
        for x, y in zip(found.components, expected.components, strict=True):
            assert torch.equal(x, y), name


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x.startswith("AdamW") else pytest.mark.slow) for x in STEPS],
)
def test_steps_over_fp32x2_have_the_bits_of_float64(name):
    torch.manual_seed(0)
    expected = STEPS[name](mcf.fp32x2)
    torch.manual_seed(0)
    with no_float64():
        found = STEPS[name](mcf.fp32x2)
    for x, y in zip(found.components, expected.components, strict=True):
        assert torch.equal(x, y)


def exactly(x):
    columns = zip(*(t.double().flatten().tolist() for t in x.components), strict=True)
    return [sum(map(Fraction, column)) for column in columns]


@pytest.mark.parametrize("format", [mcf.bf16x3, mcf.fp32x2], ids=lambda f: f.name)
def test_errors_of_operations(format):
    u = Fraction(format.u)
    bounds = {"add": u**3 / 4, "mul": u**3 / 4, "div": u**3 / 4, "sqrt": u**3 / 4}
    if format is mcf.fp32x2:
        bounds = {"add": 3 * u**2, "mul": 4 * u**2, "div": u**2 / 2, "sqrt": 25 * u**2 / 8}
    a, b = drawn(format, 2, 1000), drawn(format, 3, 1000)
    slack = 1 + Fraction(1, 2**6)
    with no_float64():
        found = {"add": a - b, "mul": a * b, "div": a / b, "sqrt": a.sqrt()}
    x, y = exactly(a), exactly(b)
    exact = {
        "add": [p - q for p, q in zip(x, y, strict=True)],
        "mul": [p * q for p, q in zip(x, y, strict=True)],
        "div": [p / q for p, q in zip(x, y, strict=True)],
    }
    for name, result in found.items():
        values = exactly(result)
        if name == "sqrt":
            errors = [abs(r * r / p - 1) / 2 for r, p in zip(values, x, strict=True)]
        else:
            errors = [abs(r / e - 1) for r, e in zip(values, exact[name], strict=True) if e]
        assert max(errors) <= bounds[name] * slack, name
        assert max(errors) > bounds[name] / 100, name


@pytest.mark.parametrize("count", [100, 5000])
def test_sums_and_inner_products_of_fp32x2(count):
    a, b = drawn(mcf.fp32x2, 4, count), drawn(mcf.fp32x2, 5, count)
    signs = torch.where(torch.arange(count) % 3 == 0, -1.0, 1.0)
    with no_float64():
        a = a * signs
        total, inner = a.sum(), a @ b
    x, y = exactly(a), exactly(b)
    (total,), (inner,) = exactly(total), exactly(inner)
    products = [p * q for p, q in zip(x, y, strict=True)]
    assert abs(total - sum(x)) <= Fraction(1, 2**44) * sum(map(abs, x))
    assert abs(inner - sum(products)) <= Fraction(1, 2**44) * sum(map(abs, products))
    assert inner != sum(products)


def in_mpmath(x):
    return [mpmath.mpf(v.numerator) / v.denominator for v in exactly(x)]


def test_functions_of_fp32x2():
    functions = {"exp": mpmath.exp, "log": mpmath.log, "sin": mpmath.sin, "tanh": mpmath.tanh}
    x = mcf.as_expansion(torch.rand(40, dtype=torch.float64) * 6 + 0.1, mcf.fp32x2)
    with mpmath.workprec(160):
        for name, function in functions.items():
            with no_float64():
                found = getattr(torch, name)(x)
            pairs = zip(in_mpmath(found), map(function, in_mpmath(x)), strict=True)
            error = max(abs(y / exact - 1) for y, exact in pairs)
            assert 2.0**-60 < error < 2.0**-44, name


def test_limits_of_logits_keep_their_bits():
    x = mcf.as_expansion(torch.tensor([0.1, 0.3, 0.9], dtype=torch.float64), mcf.fp32x2)
    with no_float64():
        found = torch.logit(x, eps=0.2)
    with mpmath.workprec(160):
        for got, v in zip(in_mpmath(found), in_mpmath(x), strict=True):
            p = max(mpmath.mpf(0.2), min(1 - mpmath.mpf(0.2), v))
            exact = mpmath.log(p / (1 - p))
            assert abs(got - exact) <= 2.0**-46 * abs(exact)


@pytest.mark.parametrize("count", [3, 200])
def test_products_of_matrices_of_fp32x2(count):
    a, b = drawn(mcf.fp32x2, 6, 4 * count).view(4, count), drawn(mcf.fp32x2, 7, 5 * count)
    b = b.view(count, 5)
    with no_float64():
        product = a @ b
    x, y, found = exactly(a), exactly(b), exactly(product)
    for i in range(4):
        for j in range(5):
            terms = [x[i * count + k] * y[k * 5 + j] for k in range(count)]
            error = abs(found[i * 5 + j] - sum(terms))
            assert error <= Fraction(1, 2**44) * sum(map(abs, terms))


def test_transformations_of_float32_in_float32():
    a, b, c = (mcf.as_plain(drawn(mcf.fp32x2, i, 2000), torch.float32) for i in range(3))
    small = torch.logspace(-30, -3, 2000)
    with no_float64():
        p, e = mcf.eft.two_prod(a * small, b * small)
        large, rest = mcf.eft.two_prod(a * 1e28, b * 1e3)
        fused = mcf.eft.fma(a, b, -c)
        root = mcf.eft.sqrt(a)
        tiny = mcf.eft.sqrt(a * 1e-40)
    expected = mcf.eft.two_prod(a * small, b * small)
    assert torch.equal(p, expected[0])
    assert torch.equal(e, expected[1])  # also where products are subnormal
    for x, y, hi, lo in zip(*(t.tolist() for t in (a * 1e28, b * 1e3, large, rest)), strict=True):
        assert Fraction(x) * Fraction(y) == Fraction(hi) + Fraction(lo)
    assert torch.equal(fused, mcf.eft.fma(a, b, -c))
    assert torch.equal(root, mcf.eft.sqrt(a))
    assert torch.equal(tiny, mcf.eft.sqrt(a * 1e-40))


def test_equations_of_a_bad_condition():
    """Of Hilbert's matrix of order 8, of condition 1.5e10, with the exact inverse, of integers."""
    n = 8
    a = mcf.exact.from_exact(
        [[Fraction(1, i + j + 1) for j in range(n)] for i in range(n)], mcf.fp32x2
    )
    with no_float64():
        found = torch.linalg.solve(a, a @ a)
    x, expected = exactly(found), exactly(a)
    # The right side is rounded to 48 bits.
    error = max(abs(p - q) for p, q in zip(x, expected, strict=True))
    assert error < Fraction(1, 2**48) * 2 * 10**10
    with no_float64():
        left = a @ torch.linalg.inv(a)
    off = max(abs(p - (i % (n + 1) == 0)) for i, p in enumerate(exactly(left)))
    assert 0 < off < Fraction(1, 2**44) * 2 * 10**10
    large = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2.0**-47]], dtype=torch.float64)
    large = mcf.as_expansion(large, mcf.fp32x2)
    with no_float64(), pytest.raises(torch.linalg.LinAlgError, match="estimated condition"):
        torch.linalg.inv(large)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("format", LONG, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_dtype_that_is_asked_for(format, dtype):
    x = made(format)
    calls = (lambda: x.sum(dtype=dtype), lambda: torch.rand_like(x, dtype=dtype))
    for call in calls:
        expected = call()
        with no_float64():
            found = call()
        assert type(found) is type(expected)
        assert found.dtype == dtype
        assert isinstance(found, mcf.MCFTensor) == (dtype == format.dtype)


MEANS = {"normal_": (0, 1), "uniform_": (0.5, 1 / 12), "exponential_": (1, 1)}


@pytest.mark.with_float64("it goes without by itself")
@pytest.mark.parametrize(
    "format",
    [pytest.param(f, marks=[] if f is mcf.fp32x2 else pytest.mark.slow, id=f.name) for f in LONG],
)
def test_random_numbers_have_all_their_bits(format):
    count = 4000
    for name, (mean, variance) in MEANS.items():
        x = mcf.as_expansion(torch.zeros(count), format)
        with no_float64():
            getattr(x, name)()
        numbers = [float(v) for v in exactly(x)]
        found = sum(numbers) / count
        assert abs(found - mean) < 5 * (variance / count) ** 0.5
        assert sum((v - mean) ** 2 for v in numbers) / count == pytest.approx(variance, rel=0.2)
        assert (x.components[-1] != 0).float().mean() > 0.5
    for function, name in ((torch.randn_like, "normal_"), (torch.rand_like, "uniform_")):
        with no_float64():
            torch.manual_seed(1)
            found = function(x)
            torch.manual_seed(1)
            assert torch.equal(found, getattr(torch.zeros_like(x), name)())
    with no_float64():
        x.cauchy_(2.0, 0.5)
        halves = (x < 2).float().mean().item()
        x.log_normal_(1.0, 0.5)
        times = torch.zeros_like(x).geometric_(0.25).float()
        chosen = torch.multinomial(x, 3)
        shares = torch.bernoulli(torch.full_like(x, 0.25)).float()
        centers = torch.normal(torch.full_like(x, 3.0), 0.5).float()
        ones = torch.randint_like(x, 1, 3).float()
    assert (times >= 1).all()
    assert times.mean() == pytest.approx(4, abs=0.3)
    assert torch.equal(times, times.round())
    assert chosen.dtype == torch.int64
    assert shares.mean() == pytest.approx(0.25, abs=0.05)
    assert set(shares.tolist()) == {0.0, 1.0}
    assert centers.mean() == pytest.approx(3, abs=0.05)
    assert centers.std() == pytest.approx(0.5, rel=0.1)
    assert set(ones.tolist()) == {1.0, 2.0}
    assert abs(halves - 0.5) < 0.05
    assert abs(sorted(float(v) for v in exactly(x))[count // 2] - 2.718) < 0.2


def test_normal_numbers_are_written_by_another_method():
    with pytest.raises(NotImplementedError, match=r"x\.normal_"):
        torch.normal(0.0, 1.0, (3,), out=drawn(mcf.fp64x2, count=3))


def test_a_zero_that_is_a_number_keeps_its_sign():
    x = mcf.as_expansion(torch.tensor([1.0, -2.0]), mcf.fp32x2)
    with no_float64():
        assert (x / -0.0).tolist() == [-math.inf, math.inf]
        assert (x // -math.inf).tolist() == [-1, 0]


def test_closeness_of_numbers_far_apart():
    x = mcf.exact.from_exact([2**80, 2**80, 1], mcf.fp32x2)
    y = mcf.exact.from_exact([2**80 + 1, 2**80 + 2**40, 1], mcf.fp32x2)
    with no_float64():
        assert torch.isclose(x, y, rtol=0, atol=2).tolist() == [True, False, True]
        assert torch.isclose(x, y, rtol=0, atol=0.5).tolist() == [False, False, True]


def test_sparse_rows_are_summed_exactly():
    x, rows = made(mcf.fp32x2), sparse()
    before = exactly(x)
    with no_float64():
        x.add_(rows)
    sums = [[Fraction(0)] * 32 for _ in range(8)]
    values = rows._values().tolist()
    for place, row in zip(rows._indices()[0].tolist(), values, strict=True):
        sums[place] = [p + Fraction(q) for p, q in zip(sums[place], row, strict=True)]
    for old, new, more in zip(before, exactly(x), itertools.chain(*sums), strict=True):
        assert abs(new - old - more) <= 3 * abs(old + more) / 2**48


@pytest.mark.parametrize("order", [0, 1.5, 3])
def test_norms_of_any_order(order):
    x = drawn(mcf.fp32x2, 8, 50)
    with no_float64():
        found = torch.linalg.vector_norm(x, order)
    with mpmath.workprec(160):
        sizes = [abs(v) for v in in_mpmath(x)]
        exact = sum(v**order for v in sizes) ** (1 / mpmath.mpf(order)) if order else len(sizes)
        assert abs(in_mpmath(found)[0] / exact - 1) < 2.0**-42


@pytest.mark.parametrize("dtype", binned_sums.DTYPES)
def test_sums_without_order_have_the_bits_of_float64(dtype):
    bits = torch.randint(-(2**31), 2**31 - 1, (3, 2000), dtype=torch.int32)
    terms = list((bits if dtype == torch.float32 else bits.short()).view(dtype))
    for count in (3, 40, 4000):
        layout = binned_sums.layout_of(count)
        added = binned_sums._add(torch.zeros(2000, dtype=torch.int64), terms, layout)
        with no_float64():
            assert torch.equal(
                binned_sums._add(torch.zeros(2000, dtype=torch.int64), terms, layout), added
            )
        for target in binned_sums.DTYPES:
            expected = binned_sums._round(added, layout, target)
            with no_float64():
                for found in (
                    binned_sums._round(added, layout, target),
                    binned_sums._sum(terms, layout, target),
                ):
                    for x, y in ((found, expected), (found.signbit(), expected.signbit())):
                        known = ~expected.isnan()
                        assert torch.equal(x[known], y[known])
                    assert torch.equal(found.isnan(), expected.isnan())


def test_a_total_of_losses_is_rounded_once():
    model = nn.Linear(2, 2)
    handle = mcf.order_free_gradients(model, microbatches=1)
    with no_float64():
        # Of the exact sum, float64 keeps 1 + 2**-24, a tie that the rest decides.
        total = handle.total(torch.tensor([1.0, 2.0**-24, 2.0**-90]))
        assert total.dtype == torch.float32
    handle.remove()
    assert total.item() == 1 + 2.0**-23


EXACT = {
    "sum": lambda x: mcf.exact.sum(x, 1),
    "mean": lambda x: mcf.exact.mean(x, 1),
    "norm": lambda x: mcf.exact.norm(x, 1),
    "dot": lambda x: mcf.exact.dot(x, x.flip(1), 1),
    "cumsum": lambda x: mcf.exact.cumsum(x, 1),
    "from_exact": lambda x: mcf.exact.from_exact(x.tolist(), mcf.fp32x2).components[1],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exact_sums_have_the_bits_of_float64(dtype):
    bits = torch.randint(-(2**31), 2**31 - 1, (40, 65), dtype=torch.int32)
    anything = (bits if dtype == torch.float32 else bits.short()).view(dtype)
    anything = torch.where(anything.isfinite(), anything, 0)
    anything[0, 3] = torch.inf
    for x in (anything, torch.randn(40, 65).to(dtype), torch.full((2, 3), 6e-8, dtype=dtype)):
        expected = {name: function(x) for name, function in EXACT.items()}
        with no_float64():
            found = {name: function(x) for name, function in EXACT.items()}
            mcf.exact.to_fraction(x[1, 0])
        for name in EXACT:
            assert torch.equal(found[name].nan_to_num(7), expected[name].nan_to_num(7)), name


def metered(format, make, **options):
    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    model = model if format is None else mcf.as_expansion(model, format)
    optimizer = make(model.parameters(), **options)
    meter = mcf.EDQ(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 32, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()
    assert meter.not_metered == {}
    return [-1 if x is None else x for x in tree_leaves([meter.history, meter.states])]


@pytest.mark.slow
@pytest.mark.with_float64("it compares figures of both")
@pytest.mark.parametrize(
    "format",
    [
        pytest.param(
            f, marks=[] if f is mcf.bf16x3 else pytest.mark.slow, id=getattr(f, "name", "fp32")
        )
        for f in (None, *LONG, mcf.bf16i16, mcf.bf16i8)
    ],
)
def test_what_updates_lose_is_measured(format):
    for make, options in (
        (torch.optim.AdamW, {"lr": 1e-5}),
        (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    ):
        expected = metered(format, make, **options)
        with no_float64():
            found = metered(format, make, **options)
        # Figures are sums in float32.
        assert found == pytest.approx(expected, rel=2.0**-20)
        assert found != expected


@pytest.mark.parametrize("size", [2.0**-75, 2.0**70])
def test_figures_of_updates_whose_squares_leave_the_range_of_float32(size):
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3 * size, 4 * size])
    optimizer = torch.optim.SGD([p], lr=1.0)
    with no_float64():
        edq = mcf.EDQ(optimizer)
        optimizer.step()
    assert edq.last["ratio"] == 1
    assert edq.last["edq"] == edq.last["update_norm"] == 5 * size


@pytest.mark.parametrize(
    "format", [mcf.mxfp8.with_rounding("nearest"), mcf.e4m3i8.with_rounding("nearest")], ids=str
)
@pytest.mark.parametrize("step", [0.5 + 2.0**-24, 0.5 - 2.0**-24])
def test_blocks_take_numbers_with_one_rounding(format, step):
    """Beside a tie, which a float32 in between would round to the other side."""
    last = 2.0 ** (1 - format.precision)
    number = 1 + step * last
    wide = torch.full((1, 32), number, dtype=torch.float64)
    pair, zeros = (mcf.as_expansion(x, f) for x, f in ((wide, mcf.fp32x2), (wide * 0, format)))
    mask = torch.ones(1, 32, dtype=torch.bool)
    with no_float64():
        found = [zeros.clone().copy_(pair), zeros.clone().fill_(number)]
        found += [zeros.clone() for _ in range(3)]
        found[2][mask] = number
        found[3][mask] = pair[0, 0]
        found[4].masked_fill_(mask, number)
    expected = 1 + round(step) * last
    for x in found:
        assert (mcf.as_plain(x, torch.float64) == expected).all()


def test_factors_of_moments_are_widened():
    """As Adafactor has them, a row and a column, which EDQ copies in two float32 terms."""
    p = nn.Parameter(torch.rand(8, 32))
    row, gradient, number = torch.rand(8, 1), torch.rand(8, 32), torch.rand(())
    with no_float64():
        found = shadow.widened(row, p, "row_var")
        others = [shadow.widened(gradient, p, "grad"), shadow.widened(number, p, "mu")]
    assert found.format is mcf.fp32x2
    assert torch.equal(found.components[0], row)
    assert {(type(x), x.dtype) for x in others} == {(torch.Tensor, torch.float32)}


IMAGES = (2, 4, 5, 6)


def _norm(x):
    return F.batch_norm(
        x, torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype), training=True
    )


COMPOSED = {
    "avg_pool1d": lambda x: F.avg_pool1d(x[0], 3),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d, no padding counted": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool2d, divisor": lambda x: F.avg_pool2d(x, (2, 3), divisor_override=7),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, (3, 2, 5)),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "layer_norm": lambda x: F.layer_norm(x, (5, 6)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": _norm,
    "instance_norm": F.instance_norm,
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.flip(1), x.flip(0)),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0) * 3),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.flip(0) * 3, beta=0.3),
    "huber_loss": lambda x: F.huber_loss(x, x.flip(0) * 3, delta=0.3),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x / 3, x.flip(0) / 3),
    "with logits": lambda x: F.binary_cross_entropy_with_logits(x * 9, x.flip(0) / 3),
    "cross_entropy": lambda x: F.cross_entropy(x[0, 0] * 9, torch.arange(5)),
    "nll_loss of images": lambda x: F.nll_loss(
        x, torch.arange(30).view(1, 5, 6).repeat(2, 1, 1) % 4
    ),
    "quantile": lambda x: x.quantile(0.3, dim=0),
    "hardtanh": lambda x: F.hardtanh(x, 1.2, 1.7),
    "hardswish": lambda x: F.hardswish(x - 2),
    "hardsigmoid": lambda x: (
        F.hardsigmoid(x - 2)
        if isinstance(x, mcf.MCFTensor)
        else (x + 1).clamp(0, 6) / 6  # the gradient of PyTorch's has 1/6 in float32
    ),
    "mish": F.mish,
    "glu": lambda x: F.glu(x, 1),
    "softshrink": lambda x: F.softshrink(x, 1.3),
    "relu": lambda x: F.relu(x - 1.5),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "unfold": lambda x: x.unfold(3, 3, 1),
    "fold": lambda x: F.fold(F.unfold(x, 3), (5, 6), 3),
    "reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2, 2]), x[0, 0]),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, 1)),
    "mvlgamma": lambda x: torch.mvlgamma(x + 2, 2),
    "tanhshrink": F.tanhshrink,
    "polygamma": lambda x: torch.polygamma(3, x),
    "leaky_relu": lambda x: F.leaky_relu(x - 1.5, 0.1),
    "rad2deg": torch.rad2deg,
    "bilinear": lambda x: F.bilinear(x[0, 0], x[0, 1], x[1, 2:, :6].expand(2, 5, 6).mT @ x[1, 0]),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "unsafe_chunk": lambda x: torch.cat(torch.unsafe_chunk(x, 3, 2)[::2], 2),
    "block_diag": lambda x: torch.block_diag(x[0, 0], x[1, 1]),
}
FORWARD = {
    "cdist": lambda x: torch.cdist(x[0], x[1]),
    "pdist": lambda x: F.pdist(x[0, 0]),
    "logcumsumexp": lambda x: x.logcumsumexp(2),
    "logaddexp2": lambda x: torch.logaddexp2(x, x.flip(0)),
    "floor_divide": lambda x: torch.floor_divide(x * 100, x.flip(0)),
    "truncated quotient": lambda x: torch.div(-x * 100, x.flip(0), rounding_mode="trunc"),
    "renorm": lambda x: x[0].renorm(3, 0, 2.0),
    "cross": lambda x: torch.linalg.cross(x[..., :3], x[..., 3:]),
    "trace": lambda x: x[0, 0].trace(),
    "narrow_copy": lambda x: torch.narrow_copy(x, 2, 1, 3),
    "polygamma_": lambda x: x.clone().polygamma_(3),
    "cholesky_solve": lambda x: torch.cholesky_solve(x[0, 0, :, :2], x[0, 0, :, :5].tril()),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x[0, 0, :3, :3].triu(), upper=True),
    "linspace": lambda x: torch.linspace(x[0, 0, 0, 0], x[0, 0, 1, 1], 7, dtype=x.dtype),
    "_batch_norm_with_update": lambda x: torch.ops.aten._batch_norm_with_update(
        x, None, None, x[0, 0, 0, :4].clone(), x[0, 0, 1, :4].clone(), 0.1, 1e-5
    )[0],
    "integers": lambda x: (x * 1024).long().to(torch.float32),
}


def composed(name, x, backwards):
    """The result of a function, and the gradient of a weighted sum of it."""
    if not backwards:
        return [FORWARD[name](x)]
    x = x.detach().requires_grad_()
    result = COMPOSED[name](x)
    weights = torch.arange(result.numel(), dtype=torch.float32).mul(37).remainder(11)
    weights = weights.view(result.shape)
    (result * weights).sum().backward()
    return [result.detach(), x.grad]


@pytest.mark.thinned(of=96)
@pytest.mark.parametrize("format", LONG, ids=lambda f: f.name)
@pytest.mark.parametrize("name", [*COMPOSED, *FORWARD])
def test_functions_that_pytorch_composes(name, format):
    x = drawn(format, 11, math.prod(IMAGES)).abs().view(IMAGES).clamp(2.0**-8, 2.0) / 2 + 1
    wide = mcf.as_plain(x, torch.float64)
    expected = composed(name, wide, name in COMPOSED)
    with no_float64():
        found = composed(name, x, name in COMPOSED)
    # Formats of 16-bit terms round the result once.
    bound = 2.0**-44 if format is mcf.fp32x2 else 4 * format.u**format.terms
    for y, z in zip(found, expected, strict=True):
        assert isinstance(y, mcf.MCFTensor) or name == "integers"
        error = (mcf.as_plain(y, torch.float64) - z).abs().max()
        assert error <= bound * z.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 7, 20])
def test_polygamma_of_any_order(n):
    # Around -2.5 the two largest terms of order 20 cancel but for 2^-59 of them.
    below = -2.5 if n < 20 else -2.4
    numbers = torch.tensor([0.2, 0.5, 1.0, 3.3, 60.0, 1e4, -0.3, below, -7.8], dtype=torch.float64)
    x = mcf.as_expansion(numbers, mcf.fp32x2)
    with no_float64():
        found = torch.polygamma(n, x)
        ends = torch.polygamma(
            n, mcf.as_expansion(torch.tensor([0.0, -3.0, torch.nan]), mcf.fp32x2)
        )
    assert torch.equal(ends.isinf(), torch.tensor([True, True, False]))
    with mpmath.workprec(300):
        for y, a in zip(in_mpmath(found), in_mpmath(x), strict=True):
            # mpmath's zeta takes positive arguments: 30 terms are added to its sum.
            terms = [(a + k) ** -(n + 1) for k in range(30)]
            total = mpmath.fsum(terms) + mpmath.zeta(n + 1, a + 30)
            exact = (-1) ** (n + 1) * mpmath.factorial(n) * total
            if abs(exact) > 2.0**-78:
                assert abs(y / exact - 1) < 2.0**-44, a


def test_running_statistics_keep_all_terms():
    x = drawn(mcf.fp32x2, 12, 60).view(5, 3, 4)
    means = [mcf.as_expansion(torch.zeros(3), mcf.fp32x2), torch.zeros(3, dtype=torch.float64)]
    variances = [mcf.as_expansion(torch.ones(3), mcf.fp32x2), torch.ones(3, dtype=torch.float64)]
    with no_float64():
        F.batch_norm(x, means[0], variances[0], training=True)
    F.batch_norm(mcf.as_plain(x, torch.float64), means[1], variances[1], training=True)
    for found, expected in (means, variances):
        error = (mcf.as_plain(found, torch.float64) - expected).abs() / expected.abs()
        assert error.max() < 2.0**-44
    assert mcf.as_plain(means[0], torch.float64).abs().min() > 0


def test_norms_do_not_overflow():
    x = mcf.as_expansion(torch.tensor([3e38, -1e38, 1e-40]), mcf.fp32x2)
    with no_float64():
        found = (x / 2).norm()
    assert in_mpmath(found)[0] == pytest.approx(mpmath.mpf(10**38) * mpmath.sqrt(10) / 2, rel=1e-6)


def test_integers_beyond_float64():
    x = mcf.exact.from_exact([2**60 + 1, -(2**60) - 1, 3.75], mcf.fp32x2)
    assert x.long().tolist() == [2**60 + 1, -(2**60) - 1, 3]
    with no_float64():
        assert x.long().tolist() == [2**60 + 1, -(2**60) - 1, 3]
        assert x.bool().all()


def test_what_needs_float64_says_so():
    x = made(mcf.fp32x2)
    with mcf.without_float64(), pytest.raises(NotImplementedError, match=r"zeta.*float64"):
        torch.special.zeta(x, x)


@pytest.mark.with_float64("it asks whether there is float64")
def test_devices_say_whether_they_have_float64(monkeypatch):
    found = without_float64._has_float64.__wrapped__  # results of a device are kept
    assert not has_float64(torch.device("mps"))
    assert has_float64(torch.device("cpu"))
    assert has_float64(torch.device("cuda", 0))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    for has_fp64 in (False, True):
        properties = SimpleNamespace(has_fp64=has_fp64)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda i, p=properties: p)
        assert found("xpu", 0) == has_fp64


@pytest.mark.with_float64("it enters and leaves the mode itself")
def test_the_mode_is_of_the_thread_and_nests():
    seen = []

    @mcf.without_float64()
    def inside():
        with mcf.without_float64():
            pass
        seen.append(has_float64())
        thread = threading.Thread(target=lambda: seen.append(has_float64()))
        thread.start()
        thread.join()

    inside()
    assert (*seen, has_float64()) == (False, True, True)


@pytest.mark.parametrize(
    "format",
    [pytest.param(f, marks=[] if f is mcf.fp32x2 else pytest.mark.slow, id=f.name) for f in LONG],
)
def test_compiled_kernels_have_the_bits_of_eager_ones(format):
    a, b = drawn(format), drawn(format, 1)
    found = []
    for path in ("eager", "cpp"):
        with way(path), mcf.without_float64():
            found.append([*(a * b).components, *((a + 0.1) / b).components])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16x3], ids=lambda f: f.name)
def test_compiled_code_takes_numbers_with_all_their_bits(format):
    def function(x):
        return (x * 0.3 + 7) / x - 0.1

    x = drawn(format, count=64)
    with no_float64():
        expected = function(x)
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert_same_terms(found, expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad"])
def test_sparse_gradients_in_long_states(name):
    """Elements of states are float32 there, with a warning."""

    def train(format):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        table = mcf.as_expansion(table, format) if format else table.double()
        optimizer = getattr(torch.optim, name)(table.parameters(), lr=1e-2)
        for step in range(4):
            torch.manual_seed(step)
            where = torch.randint(10, (5,))
            table(where).backward(torch.randn(5, 4).to(table.weight.dtype))
            optimizer.step()
            optimizer.zero_grad()
        return table.weight.detach()

    with no_float64(), pytest.warns(mcf.errors.RoundedWarning, match=r"rounded to torch\.float32"):
        found = train(mcf.fp32x2)
    found = mcf.as_plain(found, torch.float64)
    torch.testing.assert_close(found, train(None), rtol=0, atol=4 * 1e-2 * 2**-22)


@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16x3, mcf.fp64x2], ids=str)
def test_rows_of_an_embedding_are_shortened(format):
    torch.manual_seed(0)
    table = mcf.as_expansion(nn.Embedding(6, 4, max_norm=1.0).to(format.dtype), format)
    exact = mcf.as_plain(table.weight.detach(), torch.float64)
    where = torch.tensor([4, 1, 4])
    with contextlib.nullcontext() if format == mcf.fp64x2 else no_float64():
        table(where)
    norms = exact.norm(dim=1, keepdim=True)
    for row in (1, 4):
        if norms[row] > 1:
            exact[row] /= norms[row] + 1e-7
    bound = 4 * 2.0 ** -min(format.precision, 52)
    found = mcf.as_plain(table.weight.detach(), torch.float64)
    torch.testing.assert_close(found, exact, rtol=bound, atol=0)


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16x3], ids=str)
def test_distances(format, p):
    torch.manual_seed(0)
    x, y = (
        mcf.as_expansion(torch.randn(50, dtype=torch.float64), format).requires_grad_()
        for _ in range(2)
    )
    with no_float64():
        found = torch.dist(x, y, p)
        found.backward()
    a, b = (mcf.as_plain(v.detach(), torch.float64).requires_grad_() for v in (x, y))
    expected = torch.dist(a, b, p)
    expected.backward()
    bound = 4 * 2.0**-format.precision
    for ours, right in ((found.detach(), expected.detach()), (x.grad, a.grad), (y.grad, b.grad)):
        torch.testing.assert_close(mcf.as_plain(ours, torch.float64), right, rtol=bound, atol=0)
