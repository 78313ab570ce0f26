"""Runs of `studies/pretrain.py` with a model small enough for seconds, and what they leave.

As a program it is `pretrain.py` itself with that model.
"""

import json
import sys

import torch

import pretrain
from pretraining import report, training
from pretraining.model import Shape
from support.helpers import assert_same_bits

TINY = Shape(context=16, layers=1, width=32, heads=2)


class Stop(BaseException):
    """What a run in this process is stopped by."""


def run(folder, *arguments, stop_before=None, checkpoint=True, shape=TINY):
    """Run the command in this process, if need be until so many steps have been taken."""
    write_poem(folder)
    take, shapes = training.Training.take, dict(training.SHAPES)
    taken = []

    def counted(job, batch):
        if len(taken) == stop_before:
            raise Stop
        taken.append(job.run.strategy)
        take(job, batch)

    draw, report.draw = report.draw, lambda *_: None  # it takes longer than the run
    training.Training.take = counted
    training.SHAPES["cpu"] = shape
    try:
        status = pretrain.main(options(folder, *arguments, checkpoint=checkpoint))
    except (Stop, SystemExit) as stop:
        status = stop
    finally:
        report.draw = draw
        training.Training.take = take
        training.SHAPES.update(shapes)
    return status, taken


def write_poem(folder):
    """The text to train on, unless it is there."""
    poem = folder / "poem.txt"
    if not poem.exists():
        poem.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(200)))


def options(folder, *arguments, checkpoint=True):
    """The command line of a run that keeps all it writes in a folder."""
    where = ["--data", folder / "poem.txt", "--out", folder / "out"]
    where += ["--checkpoint", folder / "checkpoint"] if checkpoint else []
    return [*map(str, where), *map(str, arguments)]


def results(folder):
    """What a run says of itself, its time and place aside."""
    record = json.loads((folder / "out" / "results.json").read_text())
    for result in record["strategies"].values():
        del result["seconds_per_step"]
    for name in ("data", "out", "checkpoint", "save_every"):
        del record["settings"][name]
    return record


def state(folder, strategy):
    """The last checkpoint of a strategy, times aside."""
    state = torch.load(folder / "checkpoint" / f"{strategy}.pt", weights_only=True)
    del state["seconds"], state["result"]["seconds_per_step"]
    return state


def assert_same_run(folder, other, strategies):
    """To the bit."""
    assert results(folder) == results(other)
    for strategy in strategies:
        assert_same_bits(state(folder, strategy), state(other, strategy))


if __name__ == "__main__":
    torch.set_num_threads(1)
    training.SHAPES["cpu"] = TINY
    sys.exit(pretrain.main())
