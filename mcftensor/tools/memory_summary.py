"""The memory of a model in training: measured for existing tensors, predicted for future ones; and
the prediction for a model before anything is allocated.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mcftensor.convert import Overrides, as_expansion
from mcftensor.formats import PLAIN, Format, default_format
from mcftensor.formats.defaults import format_of_weights
from mcftensor.patches.optimizers import named_parameters_of, parameters_of
from mcftensor.tensor import text_tables
from mcftensor.tensor.components import format_of, local
from mcftensor.tools.state_layouts import States, TensorLayout, layouts, predicted
from mcftensor.training.collage import Mode, collage, mode_of
from mcftensor.training.shadow import CannotShadow
from mcftensor.training.step_in_backward import are_released

Kind = Literal["parameters", "gradients", "states", "buffers"]
Role = Literal["parameter", "value", "plain"]
Known = Literal["measured", "predicted", "estimated"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "states", "buffers")

MASTER_WEIGHTS = 16
"""Bytes a parameter of AdamW with float32 master weights and states, and bf16 beside them."""


@dataclass(frozen=True)
class TensorMemory:
    """The memory of one tensor.

    Attributes:
        kind: `"parameters"`, `"gradients"`, `"states"` or `"buffers"`.
        name: the name of the parameter or buffer.
        state: the name of a state; else empty.
        format: the name of the format or dtype.
        shape: the shape on this rank.
        role: `"parameter"` for an expansion whose leading term a model computes with, `"value"` for
            an expansion that computes with all terms, or `"plain"`.
        trained: whether it is, or belongs to, a parameter that requires grad.
        bytes: the bytes of all components.
        known: `"measured"` for an existing tensor; `"predicted"` for a future one; or
            `"estimated"` for a state whose shape does not follow from its parameter's shape.
    """

    kind: Kind
    name: str
    state: str
    format: str
    shape: tuple[int, ...]
    role: Role
    trained: bool
    bytes: int
    known: Known


@dataclass(frozen=True)
class Summary:
    """The result of `summary` and `estimate`. Its text is a table.

    Attributes:
        held: each tensor, in the order of the model.
        trained: number of elements of the parameters that require grad.
        released: whether parameters step in backward, so that their gradients are not held.
        optimizer: name of its class, or None without one.
        mode: what `collage` was given, `"by name"` for a dict, or None.
        unpredicted: why states that are not there yet are left out, or None.
        device_bytes: bytes of the model on the device, where its weights are on the host
            (`mcf.host.weights`); None where all is in one memory.
    """

    held: tuple[TensorMemory, ...]
    trained: int
    released: bool
    optimizer: str | None
    mode: str | None
    unpredicted: str | None
    device_bytes: int | None = None

    def bytes_of(self, kind: Kind | None = None, name: str | None = None) -> int:
        """Return the bytes of a kind, or of all; of one parameter or buffer, or of all."""
        chosen = (x for x in self.held if kind in (None, x.kind) and name in (None, x.name))
        return sum(x.bytes for x in chosen)

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.bytes_of()

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of the parameters that require grad, their gradients and states, an element."""
        return sum(x.bytes for x in self.held if x.trained) / max(self.trained, 1)

    @property
    def host_bytes(self) -> int | None:
        """Bytes of trained parameters, gradients and states on the host; None in one memory."""
        if self.device_bytes is None:
            return None
        return sum(x.bytes for x in self.held if x.trained)

    @property
    def master_weights(self) -> int:
        """Bytes of all, were it AdamW over float32 master weights: 16 for each that is trained."""
        others = sum(x.bytes for x in self.held if not x.trained)
        return others + MASTER_WEIGHTS * self.trained

    def by_format(self, kind: Kind) -> dict[str, int]:
        """Return the bytes of a kind, by format or dtype."""
        found: dict[str, int] = {}
        for x in self.held:
            if x.kind == kind:
                found[x.format] = found.get(x.format, 0) + x.bytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {
            "total": self.total,
            "trained": self.trained,
            "bytes_per_parameter": self.bytes_per_parameter,
            "master_weights": self.master_weights,
            "master_weights_bytes_per_parameter": MASTER_WEIGHTS,
            "released": self.released,
            "optimizer": self.optimizer,
            "mode": self.mode,
            "unpredicted": self.unpredicted,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "kinds": {
                kind: {"bytes": self.bytes_of(kind), "formats": self.by_format(kind)}
                for kind in KINDS
            },
            "parameters": {
                name: {kind: self.bytes_of(kind, name) for kind in KINDS[:3]}
                for name in dict.fromkeys(x.name for x in self.held if x.kind == "parameters")
            },
            "held": [vars(x) | {"shape": list(x.shape)} for x in self.held],
        }

    def __str__(self) -> str:
        return text_tables.as_text(list(self._rows()), list(self._notes()))

    def __repr__(self) -> str:
        size = text_tables.size(self.total)
        return f"Summary({size}, {self.bytes_per_parameter:.2f} bytes a parameter)"

    def _repr_html_(self) -> str:
        return text_tables.as_html(list(self._rows()), list(self._notes()))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """One for tensors whose names differ in numbers alone and that are stored alike; all."""
        columns: list[tuple[Kind, str]] = [("states", state) for state in self._states()]
        if self.trained and not self.released:
            columns.insert(0, ("gradients", ""))
        heads = [state or "gradient" for _, state in columns]
        yield ("", "shape", "", "role", "format", *heads, "bytes")

        of_name: dict[str, list[TensorMemory]] = {}
        for x in self.held:
            of_name.setdefault(x.name, []).append(x)
        alike: dict[tuple[Any, ...], list[list[TensorMemory]]] = {}
        for name, held in of_name.items():
            looks = tuple([(*vars(x).values(),)[2:] for x in held])
            alike.setdefault((re.sub(r"\d+", "*", name), looks), []).append(held)
        for (pattern, _), group in alike.items():
            first, *others = group[0]
            yield (
                pattern if len(group) > 1 else first.name,
                "×".join(map(str, first.shape)) or "scalar",
                f"{len(group)} of these" if len(group) > 1 else "",
                _said(first),
                first.format,
                *(_cell(x for x in others if (x.kind, x.state) == c) for c in columns),
                text_tables.size(sum(x.bytes for held in group for x in held)),
            )

        own = self.bytes_of("parameters") + self.bytes_of("buffers")
        totals = [sum(x.bytes for x in self.held if (x.kind, x.state) == c) for c in columns]
        sizes = [text_tables.size(x) for x in (own, *totals)]
        yield ("in all", "", "", "", *sizes, text_tables.size(self.total))
        if self.optimizer:
            empty = [""] * (3 + len(sizes))
            yield ("master weights, AdamW", *empty, text_tables.size(self.master_weights))

    def _states(self) -> list[str]:
        """Return the names of states with a column: a few at most, and no single numbers."""
        found: dict[str, int] = {}
        for x in self.held:
            if x.kind == "states" and x.shape:
                found[x.state] = found.get(x.state, 0) + x.bytes
        few = sorted(found, key=lambda name: -found[name])[:4]
        return [name for name in found if name in few]

    def _notes(self) -> Iterator[str]:
        if self.optimizer:
            mode = f', mode "{self.mode}"' if self.mode else ""
            yield f"{self.optimizer}{mode}: {self.trained:,} parameters are trained"
        yield (
            f"{self.bytes_per_parameter:.2f} bytes a parameter; with float32 master weights and "
            f"AdamW they are {MASTER_WEIGHTS}"
        )
        if self.device_bytes is not None and self.host_bytes is not None:
            yield (
                f"on the host {text_tables.size(self.host_bytes)}; on the device "
                f"{text_tables.size(self.device_bytes)}, and some gradients at a time"
            )
        if self.released:
            yield "gradients are released: a bucket of them is there at a time"
        for known, words in (
            ("predicted", "~ predicted"),
            ("estimated", "? estimated: the shape of a state does not follow its parameter's"),
        ):
            if any(x.known == known for x in self.held):
                yield words
        if self.unpredicted:
            yield f"without the states of the optimizer: {self.unpredicted}"


