"""Weights that froze between two checkpoints."""

import dataclasses
import functools
import gc
import json
import math
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.__main__ import main
from mcftensor.checkpoint import open_checkpoint
from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.tools import auditing
from mcftensor.tools.auditing import TensorAudit, audit
from support.commands import answered
from support.helpers import sample

safetensors = pytest.importorskip("safetensors.torch")
Console = pytest.importorskip("rich.console").Console

ROOT = Path(mcf.__file__).parents[1]
NAN, INF = math.nan, math.inf

BEFORE = [1.0, 1.0, 1.0, 0.0, 0.0, 2.0, 3.0, NAN]
AFTER = [1.0, 1.0, 1.5, 0.0, 1.0, 2.0, 4.0, NAN]
# Five of eight are the same, of which one is 0 and two are 1.
SHARES = (5 / 8, 1 / 8, 2 / 8)


def pair(before, after, dtype=torch.float32):
    return {"x": torch.tensor(before, dtype=dtype)}, {"x": torch.tensor(after, dtype=dtype)}


def shares(before, after, dtype=torch.float32):
    (found,) = audit(*pair(before, after, dtype)).tensors
    return found.unchanged, found.zeros, found.ones


def numbers(found):
    return {t.name: (t.unchanged, t.zeros, t.ones) for t in found.tensors}


# The numbers


