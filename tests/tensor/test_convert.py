"""Into expansions and out of them."""

import copy
import weakref

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_bits, assert_same_terms, exact, sample, small_model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.1]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens):
        return self.head(self.frozen(self.norm(self.embedding(tokens))) * self.scale)


class TestTensors:
    def test_value_and_error(self, format, device):
        x = torch.randn(1000, dtype=torch.float64, device=device)
        y = mcf.as_expansion(x, format)
        assert (y.role, y.shape, y.device, y.requires_grad) == ("value", x.shape, x.device, False)
        error, magnitude = (exact(y) - x.cpu()).abs(), x.cpu().abs()
        smallest = torch.finfo(format.base).smallest_normal * format.u * 2
        assert (error <= (magnitude * format.u**format.terms).clamp(min=smallest) / 2).all()
        ample = magnitude >= format.full_precision_min
        assert (error <= magnitude * format.u**format.terms)[ample].all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_from_every_float(self, dtype, format):
        x = torch.randn(100).to(dtype)
        y = mcf.as_expansion(x, format)
        bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[dtype]
        if format.precision >= bits and format.base != torch.float16:
            assert torch.equal(exact(y), x.double())

    def test_default_format_goes_by_shape(self):
        for shape, format in {
            (): mcf.bf16x3,
            (5,): mcf.bf16x3,
            (1, 5, 1): mcf.bf16x3,
            (5, 2): mcf.bf16x2,
            (2, 3, 4): mcf.bf16x2,
        }.items():
            assert mcf.as_expansion(torch.zeros(shape)).format == format

    def test_an_expansion_stays_in_its_format(self):
        x = sample(mcf.bf16x2, 4)
        y = mcf.as_expansion(x, mcf.bf16x2)
        assert_same_terms(x, y)
        y.add_(1)
        assert not torch.equal(x, y)

    def test_an_expansion_goes_to_another_format(self):
        x = sample(mcf.bf16x2, 4)
        y = mcf.as_expansion(x, mcf.fp32x2)
        assert y.format == mcf.fp32x2
        assert torch.equal(exact(x), exact(y))
        assert_same_terms(mcf.as_expansion(y, mcf.bf16x2), x)

    def test_empty_and_scalar(self, format):
        assert mcf.as_expansion(torch.zeros(0, 3), format).shape == (0, 3)
        assert mcf.as_expansion(torch.tensor(2.0), format).item() == 2.0

    @pytest.mark.parametrize(
        ("bad", "named"),
        [
            (torch.ones(3, dtype=torch.int64), "int64"),
            (torch.ones(3, dtype=torch.bool), "bool"),
            (torch.ones(3, dtype=torch.complex64), r"complex64.*give torch.view_as_real\(x\)"),
            (torch.ones(3, dtype=torch.float8_e4m3fn), "float8"),
            (torch.eye(3).to_sparse(), r"sparse_coo.*give x.to_dense\(\)"),
            ("text", "str"),
            (1.5, "float"),
            ([1.0], "list"),
        ],
        ids=str,
    )
    def test_bad_input(self, bad, named):
        with pytest.raises(TypeError, match=named):
            mcf.as_expansion(bad, mcf.bf16x2)

    @pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:The PyTorch API of nested")
    def test_quantized_and_nested(self):
        with pytest.raises(TypeError, match="qint8"):
            mcf.as_expansion(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
        with pytest.raises(TypeError, match="nested"):
            mcf.as_expansion(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))

    @pytest.mark.parametrize("bad", ["bf16x9", "bfloat16", torch.bfloat16, 2])
    def test_unknown_format(self, bad):
        message = r"is (not a format|a plain dtype).*mcf\.bf16x2.*mcf\.bf16i8"
        with pytest.raises(TypeError, match=message):
            mcf.as_expansion(torch.ones(3), bad)
        with pytest.raises(TypeError, match=message):
            mcf.as_expansion(nn.Linear(2, 2), bad)

    def test_autograd_does_not_end_in_silence(self):
        x = torch.ones(3, requires_grad=True)
        assert not mcf.as_expansion(x).requires_grad
        with pytest.raises(ValueError, match="autograd graph"):
            mcf.as_expansion(x * 2)

    def test_overrides_are_for_modules(self):
        with pytest.raises(TypeError, match="overrides"):
            mcf.as_expansion(torch.ones(3), overrides={"x": None})

    def test_as_plain(self, format):
        x = sample(format, 5)
        assert torch.equal(mcf.as_plain(x), x.components[0])
        assert mcf.as_plain(x).data_ptr() != x.components[0].data_ptr()
        assert mcf.as_plain(torch.ones(2), torch.float64).dtype == torch.float64
        with pytest.raises(TypeError, match="no floating dtype"):
            mcf.as_plain(x, torch.int64)
        with pytest.raises(TypeError, match="list"):
            mcf.as_plain([1.0])


