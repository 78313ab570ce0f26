"""What optimizers step over: lists of shapes, and tensors of these shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speed.gpt import SHAPES, parameter_shapes

Shapes = list[tuple[int, ...]]

WORKLOADS: dict[str, Callable[[], Shapes]] = {
    "one tensor": lambda: [(8192, 4096)],
    "GPT-2": lambda: parameter_shapes(SHAPES["124M"]),
    # Matrices, since vectors are norms and biases, which get a third term.
    "many tensors": lambda: [(25, 40)] * 2000,
    "GPT 1.3B": lambda: parameter_shapes(SHAPES["1.3B"]),
    "matrices": lambda: [(64, 64)] * 300,
    "tiny": lambda: [(16, 32), (32,), (2, 3, 5)],
}
DEFAULTS = {
    "cpu": ("one tensor", "GPT-2", "many tensors"),
    "cuda": ("one tensor", "GPT-2", "many tensors", "GPT 1.3B"),
}


@dataclass(frozen=True)
class Workload:
    """bf16 parameters and gradients, copied for every contender."""

    name: str
    values: list[Tensor]
    gradients: list[Tensor]

    @property
    def parameters(self) -> int:
        """How many elements there are."""
        return sum(value.numel() for value in self.values)

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(value.numel() for value in self.values)


def make_workload(name: str, device: str) -> Workload:
    """Normal numbers of the size of weights and of gradients, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = WORKLOADS[name]()

    def numbers(deviation: float) -> list[Tensor]:
        # One block drawn and repeated: time does not depend on the values, and drawing does.
        largest = max(math.prod(shape) for shape in shapes)
        block = torch.empty(largest, device=device, dtype=torch.bfloat16)
        block.normal_(std=deviation, generator=generator)
        return [block[: math.prod(shape)].view(shape).clone() for shape in shapes]

    return Workload(name, values=numbers(0.02), gradients=numbers(0.01))
