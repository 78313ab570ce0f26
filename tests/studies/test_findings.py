"""`studies/findings.py`, on a model and a text small enough for seconds."""

import json
import math
from fractions import Fraction

import pytest
import torch

import findings
import mcftensor as mcf
from pretraining.model import Shape
from questions import (
    beta2,
    eight,
    growth,
    intervals,
    others,
    prediction,
    settings,
    sizes,
    terms,
    trial,
)
from questions.ledger import Ledger
from questions.stock import RATES
from questions.trial import Trial
from support.commands import assert_one_line, exit_status

TINY = Shape(context=16, layers=1, width=32, heads=2)


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch):
    monkeypatch.setattr(trial, "SHAPE", TINY)
    monkeypatch.setattr(growth, "SHAPE", TINY)
    monkeypatch.setattr(trial, "WINDOWS", 4)
    monkeypatch.setattr(eight, "STEPS", 3)


@pytest.fixture
def run(poem, tmp_path):
    """Run the command on the poem; return its exit status and the answer to a question."""

    def run(question, *arguments):
        out = tmp_path / "out"
        few = ["--steps", "4", "--long-steps", "50", "--seeds", "0", "1"]
        status = findings.main(
            ["--data", str(poem), "--out", str(out), "--only", question, *few, *arguments]
        )
        assert (out / f"findings-{question}.png").read_bytes().startswith(b"\x89PNG")
        return status, json.loads((out / f"findings-{question}.json").read_text())

    return run


@pytest.fixture
def train(poem):
    """Train one strategy for some steps."""
    content = torch.tensor(list(poem.read_bytes()), dtype=torch.uint8)

    def train(strategy, optimizer="adamw", lr=1e-3, steps=6):
        return trial.train(Trial(strategy, lr, 0.999, 0, optimizer, steps), content, content)

    return train


# The questions


@pytest.mark.slow
def test_beta2_and_prediction_share_their_trials(run, monkeypatch):
    monkeypatch.setattr(beta2, "BETA2S", (0.9, 0.999))
    monkeypatch.setattr(beta2, "STRATEGIES", ("master", "bf16", "plus", "compact"))
    monkeypatch.setitem(RATES, "adamw", (3e-4, 1e-3))
    status, record = run("beta2")
    assert status == 0
    cells = {(c["strategy"], c["lr"], c["beta2"]): c for c in record["cells"]}
    assert len(cells) == 4 * 2 * 2
    for (strategy, *_), cell in cells.items():
        assert (cell["gap"] == 0) == (strategy == "master")
        assert cell["second_moment"] == pytest.approx(1, abs=0.1)
    assert cells["bf16", 3e-4, 0.999]["lost"] > 0.5 > cells["plus", 3e-4, 0.999]["lost"]
    for row in record["best"]:
        own = {b: cells[row["strategy"], row["lr"], b]["validation"] for b in record["beta2s"]}
        assert row["losses"] == list(own.values())
        assert own[row["beta2"]] == min(own.values())
        assert row["worse"] == pytest.approx(own[row["second"]] - own[row["beta2"]])

    done = []
    real = settings.train
    monkeypatch.setattr(settings, "train", lambda t, *text: done.append(t) or real(t, *text))
    status, record = run("prediction")
    assert status == 0
    assert {t.strategy for t in done} == set(prediction.OTHERS), "the others are there already"
    assert record["count"] == 2 * (4 * 2 * 2 + 2 * 2)
    assert len(record["runs"]) == 2 * (3 * 2 * 2 + 2 * 2)
    everything = record["correlations"][0]
    assert everything["group"] == "all"
    for name in prediction.PREDICTORS:
        low, high = everything[name]["interval"]
        assert -1 <= low <= everything[name]["rho"] <= high <= 1

    done.clear()
    assert run("prediction")[1] == record
    assert done == []


def test_eight(run, monkeypatch):
    monkeypatch.setattr(eight, "FORMATS", ("e4m3x2", "e4m3x3", "e4m3i16"))
    monkeypatch.setattr(eight, "FAMILIES", {"terms": (("e4m3x2", "e4m3x3"), "black", "o")})
    monkeypatch.setattr(eight, "TRAINED", ("e4m3i16", "e4m3x2"))
    _, record = run("eight")
    errors = {row["format"]: row["0.0001 small"] for row in record["stored"]}
    assert errors["e4m3x2"] > 3 * errors["e4m3x3"] > 3 * errors["e4m3i16"] > 0
    trained = {row["format"]: row for row in record["trained"]}
    assert trained["e4m3i16"]["gap"] == 0
    assert trained["e4m3x2"]["ratio"] < 0.9 < trained["e4m3i16"]["ratio"]


@pytest.mark.slow  # `test_eight` runs the command, and the tests of trials what is measured
def test_growth(run):
    _, record = run("growth")
    rows = {(r["source"], r["strategy"], r["kind"]): r for r in record["rows"]}
    assert len(rows) == 2 * len(growth.STRATEGIES) * 2
    for (_, strategy, _), row in rows.items():
        assert row["steps"] == [1, 2, 5, 10, 20, 50]
        limit = 1e-4 if strategy in ("master", "exact") else 1
        assert all(0 < error < limit or strategy == "bf16" for error in row["error"])
    assert rows["random", "bf16", "vectors"]["error"][-1] == pytest.approx(1, abs=0.3), "frozen"


