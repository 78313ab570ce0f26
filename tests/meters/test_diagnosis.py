"""One verdict on whatever a program trains."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.meters.edq import Diagnosis
from mcftensor.meters.edq.diagnosis import diagnose_process

PROGRAM = """
import torch, mcftensor
gain = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
optimizer = torch.optim.AdamW([gain], lr=1e-5, betas=(0.9, 0.999))
for _ in range(5):
    gain.grad = torch.ones_like(gain)
    optimizer.step()
"""


def trained(model, optimizer, steps=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def diagnosed(convert, lr=6e-6, every=1, steps=6, **options):
    torch.manual_seed(0)
    model = convert(nn.Linear(40, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
    with Diagnosis(every=every) as diagnosis:
        trained(model, optimizer, steps)
    return diagnosis


def test_plain_bf16_loses_and_its_states_freeze(capsys):
    """As many as the readings of the meter say, which are tested elsewhere."""
    diagnosis = diagnosed(nn.Module.bfloat16, betas=(0.9, 0.999), every=150, steps=450)
    lines = [line.strip() for line in diagnosis.verdict().splitlines()]
    (meter,) = diagnosis.meters
    assert lines[0] == "EDQ of AdamW, measured at 3 of 450 steps"
    lost = sorted(x["lost"] for x in meter.history)
    assert lost[0] > 0.5
    assert lines[1] == f"{100 * round(lost[1], 3):.4g} % of updates are lost"
    frozen = [
        name for own in meter.per_state.values() for name, x in own.items() if x["lost"] > 0.5
    ]
    assert set(frozen) == {"exp_avg_sq"}
    assert lines[2] == f"of 4 bfloat16 states {len(frozen)} are frozen (exp_avg_sq)"
    rate = float(lines[3].removeprefix("the effective learning rate is ").split()[0])
    assert rate < 0.1
    assert "mcf.as_expansion(model)" in lines[4]
    assert capsys.readouterr().err == diagnosis.verdict() + "\n"


def test_expansions_and_float32_lose_nothing():
    for convert in (mcf.as_expansion, lambda m: m):
        diagnosis = diagnosed(convert, betas=(0.9, 0.999), every=5, steps=200)
        lines = diagnosis.verdict().splitlines()
        assert lines[-1].strip() == "the effective learning rate is 1.00 of yours"
        assert "frozen" not in "".join(lines)


def test_a_schedule_that_ends_below_the_resolution():
    """Its end is not hidden by the median of all samples."""
    torch.manual_seed(0)
    p = nn.Parameter((0.02 * torch.randn(400)).bfloat16())
    optimizer = torch.optim.SGD([p], lr=1.0)
    with Diagnosis(every=1) as diagnosis:
        for step in range(8):
            optimizer.param_groups[0]["lr"] = 1e-2 if step < 6 else 1e-7
            p.grad = torch.randn(400).bfloat16()
            optimizer.step()
    last = diagnosis.verdict().splitlines()[-2:]
    assert last[0].startswith("  the effective learning rate is 1.00 of yours, and 0.0")
    assert last[0].endswith(" in the last quarter")
    assert "mcf.as_expansion(model)" in last[1]


def test_to_nearest_no_mean_is_kept():
    """Large elements move as they should, and small updates of large weights are lost for good."""
    p = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with Diagnosis(every=1) as diagnosis:
        p.grad = torch.cat([torch.full((50,), 0.25), torch.full((50,), 1e-5)]).bfloat16()
        optimizer.step()
    assert diagnosis.verdict().splitlines()[1] == "  50 % of updates are lost"


def test_what_rounding_keeps_in_the_mean_is_not_lost():
    balanced = mcf.Format(torch.bfloat16, 1, rounding="balanced")
    torch.manual_seed(0)
    p = nn.Parameter(mcf.as_expansion(0.02 * torch.randn(400, 400), balanced))
    optimizer = torch.optim.SGD([p], lr=1e-5)
    with Diagnosis(every=1) as diagnosis:
        p.grad = torch.randn(400, 400).bfloat16()
        optimizer.step()
    lines = diagnosis.verdict().splitlines()
    assert lines[1].endswith("of elements wait for a later step: rounding keeps their mean")
    assert len(lines) == 3
    with Diagnosis(every=1) as diagnosis:
        p.grad = torch.ones(400, 400).bfloat16()
        torch.optim.SGD([p], lr=0.25).step()
    assert diagnosis.verdict().splitlines()[1] == "  0 % of updates are lost"


def test_expansions_that_lose_need_a_finer_format():
    p = nn.Parameter(mcf.as_expansion(torch.full((100,), 1.003)))
    optimizer = torch.optim.SGD([p], lr=1e-7)
    with Diagnosis(every=1) as diagnosis:
        p.grad = torch.ones(100, dtype=torch.bfloat16)
        optimizer.step()
    last = diagnosis.verdict().splitlines()[-1].strip()
    assert last == "give the weights a finer format: mcf.change_format(model, optimizer, ...)"


def test_every_optimizer_has_a_meter_and_no_copy_has_one():
    torch.manual_seed(0)
    models = [nn.Linear(3, 2), nn.Linear(2, 2)]
    with Diagnosis(every=2) as diagnosis:
        for model, cls in zip(models, (torch.optim.SGD, torch.optim.Adagrad), strict=True):
            trained(model, cls(model.parameters(), lr=0.1), 4)
    assert [len(meter.history) for meter in diagnosis.meters] == [2, 2]
    first, *_, last = diagnosis.verdict().splitlines()
    assert first == "EDQ of SGD, measured at 2 of 4 steps"
    assert last.strip() == "the effective learning rate is 1.00 of yours"
    trained(models[0], torch.optim.SGD(models[0].parameters()), 1)  # after the block
    assert len(diagnosis.meters) == 2


def test_what_cannot_be_measured_is_said():
    p = nn.Parameter(torch.ones(3))
    with Diagnosis(every=1) as diagnosis, pytest.warns(UserWarning, match="cannot be measured"):
        torch.optim.LBFGS([p]).step(lambda: p.square().sum().backward() or 1.0)
    assert len(diagnosis.verdict().splitlines()) == 2
    with Diagnosis(every=1) as diagnosis:
        pass
    assert diagnosis.verdict() == "EDQ: no optimizer has stepped"


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_how_often_is_a_whole_number(every):
    with pytest.raises(ValueError, match="whole number"):
        Diagnosis(every=every)


def run(setting):
    environment = os.environ | {"MCFTENSOR_EDQ": setting}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, check=False, env=environment, text=True)


@pytest.mark.slow
def test_the_environment_has_a_program_diagnosed(tmp_path):
    done = run("2")
    assert done.returncode == 0
    assert done.stderr.startswith("EDQ of AdamW, measured at 3 of 5 steps\n  100 % of updates")
    file = tmp_path / "edq.txt"
    done = run(f"2:{file}")
    assert (done.returncode, done.stderr) == (0, "")
    assert file.read_text().startswith("EDQ of AdamW, measured at 3 of 5 steps\n")


@pytest.mark.parametrize("setting", ["often", "0", ":edq.txt"])
def test_a_mistake_in_the_environment_is_told(setting):
    with pytest.raises(ValueError, match=r"MCFTENSOR_EDQ='.*'; give how many steps"):
        diagnose_process(setting)


def test_states_that_round_in_balance_are_not_frozen():
    torch.manual_seed(0)
    model = mcf.as_expansion(nn.Linear(64, 64, bias=False), mcf.bf16i8)
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), lr=1e-4), "compact")
    with Diagnosis(every=100) as diagnosis:
        trained(model, optimizer, 201)
    (meter,) = diagnosis.meters
    assert meter.states[-1]["exp_avg_sq"]["lost"] > 0.5
    assert "frozen" not in diagnosis.verdict()
