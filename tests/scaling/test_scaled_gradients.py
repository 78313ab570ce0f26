"""Gradients through the rules against float64 autograd, at any scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import mcftensor as mcf
from support.scales import FP16, at, exact, half, is_scaled, normal, rms

EXPONENTS = st.integers(-100, 100)
FEW = settings(max_examples=8)


def attention_in_steps(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# Functions of tensors of these shapes; whether they may have any scale, or have to be near 1.
ANY = {
    "add": (torch.add, [(4, 6), (6,)]),
    "sub": (lambda x, y: x - 3 * y, [(4, 6), (4, 1)]),
    "mul": (torch.mul, [(4, 6), (6,)]),
    "div": (lambda x, y: x / (y * y + y.detach().abs()), [(4, 6), (6,)]),
    "mm": (torch.mm, [(4, 6), (6, 5)]),
    "bmm": (torch.bmm, [(2, 4, 6), (2, 6, 5)]),
    "linear": (F.linear, [(3, 4, 6), (5, 6), (5,)]),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 3, 6, 6), (4, 3, 3, 3), (4,)]),
    "strided": (lambda x, w: F.conv2d(x, w, stride=2), [(2, 3, 7, 7), (4, 3, 3, 3)]),
    "sum": (lambda x: x.sum(1), [(4, 6)]),
    "mean": (lambda x: x.mean((0, 2)), [(4, 6, 3)]),
    "relu": (torch.relu, [(4, 6)]),
    "embedding": (lambda w: F.embedding(torch.tensor([3, 1, 3, 3]), w), [(5, 6)]),
    "cat": (lambda x, y: torch.cat([x, y * y]), [(4, 6), (2, 6)]),
    "places": (lambda x: x.t()[1:, [0, 2, 0]].reshape(-1).view(3, 5), [(4, 6)]),
    "pool": (lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2), [(2, 3, 6, 6)]),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 2), [(2, 3, 6, 6)]),
    "square": (lambda x: x**2, [(4, 6)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b, 0.0), [(5, 16), (16,), (16,)]),
    "groups": (lambda x, w, b: F.group_norm(x, 2, w, b, 0.0), [(3, 4, 5, 5), (4,), (4,)]),
    "mse": (F.mse_loss, [(4, 6), (4, 6)]),
}
CHANCES = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
PLACES = torch.tensor([[0, 2, 1, 1, 0, 3]] * 2)
ANY |= {
    "largest": (lambda x: x.max(1).values, [(4, 6)]),
    "smallest": (lambda x: x.min(0).values, [(4, 6)]),
    "amax": (lambda x: x.amax(1), [(4, 6)]),
    "top": (lambda x: x.topk(2, 1).values, [(4, 6)]),
    "sorted": (lambda x: x.sort(1, descending=True).values, [(4, 6)]),
    "median": (lambda x: x.median(1).values, [(4, 6)]),
    "cummax": (lambda x: x.cummax(1).values, [(4, 6)]),
    "deviation": (lambda x: x.std(1), [(4, 6)]),
    "variance": (lambda x: x.var(), [(4, 6)]),
    "deviation and mean": (lambda x: torch.stack(torch.std_mean(x, 1)), [(4, 6)]),
    "variance, mean": (lambda x: torch.var_mean(x, 1)[1], [(4, 6)]),
    "absolute": (lambda x: x.abs(), [(4, 6)]),
    "l1": (lambda x: F.l1_loss(x, torch.zeros_like(x)), [(4, 6)]),
    "gathered": (lambda x: x.gather(0, PLACES), [(4, 6)]),
    "scattered": (lambda x: x.new_zeros(4, 6).scatter(0, PLACES[:1], x), [(1, 6)]),
    "scatter add": (lambda x, y: x.scatter_add(0, PLACES, y), [(4, 6), (2, 6)]),
    "index add": (lambda x, y: x.index_add(0, PLACES[0, :4], y), [(4, 6), (4, 6)]),
    "index select": (lambda x: x.index_select(0, PLACES[0]), [(4, 6)]),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), [(2, 3, 4, 4)]),
    "bilinear": (lambda x: F.interpolate(x, (5, 7), mode="bilinear"), [(2, 3, 4, 4)]),
    "patches": (lambda x: F.unfold(x, 2), [(2, 3, 4, 4)]),
    "windows": (lambda x: x.unfold(1, 3, 2), [(4, 6)]),
    "pixels": (lambda x: F.pixel_shuffle(x, 2), [(1, 4, 2, 3)]),
    "adaptive max": (lambda x: F.adaptive_max_pool2d(x, 2), [(2, 3, 4, 4)]),
    "slope": (F.prelu, [(3, 4, 6), (4,)]),
    "normalized": (lambda x: F.normalize(x, dim=1, eps=0.0), [(4, 6)]),
}
NEAR_ONE = {
    "gelu": (F.gelu, [(4, 6)]),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), [(4, 6)]),
    "silu": (F.silu, [(4, 6)]),
    "tanh": (torch.tanh, [(4, 6)]),
    "sigmoid": (torch.sigmoid, [(4, 6)]),
    "softmax": (lambda x: x.softmax(1), [(4, 6)]),
    "log softmax": (lambda x: x.log_softmax(1), [(4, 6)]),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 5, 2])), [(4, 6)]),
    "smoothed": (
        lambda x: F.cross_entropy(x, torch.tensor([1, 0, 5, 2]), label_smoothing=0.1),
        [(4, 6)],
    ),
    "by float": (
        lambda x: (
            F.cross_entropy(x.float(), torch.tensor([1, 0, 5, 2]))
            if x.dtype == torch.float16
            else F.cross_entropy(x, torch.tensor([1, 0, 5, 2]))
        ),
        [(4, 6)],
    ),
    "log of sum": (lambda x: x.logsumexp(1), [(4, 6)]),
    "binary": (F.binary_cross_entropy_with_logits, [(4, 6), (4, 6)]),
    "binary, weighted": (
        lambda x: F.binary_cross_entropy_with_logits(
            x, CHANCES.to(x.dtype), pos_weight=1 + CHANCES[0].to(x.dtype), reduction="none"
        ),
        [(4, 6)],
    ),
    "binary of chances": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), CHANCES.to(x.dtype)),
        [(4, 6)],
    ),
    "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), [(4, 6), (4, 6)]),
    "huber": (lambda x, y: F.huber_loss(x, y, reduction="sum", delta=0.7), [(4, 6), (4, 6)]),
    "divergence": (
        lambda x: F.kl_div(x.log_softmax(1), CHANCES.to(x.dtype), reduction="batchmean"),
        [(4, 6)],
    ),
    "cosine": (F.cosine_similarity, [(4, 6), (4, 6)]),
    "elu": (F.elu, [(4, 6)]),
    "selu": (F.selu, [(4, 6)]),
    "hard tanh": (F.hardtanh, [(4, 6)]),
    "hard swish": (F.hardswish, [(4, 6)]),
    "hard sigmoid": (F.hardsigmoid, [(4, 6)]),
    "mish": (F.mish, [(4, 6)]),
    "glu": (F.glu, [(4, 6)]),
    "softplus": (F.softplus, [(4, 6)]),
    "log sigmoid": (F.logsigmoid, [(4, 6)]),
    "rms norm": (lambda x, w: F.rms_norm(x, (16,), w, 1e-5), [(5, 16), (16,)]),
    "group norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        [(3, 4, 5, 5), (4,), (4,)],
    ),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [(6, 3, 4, 4), (3,), (3,)],
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 3, 6, 8)] * 3,
    ),
    "attention in steps": (
        attention_in_steps,
        [(2, 3, 6, 8)] * 3,
    ),
    "attention written out": (
        lambda q, k, v: (
            (q @ k.transpose(-1, -2) / 8**0.5)
            .masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
            .softmax(-1)
            @ v
        ),
        [(3, 6, 8)] * 3,
    ),
}


def check(function, shapes, exponents, s):
    """Gradients of a sum with weights of 2^s against those of float64, relative to the largest."""
    inputs = [
        normal(*shape, exponent=e, seed=i).requires_grad_()
        for i, (shape, e) in enumerate(zip(shapes, exponents, strict=True))
    ]
    copies = [exact(x).requires_grad_() for x in inputs]
    made, expected = function(*inputs), function(*copies)
    assert is_scaled(made)
    weights = normal(*made.shape, exponent=s, seed=9)
    made.backward(weights.to(made.dtype))
    expected.backward(exact(weights))
    for x, y in zip(inputs, copies, strict=True):
        assert is_scaled(x.grad)
        assert x.grad.dtype == torch.float16
        assert torch.isfinite(x.grad.components[0]).all()
        error = (exact(x.grad) - y.grad).abs().max()
        assert error <= 2.0**-8 * y.grad.abs().max()


@pytest.mark.parametrize("name", ANY)
@FEW
@given(exponents=st.lists(EXPONENTS, min_size=3, max_size=3), s=EXPONENTS)
def test_gradients_at_any_scale(name, exponents, s):
    function, shapes = ANY[name]
    if name == "mse":
        exponents, s = [exponents[0]] * 3, 0  # or one of the two is nothing to the other
    check(function, shapes, exponents[: len(shapes)], s)


@pytest.mark.parametrize("name", NEAR_ONE)
@FEW
@given(s=EXPONENTS)
def test_gradients_of_any_scale(name, s):
    function, shapes = NEAR_ONE[name]
    check(function, shapes, [0] * len(shapes), s)


def test_losses_and_norms_balance_their_gradients():
    x, w = normal(64, 32).requires_grad_(), normal(32, exponent=-60).requires_grad_()
    logits = F.layer_norm(x, (32,), w)
    logits.retain_grad()
    with mcf.scaling.counting() as counts:
        (F.cross_entropy(logits, torch.arange(64) % 32) * 2.0**-70).backward()
    assert 1 <= rms(logits.grad) < 2
    assert 1 <= rms(x.grad) < 2
    assert w.grad.exponent == logits.grad.exponent + half(64)  # a sum
    rescaled = {name for event, name in counts if event == "rescaled"}
    assert rescaled == {
        "nll_loss_backward",
        "_log_softmax_backward_data",
        "native_layer_norm_backward",
    }


def test_events_are_counted_in_their_block_alone():
    x = normal(4, 6)
    with mcf.scaling.counting() as outer:
        with mcf.scaling.counting() as inner:
            mcf.scaling.rescale(x * 1e-3)
        assert inner.total() == 1
        mcf.scaling.rescale(x * 1e-3)
    mcf.scaling.rescale(x * 1e-3)
    assert (outer.total(), inner.total()) == (1, 1)


NORMS = {
    "layer": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (64, 8), (8,), 64),
    "rms": (lambda x, w, b: F.rms_norm(x, (8,), w), (5, 64, 8), (8,), 320),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 8, 5, 5), (8,), 75),
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (3, 8, 5, 5), (8,), 75),
}


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_gains_and_biases_follow_the_rule_of_sums(name):
    function, shape, sides, n = NORMS[name]
    x, w, b = (normal(*s, seed=i).requires_grad_() for i, s in enumerate((shape, sides, sides)))
    made = function(x, w, b)
    gradient = normal(*shape, exponent=-90, seed=3)
    with mcf.scaling.counting() as counts:
        made.backward(gradient)
    for parameter in (w, b):
        if parameter.grad is not None:
            assert parameter.grad.exponent.item() == -90 + half(n)
            assert 2.0**-2 <= rms(parameter.grad) <= 2.0**2
    assert 1 <= rms(x.grad) < 2
    assert sum(counts.values()) == (name != "rms")  # which a CPU takes step by step


def test_gradients_of_attention():
    q, k, v = (normal(2, 3, 6, 8, seed=i).requires_grad_() for i in range(3))
    made = F.scaled_dot_product_attention(q * 2.0**-20, k, v)
    with mcf.scaling.counting() as counts:
        made.backward(normal(2, 3, 6, 8, exponent=-90, seed=3))
    assert v.grad.exponent.item() == -90  # a mean, as in the forward direction
    assert 1 <= rms(q.grad) < 2
    assert 1 <= rms(k.grad) < 2
    assert sum(counts.values()) == 2


def test_plain_inputs_of_convolutions_get_plain_gradients():
    layer = mcf.scaling.scalify(nn.Conv2d(3, 4, 3), FP16)
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    layer(x).backward(torch.ones(2, 4, 4, 4) * 1e-6)
    copy = x.detach().double().requires_grad_()
    made = F.conv2d(copy, exact(layer.weight), exact(layer.bias))
    made.backward(torch.full_like(made, 1e-6))
    assert type(x.grad) is torch.Tensor
    assert torch.allclose(x.grad.double(), copy.grad, rtol=2**-7, atol=1e-9)
    mcf.as_plain(layer, torch.float32)
    assert type(layer(x)) is torch.Tensor


def test_rescaling_forward_and_backward():
    x = at(torch.full((40,), 2.0**-9).half(), 5, requires_grad=True)
    made = mcf.scaling.rescale(x)
    assert rms(made) == 1
    assert torch.equal(exact(made), exact(x))
    made.backward(at(torch.full((40,), 2.0**-6).half(), -30))
    assert rms(x.grad) == 2.0**-6
    x.grad = None
    made = mcf.scaling.rescale_grad(x)
    assert torch.equal(made.components[0], x.components[0])
    made.backward(at(torch.full((40,), 2.0**-6).half(), -30))
    assert rms(x.grad) == 1
    assert x.grad.exponent.item() == -36


# ----------------------------------------------------------------------------------------- models


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x)), inplace=True), 2)
        x = F.relu(x + self.second(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.layers(self.tokens(x)))


def perceptron():
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16), nn.RMSNorm(16),
        nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 5),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.rnn = kind(16, 12, batch_first=True)
        self.head = nn.Linear(12, 11)

    def forward(self, x):
        made, _ = self.rnn(self.tokens(x))
        return self.head(made)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stay_plain(kind):
    model = Recurrent(kind)
    scaled = Recurrent(kind)
    scaled.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"rnn\.weight_ih_l0 .*overrides=\{'rnn\.\*': None\}"):
        mcf.scaling.scalify(scaled)
    mcf.scaling.scalify(scaled, FP16, overrides={"rnn.*": None})
    mcf.scaling.scalify(scaled, FP16, overrides={"rnn.*": None})  # hooks once
    x, y = torch.randint(11, (3, 7)), torch.randint(11, (3, 7))
    for (_, p), q in zip(scaled.named_parameters(), model.double().parameters(), strict=True):
        q.data.copy_(exact(p))
    expected, made = loss_of(model, x, y), loss_of(scaled, x, y)
    (expected * 2.0**-40).backward()
    (made * 2.0**-40).backward()
    assert made.item() == pytest.approx(expected.item(), rel=2e-3)
    for (name, p), q in zip(scaled.named_parameters(), model.parameters(), strict=True):
        assert is_scaled(p.grad) != name.startswith("rnn")
        assert (exact(p.grad) - q.grad).norm() <= 1e-2 * q.grad.norm(), name


MODELS = {
    "perceptron": (perceptron, lambda: (torch.randn(12, 6), torch.arange(12) % 5)),
    "residual": (Residual, lambda: (torch.randn(4, 3, 8, 8), torch.arange(4))),
    "words": (Words, lambda: (torch.randint(11, (3, 7)), torch.randint(11, (3, 7)))),
}


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_models(name):
    build, draw = MODELS[name]
    model, (x, y) = build(), draw()
    scaled = build()
    scaled.load_state_dict(model.state_dict())
    mcf.scaling.scalify(scaled)
    for (_, p), q in zip(scaled.named_parameters(), model.double().parameters(), strict=True):
        q.data.copy_(exact(p))
    expected = loss_of(model, x.double() if x.is_floating_point() else x, y)
    expected.backward()
    made = loss_of(scaled, x, y)
    made.backward()
    assert made.item() == pytest.approx(expected.item(), rel=2e-3)
    for (key, p), q in zip(scaled.named_parameters(), model.parameters(), strict=True):
        assert is_scaled(p.grad), key
        error = (exact(p.grad) - q.grad).norm() / q.grad.norm()
        # biases before a norm have gradients of nothing but rounding
        assert error < 1e-2 or q.grad.norm() < 1e-6, key


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("k", [-60, 60])
def test_the_scale_of_a_loss_changes_no_bit_of_data(name, k):
    build, draw = MODELS[name]
    model, (x, y) = mcf.scaling.scalify(build()), draw()
    loss_of(model, x, y).backward()
    first = [p.grad for p in model.parameters()]
    model.zero_grad()
    (loss_of(model, x, y) * 2.0**k).backward()
    for before, p in zip(first, model.parameters(), strict=True):
        assert torch.equal(p.grad.components[0], before.components[0])
        assert not before.components[0].any() or p.grad.exponent == before.exponent + k


def test_gradients_of_single_samples():
    """By vmap: one scale for all samples."""
    model = mcf.scaling.scalify(perceptron(), FP16)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.randn(6, 6), torch.arange(6) % 5

    def loss(parameters, x, y):
        made = torch.func.functional_call(model, parameters, (x[None],))
        return F.cross_entropy(made, y[None])

    gradient = torch.func.grad(loss)
    found = torch.func.vmap(gradient, (None, 0, 0))(parameters, x, y)
    for name, all_at_once in found.items():
        assert is_scaled(all_at_once)
        one_by_one = torch.stack([exact(gradient(parameters, x[i], y[i])[name]) for i in range(6)])
        error = (exact(all_at_once) - one_by_one).norm()
        assert error <= 2e-2 * one_by_one.norm() + 1e-6, name


def test_plain_float16_loses_what_scaled_float16_keeps():
    torch.manual_seed(0)
    plain = perceptron()
    scaled = mcf.scaling.scalify(perceptron(), FP16)
    scaled.load_state_dict(plain.state_dict())
    plain.half()
    x, y = torch.randn(12, 6), torch.arange(12) % 5
    for model, inputs in ((plain, x.half()), (scaled, x)):
        (F.cross_entropy(model(inputs).float(), y) * 2.0**-20).backward()
    lost = plain[0].weight.grad == 0
    assert lost.float().mean() > 0.9
    assert (exact(scaled[0].weight.grad) != 0).float().mean() > 0.9
