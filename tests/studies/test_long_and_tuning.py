"""Long runs and fine-tuning of `studies/findings.py`, in a few steps."""

import json

import pytest
import torch

import findings
from pretraining.model import Shape
from questions import long, trial, tuning


@pytest.fixture
def run(poem, tmp_path, monkeypatch):
    """Answer a question; return what is written, and how many trainings it took."""
    done = []

    def run(question):
        done.clear()
        for module, name in ((long, "train"), (tuning, "tune")):
            real = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, real=real: done.append(1) or real(*a))
        out = tmp_path / "out"
        arguments = ["--data", str(poem), "--out", str(out), "--only", question, "--seeds", "0"]
        assert findings.main(arguments) == 0
        assert (out / f"findings-{question}.png").read_bytes().startswith(b"\x89PNG")
        return json.loads((out / f"findings-{question}.json").read_text()), len(done)

    monkeypatch.setattr(trial, "WINDOWS", 4)
    return run


def test_long(run, monkeypatch):
    monkeypatch.setattr(long, "STEPS", 40)
    monkeypatch.setattr(long, "WINDOWS", 32)
    monkeypatch.setattr(long, "SAMPLES", 4)
    kinds = ("float64", "disturbed", "float32", "master", "bf16", "plus")
    monkeypatch.setattr(long, "SCHEDULES", {"constant": kinds, "cosine": ("float64", "plus")})
    found, count = run("long")
    assert count == 8
    rows = {(row["schedule"], row["strategy"]): row for row in found["rows"]}
    exact = rows["constant", "float64"]
    assert exact["own"] == [0] * len(exact["steps"])
    assert exact["gap"] == 0
    assert "twin" not in exact
    assert 0 < rows["constant", "disturbed"]["own"][-1] < 1e-5
    assert rows["constant", "float32"]["twin"][-1] < 1e-4
    assert rows["constant", "master"]["twin"][-1] < 1e-4 < rows["constant", "master"]["own"][-1]
    bf16, plus = rows["constant", "bf16"], rows["constant", "plus"]
    assert bf16["twin"][-1] > 20 * plus["twin"][-1]
    assert bf16["own"][-1] > 20 * plus["own"][-1]
    assert bf16["average"] > 20 * plus["average"]
    assert bf16["lost"] > 2 * plus["lost"]
    assert plus["steps"][-1] == 40
    assert rows["cosine", "plus"]["own"][-1] != plus["own"][-1]
    assert run("long") == (found, 0), "what has been measured is not measured again"


def test_tuning(run, monkeypatch, poem):
    content = torch.tensor(list(poem.read_bytes()), dtype=torch.uint8)
    monkeypatch.setattr(tuning, "other_text", lambda: (content, content))
    monkeypatch.setattr(tuning, "SHAPE", Shape(context=16, layers=1, width=32, heads=2))
    monkeypatch.setattr(tuning, "PRETRAINING", 8)
    monkeypatch.setattr(tuning, "STEPS", 6)
    monkeypatch.setattr(tuning, "BEFOREHAND", 5)
    monkeypatch.setattr(tuning, "WINDOWS", 4)
    monkeypatch.setattr(tuning, "RATES", (1e-5,))
    ways = {"full": ("master", "bf16", "plus"), "LoRA": ("master", "plus")}
    monkeypatch.setattr(tuning, "STRATEGIES", ways)
    found, count = run("tuning")
    assert count == 5
    rows = {(row["way"], row["strategy"]): row for row in found["rows"]}
    for way, strategies in ways.items():
        assert rows[way, "master"]["made"] == pytest.approx(1)
        assert rows[way, "master"]["gap"] == 0
        for strategy in strategies:
            assert 0 <= rows[way, strategy]["stayed"] <= 1
    bf16, plus = rows["full", "bf16"], rows["full", "plus"]
    assert bf16["small"] > 0.8
    assert abs(bf16["ratio_first"]) < 0.3 < 0.9 < plus["ratio_first"]
    assert abs(bf16["made"]) < 0.3 < 0.9 < plus["made"]
    assert bf16["stayed"] > 0.8 > 0.1 > plus["stayed"]
    assert rows["LoRA", "plus"]["made"] == pytest.approx(1, abs=0.1)
    assert run("tuning") == (found, 0)


def test_adapters_leave_the_model_as_it_is():
    """At first: one of their matrices is zero."""
    torch.manual_seed(0)
    model = tuning.GPT(tuning.SHAPE)
    tokens = torch.randint(256, (2, 8))
    before = model(tokens)
    adapted = tuning.with_adapters(model)
    assert torch.equal(adapted(tokens), before)
    names = [name for name, _ in tuning.learned(adapted)]
    assert len(names) == 2 * 4 * tuning.SHAPE.layers
    assert all(name.endswith((".down", ".up")) for name in names)


def test_weights_too_large_for_a_rate():
    weights = torch.tensor([1.0, -0.5, 2.0**-8, 0.0])  # half ulps: 2^-8, 2^-9, 2^-16, none
    assert tuning.too_small([("w", weights.bfloat16())], 2.0**-8.5) == 0.25
    assert tuning.too_small([("w", weights.bfloat16())], 2.0**-17) == 0.75
    assert tuning.too_small([("w", weights.bfloat16())], 1.0) == 0
