"""What is compared: ways to keep parameters and optimizer states around one stock optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import mcftensor as mcf

COLLAGE = ("master", "bf16", "light", "plus", "full")  # Those of the paper.
# float16 weights, computed with in float16: gradients are bf16, and scaled by GradScaler.
HALVES = ("half16", "half8")
STRATEGIES = (*COLLAGE, "exact", "tail8", "round", "compact", "released", *HALVES)
OTHERS = ("compact4",)  # run only if named
# AdamW of other libraries over plain bf16 parameters, as their documentation says: the package, the
# name in it, and options. flashoptim itself needs CUDA; pytorch_optimizer has a port of it.
STOCHASTIC = {"bf16_stochastic_round": True}
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kahan": ("optimi", "AdamW", {"kahan_sum": True, "foreach": True, "triton": False}),
    "flash24": ("pytorch_optimizer", "FlashAdamW", {"master_weight_bits": 24}),
    "flash32": ("pytorch_optimizer", "FlashAdamW", {"master_weight_bits": 32}),
    "heavyball8": ("heavyball", "AdamW", {"ecc": "bf16+8", "param_ecc": "bf16+8"}),
    "torchao": ("torchao.optim", "_AdamW", STOCHASTIC),
    "torchao8": ("torchao.optim", "AdamW8bit", STOCHASTIC),
    "torchaofp8": ("torchao.optim", "AdamWFp8", STOCHASTIC),
    "torchao4": ("torchao.optim", "AdamW4bit", STOCHASTIC),
    "bnb32": ("bitsandbytes.optim", "AdamW", {}),
    "bnb8": ("bitsandbytes.optim", "AdamW8bit", {}),
}
# PyTorch's float16 recipe, in larger studies: float32 parameters under autocast with GradScaler.
RECIPES = ("fp16",)
# Not under DistributedDataParallel, which reduces the gradients of all parameters together, in the
# dtype of the parameters; nor divided, where each process would find its own infinite gradients.
# Other libraries are compared in one process.
NOT_UNDER = {"ddp": ("released", *HALVES, *PEERS), "fsdp": (*HALVES, *PEERS)}
PLAIN = ("master", "bf16", *PEERS, *RECIPES)  # Their parameters are plain tensors.
WITHOUT_TAILS = (*PLAIN, "round")
OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}
LEARNING_RATES = {"adamw": 3e-4, "sgd": 0.05}
WEIGHT_DECAYS = {"adamw": 0.1, "sgd": 1e-4}
PATHS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "forloop": {"foreach": False, "fused": False},
}

# Formats of matrices and of the rest. Gains start at 1.0, where 16 bits are few, and are small.
FORMATS: dict[str, tuple[mcf.Format, mcf.Format]] = {
    "exact": (mcf.bf16i16, mcf.bf16i16),
    "tail8": (mcf.bf16i8, mcf.bf16i16),
    "round": (mcf.Format(torch.bfloat16, 1, rounding="balanced"),) * 2,
    "compact": (mcf.bf16i8, mcf.bf16i16),
    "compact4": (mcf.bf16i8, mcf.bf16i16),
    "released": (mcf.bf16i8, mcf.bf16i16),
    "half16": (mcf.fp16i16, mcf.fp16i16),
    "half8": (mcf.fp16i8, mcf.fp16i16),
}
# The Collage modes of strategies with another name.
MODES = {"compact": "compact", "compact4": "compact4", "released": "compact"}
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}

Named = Iterable[tuple[str, Tensor]]
OptimizerFactory = Callable[[Named], Optimizer]


def formats_of(strategy: str) -> tuple[mcf.Format, mcf.Format] | None:
    """The formats of matrices and of the rest; None for those of the paper, which have no tails or
    the library's own choice. The name of a format is a strategy, too: that of matrices, where the
    rest is float32."""
    if strategy in COLLAGE:
        return None
    return FORMATS.get(strategy) or (mcf.Format.from_name(strategy), mcf.bf16i16)


def as_kept(strategy: str, model: nn.Module) -> nn.Module:
    """The bf16 parameters of `model`, in place, in the formats that `strategy` says."""
    if strategy == "fp16":
        return model.float()
    if strategy in PLAIN:
        return model
    formats = formats_of(strategy)
    if formats is None:
        return mcf.as_expansion(model)
    matrices, vectors = formats
    overrides = {name: vectors for name, p in model.named_parameters() if p.dim() <= 1}
    mcf.as_expansion(model, matrices, overrides=overrides)
    if strategy in HALVES:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.bfloat16  # GradScaler unscales no float16
    return model


def optimizer_for(strategy: str, named: Named, stock: OptimizerFactory) -> Optimizer:
    """An optimizer of parameters, given with their names, with states as `strategy` says."""
    if strategy == "master":
        return master_weights(named, stock)
    optimizer = stock(named)
    if strategy in PEERS:
        return of_peer(strategy, optimizer)
    if strategy in PLAIN:
        return optimizer
    if strategy in COLLAGE or strategy in MODES:
        return mcf.collage(optimizer, MODES.get(strategy, strategy))
    # States are float32 to the bit, so that it is weights that are compared.
    names = next(STATES[name] for name, cls in OPTIMIZERS.items() if type(optimizer) is cls)
    return mcf.collage(optimizer, dict.fromkeys(names, mcf.bf16i16))


def stock_optimizer(
    name: str, path: str, lr: float, beta2: float, decay: float | None = None
) -> OptimizerFactory:
    """torch's own optimizer, with weight decay on matrices only.

    It is given names with the parameters, and by these the meter calls them.
    """

    def build(named: Named) -> Optimizer:
        named = list(named)
        matrices = [pair for pair in named if pair[1].dim() > 1]
        vectors = [pair for pair in named if pair[1].dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": WEIGHT_DECAYS[name] if decay is None else decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if name == "sgd":
            return SGD(groups, lr, momentum=0.9, **PATHS[path])
        return AdamW(groups, lr, betas=(0.9, beta2), **PATHS[path])

    return build


def of_peer(strategy: str, stock: Optimizer) -> Optimizer:
    """An optimizer of another library over the groups of torch's AdamW, with its settings."""
    package, name, options = PEERS[strategy]
    make = getattr(importlib.import_module(package), name)
    groups = []
    for group in stock.param_groups:
        own = {key: group[key] for key in ("params", "weight_decay", "lr", "eps", "betas")}
        if package == "optimi":  # In its groups betas have names of their own.
            own |= dict(zip(("beta1", "beta2"), own.pop("betas"), strict=True))
        groups.append(own)
    optimizer: Optimizer = make(groups, lr=groups[0]["lr"], **options)
    for group, own in zip(stock.param_groups, optimizer.param_groups, strict=True):
        own["param_names"] = group["param_names"]
    return optimizer


