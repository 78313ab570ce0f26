"""`studies/pretrain.py` that was stopped goes on to the bit, on one process and on several."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pretraining.strategies import NOT_UNDER, STRATEGIES
from support import pretrain_runs
from support.helpers import assert_same_bits
from support.pretrain_runs import assert_same_run, results, run, state, write_poem
from support.ranks import on_ranks

SHORT = ("--steps", 8, "--save-every", 3)


# One process


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that did not stop."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, *SHORT, "--strategies", "master,plus")[0] == 0
    return folder


@pytest.mark.slow
def test_every_strategy_goes_on_to_the_bit(tmp_path_factory, tmp_path):
    """Each is stopped in the middle; what is finished by then is not run again."""
    whole = tmp_path_factory.mktemp("whole")
    assert run(whole, *SHORT)[0] == 0
    for i, strategy in enumerate(STRATEGIES):
        # The first start takes 5 steps, the others the 5 that are lacking and 5 of the next.
        _, taken = run(tmp_path, *SHORT, stop_before=5 + 5 * (i > 0))
        assert taken[-5:] == [strategy] * 5
        assert taken[:-5] == [STRATEGIES[i - 1]] * (5 * (i > 0))
    status, taken = run(tmp_path, *SHORT)
    assert status == 0
    assert taken == [STRATEGIES[-1]] * 5
    assert_same_run(whole, tmp_path, STRATEGIES)
    assert run(tmp_path, *SHORT) == (0, [])
    assert_same_run(whole, tmp_path, STRATEGIES)


def test_saving_changes_nothing(whole, tmp_path):
    assert run(tmp_path, *SHORT, "--strategies", "master,plus", checkpoint=False)[0] == 0
    alone, saved = (results(folder)["strategies"] for folder in (tmp_path, whole))
    assert alone == {name: saved[name] for name in ("master", "plus")}


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "batches", "meter"])
def test_each_part_of_a_checkpoint_matters(whole, begun, part):
    """With one part of step 3 and the rest of step 6, a run is another one."""
    file = begun / "checkpoint" / "plus.pt"
    old = torch.load(file, weights_only=True)
    run(begun, *SHORT, "--strategies", "plus", stop_before=4)
    new = torch.load(file, weights_only=True)
    assert (old["step"], new["step"]) == (3, 6)
    torch.save(new | {part: old[part]}, file)
    assert run(begun, *SHORT, "--strategies", "plus")[0] == 0
    with pytest.raises(AssertionError):
        assert_same_bits(state(whole, "plus"), state(begun, "plus"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with a run that has been stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    run(folder, *SHORT, "--strategies", "plus", stop_before=4)
    return folder


@pytest.fixture
def begun(stopped, tmp_path):
    """A copy of it."""
    return shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", 9], "is of a run with --steps 8, not 9"),
        (["--lr", "1e-3"], "is of a run with --lr 0.0003, not 0.001"),
        (["--beta2", "0.95"], "is of a run with --beta2 0.999, not 0.95"),
        (["--seed", 1], "is of a run with --seed 0, not 1"),
        (["--batch-size", 2], "is of a run with --batch-size 4, not 2"),
        (["--path", "foreach"], "is of a run with --path fused, not foreach"),
        (["--optimizer", "sgd"], "is of a run with --"),
        (["--data", __file__], "is of a run with --data another text"),
    ],
)
def test_options_that_differ(begun, capsys, arguments, complaint):
    status, taken = run(begun, *SHORT, "--strategies", "bf16,plus", *arguments)
    assert (status, taken) == (2, []), "it says so before it trains anything"
    stderr = capsys.readouterr().err
    assert f"pretrain.py: {begun}/checkpoint/plus.pt {complaint}" in stderr
    assert "give another folder to --checkpoint" in stderr


def test_what_may_differ(begun):
    status, taken = run(
        begun, "--steps", 8, "--save-every", 2, "--strategies", "light,plus", "--parallel", "fsdp"
    )
    assert (status, len(taken)) == (0, 13)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut off"])
def test_a_damaged_checkpoint(begun, capsys, content):
    (begun / "checkpoint" / "plus.pt").write_bytes(content)
    status, _ = run(begun, *SHORT, "--strategies", "plus")
    assert status == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"pretrain.py: cannot read the checkpoint {begun}/checkpoint/plus.pt")
    assert stderr.count("\n") == 1


def test_refused_on_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert run_options("--batch-size", "4") == 2
    assert "--batch-size 4: 3 processes need a multiple of 3" in capsys.readouterr().err
    arguments = ("--batch-size", "6", "--optimizer", "sgd", "--parallel", "fsdp")
    assert run_options(*arguments) == 2
    assert "the fused SGD of PyTorch takes no divided parameters" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_options(*arguments) == 2
    assert capsys.readouterr().err == "", "the first process has said it"


def run_options(*arguments):
    """The exit status for options that are refused."""
    with pytest.raises(SystemExit) as leaving:
        pretrain_runs.pretrain.parse(arguments)
    return leaving.value.code


# Several processes


@on_ranks(2)
def resumes_on_two(parallel, strategies, folder):
    resumes(parallel, strategies, Path(folder))


@on_ranks(3)
def resumes_on_three(parallel, strategies, folder):
    """The order of three summands is to be that of a run that did not stop, too."""
    resumes(parallel, strategies, Path(folder), "--batch-size", 6)


def resumes(parallel, strategies, folder, *arguments):
    whole, stopped = folder / "whole", folder / "stopped"
    arguments = (*SHORT, "--parallel", parallel, "--strategies", ",".join(strategies), *arguments)
    assert run(whole, *arguments)[0] == 0
    run(stopped, *arguments, stop_before=5)
    run(stopped, *arguments, stop_before=8)
    assert run(stopped, *arguments)[0] == 0
    dist.barrier()
    assert_same_run(whole, stopped, strategies)


@pytest.fixture
def folders(tmp_path):
    """For a run that did not stop and one that did, with the text that all processes read."""
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        folder.mkdir()
        write_poem(folder)
    return tmp_path


def losses(folder, strategy):
    return results(folder)["strategies"][strategy]["training"]


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_go_on_to_the_bit_and_train_as_one_does(ranks, parallel, whole, folders):
    strategies = ("plus", "master")
    resumes_on_two(ranks, parallel=parallel, strategies=strategies, folder=str(folders))
    for strategy in strategies:
        two, one = (losses(folder, strategy) for folder in (folders / "whole", whole))
        assert two == pytest.approx(one, abs=0.01), "the same batches"
        assert two != one


@on_ranks(2)
def goes_on(parallel, folder):
    arguments = (*SHORT, "--parallel", parallel, "--strategies", "plus,master")
    status, taken = run(Path(folder), *arguments)
    assert (status, taken) == (0, ["plus"] * 5 + ["master"] * 8)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_two_processes_go_on_with_the_run_of_one(ranks, parallel, begun, whole):
    goes_on(ranks, parallel=parallel, folder=str(begun))
    assert losses(begun, "plus")[:3] == losses(whole, "plus")[:3]
    assert losses(begun, "plus") == pytest.approx(losses(whole, "plus"), abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_three_processes_go_on_to_the_bit(ranks, parallel, folders):
    own = [x for x in STRATEGIES if x not in NOT_UNDER[parallel]]
    resumes_on_three(ranks, parallel=parallel, strategies=own, folder=str(folders))


@on_ranks(2)
def sees_its_own(folder):
    own = Path(folder, ("whole", "stopped")[dist.get_rank()])
    arguments = (*SHORT, "--strategies", "bf16")
    status, taken = run(own, *arguments)
    assert (status, taken) == (2, [])


def test_processes_that_see_different_files(ranks, folders):
    """Otherwise each would wait for the other at another step."""
    run(folders / "whole", *SHORT, "--strategies", "bf16", stop_before=4)
    sees_its_own(ranks, folder=str(folders))
