"""Checkpoints from one format into another, one tensor in memory at a time."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mcftensor.arithmetic.write_counts import moved, start
from mcftensor.bridge.master_weights import in_chunks
from mcftensor.checkpoint.atomic_files import making
from mcftensor.checkpoint.checkpoint_error import CheckpointError, reading
from mcftensor.checkpoint.entries import Entry, Request
from mcftensor.checkpoint.loading import read_checkpoint
from mcftensor.checkpoint.saving import save_terms, size_in_bytes
from mcftensor.checkpoint.state_dicts import as_terms
from mcftensor.checkpoint.torch_optimizers import BESIDE, metadata_of, state_name
from mcftensor.dispatch.operands import after
from mcftensor.formats import PLAIN, Format, bf16i16, for_shape
from mcftensor.formats.requirements import require_floats
from mcftensor.options import say
from mcftensor.tensor import MCFTensor
from mcftensor.training.format_change import components_of, differing, in_format
from mcftensor.training.state_names import compact_format

Progress = Callable[[str, int, int], None]
"""Called with the name of a tensor that is done, how many bytes of the source are, and of how many
in all."""

_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Conversion:
    """The result of `convert_checkpoint`."""

    layout: str
    """The layout of the source."""
    format: str
    weights: int
    """Tensors that a model has."""
    states: int
    """Tensors that an optimizer has."""
    lost: dict[str, int]
    """By name, how many elements lost bits, where that was allowed."""


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: Format | torch.dtype | str = bf16i16,
    *,
    states: Format | torch.dtype | str | None = None,
    optimizer: bool = True,
    parameters: Iterable[str] | None = None,
    step: int | None = None,
    lossy: bool = False,
    max_shard_size: int | str | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint, of this library or another one, with the states of its optimizer.

    Tensors of float32 or wider, expansions and tensors with integer tails are converted. Floats of
    16 and 8 bits, integers, and states without dimensions, such as counts of steps, stay unchanged.
    A conversion that would lose bits raises: `bf16i16` represents every float32, and
    `torch.float32` converts back.

    The destination is a folder with `model.safetensors` and, if the source has states of an
    optimizer, `optimizer.safetensors`, for `load_file`. It appears when everything has been
    written. Memory contains one tensor and its conversion at a time.

    These layouts are read:

    | layout | weights | states |
    |---|---|---|
    | This library | safetensors, folders of this function | any |
    | Safetensors | one file, or several and an index | |
    | PyTorch, `torch.save` | a state dict, or one in a larger one; several files | torch.optim's |
    | Trainer of transformers, Accelerate | folders of either | `optimizer.pt`, `.bin` |
    | DeepSpeed | ZeRO's files, universal checkpoints; `zero_to_fp32.py`'s output | of the first 2 |
    | Torchtitan | `torch.distributed.checkpoint`, also of other scripts | by name |
    | Megatron-Core | `torch_dist`: float32 masters, or int16 remainders | as tensors by name |
    | Transformer Engine | FusedAdam's `master_param`, float32 or int16 | moments |
    | Flashoptim | `error_bits` of 8 or 16 bits | moments, quantized or not |
    | Optimi | `kahan_comp`, as an expansion of two terms | moments |

    Args:
        source: a file, the index of several, or a folder.
        destination: a folder that does not exist, or is empty.
        format: the format of the weights: a format, `torch.float32`, or the name of one. In formats
            whose rows share scales, vectors are converted to `bf16i16`.
        states: the format of the states, by default the format of the weights. "compact" stands
            for the formats of that mode of `collage`: `mxfp8` for first and `ue5m3` for second
            moments, also for 16-bit ones; and "compact4" for `q4` and `ue4`. This rounds them,
            whether `lossy` or not; other states get the format of the weights.
        optimizer: whether states are converted, too.
        parameters: names of parameters in the order in which the optimizer got them. Needed if
            its states complete the weights and contain numbers instead of names.
        step: the number of steps taken, for sources without it (Megatron's).
        lossy: whether tensors may lose bits, by one rounding.
        max_shard_size: as in `save_file`.
        verify: whether to check the digests of this library, the CRC-32 in files of torch.save,
            which PyTorch ignores, and whether terms belong together.
        progress: called after each tensor with its name, the bytes read so far, and all bytes.

    Raises:
        CheckpointError: the source is damaged, has no known layout, or would lose bits; the
            destination is not empty.

    Examples:
        >>> import tempfile, torch, mcftensor as mcf
        >>> x = torch.randn(100, 10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"weight": x}, f"{folder}/master.pt")
        ...     new = f"{folder}/converted"
        ...     done = mcf.checkpoint.convert_checkpoint(f"{folder}/master.pt", new)
        ...     y = mcf.load_file(new)["weight"]
        >>> y.format, torch.equal(mcf.as_plain(y, torch.float32), x), done.lost
        (mcf.bf16i16, True, {})
    """
    target = target_of_states = require_floats(format, "convert_checkpoint")
    bits = _COMPACT.get(states) if isinstance(states, str) else None
    if states is not None and bits is None:
        target_of_states = require_floats(states, "convert_checkpoint")
    names = None if parameters is None else list(parameters)
    most = None if max_shard_size is None else size_in_bytes(max_shard_size)
    destination = Path(destination)
    with making(destination) as folder:
        contents = read_checkpoint(Path(source), Request(optimizer, names, step, verify))
        weights = {
            name: (x, for_shape(target, x.shape) if _is_wide(x) else _own(x))
            for name, x in contents.weights.items()
        }
        own_states = {
            state_name(i, key): (x, _format_of_state(key, x, state, target_of_states, bits))
            for i, state in contents.states.items()
            for key, x in state.items()
            if isinstance(x, Entry)
        }
        total = sum(_size(x) for x, _ in (*weights.values(), *own_states.values()))
        writer = _Writer(Path(source), lossy, progress, total)
        writer.save(weights, contents.tied, {}, folder / "model.safetensors", most)
        if contents.states or contents.groups is not None:
            writer.lossy |= bits is not None  # a mode of one byte an element is a wish to round
            writer.save(own_states, {}, metadata_of(contents), folder / BESIDE[0], None)
    return Conversion(contents.layout, target.name, len(weights), len(own_states), writer.lost)


