"""Train torchtitan's debug model over expansions with its own Trainer, and resume it.

    torchrun --nproc-per-node 2 examples/torchtitan_train.py

A second call goes on from the last checkpoint in `--folder`. torchtitan asks for a GPU in a few
places; `on_cpu` answers these, and a training on GPUs leaves it out.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import mcftensor as mcf
from mcftensor.training.torchtitan_spec import in_expansions

WORDS, LENGTH, BATCH = 64, 64, 2


def on_cpu() -> None:
    """Give torchtitan a device of processes on a CPU; call it before its trainer is imported."""
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        current_device=lambda: 0,
        device_count=lambda: 1,
        empty_cache=lambda: None,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=2**30),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        set_device=lambda device: None,
    )
    from torchtitan.distributed import utils as processes

    # Of a later PyTorch than 2.13.
    processes.set_pg_timeouts = lambda *timeout, **dims: None


def summed(spec: Any) -> Any:
    """A specification whose gradients are reduced by a plain sum, which is all that gloo has."""

    def parallelize(model: Any, **options: Any) -> Any:
        model = spec.parallelize_fn(model, **options)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
        return model

    return dataclasses.replace(spec, parallelize_fn=parallelize)


def config(format: str, mode: str, folder: Path, steps: int, every: int) -> Any:
    """The configuration of a training; expansions are the line with `in_expansions`."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class NoTokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, *, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *text: Any, **options: Any) -> list[int]:
            return []

        def decode(self, *tokens: Any, **options: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return WORDS

    class CountingInThrees(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, **options: Any) -> None:
            self.batch, self.rank = 0, dp_rank

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                generator = torch.Generator().manual_seed(1000 * self.batch + self.rank)
                start = torch.randint(WORDS, (BATCH, 1), generator=generator)
                row = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
                self.batch += 1
                places = torch.arange(LENGTH).repeat(BATCH, 1)
                yield {"input": row[:, :-1].contiguous(), "positions": places}, row[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"batch": self.batch}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batch = state["batch"]

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=in_expansions(summed(spec), format, mode),
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=BATCH, seq_len=LENGTH, steps=steps, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=every, last_save_model_only=False
        ),
        tokenizer=NoTokenizer.Config(),
        dataloader=CountingInThrees.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(enable=False),
        debug=DebugConfig(seed=0),
        dump_folder=str(folder),
    )


def components(x: Tensor) -> list[Tensor]:
    """What this process has of a tensor: its terms, and the count of balanced rounding."""
    part = x.to_local() if hasattr(x, "to_local") else x
    if not isinstance(part, mcf.MCFTensor):
        return [part]
    return [*part.components] if part.writes is None else [*part.components, part.writes]


def main() -> None:
    """Read the options, train, and print the memory in use and a digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", default="bf16x2")
    parser.add_argument("--mode", default="plus")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=2, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("out/torchtitan"))
    options = parser.parse_args()
    on_cpu()
    from torchtitan.tools.logging import init_logger

    init_logger()
    trainer = config(
        options.format, options.mode, options.folder, options.steps, options.every
    ).build()
    trainer.train()

    (model,) = trainer.model_parts
    parameters = list(model.parameters())
    elements = sum(p.to_local().numel() for p in parameters)
    states = [
        x for optimizer in trainer.optimizers for s in optimizer.state.values() for x in s.values()
    ]
    held = {"parameters": parameters, "states": states}
    digest = hashlib.sha256()
    sizes = dict.fromkeys(held, 0)
    for name, tensors in held.items():
        for x in tensors:
            for part in components(x.detach()):
                sizes[name] += part.nbytes
                digest.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())
    sizes["gradients"] = 2 * elements
    said: list[Any] = [None] * dist.get_world_size()
    each = ", ".join(f"{name} {size / elements:.3f}" for name, size in sizes.items())
    dist.all_gather_object(
        said,
        f"process {dist.get_rank()}: {sum(sizes.values()) / elements:.2f} bytes a parameter "
        f"({each}); digest {digest.hexdigest()[:16]}",
    )
    trainer.close()
    if dist.get_rank() == 0:
        print("\n".join(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
