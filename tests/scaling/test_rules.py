"""Every rule against float64: the value as exact as the data, the scale as the rule says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import mcftensor as mcf
from mcftensor.scaling import exponents
from support.releases import GRADIENTS_OF_AMINMAX
from support.scales import BITS, FORMATS, assert_near, at, exact, floor_log2, half, normal

EXPONENTS = st.integers(-100, 100)
SIZES = st.integers(1, 40)
FEW = settings(max_examples=15)
FLOAT32 = 2.0**-20  # what a few sums in float32 may lose of the largest number that is summed


def plain(x):
    return exact(x)


# ------------------------------------------------------------------------------------- arithmetic

BINARY = {
    "add": (torch.add, max),
    "sub": (torch.sub, max),
    "mul": (torch.mul, lambda s, t: s + t),
    "maximum": (torch.maximum, max),
    "minimum": (torch.minimum, max),
}


@pytest.mark.parametrize("name", BINARY)
@FEW
@given(s=EXPONENTS, t=EXPONENTS, n=SIZES)
def test_binary(name, s, t, n):
    function, rule = BINARY[name]
    x, y = normal(n, exponent=s, seed=n), normal(3, n, exponent=t, seed=n + 1)
    made = function(x, y)
    assert made.exponent.item() == rule(s, t)
    expected = function(plain(x), plain(y))
    assert_near(made, expected, FLOAT32 * expected.abs())


@pytest.mark.parametrize("name", ["clamp_min", "clamp_max"])
def test_one_bound(name):
    x = normal(50, exponent=3)
    bound = plain(x).median().item()
    expected = getattr(plain(x), name)(bound)
    assert_near(getattr(x, name)(bound), expected, FLOAT32 * expected.abs())
    assert getattr(x, f"{name}_")(bound) is x
    assert_near(x, expected, FLOAT32 * expected.abs())


@FEW
@given(s=EXPONENTS, t=EXPONENTS, alpha=st.sampled_from([0.5, -3.0, 1e-20]))
def test_multiples(s, t, alpha):
    x, y = normal(50, exponent=s), normal(50, exponent=t, seed=1)
    assert_near(torch.add(x, y, alpha=alpha), plain(x) + alpha * plain(y), FLOAT32 * plain(x).abs())


@FEW
@given(s=EXPONENTS, t=EXPONENTS)
def test_means_weighted_by_a_tensor(s, t):
    x, y = normal(50, exponent=s), normal(50, exponent=t, seed=1)
    w = torch.rand(50, generator=torch.Generator().manual_seed(2))
    expected = plain(x).lerp(plain(y), w.double())
    size = plain(x).abs() + plain(y).abs()
    assert_near(x.lerp(y, w), expected, FLOAT32 * size)


@FEW
@given(s=EXPONENTS, factor=st.sampled_from([0.999, 1.001, 0.3, -1e20, 3e-30, 2.0**60]))
def test_numbers_go_to_data_and_exponent(s, factor):
    x = normal(50, exponent=s)
    made = x * factor
    # the power of two for which the rest is in [√½, √2)
    assert made.exponent.item() == s + floor_log2(abs(factor) * 2**0.5)
    assert_near(made, plain(x) * factor, FLOAT32 * (plain(x) * factor).abs())


@FEW
@given(s=EXPONENTS, t=EXPONENTS)
def test_quotients_go_by_their_size(s, t):
    x, y = normal(500, exponent=s), normal(500, exponent=t, seed=1)
    made = x / y
    largest = made.components[0].abs().max().item()
    assert 1 <= made.components[0].double().square().mean().sqrt() <= 2**15
    assert largest < 2**15
    assert_near(made, plain(x) / plain(y), FLOAT32 * (plain(x) / plain(y)).abs())


@FEW
@given(s=EXPONENTS)
def test_roots_halve_the_exponent(s):
    x = normal(50, exponent=s).abs()
    made = x.sqrt()
    assert made.exponent.item() == s // 2
    assert_near(made, plain(x).sqrt(), FLOAT32 * plain(x).sqrt())
    assert_near(x.rsqrt(), plain(x).rsqrt(), FLOAT32 * plain(x).rsqrt())


@FEW
@given(s=st.integers(-100, 100))
def test_powers_multiply_the_exponent(s):
    x = normal(50, exponent=s)
    made = x.pow(3)
    assert made.exponent.item() == 3 * s
    assert_near(made, plain(x) ** 3, FLOAT32 * plain(x).abs() ** 3)


# ------------------------------------------------------------------------------ products and sums


@FEW
@given(s=EXPONENTS, t=EXPONENTS, m=SIZES, k=SIZES, n=SIZES)
def test_matrix_products(s, t, m, k, n):
    x, y = normal(m, k, exponent=s), normal(k, n, exponent=t, seed=1)
    made = x @ y
    assert made.exponent.item() == s + t + half(k)
    assert_near(made, plain(x) @ plain(y), FLOAT32 * (plain(x).abs() @ plain(y).abs()))


@FEW
@given(s=EXPONENTS, t=EXPONENTS, k=SIZES)
def test_batches_of_products(s, t, k):
    x, y = normal(2, 3, k, exponent=s), normal(2, k, 5, exponent=t, seed=1)
    made = torch.bmm(x, y)
    assert made.exponent.item() == s + t + half(k)
    assert_near(made, plain(x) @ plain(y), FLOAT32 * (plain(x).abs() @ plain(y).abs()))
    assert_near(x[0] @ y[0, :, 0], plain(x)[0] @ plain(y)[0, :, 0], FLOAT32 * 2.0 ** (s + t) * k)


@FEW
@given(s=EXPONENTS, t=EXPONENTS, b=EXPONENTS)
def test_linear_layers(s, t, b):
    x, w, bias = normal(4, 9, exponent=s), normal(5, 9, exponent=t, seed=1), normal(5, exponent=b)
    made = F.linear(x, w, bias)
    assert made.exponent.item() == max(s + t + half(9), b)
    expected = F.linear(plain(x), plain(w), plain(bias))
    slack = F.linear(plain(x).abs(), plain(w).abs(), plain(bias).abs())
    assert_near(made, expected, FLOAT32 * slack)


@FEW
@given(s=EXPONENTS, n=st.integers(1, 300))
def test_sums_and_means(s, n):
    x = normal(3, n, exponent=s)
    slack = FLOAT32 * plain(x).abs().sum(1)
    made, mean = x.sum(1), x.mean(1)
    assert made.exponent.item() == s + half(n)
    assert mean.exponent.item() == s - half(n)
    assert_near(made, plain(x).sum(1), slack)
    assert_near(mean, plain(x).mean(1), slack / n)
    assert_near(x.sum(), plain(x).sum(), slack.sum())
    assert_near(torch.linalg.vector_norm(x), torch.linalg.vector_norm(plain(x)), slack.sum())


CONVOLUTIONS = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "depthwise": {"groups": 4, "padding": 1},
}


@pytest.mark.parametrize("how", CONVOLUTIONS)
@FEW
@given(s=EXPONENTS, t=EXPONENTS)
def test_convolutions(how, s, t):
    how = CONVOLUTIONS[how]
    channels = 4 // how.get("groups", 1)
    x, w = normal(2, 4, 7, 7, exponent=s), normal(4, channels, 3, 3, exponent=t, seed=1)
    made = F.conv2d(x, w, **how)
    assert made.exponent.item() == s + t + half(9 * channels)
    slack = F.conv2d(plain(x).abs(), plain(w).abs(), **how)
    assert_near(made, F.conv2d(plain(x), plain(w), **how), FLOAT32 * slack)


# ------------------------------------------------------------------------------------- activations

ACTIVATIONS = {
    "relu": torch.relu,
    "leaky": F.leaky_relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@FEW
@given(s=EXPONENTS)
def test_activations_keep_the_scale(name, s):
    x = normal(200, exponent=s)
    made, expected = ACTIVATIONS[name](x), ACTIVATIONS[name](plain(x))
    assert made.exponent.item() == s
    assert_near(made, expected, FLOAT32 * plain(x).abs())


LIMITED = {"hardtanh": F.hardtanh, "relu6": F.relu6, "elu": F.elu, "selu": F.selu}


@pytest.mark.parametrize("name", LIMITED)
@FEW
@given(s=st.integers(-100, 10))
def test_activations_with_limits_keep_small_numbers(name, s):
    x = normal(50, exponent=s)
    expected = LIMITED[name](plain(x))
    largest = plain(x).abs().max().item()
    assert_near(LIMITED[name](x), expected, FLOAT32 * expected.abs() + 2.0**-24 * largest)


TAILS = {
    "erfc": lambda x: torch.special.erfc(-x),
    "gelu": F.gelu,
    "ndtr": torch.special.ndtr,
}


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tails_of_the_normal_distribution(name, dtype):
    """PyTorch's 1 + erf has no bits of them in float32."""
    bound = 2.0 ** -min(BITS[dtype], 17)
    for number in (-5.0, -4.0, -3.0, -2.0, -0.25, 0.5, 3.0):
        x = at(torch.tensor([number], dtype=dtype), 0, requires_grad=True)
        wide = plain(x).requires_grad_()
        made, expected = TAILS[name](x), TAILS[name](wide)
        torch.testing.assert_close(plain(made), expected, rtol=bound, atol=0)
        (found,), (right,) = (
            torch.autograd.grad(y.sum(), z) for y, z in ((made, x), (expected, wide))
        )
        torch.testing.assert_close(plain(found), right, rtol=16 * bound, atol=0)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@FEW
