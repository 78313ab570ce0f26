"""What a model would take: of models that are not converted, of checkpoints, of shapes."""

import copy
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.__main__ import main
from support.commands import answered
from support.helpers import small_model

SGD = {"lr": 0.1, "momentum": 0.9}


def said(summary):
    """Without how it is known."""
    return [{k: v for k, v in vars(x).items() if k != "known"} for x in summary.held]


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 4))
    model[3].weight = nn.Parameter(model[3].weight.detach(), requires_grad=False)
    return model


# --------------------------------------------------------------------------------------- estimate


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("mode", [None, "light", "plus", "full", "compact", {"exp_avg": None}])
@pytest.mark.parametrize("kind", [None, mcf.bf16x3, mcf.bf16i8], ids=str)
def test_what_is_estimated_is_what_a_conversion_takes(kind, mode):
    model = network()
    before = copy.deepcopy(model.state_dict())
    found = mcf.meters.estimate(model, mode, format=kind, overrides={"0.bias": None})
    for name, x in model.state_dict().items():
        assert type(x) is torch.Tensor
        assert x.dtype == before[name].dtype
        assert torch.equal(x, before[name])

    model = mcf.as_expansion(model, kind, overrides={"0.bias": None})
    optimizer = torch.optim.AdamW(model.parameters())
    if mode is not None:
        mcf.collage(optimizer, mode)
    for p in model.parameters():
        p.grad = torch.zeros(p.shape, dtype=p.dtype) if p.requires_grad else None
    optimizer.step()
    assert said(found) == said(mcf.meters.summary(model, optimizer))


def test_a_converted_model_keeps_its_formats():
    model = mcf.as_expansion(small_model(), mcf.bf16x3)
    assert mcf.meters.estimate(model, "full").by_format("parameters").keys() == {"bf16x3"}


def test_tied_weights_are_counted_once():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    assert mcf.meters.estimate(model).trained == 24


def test_nothing_is_copied():
    """Of a model as large as this, a copy of which nobody would miss."""
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.empty(1).expand(2**20, 2**20))
    assert mcf.meters.estimate(model, "plus").trained == 2**40 + 1


def test_any_optimizer():
    found = mcf.meters.estimate(
        small_model(), "full", optimizer=lambda p: torch.optim.SGD(p, **SGD)
    )
    assert {x.state for x in found.held if x.kind == "states"} == {"momentum_buffer"}
    assert (found.optimizer, found.mode) == ("SGD", "full")
    assert mcf.meters.estimate(small_model(), released=True).bytes_of("gradients") == 0


def test_errors():
    with pytest.raises(TypeError, match="estimate: got list; give a module"):
        mcf.meters.estimate([])
    with pytest.raises(ValueError, match="unknown mode 'most'"):
        mcf.meters.estimate(small_model(), "most")


# ------------------------------------------------------------------------------------ the command


@pytest.fixture
def command(capsys):
    """Run the command; return its exit status and what it printed."""

    def run(*arguments):
        status, out, error = answered(capsys, "memory", *arguments)
        return status, out or error

    return run


def rows(text):
    """Bytes a parameter, and whether it fits, by strategy."""
    lines = [line for line in text.splitlines()[3:] if "  " in line]
    return {line.split("  ")[0]: (line.split()[-4], line.split()[-1]) for line in lines}


def test_a_number_of_parameters(command):
    status, out = command("1.5B", "--memory", "20GB")
    assert status == 0
    assert out.startswith("1,500,000,000 parameters, AdamW, without activations\n")
    assert rows(out) == {
        "float32 master weights": ("16.00", "no"),
        "plain bf16": ("8.00", "yes"),
        "bf16i16, full": ("14.00", "no"),
        "bf16x2, full": ("14.00", "no"),
        "bf16x2, plus": ("12.00", "yes"),
        "bf16x2, light": ("10.00", "yes"),
        "bf16i8, compact": ("7.06", "yes"),
        "bf16i8, compact, step_in_backward": ("5.06", "yes"),
        "bf16i8, compact4": ("6.06", "yes"),
        "bf16i8, compact4, step_in_backward": ("4.06", "yes"),
    }
    assert out.endswith("\nthe smallest fits into the 18.63 GiB given\n")


def test_shapes(command):
    _, out = command("32:64x128", "100", "--memory", "1GB")
    assert out.startswith(f"{32 * 64 * 128 + 100:,} parameters")
    _, out = command("64x128", "--optimizer", "SGD", "--memory", "1GB")
    assert rows(out)["float32 master weights"] == ("12.00", "yes")


def test_one_mode(command):
    status, out = command("64x128", "--memory", "1KB", "--mode", "plus", "--format", "bf16x3")
    assert status == 1
    assert "bf16x3" in out
    assert out.endswith("mode plus does not fit into the 1000 B given\n")


