"""Weights on the host, held against the same optimizer over expansions in one memory."""

import contextlib
import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import mcftensor as mcf
from support.helpers import assert_same_bits
from support.on_host import (
    FORMATS,
    OPTIMIZERS,
    WAYS,
    assert_follows,
    backward,
    leading,
    left,
    network,
    plainly,
    trained,
)


def of_compact(format, optimizer):
    return optimizer != "fused compact" or format in ("bf16i8", "bf16i16")


CASES = [
    *((f, o, "plain") for f in FORMATS for o in OPTIMIZERS if of_compact(f, o)),
    *(("bf16i8", o, way) for o in OPTIMIZERS for way in WAYS if way != "plain"),
]


@pytest.mark.parametrize(("format", "optimizer", "way"), CASES)
def test_bits_are_those_of_one_memory(format, optimizer, way):
    take, options = WAYS[way]
    arguments = FORMATS[format], OPTIMIZERS[optimizer], take
    model, host, its = trained(True, *arguments, **options)
    _, expansions, other = trained(False, *arguments, **options)
    assert_same_bits(left(host, its), left(expansions, other))
    assert_follows(model, host)


def test_clipping_by_norms_that_are_measured_before_the_step():
    found = []
    for on_host in (True, False):
        model = network()
        weights = (mcf.host.weights if on_host else mcf.as_expansion)(model, mcf.bf16i8)
        optimizer = OPTIMIZERS["foreach plus"](weights.parameters())
        with mcf.step_in_backward(weights, optimizer) as handle:
            for step in range(4):
                with handle.measure_norm(0.05):
                    backward(model, step)
                backward(model, step)
                optimizer.step()
        with mcf.step_in_backward(weights, optimizer, clip_by_previous_norm=0.05) as handle:
            for step in range(4):
                backward(model, step)
                optimizer.step()
        found.append((left(weights, optimizer), handle.norm))
    assert_same_bits(*found)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_after_a_thousand_steps(optimizer):
    arguments = mcf.bf16i8, OPTIMIZERS[optimizer], plainly, 1000
    model, host, its = trained(True, *arguments)
    _, expansions, other = trained(False, *arguments)
    assert_same_bits(left(host, its), left(expansions, other))
    assert_follows(model, host)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"released": 1 << 12}], ids=str)
@pytest.mark.parametrize("optimizer", ["foreach plus", "fused compact"])
def test_bits_of_a_gpu(optimizer, options):
    """Of a model there, and of expansions on it."""
    found = []
    for on_host in (True, False):
        model = network().cuda()
        weights = (mcf.host.weights if on_host else mcf.as_expansion)(model, mcf.bf16i8)
        its = OPTIMIZERS[optimizer](weights.parameters())
        if options:
            mcf.step_in_backward(weights, its, bucket_bytes=options["released"])
        for step in range(1000):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(x.cuda()).float().square().mean().backward()
            its.step()
            its.zero_grad()
        found.append({n: p.detach().cpu() for n, p in weights.named_parameters()})
        if on_host:
            held = dict(weights.named_parameters())
            for name, p in model.named_parameters():
                assert torch.equal(p.cpu(), leading(held[name]).cpu())
    del found[0]["4.weight"], found[1]["4.weight"]  # frozen
    assert_same_bits(*found)


