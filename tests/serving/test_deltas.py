"""Deltas: a plain model that is kept current is the trainer's, bit by bit."""

import copy
import json

import pytest
import torch
from torch import nn

import mcftensor as mcf

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.bf16i16, mcf.bf16i8, mcf.fp16i16, mcf.fp16i8, None]
WAYS = {
    "fused": lambda ps, lr: torch.optim.AdamW(ps, lr=lr, fused=True),
    "foreach": lambda ps, lr: torch.optim.AdamW(ps, lr=lr, foreach=True),
    "for-loop": lambda ps, lr: torch.optim.AdamW(ps, lr=lr, foreach=False),
    "sgd": lambda ps, lr: torch.optim.SGD(ps, lr=100 * lr, momentum=0.9),
    "compact": lambda ps, lr: mcf.collage(torch.optim.AdamW(ps, lr=lr, fused=True), "compact"),
    "compact4": lambda ps, lr: mcf.collage(torch.optim.AdamW(ps, lr=lr, fused=True), "compact4"),
}


def a_model(format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(65, 33), nn.Tanh(), nn.Linear(33, 7))
    if format is None:
        return model.to(torch.bfloat16)
    return mcf.as_expansion(model, format)


def backward(model, seed):
    p = next(model.parameters())
    x = torch.randn(8, 65, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
    model(x).square().mean().backward()


def a_step(model, optimizer, seed):
    optimizer.zero_grad()
    backward(model, seed)
    optimizer.step()


def plain(model):
    """What a server holds, the leading terms, in memory of its own."""
    own = copy.deepcopy(model)
    if not any(isinstance(p, mcf.MCFTensor) for p in own.parameters()):
        return own
    own = mcf.as_plain(own)
    with torch.no_grad():
        for x, p in zip(own.parameters(), model.parameters(), strict=True):
            x.copy_(served_now(p))
    return own


def are_equal(server, model):
    pairs = zip(server.parameters(), plain(model).parameters(), strict=True)
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_server_follows(format, way):
    if format is None and way.startswith("compact"):
        pytest.skip("a mode is for expansions")
    model = a_model(format)
    server = plain(model)
    optimizer = WAYS[way](model.parameters(), 1e-4)
    deltas = mcf.deltas(optimizer, names=model)
    for seed in range(6):
        before = [x.clone() for x in server.parameters()]
        a_step(model, optimizer, seed)
        delta = deltas.take()
        mcf.apply_deltas(server, delta)
        assert are_equal(server, model)
        changed = sum(int((x != y).sum()) for x, y in zip(before, server.parameters(), strict=True))
        assert 0 < changed <= delta.changed <= delta.elements


@pytest.mark.parametrize("format", [mcf.bf16x2, None], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_only_what_changed_is_sent(format, way):
    """Also where a step writes elements more than once, as for weight decay."""
    if format is None and way.startswith("compact"):
        pytest.skip("a mode is for expansions")
    model = a_model(format)
    optimizer = WAYS[way](model.parameters(), 1e-5)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    deltas = mcf.deltas(optimizer, names=model)
    for seed in range(3):
        old = {name: served_now(p) for name, p in model.named_parameters()}
        a_step(model, optimizer, seed)
        found = {patch.name: patch for patch in deltas.take().patches()}
        for name, p in model.named_parameters():
            new = served_now(p)
            indices = (new != old[name]).flatten().nonzero().view(-1)
            if not len(indices):
                assert name not in found
            elif len(found[name].indices) < p.numel():
                assert found[name].indices.tolist() == indices.tolist()
                assert torch.equal(found[name].values, new.flatten()[indices])
            else:  # whole, where most of it changed
                assert len(indices) > 0.5 * p.numel()


def loaded_as_vllm_does(server, patches):
    """Patches written as its loader of patches does: all of one kind, NaN for what is to stay."""
    assert len({x.indices is None for x in patches}) == 1
    with torch.no_grad():
        for name, shape, dtype, values, indices in patches:
            p = server.get_parameter(name)
            assert p.shape == shape
            assert p.dtype == values.dtype == dtype
            assert values.dim() == 1
            if indices is None:
                p.copy_(values.view(shape))
                continue
            assert indices.dtype == torch.int32
            new = torch.full((p.numel(),), torch.nan, dtype=dtype)
            new.index_copy_(0, indices.long(), values)
            p.copy_(torch.where(new.isnan(), p.flatten(), new).view(shape))


@pytest.mark.parametrize("anchor_every", [None, 2])
def test_patches_of_an_inference_engine(anchor_every):
    model = a_model(mcf.bf16x2)
    server = plain(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    deltas = mcf.deltas(optimizer, names=model, anchor_every=anchor_every)
    for seed in range(3):
        a_step(model, optimizer, seed)
        delta = deltas.take()
        loaded_as_vllm_does(server, delta.patches())
        assert are_equal(server, model)


def test_a_step_that_writes_twice():
    """Weight decay changes elements that the update then changes back."""
    torch.manual_seed(0)
    p = nn.Parameter(mcf.as_expansion(torch.randn(90_000) * 0.02, mcf.bf16i16))
    optimizer = torch.optim.AdamW([p], lr=1e-5, foreach=True, weight_decay=0.1)
    deltas = mcf.deltas(optimizer)
    for _ in range(2):
        old = served_now(p)
        p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()
        assert deltas.take().changed == int((served_now(p) != old).sum())


def test_chains_and_other_bases():
    model = a_model(mcf.bf16x2)
    server, late = plain(model), plain(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    deltas = mcf.deltas(optimizer, names=model)
    chain = []
    for seed in range(3):
        a_step(model, optimizer, seed)
        chain.append(deltas.take())
    kept = [x.clone() for x in late.parameters()]
    with pytest.raises(mcf.errors.CheckpointError, match="is not the base of delta 0"):
        mcf.apply_deltas(late, chain[1:])
    assert all(torch.equal(x, y) for x, y in zip(kept, late.parameters(), strict=True))
    mcf.apply_deltas(server, chain)
    assert are_equal(server, model)
    with pytest.raises(mcf.errors.CheckpointError, match="is not the base"):
        mcf.apply_deltas(server, chain[-1])
    mcf.apply_deltas(late, deltas.take(anchor=True))
    assert are_equal(late, model)


def test_an_anchor_every_so_many():
    model = a_model(mcf.bf16x2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    deltas = mcf.deltas(optimizer, names=model, anchor_every=3)
    assert [deltas.take().is_anchor for _ in range(5)] == [True, False, False, True, False]


OUTSIDE = {
    "copy_": lambda model: model[0].weight.copy_(torch.randn(33, 65)),
    "load_state_dict": lambda model: model.load_state_dict(a_model(mcf.bf16x2).state_dict()),
    "index_put_": lambda model: model[0].weight.__setitem__((3, slice(None)), 0.25),
    "fill_": lambda model: model[0].weight.fill_(0.125),
    "mul_": lambda model: model[0].weight.mul_(1.01),
    "data": lambda model: setattr(model[0].weight, "data", model[0].weight.data * 1.01),
    "component": lambda model: model[0].weight.components[0].mul_(1.25),
}


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("way", OUTSIDE)
@pytest.mark.parametrize("format", [mcf.bf16x2, None], ids=str)
def test_what_is_written_outside_of_a_step_is_sent(way, format):
    if format is None and way in ("load_state_dict", "component"):
        format = mcf.bf16i16
    model = a_model(format)
    server = plain(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    deltas = mcf.deltas(optimizer, names=model)
    for seed in range(3):
        a_step(model, optimizer, seed)
        with torch.no_grad():
            OUTSIDE[way](model)
        mcf.apply_deltas(server, deltas.take())
        assert are_equal(server, model)
        a_step(model, optimizer, seed)
        mcf.apply_deltas(server, deltas.take())
        assert are_equal(server, model)


@pytest.mark.parametrize(
    "format", [mcf.e4m3i8, mcf.scaling.scaled(torch.float16)], ids=lambda f: f.name
)
def test_other_formats(format):
    torch.manual_seed(0)
    model = mcf.as_expansion(nn.Linear(64, 32), format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = {n: served_now(p) for n, p in model.named_parameters()}
    deltas = mcf.deltas(optimizer, names=model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
        mcf.apply_deltas(held, deltas.take())
        for name, p in model.named_parameters():
            assert torch.equal(held[name], served_now(p))


def served_now(p):
    p = p.detach()
    return (p.compute_tensor if isinstance(p, mcf.MCFTensor) else p).clone()


def test_a_write_past_pytorch_is_sent():
    model = a_model(mcf.bf16x2)
    server = plain(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    deltas = mcf.deltas(optimizer, names=model)
    model[0].weight.components[0].view(torch.int16).numpy()[3, 4] ^= 5
    delta = deltas.take()
    assert delta.changed == 1
    mcf.apply_deltas(server, delta)
    assert are_equal(server, model)


def test_what_has_its_old_value_again_is_not_sent():
    model = a_model(mcf.bf16x2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    deltas = mcf.deltas(optimizer, names=model)
    held = copy.deepcopy(model.state_dict())
    a_step(model, optimizer, 0)
    model.load_state_dict(held)
    assert deltas.take().changed == 0


def test_two_servers_follow_at_their_own_pace():
    model = a_model(mcf.bf16i8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    servers = [plain(model), plain(model)]
    both = [mcf.deltas(optimizer, names=model) for _ in servers]
    for seed in range(6):
        a_step(model, optimizer, seed)
        for server, deltas, every in zip(servers, both, (1, 3), strict=True):
            if (seed + 1) % every == 0:
                mcf.apply_deltas(server, deltas.take())
                assert are_equal(server, model)


def test_a_copy_is_kept_and_nothing_is_hung_on_the_optimizer():
    model = a_model(mcf.bf16x2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    hooks = dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)
    deltas = mcf.deltas(optimizer, names=model)
    now = dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)
    assert now == hooks
    sent = sum(x.nbytes for x, _ in deltas._sent.values())
    assert sent == 2 * sum(p.numel() for p in model.parameters())
    deltas.remove()
    assert not deltas._sent


def test_a_format_may_change():
    model = a_model(mcf.bf16i8)
    server = plain(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    deltas = mcf.deltas(optimizer, names=model)
    for seed in range(4):
        a_step(model, optimizer, seed)
        if seed == 1:
            mcf.change_format(model, optimizer, mcf.bf16i16)
        mcf.apply_deltas(server, deltas.take())
        assert are_equal(server, model)


def test_files_and_damage(tmp_path):
    model = a_model(mcf.bf16x2)
    server = plain(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    deltas = mcf.deltas(optimizer, names=model)
    a_step(model, optimizer, 0)
    delta = deltas.take()
    delta.save(tmp_path / "1.safetensors")
    damaged = bytearray(delta.data)
    damaged[-3] ^= 1
    with pytest.raises(mcf.errors.CheckpointError, match="is damaged"):
        mcf.apply_deltas(server, bytes(damaged))
    mcf.apply_deltas(server, tmp_path / "1.safetensors")
    assert are_equal(server, model)
    mcf.save_file(model, tmp_path / "2.safetensors")
    with pytest.raises(mcf.errors.CheckpointError, match="is no delta"):
        mcf.apply_deltas(server, tmp_path / "2.safetensors")


def test_refusals():
    model = a_model(mcf.bf16x2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(TypeError, match="give a torch"):
        mcf.deltas(model)
    with pytest.raises(ValueError, match="anchor_every=0"):
        mcf.deltas(optimizer, anchor_every=0)
    deltas = mcf.deltas(optimizer)
    a_step(model, optimizer, 0)
    delta = deltas.take()
    with pytest.raises(mcf.errors.CheckpointError, match="names=model"):
        mcf.apply_deltas(plain(model), delta)
    deltas.remove()
    deltas = mcf.deltas(optimizer, names=model)
    a_step(model, optimizer, 0)
    with pytest.raises(TypeError, match="is for a plain model"):
        mcf.apply_deltas(model, deltas.take())
    with pytest.raises(mcf.errors.CheckpointError, match="and in delta 0 of BF16"):
        mcf.apply_deltas(plain(model).float(), deltas.take())


def run_of(format, make, steps):
    model = a_model(format)
    server = plain(model)
    optimizer = make(model)
    deltas = mcf.deltas(optimizer, names=model, anchor_every=100)
    for seed in range(steps):
        a_step(model, optimizer, seed)
        mcf.apply_deltas(server, deltas.take())
        assert are_equal(server, model)


def muon(model):
    model[0].bias.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-4)


RUNS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True),
    "Muon": muon,
    "compact": lambda model: WAYS["compact"](model.parameters(), 1e-5),
}


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize("steps", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_long_run(way, steps):
    run_of(mcf.bf16x2, RUNS[way], steps)


def test_the_metadata_say_what_is_there():
    model = a_model(mcf.bf16x2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = mcf.deltas(optimizer, names=model).take(anchor=True).data
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    said = json.loads(head["__metadata__"]["mcftensor.delta"])
    assert said["number"] == 0
    assert said["anchor"]
    assert list(said["parameters"]) == [name for name, _ in model.named_parameters()]


def test_a_tied_weight_has_all_its_names():
    """The server's model may name the other one first."""

    def tied(*names):
        model = nn.Module()
        for name in names:
            model.add_module(name, nn.Linear(4, 4, bias=False))
        model.get_submodule(names[1]).weight = model.get_submodule(names[0]).weight
        return model

    model = mcf.as_expansion(tied("encoder", "decoder"))
    server = tied("decoder", "encoder").to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        server.encoder.weight.copy_(mcf.as_plain(model.encoder.weight))
    deltas = mcf.deltas(optimizer, names=model)
    model.encoder.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    optimizer.step()
    mcf.apply_deltas(server, deltas.take())
    assert torch.equal(server.decoder.weight, mcf.as_plain(model.decoder.weight))
