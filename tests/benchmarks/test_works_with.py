"""The page "Works with" is made of checks that can fail, and none of its cells has."""

import json

import pytest
import torch
from torch import nn

import mcftensor as mcf
from ecosystem import models
from ecosystem.row import COLUMNS, Row, are_same, measured, moves, terms
from ecosystem.rows import ROWS
from works_with import RESULTS, tried

HELD = json.loads(RESULTS.read_text())


def test_every_row_was_tried_and_no_cell_fails():
    assert list(HELD["rows"]) == list(ROWS)
    for name, row in HELD["rows"].items():
        assert not row["failed"], name
        assert row["cells"], name
        assert set(row["cells"]) <= set(COLUMNS)
        assert not any("FAILS" in cell or "not tried" in cell for cell in row["cells"].values())


@pytest.mark.parametrize("name", ["safetensors", "Accelerate"])
def test_a_row_is_tried_again(name):
    found = tried(name)
    assert not found["failed"], found["cells"]
    assert found["cells"] == HELD["rows"][name]["cells"]


def test_a_check_that_fails_is_a_cell_that_fails():
    row = Row(())
    row.works("train", lambda: are_same([torch.ones(1)], [torch.zeros(1)]))
    assert row.failed
    assert row.cells["train"] == "FAILS: AssertionError: 1 of 1 tensors differ"


@pytest.mark.parametrize("check", ["moves", "measured"])
def test_plain_bf16_would_fail(check):
    model = models.Regression().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    checks = {
        "moves": lambda: moves(mcf.as_expansion(nn.Linear(2, 2)), lambda: None),
        "measured": lambda: measured(lambda: models.loop(model, optimizer)),
    }
    with pytest.raises(AssertionError):
        checks[check]()
    assert len(terms(model)) == 6


def test_a_refusal_names_the_library_and_silence_is_a_failure():
    row = Row(())
    row.refuses("save", lambda: mcf.as_expansion(torch.ones(2), mcf.bf16x2).storage())
    assert row.cells["save"].startswith("refuses: ")
    assert not row.failed
    row.refuses("train", lambda: None)
    assert row.failed
