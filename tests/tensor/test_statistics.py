"""Buffers that are averages keep all terms: running statistics of norms, and averages by hand."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo import reset
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.dispatch.registry import TABLE
from support.helpers import exact, requires_cuda

MAKE = {
    "batch": lambda **options: nn.BatchNorm1d(8, **options),
    "batch, no affine": lambda **options: nn.BatchNorm1d(8, affine=False, **options),
    "instance": lambda **options: nn.InstanceNorm1d(
        8, affine=True, track_running_stats=True, **options
    ),
}


def run(module, batches, dtype=torch.float32):
    """The statistics after some batches of numbers whose mean is 1 and deviation 2."""
    generator = torch.Generator().manual_seed(1)
    device = module.running_var.device
    for _ in range(batches):
        x = 1 + 2 * torch.randn(32, 8, 6, generator=generator)
        y = module(x.to(device, dtype))
        assert type(y) is torch.Tensor
        assert y.dtype == dtype
    return torch.stack([exact(module.running_mean), exact(module.running_var)])


def largest_error(found, expected):
    return ((found - expected) / expected).abs().max().item()


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("device", ["cpu", requires_cuda])
@pytest.mark.parametrize("momentum", [0.1, 0.01, None])
@pytest.mark.parametrize("overrides", [{}, {"running_*": None}, {"running_*": mcf.bf16x3}], ids=str)
def test_running_statistics_are_those_of_float32(overrides, momentum, device):
    """To 0.3 %, after 2000 batches, where those of plain bf16 are off by 2 % and 19 %."""
    batches = 2000 if not overrides else 300
    plain = MAKE["batch"](momentum=momentum).to(device)
    module = mcf.as_expansion(copy.deepcopy(plain), overrides=overrides)
    expected = run(plain, batches)
    assert largest_error(run(module, batches, torch.bfloat16), expected) < 0.003


def test_plain_bf16_loses_them():
    plain = MAKE["batch"](momentum=0.01)
    expected = run(plain, 1000)
    found = run(MAKE["batch"](momentum=0.01).bfloat16(), 1000, torch.bfloat16)
    assert largest_error(found, expected) > 0.1


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("base", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MAKE)
def test_norms_of_every_base(kind, base):
    plain = MAKE[kind](momentum=0.05)
    module = mcf.as_expansion(copy.deepcopy(plain), mcf.Format(base, 2))
    expected = run(plain, 100)
    assert largest_error(run(module, 100, base), expected) < 0.003
    module.eval(), plain.eval()
    x = torch.randn(4, 8, 6).to(base)
    torch.testing.assert_close(module(x).float(), plain(x.float()), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", MAKE)
def test_the_same_in_inference_and_without_gradients(kind):
    module = mcf.as_expansion(MAKE[kind]())
    x = torch.randn(4, 8, 6).bfloat16()
    module(x)
    module.eval()
    expected, before = module(x), exact(module.running_var)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(module(x), expected)
    assert torch.equal(exact(module.running_var), before)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_plain_and_those_of_torch(kind, training):
    plain = MAKE[kind]().train(training)
    module = mcf.as_expansion(copy.deepcopy(plain))
    x = torch.randn(4, 8, 6)
    given = [x.bfloat16().requires_grad_(), x.bfloat16().float().requires_grad_()]
    weights = torch.randn(4, 8, 6).bfloat16().float()
    for model, y in zip((module, plain), given, strict=True):
        (model(y).float() * weights).sum().backward()
    pairs = [(module.weight, plain.weight), (module.bias, plain.bias)] if plain.affine else []
    for p, q in (*pairs, given):
        assert type(p.grad) is torch.Tensor
        assert p.grad.dtype == torch.bfloat16
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=0.02, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", MAKE)
def test_compiled(kind, backend):
    reset()
    module = mcf.as_expansion(MAKE[kind](momentum=0.05))
    other = copy.deepcopy(module)
    compiled = torch.compile(other, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = (1 + 2 * torch.randn(32, 8, 6, generator=generator)).bfloat16()
        module(x), compiled(x)
    assert isinstance(other.running_var, mcf.MCFTensor)
    assert largest_error(exact(other.running_var), exact(module.running_var)) < 1e-5


def test_compiled_once():
    reset()
    module = mcf.as_expansion(MAKE["batch"](momentum=0.05))
    other = copy.deepcopy(module)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(32, 8).bfloat16()
        assert torch.equal(module(x), compiled(x))
    assert largest_error(exact(other.running_var), exact(module.running_var)) < 1e-6


def test_frozen_norms_go_on_averaging():
    plain = nn.BatchNorm1d(8, momentum=0.01).requires_grad_(False)
    module = mcf.as_expansion(copy.deepcopy(plain))
    assert module.weight.dtype == torch.bfloat16
    assert largest_error(run(module, 500, torch.bfloat16), run(plain, 500)) < 0.003


def test_a_value_is_normalized_with_all_terms(format):
    if format.precision > 48:
        pytest.skip("beyond float64")
    x = torch.randn(16, 8, dtype=torch.float64)
    mean, variance = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    averages = [mcf.as_expansion(t, format) for t in (mean, variance)]
    value = mcf.as_expansion(x, format)
    found = F.batch_norm(value, *averages, training=True)
    expected = F.batch_norm(exact(value), mean, variance, training=True)
    tolerance = 64 * format.u**format.terms
    torch.testing.assert_close(exact(found), expected, rtol=tolerance, atol=tolerance)
    for kept, reference in zip(averages, (mean, variance), strict=True):
        torch.testing.assert_close(exact(kept), reference, rtol=tolerance, atol=2**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_across_processes_are_averaged_with_all_terms(dtype):
    """What `nn.SyncBatchNorm` calls of each process; PyTorch has the others on GPUs alone."""
    average = mcf.as_expansion(torch.ones(8), mcf.bf16i16)
    mean = mcf.as_expansion(torch.zeros(8), mcf.bf16i16)
    x = (1 + 2 * torch.randn(64, 8)).to(dtype)
    reference = [torch.zeros(8), torch.ones(8)]
    for _ in range(5):
        torch.batch_norm_update_stats(x, mean, average, 0.01)
        torch.batch_norm_update_stats(x, *reference, 0.01)
    torch.testing.assert_close(exact(mean).float(), reference[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exact(average).float(), reference[1], rtol=1e-5, atol=1e-6)


def test_every_operator_that_keeps_running_statistics_is_known():
    """Most write them without saying so; one that is not known would leave tails as they are."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    for schema in torch._C._jit_get_all_schemas():
        names = [a.name for a in schema.arguments]
        if "running_mean" not in names or any(a.is_out for a in schema.arguments):
            continue
        func = getattr(
            getattr(torch.ops.aten, schema.name.removeprefix("aten::")),
            schema.overload_name or "default",
        )
        is_pure = "functional" in schema.name  # of which compilers make use beneath
        assert func in TABLE or func.has_kernel_for_dispatch_key(composite) or is_pure, func


