"""Incremental checkpoints: each of a chain gives the bits of a whole file, or is refused."""

import json
import shutil

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.errors import CheckpointError

FORMATS = [mcf.bf16x2, mcf.bf16i8, mcf.e4m3i8, mcf.bf16i8.with_rounding("balanced"), None]
WAYS = {
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=True),
    "for-loop": lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=False),
    "compact": lambda ps: mcf.collage(torch.optim.AdamW(ps, lr=1e-4, fused=True), "compact"),
}


def a_model(format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 32), nn.Linear(32, 64))
    return model.bfloat16() if format is None else mcf.as_expansion(model, format)


def everything(model, optimizer):
    """Weights, and the tensors of states, by name."""
    found = dict(model.state_dict())
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{i}.{key}": x for key, x in state.items() if isinstance(x, torch.Tensor)}
    return found


def parts(x):
    own = [x]
    if isinstance(x, mcf.MCFTensor):
        own = [*x.components, *([] if x._writes is None else [x._count])]
    return [y.detach().clone().contiguous() for y in own]


def require_same(loaded, expected):
    assert set(loaded) == set(expected)
    for name, own in expected.items():
        found = parts(loaded[name])
        assert len(found) == len(own)
        for x, y in zip(found, own, strict=True):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(*(z.reshape(-1).view(torch.uint8) for z in (x, y)))


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize(
    ("format", "way"), [(x, "fused") for x in FORMATS] + [(mcf.bf16x2, x) for x in list(WAYS)[1:]]
)
def test_any_of_a_chain_is_restored(format, way, tmp_path):
    model = a_model(format)
    optimizer = WAYS[way](model.parameters())
    expected = []
    for i in range(4):
        optimizer.zero_grad()
        model(torch.randint(0, 9, (5,))).float().square().mean().backward()
        optimizer.step()
        tensors = everything(model, optimizer)
        expected.append({name: parts(x) for name, x in tensors.items()})
        since = {"since": tmp_path / f"{i - 1}.safetensors"} if i else {}
        mcf.save_file(tensors, tmp_path / f"{i}.safetensors", **since)
    for i in (3, 0, 2, 1):
        require_same(mcf.load_file(tmp_path / f"{i}.safetensors"), expected[i])


def zoo(seed):
    torch.manual_seed(seed)
    x = torch.randint(0, 256, (8, 40), dtype=torch.uint8)
    views = [torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint32, torch.float8_e4m3fn]
    views += [torch.float16, torch.float32, torch.float64, torch.complex64, torch.float8_e8m0fnu]
    found = {str(dtype): x.clone().view(dtype) for dtype in views}
    found |= {"bool": x > 128, "transposed": x.t(), "one": torch.tensor(seed), "none": x[:0]}
    return found


@pytest.mark.with_float64("a file has a tensor of it")
def test_tensors_of_every_dtype_and_shape(tmp_path):
    old, new = zoo(0), zoo(1)
    for name in old:
        old[name] = new[name].clone().contiguous()
        old[name].view(-1)[0:1] = zoo(2)[name].reshape(-1)[0:1]
    old["gone"], new["new"] = torch.ones(3), torch.ones(4)
    old["longer"], new["longer"] = torch.ones(4), torch.ones(5)
    old["wider"], new["wider"] = torch.ones(4), torch.ones(4, dtype=torch.float64)
    new["alias"] = new["new"]
    mcf.save_file(old, tmp_path / "0.safetensors")
    mcf.save_file(
        new, tmp_path / "1.safetensors", since=tmp_path / "0.safetensors", metadata={"step": "1"}
    )
    loaded = mcf.load_file(tmp_path / "1.safetensors")
    require_same(loaded, {name: parts(x) for name, x in new.items()})
    assert loaded["alias"] is loaded["new"]


def test_only_what_changed_is_there(tmp_path):
    model = a_model(mcf.bf16x2)
    whole, part = tmp_path / "0.safetensors", tmp_path / "1.safetensors"
    mcf.save_file(model, whole)
    mcf.save_file(model, part, since=whole)
    nothing = part.stat().st_size
    with torch.no_grad():
        model[0].weight.components[0].view(-1)[5] += 1
    mcf.save_file(model, part, since=whole)
    head = part.read_bytes()
    head = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    said = {"0.weight.gaps", "0.weight.codes", "0.weight.bf16x2.sum.codes", "__metadata__"}
    assert set(head) == said
    assert head["0.weight.codes"]["shape"] == [1]
    assert nothing < part.stat().st_size < whole.stat().st_size // 4