_COMPACT = {"compact": 8, "compact4": 4}
"""Bits of a code, by the names of modes of `collage`."""


@dataclass
class _Writer:
    """Converts and writes tensors as they are asked for."""

    source: Path
    lossy: bool
    progress: Progress | None
    total: int
    done: int = 0
    lost: dict[str, int] = field(default_factory=dict)

    def save(
        self,
        entries: Mapping[str, tuple[Entry, Format]],
        tied: dict[str, str],
        metadata: dict[str, str],
        path: Path,
        most: int | None,
    ) -> None:
        likes = {name: _likes(name, x.shape, format) for name, (x, format) in entries.items()}
        owners = {part: name for name, parts in likes.items() for part in parts}

        def produce(parts: list[str]) -> Iterator[tuple[str, Tensor]]:
            for name in dict.fromkeys(owners[part] for part in parts):
                terms = as_terms({name: self._converted(name, *entries[name])}, sums=True)
                while terms:  # nothing of one tensor is held when the next one comes
                    part = next(iter(terms))
                    yield part, terms.pop(part)
                self.done += _size(entries[name][0])
                if self.progress is not None:
                    self.progress(name, self.done, self.total)

        every = {part: x for parts in likes.values() for part, x in parts.items()}
        save_terms(every, produce, tied, {"format": "pt", **metadata}, path, most)

    def _converted(self, name: str, entry: Entry, target: Format) -> Tensor:
        with reading(self.source):
            x = entry.read()
        if x.shape != entry.shape:
            raise CheckpointError(f"{name} is of shape {x.shape}, where {entry.shape} was said")
        if target == entry.format:
            return x
        source = _own(entry)
        y, lost = _recoded(name, x, source, target)
        if lost and not self.lossy:
            raise CheckpointError(
                f"convert_checkpoint: {name} of shape {tuple(x.shape)} would lose bits in {lost} "
                f"of {x.numel()} elements, from {source.name} into {target.name}; "
                f"{_repair(source)}. lossy=True (--lossy) rounds them"
            )
        if lost:
            self.lost[name] = lost
        return y


