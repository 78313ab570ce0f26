"""Whether a model fits into a memory in training, and by which strategy."""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.checkpoint.open_checkpoint import shapes
from mcftensor.formats import Format, bf16i8, bf16i16, bf16x2
from mcftensor.tensor import text_tables
from mcftensor.tools.memory_summary import (
    MakeOptimizer,
    Summary,
    estimate,
    summary,
    without_data,
)


class Room(NamedTuple):
    """A memory: its bytes, whose they are, and whether it is the host's, beside a device."""

    size: int
    owner: str
    of_host: bool = False


class Strategy(NamedTuple):
    """A way to train a model, and the memory that it needs."""

    name: str
    sizes: tuple[int, int, int]
    """Bytes of weights, with master weights and buffers among them, of gradients, of states."""
    trained: int
    """Number of elements."""
    device: int | None = None
    """Bytes on the device, where the weights are on the host."""

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(self.sizes)

    @property
    def on_device(self) -> int:
        """Bytes on the device."""
        return self.total if self.device is None else self.device

    def fits(self, rooms: Sequence[Room]) -> bool:
        """Whether each memory suffices for its part."""
        return all((self.total if x.of_host else self.on_device) <= x.size for x in rooms)


# A format, a mode, and whether gradients are released.
_WAYS: Mapping[str, tuple[Format | None, str, bool]] = {
    "bf16i16, full": (bf16i16, "full", False),
    "bf16x2, full": (None, "full", False),
    "bf16x2, plus": (None, "plus", False),
    "bf16x2, light": (None, "light", False),
    "bf16i8, compact": (bf16i8, "compact", False),
    "bf16i8, compact, step_in_backward": (bf16i8, "compact", True),
    "bf16i8, compact4": (bf16i8, "compact4", False),
    "bf16i8, compact4, step_in_backward": (bf16i8, "compact4", True),
}


def strategies(
    model: nn.Module, optimizer: MakeOptimizer = AdamW, *, on_host: bool = False
) -> Iterator[Strategy]:
    """Yield the memory of a model in each mode, with float32 master weights, and in plain bf16; or
    of each mode with the weights on the host.
    """

    def strategy(name: str, found: Summary, masters: int, gradients: int) -> Strategy:
        weights = masters + found.bytes_of("parameters") + found.bytes_of("buffers")
        sizes = weights, gradients, found.bytes_of("states")
        return Strategy(name, sizes, found.trained, found.device_bytes)

    plain_ways = (("float32 master weights", torch.float32), ("plain bf16", bf16x2.dtype))
    for name, dtype in () if on_host else plain_ways:
        plain = without_data(model).to(dtype)
        found = summary(plain, optimizer(plain.parameters()))
        beside = 2 * found.trained  # bf16: weights in addition to master weights, and gradients
        yield strategy(name, found, beside if dtype == torch.float32 else 0, beside)
    for name, (format, mode, released) in _WAYS.items():
        found = estimate(
            model, mode, format=format, optimizer=optimizer, released=released, on_host=on_host
        )
        yield strategy(name, found, 0, found.bytes_of("gradients"))


def fits(found: Sequence[Strategy], rooms: Sequence[Room]) -> str:
    """Return a table of strategies as text; its last column says which fit."""
    beside = [] if found[0].device is None else ["device"]
    total = "on the host" if beside else "in all"
    rows: list[tuple[str, ...]] = [
        ("", "weights", "gradients", "states", "bytes a parameter", total, *beside, "fits")
    ]
    for x in found:
        each = f"{x.total / max(x.trained, 1):.2f}"
        fits = "yes" if x.fits(rooms) else "no"
        sizes = [text_tables.size(size) for size in (*x.sizes, x.total)]
        device = [text_tables.size(x.on_device)] if beside else []
        rows.append((x.name, *sizes[:3], each, sizes[3], *device, fits))
    return text_tables.as_text(rows)


