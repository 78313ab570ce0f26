"""Files that ask for more memory than they have bytes are refused before anything is built."""

import _codecs
import io
import pickle
import struct
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

import mcftensor as mcf
from mcftensor.bridge import deepspeed

LENGTH = 2**28
SHARED = "elements share memory, as those of x.expand"


class Call:
    """What a pickle calls."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def expanded(dtype=torch.float32):
    return torch.ones(1, dtype=dtype).expand(LENGTH)


def doubled(times):
    """A pickle whose text becomes twice as long with each call."""
    text = Call(_codecs.encode, "a" * 64, "latin1")
    for _ in range(times):
        text = Call(_codecs.encode, text, "hex")
    return text


COPY = torch._utils._rebuild_device_tensor_from_cpu_tensor
DETOUR = torch._tensor._rebuild_from_type_v2
HOSTILE = {
    "expanded": (expanded(), SHARED),
    "an expanded expansion": (mcf.as_expansion(torch.ones(1)).expand(LENGTH), SHARED),
    "an expanded view": (torch.ones(8)[3:4].expand(LENGTH), SHARED),
    "views without end": ([x[:n] for x in [torch.ones(4096)] for n in range(64, 4096)], SHARED),
    "a copy": (Call(COPY, torch.ones(9), torch.float64, "cpu", False), None),
    "a copy of it": (Call(COPY, expanded(), torch.float64, "cpu", False), SHARED),
    "a buffer": (Call(bytearray, LENGTH), "calls builtins.bytearray"),
    "a storage": (Call(torch.UntypedStorage, LENGTH), "calls torch.storage.UntypedStorage"),
    "a tensor by size": (Call(torch.Tensor, LENGTH), "calls torch.Tensor"),
    "a detour": (Call(DETOUR, torch.Tensor, torch.Tensor, (LENGTH,), {}), "calls torch.Tensor"),
    "texts": (doubled(20), "calls _codecs.encode"),
}


def refuse(path, message):
    """Refused by every way in, with one line."""
    for read in (
        lambda: mcf.checkpoint.convert_checkpoint(path, path.parent / "converted"),
        lambda: mcf.load_file(path),
        lambda: mcf.meters.audit(path, path),
    ):
        with pytest.raises(mcf.errors.CheckpointError, match=message) as raised:
            read()
        assert str(path) in str(raised.value)
    assert not (path.parent / "converted").exists()


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("a copy", marks=pytest.mark.with_float64("the copy is of it")),
        *(x for x in HOSTILE if x != "a copy"),
    ],
)
def test_what_asks_for_memory(kind, zipped, tmp_path):
    content, message = HOSTILE[kind]
    path = tmp_path / "small.pt"
    torch.save({"w": torch.ones(3), "x": content}, path, _use_new_zipfile_serialization=zipped)
    if message is None:
        assert torch.equal(mcf.load_file(path)["w"], torch.ones(3))
    else:
        refuse(path, message)


@pytest.mark.parametrize("format", mcf.formats.FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("read", [torch.load, mcf.load_file])
def test_elements_that_stand_behind_the_tensors(format, read, tmp_path):
    """As the old form of torch.save has them: what memory held before is not made normalized."""
    path = tmp_path / "x.pt"
    saved = {f"{i}": mcf.as_expansion(torch.rand(3, 64), format) for i in range(20)}
    torch.save(saved, path, _use_new_zipfile_serialization=False)
    held = [torch.full((n,), 1e30 * (-1) ** n) for n in range(1000)]
    del held
    found = read(path)
    for name, x in saved.items():
        assert all(map(torch.equal, found[name].components, x.components))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_is_small_is_read(zipped, tmp_path):
    """Expanded, tied, transposed, empty and strided tensors, bytes, and other dtypes."""
    x = torch.arange(12.0).reshape(3, 4)
    state_dict = {
        "x": x,
        "tied": x,
        "turned": x.t(),
        "part": x[1:, ::2],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "none": torch.empty(0, 2**40),
        "bits": torch.arange(5).to(torch.uint16),
        "long": torch.arange(5),
        "complex": torch.ones(2, dtype=torch.complex64),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "expansion": mcf.as_expansion(torch.rand(3, 4), mcf.bf16i16),
        "texts": [b"bytes", bytearray(b"more"), {1, 2}, 2j],
    }
    if not zipped:  # PyTorch does not read these there
        del state_dict["bits"]
    path = tmp_path / "small.pt"
    torch.save(state_dict, path, _use_new_zipfile_serialization=zipped)
    found = mcf.load_file(path)
    assert found.keys() == state_dict.keys() - {"texts"}
    for name, x in found.items():
        expected = state_dict[name]
        if x.is_floating_point():
            x, expected = mcf.as_plain(x), mcf.as_plain(expected)
        assert torch.equal(x, expected)


def repacked(path, change, compression=zipfile.ZIP_STORED):
    content = path.read_bytes()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(path, "w", compression) as new,
    ):
        for name in old.namelist():
            new.writestr(name, change(name.partition("/")[2], old.read(name)))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_storages_longer_than_their_file(zipped, tmp_path):
    path = tmp_path / "small.pt"
    torch.save({"w": torch.ones(7)}, path, _use_new_zipfile_serialization=zipped)
    longer = b"J" + struct.pack("<i", LENGTH)
    if zipped:
        repacked(path, lambda name, x: x.replace(b"K\x07", longer) if name == "data.pkl" else x)
    else:
        path.write_bytes(path.read_bytes().replace(b"K\x07", longer))
    refuse(path, "says that it holds 1,073,741,824 bytes of tensors")


def test_tensors_longer_than_their_storage(tmp_path):
    """PyTorch lengthens storages of files from before torch 1.6, by whatever was in memory."""
    path = tmp_path / "small.pt"
    torch.save({"w": torch.ones(7)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content[::-1].replace(b"\x07K", b"\x09K", 1)[::-1])
    with pytest.raises(
        mcf.errors.CheckpointError, match=r"shape \(9,\) goes beyond the end of its stora"
    ):
        mcf.load_file(path)


def test_compressed_records(tmp_path):
    """They inflate to any size, and PyTorch maps the compressed bytes as the numbers."""
    path = tmp_path / "small.pt"
    torch.save({"w": torch.ones(700)}, path)
    repacked(path, lambda name, x: x, zipfile.ZIP_DEFLATED)
    refuse(path, "its records are compressed")


def test_two_records_of_one_name(tmp_path):
    path = tmp_path / "small.pt"
    torch.save({"w": torch.ones(7)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("small/DATA.pkl", b"N.")
    refuse(path, "several have one name")


def test_tensors_without_numbers(tmp_path):
    path = tmp_path / "small.pt"
    torch.save({"w": torch.ones(3, device="meta")}, path)
    for read in (
        mcf.load_file,
        lambda path: mcf.checkpoint.convert_checkpoint(path, tmp_path / "to"),
    ):
        with pytest.raises(
            mcf.errors.CheckpointError, match=r"w of shape .* was saved on the meta device"
        ):
            read(path)


@pytest.mark.parametrize("content", [b"hello, world", b"every", b"(101)", b""])
def test_texts_are_no_checkpoints(content, tmp_path):
    path = tmp_path / "notes"
    path.write_bytes(content)
    refuse(path, "damaged, incomplete or no checkpoint$")


# --------------------------------------------------------------- torch.distributed.checkpoint


def distributed(folder, state_dict):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state_dict, checkpoint_id=folder)
    return folder


def rewritten(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_sizes_in_metadata(tmp_path):
    folder = distributed(tmp_path / "run", {"w": torch.ones(4, 4)})

    def claim(metadata):
        kind = metadata.state_dict_metadata["w"]
        kind.size = kind.chunks[0].sizes = torch.Size([LENGTH, 4])

    rewritten(folder, claim)
    with pytest.raises(mcf.errors.CheckpointError, match="says that there are 4,294,967,296 bytes"):
        mcf.load_file(folder)


def test_expanded_parts(tmp_path):
    folder = distributed(tmp_path / "run", {"w": torch.ones(4, 4), "v": torch.ones(3000)})
    part = io.BytesIO()
    torch.save(torch.ones(1).expand(3000), part)
    file = next(folder.glob("*.distcp"))

    def replace(metadata):
        place = next(x for i, x in metadata.storage_data.items() if i.fqn == "v")
        place.offset, place.length = file.stat().st_size, len(part.getvalue())

    rewritten(folder, replace)
    file.write_bytes(file.read_bytes() + part.getvalue())
    with pytest.raises(mcf.errors.CheckpointError, match=SHARED):
        mcf.load_file(folder)


def test_numbers_of_objects_in_metadata(tmp_path):
    """Python's unpickler makes a list of their length."""
    folder = distributed(tmp_path / "run", {"w": torch.ones(4)})
    (folder / ".metadata").write_bytes(b"\x80\x02]r" + struct.pack("<I", 2**26) + b".")
    with pytest.raises(mcf.errors.CheckpointError, match="numbers 2 objects up to 67108864"):
        mcf.load_file(folder)


def test_parts_are_counted_before_the_whole_is_made():
    with pytest.raises(mcf.errors.CheckpointError, match=r"1099511627768 elements .* are missing"):
        deepspeed._joined([torch.ones(8)], torch.Size([2**40]))
