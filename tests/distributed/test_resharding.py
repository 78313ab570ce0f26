"""torch.distributed.checkpoint keeps every term, and divides anew for other numbers of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import mcftensor as mcf
from mcftensor.tensor.components import local
from support.helpers import IN_MODULES, assert_same_terms, sample
from support.ranks import on_ranks


def network(format=None, seed=0):
    """Shards that are even, uneven (5 and 7 rows) and empty (1 row), and a buffer."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 5), nn.LayerNorm(5), nn.Dropout(0.2), nn.Linear(5, 1)
    )
    model.register_buffer("steps", torch.tensor(seed))
    model = mcf.as_expansion(model, format)
    for i, p in enumerate(model.parameters()):
        p.data = sample(p.format, *p.shape, seed=10 * seed + i)
    return model


class Run:
    """A model on all ranks, or one, and its optimizer."""

    def __init__(self, format=None, seed=0, mode="plus", **path):
        self.model = network(format, seed)
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 1e-2, **path or {"foreach": False}
        )
        if mode:
            mcf.collage(self.optimizer, mode)

    def train(self, steps, start=0):
        rank = dist.get_rank() if dist.is_initialized() else 0
        for step in range(start, start + steps):
            tokens = torch.arange(6).add(step + rank) % 7
            self.optimizer.zero_grad()
            self.model(tokens).square().mean().backward()
            self.optimizer.step()
        return self

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def set(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return self


def whole(state):
    """A copy of it that is not divided."""

    def gather(x):
        x = x.detach()
        return (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()

    return tree_map_only(torch.Tensor, gather, state)


def assert_same_state(x, y):
    if isinstance(x, dict):
        assert x.keys() == y.keys()
        for name, value in x.items():
            assert_same_state(value, y[name])
    elif isinstance(x, mcf.MCFTensor):
        assert_same_terms(x, y)
        assert x.writes == y.writes
        assert x._count == y._count  # and the salt
    elif isinstance(x, torch.Tensor):
        assert type(y) is torch.Tensor
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    else:
        assert x == y


KINDS = ("whole", "terms", "async", "async-terms")


@on_ranks(2)
def save(folder, format):
    run = Run(format).train(2)
    state, expected = run.state(), whole(run.state())
    dcp.save(state, checkpoint_id=f"{folder}/whole")
    dcp.save(mcf.checkpoint.as_terms(state), checkpoint_id=f"{folder}/terms")
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(run.model, options=gathered)
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")
        mcf.save_file(full, f"{folder}/model.safetensors")
    with pytest.raises(mcf.errors.CheckpointError, match="full_state_dict=True"):
        mcf.save_file(run.model, folder)
    # Their messages would be taken for those of the training.
    groups = [dist.new_group() for _ in range(2)]
    writing = [
        dcp.async_save(x, checkpoint_id=f"{folder}/{name}", process_group=group)
        for (name, x), group in zip(
            {"async": state, "async-terms": mcf.checkpoint.as_terms(state)}.items(),
            groups,
            strict=True,
        )
    ]
    run.train(1)  # meanwhile
    for future in writing:
        future.result()
    with pytest.raises(AssertionError):
        assert_same_state(expected, whole(run.state()))
    plain = fully_shard(mcf.as_plain(network(seed=3), torch.float32))
    dcp.save({"model": get_model_state_dict(plain)}, checkpoint_id=f"{folder}/plain")


@on_ranks(2)
def goes_on_to_the_bit(format, mode, by_terms, folder):
    torch.manual_seed(4 + dist.get_rank())
    whole_run = Run(format, seed=5, mode=mode).train(4)
    torch.manual_seed(4 + dist.get_rank())
    stopped = Run(format, seed=5, mode=mode).train(2)
    state = stopped.state()
    dcp.save(mcf.checkpoint.as_terms(state) if by_terms else state, checkpoint_id=folder)
    random = torch.get_rng_state()
    resumed = Run(format, seed=6, mode=mode)
    state = resumed.state()
    dcp.load(
        mcf.checkpoint.as_terms(state) if by_terms else state, checkpoint_id=folder
    )  # in place
    torch.set_rng_state(random)
    resumed.set(state).train(2, start=2)
    assert_same_state(whole(whole_run.state()), whole(resumed.state()))


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *((None, mode) for mode in ("light", "plus", "full", "compact", "compact4")),
        *((f, None) for f in IN_MODULES),
    ],
    ids=str,
)
@pytest.mark.parametrize("by_terms", [False, True], ids=["whole", "terms"])
def test_a_resumed_run_has_the_bits_of_a_whole_one(ranks, format, mode, by_terms, tmp_path):
    goes_on_to_the_bit(ranks, format=format, mode=mode, by_terms=by_terms, folder=str(tmp_path))


