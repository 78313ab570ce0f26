"""The examples that are run as they are; the others have tests where their subject has."""

import re
from pathlib import Path

import pytest

import mcftensor as mcf
import quickstart
import rl
import scientific

EXAMPLES = Path(quickstart.__file__).parent


def test_quickstart(capsys, monkeypatch):
    monkeypatch.setattr(quickstart, "STEPS", 101)
    quickstart.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    error = {name: float(value) for name, value, *_ in rows}
    ratio = {name: float(value) for name, _, value, _ in rows}
    assert error["expansions"] == pytest.approx(error["float32"], rel=0.05)
    assert error["bf16"] > 1.2 * error["float32"]
    assert ratio["bf16"] < 0.6
    assert ratio["expansions"] == pytest.approx(1, abs=1e-3)


def test_scientific(capsys):
    """Exact arithmetic is in the example; here is what it must say."""
    scientific.main()
    dot, system, orbit = (
        dict(line.split(maxsplit=1) for line in part.splitlines()[1:])
        for part in capsys.readouterr().out.split("\n\n")
    )
    assert float(dot["fp64x2"]) == 1
    assert all(abs(float(dot[name])) > 1e6 for name in ("float32", "float64"))
    plain, refined = ([*map(float, system[name].split())] for name in ("float64", "fp64x2"))
    assert plain[0] == refined[0] > 1e-4
    assert min(plain) > 1e-4
    assert refined[-1] < 1e-18
    steps = {name: int(re.search(r"\d+", text)[0]) for name, text in orbit.items()}
    assert steps["float32"] < steps["fp32x2"] < steps["float64"] < steps["fp64x2"] < 220
    bits = {"float32": 24, "fp32x2": 48, "float64": 53, "fp64x2": 106}
    for name, count in bits.items():
        # The Lyapunov exponent of the map is 0.42: an error of 2^-bits grows to 0.01 in so many.
        expected = (count * 0.693 - 4.6) / 0.42
        assert steps[name] == pytest.approx(expected, abs=15)


def test_every_example_is_listed():
    page = (EXAMPLES / "README.md").read_text().partition("`pretraining/`")[0]
    listed = set(re.findall(r"^\| `(\w+\.py)`", page, re.M))
    assert listed == {file.name for file in EXAMPLES.glob("*.py")}


def test_rl(monkeypatch):
    """The sampler has the trainer's weights, to the bit."""
    monkeypatch.setattr(rl, "STEPS", 25)
    rewards, mismatch = rl.train(mcf.fp16i16)
    assert mismatch == 0
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