class TestModules:
    def test_parameter_objects_stay_and_an_optimizer_built_before_works(self):
        model = small_model()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert mcf.as_expansion(model) is model
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        before = [exact(p).clone() for p in model.parameters()]
        model(torch.randn(3, 4).bfloat16()).square().sum().backward()
        optimizer.step()
        assert all((exact(p) != q).any() for p, q in zip(model.parameters(), before, strict=True))

    def test_values_survive(self):
        model = small_model()
        before = [p.detach().double() for p in model.parameters()]
        mcf.as_expansion(model)
        for p, q in zip(model.parameters(), before, strict=True):
            assert p.format == (mcf.bf16x3 if p.dim() == 1 else mcf.bf16x2)
            assert p.role == "parameter"
            assert p.requires_grad
            assert ((exact(p) - q).abs() <= q.abs() * p.format.u**2 / 2).all()

    def test_tied_frozen_and_buffers(self):
        model = mcf.as_expansion(Tied())
        assert model.head.weight is model.embedding.weight
        assert type(model.frozen.weight) is nn.Parameter
        assert model.frozen.weight.dtype == torch.bfloat16
        assert not model.frozen.weight.requires_grad
        assert model.norm.running_mean.dtype == model.scale.dtype == torch.bfloat16
        assert model.count.dtype == torch.int64
        model(torch.tensor([1, 2, 3])).sum().backward()
        assert type(model.head.weight.grad) is torch.Tensor

    def test_recurrent_weights_stay_whole(self):
        model = nn.LSTM(3, 4)
        mcf.as_expansion(model)
        out, _ = model(torch.randn(5, 2, 3).bfloat16())
        assert out.dtype == torch.bfloat16
        assert model._flat_weights[0] is model.weight_ih_l0

    def test_one_format_for_all(self, format):
        model = mcf.as_expansion(small_model(), format)
        assert {p.format for p in model.parameters()} == {format}
        assert model(torch.ones(1, 4, dtype=format.base)).dtype == format.base

    def test_the_first_override_that_matches_decides(self):
        for patterns in (["0.*", "*weight"], ["*weight", "0.*"]):
            formats = dict(zip(patterns, (mcf.bf16x2, mcf.bf16x3), strict=True))
            model = mcf.as_expansion(small_model(), overrides=formats)
            assert model[0].weight.format == mcf.bf16x2

    def test_overrides(self):
        model = mcf.as_expansion(
            Tied(),
            overrides={
                "scale": mcf.bf16x3,
                "norm.w*": None,
                "norm.*": mcf.bf16x2,
                "frozen.*": None,
            },
        )
        assert model.scale.format == mcf.bf16x3
        assert model.scale.role == "value"
        assert type(model.norm.weight) is nn.Parameter
        assert model.norm.weight.dtype == torch.float32
        assert model.norm.bias.format == mcf.bf16x2
        assert model.norm.num_batches_tracked.dtype == torch.int64
        assert model.frozen.weight.dtype == torch.float32

    def test_an_override_may_name_any_of_the_names_of_a_tied_weight(self):
        model = mcf.as_expansion(Tied(), overrides={"head.*": mcf.bf16x3})
        assert model.embedding.weight.format == mcf.bf16x3
        model = mcf.as_expansion(Tied(), overrides={"head.weight": None})
        assert model.embedding.weight.dtype == torch.float32

    def test_hooks_stay(self):
        model, seen = nn.Linear(3, 2), []
        handle = model.weight.register_hook(lambda gradient: seen.append("before"))
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p)))
        mcf.as_expansion(model)
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        assert seen == ["before", mcf.MCFTensor]
        handle.remove()
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        assert seen[2:] == [mcf.MCFTensor]

    def test_gradients_follow(self):
        model = nn.Linear(3, 2)
        model(torch.ones(1, 3)).sum().backward()
        mcf.as_expansion(model)
        assert model.weight.grad.dtype == torch.bfloat16
        assert type(model.weight.grad) is torch.Tensor
        mcf.as_plain(model, torch.float32)
        assert model.weight.grad.dtype == torch.float32

    def test_as_plain_undoes_it(self):
        model = Tied()
        reference = copy.deepcopy(model)
        parameters = list(model.parameters())
        mcf.as_plain(mcf.as_expansion(model, mcf.fp32x2), torch.float32)
        for p, q, r in zip(model.parameters(), reference.parameters(), parameters, strict=True):
            assert p is r
            assert type(p) is nn.Parameter
            assert torch.equal(p, q)
        assert model.head.weight is model.embedding.weight

    def test_twice_is_once(self):
        model = mcf.as_expansion(small_model())
        before = copy.deepcopy(model)
        mcf.as_expansion(model)
        for p, q in zip(model.parameters(), before.parameters(), strict=True):
            assert_same_terms(p, q)

    def test_twice_keeps_frozen_expansions_and_leaves_buffers_alone(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mcf.as_expansion(model, mcf.fp32x2)
        model[0].bias.requires_grad_(False)
        mcf.as_expansion(model)
        assert model[0].weight.format == model[0].bias.format == mcf.fp32x2
        assert model[1].running_mean.dtype == torch.float32
        mcf.as_expansion(model, mcf.bf16x2)
        assert model[0].bias.format == mcf.bf16x2
        assert model[0].bias.dtype == model[1].running_mean.dtype == torch.bfloat16

    def test_an_optimizer_with_states_of_another_base_is_refused_before_it_writes(self):
        model = mcf.as_expansion(small_model(), mcf.fp32x2)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for p in model.parameters():
            p.grad = torch.ones_like(p.components[0])
        optimizer.step()
        mcf.as_expansion(model, mcf.bf16x2)
        before = copy.deepcopy(model)
        with pytest.raises(
            ValueError, match=r"fused step: .*bf16x2 and fp32x2.*create the optimizer again"
        ):
            optimizer.step()
        for p, q in zip(model.parameters(), before.parameters(), strict=True):
            assert_same_terms(p, q)

    def test_a_module_goes_to_another_format(self):
        model = mcf.as_expansion(small_model())
        weight = model[0].weight
        weight.grad = torch.ones_like(weight.components[0])
        before = copy.deepcopy(model)
        mcf.as_expansion(model, mcf.fp32x2)
        assert model[0].weight is weight
        assert weight.role == "parameter"
        assert weight.grad.dtype == torch.float32
        for p, q in zip(model.parameters(), before.parameters(), strict=True):
            assert p.format == mcf.fp32x2
            assert torch.equal(mcf.as_plain(p, torch.float64), mcf.as_plain(q, torch.float64))

    def test_checkpoints_of_plain_models_load_and_the_other_way_round(self):
        plain = small_model(seed=1)
        model = mcf.as_expansion(small_model())
        model.load_state_dict(plain.state_dict())
        assert_same_terms(model[0].bias.detach(), mcf.as_expansion(plain[0].bias, mcf.bf16x3))
        other = small_model(seed=2)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other[0].bias, mcf.as_plain(model[0].bias, torch.float32))


