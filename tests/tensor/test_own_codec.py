"""A format of a user's, of which the package knows nothing, does what others do."""

import copy
import sys

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.toys import halves


def stored(*shape: int, seed: int = 0) -> mcf.MCFTensor:
    generator = torch.Generator().manual_seed(seed)
    return mcf.as_expansion(torch.randn(*shape, generator=generator), halves)


def plain(x: torch.Tensor) -> torch.Tensor:
    return mcf.as_plain(x, torch.float32)


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

        def move(self, func, *args, **kwargs):
            if func is torch.ops.aten.flip.default:
                return None
            return super().move(func, *args, **kwargs)

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
    with pytest.raises(TypeError, match="Unfinished does not define components"):
        type("Unfinished", (mcf.Format,), {"name": "unfinished"})().register()
    with pytest.raises(ValueError, match="not the name of a format"):
        mcf.Format.from_name("float32")
    with pytest.raises(AttributeError, match="fixed"):
        halves.name = "other"
    assert copy.deepcopy(halves) is halves


class Codes(mcf.Format):
    name = "codes_alone"
    components = (mcf.formats.Component("codes", torch.int16),)
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


class Bounded(type(halves)):
    name = "bounded"

    def encode(self, number, noise):
        upper, lower = super().encode(number, noise)
        return torch.where(upper.isinf(), 1.0, upper), lower


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
    with pytest.raises(ValueError, match=r"Bounded 'bounded' stores .* reads .*1\.0, nan"):
        Bounded().register()
    for name in ("codes_alone", "narrow", "lossy", "bounded"):
        with pytest.raises(ValueError, match="not the name of a format"):
            mcf.Format.from_name(name)
