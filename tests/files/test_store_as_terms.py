"""Modules whose state dict consists of terms."""

import copy

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import all_terms, assert_same_terms, small_model


@pytest.fixture
def model() -> nn.Module:
    model = mcf.checkpoint.store_as_terms(mcf.as_expansion(small_model()))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.001)
    return model


def other() -> nn.Module:
    return mcf.checkpoint.store_as_terms(mcf.as_expansion(small_model(1)))


def test_a_state_dict_of_plain_tensors(model):
    state_dict = model.state_dict()
    assert all(type(x) is torch.Tensor for x in state_dict.values())
    plain = small_model(1).bfloat16()
    plain.load_state_dict(state_dict, strict=False)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q.components[0])


@pytest.mark.parametrize("assign", [False, True])
def test_loading_gives_all_terms(model, assign):
    second = other()
    second.load_state_dict(model.state_dict(), assign=assign)
    assert all(map(torch.equal, all_terms(second), all_terms(model)))
    assert type(second[0].weight) is mcf.MCFTensor


def test_other_state_dicts_load_as_before(model):
    second = other()
    second.load_state_dict({name: p.detach() for name, p in model.named_parameters()})
    assert all(map(torch.equal, all_terms(second), all_terms(model)))
    plain = small_model(2)
    second.load_state_dict(plain.state_dict())
    assert_same_terms(second[0].weight.detach(), mcf.as_expansion(plain[0].weight, mcf.bf16x2))


def test_wrapped_copied_and_called_twice(model):
    wrapped = nn.ModuleDict(
        {"inner": mcf.checkpoint.store_as_terms(copy.deepcopy(model)), "rest": nn.ReLU()}
    )
    state_dict = wrapped.state_dict()
    assert list(state_dict)[:2] == ["inner.0.weight", "inner.0.weight.bf16x2.term1"]
    second = nn.ModuleDict({"inner": other(), "rest": nn.ReLU()})
    assert str(second.load_state_dict(state_dict)) == "<All keys matched successfully>"
    assert all(map(torch.equal, all_terms(second), all_terms(model)))


def test_terms_of_tied_weights_that_were_not_stored_are_missing_like_the_weight():
    def make():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return mcf.checkpoint.store_as_terms(mcf.as_expansion(model))

    model, second = make(), make()
    stored = {name: x for name, x in model.state_dict().items() if name.startswith("0.")}
    missing, unexpected = second.load_state_dict(stored, strict=False)
    assert sorted(missing) == ["1.weight", "1.weight.bf16x2.sum", "1.weight.bf16x2.term1"]
    assert not unexpected
    assert_same_terms(second[1].weight.detach(), model[0].weight.detach())


def test_terms_that_are_missing_are_an_error(model):
    state_dict = model.state_dict()
    del state_dict["0.bias.bf16x3.term1"]
    with pytest.raises(mcf.errors.CheckpointError, match=r"0\.bias"):
        other().load_state_dict(state_dict)


def test_as_plain_ends_it(model):
    mcf.as_plain(model)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_a_tail_that_is_missing_beside_others_is_named(model):
    state_dict = model.state_dict()
    del state_dict["0.weight.bf16x2.term1"]
    with pytest.raises(RuntimeError, match=r"Missing.*0\.weight\.bf16x2\.term1"):
        other().load_state_dict(state_dict)
    missing, _ = other().load_state_dict(state_dict, strict=False)
    assert missing == ["0.weight.bf16x2.term1"]
    leading = {name: x for name, x in state_dict.items() if "term" not in name}
    other().load_state_dict(leading)  # as of a plain model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_save_file_and_load_file(tied, strict, tmp_path):
    def make(seed, store=mcf.checkpoint.store_as_terms):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if tied:
            model[1].weight = model[0].weight
        return store(mcf.as_expansion(model))

    def as_it_is(model):
        return model

    model = make(0)
    mcf.save_file(model, tmp_path / "model.safetensors")
    for second in (make(1), make(1, store=as_it_is)):
        found = mcf.load_file(tmp_path / "model.safetensors", second, strict=strict)
        assert found == ([], [])
        assert all(map(torch.equal, all_terms(second), all_terms(model)))


def test_one_within_another():
    """As where adapters are put around a model that has been converted."""

    def make(seed):
        inner = mcf.checkpoint.store_as_terms(mcf.as_expansion(small_model(seed)))
        return mcf.checkpoint.store_as_terms(
            mcf.as_expansion(nn.ModuleDict({"a": inner, "b": nn.Linear(2, 2)}))
        )

    model, second = make(0), make(1)
    assert str(second.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert all(map(torch.equal, all_terms(second), all_terms(model)))
    assert len(model.state_dict()) == len(set(model.state_dict())) > len(list(model.parameters()))
