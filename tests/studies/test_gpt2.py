"""`studies/gpt2.py`, on a model and a text small enough for seconds."""

import json

import pytest
import torch

import gpt2
from pretraining.gpt2 import SMALLEST, VOCABULARY, TokenRun, TokenTraining, count_parameters
from pretraining.model import Shape

TINY = Shape(context=16, layers=1, width=16, heads=2)


@pytest.fixture
def run(poem, tmp_path):
    """Run the command on the poem in a folder; return the records by name."""

    def run(folder, *arguments):
        where = tmp_path / folder
        options = ["--data", poem, "--checkpoints", where, "--out", where / "out", "--steps", 3]
        options += ["--shape", 16, 1, 16, 2, "--vocabulary", 280, "--length", 12, "--batch-size", 2]
        assert gpt2.main([*map(str, options), *arguments]) == 0
        return {path.stem: json.loads(path.read_text()) for path in where.glob("out/*.json")}

    return run


def test_the_model_is_gpt2():
    assert count_parameters(SMALLEST, VOCABULARY) == 124_439_808


def test_runs_in_pieces_end_with_the_same_bits(run):
    whole = run("whole", "--strategies", "plus")["0M-plus-0"]
    for _ in range(2):
        assert run("pieces", "--strategies", "plus", "--minutes", "1e-9") == {}
    pieces = run("pieces", "--strategies", "plus")["0M-plus-0"]
    for name in ("validation", "training", "edq", "bytes_per_parameter"):
        assert pieces["result"][name] == whole["result"][name]
    assert whole["tokens"] == 3 * 2 * 12
    assert whole["result"]["bytes_per_parameter"] == pytest.approx(12, abs=0.5)


def test_the_loss_is_of_the_next_token():
    """Of a model that has been told what follows what."""
    content = torch.arange(8).repeat(50).to(torch.int16)
    settings = {"steps": 1, "lr": 0.1, "beta2": 0.95, "batch_size": 2, "device": "cpu", "seed": 0}
    run = TokenRun("master", **settings, shape=TINY, vocabulary=8, length=12, held_out=4)
    job = TokenTraining(run, content, content)
    with torch.no_grad():
        for p in job.model.transformer.h.parameters():
            p.zero_()
        job.model.transformer.wpe.weight.zero_()
        job.model.transformer.wte.weight.zero_()
        job.model.transformer.wte.weight[:, :8] = torch.eye(8)
    job.model.lm_head.weight = torch.nn.Parameter(
        job.model.transformer.wte.weight.detach().roll(1, 0) * 20
    )
    job.validate()
    assert job.result.final < 1e-3
