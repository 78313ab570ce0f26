"""A few of the programs of `tests/fuzz_steps.py`, and what it says of one that differs."""

import pytest

import fuzz_steps
from mcftensor.dispatch import defer
from support.eager_kernels import eager_kernels


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("seed", [*range(0, 300, 20), 121, 296, 1150])
def test_programs(seed):
    assert fuzz_steps.differs(seed) == ""


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("seed", [*range(10, 310, 20), 1008])
def test_programs_with_kernels(seed):
    with eager_kernels():
        assert fuzz_steps.differs(seed) == ""


@pytest.mark.with_float64("without it, the tape is right by chance in this program")
def test_a_tape_that_is_wrong_is_found(monkeypatch, capsys):
    monkeypatch.setattr(defer, "_are_apart", lambda added: True)
    assert fuzz_steps.main(["--programs", "1", "--seed", "121"]) == 1
    assert "program 121 differs" in capsys.readouterr().out
    assert fuzz_steps.main(["--replay", "121"]) == 1
    assert "_foreach_addcdiv_" in capsys.readouterr().out
