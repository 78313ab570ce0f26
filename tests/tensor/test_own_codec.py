"""A format of a user's, of which the package knows nothing, does what others do."""

import copy
import io
import sys

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.halves import halves
from support.helpers import small_model


def bits(n: int, seed: int = 0) -> torch.Tensor:
    """Finite float32 numbers of all exponents."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64)
    x = x.to(torch.int32).view(torch.float32)
    return torch.where(x.isfinite(), x, 1.0)


def stored(*shape: int, seed: int = 0) -> mcf.MCFTensor:
    generator = torch.Generator().manual_seed(seed)
    return mcf.as_expansion(torch.randn(*shape, generator=generator), halves)


def plain(x: torch.Tensor) -> torch.Tensor:
    return mcf.as_plain(x, torch.float32)


def test_every_number_comes_back():
    x = bits(10_000)
    assert torch.equal(plain(mcf.as_expansion(x, halves)), x)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 2.0**-149])
    back = plain(mcf.as_expansion(special, halves))
    assert torch.equal(back.nan_to_num(7.0), special.nan_to_num(7.0))
    assert torch.equal(back.signbit()[:4], special.signbit()[:4])


def test_what_it_is():
    x = stored(3, 4)
    assert (x.format, x.dtype, x.shape) == (halves, torch.bfloat16, (3, 4))
    assert [t.dtype for t in x.components] == [torch.bfloat16, torch.int16]
    assert (halves.bytes, halves.precision, mcf.Format.from_name("halves")) == (4, 24, halves)
    assert "format=halves" in repr(x)
    assert mcf.finfo(halves).eps == torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y,
        lambda x, y: 1 - x,
        lambda x, y: (x * x + y * y).sqrt(),
        lambda x, y: x.addcdiv(y, x, value=0.5),
        lambda x, y: torch._foreach_mul([x, y], 2.0)[1],
        lambda x, y: x.exp(),
        lambda x, y: x.abs() > y,
        lambda x, y: torch.where(x > y, x, y),
        torch.maximum,
        lambda x, y: x.sum(0),
        lambda x, y: x @ y.t(),
        lambda x, y: x.sort(0)[0],
        lambda x, y: -x,
        lambda x, y: torch.linalg.vector_norm(x),
    ],
)
def test_arithmetic_gives_plain_float32(operation):
    x, y = stored(4, 5).abs_(), stored(4, 5, seed=1)
    got = operation(x, y)
    wanted = operation(plain(x), plain(y))
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, wanted, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x.add_(y, alpha=0.5),
        lambda x, y: x.mul_(0.999),
        lambda x, y: x.lerp_(y, 0.1),
        lambda x, y: x.addcmul_(y, y, value=0.3),
        lambda x, y: x.clamp_(min=0.1),
        lambda x, y: x.exp_(),
        lambda x, y: x.zero_(),
        lambda x, y: x.fill_(0.1),
        lambda x, y: x.copy_(y),
        lambda x, y: x.masked_fill_(plain(y) > 0, 0.7),
        lambda x, y: x.__setitem__((slice(1), slice(2)), 0.3) or x,
        lambda x, y: (torch._foreach_add_([x], [y]), x)[1],
        lambda x, y: torch.mul(x, y, out=x),
    ],
)
def test_writing_stores_with_one_rounding(operation):
    x, y = stored(4, 5), stored(4, 5, seed=1)
    a, b = plain(x), plain(y)
    got = operation(x, y)
    assert got is x
    assert got.format is halves
    torch.testing.assert_close(plain(got), operation(a, b), rtol=2e-7, atol=0)


def test_what_moves_elements_keeps_the_format():
    x = stored(4, 6)
    for moved, wanted in (
        (x[1:3, ::2], plain(x)[1:3, ::2]),
        (x.t(), plain(x).t()),
        (x.view(3, 8), plain(x).view(3, 8)),
        (x[x.components[0] > 0], plain(x)[x.components[0] > 0]),
        (torch.cat([x, x]), torch.cat([plain(x), plain(x)])),
        (torch.zeros_like(x), torch.zeros(4, 6)),
        (torch.full_like(x, 0.1), torch.full((4, 6), 0.1)),
        (copy.deepcopy(x), plain(x)),
        (x.clone(), plain(x)),
    ):
        assert moved.format is halves
        assert torch.equal(plain(moved), wanted)


@pytest.mark.parametrize("path", ["for-loop", "foreach", "fused"])
def test_training_is_that_of_float32(path):
    model, reference = small_model(), copy.deepcopy(small_model())
    assert mcf.as_expansion(model, halves) is model
    x = torch.randn(5, 4, dtype=torch.bfloat16)
    assert model(x).dtype == torch.bfloat16
    options = {"foreach": path == "foreach", "fused": path == "fused"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    oracle = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            q.grad = p.grad.float()
        optimizer.step()
        oracle.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        state = optimizer.state[p]
        assert p.format is state["exp_avg"].format is state["exp_avg_sq"].format is halves
        torch.testing.assert_close(plain(p), q.detach(), rtol=1e-6, atol=1e-7)


def test_backward_gives_plain_gradients():
    model = mcf.as_expansion(small_model(), halves)
    model(torch.randn(5, 4, dtype=torch.bfloat16)).sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_saving(tmp_path):
    model = mcf.as_expansion(small_model(), halves)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for state in (
        torch.load(file, weights_only=True),
        mcf.from_terms(mcf.as_terms(model.state_dict())),
        mcf.save_file(model, tmp_path / "x.safetensors")
        or mcf.load_file(tmp_path / "x.safetensors"),
    ):
        other = mcf.as_expansion(small_model(seed=1), halves)
        other.load_state_dict(state)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert q.format is halves
            assert torch.equal(plain(p), plain(q))
    assert "0.weight.halves.lower" in mcf.as_terms(model.state_dict())


def test_conversions_between_formats():
    x = stored(3, 4)
    wide = mcf.as_expansion(x, mcf.bf16x3)
    assert torch.equal(plain(wide), plain(x))
    assert torch.equal(plain(mcf.as_expansion(wide, halves)), plain(x))
    assert torch.equal(plain(torch.zeros_like(x).copy_(wide)), plain(x))
    assert mcf.to_fraction(x)[0][0] == mcf.to_fraction(plain(x))[0][0]
    assert (wide + x).format is mcf.bf16x3


def test_compiled(recwarn):
    torch.compiler.reset()
    step = torch.compile(lambda x, y: x.mul_(0.999).add_(y), backend="aot_eager", fullgraph=True)
    x, y = stored(3, 4), torch.randn(3, 4)
    wanted = plain(x).mul_(0.999).add_(y)
    step(x, y)
    assert torch.equal(plain(x), wanted)
    model = mcf.as_expansion(small_model(), halves)
    inputs = torch.randn(5, 4, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(inputs), model(inputs))
    compiled(inputs).sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def test_meters():
    weight = nn.Parameter(stored(50))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    with mcf.EDQ(optimizer) as edq:
        weight.grad = torch.ones(50, dtype=torch.bfloat16)
        optimizer.step()
    assert not edq.not_metered
    assert edq.last["ratio"] == pytest.approx(1, abs=1e-3)
    assert edq.last["lost_leading"] > 0.5 > edq.last["lost"]


def test_what_a_format_does_not_move_is_plain(monkeypatch):
    known = sys.modules[mcf.Format.__module__]
    monkeypatch.setattr(known, "_REGISTRY", dict(known._REGISTRY))

    class Fixed(type(halves)):
        name = "fixed"

        def moves(self, func):
            return func is not torch.ops.aten.flip.default

    x = mcf.as_expansion(torch.randn(3, 4), Fixed().register())
    assert x[1:].format.name == x.clone().format.name == "fixed"
    flipped = x.flip(0)
    assert type(flipped) is torch.Tensor
    assert torch.equal(flipped, plain(x).flip(0))


def test_names_are_one_of_a_kind():
    class Other(type(halves)):
        pass

    with pytest.raises(ValueError, match="a format called 'halves' already"):
        Other().register()
    with pytest.raises(TypeError, match="Unfinished does not say its components"):
        type("Unfinished", (mcf.Format,), {"name": "unfinished"})().register()
    with pytest.raises(ValueError, match="not the name of a format"):
        mcf.Format.from_name("float32")
    with pytest.raises(AttributeError, match="fixed"):
        halves.name = "other"
    assert copy.deepcopy(halves) is halves


class Codes(mcf.Format):
    name = "codes_alone"
    components = (mcf.Component("codes", torch.int16),)
    numbers = mcf.formats.Machine(torch.float32)

    def decode(self, stored):
        return (stored[0].float() / 256,)

    def encode(self, number, noise):
        return ((number.to(torch.float32) * 256).to(torch.int16),)


class Narrow(type(halves)):
    name = "narrow"

    def encode(self, number, noise):
        upper, lower = super().encode(number, noise)
        return upper, lower.to(torch.int32)


class Lossy(type(halves)):
    name = "lossy"

    def encode(self, number, noise):
        upper, lower = super().encode(number, noise)
        return torch.where(upper == 1, 0.5, upper), lower


class Finite(type(halves)):
    name = "finite"

    def encode(self, number, noise):
        upper, lower = super().encode(number, noise)
        return torch.where(upper.isinf(), torch.nan, upper), lower


class Kept(Finite):
    """Rounded in one way, which takes noise."""

    name, rounding = "kept", "balanced"

    def encode(self, number, noise):
        assert noise is not None
        return super().encode(number, noise)


def test_a_format_may_have_no_infinity_and_no_rounding_to_nearest():
    for format in (Finite(), Kept()):
        format.register()
        assert mcf.Format.from_name(format.name) is format
        del mcf.formats.format._REGISTRY[format.name]


def test_what_does_not_store_is_not_registered():
    with pytest.raises(TypeError, match=r"component of Codes 'codes_alone' is torch\.int16"):
        Codes().register()
    with pytest.raises(TypeError, match="encode of Narrow 'narrow' gives"):
        Narrow().register()
    with pytest.raises(ValueError, match=r"Lossy 'lossy' stores .*reads .0.0, 0.5"):
        Lossy().register()
    for name in ("codes_alone", "narrow", "lossy"):
        with pytest.raises(ValueError, match="not the name of a format"):
            mcf.Format.from_name(name)
