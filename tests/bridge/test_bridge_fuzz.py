"""Damaged checkpoints of other programs: refused in one line, or read as they were, whole."""

import dataclasses
import io
import json
import pickle
import random
import re
import shutil
import zipfile

import pytest
import torch

import mcftensor as mcf
from support import foreign
from support.accidents import ACCIDENTS


def converted(folder):
    source = foreign.torch_file(folder)
    mcf.checkpoint.convert_checkpoint(source, folder / "to", max_shard_size=200)
    source.unlink()
    return folder / "to"


LAYOUTS = foreign.EXACT | {"converted": converted}
SEALED = LAYOUTS.keys() - {"safetensors_shards", "transformers"}
"""Layouts with digests of every tensor: files of torch.save are zip archives."""


def as_plain(state_dict):
    return {name: mcf.as_plain(x, torch.float32) for name, x in state_dict.items()}


def same(state_dict, expected):
    return state_dict.keys() == expected.keys() and all(
        torch.equal(x, expected[name]) for name, x in state_dict.items()
    )


def refused(error):
    assert "\n" not in str(error)
    return False


class Target:
    """A model and its optimizer, into which nothing is loaded, or everything."""

    def __init__(self):
        torch.manual_seed(1)
        self.model = mcf.as_expansion(foreign.Model(), mcf.bf16i16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=7)
        self.before = self.weights()

    def weights(self):
        return {name: x.clone() for name, x in as_plain(self.model.state_dict()).items()}

    def load(self, source):
        """Whether it was loaded."""
        try:
            mcf.load_file(source, self.model, optimizer=self.optimizer, step=foreign.STEPS)
        except mcf.errors.CheckpointError as error:
            assert same(self.weights(), self.before)
            assert not self.optimizer.state
            assert self.optimizer.param_groups[0]["lr"] == 7
            return refused(error)
        return True


def convert(source, destination):
    """Whether it was converted."""
    try:
        mcf.checkpoint.convert_checkpoint(source, destination, step=foreign.STEPS, lossy=True)
    except mcf.errors.CheckpointError as error:
        assert not destination.exists()
        return refused(error)
    mcf.load_file(destination)
    shutil.rmtree(destination)
    return True


def try_a_damaged_one(source, is_sealed, folder):
    """Whether it was read."""
    target = Target()
    # Layouts without states are loaded without an optimizer.
    if target.load(source) and is_sealed:
        assert same(target.weights(), foreign.MASTERS)
    read = True
    try:
        found = as_plain(mcf.load_file(source))
    except mcf.errors.CheckpointError as error:
        read = refused(error)
    else:
        known = {name: x for name, x in found.items() if name in foreign.MASTERS}
        if is_sealed:
            assert all(torch.equal(x, foreign.MASTERS[name]) for name, x in known.items())
    convert(source, folder / "out")
    assert not list(folder.glob(".*"))
    return read