class TestFailedCallsChangeNothing:
    def check(self, model, match, error, call):
        before = copy.deepcopy(model)
        kinds = [type(p) for p in model.parameters()]
        with pytest.raises(error, match=match):
            call()
        assert [type(p) for p in model.parameters()] == kinds
        for p, q in zip(model.state_dict().values(), before.state_dict().values(), strict=True):
            assert p.dtype == q.dtype
            assert torch.equal(p, q)

    def test_a_pattern_that_matches_nothing(self):
        model = small_model()
        self.check(
            model,
            r"'9\.weight'.*0\.weight",
            ValueError,
            lambda: mcf.as_expansion(model, overrides={"0.*": None, "9.weight": None}),
        )

    def test_an_override_that_is_no_format(self):
        model = small_model()
        self.check(
            model,
            "overrides.*bf16x9",
            TypeError,
            lambda: mcf.as_expansion(model, overrides={"0.*": "bf16x9"}),
        )

    def test_a_parameter_that_cannot_be_one(self):
        model = small_model()
        model.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.check(model, "parameter wave", TypeError, lambda: mcf.as_expansion(model))
        mcf.as_expansion(model, overrides={"wave": None})

    def test_a_graph_that_holds_a_parameter(self):
        model = small_model()
        output = model(torch.ones(1, 4))
        self.check(model, r"weight.*autograd graph", RuntimeError, lambda: mcf.as_expansion(model))
        output.sum().backward()
        del output
        mcf.as_expansion(model)
        held = model(torch.ones(1, 4, dtype=torch.bfloat16))
        self.check(model, r"weight.*graph", RuntimeError, lambda: mcf.as_plain(model))
        del held

    def test_a_parameter_without_a_shape(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
        with pytest.raises(TypeError, match=r"1\.weight has no shape yet"):
            mcf.as_expansion(model)
        assert model[0].weight.dtype == torch.float32

    def test_weak_references(self):
        model = small_model()
        reference = weakref.ref(model[3].weight)
        self.check(model, r"3\.weight.*weak ref", RuntimeError, lambda: mcf.as_expansion(model))
        del reference
        mcf.as_expansion(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "kind"), [(0.02, mcf.bf16x2), (1.0, mcf.bf16x3)])