@given(s=EXPONENTS | st.integers(-4, 2))
def test_the_normal_distribution(format, s):
    x = mcf.as_expansion(plain(normal(50, exponent=s, seed=s + 100)), format).requires_grad_()
    wide = plain(x).requires_grad_()
    made, expected = torch.special.ndtr(x), torch.special.erfc(wide * -(0.5**0.5)) / 2
    (found,), (right,) = (torch.autograd.grad(y.sum(), z) for y, z in ((made, x), (expected, wide)))
    # float32 has the exponential of a square, and fewer bits of numbers below 2^-126
    slack = FLOAT32 * (1 + plain(x) ** 2)
    for result, number in ((made, expected.detach()), (found, right)):
        assert_near(result, number, slack.clamp(max=1.0) * number.abs() + 2.0**-140)


def test_the_normal_distribution_into_another_tensor():
    x = normal(5, exponent=1)
    expected = torch.special.ndtr(x)
    scaled, plainly = torch.zeros_like(x), torch.zeros(5, dtype=torch.float64)
    for out in (scaled, plainly):
        assert torch.special.ndtr(x, out=out) is out
        assert torch.equal(exact(out), exact(expected))
    with pytest.raises(ValueError, match="cannot be resized"):
        torch.special.ndtr(x, out=torch.zeros_like(x[:1]))


