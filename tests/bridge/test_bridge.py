"""Conversion of checkpoints: what is converted, what is refused, in how much memory."""

import copy
import functools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.__main__ import main
from support import foreign
from support.forks import exit_status, needs_fork
from support.helpers import assert_same_bits, sample
from support.helpers import small_model as make


def every_kind_of_float():
    """Patterns of float32 from all over."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1000, 64), generator=generator, dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    special = [0.0, -0.0, float("inf"), -float("inf"), 1e-45, -1e-40, 3.4e38, 1 + 2**-8, 1 + 2**-16]
    x[0, : len(special)] = torch.tensor(special)
    return torch.where(x.isnan(), torch.nan, x)


class TestWeights:
    def test_every_float32_and_back(self, tmp_path):
        x = every_kind_of_float()
        torch.save({"x": x, "scalar": x[3, 3], "empty": x[:0]}, tmp_path / "x.pt")
        mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "narrow")
        mcf.checkpoint.convert_checkpoint(tmp_path / "narrow", tmp_path / "wide", torch.float32)
        found = mcf.load_file(tmp_path / "wide")
        for name, y in {"x": x, "scalar": x[3, 3], "empty": x[:0]}.items():
            assert found[name].shape == y.shape
            same = found[name].view(torch.int32) == y.view(torch.int32)
            assert (same | y.isnan()).all()

    @pytest.mark.parametrize(
        ("source", "target"),
        [("bf16x3", "bf16i16"), ("bf16i16", "bf16x3"), ("bf16i8", "float32"), ("fp32x2", "float64"),
         ("bf16x2", "fp32x2"), ("bf16i8", "bf16i16"), ("float64", "fp64x2"),
         ("e4m3i8", "float32"), ("e4m3i8", "e4m3i16"), ("e4m3i16", "bf16i16")],
    )  # fmt: skip
    def test_between_formats(self, source, target, tmp_path):
        x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
        format = mcf.formats.named(source)
        y = x.to(torch.float64) if source == "float64" else mcf.as_expansion(x, format)
        mcf.save_file({"y": y}, tmp_path / "y.safetensors")
        mcf.checkpoint.convert_checkpoint(tmp_path / "y.safetensors", tmp_path / "to", target)
        other = mcf.load_file(tmp_path / "to")["y"]
        assert getattr(other, "format", mcf.formats.PLAIN[other.dtype]).name == target
        mcf.checkpoint.convert_checkpoint(tmp_path / "to", tmp_path / "back", source)
        assert_same_bits(mcf.load_file(tmp_path / "back"), {"y": y})

    def test_vectors_have_no_rows_to_share_scales(self, tmp_path):
        layer = nn.Linear(40, 30)
        torch.save(layer.state_dict(), tmp_path / "x.pt")
        done = mcf.checkpoint.convert_checkpoint(
            tmp_path / "x.pt", tmp_path / "to", mcf.e4m3i16, lossy=True
        )
        found = mcf.load_file(tmp_path / "to")
        assert (found["weight"].format, found["bias"].format) == (mcf.e4m3i16, mcf.bf16i16)
        assert list(done.lost) == ["weight"]
        assert torch.equal(mcf.as_plain(found["bias"], torch.float32), layer.bias.detach())
        error = mcf.as_plain(found["weight"], torch.float32) - layer.weight.detach()
        assert 0 < error.abs().max() <= 2.0**-20

    def test_what_stays_as_it_is(self, tmp_path):
        plain = {
            "half": torch.ones(3).half(),
            "bf16": torch.ones(3).bfloat16(),
            "steps": torch.tensor(3),
            "mask": torch.tensor([True, False]),
        }
        torch.save(plain, tmp_path / "x.pt")
        mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "to")
        assert_same_bits(
            dict(sorted(mcf.load_file(tmp_path / "to").items())), dict(sorted(plain.items()))
        )

    def test_bits_that_would_be_lost(self, tmp_path):
        x = torch.tensor([[1.0, 1 + 2**-8 + 2**-23], [0.5, 3.0]])
        torch.save({"a.b": x}, tmp_path / "x.pt")
        with pytest.raises(
            mcf.errors.CheckpointError,
            match=r"a\.b of shape \(2, 2\) would lose bits in 1 of 4 elements, from float32 into "
            r"bf16x2; mcf.bf16i16 holds every float32. lossy=True \(--lossy\) rounds them",
        ):
            mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "to", mcf.bf16x2)
        assert [f.name for f in tmp_path.iterdir()] == ["x.pt"]
        done = mcf.checkpoint.convert_checkpoint(
            tmp_path / "x.pt", tmp_path / "to", "bf16x2", lossy=True
        )
        assert done.lost == {"a.b": 1}
        assert_same_bits(mcf.load_file(tmp_path / "to"), {"a.b": mcf.as_expansion(x, mcf.bf16x2)})

    def test_zeros_whose_sign_would_be_lost(self, tmp_path):
        x = torch.tensor([-0.0, 0.0, 1.0])
        torch.save({"x": x}, tmp_path / "x.pt")
        mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "to")
        assert_same_bits(
            {"x": mcf.as_plain(mcf.load_file(tmp_path / "to")["x"], torch.float32)}, {"x": x}
        )

    def test_tied_weights(self, tmp_path):
        x = torch.randn(3)
        torch.save({"a": x, "b": x, "c": x.clone()}, tmp_path / "x.pt")
        mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "to")
        found = mcf.load_file(tmp_path / "to")
        assert found["a"] is found["b"]
        assert found["a"] is not found["c"]

    def test_shards(self, tmp_path):
        torch.save(foreign.MASTERS, tmp_path / "x.pt")
        mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "to", max_shard_size=100)
        assert len(list((tmp_path / "to").glob("model-*.safetensors"))) > 2
        found = {
            name: mcf.as_plain(x, torch.float32)
            for name, x in mcf.load_file(tmp_path / "to").items()
        }
        assert found.keys() == foreign.MASTERS.keys()
        assert all(torch.equal(x, foreign.MASTERS[name]) for name, x in found.items())

    def test_expansions_in_files_of_torch_save(self, tmp_path):
        state = {"x": sample(mcf.bf16x3, 4, 3), "y": torch.ones(2)}
        torch.save(state, tmp_path / "x.pt")
        assert_same_bits(mcf.load_file(tmp_path / "x.pt"), state)
        mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "to", mcf.bf16x3)
        found = mcf.load_file(tmp_path / "to")
        assert_same_bits({"x": found["x"]}, {"x": state["x"]})
        assert found["y"].format == mcf.bf16x3

    def test_what_is_loaded_leaves_the_file_alone(self, tmp_path):
        torch.save(foreign.MASTERS, tmp_path / "x.pt")
        for x in mcf.load_file(tmp_path / "x.pt").values():
            x.zero_()
        assert_same_bits(mcf.load_file(tmp_path / "x.pt"), foreign.MASTERS)

    @pytest.mark.parametrize("format", ["bf17", 3, torch.int8, None, "int8"])
    def test_no_format(self, format, tmp_path):
        with pytest.raises((TypeError, ValueError), match="format"):
            mcf.checkpoint.convert_checkpoint(tmp_path, tmp_path / "to", format)


class TestDestinations:
    def test_what_is_there_stays(self, tmp_path):
        torch.save(foreign.MASTERS, tmp_path / "x.pt")
        (tmp_path / "to").mkdir()
        mcf.checkpoint.convert_checkpoint(
            tmp_path / "x.pt", tmp_path / "to"
        )  # an empty folder may be there
        before = (tmp_path / "to" / "model.safetensors").read_bytes()
        with pytest.raises(mcf.errors.CheckpointError, match="is there already; remove it"):
            mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "to", torch.float32)
        assert (tmp_path / "to" / "model.safetensors").read_bytes() == before
        with pytest.raises(
            mcf.errors.CheckpointError, match=r"there is no folder .*; make it first"
        ):
            mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "no" / "to")

    def test_an_error_in_the_middle_leaves_nothing(self, tmp_path):
        torch.save(foreign.MASTERS, tmp_path / "x.pt")

        def stop(name, done, total):
            assert 0 < done <= total
            if done > total / 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            mcf.checkpoint.convert_checkpoint(tmp_path / "x.pt", tmp_path / "to", progress=stop)
        assert [f.name for f in tmp_path.iterdir()] == ["x.pt"]

    @needs_fork
    def test_what_a_killed_process_has_left_goes_with_the_next(self, tmp_path):
        torch.save(foreign.MASTERS, tmp_path / "x.pt")
        convert = functools.partial(
            mcf.checkpoint.convert_checkpoint, tmp_path / "x.pt", tmp_path / "to"
        )
        assert exit_status(lambda: convert(progress=lambda *_: os._exit(9))) == 9
        assert len(list(tmp_path.glob(".to.*.tmp"))) == 1
        convert()
        assert sorted(f.name for f in tmp_path.iterdir()) == ["to", "x.pt"]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 4, generator=generator)
    return x.bfloat16(), torch.randn(32, 2, generator=generator)


def loss_of(model, step):
    x, y = batch(step)
    return (model(x).float() - y).square().mean()


class MasterWeights:
    """A run of mixed precision: a bfloat16 model, float32 weights that are stepped."""

    def __init__(self):
        self.masters = make()
        self.narrow = copy.deepcopy(self.masters).bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=1e-2, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)

    def step(self, i):
        pairs = list(zip(self.narrow.parameters(), self.masters.parameters(), strict=True))
        for p, master in pairs:  # ties away from zero, as the format rounds
            p.data.copy_(mcf.as_expansion(master.detach(), mcf.bf16i16).components[0])
            p.grad = None
        loss = loss_of(self.narrow, i)
        loss.backward()
        for p, master in pairs:
            master.grad = p.grad.float()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_run_with_master_weights_goes_on_to_the_bit(is_converted, tmp_path):
    run = MasterWeights()
    for i in range(15):
        run.step(i)
    parts = {"model": run.masters, "optimizer": run.optimizer, "scheduler": run.scheduler}
    path = tmp_path / "run.pt"
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    expected = [run.step(i) for i in range(15, 40)]

    model = mcf.as_expansion(make(seed=1), mcf.bf16i16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    source = path
    if is_converted:
        source = tmp_path / "converted"
        mcf.checkpoint.convert_checkpoint(path, source)
    mcf.load_file(source, model, optimizer=optimizer)
    scheduler.load_state_dict(torch.load(path, weights_only=True)["scheduler"])
    losses = []
    for i in range(15, 40):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses == expected
    for p, master in zip(model.parameters(), run.masters.parameters(), strict=True):
        assert torch.equal(mcf.as_plain(p, torch.float32), master)
        for key in ("exp_avg", "exp_avg_sq"):
            theirs = run.optimizer.state[master][key]
            assert torch.equal(mcf.as_plain(optimizer.state[p][key], torch.float32), theirs)


class TestOptimizers:
    def save(self, tmp_path, optimizer_of):
        model = make()
        optimizer = optimizer_of(model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(content, tmp_path / "run.pt")
        mcf.checkpoint.convert_checkpoint(tmp_path / "run.pt", tmp_path / "to")
        return model, optimizer

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize("optimizer_of", [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3), foreach=False),
        lambda model: torch.optim.AdamW(model.named_parameters(), amsgrad=True),
        lambda model: torch.optim.Adafactor(model.parameters()),
        lambda model: torch.optim.AdamW(
            [{"params": [p], "weight_decay": 0.1 * p.dim()} for p in model.parameters()]
        ),
    ])  # fmt: skip
    def test_there_and_back(self, optimizer_of, tmp_path):
        _, optimizer = self.save(tmp_path, optimizer_of)
        mcf.checkpoint.convert_checkpoint(tmp_path / "to", tmp_path / "back", torch.float32)
        other = make(seed=1)
        loaded = optimizer_of(other)
        for group in loaded.param_groups:
            group["weight_decay"] = 7.0
        mcf.load_file(tmp_path / "back", other, optimizer=loaded)
        state, expected = loaded.state_dict(), optimizer.state_dict()
        for i, values in expected["state"].items():
            assert_same_bits(*(dict(sorted(x.items())) for x in (state["state"][i], values)))
        assert str(state["param_groups"]) == str(expected["param_groups"])

    def test_formats_of_states(self, tmp_path):
        self.save(tmp_path, lambda model: torch.optim.AdamW(model.parameters()))
        done = mcf.checkpoint.convert_checkpoint(
            tmp_path / "run.pt", tmp_path / "two", mcf.bf16x3, states="bf16x2", lossy=True
        )
        states = mcf.load_file(tmp_path / "two" / "optimizer.safetensors")
        assert states["state.0.exp_avg"].format == mcf.bf16x2
        assert states["state.0.step"].dtype == torch.float32
        assert any("exp_avg" in name for name in done.lost)

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("optimizer_of", "expected"),
        [
            (
                lambda p: torch.optim.AdamW(p, amsgrad=True),
                {
                    "exp_avg": mcf.mxfp8,
                    "exp_avg_sq": mcf.ue5m3,
                    "max_exp_avg_sq": mcf.ue5m3.nearest,
                },
            ),
            (
                lambda p: torch.optim.RMSprop(p, centered=True),
                {"square_avg": mcf.bf16i16, "grad_avg": mcf.bf16i16},
            ),
            (torch.optim.Adagrad, {"sum": mcf.bf16i16}),
            (
                lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
                {"momentum_buffer": mcf.mxfp8},
            ),
        ],
    )
    def test_states_of_the_compact_mode(self, optimizer_of, expected, dtype, tmp_path):
        """The formats are those that `collage` makes, and the weights lose nothing."""
        model = make().to(dtype)
        optimizer = optimizer_of(model.parameters())
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict()["state"])
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(content, tmp_path / "run.pt")
        done = mcf.checkpoint.convert_checkpoint(
            tmp_path / "run.pt", tmp_path / "to", states="compact"
        )
        states = mcf.load_file(tmp_path / "to" / "optimizer.safetensors")
        for i, p in enumerate(model.parameters()):
            for key, format in expected.items():
                x = states[f"state.{i}.{key}"]
                assert x.format == (mcf.bf16i16 if p.dim() < 2 else format)
                own, most = before[i][key].double(), before[i][key].double().abs().amax()
                error = (mcf.as_plain(x, torch.float64) - own).abs()
                assert (error <= own.abs() / 8 + most * 2.0**-17).all()
        assert set(done.lost) <= set(states)  # and no weight

        loaded = mcf.as_expansion(make(seed=1), mcf.bf16i8)
        other = optimizer_of(loaded.parameters())
        with mcf.when_rounded("ignore"):  # tails of 16 bits into tails of 8
            mcf.load_file(tmp_path / "to", loaded, optimizer=other, strict=False)
        mcf.collage(other, "compact")
        for p in loaded.parameters():
            for key, format in expected.items():
                wanted = mcf.bf16i16 if p.dim() < 2 else format
                assert other.state[p][key].format == wanted

    def test_states_of_four_bits(self, tmp_path):
        self.save(tmp_path, lambda model: torch.optim.AdamW(model.parameters()))
        mcf.checkpoint.convert_checkpoint(tmp_path / "run.pt", tmp_path / "four", states="compact4")
        states = mcf.load_file(tmp_path / "four" / "optimizer.safetensors")
        found = {x.format for x in states.values() if isinstance(x, mcf.MCFTensor)}
        assert {mcf.e3m0, mcf.ue4m0} <= found

    def test_compact_states_may_round_and_weights_may_not(self, tmp_path):
        self.save(tmp_path, lambda model: torch.optim.AdamW(model.parameters()))
        with pytest.raises(mcf.errors.CheckpointError, match=r"weight of shape .* would lose bits"):
            mcf.checkpoint.convert_checkpoint(
                tmp_path / "run.pt", tmp_path / "two", mcf.bf16x2, states="compact"
            )

    def test_another_optimizer_is_refused_before_anything_changes(self, tmp_path):
        self.save(tmp_path, lambda model: torch.optim.AdamW(model.parameters()))
        model = make(seed=1)
        before = copy.deepcopy(model.state_dict())
        parameters = list(model.parameters())
        optimizers = {
            r"the groups of the optimizer have \[2\] parameters": parameters[:2],
            r"of shape \(8, 4\) in .*, and the parameter of \(8,\)": [
                parameters[1], parameters[0], *parameters[2:]
            ],
        }  # fmt: skip
        for message, given in optimizers.items():
            optimizer = torch.optim.AdamW(given)
            with pytest.raises(mcf.errors.CheckpointError, match=message):
                mcf.load_file(tmp_path / "to", model, optimizer=optimizer)
            assert not optimizer.state
        assert_same_bits(model.state_dict(), before)

    def test_names_that_differ(self, tmp_path):
        source = foreign.deepspeed(tmp_path)
        model = nn.Module()
        model.norm = nn.LayerNorm(6)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(mcf.errors.CheckpointError, match="only the model has norm"):
            mcf.load_file(source, model, optimizer=optimizer)
        mcf.load_file(source, model, optimizer=optimizer, strict=False)
        assert torch.equal(model.norm.weight, foreign.MASTERS["norm.weight"])
        assert len(optimizer.state) == 1

    def test_states_that_json_does_not_hold(self, tmp_path):
        content = torch.load(foreign.torch_file(tmp_path), weights_only=True)
        content["optimizer"]["state"][0]["history"] = [torch.ones(2)]
        torch.save(content, tmp_path / "run.pt")
        with pytest.raises(
            mcf.errors.CheckpointError, match="optimizer=False leaves its states out"
        ):
            mcf.checkpoint.convert_checkpoint(tmp_path / "run.pt", tmp_path / "to")
        mcf.checkpoint.convert_checkpoint(tmp_path / "run.pt", tmp_path / "to", optimizer=False)

    def test_an_optimizer_without_its_model(self):
        with pytest.raises(ValueError, match="is loaded with the model of its parameters"):
            mcf.load_file("x", optimizer=torch.optim.SGD([torch.ones(1)]))


class TestCommand:
    def test_there_and_back(self, tmp_path, capsys):
        source, to, back = (str(tmp_path / name) for name in ("run.pt", "to", "back"))
        foreign.torch_file(tmp_path)
        assert main(["convert", source, to, "--format", "bf16i16"]) == 0
        assert (
            capsys.readouterr().out
            == f"{to}: 4 weights and 12 states in bf16i16, from torch.save\n"
        )
        assert main(["convert", to, back, "--format", "float32", "--weights-only"]) == 0
        assert_same_bits(
            dict(sorted(mcf.load_file(back).items())), dict(sorted(foreign.MASTERS.items()))
        )

    def test_mistakes_are_one_line(self, tmp_path, capsys):
        source, to = str(foreign.torch_file(tmp_path)), str(tmp_path / "to")
        for arguments, expected in (
            ([source, to, "--format", "bf16x2"], "would lose bits in"),
            ([source, to, "--format", "bf1"], "'bf1' is not the name of a format"),
            ([source, to, "--max-shard-size", "no"], "max_shard_size is 'no'"),
            ([source, to, "--parameters", str(tmp_path / "none")], "No such file"),
            ([str(tmp_path / "none"), to], "No such file"),
        ):
            assert main(["convert", *arguments]) == 2
            error = capsys.readouterr().err
            assert expected in error
            assert error.startswith("python -m mcftensor convert: ")
            assert error.count("\n") == 1
            assert not (tmp_path / "to").exists()
        assert main(["convert", source, to, "--format", "bf16x2", "--lossy"]) == 0
        assert "elements of 12 tensors lost bits" in capsys.readouterr().out

    def test_states_of_the_compact_mode(self, tmp_path, capsys):
        source, to = str(foreign.torch_file(tmp_path)), str(tmp_path / "to")
        assert main(["convert", source, to, "--states", "compact"]) == 0
        assert "4 weights and 12 states in bf16i16" in capsys.readouterr().out
        states = mcf.load_file(f"{to}/optimizer.safetensors").values()
        names = {x.format.name for x in states if isinstance(x, mcf.MCFTensor)}
        assert {"mxfp8", "bf16i16"} < names

    def test_names_from_a_file(self, tmp_path, capsys):
        source, to = str(foreign.transformer_engine(tmp_path)), str(tmp_path / "to")
        (tmp_path / "names").write_text("\n".join(foreign.SHAPES) + "\n")
        assert main(["convert", source, to, "--parameters", str(tmp_path / "names")]) == 0
        assert main(["convert", str(foreign.megatron(tmp_path)), f"{to}2", "--step", "7"]) == 0, (
            capsys.readouterr()
        )

    def test_options_that_fit_no_checkpoint(self, tmp_path, capsys):
        source, to = str(foreign.torch_file(tmp_path)), tmp_path / "to"
        (tmp_path / "names").write_text("root:x:0:0\nnobody\n")
        for option, value, message in [
            ("--step", "-5", "step is -5; give how many steps were taken"),
            ("--parameters", str(tmp_path / "names"), "2 of 2 are no weights of the checkpoint"),
        ]:
            assert main(["convert", source, str(to), option, value]) == 2
            assert message in capsys.readouterr().err
            assert not to.exists()

    def test_a_bar_where_there_is_a_terminal(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        assert main(["convert", str(foreign.torch_file(tmp_path)), str(tmp_path / "to")]) == 0
        assert "to: 4 weights" in capsys.readouterr().out


MEMORY = """
import json, re, sys, tempfile, threading, time
import torch, mcftensor as mcf

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def watch():
    while True:
        most[0] = max(most[0], held())
        time.sleep(0.0005)

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:  # what is there once: modules, tables
    torch.save({"x": torch.randn(1 << 17)}, f"{folder}/x.pt")
    convert = mcf.checkpoint.convert_checkpoint
    for format in ("bf16i16", "bf16x3"):
        convert(f"{folder}/x.pt", f"{folder}/{format}", format, lossy=True)
        convert(f"{folder}/{format}", f"{folder}/{format} back", "float32")