class TestNumbers:
    @pytest.mark.parametrize(
        "dtype",
        [
            torch.bfloat16,
            torch.float16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
        ],
    )
    def test_every_dtype(self, dtype):
        assert shares(BEFORE, AFTER, dtype) == SHARES

    def test_a_float_without_zero(self):
        smallest = torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        (found,) = audit({"x": smallest}, {"x": smallest.clone()}).tensors
        assert (found.unchanged, found.zeros, found.ones) == (1, 0, 0)

    def test_special_values(self):
        assert shares([0.0, -0.0, 0.0], [-0.0, -0.0, 0.0]) == (1, 1, 0)
        assert shares([INF, -INF, INF, NAN], [INF, -INF, -INF, 0.0]) == (1 / 2, 0, 0)
        assert shares([-1.0, 1.0], [-1.0, -1.0]) == (1 / 2, 0, 0)

    def test_complex_numbers_are_single_elements(self):
        before, after = [1 + 1j, 1j, 0j, 1 + 0j], [1 + 1j, 2j, 0j, 1 + 0j]
        assert shares(before, after, torch.complex64) == (3 / 4, 1 / 4, 1 / 4)
        x = torch.tensor(before, dtype=torch.complex64)
        assert numbers(audit({"x": x.conj()}, {"x": x.clone()}))["x"] == (2 / 4, 1 / 4, 1 / 4)

    def test_a_change_of_the_last_bit(self):
        one = torch.ones(1, dtype=torch.float64)
        (found,) = audit({"x": one}, {"x": one.nextafter(one * 2)}).tensors
        assert found == TensorAudit("x", (1,), "float64", 0.0, 0.0, 0.0, "moving")

    def test_what_is_reported(self):
        (found,) = audit(*pair([[1.0] * 3] * 2, [[1.0] * 3] * 2, torch.bfloat16)).tensors
        assert found == TensorAudit("x", (2, 3), "bfloat16", 1.0, 0.0, 1.0, "frozen")
        assert found.numel == 6
        (scalar,) = audit(*pair(2.0, 2.0)).tensors
        assert (scalar.shape, scalar.numel) == ((), 1)

    @pytest.mark.parametrize(
        ("threshold", "verdict"),
        [(0.1, "mostly frozen"), (5 / 8, "mostly frozen"), (0.63, "moving"), (1, "moving")],
    )
    def test_the_threshold(self, threshold, verdict):
        found = audit(*pair(BEFORE, AFTER), threshold=threshold)
        assert found.tensors[0].verdict == verdict
        assert (found.suspicious == found.tensors) == (verdict != "moving")
        assert audit(*pair(BEFORE, BEFORE), threshold=threshold).tensors[0].verdict == "frozen"

    @pytest.mark.parametrize("threshold", [0, -0.5, 1.01, NAN])
    def test_a_threshold_that_is_none(self, threshold):
        with pytest.raises(ValueError, match="threshold"):
            audit(*pair(BEFORE, AFTER), threshold=threshold)

    def test_the_most_frozen_come_first_and_layer_9_before_layer_10(self):
        base = torch.arange(4.0) + 2
        before = {f"layers.{i}.x": base for i in (10, 9, 1)} | {"a": base, "b": base}
        after = {name: base.clone() for name in before}
        after["a"][0] = 0
        after["b"][:2] = 0
        found = audit(before, after)
        names = [t.name for t in found.tensors]
        assert names == ["layers.1.x", "layers.9.x", "layers.10.x", "a", "b"]

    def test_the_whole(self):
        before = {
            "norm": torch.ones(3),
            "weight": torch.arange(8.0),
            "bias": torch.zeros(5),
            "steps": torch.tensor(7),
            "mask": torch.tensor([True]),
            "empty": torch.zeros(0, 3),
            "rope.inv_freq": torch.ones(2),
        }
        after = {name: x.clone() for name, x in before.items()}
        after["weight"][:2] += 1
        after["bias"] += 1
        found = audit(before, after, ignore=["*.inv_freq"])
        assert numbers(found) == {
            "norm": (1, 0, 1),
            "weight": (6 / 8, 0, 0),
            "bias": (0, 0, 0),
        }
        assert [t.verdict for t in found.tensors] == ["frozen", "mostly frozen", "moving"]
        assert [t.name for t in found.suspicious] == ["norm", "weight"]
        assert (found.not_floating, found.empty, found.ignored) == (2, 1, 1)
        assert (found.elements, found.unchanged) == (16, 9 / 16)
        assert found.summary() == (
            "3 tensors: 1 frozen, 1 mostly frozen; 56.25% of 16 elements unchanged; "
            "left out: 2 integer or boolean, 1 empty, 1 ignored"
        )
        record = found.to_dict()
        assert record["tensors"] == [
            dataclasses.asdict(t) | {"shape": list(t.shape)} for t in found.tensors
        ]
        del record["tensors"]
        assert record == {
            "threshold": 0.5,
            "compared": 3,
            "frozen": 1,
            "mostly_frozen": 1,
            "elements": 16,
            "unchanged": 9 / 16,
            "left_out": {"not_floating": 2, "empty": 1, "ignored": 1},
        }
        assert json.loads(found.to_json()) == found.to_dict()

    def test_percentages_do_not_round_to_all_or_nothing(self):
        shown = [auditing._percent(x) for x in (0, 1e-9, 0.57, 0.98765, 1 - 1e-9, 1)]
        assert shown == ["0%", "0.01%", "57%", "98.77%", "99.99%", "100%"]

    def test_blocks_cover_every_element_once(self, monkeypatch):
        monkeypatch.setattr(auditing, "_BLOCK", 7)
        for shape in [(), (1,), (100,), (13, 11), (2, 3, 5, 7), (1, 50, 1)]:
            x = torch.randint(3, shape).float()
            y = torch.randint(3, shape).float()
            same = x == y
            expected = [m.double().mean() for m in (same, same & (x == 0), same & (x == 1))]
            assert numbers(audit({"x": x}, {"x": y}))["x"] == tuple(expected)
            transposed = y.T.contiguous().T if y.dim() == 2 else y
            assert numbers(audit({"x": x}, {"x": transposed}))["x"] == tuple(expected)
            for block in auditing._blocks((x,), (y,)):
                assert block[0][0].numel() <= 7

    def test_parameters_that_require_grad(self):
        norm = nn.LayerNorm(3)
        found = audit(dict(norm.named_parameters()), nn.LayerNorm(3).state_dict())
        assert numbers(found) == {"weight": (1, 0, 1), "bias": (1, 1, 0)}


