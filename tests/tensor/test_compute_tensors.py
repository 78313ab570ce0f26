"""Parameters of codes under shared scales: what a model computes with, sees of them, and writes."""

import copy
import inspect
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.operators import structure
from mcftensor.tensor.leading_view import ComputeView
from support.helpers import assert_same_bits, exact, sample

FORMATS = [mcf.e4m3i8, mcf.e4m3i16]
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def parameter(format, *shape, seed=0):
    return nn.Parameter(sample(format, *shape, seed=seed))


def code_times_scale(p):
    codes, _, scales = p.detach().components
    blocks = scales.double().view(len(scales), -1).repeat_interleave(32, 1)
    blocks = blocks[:, : codes[0].numel()].view(codes.shape)
    return (codes.view(torch.float8_e4m3fn).double() * torch.exp2(blocks - 127)).bfloat16()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 40)
        self.attention = nn.MultiheadAttention(40, 4)
        self.norm = nn.LayerNorm(40)
        self.mix = nn.Conv1d(40, 32, 3, padding=1)
        self.recurrent = nn.GRU(32, 24, batch_first=True)
        self.token = nn.Parameter(torch.randn(1, 2, 24))
        self.head = nn.Linear(24, 11, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = self.recurrent(self.mix(x.transpose(1, 2)).transpose(1, 2))[0]
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(x)


@by_format
class TestModels:
    def test_compute_with_code_times_scale(self, format):
        model = mcf.as_expansion(Model(), format)
        plain = mcf.as_plain(copy.deepcopy(model), torch.bfloat16)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.data = code_times_scale(p) if p.format is format else p.detach().components[0]
        tokens = torch.arange(12).view(3, 4) % 11
        found = []
        for m in (model, plain):
            y = m(tokens)
            y.float().square().mean().backward()
            found.append([y, *(p.grad for p in m.parameters())])
        for a, b in zip(*found, strict=True):
            assert type(a) is type(b) is torch.Tensor
            assert torch.equal(a, b)

    def test_vectors_are_float32(self, format):
        model = mcf.as_expansion(Model(), format)
        for name, p in model.named_parameters():
            is_vector = sum(n > 1 for n in p.shape) < 2
            assert p.format is (mcf.bf16i16 if is_vector else format), name
        wanted = mcf.as_expansion(Model(), format, overrides={"*bias*": mcf.bf16x3})
        assert wanted.norm.bias.format is mcf.bf16x3
        with pytest.raises(ValueError, match=r"mcf\.bf16i16 for vectors"):
            mcf.as_expansion(Model(), overrides={"norm.bias": format})

    def test_a_forward_under_no_grad_and_compiled(self, format):
        layer = mcf.as_expansion(nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 7)), format)
        x = torch.randn(3, 40).bfloat16()
        expected = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), expected)
        with torch.inference_mode():
            assert torch.equal(layer(x), expected)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        found = compiled(x)
        assert torch.equal(found, expected)
        expected.sum().backward()
        grads = [p.grad for p in layer.parameters()]
        layer.zero_grad()
        found.sum().backward()
        for p, g in zip(layer.parameters(), grads, strict=True):
            assert type(p.grad) is torch.Tensor
            assert torch.equal(p.grad, g)

    def test_a_graph_keeps_no_copy_of_weights(self, format):
        layer = mcf.as_expansion(nn.Linear(64, 64, bias=False), format)
        x = torch.randn(1, 64).bfloat16().requires_grad_()
        y = layer(x)
        weight = y.grad_fn._saved_mat2
        assert type(weight) is ComputeView
        assert not any(
            isinstance(x, torch.Tensor) for x in vars(weight).values() if x is not layer.weight
        )
        y.sum().backward()
        assert torch.equal(x.grad[0], code_times_scale(layer.weight).float().sum(0).bfloat16())


VIEWS = {
    "t": lambda x: x.t(),
    "row": lambda x: x[1],
    "columns": lambda x: x[:, 3:20],
    "flat": lambda x: x.view(-1),
    "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1),
    "of a view": lambda x: x.t()[1:5].t(),
    "unbind": lambda x: x.unbind()[2],
    "chunk": lambda x: x.chunk(3, dim=1)[1],
}


@by_format
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
class TestViewsAcrossRows:
    def test_copies_hold_the_number_again(self, format, view):
        p = parameter(format.nearest, 5, 40)
        y = view(p.detach())
        own = mcf.bf16i16 if y.dim() < 2 else format.nearest
        copies = [(y.clone(), own), (y.contiguous().clone(), own)]
        for copied, wanted in (*copies, (torch.stack([y, y])[0], mcf.bf16i16)):
            assert copied.role == "parameter"
            assert copied.format is wanted
            unit = 2.0**-format.precision
            torch.testing.assert_close(exact(copied), exact(y), rtol=unit, atol=0)
            copied.zero_()