def scripted(x):
    return torch.special.ndtr(x)


def test_the_normal_distribution_of_plain_tensors_is_that_of_pytorch():
    normal(1)
    x = torch.linspace(-9, 3, 7)
    found = torch.special.ndtr(x)
    assert torch.equal(found, torch._C._special.special_ndtr(x))
    assert torch.equal(torch.jit.script(scripted)(x), found)
    assert torch.equal(torch.special.ndtr(input=x, out=torch.empty(7)), found)


NUMBERS = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "cos": torch.cos}


@pytest.mark.parametrize("name", NUMBERS)
@FEW
@given(s=st.integers(-100, 5))
def test_functions_of_the_number_have_scale_one(name, s):
    x = normal(200, exponent=s)
    made = NUMBERS[name](x)
    assert made.exponent.item() == 0
    assert_near(made, NUMBERS[name](plain(x)), 2.0**-22)


# ------------------------------------------------------------------------------ norms and softmax


@FEW
@given(s=EXPONENTS, t=EXPONENTS, b=EXPONENTS, eps=st.sampled_from([1e-5, 0.0]))
def test_layer_norms(s, t, b, eps):
    x, w, bias = normal(6, 33, exponent=s), normal(33, exponent=t, seed=1), normal(33, exponent=b)
    made = F.layer_norm(x, (33,), w, bias, eps)
    assert made.exponent.item() == max(t, b)
    expected = F.layer_norm(plain(x), (33,), plain(w), plain(bias), eps)
    assert_near(made, expected, FLOAT32 * 10 * 2.0 ** max(t, b))


def test_layer_norms_with_a_negative_eps():
    """As PyTorch's, the square root of a number below zero is NaN."""
    x = normal(6, 33, exponent=2)
    assert_near(F.layer_norm(x, (33,), eps=-0.01), F.layer_norm(plain(x), (33,), eps=-0.01), 1e-3)
    assert mcf.as_plain(F.layer_norm(x, (33,), eps=-1e3)).isnan().all()


def test_batch_norms_with_an_infinite_variance():
    x, variance = normal(4, 3), torch.tensor([1.0, torch.inf, torch.inf])
    made = F.batch_norm(x, torch.zeros(3), variance)
    assert_near(made, F.batch_norm(plain(x), torch.zeros(3).double(), variance.double()), 1e-3)


