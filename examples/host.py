"""Train with the optimizer on the host; the training is killed, and goes on to the bit.

    python examples/host.py

The device has plain bf16 weights; their tails and the states of AdamW are in host memory, where the
weights step while backward goes on. A first process trains to the end. A second one is killed in
the middle, at a moment that it does not choose, and a third one goes on from its last checkpoint.
The weights and states of the first and the third are equal, bit by bit.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import mcftensor as mcf

STEPS = 60
EVERY = 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(folder: Path) -> None:
    """Train from the latest checkpoint in a folder, and leave one there every few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 64))
    model.to(DEVICE, torch.bfloat16)  # what the device has
    host = mcf.host.weights(model, mcf.bf16i8)
    optimizer = torch.optim.AdamW(host.parameters(), lr=1e-3, fused=True)  # stock
    mcf.collage(optimizer, "compact")
    mcf.step_in_backward(host, optimizer)  # optional: step while backward goes on

    start = 0
    if (folder / "latest").exists():
        saved = torch.load(folder / "latest")
        host.load_state_dict(saved["weights"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step in range(start, STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(256, 64, generator=generator).to(DEVICE, torch.bfloat16)
        loss = (model(x) - x.roll(1, dims=1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            state = {"weights": host.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, folder / "new")
            (folder / "new").replace(folder / "latest")  # whole, or not at all
            print(f"step {step + 1:3}: loss {loss.item():.4f}", flush=True)
    if start == 0:
        print(mcf.meters.summary(host, optimizer))


def run(folder: Path, *, kill: bool = False) -> None:
    """Train in a process of its own, and kill it after its third checkpoint."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for count, line in enumerate(process.stdout, 1):
            print(" ", line, end="")
            if kill and count == 3:
                time.sleep(0.01)
                process.send_signal(signal.SIGKILL)
                print("  killed")
    if process.returncode and not kill:
        raise SystemExit(process.returncode)


def main() -> None:
    """Train, be killed, go on, and compare."""
    with tempfile.TemporaryDirectory() as name:
        whole, parts = Path(name, "whole"), Path(name, "parts")
        print("to the end:")
        run(whole)
        print("killed, and on from the last checkpoint:")
        run(parts, kill=True)
        run(parts)
        one, other = (torch.load(folder / "latest") for folder in (whole, parts))
        found = [
            [x for x in torch.utils._pytree.tree_leaves(saved) if isinstance(x, torch.Tensor)]
            for saved in (one, other)
        ]
        different = sum(not torch.equal(x, y) for x, y in zip(*found, strict=True))
    print(f"{len(found[0])} tensors of weights and states, of which {different} differ")


if __name__ == "__main__":
    train(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
