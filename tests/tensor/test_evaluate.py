"""Operations on tensors that lie alike go by addresses, others by shapes, with the same bits."""

import pytest
import torch

import mcftensor as mcf
from mcftensor.dispatch import evaluate
from mcftensor.dispatch.registry import SHORTCUTS
from support.helpers import assert_same_terms, sample

pytestmark = pytest.mark.usefixtures("no_grad")

NEW = {
    "add": lambda x, y, g: x + y,
    "add alpha": lambda x, y, g: x.add(g, alpha=0.1),
    "sub": lambda x, y, g: x - g,
    "rsub": lambda x, y, g: 1 - x,
    "mul": lambda x, y, g: x * 0.999,
    "div": lambda x, y, g: g / x,
    "sqrt": lambda x, y, g: x.square().sqrt(),
    "addcmul": lambda x, y, g: x.addcmul(g, g, value=0.001),
    "addcdiv": lambda x, y, g: x.addcdiv(y, g, value=-0.1),
    "lerp": lambda x, y, g: x.lerp(g, 0.1),
    "itself": lambda x, y, g: x * x,
}
IN_PLACE = {
    "add_": lambda x, y, g: x.add_(g, alpha=-0.1),
    "mul_": lambda x, y, g: x.mul_(0.999),
    "lerp_": lambda x, y, g: x.lerp_(g, 0.1),
    "addcmul_": lambda x, y, g: x.addcmul_(g, y, value=0.1),
    "addcdiv_": lambda x, y, g: x.addcdiv_(x, y),
    "itself": lambda x, y, g: x.mul_(x),
}