@by_format
class TestFactories:
    def test_states_are_float32(self, format):
        p = parameter(format, 5, 40)
        for y in (torch.zeros_like(p), torch.ones_like(p), torch.full_like(p, 0.3)):
            assert (y.format, y.role, y.shape) == (mcf.bf16i16, "value", p.shape)
        assert torch.ones_like(p).eq(1).all()
        held = torch.empty_like(p.detach())
        assert (held.format, held.role) == (format, "parameter")

    def test_new_ones_keep_the_role(self, format):
        p = parameter(format, 5, 40)
        assert (p.new_zeros(3, 7).format, p.new_zeros(3, 7).role) == (format, "parameter")
        vector = p.new_zeros(9)
        assert (vector.format, vector.role, vector.shape) == (mcf.bf16i16, "parameter", (9,))
        assert p.t().new_zeros(4, 4).format is format

    def test_spectral_norm(self, format):
        layer = mcf.as_expansion(nn.Linear(40, 8), format)
        layer = nn.utils.parametrizations.spectral_norm(layer)
        layer(torch.ones(2, 40).bfloat16()).sum().backward()
        assert layer.parametrizations.weight.original.grad.dtype == torch.bfloat16


@by_format
def test_a_training_is_saved_and_goes_on(format):
    def made(seed):
        torch.manual_seed(seed)
        model = mcf.as_expansion(nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 2)), format)
        return model, mcf.collage(torch.optim.AdamW(model.parameters(), lr=1e-2), "compact")

    def train(model, optimizer, steps):
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(4, 40, generator=generator).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = made(0)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    other = made(1)
    for part, state in zip(other, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(model, optimizer, 2)
    train(*other, 2)
    assert_same_bits(other[0].state_dict(), model.state_dict())


def test_the_first_byte_is_what_products_take():
    p = parameter(mcf.e4m3i8, 16, 32)
    x = torch.randn(16, 32).bfloat16()
    codes, _, scales = p.detach().components
    product = x @ codes.view(torch.float8_e4m3fn).bfloat16().t()
    scaled = product.double() * torch.exp2(scales.double() - 127).t()
    torch.testing.assert_close(F.linear(x, p).double(), scaled, rtol=2**-7, atol=2**-7)


@pytest.mark.thinned(of=4)
@by_format
@pytest.mark.parametrize("shape", [(5,), (2, 3), (), (0,), (60,)])
@pytest.mark.parametrize("compiled", [False, True])
def test_embeddings_make_anew_the_rows_that_are_asked_for(format, shape, compiled, monkeypatch):
    p, indices = parameter(format, 50, 40), torch.randint(50, shape)
    made = []
    decode = structure.compute_tensor_of

    def counting(rows, format):
        made.append(rows[0].shape[0])
        return decode(rows, format)

    monkeypatch.setattr(structure, "compute_tensor_of", counting)
    torch._dynamo.reset()
    embedding = torch.compile(F.embedding, backend="aot_eager") if compiled else F.embedding
    found = embedding(indices, p)
    assert torch.equal(found, code_times_scale(p)[indices])
    assert set(made) == ({indices.numel()} if indices.numel() < 50 else set())
    found.backward(torch.ones_like(found))
    expected = torch.zeros(50, 40).index_add_(
        0, indices.flatten(), torch.ones(shape).view(-1, 1).expand(-1, 40)
    )
    assert torch.equal(p.grad.float(), expected)
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([50]), p)


def test_fully_shard_finds_hooks_where_it_gathers_what_is_lent():
    """FSDP asks a shard by `hasattr`; its module then holds the shard, or a plain part instead."""
    module, policy = nn.Linear(4, 8), SimpleNamespace(param_dtype=None)
    mesh = SimpleNamespace(size=lambda: 1)
    shard = mcf.as_expansion(torch.randn(8, 4), mcf.e4m3i8)
    copied = copy.deepcopy(shard)
    assert not hasattr(mcf.as_expansion(torch.randn(8, 4), mcf.bf16x2), "fsdp_pre_all_gather")
    assert len(inspect.signature(shard.fsdp_pre_all_gather).parameters) == 5

    module.weight._local_tensor = shard
    (own,), _ = copied.fsdp_pre_all_gather(mesh, shard.shape, (4, 1), module, policy)  # offloaded
    assert torch.equal(own, shard.compute_tensor)
    assert hasattr(shard, "fsdp_pre_all_gather")
    module.weight._local_tensor = own
    assert not hasattr(shard, "fsdp_pre_all_gather")
    assert hasattr(shard, "fsdp_post_all_gather")
    assert hasattr(copy.deepcopy(shard), "fsdp_pre_all_gather")
    assert "_shard_of" not in pickle.dumps(shard).decode("latin-1")
    module.weight = nn.Parameter(own)  # the whole one, after it was gathered
    assert hasattr(shard, "fsdp_pre_all_gather")
