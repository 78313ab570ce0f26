"""Layouts of other programs, which are folders; imported when no layout of files matches."""

from __future__ import annotations

from pathlib import Path

from mcftensor.checkpoint.bridge import deepspeed, distcp, megatron, torchtitan, zero
from mcftensor.checkpoint.bridge.entries import Contents, Layout, Request


def _distributed(path: Path) -> Path | None:
    """The folder of `torch.distributed.checkpoint` that a path stands for."""
    found = path if (path / distcp.METADATA).is_file() else None
    return found or megatron.last_iteration(path) or torchtitan.last_step(path)


def _read_distributed(path: Path, request: Request) -> Contents:
    path = _distributed(path) or path
    folder = distcp.folder_at(path, request.verify)
    reader = megatron if megatron.matches(folder) else torchtitan
    return reader.read(path, folder, request)


FOLDERS = (
    Layout(deepspeed.matches, deepspeed.read),
    Layout(lambda path: zero.folder_of(path) is not None, zero.read),
    Layout(megatron.is_legacy, megatron.refuse_legacy),
    Layout(lambda path: _distributed(path) is not None, _read_distributed),
)
"""The first that matches reads."""
