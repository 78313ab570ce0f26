"""Modules of every kind train with expansion parameters: plain activations, plain gradients."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import mcftensor as mcf
from support.helpers import assert_same_terms, exact


def bf16(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


class ClassToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(x + self.positions)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return F.relu(self.norm(self.convolution(x)) + x)


def tied():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    return model


IMAGE, SEQUENCE, INDICES = (2, 3, 8, 8), (2, 3, 8), torch.tensor([[1, 2]])
MODULES = {
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3), [IMAGE]),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), [IMAGE]),
    "Embedding": (lambda: nn.Embedding(5, 4), [INDICES]),
    "Embedding, max_norm": (lambda: nn.Embedding(5, 4, max_norm=1.0), [INDICES]),
    "Embedding, sparse": (lambda: nn.Embedding(5, 4, sparse=True), [INDICES]),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 4), [INDICES]),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        [SEQUENCE, SEQUENCE, SEQUENCE],
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        [SEQUENCE],
    ),
    "LSTM": (lambda: nn.LSTM(8, 5), [SEQUENCE]),
    "GRU": (lambda: nn.GRU(8, 5, num_layers=2), [SEQUENCE]),
    "RNN": (lambda: nn.RNN(8, 5, bidirectional=True), [SEQUENCE]),
    "LSTMCell": (lambda: nn.LSTMCell(8, 5), [(3, 8)]),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), [IMAGE]),
    "GroupNorm": (lambda: nn.GroupNorm(1, 3), [IMAGE]),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), [IMAGE]),
    "LayerNorm": (lambda: nn.LayerNorm(8), [SEQUENCE]),
    "RMSNorm": (lambda: nn.RMSNorm(8), [SEQUENCE]),
    "PReLU": (nn.PReLU, [SEQUENCE]),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 2), [SEQUENCE, SEQUENCE]),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), [(2, 4)]),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), [(2, 4)]),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), [(2, 4)]),
    "weight_norm by a hook": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), [(2, 4)]),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), [(2, 4)]),
    "class token": (ClassToken, [(2, 3, 4)]),
    "residual network": (
        lambda: nn.Sequential(Residual(), Residual(), nn.Flatten(), nn.Linear(192, 2)),
        [IMAGE],
    ),
    "tied weights": (tied, [INDICES]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", MODULES)
def test_modules_train(name):
    make, inputs = MODULES[name]
    module = mcf.as_expansion(make())
    inputs = [x if isinstance(x, torch.Tensor) else bf16(*x) for x in inputs]
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    before = [p.detach().clone() for p in module.parameters()]
    for _ in range(2):
        result = module(*inputs)
        result = result[0] if isinstance(result, tuple) else result
        assert type(result) is torch.Tensor
        (result.float() * torch.randn(result.shape)).sum().backward()
        for p in module.parameters():
            assert p.grad is None or type(p.grad) is torch.Tensor
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, mcf.MCFTensor) for p in module.parameters())
    pairs = zip(module.parameters(), before, strict=True)
    assert any((p.components[-1] != old.components[-1]).any() for p, old in pairs)
    module.eval()
    with torch.no_grad():
        result = module(*inputs)
    assert type(result[0] if isinstance(result, tuple) else result) is torch.Tensor


@pytest.mark.parametrize("parametrize", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_parametrizations_of_expansions(parametrize):
    module = parametrize(mcf.as_expansion(nn.Linear(4, 4)))
    module(bf16(2, 4)).sum().backward()
    assert any(isinstance(p, mcf.MCFTensor) for p in module.parameters())
    for p in module.parameters():
        assert type(p.grad) is torch.Tensor


class TestFunctional:
    def setup_method(self):
        self.model = mcf.as_expansion(nn.Linear(4, 2))
        self.parameters = {name: p.detach() for name, p in self.model.named_parameters()}

    def loss(self, parameters, x):
        return functional_call(self.model, parameters, (x,)).float().square().sum()

    def test_functional_call(self):
        x = bf16(3, 4)
        assert torch.equal(functional_call(self.model, self.parameters, (x,)), self.model(x))

    def test_gradients_are_plain(self):
        gradients = grad(self.loss)(self.parameters, bf16(3, 4))
        assert type(gradients["weight"]) is torch.Tensor

    def test_gradients_of_each_sample(self):
        x = bf16(3, 4)
        gradients = vmap(grad(self.loss), in_dims=(None, 0))(self.parameters, x)
        for i in range(3):
            expected = grad(self.loss)(self.parameters, x[i])["weight"]
            torch.testing.assert_close(gradients["weight"][i], expected)

    def test_an_ensemble(self):
        models = [mcf.as_expansion(nn.Linear(4, 2)) for _ in range(3)]
        parameters, _ = stack_module_state(models)
        x = bf16(5, 4)
        results = vmap(lambda p: functional_call(models[0], p, (x,)))(parameters)
        for model, result in zip(models, results, strict=True):
            torch.testing.assert_close(result, model(x), rtol=0.02, atol=0.02)

    def test_values(self):
        x = mcf.as_expansion(torch.randn(3, 4), mcf.fp32x2)
        squares = vmap(lambda row: (row * row).sum())(x)
        assert isinstance(squares, mcf.MCFTensor)
        torch.testing.assert_close(exact(squares), exact(x).square().sum(1), rtol=2**-46, atol=0)
        gradient = grad(lambda y: (y * y).sum())(x)
        assert_same_terms(gradient, x * 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model = mcf.as_expansion(nn.Linear(4, 4))
    x = bf16(2, 4).requires_grad_()
    model(x).sum().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(model.weight.grad, expected)


def test_autocast():
    model = mcf.as_expansion(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 4)).float().sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


INITIALIZERS = {
    "normal_": (), "uniform_": (), "xavier_uniform_": (), "xavier_normal_": (),
    "kaiming_uniform_": (), "kaiming_normal_": (), "trunc_normal_": (), "constant_": (0.1,),
}  # fmt: skip


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initial_values_use_all_terms(name):
    p = nn.Parameter(mcf.as_expansion(torch.zeros(8, 8)))
    assert getattr(nn.init, name)(p, *INITIALIZERS[name]) is p
    assert (p.components[1] != 0).float().mean() > 0.9
    for name in ("zeros_", "ones_", "eye_", "orthogonal_"):
        getattr(nn.init, name)(p)
    torch.testing.assert_close(exact(p @ p.detach().T), torch.eye(8).double(), atol=0.02, rtol=0)


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize(
    "options",
    [{}, {"avg_fn": get_ema_avg_fn(0.99)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.99)}],
    ids=["SWA", "EMA", "EMA, foreach"],
)
def test_averages_keep_all_terms(options):
    """Where plain bf16 averages are off by all of the displacement."""
    steps, lr = 500, 1e-5

    def run(model):
        average = AveragedModel(model, **options)
        generator = torch.Generator().manual_seed(0)
        average.update_parameters(model)
        for _ in range(steps):
            with torch.no_grad():
                step = lr * torch.randn(8, 8, generator=generator, dtype=torch.float64).sign()
                model.weight.sub_((step + lr).to(model.weight.dtype))
            average.update_parameters(model)
        return average.module.weight

    start = torch.rand(8, 8, dtype=torch.float64) + 0.5
    results = {}
    for kind in ("exact", "expansion", "plain"):
        model = nn.Linear(8, 8, bias=False).double()
        model.weight.data.copy_(start.bfloat16())
        model = mcf.as_expansion(model, mcf.bf16x3) if kind == "expansion" else model
        model = model.bfloat16() if kind == "plain" else model
        results[kind] = exact(run(model).detach()) - start.bfloat16().double()
    error = {
        kind: float((x - results["exact"]).norm() / results["exact"].norm())
        for kind, x in results.items()
    }
    assert error["expansion"] <= 5e-3
    assert error["plain"] > 0.9


@pytest.mark.parametrize("decompose", [torch.linalg.qr, torch.linalg.svd, torch.linalg.pinv])
def test_decompositions_of_parameters_are_computed_in_float32(decompose):
    """PyTorch has none of them in 16 bits."""
    p = nn.Parameter(mcf.as_expansion(torch.randn(4, 3), mcf.bf16x2))
    found = tree_leaves(decompose(p.detach()))
    expected = tree_leaves(decompose(p.components[0].detach().float()))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y.bfloat16())


def test_singular_parameters_are_refused_as_torch_refuses_them():
    p = nn.Parameter(mcf.as_expansion(torch.zeros(3, 3), mcf.bf16x2))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(p)


def test_clipping_and_flattening():
    model = mcf.as_expansion(nn.Linear(4, 2))
    model(bf16(2, 4)).sum().backward()
    clip_grad_norm_(model.parameters(), 0.1)
    clip_grad_value_(model.parameters(), 0.01)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 0.01
    before = copy.deepcopy(model)
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat, model.parameters())
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert exact(p).eq(exact(q)).all()


class TestAssignment:
    """`load_state_dict(assign=True)` would put plain tensors in place of the parameters."""

    def checkpoint(self, model):
        return {name: torch.randn(x.shape) for name, x in model.state_dict().items()}

    def model(self):
        return mcf.as_expansion(nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)))

    def test_plain_checkpoints_are_split(self):
        model = self.model()
        state = self.checkpoint(model)
        model.load_state_dict(state, assign=True)
        for name, p in model.named_parameters():
            assert isinstance(p, nn.Parameter)
            assert p.requires_grad
            expected = mcf.as_expansion(state[name], p.format)
            assert_same_terms(p.detach(), expected)
        assert {name: x.dtype for name, x in state.items()} == dict.fromkeys(state, torch.float32)

    def test_survives_copies(self):
        for model in (copy.deepcopy(self.model()), pickle.loads(pickle.dumps(self.model()))):
            model.load_state_dict(self.checkpoint(model), assign=True)
            assert all(isinstance(p, mcf.MCFTensor) for p in model.parameters())

    def test_expansions_are_taken_as_they_are(self):
        model, other = self.model(), self.model()
        model.load_state_dict(other.state_dict(), assign=True)
        assert model[0].weight.components[1].data_ptr() == other[0].weight.components[1].data_ptr()

    def test_plain_modules_are_as_before(self):
        model = mcf.as_plain(mcf.as_expansion(self.model()))
        model.load_state_dict(self.checkpoint(model), assign=True)
        assert type(model[0].weight) is nn.Parameter
        assert model[0].weight.dtype == torch.float32
        assert not any(m._load_state_dict_pre_hooks for m in model.modules())


def test_a_module_prints_the_formats_of_what_it_holds():
    model = nn.Sequential(nn.Linear(4, 2), nn.LSTM(2, 2), ClassToken(), nn.BatchNorm1d(2))
    nn.init.constant_(model[2].positions, 0.02)
    lines = repr(mcf.as_expansion(model, overrides={"2.head.*": None})).splitlines()
    assert lines[1].endswith("out_features=2, bias=True, weight: bf16x2, bias: bf16x3)")
    assert "weight_hh_l0: bf16x2" in lines[2]
    assert lines[3:6] == [
        "  (2): ClassToken(",
        "    token: bf16x3, positions: bf16x2",
        "    (head): Linear(in_features=4, out_features=2, bias=True)",
    ]
    assert "running_mean: bf16i16" in lines[-2]
    assert repr(mcf.as_expansion(nn.ParameterDict())) == repr(nn.ParameterDict())


def test_plain_modules_print_as_before():
    mcf.as_expansion(nn.Linear(2, 2))
    assert repr(nn.Linear(2, 3)) == "Linear(in_features=2, out_features=3, bias=True)"
    assert repr(mcf.as_plain(mcf.as_expansion(nn.LayerNorm(2)))) == repr(nn.LayerNorm(2))
