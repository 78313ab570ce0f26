"""The formats that are chosen where nobody says them."""

import pytest
import torch
from torch import nn

import mcftensor as mcf


def normal(size, *shape):
    torch.manual_seed(0)
    return nn.Parameter(size * torch.randn(shape))


def format_by_default(p, lr=None):
    module = nn.Module()
    module.p = p
    return mcf.as_expansion(module, lr=lr).p.format


class TestByTheSizeOfWeights:
    @pytest.mark.parametrize(
        ("size", "lr", "format"),
        [
            (1.0, None, mcf.bf16x3),
            (0.8, None, mcf.bf16x3),
            (0.7, None, mcf.bf16x2),
            (0.02, None, mcf.bf16x2),
            (0.0, None, mcf.bf16x2),
            (1.0, 1e-4, mcf.bf16x2),
            (0.02, 1e-6, mcf.bf16x3),
            (0.02, 1e-5, mcf.bf16x2),
        ],
    )
    def test_matrices(self, size, lr, format):
        assert format_by_default(normal(size, 64, 64), lr) == format

    def test_vectors_have_three_terms(self):
        assert format_by_default(normal(0.01, 64), 1.0) == mcf.bf16x3

    def test_layers_as_pytorch_makes_them(self):
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(100, 16),
                "linear": nn.Linear(16, 16),
                "convolution": nn.Conv2d(3, 8, 3),
                "attention": nn.MultiheadAttention(16, 2),
            }
        )
        mcf.as_expansion(model)
        assert model["embedding"].weight.format == mcf.bf16x3
        others = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
        assert {p.format for p in others} == {mcf.bf16x2}

    @pytest.mark.parametrize("width", [2, 3, 5])
    def test_no_linear_layer_as_pytorch_makes_it_is_large(self, width):
        """However few weights it has: formats are not to hang on luck."""
        for seed in range(50):
            torch.manual_seed(seed)
            assert mcf.as_expansion(nn.Linear(width, 2)).weight.format == mcf.bf16x2

    def test_what_has_no_numbers_goes_by_shape(self):
        with torch.device("meta"):
            model = mcf.as_expansion(nn.Embedding(10, 4))
        assert model.weight.format == mcf.bf16x2
        assert format_by_default(nn.Parameter(torch.empty(2, 0, 2))) == mcf.bf16x2
        assert format_by_default(nn.Parameter(torch.full((4, 4), torch.nan))) == mcf.bf16x2

    def test_a_format_or_an_override_decides(self):
        assert mcf.as_expansion(nn.Embedding(9, 4), mcf.bf16x2).weight.format == mcf.bf16x2
        model = mcf.as_expansion(nn.Embedding(9, 4), overrides={"weight": mcf.bf16x2})
        assert model.weight.format == mcf.bf16x2

    def test_bad_rates(self):
        for lr in (0.0, -1.0, torch.nan):
            with pytest.raises(ValueError, match="lr is"):
                mcf.as_expansion(nn.Linear(2, 2), lr=lr)
        with pytest.raises(TypeError, match="lr says"):
            mcf.as_expansion(torch.ones(2), lr=1e-3)


def nn_embedding():
    return nn.Embedding(200, 32)


def nn_linear():
    return nn.Linear(128, 128, bias=False)


def lost(layer, format, lr, lr_of_format=None):
    """The share of elements that a step was to move and did not, after some steps."""
    torch.manual_seed(0)
    model = mcf.as_expansion(layer(), format, lr=lr_of_format)
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), lr=lr, fused=True), "plus")
    edq = mcf.EDQ(optimizer, every=20)
    slope = torch.randn(model.weight.shape)
    for _ in range(20):
        model.weight.grad = (slope + torch.randn_like(slope)).bfloat16()
        optimizer.step()
    return edq.last["lost"]


@pytest.mark.parametrize("lr", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("layer", [nn_embedding, nn_linear])
def test_the_default_loses_little(layer, lr):
    assert lost(layer, None, lr) < 0.02


def test_small_rates():
    """At which two terms of an embedding lose most, and at smaller ones those of linear layers."""
    assert lost(nn_embedding, mcf.bf16x2, 1e-6) > 0.5
    assert lost(nn_embedding, None, 1e-6) < 0.01
    assert lost(nn_linear, None, 1e-6) < 0.01
    assert lost(nn_linear, None, 3e-8) > 0.3
    assert lost(nn_linear, None, 3e-8, lr_of_format=3e-8) < 0.01
