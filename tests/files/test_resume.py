"""A run that stopped, and goes on in a new process, has the bits of one that did not stop."""

import contextlib
import subprocess
import sys

import pytest
import torch

import mcftensor as mcf
from support import resuming
from support.cases import cases_of
from support.helpers import assert_same_bits
from support.resuming import RUNS, Run


@pytest.fixture(scope="module")
def gone_on(request, tmp_path_factory):
    """The folder in which a new process has trained the runs of the tests for ten more steps."""
    folder = tmp_path_factory.mktemp("runs")
    is_without = request.config.getoption("--without-float64")
    with mcf.without_float64() if is_without else contextlib.nullcontext():
        for case in cases_of(request.session, test_goes_on_to_the_bit):
            i = case.callspec.params["i"]
            Run(*RUNS[i], seed=i).train(10).save(folder, f"run{i}")
    command = [sys.executable, resuming.__file__, folder, *["--without-float64"] * is_without]
    subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize("i", range(len(RUNS)), ids=lambda i: "-".join(map(str, RUNS[i])))
def test_goes_on_to_the_bit(i, gone_on):
    whole = Run(*RUNS[i], seed=i).train(20)
    resumed = torch.load(gone_on / f"done{i}.pt", weights_only=True)
    assert_same_bits(whole.state(), resumed)


def test_the_comparison_can_fail():
    run = Run("default", "full", "fused", seed=0).train(2)
    state = run.state()
    x = state["optimizer"]["state"][0]["exp_avg"]
    before = mcf.MCFTensor([t.clone() for t in x.components], x.format)
    x.components[1].view(-1)[0] += 1e-3
    with pytest.raises(AssertionError):
        assert_same_bits(before, x)


def test_random_state_matters():
    """Without it dropout and stochastic rounding go another way."""
    whole = Run("stochastic", "full", "fused", seed=0).train(4)
    stopped = Run("stochastic", "full", "fused", seed=0).train(2)
    torch.manual_seed(1)
    stopped.train(2)
    with pytest.raises(AssertionError):
        assert_same_bits(whole.model.state_dict(), stopped.model.state_dict())


@pytest.fixture(scope="module")
def states():
    """Each run after two steps."""
    return [Run(*kinds, seed=i).train(2).state() for i, kinds in enumerate(RUNS)]


class TestTorchSave:
    @pytest.mark.parametrize("options", [{}, {"mmap": True}, {"map_location": "cpu"}], ids=str)
    def test_all_of_a_run(self, options, states, tmp_path):
        for state in states:
            torch.save(state, tmp_path / "x.pt")
            loaded = torch.load(tmp_path / "x.pt", weights_only=True, **options)
            assert_same_bits(state, loaded)

    def test_to_the_meta_device(self, tmp_path):
        torch.save(Run(*RUNS[0], seed=0).state(), tmp_path / "x.pt")
        loaded = torch.load(tmp_path / "x.pt", weights_only=True, map_location="meta")
        weight = loaded["model"]["0.weight"]
        assert weight.is_meta
        assert weight.format == mcf.bf16x2
        assert all(t.is_meta for t in weight.components)

    def test_ties_and_parameters(self, tmp_path):
        p = torch.nn.Parameter(mcf.as_expansion(torch.ones(3), mcf.Format(torch.float32, 4)))
        torch.save({"p": p, "same": p, "view": p.detach()[1:]}, tmp_path / "x.pt")
        for mmap in (False, True):
            loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
            assert loaded["p"] is loaded["same"]
            assert isinstance(loaded["p"], torch.nn.Parameter)
            assert loaded["p"].role == "parameter"
            loaded["p"].detach().zero_()
            assert loaded["view"].tolist() == [0, 0]

    @pytest.mark.wing("tools")
    @pytest.mark.parametrize(
        ("place", "wrong"),
        [
            (0, (torch.ones(3).bfloat16(), torch.ones(2).bfloat16())),
            (0, (torch.ones(3).bfloat16(), torch.ones(3))),
            (0, (torch.ones(4).bfloat16(), torch.ones(4).bfloat16())),
            (0, torch.ones(3).bfloat16()),
            (0, ()),
            (0, None),
            (1, "bf16x3"),
            (1, "fp16x2"),
            (1, "bfloat16"),
            (1, "bf16x9"),
            (1, 2),
            (2, "nurse"),
        ],
        ids=str,
    )
    def test_a_file_that_says_what_cannot_be(self, place, wrong, tmp_path, monkeypatch):
        reduce = mcf.MCFTensor.__reduce_ex__

        def altered(x, protocol):
            rebuild, arguments, state = reduce(x, protocol)
            return rebuild, (*arguments[:place], wrong, *arguments[place + 1 :]), state

        monkeypatch.setattr(mcf.MCFTensor, "__reduce_ex__", altered)
        x = mcf.as_expansion(torch.ones(3), mcf.bf16x2)
        torch.save({"x": x}, tmp_path / "x.pt")
        with pytest.raises(ValueError, match="damaged components, format or role"):
            torch.load(tmp_path / "x.pt", weights_only=True)
        with pytest.raises(mcf.errors.CheckpointError, match="damaged"):
            mcf.meters.audit(tmp_path / "x.pt", {"x": torch.ones(3)})
