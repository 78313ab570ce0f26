"""What is refused, and in which words: by functions in their arguments, by commands in options."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.__main__ import main


def linear():
    return nn.Linear(3, 2)


def training(path, **moments):
    """A checkpoint after a step of AdamW, with other moments for some parameters."""
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state_dict = optimizer.state_dict()
    for number, x in moments.items():
        state_dict["state"][int(number[1:])]["exp_avg"] = x
    torch.save({"model": model.state_dict(), "optimizer": state_dict}, path)
    return path


@pytest.mark.parametrize("shape", [(5, 7), (3, 2), (6,)])
def test_moments_of_another_shape(shape, tmp_path):
    path = training(tmp_path / "run.pt", _0=torch.zeros(shape))
    for parameters in (None, ["weight", "bias"]):
        with pytest.raises(mcf.errors.CheckpointError, match=r"exp_avg.* of shape .*\(2, 3\)"):
            mcf.checkpoint.convert_checkpoint(path, tmp_path / "to", parameters=parameters)
    mcf.checkpoint.convert_checkpoint(path, tmp_path / "to", optimizer=False)


def test_moments_of_no_weight(tmp_path):
    path = training(tmp_path / "run.pt")
    content = torch.load(path)
    for state in content["optimizer"]["state"].values():
        state["exp_avg"] = state["exp_avg_sq"] = torch.zeros(7, 7)
    torch.save(content, path)
    with pytest.raises(
        mcf.errors.CheckpointError, match=r"parameter 0 is of shape \(7, 7\), as no weight"
    ):
        mcf.checkpoint.convert_checkpoint(path, tmp_path / "to")


def test_parameters_in_another_order(tmp_path):
    """Numbers do not say which weight is meant."""
    model = linear()
    optimizer = torch.optim.AdamW([model.bias, model.weight])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert mcf.checkpoint.convert_checkpoint(path, tmp_path / "to").states == 6


@pytest.mark.with_float64("scaled formats compute in float64")
def test_traced_modules():
    """TorchScript would read memory that is not there, and end the process."""
    model = mcf.as_expansion(linear())
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        traced = torch.jit.trace(model, x)
        for save in (
            lambda: torch.jit.save(traced, io.BytesIO()),
            traced.save_to_buffer,
            lambda: traced.save("never.pt"),
        ):
            with pytest.raises(NotImplementedError, match="weight is an expansion in bf16x2"):
                save()
        weight = model.weight.detach()
        for script, format in (
            (torch.jit.freeze(torch.jit.trace(model.eval(), x)), "bf16x2"),
            (torch.jit.trace(lambda y: y @ weight.T, x), "bf16x2"),
            (torch.jit.trace(mcf.scaling.scalify(linear()), x.half()), r"scaled\(float16"),
        ):
            for save in (
                lambda script=script: torch.jit.save(script, io.BytesIO()),
                script.save_to_buffer,
            ):
                with pytest.raises(NotImplementedError, match=f"is an expansion in {format}"):
                    save()
        plain = torch.jit.trace(mcf.as_plain(copy.deepcopy(model)), x)
        torch.jit.save(plain, file := io.BytesIO())
        file.seek(0)
        assert torch.equal(torch.jit.load(file)(x), traced(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": torch.bfloat16}, "torch.bfloat16 is a plain dtype.* mcf.bf16i16, mcf.bf16i8"),
        ({"format": "bf17"}, "'bf17' is not a format.* mcf.bf16i16, mcf.bf16i8"),
        ({"overrides": {"weight": torch.float32}}, "plain dtype.*None leaves a tensor as it is"),
        ({"lr": "1e-4"}, "lr is '1e-4', a str; give a number"),
    ],
)
def test_arguments_of_conversion(arguments, message):
    with pytest.raises(TypeError, match=message):
        mcf.as_expansion(linear(), **arguments)


@pytest.mark.parametrize(
    "format",
    [mcf.bf16x2, mcf.fp64x2, mcf.bf16i16, mcf.scaling.scaled(torch.float16)],
    ids=lambda f: f.name,
)
@pytest.mark.parametrize(
    "make",
    [
        torch.tensor,
        lambda numbers: torch.tensor(numbers, dtype=torch.float64),
        torch.FloatTensor,
        lambda numbers: torch.ones(1).new_tensor(numbers),
        lambda numbers: numbers[0].new_tensor(numbers),
    ],
)
def test_elements_in_a_list(make, format):
    x = mcf.as_expansion(torch.tensor([0.1, 0.2]), format)
    assert [float(y) for y in x] == mcf.as_plain(x, torch.float64).tolist()
    with pytest.raises(TypeError, match=r"accept a .*Tensor in a list.*torch\.stack.*float\(y\)"):
        make([x[0], x[1]])


# ----------------------------------------------------------------------------- the commands


def run(capsys, *arguments):
    status = main([str(x) for x in arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_options_instead_of_arguments(tmp_path, capsys):
    pytest.importorskip("safetensors")
    path = tmp_path / "model.safetensors"
    mcf.save_file(linear(), path)
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    status, said = run(capsys, "convert", path, tmp_path / "to")
    assert status == 2
    assert "--no-verify reads it all the same" in said
    torch.save({"w": torch.rand(9)}, tmp_path / "w.pt")
    status, said = run(capsys, "convert", tmp_path / "w.pt", tmp_path / "to", "--format", "bf16x2")
    assert status == 2
    assert "--lossy rounds them" in said
    assert "lossy=True" not in said


def test_equal_checkpoints(tmp_path, capsys):
    torch.save({"w": torch.rand(9)}, tmp_path / "w.pt")
    status, said = run(capsys, "audit", tmp_path / "w.pt", tmp_path / "w.pt")
    assert status == 1
    assert "the two checkpoints are equal" in said


@pytest.mark.parametrize("size", ["99999999999999999T", "99999999x9999999999999x9"])
def test_more_parameters_than_can_be_counted(size, capsys):
    status, said = run(capsys, "memory", size)
    assert status == 2
    assert f"{size} is more parameters than can be counted" in said
    assert said.count("\n") == 1


def test_names_of_formats(tmp_path, capsys):
    torch.save({"w": torch.rand(9)}, tmp_path / "w.pt")
    status, said = run(capsys, "convert", tmp_path / "w.pt", tmp_path / "to", "--format", "bf17")
    assert status == 2
    assert "bf16i16, bf16i8" in said
