"""`studies/scaling.py`, on a model and a text small enough for seconds."""

import json

import pytest
import torch

import mcftensor as mcf
import scaling
from pretraining import training
from pretraining.model import Shape

TINY = Shape(context=16, layers=1, width=32, heads=2)


@pytest.fixture
def run(poem, tmp_path, monkeypatch):
    """Run the command on the poem; return its exit status and what scaling.json holds."""
    monkeypatch.setitem(training.SHAPES, "cpu", TINY)
    monkeypatch.setattr(training, "VALIDATION_WINDOWS", 4)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = scaling.main(["--data", str(poem), "--out", "out", *arguments])
        return status, json.loads((tmp_path / "out/scaling.json").read_text())["runs"]

    return run


def test_every_variant(run, capsys, tmp_path):
    status, runs = run("--steps", "3", "--seeds", "0")
    assert status == 0
    assert list(runs) == list(scaling.VARIANTS)
    base = runs["float32"]["0"]["validation"]
    for name, by_seed in runs.items():
        found = by_seed["0"]
        if name == "float16":  # whose eps is zero
            assert found["steps"] == 1
            assert found["validation"] is None
        elif name != "float16eps":
            assert found["validation"] == pytest.approx(base, rel=0.02)
        assert 0 <= found["zeros"] < 1
    assert runs["fp8"]["0"]["counts"]["fp8 native"] == 15  # of five layers, forward and backward
    assert all(len(x) == 3 for x in runs["scaled"]["0"]["sizes"]["activations"].values())
    assert (tmp_path / "out/scaling.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "failed" in printed
    assert all(name[:5] in printed for name in runs)


def test_what_is_done_is_not_done_again(run, monkeypatch):
    _, before = run("--steps", "2", "--seeds", "0", "--variants", "scaled")
    trained = []
    train = scaling.train
    monkeypatch.setattr(scaling, "train", lambda *args: trained.append(args[:2]) or train(*args))
    _, after = run("--steps", "2", "--seeds", "0", "1", "--variants", "scaled")
    assert trained == [("scaled", 1)]
    assert after["scaled"]["0"] == before["scaled"]["0"]
    assert before["scaled"]["0"]["sizes"]
    assert not after["scaled"]["1"]["sizes"]  # the picture is of the first seed
    run("--steps", "1", "--seeds", "0", "--variants", "scaled")
    assert trained[1:] == [("scaled", 0)]


def test_masters_are_rounded_where_they_are_to_be():
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    q = torch.nn.Parameter(mcf.as_expansion(p.detach(), mcf.scaling.scaled(torch.float16)))
    kept, rounded = scaling.Masters([q], keep=True), scaling.Masters([q], keep=False)
    for masters in (kept, rounded):
        with torch.no_grad():
            masters.pairs[0][1].add_(2.0**-14)
        masters.give()
    assert kept.pairs[0][1].tolist() == [1 + 2.0**-14, 2 + 2.0**-14]
    assert rounded.pairs[0][1].tolist() == [1, 2]