def test_matrices_of_any_type_go_by_their_size(dtype, size, kind):
    model = nn.Linear(64, 64).to(dtype)
    nn.init.normal_(model.weight, std=size)
    assert mcf.as_expansion(model).weight.format == kind


@pytest.mark.parametrize("format", ["bf16x2", "bf16x3", "bf16i16", "fp32x2", "fp16x2"])
def test_what_is_an_expansion_stays_one(format):
    """Frozen, or a buffer: nothing becomes plain that no override names."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("constant", torch.rand(3) + 1e-4)
    mcf.as_expansion(model, overrides={"constant": mcf.bf16x3})
    with torch.no_grad():
        model[0].weight.fill_(1).add_(8e-4)
    model[0].weight.requires_grad_(False)
    whole = {name: mcf.as_plain(x, torch.float64) for name, x in model.state_dict().items()}
    mcf.as_expansion(model, format)
    for name, x in model.state_dict().items():
        if name != "1.num_batches_tracked":
            error = (mcf.as_plain(x, torch.float64) - whole[name]).abs().max()
            assert error <= 2**-15 * whole[name].abs().max(), name
    assert model[0].weight.format.name == format
    assert not model[0].weight.requires_grad
    mcf.as_expansion(model, overrides={"0.bias": None})
    assert model[0].bias.format.name == format


def shared(kind):
    """Two layers and a buffer, of which some share a part of their memory."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    whole = torch.rand(8, 4)
    if kind == "transposed":
        model["b"].weight = nn.Parameter(model["a"].weight.t())
    elif kind == "slices":
        model["a"].weight, model["b"].weight = nn.Parameter(whole), nn.Parameter(whole[2:6])
    elif kind == "buffer":
        model["a"].register_buffer("first", model["a"].weight.data[:1])
    elif kind == "frozen":
        model["b"].weight = nn.Parameter(model["a"].weight.t(), requires_grad=False)
    elif kind == "halves":
        model["a"].weight, model["b"].weight = map(nn.Parameter, whole.split(4))
    elif kind == "columns":
        model["a"].weight, model["b"].weight = map(nn.Parameter, whole.split(2, 1))
    elif kind == "whole":
        model["b"].weight = nn.Parameter(model["a"].weight.data)
    return model


@pytest.mark.parametrize("kind", ["transposed", "slices", "buffer", "frozen"])
def test_memory_shared_in_part_is_refused_by_name(kind):
    model = shared(kind)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"a\.\w+ of shape .*share a part of their memory.*overrides"
    ):
        mcf.as_expansion(model)
    assert_same_bits(model.state_dict(), before)
    assert not any(isinstance(x, mcf.MCFTensor) for x in model.parameters())
    mcf.as_expansion(model, overrides={"*": None})


@pytest.mark.parametrize("kind", ["halves", "columns", "whole"])
def test_parts_beside_each_other_and_whole_ties_are_none(kind):
    model = mcf.as_expansion(shared(kind))
    assert all(isinstance(x, mcf.MCFTensor) for x in model.parameters())
    if kind == "whole":
        with torch.no_grad():
            model["a"].weight.fill_(2.0)
        assert (mcf.as_plain(model["b"].weight.detach()) == 2).all()


@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16i16], ids=str)
def test_ties_by_memory_of_expansions(format):
    model = mcf.as_expansion(shared("none"), format)
    model["b"].weight = nn.Parameter(model["a"].weight.detach().t())
    for convert in (lambda: mcf.as_expansion(model, mcf.fp32x2), lambda: mcf.as_plain(model)):
        with pytest.raises(ValueError, match=r"a\.weight of shape .*share a part"):
            convert()
