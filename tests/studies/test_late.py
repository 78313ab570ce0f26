"""`studies/late.py`, on a text small enough for seconds."""

import json
from pathlib import Path

import pytest
import torch

import late
from pretraining import training
from pretraining.model import Shape
from pretraining.run import Run

ROOT = Path(__file__).parents[2]
STEPS = 10
TINY = Shape(context=16, layers=1, width=16, heads=2)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(training.SHAPES, "cpu", TINY)


@pytest.fixture
def run(poem, tmp_path):
    """Run the command on the poem in a folder; return the records by name."""

    def run(folder, *arguments):
        where = tmp_path / folder
        options = ["--data", poem, "--checkpoints", where, "--out", where / "out"]
        options += ["--steps", STEPS, "--seeds", 0]
        assert late.main([*map(str, options), *arguments]) == 0
        return {path.stem: json.loads(path.read_text()) for path in where.glob("out/*.json")}

    return run


def results(records):
    return {
        name: {key: x for key, x in record["result"].items() if key != "seconds_per_step"}
        for name, record in records.items()
    }


def job(poem, strategy, when):
    content = torch.tensor(list(poem.read_bytes()), dtype=torch.int16)
    settings = Run(strategy, STEPS, 1e-3, 0.95, 2, "cpu", 0)
    return late.LateTraining(settings, content, content, when)


def test_runs_in_pieces_end_with_the_same_bits(run, monkeypatch):
    monkeypatch.setattr(late, "SHARES", {"20%": 0.2})
    whole = results(run("whole"))
    assert len(whole) == 4
    for _ in range(STEPS * len(whole)):
        last = run("pieces", "--minutes", "1e-9")
    assert results(last) == whole


@pytest.mark.parametrize("strategy", late.STARTS)
@pytest.mark.parametrize(("when", "step"), [("10%", 9), ("20%", 8), ("5%", None), ("never", None)])
def test_tails_come_after_their_step(poem, strategy, when, step):
    """5 % of ten steps round to none: the change comes after the last one."""
    one = job(poem, strategy, when)
    formats = []
    for batch in one.batches():
        one.take(batch)
        formats.append({getattr(p, "format", p.dtype) for p in one.model.parameters()})
    changed = [i for i, own in enumerate(formats, 1) if own == {late.mcf.bf16i16}]
    start = STEPS if when == "5%" else step
    assert changed == ([] if start is None else list(range(start, STEPS + 1)))
    assert [change["step"] for change in one.result.changes] == changed[:1]
    for change in one.result.changes:
        assert change["share"] == 1
        assert change["bytes"] == pytest.approx([8 if strategy == "bf16" else 12, 14], abs=0.1)


def test_the_meter_names_the_parameters_that_lose(poem):
    one = job(poem, "bf16", "meter")
    one.take(next(one.batches()))
    (change,) = one.result.changes
    lost = {name: found["lost"] for name, found in one.meter.per_parameter.items()}
    assert {*change["parameters"]} == {name for name in lost if (lost[name] or 0) > late.LOST}
    assert 0 < change["share"] < 1, "biases begin at zero and lose nothing"
    tails = {n for n, p in one.model.named_parameters() if hasattr(p, "format")}
    assert tails == {*change["parameters"]}


def test_the_large_model_has_5_million_parameters(poem):
    content = torch.tensor(list(poem.read_bytes()), dtype=torch.int16)
    large = late.LargeTraining(Run("bf16", 2, 1e-3, 0.95, 2, "cpu", 0), content, content, "never")
    assert sum(p.numel() for p in large.model.parameters()) == pytest.approx(4.8e6, rel=0.05)


def test_float64_says_that_tails_keep_what_bf16_loses(run):
    found = {name: result["witness"] for name, result in results(run("some")).items()}
    exact, never = found["main-exact-never-0"], found["main-bf16-never-0"]
    assert exact["displacement_matrices"] < 1e-4 < 0.05 < never["displacement_matrices"]
    assert exact["second_moment"] == pytest.approx(1, abs=1e-5)


def test_tables_and_the_picture_are_made_of_records(run, tmp_path, monkeypatch):
    for folder in ("docs/figures", "docs/_ext"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import late_tails  # noqa: PLC0415
    from tables import late as tables  # noqa: PLC0415

    monkeypatch.setattr(late, "SHARES", {"never": 0.0, "20%": 0.2})
    run("late", "--out", str(tmp_path / "late"), "--seeds", "0", "1")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("late/*.json")}
    rows = {tuple(row.split(" | ")[:2]): row.strip("| ").split(" | ") for row in
            tables.late_main().splitlines()[2:8]}  # fmt: skip
    assert len(rows) == 6
    none, tails = rows["| to nearest", "none"], rows["| to nearest", "last 20 %"]
    finals = [
        [records[f"main-{case}-{seed}"]["result"]["validation"][-1][1] for seed in (0, 1)]
        for case in ("bf16-never", "bf16-20", "exact-never")
    ]
    a, b, exact = (sum(own) / 2 for own in finals)
    assert none[4].startswith(f"{a - exact:+.4f}".replace("-", "−") + " ± ")
    assert tails[2:4] == ["20.0 %", "8 → 14 (9.2)"]
    assert tails[5].startswith(f"{b - a:+.4f}".replace("-", "−") + " ± ")
    closed = [100 * (x - y) / (x - z) for x, y, z in zip(*finals, strict=True)]
    assert tails[6].startswith(f"{sum(closed) / 2:.1f}".replace("-", "−") + " ± ")
    assert tails[8] == "2"
    assert rows["| `bf16i16`", "all steps"][4] == f"{exact:.4f}"
    (change, *later) = records["main-bf16-meter-0"]["result"]["changes"]
    share = tables.share(records["main-bf16-meter-0"])
    assert change["share"] * 0.9 <= share < 1, later
    assert all("<circle" in picture for picture in late_tails.draw())


def test_a_checkpoint_without_a_witness_goes_on(poem):
    first = job(poem, "bf16", "20%")
    batches = first.batches()
    for _ in range(9):
        first.take(next(batches))
    state = first.state_dict()
    del state["witness"], state["result"]["changes"]
    second = job(poem, "bf16", "20%")
    second.load_state_dict(state)
    second.take(next(second.batches()))
    first.take(next(batches))
    assert second.result.training == first.result.training
    assert second.result.witness == {}
