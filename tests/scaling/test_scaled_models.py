"""Gradients of small models, scaled, at inputs of many sizes: nowhere worse than in plain bf16.

The yardstick is float64 in PyTorch's own operations.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mcftensor as mcf
from support.scales import is_scaled

SIZES = [1e-12, 1e-5, 1.0, 1e4, 1e10]
ROOM = 1.1
"""Times the error of bf16 that a gradient may have. More than one it is only where sums cancel, and
both have errors as large as the gradient."""


class Of(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.function(self, x)


def gated(gate):
    def function(self, x):
        a, b = self.both(x).chunk(2, -1)
        return self.out(a * gate(b))

    return lambda: Of(function, both=nn.Linear(16, 32), out=nn.Linear(16, 4))


def normed(norm):
    return lambda: nn.Sequential(norm(), nn.Linear(16, 4))


def mlp(activation):
    return lambda: nn.Sequential(nn.Linear(16, 32), activation(), nn.Linear(32, 4))


def attended(self, x):
    q, k, v = self.three(self.norm(x)).chunk(3, -1)
    return self.out((q @ k.mT / 4).softmax(-1) @ v)


def attended_by_one_operation(is_causal):
    def function(self, x):
        q, k, v = self.three(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out(y.transpose(1, 2).flatten(-2))

    return lambda: Of(function, three=nn.Linear(16, 48), out=nn.Linear(16, 4))


def loss(function):
    """Of what is near the targets."""

    def forward(self, x):
        return function(self.out(x), (x[..., :4] / 2).detach())

    return lambda: Of(forward, out=nn.Linear(16, 4))


def loss_of_classes(function):
    def forward(self, x):
        return function(self.out(self.norm(x)).flatten(0, 1), torch.arange(32) % 4)

    return lambda: Of(forward, norm=nn.LayerNorm(16), out=nn.Linear(16, 4))


def loss_of_signs(function, low=0):
    def forward(self, x):
        y = self.out(self.norm(x))
        return function(y, torch.where(x[..., :4] > 0, 1.0, float(low)).to(y.dtype))

    return lambda: Of(forward, norm=nn.LayerNorm(16), out=nn.Linear(16, 4))


def looked_up(self, x):
    return self.out(self.table((x > 0).sum(-1)) + self.a(x))


MODELS = {
    "linear": lambda: nn.Linear(16, 4),
    "relu": mlp(nn.ReLU),
    "leaky relu": mlp(nn.LeakyReLU),
    "gelu": mlp(nn.GELU),
    "silu": mlp(nn.SiLU),
    "tanh": mlp(nn.Tanh),
    "sigmoid": mlp(nn.Sigmoid),
    "prelu": mlp(nn.PReLU),
    "elu": mlp(nn.ELU),
    "hardswish": mlp(nn.Hardswish),
    "softplus": mlp(nn.Softplus),
    "log softmax": mlp(lambda: nn.LogSoftmax(-1)),
    "log of sum": lambda: Of(lambda m, x: m.out(x) - m.a(x).logsumexp(-1, keepdim=True),
                             a=nn.Linear(16, 16), out=nn.Linear(16, 4)),
    "gated by sigmoid": gated(torch.sigmoid),
    "gated by silu": gated(F.silu),
    "gated by gelu": gated(F.gelu),
    "gated by relu": gated(torch.relu),
    "glu": lambda: nn.Sequential(nn.Linear(16, 32), nn.GLU(), nn.Linear(16, 4)),
    "layer norm": normed(lambda: nn.LayerNorm(16)),
    "layer norm, large eps": normed(lambda: nn.LayerNorm(16, eps=1.0)),
    "rms norm": normed(lambda: nn.RMSNorm(16, eps=1e-6)),
    "group norm": normed(lambda: nn.GroupNorm(4, 8)),
    "batch norm": normed(lambda: nn.BatchNorm1d(8)),
    "norm between": lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
    "residual": lambda: Of(lambda m, x: m.out(x + m.inner(x).relu()), inner=nn.Linear(16, 16),
                           out=nn.Linear(16, 4)),
    "residual with a norm": lambda: Of(lambda m, x: m.out(x + m.inner(m.norm(x))),
                                       inner=nn.Linear(16, 16), norm=nn.LayerNorm(16),
                                       out=nn.Linear(16, 4)),
    "attention": lambda: Of(attended, norm=nn.LayerNorm(16), three=nn.Linear(16, 48),
                            out=nn.Linear(16, 4)),
    "attention by one operation": attended_by_one_operation(is_causal=False),
    "causal attention": attended_by_one_operation(is_causal=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 2, 3)),
    "concatenated": lambda: Of(lambda m, x: m.out(torch.cat([m.a(x), x], -1)),
                               a=nn.Linear(16, 16), out=nn.Linear(32, 4)),
    "stacked": lambda: Of(lambda m, x: m.out(torch.stack([m.a(x).relu(), x]).mean(0)),
                          a=nn.Linear(16, 16), out=nn.Linear(16, 4)),
    "where": lambda: Of(lambda m, x: m.out(torch.where(x > 0, m.a(x), x)),
                        a=nn.Linear(16, 16), out=nn.Linear(16, 4)),
    "square": lambda: Of(lambda m, x: m.out(m.a(x) * m.b(x)), a=nn.Linear(16, 16),
                         b=nn.Linear(16, 16), out=nn.Linear(16, 4)),
    "temperature": lambda: Of(lambda m, x: (m.a(m.norm(x)) * 10).softmax(-1), norm=nn.RMSNorm(16),
                              a=nn.Linear(16, 4)),
    "embedding": lambda: Of(looked_up, table=nn.Embedding(17, 16), a=nn.Linear(16, 16),
                            out=nn.Linear(16, 4)),
    "mse": loss(F.mse_loss),
    "l1": loss(F.l1_loss),
    "smooth l1": loss(F.smooth_l1_loss),
    "huber": loss(F.huber_loss),
    "gaussian nll": loss(lambda x, y: F.gaussian_nll_loss(x, y, torch.ones_like(x))),
    "cosine similarity": loss(lambda x, y: F.cosine_similarity(x, y, -1)),
    "cross entropy": loss_of_classes(F.cross_entropy),
    "label smoothing": loss_of_classes(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)),
    "cross entropy of each": lambda: Of(
        lambda m, x: F.cross_entropy(m.out(x).flatten(0, 1), torch.arange(32) % 4,
                                     reduction="none"), out=nn.Linear(16, 4)),
    "nll": loss_of_classes(lambda x, y: F.nll_loss(x.log_softmax(-1), y)),
    "bce": loss_of_signs(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y)),
    "bce with logits": loss_of_signs(F.binary_cross_entropy_with_logits),
    "poisson nll": loss_of_signs(F.poisson_nll_loss),
    "hinge": loss_of_signs(F.hinge_embedding_loss, -1),
    "margin ranking": loss_of_signs(
        lambda x, y: F.margin_ranking_loss(x[..., 0], x[..., 1], y[..., 0]), -1
    ),
    "triplet": loss_of_signs(lambda x, y: F.triplet_margin_loss(x[0], x[1], x[2])),
    "mean": lambda: Of(lambda m, x: m.out(m.a(x).mean(1)), a=nn.Linear(16, 16),
                       out=nn.Linear(16, 4)),
}  # fmt: skip


def gradients(model, x):
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    (y * weights.to(torch.float32 if is_scaled(y) else y.dtype)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def errors(found, wanted):
    """Of each parameter, relative to the norm of its gradient."""
    out = {}
    for name, exact in wanted.items():
        own = found[name]
        own = mcf.as_plain(own, torch.float64) if is_scaled(own) else own.double()
        out[name] = float((own - exact).norm() / exact.norm()) if exact.norm() else 0.0
    return out


@pytest.mark.thinned(of=16)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_good_as_in_bfloat16(name, size):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():  # what bf16 holds, so that all begin with the same weights
        for p in model.parameters():
            p.copy_(p.bfloat16())
    x = (torch.randn(4, 8, 16) * size).bfloat16()
    wanted = gradients(copy.deepcopy(model).double(), x.double())
    yardstick = errors(gradients(copy.deepcopy(model).bfloat16(), x), wanted)
    scaled = mcf.scaling.scalify(copy.deepcopy(model), mcf.scaling.scaled(torch.float16))
    entered = mcf.as_expansion(x, mcf.scaling.scaled(torch.float16))
    found = errors(gradients(scaled, entered), wanted)
    for parameter, error in found.items():
        assert error <= ROOM * yardstick[parameter], (parameter, error, yardstick)


def test_layers_that_are_scaled_twice_have_their_hooks_once():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.LSTM(3, 3))
    for dtype in (torch.float16, torch.bfloat16):
        mcf.scaling.scalify(model, mcf.scaling.scaled(dtype), overrides={"1.*": None})
        assert [len(part._forward_pre_hooks) for part in model] == [1, 1]


class TestRefusals:
    def test_modes_of_states(self):
        optimizer = torch.optim.AdamW(mcf.scaling.scalify(nn.Linear(16, 4)).parameters())
        with pytest.raises(TypeError, match=r"collage: .* are scaled.*leave collage out.*as_plain"):
            mcf.collage(optimizer, "compact")

    def test_expansions(self):
        model = mcf.scaling.scalify(nn.Linear(16, 4))
        for scaled in (model, model.weight):
            with pytest.raises(TypeError, match=r"as_expansion: .*scaled\(float16.*mcf\.as_plain"):
                mcf.as_expansion(scaled, mcf.bf16x2)
        mcf.as_expansion(mcf.as_plain(model, torch.float32), mcf.bf16x2)