class Averages(nn.Module):
    """What users write: averages in place and by assignment, and constants."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("ema_in", torch.zeros(4))
        self.register_buffer("ema_out", torch.zeros(4))
        self.register_buffer("decay", torch.tensor(0.999))
        self.register_buffer("shadow", self.layer.weight.detach().clone())
        self.register_buffer("scale", torch.tensor([0.1]))
        self.register_buffer("frequencies", 10000 ** -(torch.arange(4) / 4))

    def forward(self, x):
        with torch.no_grad():
            self.ema_in.mul_(0.999).add_(x.mean(0), alpha=0.001)
            self.ema_out = self.ema_out * 0.999 + 0.001 * x.mean(0)
            self.shadow.sub_((1 - self.decay) * (self.shadow - self.layer.weight))
        return self.layer(x * self.scale)


def test_averages_and_constants_of_users():
    torch.manual_seed(0)
    plain = Averages()
    module = mcf.as_expansion(copy.deepcopy(plain))
    for seed in range(500):
        torch.manual_seed(seed)
        x = torch.randn(16, 4).bfloat16() + 1
        assert module(x).dtype == torch.bfloat16
        plain(x.float())
        with torch.no_grad():
            for model in (module, plain):
                model.layer.weight.add_(1e-3)
    for name in ("ema_in", "ema_out", "shadow"):
        found, expected = exact(getattr(module, name)), getattr(plain, name)
        torch.testing.assert_close(found.float(), expected, rtol=0.003, atol=1e-4)
    assert torch.equal(module.frequencies.float(), plain.frequencies)
    assert module.ema_in.role == "value"
    assert module.shadow.role == module.scale.role == "parameter"


def test_observers_of_quantizers():
    """An average that is computed out of place, and written by copy_()."""
    quantization = pytest.importorskip("torch.ao.quantization")
    plain = quantization.MovingAverageMinMaxObserver(averaging_constant=0.01)
    module = mcf.as_expansion(copy.deepcopy(plain))
    for seed in range(400):
        torch.manual_seed(seed)
        x = (1 + torch.rand(64)).bfloat16()
        module(x), plain(x.float())
    for name in ("min_val", "max_val"):
        found, expected = exact(getattr(module, name)).item(), getattr(plain, name).item()
        assert found == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize("assign", [False, True])
def test_they_survive_state_dicts_copies_and_moves(assign):
    module = mcf.as_expansion(Averages())
    module(torch.randn(4, 4).bfloat16())
    for other in (copy.deepcopy(module), mcf.as_expansion(Averages())):
        other.load_state_dict(module.state_dict(), assign=assign)
        other.bfloat16()
        for name, x in module.named_buffers():
            if name != "ema_out":  # a plain float32 since it was assigned
                assert other.get_buffer(name).role == x.role
            assert torch.equal(exact(other.get_buffer(name)), exact(x))
    plain = Averages()
    plain.load_state_dict(
        {name: mcf.as_plain(x, torch.float32) for name, x in module.state_dict().items()}
    )
    other = mcf.as_expansion(Averages())
    other.load_state_dict(plain.state_dict(), assign=assign)
    assert torch.equal(exact(other.shadow), plain.shadow.double())
    assert other.shadow.role == "parameter"


def test_the_vectors_of_spectral_norms_are_made_anew_at_each_step():
    """So nothing piles up in them: the norm is that of float32 to the precision of bf16."""
    torch.manual_seed(0)
    plain = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    module = mcf.as_expansion(copy.deepcopy(plain))
    for _ in range(50):
        module(torch.randn(2, 16).bfloat16()), plain(torch.randn(2, 16))
    size = torch.linalg.matrix_norm(module.weight.detach().float(), 2)
    assert size.item() == pytest.approx(1, abs=0.01)
