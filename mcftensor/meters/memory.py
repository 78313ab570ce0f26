"""The memory of a model in training: measured where tensors exist, predicted where not yet."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from mcftensor.formats import PLAIN
from mcftensor.tensor.sharded import local
from mcftensor.training.releasing import are_released
from mcftensor.training.shadow import CannotShadow
from mcftensor.training.state_layouts import States, TensorLayout, layouts, predicted

Kind = Literal["parameters", "gradients", "states", "buffers"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "states", "buffers")

MASTER_WEIGHTS = 16
"""Bytes a parameter of AdamW with float32 master weights and states, and bf16 beside them."""


@dataclass(frozen=True)
class Held:
    """One tensor, and what memory it takes.

    Attributes:
        kind: `"parameters"`, `"gradients"`, `"states"` or `"buffers"`.
        name: of the parameter or buffer.
        state: of a state, its name; else empty.
        format: name of a format, or of a dtype.
        shape: on this rank.
        bytes: of all components.
        known: `"measured"` of a tensor that is there; `"predicted"` of one that is not; or
            `"estimated"` of a state whose shape does not follow from that of its parameter.
    """

    kind: Kind
    name: str
    state: str
    format: str
    shape: tuple[int, ...]
    bytes: int
    known: Literal["measured", "predicted", "estimated"]


@dataclass(frozen=True)
class Memory:
    """What `memory` returns. Its text is a table.

    Attributes:
        held: each tensor, in the order of the model.
        trained: number of elements of the parameters that require grad.
        released: whether parameters step in backward, so that their gradients are not held.
        unpredicted: why states that are not there yet are left out, or None.
    """

    held: tuple[Held, ...]
    trained: int
    released: bool
    unpredicted: str | None
    _trained_names: frozenset[str]

    def bytes_of(self, kind: Kind | None = None, name: str | None = None) -> int:
        """Bytes of a kind, or of all; of one parameter or buffer, or of all."""
        chosen = (x for x in self.held if kind in (None, x.kind) and name in (None, x.name))
        return sum(x.bytes for x in chosen)

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.bytes_of()

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of the parameters that require grad, their gradients and states, an element."""
        chosen = (x.bytes for x in self.held if x.name in self._trained_names)
        return sum(chosen) / max(self.trained, 1)

    def by_format(self, kind: Kind) -> dict[str, int]:
        """Bytes of a kind, by format or dtype."""
        found: dict[str, int] = {}
        for x in self.held:
            if x.kind == kind:
                found[x.format] = found.get(x.format, 0) + x.bytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "total": self.total,
            "trained": self.trained,
            "bytes_per_parameter": self.bytes_per_parameter,
            "master_weights_bytes_per_parameter": MASTER_WEIGHTS,
            "released": self.released,
            "unpredicted": self.unpredicted,
            "kinds": {
                kind: {"bytes": self.bytes_of(kind), "formats": self.by_format(kind)}
                for kind in KINDS
            },
            "parameters": {
                name: {kind: self.bytes_of(kind, name) for kind in KINDS[:3]}
                for name in self._names("parameters")
            },
            "held": [vars(x) | {"shape": list(x.shape)} for x in self.held],
        }

    def __str__(self) -> str:
        rows = [list(row) for row in self._rows(20)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            row[0].ljust(widths[0]) + "".join(f"  {x:>{w}}" for x, w in zip(row[1:], widths[1:]))  # noqa: B905
            for row in rows
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *self._notes()])

    def __repr__(self) -> str:
        return f"Memory({_size(self.total)}, {self.bytes_per_parameter:.2f} bytes a parameter)"

    def _repr_html_(self) -> str:
        first, *rows = self._rows(20)
        cells = [[f"<td>{html.escape(x)}</td>" for x in row] for row in rows]
        body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
        heads = "".join(f"<th>{html.escape(x)}</th>" for x in first)
        notes = "".join(f"<p>{html.escape(x)}</p>" for x in self._notes())
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def _names(self, kind: Kind) -> list[str]:
        return list(dict.fromkeys(x.name for x in self.held if x.kind == kind))

    def _rows(self, limit: int) -> Iterator[tuple[str, ...]]:
        """The largest parameters, those that are left, buffers, and all."""
        yield ("", *KINDS, "in all")
        names = self._names("parameters")
        largest = sorted(names, key=lambda name: -self.bytes_of(name=name))[:limit]
        shown = [name for name in names if name in largest]
        for name in shown:
            yield self._row(name, (x for x in self.held if x.name == name))
        left = [x for x in self.held if x.name not in largest and x.kind != "buffers"]
        if left:
            yield self._row(f"{len(names) - len(shown)} more", left)
        buffers = [x for x in self.held if x.kind == "buffers"]
        if buffers:
            yield self._row("buffers", buffers)
        yield self._row("in all", self.held)

    def _row(self, name: str, held: Iterable[Held]) -> tuple[str, ...]:
        held = list(held)
        cells = [_cell([x for x in held if x.kind == kind]) for kind in KINDS]
        return (name, *cells, _size(sum(x.bytes for x in held)))

    def _notes(self) -> Iterator[str]:
        beside = self.bytes_per_parameter
        yield (
            f"{beside:.2f} bytes a parameter; with float32 master weights and AdamW they are "
            f"{MASTER_WEIGHTS}"
        )
        if self.released:
            yield "gradients are released: a bucket of them is there at a time"
        for known, text in (
            ("predicted", "~ predicted"),
            ("estimated", "? estimated: the shape of a state does not follow its parameter's"),
        ):
            if any(x.known == known for x in self.held):
                yield text
        if self.unpredicted:
            yield f"without the states of the optimizer: {self.unpredicted}"


