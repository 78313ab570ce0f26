"""Training runs that are killed again and again, and one that is not: they must end alike.

What is compared to the bit are parameters, states of optimizer, scheduler and random numbers, and
all losses. Half of the kills come at random moments and half while a checkpoint is being written.

  one   one process: bf16x2 with stochastic rounding, mode "plus", dropout, a scheduler
  ddp   two processes of `studies/pretrain.py`, each with a copy of the model
  fsdp  two processes of it, each with a part
  free  one to four processes, another number after each kill, with gradients that have no order:
        they must end as one process does
"""

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import mcftensor as mcf
from support import order_free_run, pretrain_runs
from support.helpers import assert_same_bits
from support.pretrain_runs import assert_same_run, options, write_poem
from support.resuming import Run

TIMEOUT = 120
"""Seconds that one life of a run may take."""


class One:
    """One process, which is this file as a program of another kind."""

    name = "one"

    def __init__(self, steps: int, every: int) -> None:
        self.steps, self.every = steps, every

    def start(self, folder: Path) -> list[subprocess.Popen]:
        numbers = [str(self.steps), str(self.every)]
        return [process([__file__, "--work", str(folder), *numbers], {})]

    def assert_same(self, folder: Path, other: Path) -> None:
        states = [
            torch.load(f / "checkpoint" / "run.pt", weights_only=True) for f in (folder, other)
        ]
        assert len(states[0]["losses"]) == self.steps
        assert_same_bits(*states)


class Two:
    """Two processes of the study."""

    def __init__(self, parallel: str, steps: int, every: int) -> None:
        self.name = parallel
        self.arguments = ["--strategies", "plus", "--parallel", parallel]
        self.arguments += ["--steps", str(steps), "--save-every", str(every)]

    def start(self, folder: Path) -> list[subprocess.Popen]:
        write_poem(folder)
        command = [pretrain_runs.__file__, *options(folder, *self.arguments)]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        return [process(command, place | {"RANK": r, "LOCAL_RANK": r}) for r in "01"]

    def assert_same(self, folder: Path, other: Path) -> None:
        assert_same_run(folder, other, ["plus"])


class Free:
    """A number of processes that changes, whose gradients have no order: `order_free_run.py`."""

    name = "free"
    counts = (1, 4, 3, 2)
    """Processes of the first start, of the second, and so on."""

    def __init__(self, steps: int, every: int) -> None:
        self.steps, self.every = steps, every

    def start(self, folder: Path) -> list[subprocess.Popen]:
        """Start the processes; the first of a folder is alone."""
        note = folder / "starts"
        starts = int(note.read_text()) if note.exists() else 0
        note.write_text(str(starts + 1))
        world = self.counts[starts % len(self.counts)]
        arguments = [str(folder), str(world), str(self.steps), str(self.every), str(starts)]
        program = order_free_run.__file__
        return [process([program, *arguments, str(rank)], {}) for rank in range(world)]

    def assert_same(self, folder: Path, other: Path) -> None:
        states = [
            torch.load(f / "checkpoint" / "run.pt", weights_only=True) for f in (folder, other)
        ]
        assert len(states[0]["losses"]) == self.steps
        assert_same_bits(*states)


Job = One | Two | Free


