"""Parameters of a model that transformers makes from its configuration."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import torch
from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def is_configuration(source: str) -> bool:
    """Whether a source is a `config.json`, a folder that has one but no weights, or may be the name
    of a model on the hub."""
    path = Path(source)
    if path.is_dir():
        return (path / "config.json").exists() and not any(any(path.glob(x)) for x in _WEIGHTS)
    if path.exists():
        return path.suffix == ".json" and not path.name.endswith(".index.json")
    return _HUB_NAME.fullmatch(source) is not None


def configured(source: str) -> dict[str, Tensor]:
    """The parameters on the meta device, by name.

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
