"""Checkpoints from which a run goes on, with the bits of one that did not stop.

There is one file for a run. The first process writes it, whole or not at all, and tensors that
are divided are whole in it: so a run may go on with another number of processes.
"""

from __future__ import annotations

import pickle
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import mcftensor as mcf
from pretraining import processes
from pretraining.run import Run
from pretraining.strategies import parameters_of

State = dict[str, Any]

# How the work is divided may change from one start to the next.
MAY_CHANGE = {"parallel"}


class ResumeError(Exception):
    """A run cannot go on from a checkpoint; the message is one line for the user."""


class Checkpoint:
    """The file of one run, saved every so many steps.

    Args:
        folder: where it is; all processes must see the same one.
        run: what a run must be in order to go on from it.
        content: the text to train on and the one to validate, which must be the same, too.
        every: steps from one save to the next.
    """

    def __init__(self, folder: Path, run: Run, content: tuple[Tensor, ...], every: int) -> None:
        self.path = folder / f"{run.strategy}.pt"
        self.run = run
        self.every = every
        self.options = {k: v for k, v in asdict(run).items() if k not in MAY_CHANGE}
        self.options["data"] = [zlib.crc32(part.numpy().data) for part in content]

    def is_due(self, step: int) -> bool:
        """Whether it is to be saved after a step."""
        return step % self.every == 0 or step == self.run.steps

    def save(self, state: State) -> None:
        """Put a state in place of the last one. All processes take part."""
        state = tree_map_only(Tensor, whole, state)
        if processes.is_first():
            with mcf.checkpoint.replacing(self.path) as temporary:
                torch.save(state | {"options": self.options}, temporary)

    def load(self) -> State | None:
        """The state last saved, or None where there is none yet. All processes take part.

        Raises:
            ResumeError: it cannot be read, or is of another run; or processes see different files.
        """
        state = self.read() if self.path.exists() else None
        steps = [None if state is None else state["step"]]
        if dist.is_initialized():
            steps = [None] * processes.count()
            dist.all_gather_object(steps, None if state is None else state["step"])
        if len(set(steps)) > 1:
            raise ResumeError(
                f"not all processes see the same {self.path}: "
                "--checkpoint must be a folder that they share"
            )
        return state

    def read(self) -> State:
        """What is in the file, if it is of this run. Tensors are read when they are used."""
        try:
            state: State = torch.load(self.path, weights_only=True, mmap=True, map_location="cpu")
            options = state["options"]
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.PickleError) as error:
            line = str(error).partition("\n")[0]
            raise ResumeError(f"cannot read the checkpoint {self.path}: {line}") from None
        for name, value in self.options.items():
            if options.get(name) != value:
                option = "--" + name.replace("_", "-")
                was = "another text" if name == "data" else options.get(name)
                now = "" if name == "data" else f", not {value}"
                raise ResumeError(
                    f"{self.path} is of a run with {option} {was}{now}: "
                    "resume it with the same options, or give another folder to --checkpoint"
                )
        return state


def whole(x: Tensor) -> Tensor:
    """All of a tensor, on the CPU, where it may be divided among processes."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()


def divided(x: Tensor, like: Tensor) -> Tensor:
    """What of a whole tensor this process has, if another one of its shape is divided."""
    if isinstance(like, DTensor) and x.shape == like.shape:
        x = x.to(like.device)
        # Every process has read it, so none is sent anything.
        return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
    return x


def load_model(model: nn.Module, state: State) -> None:
    """Load the whole state dict of a model into one that may be divided."""
    own = model.state_dict()
    model.load_state_dict({name: divided(x, own[name]) for name, x in state.items()})


def load_optimizer(optimizer: Optimizer, state: State) -> None:
    """Load the whole state dict of an optimizer into one of parameters that may be divided."""
    parameters = parameters_of(optimizer)
    states = {
        i: {name: divided(x, parameters[i]) for name, x in values.items()}
        for i, values in state["state"].items()
    }
    state = state | {"state": states}
    if "masters" in state:
        pairs = zip(state["masters"], parameters, strict=True)
        state["masters"] = [divided(x, p) for x, p in pairs]
    optimizer.load_state_dict(state)