@FEW
@given(s=EXPONENTS, t=EXPONENTS)
def test_rms_norms(s, t):
    x, w = normal(6, 33, exponent=s), normal(33, exponent=t, seed=1)
    expected = F.rms_norm(plain(x), (33,), plain(w), 1e-5)
    assert_near(F.rms_norm(x, (33,), w, 1e-5), expected, FLOAT32 * 10 * 2.0**t)


@FEW
@given(s=EXPONENTS, t=EXPONENTS)
def test_gradients_of_rms_norms_that_a_gpu_fuses(s, t):
    x, w, g = normal(5, 16, exponent=s), normal(16, exponent=t, seed=1), normal(5, 16, seed=2)
    inverse = plain(x).square().mean(-1, keepdim=True).rsqrt().float()
    made = torch.ops.aten._fused_rms_norm_backward(g, x, [16], inverse, w, [True, True])
    a, b = plain(x).requires_grad_(), plain(w).requires_grad_()
    expected = torch.autograd.grad(F.rms_norm(a, (16,), b, 0.0), (a, b), plain(g))
    for found, right in zip(made, expected, strict=True):
        assert_near(found, right, FLOAT32 * 10 * right.abs().max())


@FEW
@given(s=st.integers(-60, 60), t=EXPONENTS)
def test_batch_norms(s, t):
    x, w = normal(8, 3, 5, 5, exponent=s), normal(3, exponent=t, seed=1)
    bias = normal(3, exponent=t, seed=2)
    mean, variance = torch.zeros(3), torch.ones(3)
    made = F.batch_norm(x, mean, variance, w, bias, training=True)
    true_mean, true_variance = torch.zeros(3).double(), torch.ones(3).double()
    expected = F.batch_norm(plain(x), true_mean, true_variance, plain(w), plain(bias), True)
    assert made.exponent.item() == t
    assert_near(made, expected, FLOAT32 * 10 * 2.0**t)
    assert torch.allclose(mean.double(), true_mean, rtol=1e-5, atol=1e-6 * 2.0**s)
    assert torch.allclose(variance.double(), true_variance, rtol=1e-5)
    made = F.batch_norm(x, mean, variance, w, bias, training=False)
    expected = F.batch_norm(plain(x), mean.double(), variance.double(), plain(w), plain(bias))
    assert_near(made, expected, FLOAT32 * 10 * 2.0**t)


@FEW
@given(s=st.integers(-100, 10), n=SIZES)
def test_softmax(s, n):
    x = normal(5, n, exponent=s)
    made = x.softmax(1)
    assert made.exponent.item() == -floor_log2(n)
    assert_near(made, plain(x).softmax(1), 2.0**-14 / n if s > 0 else FLOAT32)
    assert x.log_softmax(1).exponent.item() == 0
    assert_near(x.log_softmax(1), plain(x).log_softmax(1), FLOAT32 * 2.0 ** max(s + 2, 2))


@FEW
@given(s=st.integers(-100, 1), t=EXPONENTS, causal=st.booleans())
def test_attention(s, t, causal):
    q, k, v = (normal(2, 3, 6, 8, exponent=e, seed=e + 200) for e in (s, 0, t))
    made = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert made.exponent.item() == t
    with sdpa_kernel(SDPBackend.MATH):  # the way of other devices: step by step
        stepwise = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert (exact(stepwise) - exact(made)).abs().max() <= 2.0 ** (t - 8)
    expected = F.scaled_dot_product_attention(plain(q), plain(k), plain(v), is_causal=causal)
    assert_near(made, expected, 2.0 ** (t - 16))


def test_attention_to_values_of_another_width():
    q, k, v = (normal(2, 3, 6, n, seed=i) for i, n in enumerate((8, 8, 5)))
    expected = F.scaled_dot_product_attention(plain(q), plain(k), plain(v))
    assert_near(F.scaled_dot_product_attention(q, k, v), expected, 2.0**-8)
    choice = torch.ops.aten._fused_sdp_choice
    assert [choice(q, k, v), choice(q, k, k)] == [0, 1]  # in single steps; as one operator