most = [0]
threading.Thread(target=watch, daemon=True).start()
for source, destination, format, most_in_a_file in json.loads(sys.argv[1]):
    before = most[0] = held()
    mcf.checkpoint.convert_checkpoint(
        source, destination, format, step=7, lossy=True, max_shard_size=most_in_a_file
    )
    print(most[0] - before)
"""

MIB = 1 << 20
LARGE = 16 * MIB
"""Bytes of each tensor, in float32."""


@pytest.fixture
def large(monkeypatch):
    """Checkpoints of other programs have a weight and moments of this size."""
    x = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    moments = {"exp_avg": {"w": x * 1e-3}, "exp_avg_sq": {"w": x.square()}}
    monkeypatch.setattr(foreign, "SHAPES", {"w": tuple(x.shape)})
    monkeypatch.setattr(foreign, "MASTERS", {"w": x})
    monkeypatch.setattr(foreign, "MOMENTS", moments)
    monkeypatch.setattr(
        foreign, "split", lambda x: list(mcf.as_expansion(x, mcf.bf16i16).components)
    )


def more_held(jobs):
    """By how much the memory of a process grows at most in each of some conversions."""
    jobs = [[str(source), str(to), *options] for source, to, *options in jobs]
    command = [sys.executable, "-c", MEMORY, json.dumps(jobs)]
    # With thresholds set, glibc gives freed memory back at once, and the peak is the program's.
    at_once = {"MALLOC_MMAP_THRESHOLD_": str(MIB // 8), "MALLOC_TRIM_THRESHOLD_": str(MIB)}
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | at_once
    )
    return [int(line) for line in run.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestMemory:
    """A conversion holds a tensor and what becomes of it, and nothing else of that size."""

    @pytest.mark.slow
    def test_of_layouts(self, large, tmp_path):
        layouts = {**foreign.EXACT, "optimi": lambda folder: foreign.optimi(folder)[0]}
        for bits in (8, 16):
            layouts[f"flashoptim {bits}"] = lambda folder, b=bits: foreign.flashoptim(
                folder, b, compressed=b == 8
            )
        jobs = []
        for name, layout in layouts.items():
            folder = tmp_path / name
            folder.mkdir()
            format = "bf16x2" if name == "optimi" else "bf16i16"
            jobs.append((layout(folder), folder / "to", format, None))
        found = dict(zip(layouts, more_held(jobs), strict=True))
        assert {name: n / LARGE for name, n in found.items() if n > 2 * LARGE + 8 * MIB} == {}
        assert min(found.values()) > LARGE

    @pytest.mark.slow
    def test_there_and_back(self, tmp_path):
        x = torch.randn(2048, 2048)
        state = {f"{i}": x + i for i in range(3)}
        torch.save(state, tmp_path / "x.pt")
        pytest.importorskip("safetensors.torch").save_file(state, tmp_path / "x.safetensors")
        there = {"bf16i16": 1, "bf16x3": 1.5}
        jobs, expected = [], []
        for format, size in there.items():
            for source, most in ((tmp_path / "x.pt", "40MB"), (tmp_path / "x.safetensors", None)):
                to, back = (tmp_path / f"{format} {most} {side}" for side in ("to", "back"))
                jobs += [(source, to, format, most), (to, back, "float32", most)]
                expected += [1 + size] * 2
        found = more_held(jobs)
        too_much = [
            (job[1].name, n / LARGE, size)
            for job, n, size in zip(jobs, found, expected, strict=True)
            if n > size * LARGE + 8 * MIB
        ]
        assert too_much == []


def test_the_table_of_layouts_is_the_page():
    """The docstring and the guide name the same layouts."""
    page = (foreign.ROOT / "docs/checkpoints.md").read_text()
    rows = re.findall(
        r"^ *\| ([A-Z][^|]+?) \|", mcf.checkpoint.convert_checkpoint.__doc__, re.MULTILINE
    )
    assert len(rows) == 10
    assert re.findall(r"^\| ([A-Z][^|,]+?)(?: \||,)", page, re.MULTILINE) == [
        row.split(",")[0] for row in rows
    ]


def test_json_of_the_optimizer_is_sealed(tmp_path):
    mcf.checkpoint.convert_checkpoint(foreign.torch_file(tmp_path), tmp_path / "to")
    path = tmp_path / "to" / "optimizer.safetensors"
    content = path.read_bytes()
    assert json.dumps({"lr": 0.0003})[1:-1].replace('"', '\\"').encode() in content
    path.write_bytes(content.replace(b"0.0003", b"0.0004"))
    model = nn.Linear(2, 2)
    with pytest.raises(mcf.errors.CheckpointError, match="is damaged, or was altered"):
        mcf.load_file(tmp_path / "to", model, optimizer=torch.optim.SGD(model.parameters()))


def test_own_files_are_read_without_the_readers_of_others(tmp_path):
    program = f"""
import sys, torch, mcftensor as mcf
model = mcf.as_expansion(torch.nn.Linear(3, 2))
mcf.save_file(model, {str(tmp_path / "model.safetensors")!r})
mcf.load_file({str(tmp_path / "model.safetensors")!r}, model)
mcf.load_file({str(tmp_path)!r}, model)
readers = ("deepspeed", "distcp", "foreign", "megatron", "torchtitan", "zero")
print([x for x in readers if f"mcftensor.bridge.{{x}}" in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