class TestExpansions:
    def test_a_change_of_any_term_is_a_change(self, format):
        x = sample(format, 4, 3)
        for i in range(format.terms):
            terms = [t.clone() for t in x.components]
            terms[i][0, 0] *= 2
            y = mcf.MCFTensor(terms, format)
            (found,) = audit({"x": x}, {"x": y}).tensors
            assert (found.unchanged, found.dtype) == (11 / 12, format.name)

    def test_agrees_with_comparison(self, format):
        x, y = sample(format, 50), sample(format, 50)
        y[::3] += 1
        expected = (x == y).double().mean().item()
        assert 0.6 < expected < 0.7
        assert numbers(audit({"x": x}, {"x": y}))["x"] == (expected, 0, 0)

    def test_zeros_and_ones_are_those_of_the_whole_value(self, format):
        small = torch.finfo(format.base).eps / 8
        x = mcf.as_expansion(torch.tensor([0.0, 1.0, 1.0, 1.0, NAN, INF]), format)
        x[2] += small
        y = x.clone()
        y[3] += small
        assert x.components[0].tolist()[:4] == y.components[0].tolist()[:4] == [0, 1, 1, 1]
        assert numbers(audit({"x": x}, {"x": y}))["x"] == (5 / 6, 1 / 6, 1 / 6)

    def test_nan_is_nan_whatever_the_tails(self):
        nan, zero = torch.full((2,), NAN).bfloat16(), torch.zeros(2).bfloat16()
        x, y = mcf.MCFTensor([nan, zero]), mcf.MCFTensor([nan.clone(), zero + 1])
        assert numbers(audit({"x": x}, {"x": y}))["x"] == (1, 0, 0)

    def test_saved(self, format, tmp_path):
        x = nn.Parameter(sample(format, 6))
        y = x.detach().clone()
        y[:2] += 1
        torch.save({"x": x}, tmp_path / "before.pt")
        torch.save({"x": y}, tmp_path / "after.pt")
        found = audit(tmp_path / "before.pt", tmp_path / "after.pt")
        assert numbers(found)["x"] == (4 / 6, 0, 0)


# The files

STATE = {
    "embedding.weight": torch.arange(12.0).reshape(3, 4),
    "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    "steps": torch.tensor(5),
}


def changed():
    state = {name: x.clone() for name, x in STATE.items()}
    state["embedding.weight"][0] += 1
    return state