def test_compact_is_with_tails_of_one_byte(command):
    _, out = command("10M", "--memory", "1GB", "--mode", "compact")
    assert "bf16i8" in out
    assert "7.06 bytes a parameter" in out
    _, out = command("10M", "--memory", "1GB", "--mode", "compact", "--format", "bf16x2")
    assert "8.06 bytes a parameter" in out


def test_both_sides_of_a_host_are_judged(command, monkeypatch):
    count = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 10 * 10**9}
    monkeypatch.setattr(os, "sysconf", count.get)
    status, out = command("1B", "--host")  # 4.1 GB to 14 GB on the host, 2 GB on the device
    assert [fits for _, fits in rows(out).values()] == [*4 * ["no"], *4 * ["yes"]]
    assert status == 0
    assert out.endswith("\nthe smallest fits into the 9.31 GiB of this machine\n")
    assert command("1B", "--host", "--mode", "full")[0] == 1
    status, out = command("1B", "--host", "--memory", "1GB")
    assert (status, {fits for _, fits in rows(out).values()}) == (1, {"no"})
    assert out.endswith("does not fit into the 953.67 MiB given for the device\n")
    gpu = SimpleNamespace(total_memory=10**9, name="a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    status, out = command("1B", "--host")
    assert (status, {fits for _, fits in rows(out).values()}) == (1, {"no"})
    assert out.endswith("into the 953.67 MiB of a GPU and the 9.31 GiB of this machine\n")


def test_this_machine(command):
    _, out = command("10K")
    assert " of " in out.splitlines()[-1]


@pytest.mark.parametrize("kind", ["pt", "safetensors", "sharded"])
def test_checkpoints(command, tmp_path, kind):
    model = mcf.as_expansion(small_model(), mcf.bf16x3)
    path = tmp_path / f"model.{kind}"
    if kind == "pt":
        torch.save(model.state_dict(), path)
    elif kind == "safetensors":
        mcf.save_file(model, path)
    else:
        mcf.save_file(model, tmp_path / "model.safetensors", max_shard_size=400)
        path = tmp_path
    status, out = command(path)
    count = sum(p.numel() for p in model.parameters())
    assert status == 0
    assert out.startswith(f"{count:,} parameters")
    _, out = command(path, "--mode", "plus")
    assert sum(line.startswith("0.weight") for line in out.splitlines()) == 1


@pytest.fixture
def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Config(
        vocab_size=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["GPT2LMHeadModel"],
    )


def test_a_configuration(command, gpt2, tmp_path, monkeypatch):
    """Of a file, of a folder without weights, and by its name; weights that are tied count once."""
    gpt2.save_pretrained(tmp_path)
    _, out = command(tmp_path / "config.json", "--memory", "1GB")
    count = 64 * 16 + 1024 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    assert out.startswith(f"{count:,} parameters")
    assert command(tmp_path, "--memory", "1GB")[1] == out
    names = []
    found = lambda name: names.append(name) or gpt2  # noqa: E731
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", found)
    assert command("Qwen/Qwen2.5-0.5B", "--memory", "1GB")[1] == out
    assert names == ["Qwen/Qwen2.5-0.5B"]


def test_a_configuration_that_makes_no_model(command, gpt2, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    assert "transformers makes no model from it: " in command(tmp_path)[1]
    (tmp_path / "config.json").write_text("{")
    assert "transformers makes no model from it: " in command(tmp_path)[1]
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, error = command("Qwen/Qwen2.5-0.5B")
    assert status == 2
    assert "is not installed; give the shapes of parameters" in error


def test_a_folder_with_weights_is_a_checkpoint(command, gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path)
    torch.save({"a.weight": torch.ones(3, 4)}, tmp_path / "pytorch_model.bin")
    assert command(tmp_path, "--memory", "1GB")[1].startswith("12 parameters")


def test_integers_are_buffers(command, tmp_path):
    torch.save({"a.weight": torch.ones(3, 4), "a.steps": torch.tensor(3)}, tmp_path / "x.pt")
    _, out = command(tmp_path / "x.pt", "--mode", "plus")
    assert out.startswith("12 parameters")
    assert "buffer" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: MODEL"),
        (["nothing.pt"], "nothing.pt is no file or folder; give a checkpoint, a config.json, the"),
        (["7B", "--memory", "much"], "--memory is 'much'; give bytes, or a size such as '5GB'"),
        (["7B", "--optimizer", "Optimizer2"], "torch.optim has no optimizer 'Optimizer2'"),
        (["7B", "--mode", "most"], "unknown mode 'most'"),
        (["7B", "--mode", "plus", "--format", "bf99"], "bf99"),
    ],
)
def test_mistakes(command, arguments, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, error = command(*arguments)
    assert status == 2
    assert complaint in error


def test_the_version(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"mcftensor {mcf.__version__}\n"
