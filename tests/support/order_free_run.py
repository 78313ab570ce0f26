"""A training whose gradients have no order, on as many processes as it is started with.

As a program it is one process of it: `order_free_run.py folder processes steps every start rank`.
It goes on where processes before it have saved.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import mcftensor as mcf

MICROBATCHES = 12
"""Of a step, on all processes: one, two, three and four have equal shares."""


def loss_of(model: nn.Module, step: int, i: int) -> torch.Tensor:
    """The loss of one microbatch."""
    generator = torch.Generator().manual_seed(1000 * step + i)
    x = torch.randn(4, 24, generator=generator).bfloat16()
    return (model(x).float() - x.float().roll(1, 1)).square().mean() / MICROBATCHES


def work(folder: Path, world: int, steps: int, every: int, start: int, rank: int) -> None:
    """Train, and save now and then; go on where processes before these have saved."""
    torch.set_num_threads(1)
    file = folder / "checkpoint" / "run.pt"
    store = f"file://{folder}/store-{start}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    saved = torch.load(file, weights_only=True) if file.exists() else None
    dist.barrier()  # before any process saves again
    torch.manual_seed(1 if saved else 0)  # what is not loaded is not to be right by chance
    layers = nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)
    model = mcf.as_expansion(nn.Sequential(*layers))
    runner = DistributedDataParallel(model)
    handle = mcf.order_free_gradients(runner, microbatches=MICROBATCHES)
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), lr=1e-3), "plus")
    losses: list[torch.Tensor] = []
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
    print("ready", flush=True)
    own = range(MICROBATCHES)[rank::world]
    while len(losses) < steps:
        of_own = []
        for i in own:
            with contextlib.nullcontext() if i == own[-1] else runner.no_sync():
                loss = loss_of(runner, len(losses), i)
                loss.backward()
            of_own.append(loss.detach())
        norm = clip_grad_norm_(model.parameters(), 0.1)
        losses.append(torch.stack([handle.total(torch.stack(of_own)), norm.double()]))
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and len(losses) % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with mcf.checkpoint.replacing(file) as temporary:
                torch.save(state | {"losses": losses}, temporary)
    dist.barrier()


if __name__ == "__main__":
    work(Path(sys.argv[1]), *map(int, sys.argv[2:]))