def rooms(given: int | None = None, *, on_host: bool = False) -> list[Room]:
    """Return the memories that are to suffice: so many bytes of a device, if they are given; else
    those of the first GPU, and of this machine as the host or where it has no GPU.

    Raises:
        CheckpointError: the system does not say it.
    """
    if given is not None:
        return [Room(given, "given for the device" if on_host else "given")]
    found = list[Room]()
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found = [Room(gpu.total_memory, f"of {gpu.name}")]
    if on_host or not found:
        try:
            size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError):
            raise CheckpointError(
                "this system does not say how much memory it has; give it with --memory"
            ) from None
        found.append(Room(size, "of this machine", on_host))
    return found


# ---------------------------------------------------------------------------------------- sources

_SHAPE = re.compile(r"(?:(\d+):)?(\d+(?:x\d+)*)")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT])")
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_WIDTH = 1000
_MOST = 2**58
"""Elements whose bytes, with states, PyTorch can still count."""


def model_of(sources: Sequence[str]) -> nn.Module:
    """Return a module on the meta device: from checkpoints, from configurations of transformers,
    from shapes such as `32:4096x11008`, or from a number of parameters such as `7B`.

    Raises:
        CheckpointError: a source of another kind; the message names it.
    """
    found: dict[str, Tensor] = {}
    for i, source in enumerate(sources):
        number, shape = _COUNT.fullmatch(source.upper()), _SHAPE.fullmatch(source)
        if _is_configuration(source):
            found |= _configured(source)
            continue
        if Path(source).exists():
            found |= shapes(Path(source))
            continue
        if number:
            count = float(number[1]) * _UNITS[number[2]]
            copies, lengths = 1, [int(count) // _WIDTH, _WIDTH]
        elif shape:
            copies, lengths = int(shape[1] or 1), [int(length) for length in shape[2].split("x")]
            count = math.prod(lengths) * copies
        else:
            raise CheckpointError(
                f"{source} is no file or folder; give a checkpoint, a config.json, the name of a "
                "model on the hub, shapes such as 4096x4096 or 32:4096x11008, or a number of "
                "parameters such as 7B"
            )
        if count > _MOST:
            raise CheckpointError(f"{source} is more parameters than can be counted, {_MOST:,}")
        for k in range(copies):
            found[f"{i}.{k}.weight"] = torch.empty(lengths, device="meta")
    return _module(found)


def _module(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module with these parameters, by their qualified names; integers are buffers."""
    root = nn.Module()
    for name, x in tensors.items():
        *path, last = name.split(".")
        part = root
        for step in path:
            if step not in part._modules:
                part.add_module(step, nn.Module())
            part = part.get_submodule(step)
        if x.is_floating_point():
            part.register_parameter(last, nn.Parameter(x))
        else:
            part.register_buffer(last, x)
    return root


# -------------------------------------------------------------------------- of transformers

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def _is_configuration(source: str) -> bool:
    """Whether a source is a `config.json`, a folder that has one but no weights, or may be the name
    of a model on the hub."""
    path = Path(source)
    if path.is_dir():
        return (path / "config.json").exists() and not any(any(path.glob(x)) for x in _WEIGHTS)
    if path.exists():
        return path.suffix == ".json" and not path.name.endswith(".index.json")
    return _HUB_NAME.fullmatch(source) is not None


def _configured(source: str) -> dict[str, Tensor]:
    """Return the parameters on the meta device, by name.

    Raises:
        CheckpointError: there is no transformers, or it makes no model from this.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise CheckpointError(
            f"{source}: transformers makes models from configurations, and is not installed; give "
            "the shapes of parameters, such as 4096x4096 or 32:4096x11008"
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # of its tries without a network
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        named = (getattr(transformers, name, None) for name in config.architectures or ())
        kind = next(filter(None, named), None)
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config) if kind is None else kind(config)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split("\n", 1)[0].split())
        raise CheckpointError(f"{source}: transformers makes no model from it: {reason}") from error
    return dict(model.named_parameters())