def master_weights(named: Named, stock: OptimizerFactory) -> Optimizer:
    """An optimizer over fp32 copies of the parameters, rounded back to bf16 after each step.

    Its fp32 gradients live only while it steps, and the copies are part of its state dict.
    """
    named = list(named)
    masters = {p: p.detach().float() for _, p in named}
    optimizer = stock((name, masters[p]) for name, p in named)

    def take_gradients(*_: Any) -> None:
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def give_back(*_: Any) -> None:
        for parameter, master in masters.items():
            parameter.copy_(master)
            master.grad = None

    def store(optimizer: Optimizer, state: dict[str, Any]) -> None:
        state["masters"] = parameters_of(optimizer)

    @torch.no_grad()
    def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
        for master, stored in zip(parameters_of(optimizer), state["masters"], strict=True):
            master.copy_(stored)

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(give_back)
    optimizer.register_state_dict_post_hook(store)
    optimizer.register_load_state_dict_pre_hook(restore)
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in the order in which its state dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def bytes_per_parameter(model: nn.Module, optimizer: Optimizer) -> float:
    """Memory of parameters, gradients, states and master weights, for each parameter.

    It is measured from the tensors themselves: each distinct one counts once, a subclass by the
    tensors in it, a divided one by what is here, and the 0-d step counters not at all.
    """

    def tensors() -> Iterator[Tensor]:
        for parameter in model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def terms(tensor: Any) -> Iterator[Tensor]:
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                yield from terms(getattr(tensor, name))
        elif isinstance(tensor, Tensor) and tensor.dim() > 0:  # a DTensor lists its mesh too
            yield tensor

    sizes = {term.data_ptr(): term.nbytes for tensor in tensors() for term in terms(tensor)}
    return sum(sizes.values()) / sum(p.numel() for p in model.parameters())