@FEW
@given(s=st.integers(-100, 5))
def test_losses(s):
    x, targets = normal(9, 12, exponent=s), torch.arange(9)
    made = F.cross_entropy(x, targets)
    assert abs(made.item() - F.cross_entropy(plain(x), targets).item()) < 2.0**-9 * max(1, 2**s)
    y = normal(9, 12, exponent=s - 1, seed=1)
    assert_near(F.mse_loss(x, y), F.mse_loss(plain(x), plain(y)), FLOAT32 * 4.0**s * 10)


# ------------------------------------------------------------------- places, several, questions


@FEW
@given(s=EXPONENTS, t=EXPONENTS)
def test_several_are_aligned_to_the_largest(s, t):
    x, y = normal(3, 4, exponent=s), normal(3, 4, exponent=t, seed=1)
    mask = torch.rand(3, 4) < 0.5
    for function in (
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([x, y]),
        lambda x, y: torch.where(mask, x, y),
    ):
        made = function(x, y)
        assert made.exponent.item() == max(s, t)
        assert_near(made, function(plain(x), plain(y)))
    assert torch.equal(x < y, plain(x) < plain(y))
    assert torch.equal(x.argmax(1), plain(x).argmax(1))


@FEW
@given(s=EXPONENTS)
def test_moves_keep_every_bit(s):
    x = normal(4, 6, exponent=s)
    places = torch.tensor([3, 0, 3])
    for function in (
        lambda x: x.t(),
        lambda x: x.view(2, 12)[1],
        lambda x: x.reshape(3, 8).permute(1, 0).contiguous(),
        lambda x: x[places],
        lambda x: F.embedding(places, x),
        lambda x: x.tril(),
        lambda x: F.pad(x, (1, 2)),
        lambda x: x.masked_fill(torch.eye(4, 6).bool(), 0.0),
        lambda x: torch.cat(x.chunk(2, 1)),
        lambda x: x.flip(0).expand(2, 4, 6),
        lambda x: F.max_pool2d(x[None, None], 2),
    ):
        assert torch.equal(exact(function(x)), function(plain(x)))


def test_a_mask_of_infinities_goes_with_every_scale():
    x = normal(3, 3, exponent=-80)
    masked = x.masked_fill(torch.eye(3).bool(), -torch.inf)
    assert masked.exponent.item() == -80
    assert torch.equal(exact(masked), exact(x).masked_fill(torch.eye(3).bool(), -torch.inf))
    assert masked[0, 0].item() == -torch.inf
    added = x + torch.zeros(3, 3).masked_fill(torch.eye(3).bool(), -torch.inf)
    assert torch.equal(exact(added), exact(masked))
    assert torch.equal(exact(torch.where(torch.eye(3).bool(), -torch.inf, x)), exact(masked))


def test_zeros_go_with_every_scale():
    x = normal(5, exponent=-90)
    for made in (x + torch.zeros_like(x), torch.cat([x, torch.zeros_like(x)])[:5]):
        assert made.exponent.item() == -90
        assert torch.equal(exact(made), exact(x))


def test_results_do_not_share_exponents():
    x = normal(5, exponent=3)
    for made in (x.relu(), x.clone(), x.flip(0), x.abs(), F.embedding(torch.arange(5), x[:, None])):
        with torch.no_grad():
            made.mul_(2.0**20)
        assert x.exponent.item() == 3


def test_exponents_that_nobody_looks_at(monkeypatch):
    """As on a GPU and in graphs: the same bits, by tensors in the place of ints."""

    def results():
        x, y = normal(6, 8, exponent=-70).requires_grad_(), normal(8, 8, exponent=200, seed=1)
        w, b = normal(8, seed=2).requires_grad_(), normal(8, exponent=-9, seed=3).requires_grad_()
        made = F.gelu(F.layer_norm(x @ y, (8,), w, b)) / y[0]
        loss = F.cross_entropy(
            made.masked_fill(torch.eye(6, 8).bool(), -torch.inf), torch.arange(6) % 2 + 6
        )
        loss.backward()
        p = torch.nn.Parameter(normal(6, 8, seed=4))
        p.grad = x.grad
        for _ in range(2):
            torch.optim.AdamW([p], weight_decay=0.1).step()
        x.detach()[1].mul_(2.0**30)
        relu = y.relu()
        relu.mul_(2.0**20)
        assert y.exponent.item() == 200
        infinite = at(torch.tensor([torch.inf, 1.0]).half(), -100) + at(torch.ones(2).half(), 100)
        return [loss, made, w.grad, b.grad, p, x, relu, infinite]

    looked_at = results()
    monkeypatch.setattr(exponents, "is_free", lambda x: False)
    for x, y in zip(results(), looked_at, strict=True):
        assert torch.equal(x.exponent, y.exponent)
        assert torch.equal(x.components[0], y.components[0])