def _own(entry: Entry) -> Format:
    if entry.format.rules is None:
        return entry.format
    raise CheckpointError(
        f"convert_checkpoint: {entry.name} of shape {tuple(entry.shape)} is {entry.format.name}, "
        "and scales are not converted; load the file into its model with mcf.load_file, take the "
        "scales off with mcf.as_plain(model, torch.float32), and save that"
    )


def _format_of_state(
    key: str, entry: Entry, names: Collection[str], target: Format, bits: int | None
) -> Format:
    """Return the format that a state becomes, given the names of all states of its parameter."""
    own = _own(entry)
    is_float = own.dtype.is_floating_point and own.dtype.itemsize > 1
    if bits and entry.shape and (is_float or own.arithmetic != "plain"):
        moment = compact_format(key, entry.shape, names, bits)
        if moment is not None:
            return moment
    return for_shape(target, entry.shape) if entry.shape and _is_wide(entry) else own


def _is_wide(entry: Entry) -> bool:
    return _own(entry).arithmetic != "plain" or entry.format.dtype in _WIDE


def _size(entry: Entry) -> int:
    return int(entry.shape.numel() * entry.format.bytes)


def _likes(name: str, shape: torch.Size, format: Format) -> dict[str, Tensor]:
    """Return the data-free components of `as_terms` for a tensor, and their companion entries."""
    if format.arithmetic == "plain":
        return {name: torch.empty(shape, dtype=format.dtype, device="meta")}
    none = torch.Size([0, 0])  # which has rows
    empty = [torch.empty(x.shape(none), dtype=x.dtype, device="cpu") for x in format.components]
    terms = as_terms({name: MCFTensor.of(empty, format)}, sums=True)
    shapes = [x.shape(shape) for x in format.components]
    shapes += [torch.Size()] * (len(terms) - len(shapes))
    return {
        part: torch.empty(size, dtype=x.dtype, device="meta")
        for (part, x), size in zip(terms.items(), shapes, strict=True)
    }


@torch.no_grad()
def _recoded(name: str, x: Tensor, source: Format, target: Format) -> tuple[Tensor, int]:
    """Return a tensor in another format, and the number of elements that do not convert back
    exactly.
    """
    first = start(x.device, name)
    if any(c.shape(x.shape) != x.shape for f in (source, target) for c in f.components):
        y = in_format(target, x, first)
        return y, differing(x, in_format(source, y, first))
    lost = place = 0

    def convert(block: Tensor) -> Sequence[Tensor]:
        nonlocal lost, place
        count = moved(first, place)
        y = in_format(target, block, count)
        lost += differing(block, in_format(source, y, count))
        place += block.numel()
        return components_of(y)

    parts = in_chunks(convert, [x], [component.dtype for component in target.components])
    if target.arithmetic == "plain":
        return parts[0], lost
    return MCFTensor.of(parts, target, writes=after(target, first)), lost


def _repair(format: Format) -> str:
    if format == PLAIN[torch.float32]:
        return "mcf.bf16i16 holds every float32"
    if format.arithmetic == "plain":
        return "mcf.fp64x2 holds every float64"
    return f"keep {format.name}, or take one with more bits"


# --------------------------------------------------------------------------- the command line


def run_convert(options: argparse.Namespace) -> int:
    """Convert a checkpoint, and say what was done."""
    names = options.parameters and options.parameters.read_text(encoding="utf-8").split()
    with _bar() as progress:
        done = convert_checkpoint(
            options.source,
            options.destination,
            options.format,
            states=options.states,
            optimizer=not options.weights_only,
            parameters=names,
            step=options.step,
            lossy=options.lossy,
            max_shard_size=options.max_shard_size,
            verify=not options.no_verify,
            progress=progress,
        )
    text = f"{options.destination}: {done.weights} weights"
    if done.states:
        text += f" and {done.states} states"
    text += f" in {done.format}, from {done.layout}"
    if done.lost:
        text += f"; {sum(done.lost.values())} elements of {len(done.lost)} tensors lost bits"
    say(text)
    return 0


@contextlib.contextmanager
def _bar() -> Iterator[Progress | None]:
    """Yield a progress bar for reading, if the output is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    rich = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(stderr=True)
    columns = rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn()
    with rich.Progress(*columns, "{task.description}", console=console, transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda name, done, total: shown.update(
            task, completed=done, total=total, description=name
        )