def test_sizes(run, monkeypatch):
    """Of two sizes, each at the best of two rates and a third of it, and then the next."""
    shapes = (TINY, Shape(context=8, layers=1, width=16, heads=2))
    monkeypatch.setattr(sizes, "SHAPES", shapes)
    monkeypatch.setattr(sizes, "SEEDS", (3, 1))
    monkeypatch.setattr(sizes, "RATES", (1e-5, 1e-2))
    monkeypatch.setattr(sizes, "STRATEGIES", ("master", "bf16"))
    monkeypatch.setattr(sizes, "BETA2S", (0.9,))
    monkeypatch.setattr(sizes, "OF_BETA2", ("master",))
    _, record = run("sizes", "--sizes", "1")
    first = record["rows"]
    assert [(r["strategy"], r["lr"]) for r in first] == [
        (strategy, share * 1e-2) for share in (1, 1 / 3) for strategy in ("master", "bf16")
    ]
    assert [row["beta2"] for row in record["beta2s"]] == [0.9, 0.999]
    assert all((row["gap"] == 0) == (row["strategy"] == "master") for row in first)
    assert first[1]["displacement_matrices"] > 10 * first[0]["displacement_matrices"]

    done = []
    real = settings.train
    monkeypatch.setattr(settings, "train", lambda t, *text: done.append(t) or real(t, *text))
    _, record = run("sizes", "--sizes", "2")
    assert record["rows"][:4] == first
    assert {t.shape for t in done} == {shapes[1]}, "the first size is there already"
    assert {t.seed for t in done} == {0}
    assert [row["million"] for row in record["rows"]] == [
        trial.count_parameters(shape) / 1e6 for shape in shapes for _ in range(4)
    ]


@pytest.mark.slow
def test_others(run, monkeypatch):
    monkeypatch.setattr(others, "STRATEGIES", {"sgd": ("bf16", "light"), "lion": ("bf16", "light")})
    _, record = run("others")
    rows = {(r["optimizer"], r["strategy"], r["lr"]): r for r in record["rows"]}
    assert len(rows) == 3 + 2 * 3
    assert rows["lion", "bf16", 1e-4]["ratio"] < 0.5 < 0.99 < rows["lion", "light", 1e-4]["ratio"]
    assert rows["sgd", "master", 0.1]["gap"] == 0


# One trial


def test_strategies_start_alike_and_the_witness_follows(train):
    master, exact, bf16 = (train(name) for name in ("master", "exact", "bf16"))
    assert abs(master["validation"] - exact["validation"]) < 0.01
    for name in ("matrices", "vectors"):
        assert master[f"displacement_{name}"] < 1e-4 < 0.1 < bf16[f"displacement_{name}"]
    assert master["second_moment"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "muon", "schedulefree", "adafactor"])
