"""Other libraries that train bf16 parameters, each used as its documentation says.

Betas, eps, learning rate and decay are the same for all. optimi, which has other defaults, gets
them too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from speed.contenders import ADAMW, Contender, parameters_of, run
from speed.running import Running
from speed.workloads import Workload


def of(package: str, name: str, **keywords: Any) -> Callable[[Workload], Running]:
    """An optimizer of another package, imported when it is set up."""

    def build(workload: Workload) -> Running:
        optimizer = getattr(importlib.import_module(package), name)
        parameters = parameters_of(workload)
        return run(parameters, optimizer(parameters, **ADAMW, **keywords))

    return build


def peer(name: str, build: Callable[[Workload], Running], *, compiles: bool = False) -> Contender:
    """A contender from another library."""
    return Contender(name, build, family=name.partition(" ")[0], compiles=compiles)


_TRANSFORMER_ENGINE = "transformer_engine.pytorch.optimizers"
_MASTERS = {"master_weights": True}
STOCHASTIC = {"bf16_stochastic_round": True}

PEERS = [
    peer("optimi Kahan, for-loop", of("optimi", "AdamW", foreach=False, triton=False)),
    peer("optimi Kahan, foreach", of("optimi", "AdamW", foreach=True, triton=False)),
    peer("optimi Kahan, triton", of("optimi", "AdamW", triton=True)),
    peer("torchao stochastic", of("torchao.optim", "_AdamW", **STOCHASTIC), compiles=True),
    peer("torchao 8 bit", of("torchao.optim", "AdamW8bit", **STOCHASTIC), compiles=True),
    peer("torchao fp8", of("torchao.optim", "AdamWFp8", **STOCHASTIC), compiles=True),
    peer("heavyball fp32 states", of("heavyball", "AdamW"), compiles=True),
    peer(
        "heavyball bf16 states",
        of("heavyball", "AdamW", storage_dtype="bfloat16"),
        compiles=True,
    ),
    peer(
        "heavyball bf16+8",
        of("heavyball", "AdamW", ecc="bf16+8", param_ecc="bf16+8"),
        compiles=True,
    ),
    peer(
        "pytorch_optimizer Flash 24", of("pytorch_optimizer", "FlashAdamW", master_weight_bits=24)
    ),
    peer("pytorch_optimizer Kahan", of("pytorch_optimizer", "StableAdamW", kahan_sum=True)),
    peer("bitsandbytes 32 bit", of("bitsandbytes.optim", "AdamW")),
    peer("bitsandbytes 8 bit", of("bitsandbytes.optim", "AdamW8bit")),
    peer("TransformerEngine master weights", of(_TRANSFORMER_ENGINE, "FusedAdam", **_MASTERS)),
    peer(
        "TransformerEngine remainders",
        of(_TRANSFORMER_ENGINE, "FusedAdam", **_MASTERS, store_param_remainders=True),
    ),
    peer("FlashOptim 24", of("flashoptim", "FlashAdamW", master_weight_bits=24)),
    peer("FlashOptim 32", of("flashoptim", "FlashAdamW", master_weight_bits=32)),
]
