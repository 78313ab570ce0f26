"""Scaled tensors in files: every bit comes back, and nobody takes data for numbers."""

import subprocess
import sys

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import mcftensor as mcf
from support.scales import FORMATS, FP16, exact, normal

STOCHASTIC = mcf.scaling.scaled(torch.float16, rounding="stochastic")
formats = pytest.mark.parametrize("format", [*FORMATS, STOCHASTIC], ids=lambda f: f.name)


def build(format=FP16):
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 5, bias=False))
    model.append(nn.Linear(5, 5, bias=False))
    model[3].weight = model[2].weight
    with torch.no_grad():
        model[0].weight.mul_(2.0**-30)  # below what float16 holds
    return mcf.scaling.scalify(model, format)


def numbers(model):
    return [exact(p) for p in model.parameters()]


def are_equal(xs, ys):
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@formats
def test_a_model_comes_back(format, tmp_path):
    model, other = build(format), build(format)
    mcf.save_file(model, tmp_path)
    found = mcf.load_file(tmp_path)
    assert list(found) == sorted(model.state_dict())
    for name, p in model.named_parameters(remove_duplicate=False):
        assert found[name].format is format
        assert torch.equal(exact(found[name]), exact(p))
    assert found["2.weight"] is found["3.weight"]
    assert mcf.load_file(tmp_path, other) == ([], [])
    assert are_equal(numbers(other), numbers(model))


@pytest.mark.thinned(of=2)
@formats
def test_into_other_kinds_of_models_and_back(format, tmp_path):
    model = build(format)
    mcf.save_file(model, tmp_path)
    plain = mcf.as_plain(build(), torch.float32)
    mcf.load_file(tmp_path, plain)
    assert are_equal([p.detach() for p in plain.parameters()], [x.float() for x in numbers(model)])
    terms = mcf.as_expansion(mcf.as_plain(build(), torch.float32), mcf.bf16x3)
    mcf.load_file(tmp_path, terms)
    for p, x in zip(terms.parameters(), numbers(model), strict=True):
        assert torch.equal(mcf.as_plain(p, torch.float64), x)
    again = build(format)
    mcf.save_file(terms, tmp_path)
    mcf.load_file(tmp_path, again)
    if format.rounding == "nearest":
        assert are_equal(numbers(again), numbers(model))


def test_to_other_programs_data_are_integers(tmp_path):
    model = build(mcf.scaling.scaled(torch.float16, tail=8))
    mcf.save_file(model, tmp_path / "x.safetensors")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    name = "0.weight.scaled(fp16i8)"
    assert {found[x].dtype for x in ("0.weight", "2.weight")} == {torch.int16}
    assert found[f"{name}.tail"].dtype == torch.int8
    assert found[f"{name}.exponent"].item() < -30


def test_terms_share_memory_and_other_programs_are_noticed():
    model, other = build(), build()
    terms = mcf.checkpoint.as_terms(other.state_dict(), sums=True)
    for name, x in mcf.checkpoint.as_terms(model.state_dict(), sums=True).items():
        terms[name].copy_(x)
    assert are_equal(numbers(other), numbers(model))
    terms["0.weight"] += 1
    with pytest.raises(mcf.errors.CheckpointError, match=r"0\.weight in scaled\(float16\)"):
        mcf.checkpoint.from_terms(terms)
    assert mcf.checkpoint.from_terms(terms, verify=False)["0.weight"].format is FP16
    kept = {n: x for n, x in terms.items() if not n.startswith("0.weight.")}
    assert mcf.checkpoint.from_terms(kept)["0.weight"].dtype == torch.int16
    terms["1.weight.scaled(float16).exponent"] = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(mcf.errors.CheckpointError, match=r"1\.weight make no expansion"):
        mcf.checkpoint.from_terms(terms, verify=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("by_terms", [False, True])
def test_distributed_checkpoints(by_terms, tmp_path):
    model, other = build(), build()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1).mul_(2.0**20)
    view = mcf.checkpoint.as_terms if by_terms else dict
    dcp.save(view(model.state_dict()), checkpoint_id=tmp_path)
    dcp.load(view(other.state_dict()), checkpoint_id=tmp_path)
    assert are_equal(numbers(other), numbers(model))


def test_programs_that_save_modules(tmp_path):
    model, other = mcf.checkpoint.store_as_terms(build()), mcf.checkpoint.store_as_terms(build())
    stored = model.state_dict()
    assert all(type(x) is torch.Tensor for x in stored.values())
    other.load_state_dict(stored)
    assert are_equal(numbers(other), numbers(model))


def test_converters_say_what_to_do(tmp_path):
    mcf.save_file(build(), tmp_path / "x.safetensors")
    with pytest.raises(
        mcf.errors.CheckpointError, match=r"scaled\(float16\), and scales .*as_plain"
    ):
        mcf.checkpoint.convert_checkpoint(tmp_path / "x.safetensors", tmp_path / "to")


def test_names():
    for format in (*FORMATS, STOCHASTIC):
        assert mcf.Format.from_name(format.name) is format
    with pytest.raises(ValueError, match="scaled"):
        mcf.Format.from_name("scaled(int8)")


def test_tensors_of_equal_shape_are_not_tied():
    x, y = normal(3), normal(3, seed=1)
    found = mcf.checkpoint.from_terms(mcf.checkpoint.as_terms({"x": x, "y": y}))
    assert torch.equal(exact(found["y"]), exact(y))


def test_a_new_process_knows_the_formats_that_files_name(tmp_path):
    kinds = [
        *((x, {}) for x in (torch.float16, torch.bfloat16, torch.float32)),
        *((x, {}) for x in (torch.float8_e4m3fn, torch.float8_e5m2, mcf.fp16x2, mcf.bf16x2)),
        *((torch.float16, {"tail": 8}), (torch.float16, {"tail": 8, "rounding": "stochastic"})),
        *((x, {"rounding": "stochastic"}) for x in (torch.float16, torch.bfloat16)),
    ]
    names = [mcf.scaling.scaled(x, **options).name for x, options in kinds]
    mcf.save_file(build(), tmp_path / "model.safetensors")
    torch.save(build().state_dict(), tmp_path / "model.pt")
    lines = [
        "import sys, torch, mcftensor as mcf",
        f"x = mcf.load_file({str(tmp_path / 'model.safetensors')!r})['0.weight']",
        "assert isinstance(x, mcf.scaling.ScaledTensor)",
        f"for name in {names}: mcf.Format.from_name(name)",
    ]
    only = f"import torch, mcftensor; torch.load({str(tmp_path / 'model.pt')!r})"
    for program in ("\n".join(lines), only):
        subprocess.run([sys.executable, "-c", program], check=True)