def save_shards(state, folder, index, save):
    """Write each tensor to a file of its own, with the names in an order of their own."""
    stem, suffix = index.removesuffix(".index.json").split(".")
    files = {
        name: f"{stem}-{len(state) - i}-of-{len(state)}.{suffix}" for i, name in enumerate(state)
    }
    for name, file in files.items():
        save({name: state[name]}, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def save_legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


WRITERS = {
    "x.pt": torch.save,
    "legacy.pt": save_legacy,
    "x.safetensors": safetensors.save_file,
    "safetensors_by_content": safetensors.save_file,
}


def write(state, folder, kind):
    """Save `state` in one of the ways that audit reads, and return the path to give to it."""
    folder.mkdir(exist_ok=True)
    name = kind.removeprefix("folder/")
    if name.endswith(".index.json"):
        save = safetensors.save_file if "safetensors" in name else torch.save
        save_shards(state, folder, name, save)
    else:
        save = safetensors.save_file if name == "model.safetensors" else torch.save
        WRITERS.get(name, save)(state, folder / name)
    return folder if kind.startswith("folder/") else folder / name


KINDS = [
    *WRITERS,
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    *(f"folder/{name}" for name in open_checkpoint.IN_FOLDERS),
]


class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_gives_what_the_tensors_give(self, kind, tmp_path):
        expected = audit(STATE, changed())
        assert numbers(expected) == {
            "norm.weight": (1, 0, 1),
            "embedding.weight": (8 / 12, 0, 0),
        }
        before = write(STATE, tmp_path / "before", kind)
        after = write(changed(), tmp_path / "after", kind)
        assert audit(before, after) == audit(str(before), changed()) == expected

    def test_kinds_may_differ(self, tmp_path):
        before = write(STATE, tmp_path / "before", "x.pt")
        after = write(changed(), tmp_path / "after", "model.safetensors.index.json")
        assert audit(before, after) == audit(after, before) == audit(STATE, changed())

    def test_a_folder_with_several_is_read_in_the_order_of_hugging_face(self, tmp_path):
        for i, name in enumerate(reversed(open_checkpoint.IN_FOLDERS)):
            write({"x": torch.full((2,), float(i))}, tmp_path, f"folder/{name}")
            # The index comes first, and its shards bear other names than the whole file.
            (found,) = audit(tmp_path, {"x": torch.full((2,), float(i))}).tensors
            assert found.unchanged == 1

    def test_one_shard_is_open_at_a_time_and_each_is_opened_once(self, tmp_path, monkeypatch):
        state = {f"layers.{i}": torch.full((3,), float(i)) for i in range(6)}
        files = {name: f"{i % 2}.pt" for i, name in enumerate(state)}
        for file in set(files.values()):
            torch.save({n: x for n, x in state.items() if files[n] == file}, tmp_path / file)
        (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": files}))
        opened = []
        load = torch.load
        monkeypatch.setattr(
            torch, "load", lambda path, **kwargs: opened.append(path.name) or load(path, **kwargs)
        )
        audit(tmp_path / "x.index.json", state)
        assert opened == ["0.pt", "1.pt"]

    def test_one_shard_is_held_at_a_time(self, tmp_path, monkeypatch):
        tensors = {f"x{i}": torch.full((8,), float(i)) for i in range(4)}
        mcf.save_file(tensors, tmp_path, max_shard_size=40)
        read, held = open_checkpoint.open_safetensors, []

        def noted(path, verify):
            file = read(path, verify)
            held.append(weakref.ref(file))
            return file

        monkeypatch.setattr(open_checkpoint, "open_safetensors", noted)
        index = tmp_path / "model.safetensors.index.json"
        terms = open_checkpoint.opened(index, verify=True).terms
        for name in terms:
            assert torch.equal(terms[name], tensors[name])
            gc.collect()
            assert sum(file() is not None for file in held) == 1

    @pytest.mark.parametrize("key", open_checkpoint._NESTED)
    def test_nested_state_dicts(self, key, tmp_path):
        torch.save(
            {key: STATE, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "step": 3,
             "rng": torch.get_rng_state(), "loss": torch.tensor(0.5)},
            tmp_path / "x.pt",
        )  # fmt: skip
        assert audit(tmp_path / "x.pt", changed()) == audit(STATE, changed())
        assert audit({key: {"module": STATE}, "config": {}}, changed()).elements == 16

    def test_a_config_beside_the_state_dict(self):
        found = audit({"state_dict": STATE, "model": {"width": 4}, "net": "gpt"}, changed())
        assert found.elements == 16

    def test_entries_that_are_no_tensors(self):
        found = audit(STATE | {"_extra_state": None, "version": {"a": 1}}, changed())
        assert found.elements == 16

    def test_a_pickle_protocol_that_torch_warns_of(self, tmp_path):
        torch.save(STATE, tmp_path / "x.pt", pickle_protocol=3)
        assert audit(tmp_path / "x.pt", changed()) == audit(STATE, changed())


# What a process has in memory while files are audited, sampled at every block, beyond what it had
# before: memory of its own, and mapped files with it.
STREAMING = """
import json, re, sys
from pathlib import Path
import torch
from mcftensor.tools import auditing

folder = Path(sys.argv[1])

def in_use():
    status = Path("/proc/self/status").read_text()
    return [int(re.search(key + r":\\s+(\\d+)", status)[1]) << 10 for key in ("RssAnon", "VmData")]

def growth(name):
    samples = []
    auditing._count = lambda x, y: samples.append(in_use()) or count(x, y)
    start = in_use()
    found = auditing.audit(folder / "before" / name, folder / "after" / name)
    own, mapped = (max(column) - x for column, x in zip(zip(*samples), start))
    return {"own": own, "mapped": mapped, "unchanged": found.unchanged}

count = auditing._count
names = ("small.safetensors", "model.safetensors", "model.safetensors.index.json", "x.pt")
result = {name: growth(name) for name in names}
load = torch.load
torch.load = lambda path, **options: load(path, **options | {"mmap": False})
json.dump(result | {"read at once": growth("x.pt")}, sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads memory in use as Linux tells it")
def test_memory_stays_bounded(tmp_path):
    shard, shards = 2 << 20, 24
    state = {f"layers.{i}.weight": torch.ones(shard // 4) for i in range(shards)}
    for side in ("before", "after"):
        folder = tmp_path / side
        folder.mkdir()
        safetensors.save_file({"x": torch.ones(3)}, folder / "small.safetensors")
        safetensors.save_file(state, folder / "model.safetensors")
        save_shards(state, folder, "model.safetensors.index.json", safetensors.save_file)
        torch.save(state, folder / "x.pt")
        state["layers.3.weight"] += 1
    command = [sys.executable, "-c", STREAMING, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert not process.stderr
    result = json.loads(process.stdout)
    small = 10 << 20
    for kind in ("model.safetensors", "model.safetensors.index.json", "x.pt"):
        assert result[kind]["own"] < small
        assert result[kind]["unchanged"] == 1 - 1 / shards
    assert result["model.safetensors.index.json"]["mapped"] < 2 * shard + small
    # The same measure tells a reader that reads all.
    assert result["read at once"]["own"] > 2 * shards * shard


# What cannot be compared


class TestMistakes:
    def check(self, before, after, match, **options):
        with pytest.raises(CheckpointError, match=match) as caught:
            audit(before, after, **options)
        assert len(str(caught.value).splitlines()) == 1

    def test_names_that_differ(self):
        x = torch.ones(2)
        before = dict.fromkeys("abcdef", x)
        self.check(
            before,
            {"f": x, "line\nbreak": x},
            r"5 only in before: a, b, c and 2 more; 1 only in after: line break",
        )
        (found,) = audit(before, {"f": x.clone(), "g": x}, ignore=["[a-e]", "g"]).tensors
        assert found.name == "f"

    @pytest.mark.parametrize(
        ("after", "match"),
        [
            (torch.ones(3), r"x has shape \(2,\) in before and \(3,\) in after"),
            (torch.ones(2).bfloat16(), "x has dtype float32 in before and bfloat16 in after"),
            (torch.ones(2, dtype=torch.int64), "float32 in before and int64"),
            (mcf.as_expansion(torch.ones(2)), "float32 in before and bf16x3"),
        ],
    )
    def test_kinds_that_differ(self, after, match):
        self.check({"x": torch.ones(2)}, {"x": after}, match)

    def test_formats_that_differ(self):
        x = torch.ones(2)
        y, z = (mcf.as_expansion(x, format) for format in (mcf.bf16x2, mcf.bf16x3))
        self.check({"x": y}, {"x": z}, "x has dtype bf16x2 in before and bf16x3 in after")

    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: torch.eye(2).to_sparse(), r"Tensor of torch\.sparse_coo"),
            (lambda: torch.ones(2, device="meta"), "meta tensor"),
            (nn.parameter.UninitializedParameter, "UninitializedParameter"),
            (lambda: torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1"),
        ],
    )
    def test_tensors_that_cannot_be_compared(self, make, match):
        self.check({"x": make(), "y": torch.ones(1)}, {"x": make(), "y": torch.ones(1)}, match)
        before, after = ({"x": make(), "y": torch.ones(1)} for _ in range(2))
        assert audit(before, after, ignore="x").ignored == 1

    def test_a_pattern_that_matches_nothing(self):
        self.check(STATE, changed(), r"'\*\.inv_freq'.*embedding\.weight", ignore=["*.inv_freq"])

    def test_nothing_to_compare(self):
        self.check(STATE, changed(), "1 are integer.*2 ignored", ignore=["*.weight"])

    def test_a_state_dict_that_was_not_copied(self):
        norm = nn.LayerNorm(3)
        before = norm.state_dict()
        norm.weight.data.add_(1)
        self.check(before, norm.state_dict(), "same memory.*clone")
        norm = mcf.as_expansion(nn.LayerNorm(3))
        self.check(norm.state_dict(), norm.state_dict(), "same memory")

    @pytest.mark.parametrize("given", [nn.LayerNorm(3), [torch.ones(2)], None])
    def test_what_is_no_checkpoint(self, given):
        with pytest.raises(TypeError, match="state dict"):
            audit(given, STATE)

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            ([torch.ones(2)], "holds a list where a state dict belongs"),
            ({}, "its keys: none"),
            ({"epoch": 1, "args": {}, 3: torch.ones(2)}, "its keys: 'epoch', 'args', 3"),
            ({"a": STATE, "b": STATE}, "its keys: 'a', 'b'"),
            ({"model": STATE, "net": STATE}, "several state dicts, model, net"),
            ({"model": {"g": STATE, "d": STATE}}, r"\['model'\] holds no state dict.*'g', 'd'"),
        ],
    )
    def test_a_file_without_a_state_dict(self, content, match, tmp_path):
        torch.save(content, tmp_path / "x.pt")
        self.check(tmp_path / "x.pt", STATE, match)

    def test_a_package_that_is_not_there(self, tmp_path, monkeypatch):
        path = write(STATE, tmp_path, "x.safetensors")
        monkeypatch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(ImportError, match=r"safetensors.*pip install safetensors"):
            audit(path, STATE)
        monkeypatch.setitem(sys.modules, "rich.table", None)
        with pytest.raises(ImportError, match=r"rich.*pip install rich"):
            audit(STATE, changed()).table()


# The command


@pytest.fixture
def command(capsys):
    """Run the command; return its exit status, what it printed, and what it complained of."""
    return functools.partial(answered, capsys, "audit")


@pytest.fixture
def saved(tmp_path):
    torch.save(STATE, tmp_path / "before.pt")
    torch.save(changed(), tmp_path / "after.pt")
    return tmp_path / "before.pt", tmp_path / "after.pt"


class TestCommand:
    def test_status_1_and_the_suspicious_tensors(self, command, saved):
        status, out, _ = command(*saved, "--threshold", "0.7")
        assert status == 1
        heading, _, row, _, summary = out.splitlines()
        assert heading.split() == [
            *("tensor", "shape", "dtype", "unchanged"),
            *("at", "0", "at", "1", "verdict"),
        ]
        assert row.split() == ["norm.weight", "4", "bf16", "100%", "0%", "100%", "frozen"]
        assert summary == audit(STATE, changed(), threshold=0.7).summary()
        _, out, _ = command(*saved, "--threshold", "0.7", "--all")
        assert out.splitlines()[3].split() == [
            "embedding.weight", "3x4", "fp32", "66.67%", "0%", "0%", "moving",
        ]  # fmt: skip

    def test_status_0_and_one_line(self, command, saved):
        options = ("--threshold", "0.7", "--ignore", "norm.*", "--ignore", "steps")
        status, out, _ = command(*saved, *options)
        assert status == 0
        assert out.splitlines() == [
            "1 tensors: 0 frozen, 0 mostly frozen; 66.67% of 12 elements unchanged; "
            "left out: 2 ignored"
        ]
        status, out, _ = command(*saved, *options, "--all")
        assert status == 0
        assert "embedding.weight" in out

    def test_json(self, command, saved, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich.table", None)
        status, out, _ = command(*saved, "--json")
        assert (status, json.loads(out)) == (1, audit(STATE, changed()).to_dict())
        status, out, _ = command(*saved, "--json", "--ignore", "norm.*", "--threshold", "0.9")
        assert (status, len(json.loads(out)["tensors"])) == (0, 1)

    def test_json_holds_no_nan(self, command, tmp_path):
        for name in ("before.pt", "after.pt"):
            torch.save({"x": torch.tensor([NAN, INF])}, tmp_path / name)
        _, out, _ = command(tmp_path / "before.pt", tmp_path / "after.pt", "--json")
        assert json.loads(out, parse_constant=pytest.fail)["unchanged"] == 1

    def test_a_table_needs_rich(self, command, saved, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich.table", None)
        status, _, error = command(*saved)
        assert status == 2
        assert "pip install rich" in error

    def test_names_are_never_cut(self, command, tmp_path):
        names = [f"model.layers.{i}.{'sub.' * 60}[bold]norm[/bold].weight" for i in range(300)]
        for file in ("before.pt", "after.pt"):
            torch.save({name: torch.ones(1) for name in names}, tmp_path / file)
        status, out, _ = command(tmp_path / "before.pt", tmp_path / "after.pt")
        assert status == 1
        assert [line.split()[0] for line in out.splitlines()[2:-2]] == names

    def test_a_terminal_has_its_names_folded(self):
        name = "model.layers.10.post_attention_layernorm.weight"
        console = Console(width=80)
        with console.capture() as capture:
            console.print(audit({name: torch.ones(4096)}, {name: torch.ones(4096)}).table())
        lines = capture.get().splitlines()
        column = "".join(line.split()[0] for line in lines[3:] if line.strip())
        assert column == name
        assert "frozen" in lines[3]

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ([], "the following arguments are required: BEFORE, AFTER"),
            (["a", "b", "--threshold", "0"], "must be a number above 0 and at most 1, not '0'"),
            (["a", "b", "--threshold", "nan"], "must be a number above 0 and at most 1, not 'nan'"),
            (["a", "b", "--threshold", "x"], "must be a number above 0 and at most 1, not 'x'"),
            (["no/such.pt", "no/other.pt"], "cannot read no/such.pt: No such file or directory"),
            (["", "b"], "the folder . holds none of model.safetensors.index.json"),
            (["no/such.safetensors", "b"], "cannot read no/such.safetensors: No such file"),
            (["no/such.index.json", "b"], "cannot read no/such.index.json: No such file"),
            (["x" * 5000, "b"], "File name too long"),
            (["a\0b", "b"], "null"),
        ],
    )
    def test_mistakes(self, command, arguments, complaint, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        status, _, error = command(*arguments)
        assert status == 2
        assert complaint in error

    def test_a_command_that_is_none(self, capsys):
        for arguments in ([], ["frozen"]):
            with pytest.raises(SystemExit) as leaving:
                main(arguments)
            assert leaving.value.code == 2
            error = capsys.readouterr().err
            assert error.startswith("python -m mcftensor: ")
            assert error.count("\n") == 1

    @pytest.mark.parametrize(
        ("kind", "step"), [("x.pt", 29), ("legacy.pt", 17), ("x.safetensors", 3)]
    )
    def test_a_file_cut_short(self, command, saved, tmp_path, kind, step):
        path = write(STATE, tmp_path, kind)
        content = path.read_bytes()
        for length in [*range(0, len(content), step), len(content) - 1]:
            path.write_bytes(content[:length])
            status, _, error = command(saved[0], path)
            assert status == 2, length
            assert f"cannot read {path}: it " in error

    @pytest.mark.parametrize("kind", ["x.pt", "x.safetensors"])
    def test_a_damaged_file_gets_one_line_or_is_read(self, command, saved, tmp_path, kind):
        state = STATE if kind == "x.safetensors" else STATE | {"e": sample(mcf.bf16x2, 3)}
        path = write(state, tmp_path, kind)
        content = path.read_bytes()
        statuses = []
        for place in range(0, len(content), max(1, len(content) // 100)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 85]) + content[place + 1 :])
            ignore = ("--ignore", "e") if "e" in state and place % 2 else ()
            statuses.append(command(saved[0], path, *ignore)[0])
        assert statuses.count(2) > 25

    @pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.bin", "x.index.json"])
    @pytest.mark.parametrize(
        "content", [b"", b"not a checkpoint\n", bytes(100), b"PK\3\4 and more"]
    )
    def test_a_file_of_another_kind(self, command, saved, tmp_path, name, content):
        path = tmp_path / name
        path.write_bytes(content)
        status, _, error = command(path, saved[1])
        assert status == 2
        assert f"cannot read {path}: it is damaged, incomplete or no checkpoint" in error

    def test_a_file_that_would_run_code(self, command, saved, tmp_path):
        torch.save({"args": dataclasses.make_dataclass, "model": STATE}, tmp_path / "x.pt")
        _, _, error = command(tmp_path / "x.pt", saved[1])
        assert "it holds a dataclasses.make_dataclass, which torch.load refuses" in error
        (tmp_path / "x.pt").write_bytes(pickle.dumps({"x": [1.0]}))
        _, _, error = command(tmp_path / "x.pt", saved[1])
        assert "damaged, incomplete or no checkpoint" in error

    def test_folders(self, command, saved, tmp_path):
        (tmp_path / "empty").mkdir()
        _, _, error = command(tmp_path / "empty", saved[1])
        assert "holds none of model.safetensors.index.json, model.safetensors, " in error

    @pytest.mark.parametrize(
        ("index", "complaint"),
        [
            ([], "no weight_map"),
            ({"metadata": {}}, "no weight_map"),
            ({"weight_map": {"x": 1}}, "no weight_map"),
            ({"weight_map": {"x": "a.bin", "y": "b.bin", "z": "b.bin"}}, "are missing: b.bin"),
            ({"weight_map": {"norm.weight": "a.bin"}}, "norm.weight is in a.bin, which does not"),
            ({"weight_map": {"norm.weight": "x.index.json"}}, "x.index.json: it is damaged"),
        ],
    )
    def test_indices(self, command, tmp_path, index, complaint):
        torch.save({"norm.bias": torch.ones(2)}, tmp_path / "a.bin")
        torch.save({"norm.weight": torch.ones(2)}, tmp_path / "after.bin")
        (tmp_path / "x.index.json").write_text(json.dumps(index))
        status, _, error = command(tmp_path / "x.index.json", tmp_path / "after.bin")
        assert status == 2
        assert complaint in error

    def test_a_damaged_shard(self, command, tmp_path):
        path = write(STATE, tmp_path / "before", "model.safetensors.index.json")
        shard = next((tmp_path / "before").glob("*-1-of-3.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
        torch.save(changed(), tmp_path / "after.pt")
        status, _, error = command(path, tmp_path / "after.pt")
        assert status == 2
        assert f"cannot read {shard}: it is damaged" in error

    def test_interrupting(self, saved, monkeypatch, capsys):
        def interrupt(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "load", interrupt)
        assert main(["audit", *map(str, saved)]) == 130
        assert capsys.readouterr().err == "interrupted\n"

    def test_as_a_module_whose_reader_leaves(self, saved):
        command = [sys.executable, "-m", "mcftensor", "audit", *map(str, saved)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
        ) as process:
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == 1


# What it is for


def trained(path, *, expansions):
    """Save a small bf16 model before and after some steps of AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32),
        nn.Linear(32, 4),
    ).bfloat16()  # fmt: skip
    if expansions:
        mcf.as_expansion(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.save({"model": model.state_dict(), "step": 0}, path / "before.pt")
    for _ in range(20):
        x = torch.randn(32, 16).bfloat16()
        model.zero_grad()
        (model(x).float() - x[:, :4].float().tanh()).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "step": 20}, path / "after.pt")
    return path / "before.pt", path / "after.pt"


def test_a_bf16_training_run(command, tmp_path):
    paths = trained(tmp_path, expansions=False)
    status, out, _ = command(*paths)
    assert status == 1
    assert {"1.weight", "4.weight"} <= {line.split()[0] for line in out.splitlines() if line}
    found = {t.name: t for t in audit(*paths).tensors}
    for name in ("1.weight", "4.weight"):
        assert (found[name].verdict, found[name].ones) == ("frozen", 1)
    # Biases that start at 0 move; so do the smaller weights of matrices, and no others.
    assert found["1.bias"].unchanged < 0.1
    assert found["3.weight"].verdict == "mostly frozen"


def test_the_same_run_with_expansions(command, tmp_path):
    paths = trained(tmp_path, expansions=True)
    status, out, _ = command(*paths)
    assert (status, out.count("\n")) == (0, 1)
    assert audit(*paths).unchanged < 0.01


def test_in_a_notebook():
    found = audit(STATE, changed())
    page = found._repr_html_()
    assert page.count("<tr>") == 1 + len(found.tensors)
    assert found.summary() in page