BY_ROW = {
    "mode": lambda x: x.mode(-1).values,
    "nanmedian": lambda x: x.nanmedian(-1).values,
    "aminmax": lambda x: torch.cat(x.aminmax(dim=0)),
    "unique": torch.unique_consecutive,
    "max_pool3d": lambda x: F.max_pool3d(x.view(1, 4, 2, 2, 2), 2),
    "block_diag": lambda x: torch.block_diag(x[:2], x[2:]),
    "reflection": lambda x: F.pad(x, (2, 3), mode="reflect"),
    "unpool": lambda x: F.max_unpool2d(
        *F.max_pool2d(x.view(1, 4, 4, 2), 2, return_indices=True), 2
    ),
}


MARKED = {"aminmax": GRADIENTS_OF_AMINMAX}


@pytest.mark.parametrize("name", [pytest.param(x, marks=MARKED.get(x, ())) for x in BY_ROW])
@FEW
@given(s=EXPONENTS)
def test_operators_follow_the_rows_of_expansions(name, s):
    """Order and places do not depend on the scale; neither do their gradients."""
    x = normal(4, 8, exponent=s).requires_grad_()
    wide = exact(x.detach()).requires_grad_()
    made, expected = BY_ROW[name](x), BY_ROW[name](wide)
    assert torch.equal(exact(made), expected)
    if name != "unique":
        g = normal(*made.shape, exponent=-s)
        (found,) = torch.autograd.grad(made, x, g)
        (right,) = torch.autograd.grad(expected, wide, exact(g))
        assert_near(found, right, 2.0**-9 * right.abs().amax())


def test_questions_about_zeros_and_specials():
    x = at(torch.tensor([[0.0, 1.0, -0.0], [torch.inf, torch.nan, -2.0]]).half(), 100)
    for ask in (torch.any, torch.all, torch.count_nonzero, torch.logical_not, torch.isnan):
        assert torch.equal(ask(x), ask(exact(x)))
    for ask in (torch.isinf, torch.isfinite, torch.signbit, torch.nonzero, torch.isneginf):
        assert torch.equal(ask(x), ask(exact(x)))
    assert torch.equal(torch.logical_xor(x, x[:1]), torch.logical_xor(exact(x), exact(x[:1])))
    assert not x.is_pinned()


def test_what_has_no_rule_says_what_to_do():
    x = normal(3, 4, exponent=7)
    with pytest.raises(NotImplementedError) as raised:
        torch.linalg.qr(x)
    for part in ("linalg_qr", "scaled(float16)", "(3, 4)", "fallback()", "mcf.as_plain"):
        assert part in str(raised.value)
    with mcf.scaling.fallback(), mcf.scaling.counting() as counts:
        q, r = torch.linalg.qr(x)
    assert counts["fallback", "linalg_qr"] == 1
    assert torch.allclose(exact(q) @ exact(r), exact(x), atol=2.0**7 * 0.01)
    with pytest.raises(NotImplementedError):
        torch.linalg.qr(x)
    x, copy = normal(3, 4).requires_grad_(), exact(normal(3, 4)).requires_grad_()
    with mcf.scaling.fallback():
        torch.special.i0(x).sum().backward()
    torch.special.i0(copy).sum().backward()
    assert torch.allclose(exact(x.grad), copy.grad, rtol=2**-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_types_of_data(dtype):
    x, y = normal(4, 9, exponent=50, dtype=dtype), normal(9, 3, exponent=-70, dtype=dtype)
    made = x @ y
    assert made.dtype == dtype
    slack = 2.0 ** -min(20, BITS[dtype] - 2) * (exact(x).abs() @ exact(y).abs())
    assert_near(made, exact(x) @ exact(y), slack)
    assert (x + at(torch.ones(9).half(), 50)).dtype == torch.float32


def test_products_do_not_overflow_within_their_promise():
    x = at(torch.full((4, 64), 64.0).half(), 90)
    y = at(torch.full((64, 4), 64.0).half(), 90)
    made = x @ y  # 64 · 64 · √64 is what data comes to where all is alike
    assert torch.equal(made.components[0], torch.full((4, 4), 2.0**15).half())
    assert torch.equal(exact(made), exact(x) @ exact(y))