def process(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@dataclass
class Count:
    """What happened to a run."""

    starts: int = 0
    kills: int = 0
    unfinished: int = 0  # checkpoints that a kill left half written
    seconds: float = 0.0


def undisturbed(job: Job, folder: Path) -> float:
    """Run a job to its end; return the seconds it took once it had begun."""
    started = job.start(folder)
    wait_until_ready(started)
    start = time.monotonic()
    wait_until_done(started)
    return time.monotonic() - start


def disturbed(job: Job, folder: Path, kills: int, longest: float, seed: int) -> Count:
    """Kill a run so many times, each time within `longest` seconds, and let it finish then."""
    moments, count, start = random.Random(seed), Count(), time.monotonic()
    while True:
        left = being_written(folder)
        started = job.start(folder)
        count.starts += 1
        wait_until_ready(started)
        if count.kills == kills:
            wait_until_done(started)
            count.seconds = time.monotonic() - start
            return count
        if count.kills % 2:
            wait_until_saving(folder, started)
            time.sleep(moments.uniform(0, 0.01))
        else:
            time.sleep(moments.uniform(0, longest))
        moments.shuffle(started)
        assert started[0].poll() is None, f"it was done before it was killed {kills} times"
        for one in started:
            one.kill()
            time.sleep(moments.choice([0, 0.1]))  # the other may notice
        for one in started:
            one.wait(TIMEOUT)
        count.kills += 1
        count.unfinished += not being_written(folder) <= left


def wait_until_ready(started: list[subprocess.Popen]) -> None:
    """Until the first process has said something, as it does before it trains."""
    assert started[0].stdout is not None
    assert started[0].stdout.readline(), "it ended before it began"


def wait_until_saving(folder: Path, started: list[subprocess.Popen]) -> None:
    """Until another checkpoint has been begun."""
    left = being_written(folder)
    while being_written(folder) <= left and started[0].poll() is None:
        time.sleep(0.0005)


def being_written(folder: Path) -> set[Path]:
    """Checkpoints that are not complete, or have been left like that."""
    return set(folder.glob("checkpoint/.*.tmp"))


def wait_until_done(started: list[subprocess.Popen]) -> None:
    for one in started:
        one.communicate(timeout=TIMEOUT)
        assert one.returncode == 0, f"it ended with status {one.returncode}"


def soak(job: Job, kills: int, seed: int) -> Count:
    """Kill a job again and again, and compare what it leaves with that of one left alone."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name) for name in ("undisturbed", "disturbed")]
        for each in folders:
            Path(each, "checkpoint").mkdir(parents=True)
        seconds = undisturbed(job, folders[0])
        # By then half of the work is done, and what is done twice is not counted.
        count = disturbed(job, folders[1], kills, seconds / max(1, kills), seed)
        job.assert_same(*folders)
        print(
            f"{job.name}: the same bits after {count.kills} kills, {count.starts} starts, "
            f"{count.unfinished} checkpoints left half written, {count.seconds:.0f} seconds "
            f"({seconds:.1f} if left alone), seed {seed}",
            flush=True,
        )
        return count


def work(folder: Path, steps: int, every: int) -> None:
    """Train, and save now and then; go on where a process before this one has saved."""
    torch.set_num_threads(1)
    file = folder / "checkpoint" / "run.pt"
    saved = torch.load(file, weights_only=True) if file.exists() else None
    # What is not loaded is not to be right by chance.
    run = Run("stochastic", "plus", "fused", seed=1 if saved else 0)
    losses = []
    if saved:
        run.model.load_state_dict(saved["model"])
        run.load_rest(saved)
        losses = saved["losses"]
    print("ready", flush=True)
    while len(losses) < steps:
        losses.append(run.step())
        if len(losses) % every == 0:
            with mcf.checkpoint.replacing(file) as temporary:
                torch.save(run.state() | {"losses": losses}, temporary)


def main(arguments: list[str] | None = None) -> None:
    """Read the options, and soak."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--work"]:
        work(Path(arguments[1]), *map(int, arguments[2:]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("jobs", nargs="*", default=["one", "ddp", "fsdp", "free"], metavar="JOB", help="(all)")
    add("--steps", type=int, default=2000, help="of one process; others take a fifth (2000)")
    add("--save-every", type=int, default=50, help="steps; of others a fifth (50)")
    add("--kills", type=int, default=20, help="of one process; of others a third (20)")
    add("--seed", type=int, default=0, help="of the moments (0)")
    given = parser.parse_args(arguments)
    for name in given.jobs:
        if name == "one":
            soak(One(given.steps, given.save_every), given.kills, given.seed)
        else:
            few = [-(-n // 5) for n in (given.steps, given.save_every)]
            job = Free(*few) if name == "free" else Two(name, *few)
            soak(job, -(-given.kills // 3), given.seed)


if __name__ == "__main__":
    main()