@pytest.mark.parametrize("after", ["host", "one memory"])
@pytest.mark.parametrize("before", ["host", "one memory"])
def test_resumed_to_the_bit(before, after, tmp_path):
    make = OPTIMIZERS["fused compact"]
    _, weights, optimizer = trained(before == "host", mcf.bf16i8, make, plainly, 5)
    torch.save({"model": weights.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    mcf.save_file(weights, tmp_path / "b.safetensors")
    saved = torch.load(tmp_path / "a")

    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    on_host = after == "host"
    weights = (
        mcf.host.weights(model, mcf.bf16i8) if on_host else mcf.as_expansion(model, mcf.bf16i8)
    )
    optimizer = make(weights.parameters())
    weights.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    stored = mcf.load_file(tmp_path / "b.safetensors")
    ours = {name: p.detach() for name, p in weights.named_parameters() if p.requires_grad}
    assert_same_bits({name: stored[name] for name in ours}, ours)
    assert_follows(model, weights)
    for step in range(5, 12):
        plainly(model, weights, optimizer, step)
    _, expected, its = trained(False, mcf.bf16i8, make, plainly, 12)
    assert_same_bits(left(weights, optimizer), left(expected, its))


def test_what_the_device_and_the_host_hold():
    model = network()
    before = [(p, p.data_ptr()) for p in model.parameters()]
    host = mcf.host.weights(model, mcf.bf16i8)
    assert [(p, p.data_ptr()) for p in model.parameters()] == before
    assert all(type(p) is nn.Parameter and p.dtype == torch.bfloat16 for p, _ in before)
    assert list(host.state_dict()) == list(model.state_dict())
    assert host.get_submodule("4").weight is model[4].weight  # frozen
    assert host.get_buffer("4.scale") is model[4].scale
    model.to(torch.float64).to(torch.bfloat16)
    assert host.get_buffer("4.scale") is model[4].scale
    backward(model, 0)
    assert all(p.grad is None for p in model.parameters())
    grads = [h.grad for h in host.parameters() if h.requires_grad]
    assert {x.dtype for x in grads} == {torch.bfloat16}
    assert host.device_bytes == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    with pytest.raises(TypeError, match="computes nothing; call the model"):
        host(1)


def test_the_bytes_of_both():
    model = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    host = mcf.host.weights(model, mcf.bf16i8)
    optimizer = mcf.collage(torch.optim.AdamW(host.parameters(), fused=True), "compact")
    model(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    held = [host.weight, *(x for x in optimizer.state[host.weight].values() if x.dim())]
    storages = [c.untyped_storage() for x in held for c in x.components]
    measured = sum(x.nbytes() for x in {x.data_ptr(): x for x in storages}.values())
    assert measured / model.weight.numel() == 5.0625
    found = mcf.meters.summary(host, optimizer, released=True)
    assert measured < found.total < measured + 64  # counts of steps and of writes
    assert found.device_bytes == model.weight.nbytes == 2 * model.weight.numel()
    assert "on the host" in str(found)


def test_tied_weights_stay_tied():
    def tied():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).bfloat16()
        model[2].weight = model[0].weight
        return model

    model, other = tied(), tied()
    host = mcf.host.weights(model, mcf.bf16i16)
    mcf.as_expansion(other, mcf.bf16i16)
    assert host.get_submodule("2").weight is host.get_submodule("0").weight
    for net, weights in ((model, host), (other, other)):
        optimizer = OPTIMIZERS["foreach plus"](weights.parameters())
        for step in range(4):
            plainly(net, weights, optimizer, step)
    assert_same_bits(dict(host.named_parameters()), dict(other.named_parameters()))
    assert_follows(model, host)


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients(optimizer):
    found = []
    for on_host in (True, False):
        torch.manual_seed(0)
        model = nn.Embedding(50, 16, sparse=True, dtype=torch.bfloat16)
        weights = (mcf.host.weights if on_host else mcf.as_expansion)(model, mcf.bf16i16)
        its = optimizer(weights.parameters(), lr=1e-2)
        for step in range(4):
            for microbatch in range(2):
                model(torch.arange(step, 20 + microbatch)).float().square().mean().backward()
            its.step()
            its.zero_grad()
        found.append(weights.weight)
    assert_same_bits(*found)


def test_parameters_of_another_dtype_are_plain_on_the_host():
    model = network()
    model[1].float()
    host = mcf.host.weights(model, mcf.bf16i8)
    formats = {name: getattr(p, "format", p.dtype) for name, p in host.named_parameters()}
    assert formats["1.weight"] == torch.float32
    assert formats["0.weight"] == mcf.bf16i8
    optimizer = torch.optim.AdamW(host.parameters(), lr=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, 0)
    optimizer.step()
    assert_follows(model, host)


def test_overrides_name_formats():
    host = mcf.host.weights(network(), mcf.bf16i8, overrides={"*.bias": mcf.bf16i16, "3.*": None})
    formats = {name: getattr(p, "format", p.dtype) for name, p in host.named_parameters()}
    assert formats["0.bias"] == mcf.bf16i16
    assert formats["0.weight"] == mcf.bf16i8
    assert formats["3.weight"] == torch.bfloat16


# ------------------------------------------------------------------------- writes to either side


def stepped(format=mcf.bf16i16):
    model, host, optimizer = trained(True, format, OPTIMIZERS["fused compact"], plainly, 3)
    return model, host, optimizer, host.get_parameter("0.weight"), model[0].weight


def test_elements_written_on_the_device_are_taken_over():
    model, host, optimizer, ours, theirs = stepped()
    before = ours.detach().clone()
    assert before.components[1].count_nonzero() > 1000
    with torch.no_grad():
        theirs[0] = 3.0
    saved = host.state_dict()["0.weight"]
    assert (saved[0] == 3).all()
    assert_same_bits(saved[1:], before[1:])
    theirs.data[1] = 4.0  # of which nobody is told
    host.pull()
    assert (ours[1] == 4).all()
    assert_same_bits(ours.detach()[2:], before[2:])
    average = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: x * 2 for name, x in average.items()})
    model.load_state_dict(average)  # as for an evaluation with other weights
    plainly(model, host, optimizer, 3)
    assert_follows(model, host)


