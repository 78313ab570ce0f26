"""Conditions under which a training breaks: the signature in the meter, who warns, and the cure."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretraining import text
from questions import conditions, watched
from questions.watched import observe


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch):
    monkeypatch.setattr(watched, "SAMPLES", 8)
    monkeypatch.setattr(watched, "PATIENCE", 3)


@pytest.fixture(scope="module")
def run():
    """Train all ways of a condition, or some by their places, in a few steps."""
    source = (text.standard_library() / "_pydecimal.py").read_bytes()
    content = torch.frombuffer(bytearray(source), dtype=torch.uint8)

    def run(name, steps, *places, **options):
        ways = conditions.CONDITIONS[name]()
        return [
            observe(replace(ways[i], steps=steps, **options), content)
            for i in places or range(len(ways))
        ]

    return run


def warned(row):
    return {text.partition(":")[0] for text in row["warnings"]}


def test_second_moments_in_float16_are_zero(run):
    pair, compact, tail = run("moments", 50)
    assert pair["error"] > 100
    assert pair["ratio"] == pytest.approx(1, abs=1e-3), "the ratio does not show it"
    assert pair["exp_avg_sq"]["zero"] > 0.05
    assert pair["largest"] > 1000
    assert warned(pair) == {"ZeroMomentWarning"}
    for cured in (compact, tail):
        assert cured["error"] < 0.1
        assert cured["largest"] < 10
        assert not warned(cured)


def test_tails_in_float16_end(run):
    pair, tail = run("tails", 30, 1, 3)
    assert pair["lost"] > 0.9
    assert abs(pair["ratio"]) < 0.1
    assert pair["made"] < 0.1
    assert "FrozenWeightWarning" in warned(pair)
    assert tail["made"] == pytest.approx(1, abs=0.1)


def test_a_tail_that_is_rounded_to_nearest_is_not_kept_in_the_mean(run):
    (pair,) = run("tails", 30, 0)
    assert pair["lost"] > 0.1
    assert pair["ratio"] > 0.9
    assert "of updates are lost" in pair["verdict"][0]


def test_a_second_moment_that_cannot_decay(run):
    light, plus, slow, wide = run("beta2", 80)
    assert light["exp_avg_sq"]["lost"] > 0.8 > 0.3 > plus["exp_avg_sq"]["lost"]
    assert light["exp_avg_sq"]["ratio"] < 0.1
    assert light["error"] > 1.5 * plus["error"]
    assert any("frozen (exp_avg_sq)" in line for line in light["verdict"])
    assert not any("frozen" in line for line in plus["verdict"])
    assert slow["exp_avg_sq"]["lost"] > 5 * wide["exp_avg_sq"]["lost"]
    assert not warned(light), "the mode says so"


def test_a_large_weight_with_small_updates(run):
    pair, three, single, offset = run("large", 16)
    for lost in (pair, three, single):
        assert lost["error"] == pytest.approx(1, abs=0.01)
        assert lost["parameters"]["norm.weight"] == {"ratio": 0.0, "lost": 1.0}
        assert any(w.startswith("FrozenWeightWarning: EDQ: norm.weight") for w in lost["warnings"])
    assert single["ratio"] > 0.99, "the whole model does not show it"
    assert offset["error"] < 0.01
    assert not warned(offset)


def test_clipping_of_scaled_gradients_is_hidden(run):
    before, after = run("clipping", 20, 0, 2)
    assert before["first_norm"] == 0, "every gradient was divided by infinity"
    assert after["first_norm"] > 0
    assert before["error"] > 0.02 > 20 * after["error"]
    assert before["ratio"] in (None, pytest.approx(1, abs=1e-3)), "what was lost is not in it"
    assert not warned(before)


def test_sums_of_gradients_are_hidden(run):
    narrow, exact = run("sums", 1, batch_size=128)
    assert narrow["error"] > 5 * exact["error"]
    assert narrow["ratio"] == pytest.approx(1, abs=1e-3)


def test_a_narrow_learning_rate_does_not_follow(run):
    narrow, number = run("rate", 40)
    assert narrow["rates"][0] == narrow["rates"][1]
    assert narrow["made"] > 1.01
    assert narrow["ratio"] == pytest.approx(1, abs=1e-3)
    assert warned(narrow) == {"NarrowStateWarning"}
    assert number["made"] == pytest.approx(1, abs=2e-3)
    assert not warned(number)


def test_the_end_of_a_schedule_is_in_the_verdict(run):
    plain, pair = run("end", conditions.END)
    assert plain["course"][1][1] > 0.98 > 0.6 > plain["course"][-1][1]
    (line,) = (x for x in plain["verdict"] if "effective" in x)
    assert "in the last quarter" in line
    assert "as_expansion" in plain["verdict"][-1]
    assert pair["course"][-1][1] > 0.99
    assert "in the last quarter" not in "".join(pair["verdict"])


def test_one_gradient_of_1e9(run):
    compact, wide, clipped = run("outlier", 50)
    assert compact["error"] > 0.4
    assert compact["made"] < 0.7
    assert compact["exp_avg_sq"]["raised"] == 1
    assert compact["ratio"] == pytest.approx(1, abs=1e-2), "the ratio does not show it"
    assert warned(compact) == {"SaturationWarning"}
    assert wide["error"] < 0.01
    assert clipped["error"] < 0.2
    assert not warned(wide) | warned(clipped)


def test_updates_in_step_with_balanced_rounding(run):
    balanced, stochastic, tail = run("strides", 10 * conditions.STRIDE, 0, 1, 3)
    assert balanced["error"] > 1.5 * stochastic["error"]
    assert tail["error"] < balanced["error"] / 50
    assert balanced["made"] == pytest.approx(1, abs=0.05), "in the mean of all weights it is right"


def test_the_page_says_in_how_many_conditions_the_ratio_is_right():
    """Of the trainings without a cure, the one that it is about."""
    path = Path(__file__).parents[2] / "benchmarks/results/findings-breaks.json"
    rows = json.loads(path.read_text())["conditions"]
    assert set(rows) == set(conditions.CONDITIONS)
    for name, make in conditions.CONDITIONS.items():
        assert [row["way"] for row in rows[name]] == [way.name for way in make()]
    broken = {"tails": 1, "large": 2, "clipping": 1}
    seen = [rows[name][broken.get(name, 0)] for name in rows]
    assert all(row["error"] > 0.01 for row in seen)
    assert sum(abs(1 - row["ratio"]) < 0.01 for row in seen) == 8
    cured = [own[-1] for name, own in rows.items() if name != "tails"]
    assert all(row["error"] < 0.06 for row in cured)


def test_a_twin_of_float32_stays_beside_the_run(run):
    """Weights in float32 and exact states: no condition, no error."""
    (way,) = (w for w in conditions.moments() if "fp16i16" in w.name)
    row = observe(replace(way, steps=20), torch.arange(1 << 12, dtype=torch.int64).to(torch.uint8))
    assert row["error"] < 1e-5
    assert not row["warnings"]