def repack(content, change):
    """An archive of torch.save with one of its records changed, and the CRC-32 that fits."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return result.getvalue()


def misname(content, random_):
    """A shape, an index or a name in JSON says something else."""
    text = content.decode("latin-1")
    old, new = random_.choice([
        ("embed", "other"), ("[11,6]", "[6,11]"), ("00001", "00002"), ("weight", "weighs"),
        ("F32", "I32"), ("lr", "lx"), (":", ","), ("{", "["),
    ])  # fmt: skip
    return text.replace(old, new, 1).encode("latin-1")


def fuzz(layout, rounds, seed, folder):
    random_ = random.Random(seed)
    source = LAYOUTS[layout](folder)
    files = [source] if source.is_file() else sorted(f for f in source.rglob("*") if f.is_file())
    contents = {file: file.read_bytes() for file in files}
    large = [file for file in files if len(contents[file]) > 64]
    read = 0
    for _ in range(rounds):
        file = random_.choice(large)
        content = contents[file]
        kind = random_.random()
        if kind < 0.1 and len(files) > 1:
            file.unlink()
        elif kind < 0.25 and len(files) > 1:
            file.write_bytes(contents[random_.choice([f for f in files if f != file])])
        elif kind < 0.4:
            file.write_bytes(misname(content, random_))
        else:
            file.write_bytes(random_.choice(ACCIDENTS)(content, random_))
        is_sealed = layout in SEALED and not 0.1 <= kind < 0.25  # whole files of others fit digests
        read += try_a_damaged_one(source, is_sealed, folder)
        file.write_bytes(content)
    assert try_a_damaged_one(source, layout in SEALED, folder)
    return read


@pytest.mark.thinned(of=9)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged(layout, tmp_path):
    read = fuzz(layout, 25, 0, tmp_path)
    assert read < 25


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_damaged(layout, tmp_path):
    read = fuzz(layout, 10_000 // len(LAYOUTS), 1, tmp_path)
    assert read < 10_000 // len(LAYOUTS)


def test_pickles_of_a_file_that_say_something_else(tmp_path):
    """With digests that fit: wrong shapes, dtypes and names are what torch.load lets through."""
    random_ = random.Random(0)
    path = foreign.torch_file(tmp_path)
    content = path.read_bytes()

    def change(name, record):
        return random_.choice(ACCIDENTS)(record, random_) if name.endswith("data.pkl") else record

    for _ in range(60):
        path.write_bytes(repack(content, change))
        try_a_damaged_one(path, False, tmp_path)


def test_an_index_of_other_shards(tmp_path):
    source = foreign.torch_shards(tmp_path)
    index = source / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())
    where = content["weight_map"]
    for wrong in (
        {**where, "more": "pytorch_model-00001-of-00004.bin"},
        {**where, "norm.weight": "../pytorch_model.bin"},
        {**where, "norm.weight": "pytorch_model-00009-of-00004.bin"},
        {**where, "norm.weight": where["embed.weight"]},
        list(where),
        None,
    ):
        index.write_text(json.dumps({**content, "weight_map": wrong}))
        with pytest.raises(mcf.errors.CheckpointError):
            mcf.load_file(source)
        assert not convert(source, tmp_path / "out")


def test_a_wrong_shape_of_a_state(tmp_path):
    content = torch.load(foreign.torch_file(tmp_path), weights_only=True)
    content["optimizer"]["state"][1]["exp_avg"] = torch.ones(5)
    torch.save(content, tmp_path / "run.pt")
    assert not Target().load(tmp_path / "run.pt")


@pytest.mark.parametrize(
    ("part", "other"), [(b"state", b"stbte"), (b"optimizer", b"optimjzer"), (b"param", b"parbm")]
)
def test_a_master_under_another_name(part, other, tmp_path):
    """`.metadata` has no digest: what has lost its name is not left out."""
    source = foreign.megatron_remainders(tmp_path)
    (path,) = source.rglob(".metadata")
    content = path.read_bytes()
    name = b"chained_0.optimizer.state.param.norm.weight"
    path.write_bytes(content.replace(name, name.replace(part, other)))
    assert path.read_bytes() != content
    with pytest.raises(mcf.errors.CheckpointError):
        mcf.load_file(source)
    assert not convert(source, tmp_path / "out")


def test_a_state_that_two_names_are_said_of(tmp_path):
    source = foreign.torchtitan(tmp_path)
    (path,) = source.rglob(".metadata")
    content = path.read_bytes()
    said = rb"(?<!optimizer\.)state\.norm\.weight\.exp_avg(?!_sq)"
    path.write_bytes(re.sub(said, b"state.norm.weight.exp_bvg", content))
    assert path.read_bytes() != content
    assert not Target().load(source)


def test_a_bit_of_a_part(tmp_path):
    source = foreign.torchtitan(tmp_path)
    (path,) = source.rglob("*.distcp")
    content = path.read_bytes()
    place = content.index(foreign.MASTERS["norm.weight"].numpy().tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(mcf.errors.CheckpointError, match=r"norm\.weight does not have the CRC-32"):
        mcf.load_file(source)
    assert len(mcf.load_file(source, verify=False)) == 4


@pytest.mark.parametrize("name", ["exp_avg", "lr"])
def test_places_that_are_none(name, tmp_path):
    """In `.metadata` anything may stand in the place of a name of a file."""
    source = foreign.torchtitan(tmp_path)
    (path,) = source.rglob(".metadata")
    metadata = pickle.loads(path.read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn.endswith(f"norm.weight.{name}"):
            place.relative_path = {"a": 1}
    path.write_bytes(pickle.dumps(metadata))
    assert not Target().load(source)
    assert not convert(source, tmp_path / "out")


@pytest.mark.parametrize("offset", [(3, 0), (4, 1), (-4, 0), (12, 0)])
def test_parts_that_make_no_whole(offset, tmp_path):
    """Together they have as many elements as the tensor."""
    x = torch.arange(16.0).view(8, 2)
    foreign.save_distributed({"x": x[:4], "y": x[4:]}, tmp_path / "saved")
    path = tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (first,) = metadata.state_dict_metadata["x"].chunks

    def load_with(offsets):
        second = dataclasses.replace(first, offsets=torch.Size(offsets))
        kind = dataclasses.replace(
            metadata.state_dict_metadata["x"], size=x.shape, chunks=[first, second]
        )
        places = {
            dataclasses.replace(index, fqn="x", offset=torch.Size(offsets))
            if index.fqn == "y"
            else index: place
            for index, place in metadata.storage_data.items()
        }
        changed = dataclasses.replace(
            metadata, state_dict_metadata={"x": kind}, storage_data=places, planner_data=None
        )
        path.write_bytes(pickle.dumps(changed))
        return mcf.load_file(tmp_path / "saved")["x"]

    assert torch.equal(load_with((4, 0)), x)
    with pytest.raises(
        mcf.errors.CheckpointError, match=r"the parts of x in .* do not make a tensor"
    ):
        load_with(offset)


def test_parts_beside_and_below_each_other(tmp_path):
    """As shards over a mesh of two dimensions: each pair overlaps along one of them at most."""
    x = torch.arange(24.0).view(4, 6)
    quarters = {f"{i}{j}": x[i : i + 2, j : j + 3].clone() for i in (0, 2) for j in (0, 3)}
    foreign.save_distributed(quarters, tmp_path / "saved")
    path = tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    kinds, chunks, places = metadata.state_dict_metadata, [], {}
    for index, place in metadata.storage_data.items():
        offset = torch.Size(map(int, index.fqn))
        places[dataclasses.replace(index, fqn="x", offset=offset)] = place
        chunks.append(dataclasses.replace(kinds[index.fqn].chunks[0], offsets=offset))
    kind = dataclasses.replace(kinds["00"], size=x.shape, chunks=chunks)
    changed = dataclasses.replace(
        metadata, state_dict_metadata={"x": kind}, storage_data=places, planner_data=None
    )
    path.write_bytes(pickle.dumps(changed))
    assert torch.equal(mcf.load_file(tmp_path / "saved")["x"], x)
