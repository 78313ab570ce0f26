"""What others take for the identity of memory: it is that of the leading component, or raises."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, parameter, sample

FORMATS = [*mcf.formats.FORMATS, mcf.bf16i8, mcf.bf16i16, mcf.e4m3i8, mcf.mxfp8, mcf.ue5m3]
VIEWS = [lambda x: x, lambda x: x[1:], lambda x: x.view(4, 8, 8), lambda x: x.detach()]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=["whole", "rows", "shape", "detach"])
def test_an_address_is_that_of_the_leading_component(format, view):
    x = mcf.as_expansion(torch.rand(4, 64, dtype=torch.float64), format)
    leading = view(x).components[0]
    for y in (view(x), view(x.data), view(x).data):
        assert y.data_ptr() == y.const_data_ptr() == leading.data_ptr()
        assert y.storage_offset() == leading.storage_offset()


def test_parts_of_what_a_parameter_lends_lie_where_its_codes_do():
    p = nn.Parameter(mcf.as_expansion(torch.rand(4, 64), mcf.e4m3i8))
    codes = p.components[0]
    assert p.data_ptr() == p.t().data_ptr() == codes.data_ptr()
    assert p[:, 32:].data_ptr() == codes[:, 32:].data_ptr() != 0


@pytest.mark.with_float64("scaled formats compute in float64")
def test_scaled_tensors():
    x = mcf.as_expansion(torch.rand(4, 8), mcf.scaling.scaled(torch.float16))
    assert x.data_ptr() == x.components[0].data_ptr() != 0
    assert x[1:].data_ptr() == x.components[0][1:].data_ptr()
    assert copy.deepcopy(x).data_ptr() not in (0, x.data_ptr())


class Keyed(torch.optim.Optimizer):
    """Momentum in a table of the optimizer's own, by the memory of each parameter."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})
        self.table = {}

    def step(self):
        for p in self.param_groups[0]["params"]:
            key = (p.data_ptr(), p.numel(), p.dtype, p.device)
            with torch.no_grad():
                buffer = self.table.setdefault(key, torch.zeros_like(p))
                buffer.mul_(0.5).add_(p.grad)
                p.sub_(buffer, alpha=self.param_groups[0]["lr"])
                assert p.data_ptr() == key[0]
                assert buffer.data_ptr() not in (0, p.data_ptr(), p.grad.data_ptr())


@pytest.mark.thinned(of=2)
def test_states_that_are_kept_by_address_are_one_for_each_parameter(format):
    ours = [parameter(format, 3, seed=i) for i in range(4)]
    plain = [nn.Parameter(exact(p.detach())) for p in ours]
    optimizers = [Keyed(ours), Keyed(plain)]
    addresses = [p.data_ptr() for p in ours]
    for t in range(3):
        for i in range(4):
            plain[i].grad = torch.full((3,), 2.0 ** (i - t - 4), dtype=torch.float64)
            ours[i].grad = plain[i].grad.to(format.dtype)
        for optimizer in optimizers:
            optimizer.step()
    assert len(optimizers[0].table) == 4
    assert addresses == [p.data_ptr() for p in ours] == [p.components[0].data_ptr() for p in ours]
    for p, q in zip(ours, plain, strict=True):
        rtol = max(mcf.finfo(format).eps, 2.0**-50)  # of the float64 beside it
        torch.testing.assert_close(exact(p.detach()), q.detach(), rtol=rtol, atol=0)


def test_a_gradient_has_one_address_within_a_step_and_outside():
    p = parameter(mcf.bf16x2, 3)
    p.grad = torch.ones(3, dtype=torch.bfloat16)
    before, seen = p.grad.data_ptr(), []

    class Reads(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            seen.append(p.grad.data_ptr())
            p.grad.mul_(0.999)
            seen.append(p.grad.data_ptr())

    Reads([p], {}).step()
    assert seen == [before, before] == [p.grad.data_ptr()] * 2


def test_whether_memory_is_the_same():
    x = sample(mcf.bf16x2, 3, 4)
    assert x.is_set_to(x.detach())
    assert x.is_set_to(x.data)
    for other in (x.clone(), x[1:], x.T, x.components[0]):
        assert not x.is_set_to(other)
        assert not other.is_set_to(x)


def shared():
    state = {name: sample(mcf.bf16x2, 4) for name in "abc"}
    return state | {"d": state["a"].detach()}


@pytest.mark.parametrize(
    ("module", "find"),
    [
        ("safetensors.torch", lambda module, state: module._find_shared_tensors(state)),
        ("transformers.pytorch_utils", lambda module, state: module.id_tensor_storage(state["a"])),
        ("accelerate.utils.modeling", lambda module, state: module.id_tensor_storage(state["a"])),
    ],
    ids=["safetensors", "transformers", "accelerate"],
)
def test_finders_of_shared_storages_raise(module, find):
    module = pytest.importorskip(module)
    with pytest.raises(TypeError, match="has none, but one for each of its terms"):
        find(module, shared())


def test_a_finder_of_shared_components_finds_them():
    module = pytest.importorskip("huggingface_hub.serialization._torch")
    found = module._find_shared_tensors(shared())
    assert sorted(map(sorted, found)) == [["a", "d"], ["b"], ["c"]]


def test_the_address_of_a_storage_raises():
    x = sample(mcf.bf16x2, 4)
    with pytest.raises(RuntimeError, match="data pointer"):
        x.untyped_storage().data_ptr()


def test_recurrent_layers_keep_the_memory_of_their_weights():
    layer = mcf.as_expansion(nn.LSTM(3, 4))
    before = [p.data_ptr() for p in layer.parameters()]
    assert len(set(before)) == len(before)
    torch._cudnn_rnn_flatten_weight(layer._flat_weights, 4, 3, 2, 4, 0, 1, False, False)
    assert [p.data_ptr() for p in layer.parameters()] == before


class TestCopies:
    def states(self, format):
        return {"x": sample(format, 3, 4), "p": parameter(format, 3), "view": sample(format, 4)[1:]}

    def test_by_the_cache_of_stagers(self, format):
        state = self.states(format)
        cache = _create_cpu_state_dict(state)
        copied = _copy_state_dict(state, cache)
        for name, x in state.items():
            assert_same_terms(copied[name].detach(), x.detach())
            assert copied[name].data_ptr() != x.data_ptr()

    def test_by_the_stager_of_whole_state_dicts(self, format):
        state = self.states(format)
        for name, x in StateDictStager().stage(state).items():
            assert_same_terms(x.detach(), state[name].detach())
            assert x.data_ptr() not in (0, state[name].data_ptr())

    def test_of_what_is_on_a_tape(self):
        p = parameter(mcf.bf16x2, 3)
        p.grad = torch.ones(3, dtype=torch.bfloat16)
        copies = []

        class Copies(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                p.sub_(p.grad, alpha=0.25)
                new = p * 2
                copies.extend([copy.deepcopy(new), StateDictStager().stage({"x": new * 1})["x"]])
                assert type(copy.deepcopy(p.grad)) is mcf.MCFTensor

        Copies([p], {}).step()
        for x in copies:
            assert torch.equal(exact(x), 2 * exact(p.detach()))