@on_ranks(2)
def what_another_program_saved(folder):
    """Terms of eight rows, of which the second rank is to have the last four."""
    mesh = init_device_mesh("cpu", (2,))
    zeros = mcf.as_expansion(torch.zeros(8), mcf.bf16x2)
    x = distribute_tensor(zeros, mesh, [Shard(0)])
    leading, tail = (torch.full((8,), v).bfloat16() for v in (1 + 2**-7, 2**-8))
    for last, error in {
        2**-8: None,
        0.5: "that do not fit together",
        torch.nan: "not finite",
    }.items():
        tail[-1] = last
        saved = {"model": {"x": leading, "x.bf16x2.term1": tail}}
        dcp.save(saved, checkpoint_id=f"{folder}/{last}")
        state = {"model": mcf.checkpoint.as_terms({"x": x})}
        if error is None:
            dcp.load(state, checkpoint_id=f"{folder}/{last}")
        else:
            with pytest.raises(CheckpointException, match=f"the terms of x .*{error}") as info:
                dcp.load(state, checkpoint_id=f"{folder}/{last}")
            assert list(info.value.failures) == [1]
        first, second = x.to_local().components
        rows = 3 if dist.get_rank() else 4
        assert first[:rows].tolist() == [1 + 2**-6] * rows
        assert second[:rows].tolist() == [-(2**-8)] * rows


def test_sharded_terms_that_another_program_saved(ranks, tmp_path):
    what_another_program_saved(ranks, folder=str(tmp_path))


def load(run, folder, kind):
    state = run.state()
    if "terms" in kind:
        terms = mcf.checkpoint.as_terms(state)
        dcp.load(terms, checkpoint_id=f"{folder}/{kind}")
        state = mcf.checkpoint.from_terms(terms)
    else:
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
    run.set(state)


def check(folder, format):
    """Load in whatever way this process is part of."""
    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    for kind in KINDS:
        run = Run(format, seed=1)
        load(run, folder, kind)
        assert_same_state(expected, whole(run.state()))
    other = Run(mcf.fp32x2, seed=1)
    state = {"model": get_model_state_dict(other.model)}
    dcp.load(state, checkpoint_id=f"{folder}/whole")
    for name, x in whole(state)["model"].items():
        y = expected["model"][name]
        if isinstance(x, mcf.MCFTensor):
            assert_same_terms(x, mcf.as_expansion(y, mcf.fp32x2))
    before = whole(state)
    with pytest.raises(CheckpointException, match=r"Missing key.*fp32x2\.term1"):
        dcp.load(mcf.checkpoint.as_terms(state), checkpoint_id=f"{folder}/terms")
    assert_same_state(before, whole(state))
    plain = mcf.as_plain(network(seed=1), torch.float32)
    plain = fully_shard(plain) if dist.is_initialized() else plain
    state = {"model": get_model_state_dict(plain)}
    dcp.load(state, checkpoint_id=f"{folder}/whole")
    for name, x in whole(state)["model"].items():
        y = expected["model"][name]
        assert torch.equal(x, mcf.as_plain(y, x.dtype) if x.is_floating_point() else y)
    state = {"model": get_model_state_dict(other.model)}
    dcp.load(state, checkpoint_id=f"{folder}/plain")
    for name, x in whole(state)["model"].items():
        y = mcf.as_plain(network(seed=3), torch.float32).state_dict()[name]
        if isinstance(x, mcf.MCFTensor):
            assert_same_terms(x, mcf.as_expansion(y, mcf.fp32x2))


