"""Runs that are killed by SIGKILL; `make soak` kills them more often."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import soak
from support import pretrain_runs
from support.pretrain_runs import assert_same_run, options, write_poem

pytestmark = pytest.mark.slow

ARGUMENTS = ("--steps", 200, "--save-every", 10, "--strategies", "plus")


def test_one_process_that_is_killed_ends_with_the_bits_of_one_that_is_not():
    count = soak.soak(soak.One(steps=400, every=20), kills=4, seed=1)
    assert (count.kills, count.starts) == (4, 5)


def test_other_numbers_of_processes_go_on_with_the_bits_of_one_that_is_not_killed():
    count = soak.soak(soak.Free(steps=40, every=4), kills=2, seed=1)
    assert (count.kills, count.starts) == (2, 3)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun_starts_anew_what_died_and_later_goes_on_where_all_died(parallel, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_poem(folder)
    assert torchrun(whole, parallel).wait(soak.TIMEOUT) == 0

    agent = torchrun(killed, parallel)
    try:
        wait_until(functools.partial(saved_after, killed, 0))
        first = children(agent)
        os.kill(first[-1], signal.SIGKILL)
        wait_until(lambda: not set(first) & set(children(agent)))
        wait_until(functools.partial(saved_after, killed, time.time()))
        assert agent.poll() is None, "it was done too soon"
    finally:
        for pid in (agent.pid, *children(agent)):
            os.kill(pid, signal.SIGKILL)
        agent.wait(soak.TIMEOUT)
    assert not (killed / "out" / "results.json").exists()

    assert torchrun(killed, parallel).wait(soak.TIMEOUT) == 0
    assert_same_run(whole, killed, ["plus"])


def torchrun(folder, parallel):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = options(folder, *ARGUMENTS, "--parallel", parallel)
    return subprocess.Popen(
        [sys.executable, *launcher, "--max-restarts", "1", pretrain_runs.__file__, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def children(process):
    """The processes that a process has started and that are alive."""
    found = []
    for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            with contextlib.suppress(OSError):  # it may end meanwhile
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if state != "Z" and pretrain_runs.__file__ in command:
                    found.append(pid)
    return found


def saved_after(folder, moment):
    file = folder / "checkpoint" / "plus.pt"
    return file.exists() and file.stat().st_mtime > moment


def wait_until(holds):
    deadline = time.monotonic() + soak.TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
