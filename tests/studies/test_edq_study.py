"""`studies/edq_study.py`, on a model and a text small enough for seconds."""

import json

import pytest
import torch

import edq_study
from pretraining import study, training
from pretraining.model import GPT, Shape
from pretraining.strategies import COLLAGE
from support.commands import assert_one_line, exit_status

TINY = Shape(context=16, layers=1, width=32, heads=2)
NAMES = [name for name, _ in GPT(TINY).named_parameters()]
PARTS = list(edq_study.PARTS)


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch):
    monkeypatch.setitem(training.SHAPES, "cpu", TINY)
    monkeypatch.setattr(training, "VALIDATION_WINDOWS", 4)


@pytest.fixture
def run(poem, tmp_path):
    """Run the command on the poem; return its exit status and what edq-study.json holds."""

    def run(*arguments):
        out = tmp_path / "out"
        status = edq_study.main(["--data", str(poem), "--out", str(out), *arguments])
        return status, json.loads((out / "edq-study.json").read_text())

    return run


def test_all_questions_are_answered(run, tmp_path, monkeypatch, capsys):
    trained = []
    train = edq_study.train

    def counted(run, *arguments, **options):
        trained.append(run)
        return train(run, *arguments, **options)

    monkeypatch.setattr(edq_study, "train", counted)
    status, record = run("--steps", "4")
    assert status == 0
    assert len(trained) == len(set(trained)) == len(record["runs"]) == 23
    findings = record["findings"]
    assert list(findings) == PARTS
    for part in PARTS:
        assert (tmp_path / "out" / f"edq-{part}.png").read_bytes().startswith(b"\x89PNG")
    screen = capsys.readouterr().out
    assert all(
        title in screen for title in ("EDQ of every", "beta2", "What kinds", "peak learning")
    )

    strategies = {row["strategy"]: row for row in findings["strategies"]}
    assert list(strategies) == list(COLLAGE)
    for name, row in strategies.items():
        if name == "bf16":
            assert row["ratio"] == row["ratio_leading"] < 0.9
            assert row["lost"] > 0.3
        else:
            assert row["ratio"] == pytest.approx(1, abs=1e-3)
            assert row["lost"] < 0.1
    settings = [(row["strategy"], row["beta2"]) for row in findings["beta2"]]
    assert settings == [(s, b) for b in (0.95, 0.98, 0.99, 0.999) for s in ("light", "plus")]
    bf16 = [row for row in findings["rates"] if row["strategy"] == "bf16"]
    assert [row["lr"] for row in bf16] == [1e-3, 3e-4, 1e-4, 1e-5, 1e-6]
    assert bf16[0]["ratio"] > bf16[2]["ratio"]
    shared = [findings["beta2"][-1], findings["rates"][5]]
    assert shared == [strategies["plus"]] * 2


def test_layers(run):
    status, record = run("--steps", "2", "--only", "layers")
    assert status == 0
    assert list(record["findings"]) == ["layers"]
    assert [one["strategy"] for one in record["runs"]] == ["bf16", "light", "plus"]
    layers = record["findings"]["layers"]
    kinds = {(row["kind"], row["strategy"]): row for row in layers["kinds"]}
    elements = {kind: kinds[kind, "bf16"]["numel"] for kind in study.KINDS}
    assert sum(elements.values()) == sum(p.numel() for p in GPT(TINY).parameters())
    gains = kinds["norm gains", "bf16"]
    # Gains of 1.0 cannot move by 3e-4 in bf16, and biases of 0.0 can.
    assert (gains["ratio"], gains["lost"]) == (0, 1)
    assert kinds["norm biases", "bf16"]["ratio"] > 0.9
    assert kinds["norm gains", "plus"]["ratio"] == pytest.approx(1, abs=1e-4)

    parameters = layers["parameters"]
    assert sorted(row["parameter"] for row in parameters) == sorted(NAMES)
    assert all(
        row["parameter"].endswith(("norm1.weight", "norm2.weight", "norm.weight"))
        for row in parameters[:3]
    )
    lost = [row["bf16"]["lost"] for row in parameters]
    assert lost == sorted(lost, reverse=True)
    for one in record["runs"]:
        assert list(one["edq"][0])[:3] == ["step", "edq", "ratio"]
        assert sorted(one["parameters"]) == sorted(NAMES)


def test_every_parameter_has_one_kind():
    for name in NAMES:
        assert sum(belongs(name) for belongs in study.KINDS.values()) == 1, name


def test_readings_of_parameters_make_those_of_the_model(run):
    """The last sample of a run, put together again from its parameters."""
    _, record = run("--steps", "1", "--only", "layers")
    for one in record["runs"]:
        whole = study.combined(one["parameters"].values())
        for name in study.FIGURES:
            # Lost shares are weighted by all elements, and not by those that are meant to move.
            assert whole[name] == pytest.approx(one["edq"][-1][name], abs=1e-3), name


def test_parameters_that_do_not_move_have_no_figures():
    still = dict.fromkeys(study.FIGURES) | {"update_norm": 0.0, "numel": 3}
    moving = dict.fromkeys(study.FIGURES, 0.5) | {"numel": 1}
    assert study.combined([still])["ratio"] is None
    assert study.combined([still, moving]) == moving | {"numel": 4}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "argument --steps: must be a whole number from 1 on, not '0'"),
        (["--seed", "-1"], "argument --seed: must be a whole number from 0 on, not '-1'"),
        (["--only", "rates,weather"], "unknown part 'weather': choose from strategies, beta2"),
        (["--only", ","], "unknown part '': choose from strategies, beta2"),
        (["--data", "no/such/text"], "cannot read no/such/text: No such file or directory"),
        (["--out", "/dev/null/out"], "cannot write to /dev/null/out: Not a directory"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(poem, capsys, arguments, complaint):
    assert exit_status(edq_study.main, ["--data", str(poem), *arguments]) == 2
    assert_one_line(capsys.readouterr().err, "edq_study.py", complaint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        edq_study.main(["--device", "cuda"])
    assert capsys.readouterr().err == "edq_study.py: --device cuda: torch finds no CUDA device\n"


def test_interrupting(poem, tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "loss", interrupt)
    assert edq_study.main(["--data", str(poem), "--out", str(tmp_path / "out")]) == 130
    assert "Traceback" not in capsys.readouterr().err