@on_ranks(3)
def check_on_ranks(folder, format):
    check(folder, format)
    with pytest.raises(mcf.errors.CheckpointError, match="DTensor; load before"):
        mcf.load_file(folder, Run().model)


def compact(mode, seed=0):
    return Run(mcf.bf16i8, seed=seed, mode=mode, fused=True)


@on_ranks(2)
def save_compact(folder, mode, moments):
    run = compact(mode).train(2)
    state = run.state()
    dcp.save(state, checkpoint_id=f"{folder}/whole")
    dcp.save(mcf.checkpoint.as_terms(state), checkpoint_id=f"{folder}/terms")
    expected = whole(state)
    formats = {getattr(x, "format", None) for x in tree_leaves(expected["optimizer"])}
    assert {*moments, mcf.bf16i16} <= formats
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")


def check_compact(folder, mode):
    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    for kind in ("whole", "terms"):
        run = compact(mode, seed=1)
        load(run, folder, kind)
        assert_same_state(expected, whole(run.state()))
        for states in run.optimizer.state.values():
            assert not any(getattr(local(x), "is_part", False) for x in states.values())
        run.train(1)


@on_ranks(3)
def check_compact_on_ranks(folder, mode):
    check_compact(folder, mode)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("mode", "moments"),
    [("compact", (mcf.mxfp8, mcf.ue5m3)), ("compact4", (mcf.q4, mcf.ue4))],
)
def test_rows_of_blocks_from_two_ranks_to_three_and_to_one(ranks, mode, moments, tmp_path):
    save_compact(ranks, folder=str(tmp_path), mode=mode, moments=moments)
    check_compact_on_ranks(ranks, folder=str(tmp_path), mode=mode)
    check_compact(tmp_path, mode)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    "format",
    [
        None,
        mcf.bf16i8,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (IN_MODULES[0], IN_MODULES[2])),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_ranks_to_three_and_to_one(ranks, format, tmp_path):
    save(ranks, folder=str(tmp_path), format=format)
    check_on_ranks(ranks, folder=str(tmp_path), format=format)
    check(tmp_path, format)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)["model"]
    assert_same_state(expected, mcf.load_file(tmp_path))


@on_ranks(2)
def trained_in_part(folder, format):
    run = Run(format, mode=None).train(2)
    dcp.save(run.state(), checkpoint_id=f"{folder}/two")
    scaled(run)
    if dist.get_rank() == 0:
        torch.save(whole(run.state()), f"{folder}/expected.pt")
    else:
        whole(run.state())


def scaled(run):
    """The same writes on however many ranks, which gradients are not."""
    with torch.no_grad():
        for x in (*run.model.parameters(), *(s["exp_avg"] for s in run.optimizer.state.values())):
            for _ in range(3):
                x.mul_(0.99)


def goes_on_elsewhere(folder, format):
    run = Run(format, seed=1, mode=None)
    state = run.state()
    dcp.load(state, checkpoint_id=f"{folder}/two")
    scaled(run.set(state))
    found = whole(run.state())
    expected = torch.load(f"{folder}/expected.pt", weights_only=True)
    assert_same_state(expected, found)


@on_ranks(3)
def goes_on_on_three(folder, format):
    goes_on_elsewhere(folder, format)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("format", IN_MODULES, ids=str)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_writes_have_the_same_bits_on_other_numbers_of_ranks(ranks, format, tmp_path):
    """Of parameters that are divided along their first dimension."""
    trained_in_part(ranks, folder=str(tmp_path), format=format)
    goes_on_on_three(ranks, folder=str(tmp_path), format=format)
    goes_on_elsewhere(tmp_path, format)