def test_a_step_sees_what_was_written_on_the_device():
    model, host, optimizer, ours, theirs = stepped()
    with torch.no_grad():
        theirs.clamp_(-0.01, 0.01)
    backward(model, 3)
    optimizer.step()
    assert ours.detach().abs().max() < 0.03
    assert_follows(model, host)


def test_what_is_written_on_the_host_goes_up():
    model, host, optimizer, ours, theirs = stepped()
    with torch.no_grad():
        ours.mul_(0.5)
    assert not torch.equal(theirs, leading(ours))
    host.push()
    assert_follows(model, host)
    host.load_state_dict({k: x * 2 for k, x in host.state_dict().items()})
    assert_follows(model, host)
    mcf.change_format(host, optimizer, mcf.bf16i8)
    plainly(model, host, optimizer, 3)
    assert ours.format == mcf.bf16i8
    assert_follows(model, host)
    mcf.as_expansion(host, mcf.fp16i8)
    with pytest.raises(
        TypeError, match=r"0.weight of shape \(64, 32\) is torch.float16 on the host"
    ):
        host.push()


def test_writes_to_both_sides_raise():
    model, host, optimizer, ours, theirs = stepped()
    with torch.no_grad():
        ours.mul_(0.5)
        theirs.mul_(0.25)
    for call in (host.push, host.pull, host.state_dict, optimizer.step):
        backward(model, 3)
        with pytest.raises(RuntimeError, match="written to on the host and on the device"):
            call()


def test_gradients_that_are_set_by_hand_or_have_a_graph_go_down_before_the_step():
    model, host, optimizer, ours, theirs = stepped()
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    loss = model(x).float().square().mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of cycles
        loss.backward(create_graph=True)
    assert theirs.grad is not None
    assert ours.grad is None
    expected = theirs.grad.detach().clone()
    optimizer.register_step_pre_hook(lambda *unused: assert_same_bits(ours.grad, expected))
    optimizer.step()
    assert theirs.grad is None
    assert_follows(model, host)


# ------------------------------------------------------------------- what other programs may do


def test_a_model_that_has_other_parameters_now_raises():
    model, host, optimizer, *_ = stepped()
    model.load_state_dict(network().state_dict(), assign=True)
    backward(model, 3)
    with pytest.raises(RuntimeError, match=r"no longer has the parameters 0.weight, 0.bias"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="leave out assign=True"):
        host.load_state_dict(host.state_dict(), assign=True)


def test_parameters_that_come_later_warn():
    model, _, optimizer, *_ = stepped()
    model[4].weight.requires_grad_(True)  # the optimizer holds it
    backward(model, 3)
    with pytest.warns(mcf.errors.PlainParameterWarning, match=r"plain torch.bfloat16.*4.weight"):
        optimizer.step()
    model.append(nn.Linear(8, 8, dtype=torch.bfloat16))
    backward(model, 4)
    with pytest.warns(mcf.errors.PlainParameterWarning, match="gradients of 5.weight, 5.bias stay"):
        optimizer.step()


def test_a_frozen_layer_stands_still():
    model, host, optimizer, ours, theirs = stepped()
    theirs.requires_grad_(False)
    before = ours.detach().clone()
    plainly(model, host, optimizer, 3)
    assert_same_bits(ours.detach(), before)
    assert_follows(model, host)


def test_clipping_the_model_raises():
    model, host, *_ = stepped()
    backward(model, 3)
    with pytest.raises(RuntimeError, match=r"on the host. Clip the parameters of mcf.host.weights"):
        clip_grad_norm_(model.parameters(), 1.0)
    assert clip_grad_norm_(host.parameters(), 1.0) > 0


def test_an_optimizer_of_the_model_raises():
    model, host, *_ = stepped()
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model, 3)
    with pytest.raises(RuntimeError, match=r"AdamW has 0.weight, .* AdamW\(host.parameters"):
        optimizer.step()
    host.remove()
    optimizer.step()


def test_zero_grad_of_a_part_of_the_model():
    model, host, *_ = stepped()
    backward(model, 3)
    model[0].zero_grad()
    assert host.get_parameter("0.weight").grad is None
    assert host.get_parameter("3.weight").grad is not None
    model.zero_grad(set_to_none=False)
    assert not host.get_parameter("3.weight").grad.any()


@contextlib.contextmanager
def failing(model, name):
    def fail(p):
        raise ZeroDivisionError("of a hook")

    handle = model.get_parameter(name).register_post_accumulate_grad_hook(fail)
    yield
    handle.remove()


def test_errors_beside_backward_come_out_of_it():
    model, host, optimizer, *_ = stepped(mcf.bf16i8)
    mcf.step_in_backward(host, optimizer, bucket_bytes=0)
    with failing(host, "1.weight"), pytest.raises(ZeroDivisionError, match="of a hook"):
        backward(model, 3)
    assert_follows(model, host)  # also what has stepped
    optimizer.step()
    plainly(model, host, optimizer, 4)
    assert_follows(model, host)
    backward(model, 5)
    with pytest.raises(mcf.errors.StepInBackwardError, match="another gradient after its step"):
        backward(model, 6)