def memory(
    model: nn.Module, optimizer: Optimizer | None = None, *, released: bool | None = None
) -> Memory:
    """Say what memory the parameters of a model take, their gradients and states, and its buffers.

    What exists is measured. Gradients and states that do not exist yet are predicted, on the meta
    device too: states by steps of a copy of the optimizer on tensors of a few elements, with the
    same formats, options and Collage mode. Activations are not counted.

    Args:
        model: a module, converted by `as_expansion` if it is to be. Of sharded parameters, what
            this rank has of them is counted. Tied parameters are counted once.
        optimizer: its optimizer. Its parameters that are not of the model are counted too.
        released: whether parameters step in backward, so that no gradients are held; by default,
            whether `step_in_backward` has been called.

    Returns:
        A table, by `print`; `to_dict()` has its numbers.

    Raises:
        TypeError: `model` is no module, or `optimizer` no optimizer.

    !!! note
        - A state is predicted exactly if each of its lengths is one of the parameter's, a
          product of neighbours of these, or the same for all parameters. Others are marked as
          estimated.
        - What an optimizer decides by the size of a tensor, as some store small ones in 32 bits,
          the prediction cannot know.
        - Where no step can be taken on copies, as of LBFGS, states are left out until they exist.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> mcf.memory(model, optimizer)
        Memory(8.00 MiB, 8.00 bytes a parameter)
        >>> mcf.memory(model, optimizer).by_format("states")
        {'float32': 4, 'bfloat16': 4194304}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory: got {type(model).__name__}; give a module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"memory: got {type(optimizer).__name__}; give a torch.optim.Optimizer")
    names = {p: name for name, p in model.named_parameters()}
    reason: str | None = None
    coming: dict[Tensor, States] = {}
    if optimizer is not None:
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                names.setdefault(p, f"optimizer {g}.{i}")
        if any(p.requires_grad and not optimizer.state.get(p) for p in _parameters(optimizer)):
            try:
                coming = predicted(optimizer)
            except CannotShadow as error:
                reason = f"{type(optimizer).__name__}: {error}"

    if released is None:
        released = are_released(names)
    held: list[Held] = []
    for p, name in names.items():
        held.append(_held("parameters", name, "", TensorLayout.of(p), "measured"))
        if p.grad is not None:
            held.append(_held("gradients", name, "", TensorLayout.of(p.grad), "measured"))
        elif p.requires_grad and not released:
            layout = TensorLayout(PLAIN[p.dtype], local(p).shape)
            held.append(_held("gradients", name, "", layout, "predicted"))
        made = layouts(optimizer.state[p]) if optimizer and optimizer.state.get(p) else None
        for state, layout in (coming.get(p, {}) if made is None else made).items():
            how = "predicted" if layout.is_exact else "estimated"
            known = "measured" if made is not None else how
            held.append(_held("states", name, state, layout, known))
    for name, buffer in model.named_buffers():
        held.append(_held("buffers", name, "", TensorLayout.of(buffer), "measured"))
    trained = {name: local(p).numel() for p, name in names.items() if p.requires_grad}
    return Memory(tuple(held), sum(trained.values()), released, reason, frozenset(trained))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _held(kind: Kind, name: str, state: str, layout: TensorLayout, known: Any) -> Held:
    format, shape = layout.format.name, tuple(layout.shape)
    return Held(kind, name, state, format, shape, layout.bytes, known)


def _cell(held: list[Held]) -> str:
    """Bytes, formats but for those of single numbers, and how they are known."""
    if not held:
        return "–"
    formats = dict.fromkeys(x.format for x in held if x.shape or len(held) == 1)
    known = {x.known for x in held}
    mark = "? " if "estimated" in known else "~ " if "predicted" in known else ""
    few = " ".join(formats) if len(formats) <= 2 else f"{len(formats)} formats"
    return f"{mark}{_size(sum(x.bytes for x in held))} {few}".rstrip()


def _size(count: int) -> str:
    """Bytes in the unit in which they are at least one."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    for larger in units:
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