def test_the_witness_follows_every_optimizer(train, optimizer):
    """Muon orthogonalizes in bf16, in float64 too."""
    lr = 0.1 if optimizer == "sgd" else 1e-3
    master, light, bf16 = (train(name, optimizer, lr) for name in ("master", "light", "bf16"))
    limit = 0.02 if optimizer == "muon" else 1e-3
    assert master["displacement_matrices"] < limit
    assert light["displacement_matrices"] < bf16["displacement_matrices"] / 2
    assert master["ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("optimizer", ["lion", "adafactor"])
def test_plus_is_light_where_no_second_moment_is_like_the_weights(train, optimizer):
    assert train("light", optimizer) == train("plus", optimizer)


@pytest.mark.slow
def test_what_is_free_of_a_schedule_is_judged_by_its_average(train, monkeypatch):
    """Of master weights too, whose rounded copies are what is judged."""
    averaged = {name: train(name, "schedulefree", 1e-2) for name in ("master", "plus")}
    monkeypatch.setattr(trial, "take_weights", lambda *_: None)
    assert train("master", "schedulefree", 1e-2)["validation"] != averaged["master"]["validation"]
    assert train("plus", "schedulefree", 1e-2) == averaged["plus"], "its weights are the model's"


# 8-bit terms

CODES = torch.arange(256, dtype=torch.uint8)
VALUES = sorted(
    {Fraction(x) for x in CODES.view(torch.float8_e4m3fn).double().tolist() if not math.isnan(x)}
)


def nearest(x):
    """The E4M3 nearest to a rational, ties to an even significand."""
    best = min(abs(x - value) for value in VALUES)
    found = [value for value in VALUES if abs(x - value) == best]
    if len(found) == 1:
        return found[0]
    places = [i for i, value in enumerate(v for v in VALUES if v >= 0) if value == abs(found[0])]
    return found[0] if places[0] % 2 == 0 else found[1]


@pytest.mark.parametrize("name", ["e4m3x2", "e4m3x3", "e4m3x4", "e4m3x3s", "e4m3x4s"])
def test_terms_are_the_nearest_of_what_is_left(name):
    format = mcf.Format.from_name(name)
    assert format.bytes == int(name[5])
    step = 2**terms.APART if name.endswith("s") else 1
    x = torch.randn(2, 48) * 10 ** torch.linspace(-6, 0, 48)
    stored = mcf.as_expansion(x, format)
    whole = mcf.as_plain(stored, torch.float64)
    for row in range(2):
        for block in (range(32), range(32, 48)):
            largest = max(abs(Fraction(x[row, i].item())) for i in block)
            scale = Fraction(2) ** math.ceil(math.log2(largest / 448))
            for i in block:
                rest, total = Fraction(x[row, i].item()) / scale, Fraction(0)
                for k in range(format.bytes):
                    term = nearest(rest * step**k) / Fraction(step) ** k
                    rest, total = rest - term, total + term
                assert Fraction(whole[row, i].item()) == total * scale


def test_a_balanced_last_term_keeps_the_mean():
    """To nearest, a sum stands still once half a unit of its second term is more than is added."""

    def after(name):
        weight = mcf.as_expansion(torch.ones(64, 32), mcf.Format.from_name(name))
        for _ in range(200):
            weight.add_(1e-4)
        return mcf.as_plain(weight, torch.float64).mean().item()

    assert after("e4m3x2br") == pytest.approx(1.02, abs=1e-3)
    assert 1 < after("e4m3x2") < 1.005


# Figures


def test_means_and_their_intervals():
    assert intervals.mean_of([4.0]) == (4.0, None)
    mean_, half = intervals.mean_of([1.0, 2.0, 3.0])
    assert (mean_, round(half, 3)) == (2.0, 2.484)


def test_rank_correlation():
    """Of values with ties; the second is worked by hand from the places 1, 2, 3.5, 5, 3.5."""
    assert intervals.ranks([10, 20, 20, 5]).tolist() == [2, 3.5, 3.5, 1]
    assert intervals.spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(8 / math.sqrt(95))
    assert intervals.spearman([1, 2, 3], [1, 8, 27]) == 1
    assert intervals.spearman([1, 2, 3], [1, -8, -27]) == -1
    assert math.isnan(intervals.spearman([1, 2, 3], [7, 7, 7]))


def test_the_bootstrap_draws_clusters():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, generator=generator, dtype=torch.float64).tolist()
    noise = torch.randn(40, generator=generator, dtype=torch.float64).tolist()
    low, high = intervals.bootstrap(x, noise, range(40))
    assert low < 0 < high
    assert 0.4 < high - low < 0.9
    assert intervals.bootstrap(x, x, range(40)) == (1, 1)
    repeated = intervals.bootstrap(x * 10, noise * 10, [*range(40)] * 10)
    assert repeated == pytest.approx((low, high), abs=1e-12), "copies say nothing new"
    alone = intervals.bootstrap(x * 10, noise * 10, range(400))
    assert alone[1] - alone[0] < (high - low) / 2


def test_slope():
    steps = [math.log(x) for x in (100, 1000, 5000)]
    assert intervals.slope(steps, [0.5 * x - 3 for x in steps]) == pytest.approx(0.5)


# The file of what has been measured


def test_what_is_measured_is_not_measured_again(tmp_path):
    path = tmp_path / "measured.jsonl"
    made = []

    def make(key):
        made.append(key["n"])
        return {"twice": 2 * key["n"]}

    keys = [{"n": n} for n in range(3)]
    assert Ledger(path, {"text": 1}).measure_all(keys[:2], make, "") == [{"twice": 0}, {"twice": 2}]
    with path.open("a") as file:
        file.write('{"key": {"n": 2}, "val')  # stopped while it wrote
    again = Ledger(path, {"text": 1})
    assert again.measure_all(keys, make, "")[2] == {"twice": 4}
    assert Ledger(path, {"text": 1}).measure_all(keys, make, "")[2] == {"twice": 4}
    assert made == [0, 1, 2]


def test_another_text_is_refused(run, poem, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(growth, "STRATEGIES", ("master",))
    assert run("growth")[0] == 0
    other = tmp_path / "other.txt"
    other.write_bytes(poem.read_bytes()[::-1])
    arguments = ["--out", str(tmp_path / "out"), "--only", "growth", "--long-steps", "50"]
    assert findings.main(["--data", str(other), *arguments]) == 2
    stderr = capsys.readouterr().err
    assert stderr.splitlines()[-1].startswith("findings.py: ")
    assert "is of another text or model" in stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "argument --steps: must be a whole number from 1 on, not '0'"),
        (["--only", "weather"], "unknown question 'weather': choose from beta2, others, tuning, "),
        (["--out", "/dev/null/out"], "cannot write to /dev/null/out: Not a directory"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(poem, capsys, arguments, complaint):
    assert exit_status(findings.main, ["--data", str(poem), *arguments]) == 2
    assert_one_line(capsys.readouterr().err, "findings.py", complaint)
