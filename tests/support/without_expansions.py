"""What stands under the names that the library changes, in a process that makes expansions late.

`main` returns what became of these names, and of steps that were kept for later.
"""

import os
import pickle
import pkgutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as waited_for  # noqa: F401

HELD = (list, dict)


def look(names: list[str]) -> dict[str, object]:
    """What is found under each name, and what it holds."""
    found = {}
    for name in names:
        x = pkgutil.resolve_name(name)
        found[name] = (x, list(x)) if isinstance(x, HELD) else (x, None)
    return found


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [
        name
        for name in before
        if before[name][0] is not after[name][0] or before[name][1] != after[name][1]
    ]


def plain_training() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A plain model with a schedule, trained, saved and loaded."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    step(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    return model, optimizer, schedule


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 8, dtype=model.weight.dtype)).float().square().sum().backward()
    optimizer.step()


def write(folder: Path) -> None:
    """Files of an expansion."""
    import mcftensor as mcf  # noqa: PLC0415

    x = mcf.as_expansion(torch.rand(7, dtype=torch.float64), mcf.bf16x2)
    mcf.save_file({"x": x}, folder / "x.safetensors")
    torch.save(x, folder / "x.pt")
    (folder / "x.pickle").write_bytes(pickle.dumps(x))


def compiled() -> None:
    """Code whose first run is traced; operations that compilers take apart have its bits."""
    import mcftensor as mcf  # noqa: PLC0415

    def update(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        made = mcf.as_expansion(x, mcf.bf16x2).add_(g, alpha=0.3)
        return mcf.as_plain(torch.addcdiv(made, g, made, value=0.1), torch.float64)

    x, g = torch.rand(50, dtype=torch.float64) + 1, torch.rand(50, dtype=torch.bfloat16)
    found = torch.compile(update, backend="aot_eager", fullgraph=True)(x, g)
    assert torch.equal(found, update(x, g))


def ways(folder: Path) -> dict[str, Callable[[], object]]:
    """How a process may come by its first expansion, or scaled tensor."""
    import mcftensor as mcf  # noqa: PLC0415

    return {
        "load_file": lambda: mcf.load_file(folder / "x.safetensors"),
        "torch.load": lambda: torch.load(folder / "x.pt", weights_only=True),
        "pickle": lambda: pickle.loads((folder / "x.pickle").read_bytes()),
        "components": lambda: mcf.MCFTensor([torch.ones(3).bfloat16(), torch.zeros(3).bfloat16()]),
        "torch.zeros": lambda: torch.zeros(3, dtype=mcf.bf16i16),
        "scaled": lambda: mcf.as_expansion(torch.rand(3), mcf.scaling.scaled(torch.float16)),
        "compiled code": compiled,
    }


def in_a_fork(function: Callable[[], object]) -> bool:
    """Whether it ends well."""
    if (child := os.fork()) == 0:
        try:
            function()
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def watched_after(function: Callable[[], object]) -> None:
    before = nn.Module._load_from_state_dict
    function()
    assert nn.Module._load_from_state_dict is not before


def main(names: list[str]) -> dict[str, object]:
    before = look(names)
    import mcftensor as mcf  # noqa: PLC0415

    finders = [type(x).__name__ for x in sys.meta_path]
    with tempfile.TemporaryDirectory() as folder:
        in_a_fork(lambda: write(Path(folder)))
        lost = [
            name
            for name, way in ways(Path(folder)).items()
            if not in_a_fork(lambda way=way: watched_after(way))
        ]
    model, optimizer, schedule = plain_training()
    without = changed(before, look(names))
    assert mcf.as_expansion(model, mcf.bf16i16) is model
    with_expansions = changed(before, look(names))
    steps = []
    for late in (model, None):
        if late is None:  # all of it anew, in a process that has expansions
            late, optimizer, schedule = plain_training()
            mcf.as_expansion(late, mcf.bf16i16)
        for _ in range(3):
            step(late, optimizer)
            schedule.step()
        steps.append(mcf.as_plain(late.weight.detach(), torch.float64).tolist())
    return {
        "finders": finders,
        "ways that change nothing": lost,
        "changed without expansions": without,
        "changed with one": with_expansions,
        "steps": steps,
    }
