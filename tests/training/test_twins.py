"""Small models of the usual kinds train as their float32 twins do."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from support.helpers import exact

MOMENTUM = 0.01  # of the running statistics


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width, momentum=MOMENTUM)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(width, momentum=MOMENTUM)

    def forward(self, x):
        y = F.relu(self.norm(self.first(x)))
        return F.relu(x + self.last_norm(self.second(y)))


def resnet():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=MOMENTUM)),
        *(nn.ReLU(), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def images(steps):
    """Four patterns in noise."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(4, 1, 8, 8, generator=generator)
    for _ in range(steps):
        kinds = torch.randint(4, (32,), generator=generator)
        yield patterns[kinds] + torch.randn(32, 1, 8, 8, generator=generator), kinds


def train(model, optimizer, batches):
    """The losses of a training, in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    losses = []
    for x, kinds in batches:
        x = x.to(dtype) if x.is_floating_point() else x
        loss = F.cross_entropy(model(x).float(), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def together(tensors):
    return torch.cat([exact(x.detach()).flatten() for x in tensors])


def distance(x, y):
    return ((x - y).norm() / y.norm()).item()


def trained_resnet(convert, steps=150, lr=1e-3):
    model = resnet()
    start = together(model.parameters())
    convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    if any(isinstance(p, mcf.MCFTensor) for p in model.parameters()):
        mcf.collage(optimizer, "plus")
    losses = train(model, optimizer, images(steps))
    averages = [x for x in model.buffers() if x.is_floating_point()]
    model.eval()
    with torch.no_grad():
        x, kinds = next(images(1))
        after = F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), kinds).item()
    return losses, together(model.parameters()) - start, together(averages), after


class TestConvolutionsWithBatchNorms:
    @staticmethod
    @functools.cache
    def expected():
        return trained_resnet(lambda model: model)

    @pytest.mark.thinned(of=3)
    @pytest.mark.parametrize("overrides", [{}, {"*running_*": None}, {"*running_*": mcf.bf16x3}])
    def test_expansions(self, overrides):
        """Losses to 0.01, displacements of weights to 2 %, running statistics to 0.3 %."""
        expected = self.expected()
        found = trained_resnet(lambda model: mcf.as_expansion(model, overrides=overrides))
        assert (found[0] - expected[0]).abs().max() < 0.03
        assert (found[0][-50:].mean() - expected[0][-50:].mean()).abs() < 0.01
        assert distance(found[1], expected[1]) < 0.02
        assert distance(found[2], expected[2]) < 0.003
        assert found[3] == pytest.approx(expected[3], abs=0.01)

    def test_the_bounds_are_beyond_plain_bf16(self):
        expected = self.expected()
        found = trained_resnet(nn.Module.bfloat16)
        assert distance(found[1], expected[1]) > 0.3
        assert distance(found[2], expected[2]) > 0.05


class LowRank(nn.Module):
    """A frozen layer and an update of low rank."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.first = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        return self.head(self.first(self.embedding(x)).mean(1))


def transformer():
    torch.manual_seed(0)
    model = Transformer().requires_grad_(False)
    for p in model.parameters():  # of both twins
        p.copy_(p.bfloat16())
    return model


def adapted(model, seed=2):
    torch.manual_seed(seed)
    for name in ("linear1", "linear2"):
        setattr(model.first, name, LowRank(getattr(model.first, name)))
    model.head = nn.Linear(32, 16)
    return model


def sequences(steps):
    """Of which the commonest token is to be found."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        kinds = torch.randint(16, (32,), generator=generator)
        x = torch.randint(16, (32, 8), generator=generator)
        yield torch.where(torch.rand(x.shape, generator=generator) < 0.5, kinds[:, None], x), kinds


def trained_adapters(model, steps=200, lr=2e-4):
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = together(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    losses = train(model, optimizer, sequences(steps))
    return losses, together(parameters) - start


class TestAdaptersAddedAfterConversion:
    @staticmethod
    @functools.cache
    def expected():
        return trained_adapters(adapted(transformer()))

    def test_another_call_converts_what_is_new(self):
        """Losses to 0.01, displacements of weights to 1 %."""
        model = adapted(mcf.as_expansion(transformer()))
        mcf.as_expansion(model)
        formats = {name: getattr(p, "format", None) for name, p in model.named_parameters()}
        assert formats["first.linear1.down"] == formats["head.weight"] == mcf.bf16x2
        assert formats["head.bias"] == mcf.bf16x3
        assert formats["first.linear1.layer.weight"] is None
        expected, found = self.expected(), trained_adapters(model)
        assert (found[0][-50:].mean() - expected[0][-50:].mean()).abs() < 0.01
        assert distance(found[1], expected[1]) < 0.01

    def test_the_bounds_are_beyond_plain_bf16(self):
        model = adapted(transformer()).bfloat16()
        expected, found = self.expected(), trained_adapters(model)
        assert distance(found[1], expected[1]) > 0.1

    def test_unfrozen_weights_train_once_converted(self):
        def run(model, again):
            model.requires_grad_(True)
            again(model)
            return trained_adapters(model, steps=50, lr=1e-5)

        expected = run(transformer(), lambda model: model)
        found = run(mcf.as_expansion(transformer()), mcf.as_expansion)
        assert distance(found[1], expected[1]) < 0.1
        with pytest.warns(mcf.errors.PlainParameterWarning, match=r"embedding\.weight"):
            lost = run(mcf.as_expansion(transformer()), lambda model: model)
        assert distance(lost[1], expected[1]) > 0.5
