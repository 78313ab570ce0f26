"""Damaged and hostile checkpoints: refused in one line, or read as they were; nothing runs."""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import zipfile

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.checkpoint.safetensors_files import KEY, sealed
from support.accidents import ACCIDENTS
from support.helpers import same_terms, sample

SafetensorError = pytest.importorskip("safetensors").SafetensorError


class Model(nn.Module):
    """Expansions in three formats, two tensors in blocks, plain buffers, a tie."""

    def __init__(self, seed):
        super().__init__()
        stochastic = mcf.Format(torch.bfloat16, 2, rounding="stochastic")
        self.a = nn.Parameter(sample(mcf.bf16x2, 4, 3, seed=seed))
        self.b = nn.Parameter(sample(mcf.bf16x3, 5, seed=seed))
        self.c = nn.Parameter(sample(stochastic, 3, seed=seed))
        self.tied = self.a
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("first", sample(mcf.mxfp8, 2, 40, seed=seed).mul_(0.9).add_(0))
        self.register_buffer("second", sample(mcf.ue5m3, 3, 5, 2, seed=seed))
        self.register_buffer("mean", torch.full((3,), seed + 0.1))


SAVED, OTHER = Model(1), Model(2)
NAMES = {"a", "b", "c", "tied", "steps", "first", "second", "mean"}


def same(x, y):
    if isinstance(x, mcf.MCFTensor):
        return isinstance(y, mcf.MCFTensor) and same_terms(x, y) and x.writes == y.writes
    return type(x) is type(y) and x.dtype == y.dtype and torch.equal(x, y)


def holds(state, seed):
    expected = Model(seed).state_dict()
    return state.keys() == NAMES and all(same(x, state[name]) for name, x in expected.items())


def load(path, model=None):
    """What `load_file` gives, or None where it refuses, in one line."""
    try:
        return mcf.load_file(path, model)
    except mcf.errors.CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    return None


def try_to_load(path):
    """Whether the checkpoint was read; as it was saved then, and else the model is untouched."""
    model = Model(3)
    read = load(path, model) is not None
    assert holds(model.state_dict(), 1 if read else 3)
    state, expected = load(path) or {}, SAVED.state_dict()
    assert all(same(expected[name], x) for name, x in state.items() if name in NAMES)
    return read


# ------------------------------------------------------------------------------------ headers


