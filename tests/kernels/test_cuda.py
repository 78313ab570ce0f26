"""On a GPU: the bits of the CPU, CUDA graphs, streams, no waiting, no memory of its own."""

import copy
from functools import partial

import pytest
import torch

import mcftensor as mcf
from support.helpers import assert_same_terms, sample, small_model
from support.kernel_cases import (
    CASES,
    OPERATIONS,
    STEPS,
    assert_same_bits,
    expression,
    flat,
    mixtures,
    operand,
    patterns,
    run,
    run_sets,
    run_trace,
    step,
    traced,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"


def there(operands):
    return tuple(x.to(DEVICE) for x in operands)


def assert_bits_of_cpu(got, expected):
    assert all(x.device.type == DEVICE for x in got)
    assert_same_bits([x.cpu() for x in got], expected)


class TestBits:
    @pytest.mark.parametrize(("name", "operation"), CASES)
    def test_every_operation(self, name, operation):
        format = mcf.Format.from_name(name)
        operands = [operand(format.nearest, 100_003) for _ in range(OPERATIONS[operation])]
        text = expression(operation, format)
        assert_bits_of_cpu(run(text, *map(there, operands)), run(text, *operands))

    @pytest.mark.parametrize("name", ["bf16x2", "bf16x3", "fp16x2", "fp32x2"])
    def test_traces(self, name):
        trace, operands, numbers = traced(mcf.Format.from_name(name), 50_021)
        got = run_trace(trace, list(map(there, operands)), numbers)
        assert_bits_of_cpu(got, run_trace(trace, operands, numbers))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize("name", ["bf16x2", "fp16x2", "fp32x2"])
    def test_plain_operands_with_all_payloads(self, name, dtype):
        format = mcf.Format.from_name(name)
        x, plain = operand(format, 50_021), (patterns(dtype, 50_021),)
        text = expression("add", format)
        assert_bits_of_cpu(run(text, there(x), there(plain)), run(text, x, plain))

    @pytest.mark.parametrize("kind", STEPS)
    def test_fused_steps(self, kind, monkeypatch):
        keys = iter(range(1000))
        monkeypatch.setattr(
            "mcftensor.operators.fused.draw_key",
            lambda device: torch.tensor(2**61 + next(keys) % len(mixtures(kind)), device=device),
        )
        expected = flat(step(kind, mixtures(kind)))
        keys = iter(range(1000))
        assert_bits_of_cpu(flat(step(kind, mixtures(kind), device=DEVICE)), expected)

    def test_one_huge_and_many_tiny_tensors(self):
        format = mcf.bf16x2
        shapes = [(3,), (5_000_001,), *[(i % 5 + 1,) for i in range(2000)], (1024,), (1025,)]
        pairs = [(operand(format, *shape), operand(format, *shape)) for shape in shapes]
        text = expression("mul", format)
        got = run_sets(text, *[tuple(map(there, pair)) for pair in pairs])
        assert_bits_of_cpu(got, run_sets(text, *pairs))

    @pytest.mark.parametrize("name", ["bf16x2", "fp32x2", "bf16x2sr"])
    def test_unaligned_transposed_and_with_gaps(self, name):
        format = mcf.Format.from_name(name)
        whole = [operand(format.nearest, 600, 40) for _ in range(2)]
        text = expression("mul", format)
        for arrange in (lambda t: t.flatten()[1:], lambda t: t.t(), lambda t: t[:, ::2]):
            parts = [tuple(map(arrange, x)) for x in whole]
            own = [tuple(map(arrange, there(x))) for x in whole]
            assert_bits_of_cpu(run(text, *own), run(text, *parts))

    def test_infinity_less_infinity(self):
        x = mcf.as_expansion(torch.full((4,), torch.inf, device=DEVICE), mcf.bf16x2)
        assert (x - x).isnan().all()


OPTIMIZERS = {
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "fused Adam": partial(torch.optim.Adam, fused=True, amsgrad=True),
    "fused SGD": partial(torch.optim.SGD, fused=True, momentum=0.9),
    "fused Adagrad": partial(torch.optim.Adagrad, fused=True),
    "foreach AdamW": partial(torch.optim.AdamW, foreach=True),
    "foreach SGD": partial(torch.optim.SGD, foreach=True, momentum=0.9),
}


def trained(make, **options):
    """An optimizer in Collage mode over a model with gradients, after three steps."""
    model = mcf.as_expansion(small_model()).to(DEVICE)
    optimizer = make(model.parameters(), lr=1e-3, **options)
    if "momentum" not in getattr(make, "keywords", {}) and optimizer.defaults.get("betas"):
        mcf.collage(optimizer, "plus")
    for p in model.parameters():
        p.grad = torch.randn(p.shape, dtype=p.dtype).to(DEVICE)
    for _ in range(3):
        optimizer.step()
    return model, optimizer


def clones(model, optimizer):
    """Both once more, of the same values."""
    return copy.deepcopy((model, optimizer))


def assert_same_models(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_terms(p, q)


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestSteps:
    def test_do_not_wait(self, name):
        _, optimizer = trained(OPTIMIZERS[name])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_on_another_stream(self, name):
        """Tables that one stream copies are not read by another before they are there."""
        model, optimizer = trained(OPTIMIZERS[name])
        other, its_optimizer = clones(model, optimizer)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.grad
        for _ in range(4):
            optimizer.step()
        torch.cuda.synchronize()
        for _ in range(4):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                its_optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
        assert_same_models(model, other)


@pytest.mark.parametrize("name", ["fused AdamW", "fused Adam", "foreach AdamW"])
def test_a_graph_of_steps(name):
    """Captured, replayed with other gradients, and in turn with steps that are not captured."""
    model, optimizer = trained(OPTIMIZERS[name], capturable=True)
    other, its_optimizer = clones(model, optimizer)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
        its_optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.step()  # before the graph has run
    its_optimizer.step()
    assert_same_models(model, other)
    for i in range(4):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad.copy_(torch.randn(p.shape, dtype=p.dtype))
            q.grad.copy_(p.grad)
        graph.replay() if i % 2 else optimizer.step()
        its_optimizer.step()
        assert_same_models(model, other)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_steps_take_no_memory(options):
    """One part in a hundred of the parameters."""
    weights = [torch.nn.Parameter(sample(mcf.bf16x2, 4096, 1024).to(DEVICE)) for _ in range(4)]
    optimizer = mcf.collage(torch.optim.AdamW(weights, **options), "plus")
    for p in weights:
        p.grad = torch.randn(p.shape, dtype=p.dtype, device=DEVICE)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= sum(p.numel() * 4 for p in weights) / 100


@pytest.mark.parametrize("name", ["fused AdamW", "foreach AdamW"])
def test_compiled_training(name):
    """A compiled model, and a compiled step, which gives the bits of the eager one."""
    model, optimizer = trained(OPTIMIZERS[name])
    compiled = torch.compile(model)
    x = torch.randn(5, 4, device=DEVICE).bfloat16()
    torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    optimizer.zero_grad()
    compiled(x).square().mean().backward()
    other, its_optimizer = clones(model, optimizer)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad
    optimizer.step()
    torch.compile(its_optimizer.step)()
    assert_same_models(model, other)


def test_to_the_device_and_back(tmp_path):
    model = mcf.as_expansion(small_model())
    here = copy.deepcopy(model)
    model.to(DEVICE)
    mcf.save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_same_models(model.cpu(), here)
    loaded = mcf.load_file(tmp_path / "model.safetensors", device=DEVICE)
    for name, p in here.state_dict().items():
        assert loaded[name].device.type == DEVICE
        assert_same_terms(loaded[name].cpu(), p)
