"""Formats that only store numbers, in what programs do with tensors and models of them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.passes import decoded_traces
from support.helpers import (
    IN_MODULES,
    SCALED,
    STORED,
    assert_same_bits,
    assert_same_terms,
    exact,
    sample,
    small_model,
)

in_all = pytest.mark.parametrize("format", [*STORED, *SCALED], ids=lambda f: f.name)
in_kept = pytest.mark.parametrize("format", IN_MODULES, ids=lambda f: f.name)


def parameter(format, *shape, seed=0):
    return nn.Parameter(sample(format, *shape, seed=seed))


@in_all
class TestParametersAlone:
    """What operations make of parameters and numbers acts as a parameter, and holds the numbers."""

    @pytest.mark.thinned(of=6)
    @pytest.mark.parametrize(
        "compute",
        [
            lambda p, q: p * 3,
            lambda p, q: 1 - p / 3,
            lambda p, q: p + q * 0.1,
            torch.maximum,
            lambda p, q: torch.where(p > 0.1, p, 0.0),
            lambda p, q: torch.where(p > q, p, q),
            lambda p, q: torch.lerp(p, q, 0.3),
            lambda p, q: p.clamp(-0.3, 0.3),
            lambda p, q: torch.addcmul(p, p, q, value=0.1),
            lambda p, q: torch._foreach_add([p], [q], alpha=0.1)[0],
        ],
    )
    @pytest.mark.parametrize("recorded", [False, True])
    def test_hold_the_numbers(self, format, compute, recorded):
        p, q = parameter(format, 4, 3), parameter(format, 4, 3, seed=1)
        with torch.set_grad_enabled(recorded):
            found = compute(p, q)
        expected = compute(*(mcf.as_plain(x.detach(), torch.float32) for x in (p, q)))
        assert found.format is mcf.bf16i16
        assert found.role == "parameter"
        assert torch.equal(mcf.as_plain(found.detach(), torch.float32), expected)

    def test_compute_as_parameters(self, format):
        """As in layers that scale or average their weights."""
        p, x = parameter(format, 4, 3), torch.randn(2, 3).bfloat16()
        y = F.linear(x, p * 0.5) + F.linear(x, p / 2)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert type(p.grad) is torch.Tensor
        assert p.grad.dtype == torch.bfloat16
        torch.testing.assert_close(p.grad, x.sum(0).expand(4, 3), rtol=2**-6, atol=2**-6)

    def test_means_lose_nothing(self, format):
        p, q = parameter(format, 2, 64), parameter(format, 2, 64, seed=1)
        with torch.no_grad():
            mean = 0.999 * p + 0.001 * q
            expected = 0.999 * exact(p) + 0.001 * exact(q)
        torch.testing.assert_close(exact(mean), expected, rtol=2**-22, atol=2**-22)


@pytest.mark.thinned(of=2)
@in_kept
@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.mul_(0.3),
        lambda x, y: x.add_(y, alpha=0.1),
        lambda x, y: x.addcdiv_(y, y.abs() + 1, value=0.1),
        lambda x, y: x.copy_(x * 0.3 + y),
    ],
)
def test_blocks_of_large_tensors(format, write):
    """Each is rounded as it would be by itself, and all of them are one write."""
    rows, width = decoded_traces.TOGETHER // 32 + 15, 64
    x, y = sample(format, rows, width), torch.randn(rows, width)
    small = x.clone()
    assert write(x, y) is x
    for i, (part, other) in enumerate(zip(small.split(1 << 12), y.split(1 << 12), strict=True)):
        if i and format.rounding == "balanced":  # which have counted the write of another one
            small._writes.sub_(1)
        write(part, other)
    assert_same_terms(x, small)
    assert x.writes == small.writes


def test_what_gives_no_tensor_is_not_taken_in_blocks():
    x = sample(mcf.bf16i16, decoded_traces.TOGETHER // 32 + 15, 64)
    y = x.clone()
    assert torch.equal(x, y)
    y[-1, -1] = 7
    assert not torch.equal(x, y)
    for found, expected in zip(torch.frexp(x), torch.frexp(exact(x).float()), strict=True):
        assert torch.equal(found, expected)


@in_all
class TestModels:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, format, dtype):
        norm = [nn.LayerNorm(4)] if dtype == torch.bfloat16 else []  # torch has no other
        model = nn.Sequential(nn.Linear(4, 4), *norm, nn.Linear(4, 2))
        mcf.as_expansion(model, format)
        plain = mcf.as_plain(copy.deepcopy(model), torch.float32)
        x, found = torch.randn(2, 4), []
        for m in (model, plain):
            with torch.autocast("cpu", dtype=dtype):
                y = m(x)
            assert y.dtype == dtype
            y.float().sum().backward()
            found.append([y.float(), *(p.grad.float() for p in m.parameters())])
        assert all(type(p.grad) is torch.Tensor for p in model.parameters())
        for a, b in zip(*found, strict=True):
            error = 0.2 if format.shared else 0.05  # of codes, in which these compute
            torch.testing.assert_close(a, b, rtol=error, atol=error)

    def test_another_dtype_is_refused(self, format):
        model = mcf.as_expansion(small_model(), format)
        for convert in (model.float, model.half, model.double):
            with pytest.raises(TypeError, match=r"mcf\.as_plain\(module\)"):
                convert()

    @pytest.mark.parametrize("name", ["normal_", "xavier_uniform_", "kaiming_normal_"])
    def test_initial_values(self, format, name):
        p = nn.Parameter(mcf.as_expansion(torch.zeros(16, 16), format))
        assert getattr(nn.init, name)(p) is p
        if len(format.components) > 1:
            assert (p.components[1] != 0).float().mean() > 0.9
        for name in ("zeros_", "ones_", "eye_"):
            getattr(nn.init, name)(p)
        assert torch.equal(exact(p), torch.eye(16).double())

    def test_averaged_models(self, format):
        model = mcf.as_expansion(small_model(), format)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        assert_same_bits(averaged.module.state_dict(), model.state_dict())
        before = [exact(p.detach()) for p in model.parameters()]
        averaged.update_parameters(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        averaged.update_parameters(model)
        unit = 2.0 ** (1 - format.precision)
        for p, q, was in zip(averaged.parameters(), model.parameters(), before, strict=True):
            assert p.format is q.format
            mean = (exact(q.detach()) + was) / 2
            torch.testing.assert_close(exact(p.detach()), mean, rtol=unit, atol=0)

    @pytest.mark.thinned(of=3)
    def test_sums_of_gradients(self, format):
        model = mcf.as_expansion(small_model(), format)
        mcf.accumulate_gradients(model)
        totals = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
        for i in range(64):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i)).bfloat16()
            parts = torch.autograd.grad(model(x).float().square().mean(), [*model.parameters()])
            for total, part in zip(totals, parts, strict=True):
                total += part.double()
            model(x).float().square().mean().backward()
        for p, total in zip(model.parameters(), totals, strict=True):
            assert isinstance(p.grad, mcf.MCFTensor)
            assert ((exact(p.grad) - total).abs().max() / total.abs().max()) < 2**-14
        torch.optim.AdamW(model.parameters(), fused=True).step()
        mcf.accumulate_gradients(model)
        torch.optim.AdamW(model.parameters(), foreach=True).step()


@in_all
class TestAudits:
    def test_a_change_of_any_bit_is_a_change(self, format):
        before = {"x": sample(format, 64, 32)}
        for component in range(len(format.components)):
            after = {"x": before["x"].clone()}
            bits = after["x"].components[component].view(torch.uint8)
            bits.view(64, -1)[3, 0] ^= 1
            report = mcf.meters.audit(before, after)
            (tensor,) = report.tensors
            changed = 32 if component in format.shared else 1
            assert tensor.unchanged == 1 - changed / (64 * 32)
            assert tensor.dtype == format.name

    def test_saved(self, format, tmp_path):
        models = [mcf.as_expansion(small_model(), format) for _ in range(2)]
        with torch.no_grad():
            models[1][0].weight.mul_(1.5)
        found = [mcf.meters.audit(*(model.state_dict() for model in models))]
        for kind in ("safetensors", "pt"):
            paths = [tmp_path / f"{i}.{kind}" for i in range(2)]
            for model, path in zip(models, paths, strict=True):
                if kind == "pt":
                    torch.save(model.state_dict(), path)
                else:
                    mcf.save_file(model, path)
            found.append(mcf.meters.audit(*paths))
        assert found[0].tensors == found[1].tensors == found[2].tensors


@in_kept
class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch.compiler.reset()

    @pytest.mark.thinned(of=2)
    def test_parameters_alone(self, format):
        def forward(p, x):
            return F.linear(x, p * 0.5), (p * 0.5).detach()

        p, x = parameter(format, 4, 3), torch.randn(2, 3).bfloat16()
        found = torch.compile(forward, backend="aot_eager", fullgraph=True)(p, x)
        assert_same_bits(found, forward(p, x))

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize(
        "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
    )
    def test_modules(self, format, backend):
        model = mcf.as_expansion(small_model(), format)
        reference, x = copy.deepcopy(model), torch.randn(3, 4).bfloat16()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        step = torch.compile(optimizers[0].step, backend=backend)
        for _ in range(2):
            y, z = compiled(x), reference(x)
            torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)
            for out in (y, z):
                out.float().square().sum().backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert type(p.grad) is torch.Tensor
                torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)
                p.grad = q.grad.clone()
            step()
            optimizers[1].step()
        assert_same_bits(model.state_dict(), reference.state_dict())


IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "sub_ alpha": lambda x, y: x.sub_(y, alpha=0.3),
    "mul_": lambda x, y: x.mul_(y),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.1),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y + 1, value=0.1),
    "lerp_": lambda x, y: x.lerp_(y, 0.01),
    "clamp_": lambda x, y: x.clamp_(min=y),
    "copysign_": lambda x, y: x.copysign_(y),
    "atan2_": lambda x, y: x.atan2_(y),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 1, 1.2),
    "out=": lambda x, y: torch.mul(x, y, out=x),
    "_foreach_add_": lambda x, y: torch._foreach_add_([x], [y]),
    "_foreach_lerp_": lambda x, y: torch._foreach_lerp_([x], [y], 0.01),
    "_foreach_maximum_": lambda x, y: torch._foreach_maximum_([x], [y]),
}


@pytest.mark.parametrize("operation", IN_PLACE)
@pytest.mark.parametrize("format", [mcf.bf16i16, mcf.bf16i8.nearest, mcf.e4m3i16, mcf.bf16x2])
def test_a_parameter_that_is_written_to_is_its_number(format, operation):
    found = []
    for make in (torch.nn.Parameter, lambda x: x):
        torch.manual_seed(3)
        x = make(mcf.as_expansion(1 + torch.rand(4, 32) / 100, format))
        with torch.no_grad():
            IN_PLACE[operation](x, 1 + torch.rand(4, 32) / 1000)
        found.append(mcf.as_plain(x, torch.float64))
    assert torch.equal(*found)


OF_MASKED = {
    **{
        name: lambda x, mask, name=name: getattr(torch.masked, name)(x, 1, mask=mask)
        for name in (
            *("amax", "amin", "cumsum", "cumprod", "logsumexp", "std", "var"),
            *("sum", "mean", "prod", "softmax", "log_softmax", "softmin", "median"),
        )
    },
    "norm": lambda x, mask: torch.masked.norm(x, 2, 1, mask=mask),
    "normalize": lambda x, mask: torch.masked.normalize(x, 2, 1, mask=mask),
    "logaddexp": lambda x, mask: torch.masked.logaddexp(x, x + 1, input_mask=mask, other_mask=mask),
}


@pytest.mark.parametrize("name", OF_MASKED)
@pytest.mark.parametrize("format", [mcf.bf16i16, mcf.bf16i8, mcf.fp16i16])
def test_functions_of_masked_tensors_keep_all_bits(format, name):
    function = OF_MASKED[name]
    x = mcf.as_expansion(1 + torch.rand(4, 6, generator=torch.Generator().manual_seed(1)), format)
    mask = torch.arange(24).view(4, 6) % 4 > 0
    expected = function(mcf.as_plain(x, torch.float64), mask)
    found = function(x, mask)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-6)
    assert function(nn.Parameter(x), mask).dtype == format.dtype
    if name != "median":
        assert function(mcf.as_plain(x, torch.float32), mask).dtype == torch.float32


WITH_GRADIENTS = {
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: torch.cummin(x, 1).values,
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1, 5])),
}


@pytest.mark.parametrize("name", WITH_GRADIENTS)
@pytest.mark.parametrize("format", [mcf.bf16i16, mcf.bf16i8, mcf.fp16i16])
def test_gradients_of_functions_whose_result_is_wider(format, name):
    function = WITH_GRADIENTS[name]
    x = mcf.as_expansion(torch.rand(4, 6, generator=torch.Generator().manual_seed(1)), format)
    wide = mcf.as_plain(x, torch.float64).requires_grad_()
    made, expected = function(x.requires_grad_()), function(wide)
    torch.testing.assert_close(made.double(), expected, rtol=1e-6, atol=1e-6)
    weights = torch.linspace(-1, 2, made.numel()).view(made.shape)
    (found,) = torch.autograd.grad(made, x, weights)
    (right,) = torch.autograd.grad(expected, wide, weights.double())
    found = mcf.as_plain(found, torch.float64)
    torch.testing.assert_close(found, right, rtol=2.0**-8, atol=2.0**-10)


@pytest.mark.parametrize("format", [mcf.bf16i16, mcf.e4m3i8, mcf.mxfp8])
def test_a_new_shape_in_place_is_refused(format):
    x = sample(format, 4, 32)
    with pytest.raises(NotImplementedError, match=r"resize_.*shape \(2, 2\)"):
        x.resize_(2, 2)
    assert_same_bits(x, sample(format, 4, 32))