def parsed(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def composed(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def seal_of(header):
    return json.loads(header["__metadata__"][KEY])


def with_seal(header, seal):
    seal = {k: v for k, v in seal.items() if k not in ("crc32", "version")}
    header["__metadata__"][KEY] = json.dumps(sealed(seal))


STRANGE = [
    None,
    0,
    -1,
    2**70,
    1.5,
    True,
    "",
    "x",
    "../x",
    "bf16x2",
    [],
    [0],
    {},
    {"a": "b"},
    "\0",
    "a",
]


def rename(header, random_):
    names = [name for name in header if name != "__metadata__"]
    name = random_.choice(names)
    changes = [
        "bf16x3",
        "bf16x9",
        "bf16x0",
        "fp16x2",
        "bf16x2sr",
        "fp32x2",
        "term2",
        "term0",
        "term9",
        "mxfp8",
        "ue5m3",
        "ue5m3rn",
        "codes",
        "scales",
        "writes",
    ]
    other = name
    for old in (
        *("bf16x2sr", "bf16x2", "bf16x3", "term1", "term2"),
        *("mxfp8", "ue5m3", "scales", "writes"),
    ):
        if old in name:
            other = name.replace(old, random_.choice(changes))
            break
    else:
        other = random_.choice(["", "z", f"{name}.bf16x2.term1", "é"])
    return {other if n == name else n: x for n, x in header.items()}


def exchange(header, random_):
    a, b = random_.sample([name for name in header if name != "__metadata__"], 2)
    header[a], header[b] = header[b], header[a]
    return header


def reshape(header, random_):
    entry = header[random_.choice([name for name in header if name != "__metadata__"])]
    key = random_.choice(list(entry))
    if key == "shape" and random_.random() < 0.6:
        entry[key] = random_.choice(
            [entry[key][::-1], [*entry[key], 1], [1, *entry[key]], [-1, -4]]
        )
    elif key == "dtype":
        entry[key] = random_.choice(["F16", "I16", "BF16", "F32", "F4", "bf16", None])
    else:
        entry[key] = random_.choice(STRANGE)
    return header


def drop(header, random_):
    del header[random_.choice([name for name in header if name != "__metadata__"])]
    return header


def lie(header, random_):
    """Say something else in the metadata, with a digest that fits."""
    seal = seal_of(header)
    key = random_.choice(list(seal))
    if key == "tied" and random_.random() < 0.7:
        seal[key] = {random_.choice(["x", "a", "steps"]): random_.choice(["tied", "z", "b"])}
    else:
        seal[key] = random_.choice(STRANGE)
    if random_.random() < 0.5:
        header["__metadata__"][KEY] = json.dumps(seal)
    else:
        with_seal(header, seal)
    return header


def lie_more(header, random_):
    header["__metadata__"][KEY] = random_.choice(
        ["", "{", "[]", "null", "3", "{}", "[" * 100_000, '{"crc32": "00000000"}', "\ud7ff"]
    )
    return header


def lose(header, random_):
    """The digests, as if their name had been altered."""
    texts = header["__metadata__"]
    texts[random_.choice(["mcftensos", "format", "note"])] = texts.pop(KEY)
    return header


HEADERS = (rename, rename, exchange, reshape, reshape, drop, lie, lie, lie_more, lose)


def fuzz_a_file(folder, rounds, seed):
    random_ = random.Random(seed)
    path = folder / "model.safetensors"
    mcf.save_file(SAVED, path, metadata={"note": "x" * 20})
    content = path.read_bytes()
    assert try_to_load(path)
    read = 0
    for _ in range(rounds):
        if random_.random() < 0.5:
            changed = random_.choice(ACCIDENTS)(content, random_)
        else:
            mutate = random_.choice(HEADERS)
            header, data = parsed(content)
            changed = composed(mutate(header, random_), data)
        if changed == content:
            continue
        path.write_bytes(changed)
        read += try_to_load(path)
    assert 0 < read < rounds / 5


@pytest.mark.parametrize("name", ["mcftensos", "format"])
def test_digests_under_another_name(name, tmp_path):
    path = tmp_path / "model.safetensors"
    mcf.save_file(SAVED, path)
    header, data = parsed(path.read_bytes())
    header["__metadata__"][name] = header["__metadata__"].pop(KEY)
    path.write_bytes(composed(header, data[:-1] + b"!"))
    with pytest.raises(mcf.errors.CheckpointError, match="its digests are not under mcftensor"):
        mcf.load_file(path)


def test_files(tmp_path):
    fuzz_a_file(tmp_path, 200, seed=0)  # the rest in `test_many_files`


@pytest.mark.slow
def test_many_files(tmp_path):
    fuzz_a_file(tmp_path, 40_000, seed=1)


# ------------------------------------------------------------------------------------ folders


def write_shards(folder):
    """A checkpoint in several files, and one shard of another one."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, model in (("other", OTHER), ("saved", SAVED)):
        (folder / name).mkdir(parents=True)
        mcf.save_file(model, folder / name, max_shard_size=24)
    return folder / "saved"


def fuzz_a_folder(folder, rounds, seed):
    random_ = random.Random(seed)
    saved = write_shards(folder)
    index = saved / "model.safetensors.index.json"
    shards = sorted(saved.glob("*.safetensors"))
    foreign = sorted((folder / "other").glob("*.safetensors"))
    contents = {file: file.read_bytes() for file in (index, *shards)}
    assert len(shards) > 3
    read = 0
    for _ in range(rounds):
        target = random_.choice([index, random_.choice(shards)])
        kind = random_.random()
        if kind < 0.6:
            target.write_bytes(random_.choice(ACCIDENTS)(contents[target], random_))
        elif kind < 0.7:
            target.unlink()
        elif target != index:
            source = random_.choice([foreign[shards.index(target)], random_.choice(shards)])
            if source == target:
                continue
            target.write_bytes(contents[source] if source in contents else source.read_bytes())
        else:
            content = json.loads(contents[index])
            where = content["weight_map"]
            name = random_.choice(list(where))
            if kind < 0.8:
                where[name] = random_.choice([*{*where.values()} - {where[name]}, *STRANGE])
            elif kind < 0.9:
                del where[name]
            else:
                content[random_.choice(["metadata", "weight_map"])] = random_.choice(STRANGE)
            index.write_text(json.dumps(content))
        read += try_to_load(saved)
        for file, original in contents.items():
            file.write_bytes(original)
    assert try_to_load(saved)
    assert 0 < read < rounds / 5


def test_folders(tmp_path):
    fuzz_a_folder(tmp_path, 80, seed=0)  # the rest in `test_many_folders`


@pytest.mark.slow
def test_many_folders(tmp_path):
    fuzz_a_folder(tmp_path, 5_000, seed=1)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "{absolute}", "..", ".", "", "sub/../../secret.safetensors",
     "..\\secret.safetensors", "C:secret.safetensors", "secret.safetensors\0", "/etc/passwd"],
)  # fmt: skip
def test_an_index_that_leaves_its_folder(name, tmp_path):
    secret = tmp_path / "secret.safetensors"
    mcf.save_file({"x": torch.ones(2)}, secret)
    folder = tmp_path / "saved"
    (folder / "sub").mkdir(parents=True)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name.replace("{absolute}", str(secret))}}))
    for read in (mcf.load_file, lambda path: mcf.meters.audit(path, {"x": torch.ones(2)})):
        with pytest.raises(mcf.errors.CheckpointError, match="shards are files in the folder of"):
            read(folder)
    mcf.save_file({"x": torch.ones(3)}, folder)  # removes what the index names, and no more
    assert secret.exists()
    assert sorted(file.name for file in folder.iterdir()) == ["model.safetensors", "sub"]


def test_an_index_cannot_have_other_files_removed(tmp_path):
    mcf.save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "other.safetensors"}}))
    mcf.save_file({"x": torch.ones(3)}, tmp_path)
    assert (tmp_path / "other.safetensors").exists()


# ------------------------------------------------------------------------------------ pickles


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.bin", "x"])
@pytest.mark.parametrize("kind", ["torch", "legacy", "pickle"])
def test_pickles_that_would_run_code(kind, name, tmp_path):
    path, exploded = tmp_path / name, tmp_path / "exploded"
    x = sample(mcf.bf16x2, 2)
    x.__dict__["note"] = Bomb(exploded)
    content = {"x": x, "y": Bomb(exploded)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "torch")
    for read in (
        mcf.load_file,
        lambda p: mcf.load_file(p, nn.Linear(2, 2)),
        lambda p: mcf.meters.audit(p, {"x": torch.ones(2)}),
    ):
        with pytest.raises(mcf.errors.CheckpointError):
            read(path)
    with pytest.raises((pickle.UnpicklingError, SafetensorError)):
        torch.load(path, weights_only=True)
    assert not exploded.exists()
    if kind == "pickle":
        with contextlib.suppress(FileExistsError):  # by the second one
            pickle.loads(path.read_bytes())
        assert exploded.exists()


def fuzz_pickles(rounds, seed):
    """torch.load has no digests; what it gives are expansions that hold together, or an error."""
    random_ = random.Random(seed)
    buffer = io.BytesIO()
    torch.save(SAVED.state_dict(), buffer)
    with zipfile.ZipFile(buffer) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in parts if name.endswith("data.pkl"))
    loaded = 0
    for _ in range(rounds):
        changed = random_.choice(ACCIDENTS)(parts[pickled], random_)
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, changed if name == pickled else content)
        try:
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except Exception:  # noqa: BLE001
            continue
        for x in state.values() if isinstance(state, dict) else []:
            if isinstance(x, mcf.MCFTensor):
                for t, component in zip(x.components, x.format.components, strict=True):
                    assert (t.shape, t.dtype) == (component.shape(x.shape), component.dtype)
                loaded += 1
    assert loaded


def test_a_pickle_with_another_role():
    rebuild, (terms, format, role, *rest), _ = SAVED.a.detach().__reduce_ex__(2)
    assert role == "parameter"
    with pytest.raises(ValueError, match="damaged components, format or role"):
        rebuild(terms, format, "neither", *rest)


def test_altered_pickles():
    fuzz_pickles(300, seed=0)


@pytest.mark.slow
def test_many_altered_pickles():
    fuzz_pickles(20_000, seed=1)