def summary(
    model: nn.Module, optimizer: Optimizer | None = None, *, released: bool | None = None
) -> Summary:
    """Say in which formats a model, its gradients and states are, and what memory they take.

    What exists is measured. Gradients and states that do not exist yet are predicted, on the meta
    device too: states by steps of a copy of the optimizer on tensors of a few elements, with the
    same formats, options and Collage mode. Activations are not counted.

    Args:
        model: a module, converted by `as_expansion` if it is to be, or `mcf.host.weights` of it. Of
            sharded parameters, what this rank has of them is counted. Tied parameters are counted
            once.
        optimizer: its optimizer. Its parameters that are not of the model are counted too.
        released: whether parameters step in backward, so that no gradients are held; by default,
            whether `step_in_backward` has been called.

    Returns:
        A table, by `print` or in a notebook, in which layers that are stored alike share a row;
        `to_dict()` has its numbers, tensor by tensor.

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
        >>> mcf.meters.summary(model, optimizer)
        Summary(8.00 MiB, 8.00 bytes a parameter)
        >>> mcf.meters.summary(model, optimizer).by_format("states")
        {'float32': 4, 'bfloat16': 4194304}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"summary: got {type(model).__name__}; give a module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"summary: got {type(optimizer).__name__}; give a torch.optim.Optimizer")
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    reason: str | None = None
    coming: dict[Tensor, States] = {}
    if optimizer is not None:
        for _, (g, i), p in named_parameters_of(optimizer):
            names.setdefault(p, f"optimizer {g}.{i}")
        if any(p.requires_grad and not optimizer.state.get(p) for p in parameters_of(optimizer)):
            try:
                coming = predicted(optimizer)
            except CannotShadow as error:
                reason = f"{type(optimizer).__name__}: {error}"

    if released is None:
        released = are_released(names)
    held: list[TensorMemory] = []
    for p, name in names.items():
        held.append(_memory("parameters", name, p, TensorLayout.of(p)))
        if p.grad is not None:
            held.append(_memory("gradients", name, p, TensorLayout.of(p.grad)))
        elif p.requires_grad and not released:
            held.append(_memory("gradients", name, p, TensorLayout.of_gradient(p), "predicted"))
        made = layouts(optimizer.state[p]) if optimizer and optimizer.state.get(p) else None
        for state, layout in (coming.get(p, {}) if made is None else made).items():
            how: Known = "predicted" if layout.is_exact else "estimated"
            known = how if made is None else "measured"
            held.append(_memory("states", name, p, layout, known, state))
    for name, x in model.named_buffers():
        held.append(_memory("buffers", name, x, TensorLayout.of(x)))
    return Summary(
        tuple(held),
        sum(local(p).numel() for p in names if p.requires_grad),
        released,
        type(optimizer).__name__ if optimizer else None,
        mode_of(optimizer) if optimizer else None,
        reason,
        getattr(model, "device_bytes", None),
    )


def _memory(
    kind: Kind,
    name: str,
    p: Tensor,
    layout: TensorLayout,
    known: Known = "measured",
    state: str = "",
) -> TensorMemory:
    role: Role = "parameter" if kind == "parameters" else "value"
    if layout.format in PLAIN.values():
        role = "plain"
    format, shape = layout.format.name, tuple(layout.shape)
    trained = kind != "buffers" and p.requires_grad
    return TensorMemory(kind, name, state, format, shape, role, trained, layout.bytes, known)


def _said(x: TensorMemory) -> str:
    """Return the description of a tensor of a model for a reader."""
    if x.kind == "buffers":
        return "buffer" if x.role == "plain" else f"buffer, {x.role}"
    return x.role if x.trained else f"{x.role}, frozen"


def _cell(held: Iterable[TensorMemory]) -> str:
    """Return the format of a state or a gradient, and how it is known."""
    marks = {"measured": "", "predicted": "~ ", "estimated": "? "}
    return " ".join(marks[x.known] + x.format for x in held) or "–"


# -------------------------------------------------------------------------------- estimate

MakeOptimizer = Callable[[Any], Optimizer]


def estimate(
    model: nn.Module,
    mode: Mode | None = "plus",
    *,
    format: Format | str | None = None,
    overrides: Overrides | None = None,
    lr: float | None = None,
    optimizer: MakeOptimizer = AdamW,
    released: bool = False,
    on_host: bool = False,
) -> Summary:
    """Return the memory that a model would need in training, with an optimizer.

    A copy without data is counted, and the model stays unchanged. It may be on the meta device,
    and larger than the memory of this machine. Activations are not counted.

    Args:
        model: a module; a converted module keeps its formats.
        mode: as in `collage`; None for the states that the optimizer makes.
        format: as in `as_expansion`.
        overrides: as in `as_expansion`.
        lr: as in `as_expansion`; it has no effect on meta weights, whose size is unknown.
        optimizer: a class, or a function of the parameters that makes an optimizer.
        released: whether `step_in_backward` is used, so that gradients take no memory.
        on_host: whether the weights are on the host (`mcf.host.weights`), and the device has their
            leading terms.

    Returns:
        The table of `summary`, all of it predicted.

    Raises:
        TypeError: `model` is no module.
        ValueError: arguments that `as_expansion` or `collage` rejects.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(32_768, 32_768, bias=False)
        >>> mcf.meters.estimate(model)
        Summary(12.00 GiB, 12.00 bytes a parameter)
        >>> mcf.meters.estimate(model, "compact", format=mcf.bf16i8, released=True)
        Summary(5.06 GiB, 5.06 bytes a parameter)
        >>> found = mcf.meters.estimate(model, "compact", format=mcf.bf16i8, on_host=True)
        >>> found.device_bytes / found.trained
        2.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"estimate: got {type(model).__name__}; give a module")
    by_size = {} if format else _by_size(model, lr)
    model = as_expansion(without_data(model), format, overrides={**(overrides or {}), **by_size})
    made = optimizer(model.parameters())
    if mode is not None:
        collage(made, mode)
    found = summary(model, made, released=released)
    if not on_host:
        return found
    computing = [x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers())]
    return dataclasses.replace(found, device_bytes=sum(computing))


def _by_size(model: nn.Module, lr: float | None) -> dict[str, Format]:
    """Return the formats of weights that depend on their size, which a copy without data lacks."""
    named = list(model.named_parameters())
    if any(format_of(p) for _, p in named):
        return {}
    formats = {name: format_of_weights(p, lr) for name, p in named if p.requires_grad}
    shapes = {name: p.shape for name, p in named}
    return {name: f for name, f in formats.items() if f != default_format(shapes[name])}


def without_data(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device, without copying the data of parameters and buffers."""
    known: dict[int, Any] = {}
    for p in model.parameters():
        known[id(p)] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, known)