def test_a_hook_of_the_model_that_raises_loses_nothing():
    model, host, optimizer, *_ = stepped()
    with failing(model, "0.bias"), pytest.raises(ZeroDivisionError):
        backward(model, 3)
    model.zero_grad()
    optimizer.zero_grad()
    plainly(model, host, optimizer, 4)
    assert_follows(model, host)


def test_removed_and_made_again():
    model, host, _, _, theirs = stepped()
    with pytest.raises(ValueError, match=r"HostWeights\(7 parameters\) takes the gradients"):
        mcf.host.weights(model)
    with pytest.raises(ValueError, match=r"has a handle|takes the gradients"):
        mcf.order_free_gradients(model, microbatches=2)
    host.remove()
    backward(model, 3)
    assert theirs.grad is not None
    model.zero_grad()
    with mcf.host.weights(model, mcf.bf16i8) as other:
        backward(model, 3)
        assert other.get_parameter("0.weight").grad is not None
    assert repr(other) == "HostWeights(7 parameters, removed)"


def test_lives_as_long_as_the_model_and_is_collected_with_it():
    model = network()
    optimizer = torch.optim.SGD(mcf.host.weights(model, mcf.bf16i8).parameters(), lr=0.1)
    gc.collect()
    before = model[0].weight.detach().clone()
    plainly(model, model, optimizer, 0)
    assert not torch.equal(model[0].weight, before)
    known = weakref.ref(model), weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in known] == [None, None]


def test_copies():
    model, host, *_ = stepped()
    average = torch.optim.swa_utils.AveragedModel(host)
    average.update_parameters(host)
    assert_same_bits(dict(average.module.state_dict()), dict(host.state_dict()))
    other = copy.deepcopy(model)
    backward(other, 3)
    assert other[0].weight.grad is not None
    again = pickle.loads(pickle.dumps(model))
    backward(again, 3)
    assert again[0].weight.grad is not None
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(host)


def test_meters_and_deltas():
    model, host, optimizer, *_ = stepped(mcf.bf16i8)
    server = copy.deepcopy(model)
    source = mcf.deltas(optimizer, names=host)
    mcf.apply_deltas(server, source.take())
    meter = mcf.EDQ(optimizer, names=host)
    for step in range(3, 6):
        plainly(model, host, optimizer, step)
    assert 0.9 < meter.last["ratio"] < 1.1
    mcf.apply_deltas(server, source.take())
    assert_same_bits(dict(server.state_dict()), dict(model.state_dict()))


def test_compiled_models_step_on_the_host():
    model, other = network(), network()
    host, expected = mcf.host.weights(model, mcf.bf16i8), mcf.host.weights(other, mcf.bf16i8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    take = torch.compile(lambda optimizer: optimizer.step(), backend="aot_eager")
    for net, weights in ((compiled, host), (other, expected)):
        optimizer = OPTIMIZERS["fused compact"](weights.parameters())
        for step in range(3):
            backward(net, step)
            take(optimizer) if net is compiled else optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(dict(host.named_parameters()), dict(expected.named_parameters()))
    assert_follows(model, host)


REFUSED = {
    "no module": (lambda: torch.ones(2), {}, TypeError, "got Tensor; give a module"),
    "float32": (lambda: nn.Linear(2, 2), {}, ValueError, r"with model.to\(torch.bfloat16\)"),
    "another base": (network, {"format": mcf.fp16i8}, ValueError, "no parameter of torch.float16"),
    "another base by name": (
        network,
        {"overrides": {"3.weight": mcf.fp16i8}},
        ValueError,
        r"3.weight of shape \(8, 64\) is torch.bfloat16 on the device, and fp16i8 has terms of",
    ),
    "no data": (
        lambda: nn.Linear(2, 2, device="meta", dtype=torch.bfloat16),
        {},
        ValueError,
        "weight has no data yet; materialize",
    ),
    "lazy": (lambda: nn.LazyLinear(2, dtype=torch.bfloat16), {}, ValueError, "no data yet"),
    "expansions": (
        lambda: mcf.as_expansion(nn.Linear(2, 2)),
        {},
        ValueError,
        r"weight of shape \(2, 2\) is in bf16x2 already; make the weights of a plain model.*; "
        r"host = mcf.host.weights\(model\); host.load_state_dict\(state\)",
    ),
    "no staging": (network, {"staging_bytes": 0}, ValueError, "staging_bytes=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, options, kind, message = REFUSED[case]
    model = make()
    with pytest.raises(kind, match=message):
        mcf.host.weights(model, **options)
    if isinstance(model, nn.Sequential):  # it was left as it was
        mcf.host.weights(model)
