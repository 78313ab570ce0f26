"""The examples that are run as they are; the others have tests where their subject has."""

import math
import re
from pathlib import Path

import pytest
import torch

import gaussian_process
import inverse_problem
import kepler
import mandelbrot
import mcftensor as mcf
import quickstart
import refinement
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


def figures(text):
    """The numbers of each line, by its name."""
    rows = (line.split(maxsplit=1) for line in text.splitlines())
    return {name: [float(x) for x in re.findall(r"\d[\d.e+-]*", rest)] for name, rest in rows}


def test_mandelbrot_has_blocks_in_float64(tmp_path):
    views = [mandelbrot.view(format, 24, 60) for format in (None, mcf.fp64x2)]
    assert torch.equal(*views)  # Nothing has left yet.
    (x, _), (y, _) = (mandelbrot.points(format, 48) for format in (None, mcf.fp64x2))
    assert len(set(x.tolist())) <= 10
    assert len(set(mcf.exact.to_fraction(y))) == 48
    mandelbrot.main(str(tmp_path / "a.png"), 8, 3)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_points_of_the_mandelbrot_set_leave_as_they_do():
    a = torch.tensor([0.0, -1.0, 0.5, 3.0], dtype=torch.float64)
    plain = mandelbrot.escape(a, torch.zeros_like(a), 100)
    long = (mcf.as_expansion(t, mcf.fp64x2) for t in (a, torch.zeros_like(a)))
    assert torch.equal(mandelbrot.escape(*long, 100), plain)
    assert plain[:2].tolist() == [100, 100]
    assert 1 < plain[3] < plain[2] < 20


def test_kepler(tmp_path, capsys):
    found = {f: kepler.distances(f, 8) for f in (torch.float64, mcf.fp64x2)}
    assert max(found[mcf.fp64x2]) < 1e-28
    assert 1e-16 < found[torch.float64][-1] < 1e-12
    kepler.main(str(tmp_path / "a.png"), 2)
    assert (tmp_path / "a.png").exists()
    assert "fp64x2" in capsys.readouterr().out


def test_gaussian_process():
    errors = [gaussian_process.error(n, 0.0, mcf.fp64x2) for n in (8, 12)]
    assert errors[1] < errors[0] / 100
    assert gaussian_process.error(12, 1e-10, None) > 10 * errors[1]
    assert math.isnan(gaussian_process.error(20, 0.0, None))


def test_inverse_problem(tmp_path, capsys):
    inverse_problem.main(str(tmp_path / "a.png"), 14)
    found = figures(capsys.readouterr().out)
    assert found["float64"][0] > 1e-3
    assert found["fp64x2"][0] < 1e-14


def test_refinement(tmp_path, capsys):
    refinement.main(str(tmp_path / "a.png"), 40, 5)
    found = figures(capsys.readouterr().out)
    assert min(found["float32"][:5]) > 1e-8
    assert found["fp32x2"][4] < 1e-12


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
