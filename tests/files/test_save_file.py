"""safetensors files of expansions: what is in them, and into what they load."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.checkpoint.safetensors_files import DTYPES, KEY, sealed
from mcftensor.checkpoint.saving import divide, size_in_bytes
from support.helpers import SCALED, STORED, assert_same_terms, sample, small_model

safetensors = pytest.importorskip("safetensors.torch")
safe_open = pytest.importorskip("safetensors").safe_open

OWN = (mcf.Format(torch.bfloat16, 4), mcf.Format(torch.bfloat16, 2, rounding="stochastic"))
FORMATS = [*mcf.formats.FORMATS, *OWN, *STORED, *SCALED]


def assert_same(x, y):
    if isinstance(x, mcf.MCFTensor):
        assert_same_terms(x, y)
    else:
        assert type(y) in (torch.Tensor, nn.Parameter)
        torch.testing.assert_close(x.detach(), y.detach(), rtol=0, atol=0, equal_nan=True)


def assert_same_state(model, other):
    x, y = model.state_dict(), other.state_dict()
    assert x.keys() == y.keys()
    for name in x:
        assert_same(x[name], y[name])


def names_in(folder):
    return sorted(f.name for f in folder.iterdir())


def expansion_model(seed=0, format=None):
    """With every term busy, and buffers."""
    model = mcf.as_expansion(nn.Sequential(small_model(seed), nn.BatchNorm1d(2)), format)
    for i, p in enumerate(model.parameters()):
        p.data = sample(p.format, *p.shape, seed=100 * seed + i)
    return model


class TestStateDicts:
    @pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
    def test_every_format_keeps_its_bits(self, format, tmp_path):
        values = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-30, 1 / 3]
        numbers = torch.tensor([values], dtype=torch.float64)
        special = mcf.as_expansion(numbers if format.shared else numbers[0], format.nearest)
        state = {
            "x": sample(format, 5, 3),
            "scalar": sample(format, *([1, 1] if format.shared else [])),
            "empty": sample(format, 0, 3),
            "special": mcf.MCFTensor(special.components, format),
        }
        mcf.save_file(state, tmp_path / "x.safetensors")
        loaded = mcf.load_file(tmp_path / "x.safetensors")
        assert loaded.keys() == state.keys()
        for name, x in state.items():
            assert_same_terms(x, loaded[name])
        assert torch.signbit(mcf.as_plain(loaded["special"], torch.float64).view(-1)[3])

    def test_other_programs_read_leading_terms_under_the_plain_names(self, tmp_path):
        model = expansion_model()
        mcf.save_file(model, tmp_path / "x.safetensors", metadata={"author": "me"})
        plain = safetensors.load_file(tmp_path / "x.safetensors")
        for name, x in model.state_dict().items():
            leading, *tails = x.components if isinstance(x, mcf.MCFTensor) else [x]
            assert torch.equal(plain.pop(name), leading)
            for i, tail in enumerate(tails, 1):
                component = x.format.components[i].name
                assert torch.equal(plain.pop(f"{name}.{x.format.name}.{component}"), tail)
            if tails:
                patterns = leading.view(torch.int16).long()
                if not tails[0].is_floating_point():  # any fits: each pattern counts by its place
                    patterns = patterns * torch.arange(1, len(patterns) + 1)
                assert plain.pop(f"{name}.{x.format.name}.sum") == patterns.sum()
        assert not plain
        with safe_open(tmp_path / "x.safetensors", "pt") as file:
            assert file.metadata().keys() == {"format", "author", "mcftensor"}
            assert (file.metadata()["format"], file.metadata()["author"]) == ("pt", "me")

    @pytest.mark.with_float64("some files are of it")
    def test_plain_tensors_of_every_dtype(self, tmp_path):
        state = {str(d): torch.arange(6).reshape(2, 3).to(d) for d in DTYPES}
        mcf.save_file(state, tmp_path / "x.safetensors")
        theirs = safetensors.load_file(tmp_path / "x.safetensors")
        ours = mcf.load_file(tmp_path / "x.safetensors")
        for name, x in state.items():
            assert theirs[name].dtype == ours[name].dtype == x.dtype
            assert torch.equal(theirs[name].view(torch.uint8), x.view(torch.uint8))
            assert torch.equal(ours[name].view(torch.uint8), x.view(torch.uint8))

    def test_conjugated(self, tmp_path):
        x = torch.complex(torch.ones(2), torch.ones(2)).conj()
        mcf.save_file({"x": x}, tmp_path)
        assert torch.equal(mcf.load_file(tmp_path)["x"], x)

    def test_altered_data_are_read_if_asked_for(self, tmp_path):
        mcf.save_file({"x": torch.ones(2)}, tmp_path)
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + bytes(4))
        with pytest.raises(
            mcf.errors.CheckpointError, match=r"damaged, or was altered: the digests of x "
        ):
            mcf.load_file(tmp_path)
        assert mcf.load_file(tmp_path, verify=False)["x"].tolist() == [1, 0]

    def test_a_tensor_that_another_program_has_left_out(self, tmp_path):
        mcf.save_file({"x": torch.ones(2), "y": torch.zeros(2)}, tmp_path)
        file = tmp_path / "model.safetensors"
        with safe_open(file, "pt") as content:
            metadata = content.metadata()
        safetensors.save_file({"x": torch.ones(2)}, file, metadata)
        with pytest.raises(mcf.errors.CheckpointError, match="the digests of y are not"):
            mcf.load_file(file)
        assert mcf.load_file(file, verify=False).keys() == {"x"}

    def test_a_file_of_a_later_version(self, tmp_path):
        file = tmp_path / "model.safetensors"
        metadata = {KEY: json.dumps(sealed({"version": 2, "tied": {}, "tensors": {}}))}
        safetensors.save_file({"x": torch.ones(2)}, file, metadata)
        with pytest.raises(mcf.errors.CheckpointError, match="by a later version of mcftensor"):
            mcf.load_file(file)

    def test_views_and_strides(self, tmp_path):
        x, plain = sample(mcf.bf16x3, 6, 4), torch.arange(24.0).reshape(6, 4)
        state = {
            "t": x.t(),
            "row": x[2],
            "whole": x,
            "flat": x.view(-1),
            "leading": x.components[0],
        }
        state |= {
            "plain": plain,
            "plain.t": plain.t(),
            "part": plain[1:3],
            "expanded": plain[:1].expand(3, 4),
        }
        mcf.save_file(state, tmp_path / "x.safetensors")
        loaded = mcf.load_file(tmp_path / "x.safetensors")
        for name, y in state.items():
            assert_same(y, loaded[name])
            assert loaded[name].is_contiguous()

    def test_what_is_loaded_can_be_written_to_and_leaves_the_file_alone(self, tmp_path):
        state = {"x": sample(mcf.bf16x2, 3), "y": torch.ones(3)}
        mcf.save_file(state, tmp_path / "x.safetensors")
        for x in mcf.load_file(tmp_path / "x.safetensors").values():
            x.mul_(3)
        for name, x in mcf.load_file(tmp_path / "x.safetensors").items():
            assert_same(state[name], x)

    def test_deferred_results_are_computed(self, tmp_path):
        with torch.no_grad():
            x = sample(mcf.bf16x2, 4) * sample(mcf.bf16x2, 4, seed=1)
            mcf.save_file({"x": x}, tmp_path / "x.safetensors")
        assert_same_terms(x, mcf.load_file(tmp_path / "x.safetensors")["x"])

    def test_device(self, device, tmp_path):
        x = sample(mcf.bf16x2, 4, device=device)
        mcf.save_file({"x": x, "y": x}, tmp_path / "x.safetensors")
        loaded = mcf.load_file(tmp_path / "x.safetensors", device=device)
        assert loaded["x"] is loaded["y"]
        assert loaded["x"].device == x.device
        assert_same_terms(x, loaded["x"])

    @pytest.mark.parametrize("name", ["a/b", "ü.λ", "a b", '"', "__metadata", "x.term1", "."])
    def test_names(self, name, tmp_path):
        mcf.save_file({name: sample(mcf.bf16x2, 2)}, tmp_path / "x.safetensors")
        assert list(mcf.load_file(tmp_path / "x.safetensors")) == [name]
        assert name in safetensors.load_file(tmp_path / "x.safetensors")

    def test_nothing(self, tmp_path):
        mcf.save_file({}, tmp_path / "x.safetensors")
        assert mcf.load_file(tmp_path / "x.safetensors") == {}


class TestModels:
    def test_into_the_same_model(self, tmp_path):
        model, other = expansion_model(), expansion_model(seed=1)
        parameters = list(other.parameters())
        mcf.save_file(model, tmp_path / "x.safetensors")
        assert mcf.load_file(tmp_path / "x.safetensors", other) == ([], [])
        assert_same_state(model, other)
        assert all(p is q for p, q in zip(parameters, other.parameters(), strict=True))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_into_a_plain_model_with_one_rounding(self, dtype, tmp_path):
        model, plain = expansion_model(), nn.Sequential(small_model(1), nn.BatchNorm1d(2)).to(dtype)
        mcf.save_file(model, tmp_path / "x.safetensors")
        mcf.load_file(tmp_path / "x.safetensors", plain)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(mcf.as_plain(p, dtype), q)

    @pytest.mark.parametrize(
        "dtype",
        [
            *(torch.bfloat16, torch.float16, torch.float32),
            pytest.param(torch.float64, marks=pytest.mark.with_float64("the file is of it")),
        ],
    )
    def test_from_a_plain_file_of_another_program_with_one_rounding(self, dtype, tmp_path):
        plain = nn.Sequential(small_model(), nn.BatchNorm1d(2)).to(dtype)
        safetensors.save_model(plain, tmp_path / "x.safetensors")
        model = expansion_model(seed=1)
        mcf.load_file(tmp_path / "x.safetensors", model)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert_same_terms(mcf.as_expansion(p.detach(), q.format), q)

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize(
        "stored",
        [
            *(mcf.fp32x2, mcf.bf16x2, mcf.bf16x3),
            pytest.param(mcf.fp64x2, marks=pytest.mark.with_float64("the file is of it")),
        ],
    )
    @pytest.mark.parametrize("wanted", [mcf.bf16x3, mcf.fp32x2, OWN[0]])
    def test_into_another_format(self, stored, wanted, tmp_path):
        model, other = expansion_model(0, stored), expansion_model(1, wanted)
        mcf.save_file(model, tmp_path / "x.safetensors")
        with mcf.when_rounded("ignore"):
            mcf.load_file(tmp_path / "x.safetensors", other)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert_same_terms(mcf.as_expansion(p.detach(), wanted), q)

    def test_strict(self, tmp_path):
        model, other = expansion_model(), expansion_model(seed=1)
        state = model.state_dict()
        state["more"] = state.pop("0.0.weight")
        mcf.save_file(state, tmp_path / "x.safetensors")
        before = {name: x.clone() for name, x in other.state_dict().items()}
        with pytest.raises(
            mcf.errors.CheckpointError, match=r"the model has 0\.0\.weight; only .* more"
        ):
            mcf.load_file(tmp_path / "x.safetensors", other)
        for name, x in other.state_dict().items():
            assert_same(before[name], x)
        path = tmp_path / "x.safetensors"
        assert mcf.load_file(path, other, strict=False) == (["0.0.weight"], ["more"])
        assert_same(before["0.0.weight"], other[0][0].weight.detach())
        assert_same(state["0.0.bias"], other[0][0].bias.detach())

    def test_a_saved_model_of_hugging_face(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = mcf.as_expansion(transformers.GPT2LMHeadModel(config))
        for i, p in enumerate(model.parameters()):
            p.data = sample(p.format, *p.shape, seed=i)
        terms = mcf.checkpoint.as_terms(model.state_dict())
        model.save_pretrained(tmp_path / "terms", state_dict=terms, max_shard_size="2KB")
        other = mcf.as_expansion(transformers.GPT2LMHeadModel(config))
        mcf.load_file(tmp_path / "terms", other)
        assert_same_state(model, other)
        # And the other way: what is saved here, their loader reads as a bf16 model.
        config.save_pretrained(tmp_path / "file")
        mcf.save_file(model, tmp_path / "file")
        theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "file", dtype="bfloat16")
        assert theirs.lm_head.weight is theirs.transformer.wte.weight
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.components[0], q)


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        nn.init.normal_(self.embedding.weight, std=0.1)  # small enough for two terms
        self.head = nn.Linear(3, 5)
        if tie:
            self.head.weight = self.embedding.weight


class TestTies:
    def test_stored_once_and_restored(self, tmp_path):
        torch.manual_seed(0)
        model, other = mcf.as_expansion(Tied()), mcf.as_expansion(Tied())
        mcf.save_file(model, tmp_path / "x.safetensors")
        assert "head.weight" not in safetensors.load_file(tmp_path / "x.safetensors")
        mcf.load_file(tmp_path / "x.safetensors", other)
        assert other.head.weight is other.embedding.weight
        assert_same_state(model, other)
        state = mcf.load_file(tmp_path / "x.safetensors")
        assert state["head.weight"] is state["embedding.weight"]

    def test_into_a_model_that_is_not_tied(self, tmp_path):
        model, other = mcf.as_expansion(Tied()), mcf.as_expansion(Tied(tie=False))
        mcf.save_file(model, tmp_path / "x.safetensors")
        mcf.load_file(tmp_path / "x.safetensors", other)
        assert_same_state(model, other)

    @pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
    def test_a_file_of_another_program_that_has_one_of_the_names(self, kept, tmp_path):
        state = Tied().state_dict()
        (dropped,) = {"embedding.weight", "head.weight"} - {kept}
        safetensors.save_file(
            {n: x for n, x in state.items() if n != dropped}, tmp_path / "x.safetensors"
        )
        model = mcf.as_expansion(Tied())
        assert mcf.load_file(tmp_path / "x.safetensors", model) == ([], [])
        assert_same_terms(mcf.as_expansion(state[kept], mcf.bf16x2), model.head.weight)

    @pytest.mark.parametrize("kept", ["a", "b", "c"])
    def test_three_names(self, kept, tmp_path):
        model = nn.Module()
        model.a = model.b = model.c = nn.Parameter(sample(mcf.bf16x2, 3))
        mcf.save_file({kept: sample(mcf.bf16x2, 3, seed=1)}, tmp_path)
        assert mcf.load_file(tmp_path, model) == ([], [])
        assert_same_terms(model.b.detach(), sample(mcf.bf16x2, 3, seed=1))

    def test_a_tied_model_takes_no_two_different_tensors(self, tmp_path):
        mcf.save_file(mcf.as_expansion(Tied(tie=False)), tmp_path / "x.safetensors")
        with pytest.raises(mcf.errors.CheckpointError, match="tied in the model, and differ"):
            mcf.load_file(tmp_path / "x.safetensors", mcf.as_expansion(Tied()))


class TestShards:
    def save(self, model, folder, size=60, **options):
        folder.mkdir(exist_ok=True)
        mcf.save_file(model, folder / "model.safetensors", max_shard_size=size, **options)
        return json.loads((folder / "model.safetensors.index.json").read_text())

    def test_files_and_index(self, tmp_path):
        model = mcf.as_expansion(Tied())
        index = self.save(model, tmp_path, metadata={"author": "me"})
        terms = mcf.checkpoint.as_terms(
            {"embedding.weight": model.embedding.weight, "head.bias": model.head.bias}, sums=True
        )
        assert index["weight_map"].keys() == terms.keys()
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in terms.values()) == 106
        assert index["metadata"]["author"] == "me"
        files = set(index["weight_map"].values())
        assert {f.name for f in tmp_path.iterdir()} == files | {"model.safetensors.index.json"}
        assert len(files) == 2  # all terms of a tensor are in one, also where they are larger
        for file in files:
            for name, x in safetensors.load_file(tmp_path / file).items():
                assert torch.equal(x, terms[name])

    @pytest.mark.parametrize(
        "path", ["", "model.safetensors", "model.safetensors.index.json"], ids=str
    )
    def test_loads_by_any_of_its_names(self, path, tmp_path):
        model, other = mcf.as_expansion(Tied()), mcf.as_expansion(Tied())
        self.save(model, tmp_path)
        mcf.load_file(tmp_path / path, other)
        assert_same_state(model, other)
        state = mcf.load_file(tmp_path / path)
        assert state["head.weight"] is state["embedding.weight"]

    @pytest.mark.parametrize("most", [1, 24, 60, 100, 1000])
    def test_each_holds_as_many_numbers_as_fit(self, most):
        terms = {f"x{i}": torch.zeros(size) for i, size in enumerate((3, 5, 1, 30, 2, 2, 8, 9))}
        shards = divide(terms, most)
        assert [name for shard in shards for name in shard] == list(terms)
        sizes = [[terms[name].nbytes for name in shard] for shard in shards]
        for these, following in itertools.zip_longest(sizes, sizes[1:], fillvalue=[most]):
            assert sum(these) <= most or len(these) == 1
            assert sum(these) + following[0] > most

    def test_one_that_fits_is_one_file(self, tmp_path):
        mcf.save_file(Tied(), tmp_path, max_shard_size="1MB")
        assert names_in(tmp_path) == ["model.safetensors"]

    def test_nothing_stale_stays(self, tmp_path):
        first, second, third = (mcf.as_expansion(Tied()) for _ in range(3))
        bystander = tmp_path / "model-00001-of-00003.safetensors.bak"
        bystander.touch()
        for model, size, count in [
            (first, None, 1),
            (second, 60, 3),
            (third, 30, 3),
            (first, None, 1),
        ]:
            mcf.save_file(model, tmp_path, max_shard_size=size)
            assert len(names_in(tmp_path)) == count + 1
            other = mcf.as_expansion(Tied())
            mcf.load_file(tmp_path, other)
            assert_same_state(model, other)
        assert bystander.exists()

    def test_nothing_is_removed_while_the_index_cannot_be_read(self, tmp_path, monkeypatch):
        first, second = mcf.as_expansion(Tied()), mcf.as_expansion(Tied())
        self.save(first, tmp_path)
        read = Path.read_text

        def failing(path, *args, **kwargs):
            if path.name.endswith("index.json"):
                raise OSError(24, "Too many open files")
            return read(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", failing)
            mcf.save_file(second, tmp_path / "model.safetensors", max_shard_size=60)
        other = mcf.as_expansion(Tied())
        mcf.load_file(tmp_path, other)
        assert_same_state(second, other)

    def test_replaces_shards_of_another_program(self, tmp_path):
        for i in (1, 2):
            file = f"model-0000{i}-of-00002.safetensors"
            safetensors.save_file({str(i): torch.ones(2)}, tmp_path / file)
        index = {"weight_map": {str(i): f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert mcf.load_file(tmp_path).keys() == {"1", "2"}
        mcf.save_file({"x": torch.ones(3)}, tmp_path)
        assert names_in(tmp_path) == ["model.safetensors"]

    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            (7, 7),
            ("5GB", 5 * 10**9),
            ("1.5 kb", 1500),
            ("2MiB", 2**21),
            ("10", 10),
            ("1TB", 10**12),
        ],
    )
    def test_sizes(self, size, expected):
        assert size_in_bytes(size) == expected

    @pytest.mark.parametrize("size", [0, -5, "GB", "5 apples", "", 1.5, True])
    def test_sizes_that_are_none(self, size, tmp_path):
        with pytest.raises(ValueError, match="max_shard_size"):
            mcf.save_file({}, tmp_path, max_shard_size=size)


class TestRefusals:
    @pytest.mark.parametrize(
        ("state", "match"),
        [
            ({"x": 3}, "'x' is a int, and safetensors holds tensors"),
            ({3: torch.ones(1)}, "3 is a Tensor"),
            ({"x": torch.eye(2).to_sparse()}, "sparse_coo"),
            ({"x": torch.ones(2, device="meta")}, "meta device"),
            ({"x": torch.ones(2, dtype=torch.complex128)}, "complex128"),
            ({"__metadata__": torch.ones(2)}, "__metadata__"),
            ({"x": sample(mcf.bf16x2, 2), "x.bf16x2.term1": torch.ones(2)}, "is taken"),
            ({"x.bf16x2.term1": torch.ones(2)}, "would be terms of x"),
            ({"x": torch.ones(2), "x.bf16x3.term1": torch.ones(2)}, "would be terms of x"),
        ],
    )
    def test_what_cannot_be_stored(self, state, match, tmp_path):
        with pytest.raises(mcf.errors.CheckpointError, match=match):
            mcf.save_file(state, tmp_path)
        assert not names_in(tmp_path)

    @pytest.mark.parametrize("metadata", [{"x": 3}, {3: "x"}, {"mcftensor": "x"}])
    def test_metadata(self, metadata, tmp_path):
        with pytest.raises(ValueError, match="metadata"):
            mcf.save_file({}, tmp_path, metadata=metadata)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (
                lambda s: s | {"0.0.weight": torch.ones(3, 3)},
                r"shape \(3, 3\).*\(8, 4\) in the model",
            ),
            (lambda s: s | {"0.0.weight": torch.ones(8, 4).int()}, "int32"),
            (lambda s: s | {"1.num_batches_tracked": torch.tensor(1.5)}, "float32"),
        ],
    )
    def test_what_does_not_fit_the_model(self, change, match, tmp_path):
        model = expansion_model()
        mcf.save_file(change(expansion_model(seed=1).state_dict()), tmp_path)
        before = {name: x.clone() for name, x in model.state_dict().items()}
        for strict in (True, False):
            with pytest.raises(mcf.errors.CheckpointError, match=match):
                mcf.load_file(tmp_path, model, strict=strict)
        for name, x in model.state_dict().items():
            assert_same(before[name], x)

    def test_a_model_without_memory(self, tmp_path):
        mcf.save_file(nn.Linear(2, 2), tmp_path)
        with pytest.raises(mcf.errors.CheckpointError, match=r"meta device.*to_empty"):
            mcf.load_file(tmp_path, nn.Linear(2, 2, device="meta"))

    def test_a_model_without_shapes(self, tmp_path):
        with pytest.raises(mcf.errors.CheckpointError, match="no shape yet"):
            mcf.save_file(nn.LazyLinear(2), tmp_path)
        mcf.save_file(nn.Linear(3, 2), tmp_path)
        model = nn.LazyLinear(2)
        mcf.load_file(tmp_path, model)
        assert model.weight.shape == (2, 3)

    def test_no_file(self, tmp_path):
        with pytest.raises(mcf.errors.CheckpointError, match=r"cannot read .*No such file"):
            mcf.load_file(tmp_path / "x")
        with pytest.raises(
            mcf.errors.CheckpointError, match=r"the folder .* holds none of model\."
        ):
            mcf.load_file(tmp_path)
        with pytest.raises(FileNotFoundError):
            mcf.save_file({}, tmp_path / "no" / "x")

    def test_a_package_that_is_not_there(self, tmp_path, monkeypatch):
        mcf.save_file({}, tmp_path)
        monkeypatch.setitem(sys.modules, "safetensors", None)
        mcf.save_file({}, tmp_path)
        with pytest.raises(ImportError, match=r"cannot read .*pip install safetensors"):
            mcf.load_file(tmp_path)

    def test_a_device_for_a_model(self, tmp_path):
        mcf.save_file(nn.Linear(2, 2), tmp_path)
        with pytest.raises(ValueError, match="device"):
            mcf.load_file(tmp_path, nn.Linear(2, 2), device="cpu")


class TestForeignTerms:
    def test_terms_that_another_program_has_changed(self, tmp_path):
        terms = mcf.checkpoint.as_terms({"x": sample(mcf.bf16x2, 50), "y": sample(mcf.bf16x3, 50)})
        halves = {name: t * 0.7 if "sum" not in name else t for name, t in terms.items()}
        halves["x.bf16x2.term1"] *= 300
        safetensors.save_file(halves, tmp_path / "model.safetensors")
        with pytest.raises(mcf.errors.CheckpointError, match="terms of x in bf16x2 were changed"):
            mcf.load_file(tmp_path)
        for name, x in mcf.load_file(tmp_path, tails=False).items():
            assert torch.equal(mcf.as_plain(x, torch.bfloat16), halves[name])
        for name, x in mcf.load_file(tmp_path, verify=False).items():
            parts = [t for n, t in halves.items() if n[0] == name and "sum" not in n]
            assert_same_terms(mcf.MCFTensor(mcf.expansion.renormalize(parts)), x)


@pytest.mark.wing("tools")
def test_audit_reads_expansions_from_safetensors(tmp_path):
    state = {"x": sample(mcf.bf16x2, 40), "y": sample(mcf.bf16x3, 20)}
    after = {name: x.clone() for name, x in state.items()}
    after["x"][:10] *= 1 + 2**-12  # which leading terms do not show
    for size in (None, 100):
        mcf.save_file(state, tmp_path / "before.safetensors", max_shard_size=size)
        mcf.save_file(after, tmp_path / "after.safetensors", max_shard_size=size)
        suffix = ".index.json" if size else ""
        found = mcf.meters.audit(
            *(tmp_path / f"{n}.safetensors{suffix}" for n in ("before", "after"))
        )
        assert {t.name: (t.dtype, t.unchanged) for t in found.tensors} == {
            "x": ("bf16x2", 0.75),
            "y": ("bf16x3", 1),
        }
