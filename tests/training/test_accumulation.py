"""Sums of microbatch gradients, held against float64 sums of the same gradients."""

import copy

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_terms, exact

PATHS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
KINDS = {
    "expansions": mcf.as_expansion,
    "plain": nn.Module.bfloat16,
}


def network(kind="expansions") -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind](nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)))


def losses(model, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(5, 8, generator=generator).bfloat16()
        yield model(x).square().mean()


def accumulate(model, count, losses=losses, scale=lambda loss: loss):
    """Run backward passes, and return the float64 and bf16 sums of their gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    exactly = [torch.zeros(p.shape, dtype=torch.float64) for p in parameters]
    plainly = [torch.zeros(p.shape, dtype=torch.bfloat16) for p in parameters]
    for loss in losses(model, count):
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        for total, rounded, g in zip(exactly, plainly, gradients, strict=True):
            if g is not None:
                total += g.double()
                rounded += g
        scale(loss).backward()
    return exactly, plainly


def ulps(x, expected) -> float:
    """The largest error in units of the last place of bf16."""
    _, exponent = torch.frexp(expected)
    ulp = torch.ldexp(torch.ones_like(expected), exponent - 8)
    return float(((exact(x) - expected).abs() / ulp).max())


def assert_sums(model, expected, allowed=0.1):
    for p, total in zip((p for p in model.parameters() if p.requires_grad), expected, strict=True):
        assert isinstance(p.grad, mcf.MCFTensor)
        assert p.grad.role == "value"
        assert ulps(p.grad, total) < allowed


@pytest.fixture
def armed():
    def make(kind="expansions", format=None):
        model = network(kind)
        mcf.accumulate_gradients(model, format)
        return model

    return make


# ------------------------------------------------------------------------------------- the sums


@pytest.mark.parametrize("kind", KINDS)
def test_64_microbatches(armed, kind):
    model = armed(kind)
    expected, rounded = accumulate(model, 64)
    assert_sums(model, expected)
    for p, total in zip(model.parameters(), expected, strict=True):
        assert ulps(mcf.as_plain(p.grad), total) <= 1
    # where bf16 is far off
    assert max(ulps(r, total) for r, total in zip(rounded, expected, strict=True)) > 8


def test_a_format(armed):
    model = armed("plain", mcf.bf16x3)
    expected, _ = accumulate(model, 64)
    assert model[0].weight.grad.format == mcf.bf16x3
    assert_sums(model, expected, allowed=1e-4)


def test_a_format_goes_to_parameters_of_its_base():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2))
    mcf.accumulate_gradients(model, mcf.bf16x3)
    (model[0](torch.ones(2).bfloat16()).sum() + model[1](torch.ones(2)).sum()).backward()
    assert model[0].weight.grad.format == mcf.bf16x3
    assert model[1].weight.grad.format == mcf.fp32x2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_starts_anew(armed, set_to_none):
    model = armed()
    for count in (3, 64):
        model.zero_grad(set_to_none)
        expected, _ = accumulate(model, count)
        assert_sums(model, expected)


def test_a_gradient_that_was_there_before():
    model = network()
    expected, _ = accumulate(model, 1)
    mcf.accumulate_gradients(model)
    more, _ = accumulate(model, 1)
    for p, x, y in zip(model.parameters(), expected, more, strict=True):
        assert exact(p.grad).equal((x + y).bfloat16().double())  # summed in bf16 by then
    assert isinstance(model[0].weight.grad, mcf.MCFTensor)


def test_removing():
    model = network()
    with mcf.accumulate_gradients(model) as accumulation:
        expected, _ = accumulate(model, 8)
    assert_sums(model, expected)
    model.zero_grad()
    accumulate(model, 2)
    assert type(model[0].weight.grad) is torch.Tensor
    accumulation.remove()


# --------------------------------------------------------------------- kinds of parameters


def test_tied_parameters():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    mcf.accumulate_gradients(mcf.as_expansion(model))

    def losses(model, count):
        for i in range(count):
            yield model(torch.tensor([i % 6, (i * i) % 6])).square().mean()

    expected, _ = accumulate(model, 64, losses)
    assert_sums(model, expected)


def test_parameters_without_a_gradient_in_some_microbatches(armed):
    model = armed()

    def losses(model, count):
        x = torch.randn(3, 8).bfloat16()
        for i in range(count):
            hidden = model[0](x * i)
            yield (model[2](model[1](hidden)) if i % 3 == 2 else hidden).square().mean()

    expected, _ = accumulate(model, 32, losses)
    assert_sums(model, expected)


def test_frozen_parameters():
    model = network()
    model[0].requires_grad_(False)
    mcf.accumulate_gradients(model)
    expected, _ = accumulate(model, 8)
    assert_sums(model, expected)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("dense_too", [False, True])
def test_sparse_gradients(dense_too):
    table = mcf.as_expansion(nn.Embedding(5, 3, sparse=True))
    mcf.accumulate_gradients(table)
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for i in range(64):
        x = torch.randn(4, 3).bfloat16()
        rows = torch.tensor([0, i % 5, 1, 1])
        if dense_too and i % 2 == 0:
            (table.weight[:4] * x).sum().backward()
            expected[:4] += x.double()
        else:
            (table(rows) * x).sum().backward()
            expected.index_add_(0, rows, x.double())
    assert ulps(table.weight.grad, expected) < 0.1
    before = exact(table.weight)
    torch.optim.SGD([table.weight], lr=1.0).step()
    moved = before - exact(table.weight)
    assert float((moved - expected).abs().max()) < 2**-12


def test_modules_converted_or_copied_afterwards():
    model = nn.Linear(8, 4)
    mcf.accumulate_gradients(model)
    mcf.as_expansion(model)
    expected, _ = accumulate(model, 8)
    assert_sums(model, expected)
    assert model.weight.grad.format == mcf.bf16x2
    model.to("cpu").zero_grad()
    expected, _ = accumulate(model, 8)
    assert_sums(model, expected)
    clone = copy.deepcopy(model)
    assert_same_terms(clone.weight.grad, model.weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_moved_afterwards(armed, kind, tmp_path):
    """`module.to` exchanges what a parameter holds; trainers call it."""
    model = armed(kind)
    model.to("cpu").bfloat16()
    expected, _ = accumulate(model, 8)
    assert_sums(model, expected)
    model.to(torch.device("cpu"))
    model.zero_grad()
    expected, _ = accumulate(model, 8)
    assert_sums(model, expected)
    for content in (model.state_dict(), dict(model.named_parameters())):
        torch.save(content, tmp_path / "model.pt")
        network(kind).load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def test_removing_after_a_move():
    model = network()
    accumulation = mcf.accumulate_gradients(model)
    model.to("cpu")
    accumulation.remove()
    accumulate(model, 2)
    assert type(model[0].weight.grad) is torch.Tensor
    model.to("cpu")
    model.zero_grad()
    accumulate(model, 2)
    assert type(model[0].weight.grad) is torch.Tensor


# ------------------------------------------------------- between backward and the optimizer


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("foreach", [False, True])
def test_clipping(armed, kind, foreach):
    model = armed(kind)
    expected, _ = accumulate(model, 64)
    norm = torch.cat([x.flatten() for x in expected]).norm()
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
    assert float(found) == pytest.approx(float(norm), rel=2**-12)
    assert_sums(model, [x * 0.5 / (norm + 1e-6) for x in expected], allowed=0.2)
    nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
    for p in model.parameters():
        assert float(exact(p.grad).abs().max()) <= 0.01 * (1 + 2**-16)


@pytest.mark.parametrize("infinite", [False, True])
def test_gradient_scaling(armed, infinite):
    model = armed()
    model.register_parameter("other", nn.Parameter(torch.ones(2)))  # with a plain gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=48.0)
    expected, _ = accumulate(model, 64, scale=scaler.scale)
    model.other.grad = torch.tensor([96.0, 48.0])
    if infinite:
        model[0].bias.grad[0] = torch.inf
    scaler.unscale_(optimizer)
    assert model.other.grad.tolist() == [2.0, 1.0]
    if not infinite:
        # each scaled microbatch gradient is rounded to bf16, which the sum cannot know
        for p, total in zip(list(model.parameters())[1:], expected[1:], strict=True):
            assert float((exact(p.grad) - total).norm() / total.norm()) < 2**-8
    before = exact(model[0].weight)
    gradient = exact(model[0].weight.grad)
    scaler.step(optimizer)
    moved = before - exact(model[0].weight)
    if infinite:
        assert moved.count_nonzero() == 0
    else:
        assert float((moved - gradient).abs().max()) < 2**-15


# --------------------------------------------------------------------------------- the optimizer


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("flags", PATHS, ids=lambda flags: next(iter(flags)) + str(flags))
@pytest.mark.parametrize("kind", KINDS)
def test_sgd_moves_by_the_whole_sum(armed, kind, flags):
    model = armed(kind)
    expected, _ = accumulate(model, 64)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.optim.SGD(model.parameters(), lr=1.0, **flags).step()
    for p, total in zip(model.parameters(), expected, strict=True):
        assert ulps(-p.detach(), total) < (0.1 if kind == "expansions" else 0.6)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("mode", [None, "light", "plus", "full"])
@pytest.mark.parametrize("flags", PATHS, ids=str)
def test_moments_of_adam(armed, flags, mode):
    model = armed()
    expected, _ = accumulate(model, 64)
    optimizer = torch.optim.AdamW(model.parameters(), **flags)
    if mode:
        mcf.collage(optimizer, mode)
    optimizer.step()
    for p, total in zip(model.parameters(), expected, strict=True):
        state = optimizer.state[p]
        allowed = {"exp_avg": mode in (None, "full"), "exp_avg_sq": mode != "light"}
        for name, moment in (("exp_avg", 0.1 * total), ("exp_avg_sq", 0.001 * total**2)):
            assert ulps(state[name], moment) < (0.1 if allowed[name] else 0.7)


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("mode", [None, "light", "full"])
@pytest.mark.parametrize("flags", PATHS, ids=str)
def test_momentum_of_sgd(armed, flags, mode):
    """The first buffer is a copy of the gradient, the second a sum with the next one."""
    model = armed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5, **flags)
    if mode:
        mcf.collage(optimizer, mode)
    expected, _ = accumulate(model, 64)
    optimizer.step()
    optimizer.step()
    for p, total in zip(model.parameters(), expected, strict=True):
        assert ulps(optimizer.state[p]["momentum_buffer"], 1.5 * total) < (
            2 if mode == "light" else 0.1
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("one_by_one")
def test_edq(armed, kind):
    """The meter intends the whole sum, of which plain weights take part."""
    model, twin = armed(kind), armed(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-5)
    meter = mcf.EDQ(optimizer, every=1)
    for net, opt in ((model, optimizer), (twin, reference)):
        accumulate(net, 8)
        opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert exact(p).equal(exact(q))
    if kind == "expansions":
        assert meter.last["ratio"] == pytest.approx(1, abs=1e-2)
    else:
        assert meter.last["lost"] > 0.5


# ---------------------------------------------------------------------------- graphs, compilers


def test_autograd_grad_is_untouched(armed):
    model = armed()
    (loss,) = losses(model, 1)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    assert all(type(g) is torch.Tensor and g.requires_grad for g in gradients)
    assert model[0].weight.grad is None


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_double_backward(armed):
    model = armed("plain")
    (loss,) = losses(model, 1)
    loss.backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters())
    (second,) = torch.autograd.grad(penalty, [model[0].weight])
    assert second.count_nonzero() > 0
    model.zero_grad()


@pytest.mark.unwatched("the compiler refuses to look through the mode that watches")
@pytest.mark.parametrize(("kind", "format"), [("expansions", mcf.bf16x3), ("plain", None)])
def test_compiled_forward_and_backward(armed, kind, format):
    """With sums there when the compiler first looks, and others of another batch size."""
    torch._dynamo.reset()
    model = armed(kind, format)
    accumulate(model, 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def losses(net, count):
        for i in range(count):
            x = torch.randn(3 + i % 3, 8).bfloat16()
            yield compiled(x).square().mean()

    with torch._functorch.config.patch(donated_buffer=False):  # the test runs backward twice
        for _ in range(2):
            model.zero_grad()
            expected, _ = accumulate(model, 16, losses)
            assert_sums(model, expected)


def test_checkpointed_activations(armed):
    model = armed()

    def losses(net, count):
        for _ in range(count):
            x = torch.randn(5, 8).bfloat16()
            hidden = torch.utils.checkpoint.checkpoint(net[0], x, use_reentrant=False)
            yield net[2](net[1](hidden)).square().mean()

    expected, _ = accumulate(model, 8, losses)
    assert_sums(model, expected)


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([nn.Parameter(torch.ones(1))],), TypeError, "got list; give a module"),
        ((nn.Linear(1, 1), torch.bfloat16), TypeError, "a plain dtype"),
        ((nn.ReLU(),), ValueError, "ReLU has no parameter that requires grad"),
        ((nn.Linear(1, 1), mcf.bf16x2), ValueError, r"no parameter of torch\.bfloat16 that"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        mcf.accumulate_gradients(*arguments)
