"""Checkpoints of other programs, and conversion from any layout and format to another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mcftensor.bridge import deepspeed, distcp_layouts
from mcftensor.bridge.checkpoint_conversion import Conversion as Conversion
from mcftensor.bridge.checkpoint_conversion import convert_checkpoint as convert_checkpoint
from mcftensor.bridge.master_weights import complete as complete
from mcftensor.checkpoint.entries import Contents, Request


def reader_of(path: Path) -> Callable[[Path, Request], Contents] | None:
    """Return the reader of a folder of DeepSpeed or torch.distributed.checkpoint, or None."""
    if deepspeed.universal_in(path):
        return deepspeed.read_universal
    if deepspeed.parts_in(path):
        return deepspeed.read_parts
    if distcp_layouts.is_legacy(path):
        return distcp_layouts.refuse_legacy
    return distcp_layouts.read if distcp_layouts.last_in(path) else None
