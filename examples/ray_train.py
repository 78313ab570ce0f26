"""Train with Ray Train on two workers, stop, and resume: on two workers, and on one.

    python examples/ray_train.py

`order_free_gradients` gives the same bits on any number of workers. A run that continues with fewer
workers therefore ends with the weights of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mcftensor as mcf

MICROBATCHES = 4  # of a step, on all workers together


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same on every worker."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
    mcf.as_expansion(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, mcf.collage(optimizer, "plus")


def microbatch(step: int, number: int) -> Tensor:
    """Inputs that depend on the step and not on who computes with them."""
    generator = torch.Generator().manual_seed(MICROBATCHES * step + number)
    return torch.randn(4, 8, generator=generator).bfloat16()


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    model, optimizer = make()
    parallel = DistributedDataParallel(model)
    gradients = mcf.order_free_gradients(parallel, microbatches=MICROBATCHES)
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    for step in range(start, config["steps"]):
        own = range(rank, MICROBATCHES, workers)
        for number in own:
            with contextlib.nullcontext() if number == own[-1] else parallel.no_sync():
                loss = parallel(microbatch(step, number)).float().square().mean()
                (loss / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == config["die_at"] and not start and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        saved = None
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**state, "step": step + 1}, Path(folder, "state.pt"))
                saved = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step + 1}, checkpoint=saved)
    gradients.remove()


def fit(folder: Path, name: str, steps: int, workers: int = 2, die_at: int = 0) -> dict[str, Any]:
    """Train under a name, go on where a training of this name has ended, and return the state."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": steps, "die_at": die_at},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as held:
        return torch.load(Path(held, "state.pt"), weights_only=True)


def tensors(state: Any) -> list[Tensor]:
    """All terms of a state."""
    if isinstance(state, dict):
        return [x for name in sorted(state, key=str) for x in tensors(state[name])]
    if isinstance(state, mcf.MCFTensor):
        return list(state.components)
    return [state] if isinstance(state, Tensor) else []


def differing(state: Any, other: Any) -> int:
    """The bits in which two states differ."""
    count = 0
    for x, y in zip(tensors(state), tensors(other), strict=True):
        a, b = (t.reshape(-1).view(torch.uint8).numpy() for t in (x, y))
        count += int(np.bitwise_count(a ^ b).sum())
    return count


def main() -> None:
    """Train in four ways, and compare the final weights."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="of checkpoints; by default a temporary one")
    options = parser.parse_args()
    half = options.steps // 2
    ray.init(num_cpus=2, include_dashboard=False)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        whole = fit(folder, "whole", options.steps)
        killed = fit(folder, "killed", options.steps, die_at=half + 1)
        fit(folder, "stopped", half)
        stopped = fit(folder, "stopped", options.steps)
        fit(folder, "elastic", half)
        elastic = fit(folder, "elastic", options.steps, workers=1)
    for name, state in (
        ("a worker killed, and started again by Ray", killed),
        ("stopped, and resumed on two workers", stopped),
        ("stopped, and resumed on one worker", elastic),
    ):
        print(f"{name}: {differing(whole, state)} differing bits, after {state['step']} steps")


if __name__ == "__main__":
    main()
