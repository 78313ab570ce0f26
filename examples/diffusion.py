"""Fine-tune a small U-Net of diffusers at a low rate, in four kinds of weights.

The U-Net first learns in float32 to remove noise from pictures of a bright disk, and is rounded to
bf16, as models are published. Then it goes on at a learning rate of 1e-5. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor, nn

import mcftensor as mcf

SIZE = 16
SCHEDULE: Any = DDPMScheduler(num_train_timesteps=100)
LR = 1e-5


def pictures(count: int, generator: torch.Generator) -> Tensor:
    """Bright disks at random places, (count, 1, SIZE, SIZE)."""
    line = torch.arange(SIZE, dtype=torch.float32)
    x, y = SIZE * (0.2 + 0.6 * torch.rand(2, count, 1, 1, generator=generator))
    distance = (line - x) ** 2 + (line[:, None] - y) ** 2
    return (2 * torch.exp(-distance / 6) - 1)[:, None]


def make() -> nn.Module:
    """The same weights at every call, in float32."""
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return cast(nn.Module, model)


def loss(model: nn.Module, generator: torch.Generator, count: int = 16) -> Tensor:
    """The mean squared error of the predicted noise."""
    clean = pictures(count, generator)
    noise = torch.randn(clean.shape, generator=generator)
    times = torch.randint(100, (count,), generator=generator)
    noisy = SCHEDULE.add_noise(clean, noise, times)
    predicted = model(noisy.to(next(model.parameters()).dtype), times).sample
    return nn.functional.mse_loss(predicted.float(), noise)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    """Step on fresh pictures."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss(model, generator).backward()
        optimizer.step()
        optimizer.zero_grad()


def judge(model: nn.Module) -> float:
    """The error of the weights in float32, however they were trained."""
    exact = make()
    exact.load_state_dict({n: mcf.as_plain(p, torch.float32) for n, p in model.named_parameters()})
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        return sum(loss(exact, generator, 64).item() for _ in range(4)) / 4


def start(model: nn.Module, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The lines of a script in which the kinds differ."""
    if kind == "float32":
        model.float()
    if kind == "plus":
        mcf.as_expansion(model)
    if kind == "compact, released":
        vectors = {name: mcf.bf16i16 for name, p in model.named_parameters() if p.dim() < 2}
        mcf.as_expansion(model, mcf.bf16i8, overrides=vectors)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    if kind == "plus":
        mcf.collage(optimizer, "plus")
    if kind == "compact, released":
        mcf.step_in_backward(model, mcf.collage(optimizer, "compact"))
    return model, optimizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each training (%(default)s)")
    steps = parser.parse_args(arguments).steps
    torch.set_num_threads(1)
    published = make()
    train(published, torch.optim.AdamW(published.parameters(), lr=1e-3), steps, 1)
    published.bfloat16()
    print(f"{'':<20}{'error':>8}{'weights that moved':>21}")
    print(f"{'before':<20}{judge(published):>8.4f}")
    for kind in ("float32", "bf16", "plus", "compact, released"):
        model, optimizer = start(copy.deepcopy(published), kind)
        before = [mcf.as_plain(p.detach(), torch.float64) for p in model.parameters()]
        train(model, optimizer, steps, 2)
        after = [mcf.as_plain(p.detach(), torch.float64) for p in model.parameters()]
        moved = torch.cat([(x != y).flatten() for x, y in zip(before, after, strict=True)])
        print(f"{kind:<20}{judge(model):>8.4f}{moved.double().mean():>21.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