@pytest.fixture
def one_by_one(monkeypatch):
    """A function that computes a function's results as where tensors do not lie alike."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "lying_alike", lambda *args, **kwargs: None)
            return function(*args)

    return call


@pytest.fixture
def lying(monkeypatch):
    """Whether tensors were found to lie alike, by call."""
    found = []
    original = evaluate.lying_alike

    def spy(*args, **kwargs):
        result = original(*args, **kwargs)
        found.append(result is not None)
        return result

    monkeypatch.setattr(evaluate, "lying_alike", spy)
    return found


def operands(format):
    torch.manual_seed(2)
    return sample(format, 3, 5), sample(format, 3, 5), torch.randn(3, 5).to(format.dtype)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("operation", [*NEW, *IN_PLACE])
@pytest.mark.parametrize("role", ["value", "parameter"])
def test_the_same_bits(operation, format, role, one_by_one, lying):
    function = {**NEW, **IN_PLACE}[operation]
    results = []
    for call in (one_by_one, lambda function, *args: function(*args)):
        lying.clear()
        x, y, g = operands(format)
        if role == "parameter":
            x, y = (mcf.MCFTensor(t.components, format, "parameter") for t in (x, y))
        torch.manual_seed(5)
        results.append(call(function, x, y, g))
    assert all(lying)
    assert lying or role == "parameter"  # which may compute as its leading term
    by_column, got = results
    assert (type(got), got.shape) == (type(by_column), by_column.shape)
    if isinstance(got, mcf.MCFTensor):
        assert got.role == by_column.role
        assert_same_terms(got, by_column)
    else:
        assert torch.equal(got, by_column)


def overlapping():
    memory = [torch.randn(20).bfloat16() * scale for scale in (1, 0.001)]
    return [mcf.MCFTensor([x[i : i + 15].view(3, 5) for x in memory]) for i in (0, 5)]


NOT_ALIKE = {
    "a shape that broadcasts": lambda x, y, g: x.mul_(y[0]),
    "without dimensions": lambda x, y, g: x[0, 0].mul_(y[0, 0]),
    "turned": lambda x, y, g: x.mul_(y.t().contiguous().t()),
    "every other": lambda x, y, g: x[:, ::2].mul_(y[:, ::2]),
    "whole numbers": lambda x, y, g: x.mul_(torch.full((3, 5), 3)),
}
ALIKE = {
    "a scalar": lambda x, y, g: x.mul_(torch.tensor(0.3)),
    "an element": lambda x, y, g: x.mul_(y[0, 0]),
    "turned targets": lambda x, y, g: x.t().mul_(0.3),
    "all turned": lambda x, y, g: x.t().mul_(y.t()),
    "a boolean": lambda x, y, g: x.mul_(True),
}
OVERLAPPING = {
    "one term beside another": lambda x, y, g: x.mul_(x.components[1]),
    "a part of itself": lambda x, y, g: x[1:].mul_(x[:2]),
    "what lies before it": lambda x, y, g: (z := overlapping())[0].mul_(z[1]),
    "what lies behind it": lambda x, y, g: (z := overlapping())[1].mul_(z[0]),
    "wider numbers in its memory": lambda x, y, g: x.mul_(
        x.components[0].untyped_storage().resize_(60) and wider(x)
    ),
}


def wider(x):
    return torch.empty(0).set_(x.components[0].untyped_storage(), 0, (3, 5)).fill_(0.3)


@pytest.mark.parametrize("case", [*NOT_ALIKE, *ALIKE, *OVERLAPPING])
def test_in_place_as_out_of_place(case, one_by_one, lying):
    function = {**NOT_ALIKE, **ALIKE, **OVERLAPPING}[case]
    results = []
    for call in (one_by_one, lambda function, *args: function(*args)):
        lying.clear()
        results.append(call(function, *operands(mcf.bf16x2)))
    # Where targets overlap what is read, the result is computed apart, by another call.
    assert lying == {case in NOT_ALIKE: [False, False], case in ALIKE: [True]}.get(True, [True] * 2)
    assert_same_terms(*results)


class TestWithoutDispatcher:
    """Small operations outside of a step do not go by PyTorch's dispatcher; nothing tells."""

    def test_bits(self):
        x, y = sample(mcf.bf16x2, 4, 3), sample(mcf.bf16x3, 4, 3)
        g = torch.randn(4, 3)
        for function in (*NEW.values(), *IN_PLACE.values()):
            x_, there = x.clone(), x.clone()
            found = function(x_, y, g)
            with torch.enable_grad():
                expected = function(there, y, g)
            assert_same_terms(found, expected)
            assert_same_terms(x_, there)

    def test_writes_are_counted(self):
        x, w = sample(mcf.bf16x2, 4), torch.randn(4, requires_grad=True)
        with torch.enable_grad():
            loss = (mcf.as_plain(x.mul_(1), torch.float32) * w).sum() + (x * w).sum()
        before = x._version
        x.mul_(0.5)
        assert x._version == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_what_the_dispatcher_has_to_see(self):
        x, g = sample(mcf.bf16x2, 4), torch.randn(4)
        add = SHORTCUTS[torch.Tensor.add]
        assert add(torch.Tensor.add, (x, torch._neg_view(g)), {}) is NotImplemented
        assert_same_terms(x + torch._neg_view(g), x - g)
        with torch.inference_mode():
            frozen = sample(mcf.bf16x2, 4)
        for write in (lambda: frozen.mul_(2), lambda: torch._foreach_mul_([frozen], 2.0)):
            with pytest.raises(RuntimeError, match="inference tensor"):
                write()
        with torch.profiler.profile() as profile:
            x * x
        assert "aten::mul" in {event.key for event in profile.key_averages()}

    @pytest.mark.parametrize(
        "write",
        [
            pytest.param(lambda x: x.__setitem__(1, 2.0), id="element"),
            pytest.param(lambda x: x[1:].copy_(x[1:].clone()), id="view"),
            pytest.param(lambda x: torch._foreach_zero_([x]), id="foreach zero"),
            pytest.param(lambda x: torch._foreach_add_([x], 1.0), id="foreach add"),
            pytest.param(lambda x: torch._foreach_copy_([x], [x.clone()]), id="foreach copy"),
        ],
    )
    @pytest.mark.parametrize("format", [None, mcf.bf16x2, mcf.formats.named("bf16i16")], ids=str)
    @pytest.mark.unwatched("the mode that watches lets plain tensors be written to")
    def test_inference_tensors_are_read_only_elsewhere(self, write, format):
        with torch.inference_mode():
            frozen = torch.ones(4) if format is None else mcf.as_expansion(torch.ones(4), format)
        with pytest.raises(RuntimeError, match=r"(?i)inference tensor"):
            write(frozen)
        with torch.inference_mode():
            write(frozen)