def test_a_base_of_several_files(tmp_path):
    model = a_model(mcf.bf16x2)
    (tmp_path / "base").mkdir()
    mcf.save_file(model, tmp_path / "base", max_shard_size=6000)
    with torch.no_grad():
        model[1].weight += 0.01
    mcf.save_file(model, tmp_path / "next.safetensors", since=tmp_path / "base")
    again = a_model(mcf.bf16x2)
    mcf.load_file(tmp_path / "next.safetensors", again)
    require_same(again.state_dict(), {n: parts(x) for n, x in model.state_dict().items()})
    (tmp_path / "moved").mkdir()
    for name in ("base", "next.safetensors"):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    require_same(
        mcf.load_file(tmp_path / "moved/next.safetensors"),
        {n: parts(x) for n, x in model.state_dict().items()},
    )
    report = mcf.meters.audit(tmp_path / "moved/base", tmp_path / "moved/next.safetensors")
    assert "1.weight" in str(report)


def three(tmp_path):
    """A chain of three, whose weights differ."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for i, path in enumerate(paths):
        x[i] += 1
        mcf.save_file({"x": x}, path, **({"since": paths[i - 1]} if i else {}))
    return x, paths


@pytest.mark.parametrize("which", [0, 1])
def test_another_base_is_refused(which, tmp_path):
    x, paths = three(tmp_path)
    mcf.save_file({"x": x + 1}, paths[which])
    with pytest.raises(CheckpointError, match="is not the checkpoint since which"):
        mcf.load_file(paths[which + 1])
    with pytest.raises(CheckpointError, match="is not the checkpoint since which"):
        mcf.load_file(paths[2])


def digest_of_file(path):
    """What a file says is the digest of all of it."""
    data = path.read_bytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(head["__metadata__"]["mcftensor"])["crc32"].encode()


def test_digests_tell_a_base_that_says_it_is_the_right_one(tmp_path):
    _, paths = three(tmp_path)
    old = digest_of_file(paths[0])
    y = mcf.load_file(paths[0])["x"]
    y[999] += 1
    mcf.save_file({"x": y}, paths[0])
    data = paths[1].read_bytes()
    assert data.count(old) == 1
    paths[1].write_bytes(data.replace(old, digest_of_file(paths[0])))
    with pytest.raises(CheckpointError, match="x has another digest before"):
        mcf.load_file(paths[1])
    assert mcf.load_file(paths[1], verify=False)["x"][999] == y[999]


def test_what_cannot_be_read_is_refused(tmp_path):
    x, paths = three(tmp_path)
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="is damaged"):
        mcf.load_file(paths[2])
    paths[0].unlink()
    with pytest.raises(CheckpointError, match="is missing; put it back"):
        mcf.load_file(paths[2])
    with pytest.raises(CheckpointError, match="is missing; put it back"):
        mcf.save_file({"x": x}, tmp_path / "3.safetensors", since=paths[2])
    assert not (tmp_path / "3.safetensors").exists()


def test_a_file_that_is_its_own_base_is_refused(tmp_path):
    x = {"x": torch.ones(3)}
    mcf.save_file(x, tmp_path / "1.safetensors")
    mcf.save_file(x, tmp_path / "2.safetensors", since=tmp_path / "1.safetensors")
    shutil.copy(tmp_path / "2.safetensors", tmp_path / "1.safetensors")
    for verify in (True, False):
        with pytest.raises(CheckpointError, match="which is based on it"):
            mcf.load_file(tmp_path / "2.safetensors", verify=verify)


def test_what_cannot_be_saved_is_refused(tmp_path):
    x, paths = three(tmp_path)
    for path in paths:
        kept = path.read_bytes()
        with pytest.raises(CheckpointError, match="is needed to read"):
            mcf.save_file({"x": x}, path, since=paths[2])
        assert path.read_bytes() == kept
    with pytest.raises(ValueError, match="leave out max_shard_size"):
        mcf.save_file({"x": x}, tmp_path / "3.safetensors", since=paths[2], max_shard_size=9)
    with pytest.raises(ValueError, match=r"mcftensor\.delta"):
        mcf.save_file({"x": x}, tmp_path / "3.safetensors", metadata={"mcftensor.delta": "1"})
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"x": x}, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointError, match="has no digests"):
        mcf.save_file({"x": x}, tmp_path / "3.safetensors", since=tmp_path / "foreign.safetensors")


def test_deltas_of_plain_models_and_increments_are_told_apart(tmp_path):
    x, paths = three(tmp_path)
    with pytest.raises(CheckpointError, match="load_file reads it"):
        mcf.apply_deltas({"x": x}, paths[1])
    p = nn.Parameter(mcf.as_expansion(torch.ones(70)))
    mcf.deltas(torch.optim.SGD([p], lr=1)).take(anchor=True).save(tmp_path / "d.safetensors")
    with pytest.raises(CheckpointError, match=r"mcf\.apply_deltas applies it"):
        mcf.load_file(tmp_path / "d.safetensors")
