"""`change_format` and `prepare`: conversions of a model and of the states of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mcftensor.convert import Held, Overrides, as_plain, plan_conversion
from mcftensor.dispatch.operands import as_state, value_in, value_of
from mcftensor.formats import PLAIN, Format, for_shape, named, require_format
from mcftensor.kernels.without_float64 import PAIR, has_float64
from mcftensor.patches.optimizers import parameters_of, plan_of
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import format_of, local, stored_format_of
from mcftensor.tensor.step_context import current_step
from mcftensor.training.collage import CollagePlan, Mode, collage
from mcftensor.wings import wing_or_none

if TYPE_CHECKING:
    from mcftensor.tools import Summary

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


@dataclass(frozen=True)
class Loss:
    """The loss of a tensor in another format.

    Attributes:
        elements: the number of elements with another value.
        of: the number of all elements.
        share: the norm of the differences, over the norm of the tensor.
    """

    elements: int
    of: int
    share: float


@dataclass(frozen=True)
class FormatChange:
    """The result of `change_format`, which prints as a few lines of text.

    Attributes:
        formats: for each converted tensor, by name, the old format and the new one. The name of a
            state is the name of its parameter, a dot, and its own name.
        lost: the losses, by name, of the tensors that lost something.
        before: the memory before, as `mcf.meters.summary` returns it, or None without
            `mcftensor.tools`.
        after: the memory after.
    """

    formats: dict[str, tuple[str, str]]
    lost: dict[str, Loss]
    before: Summary
    after: Summary

    def __str__(self) -> str:
        kinds: dict[tuple[str, str], int] = {}
        for pair in self.formats.values():
            kinds[pair] = kinds.get(pair, 0) + 1
        sizes = [x.bytes_per_parameter for x in (self.before, self.after) if x]
        lines = [
            *([f"{sizes[0]:.2f} to {sizes[1]:.2f} bytes a parameter"] if sizes else []),
            *(f"{old} to {new}: {count} tensors" for (old, new), count in kinds.items()),
            *(
                f"lost in {name}: {loss.elements} of {loss.of} elements, {loss.share:.1e} of the "
                "norm"
                for name, loss in self.lost.items()
            ),
        ]
        return "\n".join(lines)


def change_format(
    model: nn.Module,
    optimizer: Optimizer,
    format: Format | str | None,
    mode: Mode | None = None,
    *,
    overrides: Overrides | None = None,
) -> FormatChange:
    """Convert a model in training and the states of its optimizer, between two steps.

    Parameters keep their values exactly if the new format represents them, and are rounded once
    otherwise; the result reports the losses. They stay the same objects: optimizer, learning-rate
    scheduler, compiled models and averages of weights remain valid. Between formats of one leading
    dtype, graphs, weak references to parameters and DistributedDataParallel remain valid, too.
    Counts and salts of balanced rounding restart.

    States as the optimizer makes them, in the format of their parameter or plain in its dtype, are
    converted to the states that it makes for the new format. States that `collage` has chosen are
    converted as the mode requires for the new format. Other states stay unchanged.

    Args:
        model: the module, plain or of expansions; not a DistributedDataParallel, but its `module`.
        optimizer: any optimizer over parameters of the model.
        format: the new format of the parameters, or its name, as in `as_expansion`. None leaves
            expansions unchanged, except as `overrides` say.
        mode: a mode for `collage`; by default the optimizer keeps its mode.
        overrides: a dict from patterns of names to formats, or None for tensors to leave unchanged,
            as in `as_expansion`.

    Returns:
        The conversions and losses, and the memory before and after.

    Raises:
        TypeError: an argument is not a module, an optimizer or a format.
        ValueError: an override that matches nothing, a mode that does not fit, a number beyond the
            range of the format.
        RuntimeError: within a step; a model that `fully_shard` has sharded; a parameter that has to
            become another tensor, while a graph, a view or a weak reference holds it.

    A call that raises leaves model and optimizer unchanged.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(64, 64), mcf.bf16i8)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> print(mcf.change_format(model, optimizer, mcf.bf16i16))
        11.01 to 14.00 bytes a parameter
        bf16i8 to bf16i16: 6 tensors
    """
    conversion = TrainingConversion("change_format", model, optimizer, format, mode, overrides)
    tools = wing_or_none("tools")
    before = tools and tools.summary(model, optimizer)
    formats: dict[str, tuple[str, str]] = {}
    lost: dict[str, Loss] = {}

    def compare(name: str, old: Tensor, new: Tensor) -> None:
        formats[name] = stored_format_of(old).name, stored_format_of(new).name
        if (loss := _lost(old, new)) is not None:
            lost[name] = loss

    conversion.carry_out(compare)
    return FormatChange(formats, lost, before, tools and tools.summary(model, optimizer))


def prepare(
    model: M,
    optimizer: Opt,
    mode: Mode | None = "plus",
    format: Format | str | None = None,
    *,
    overrides: Overrides | None = None,
) -> tuple[M, Opt]:
    """Convert a model and its optimizer in place, and return both.

    `prepare` does what `as_expansion(model, format, overrides=overrides)` and
    `collage(optimizer, mode)` do together. It also converts the states of an optimizer that has
    already stepped. Model, parameters and optimizer remain the same objects, so parameter groups
    and learning-rate schedulers keep working. Parameters of the optimizer that are not in the model
    remain plain.

    Args:
        model: the module. Call `prepare` before `DistributedDataParallel` or `fully_shard`.
        optimizer: any `torch.optim.Optimizer` over parameters of the model. With several, call
            `prepare` for each.
        mode: a mode of `collage`. If None, the optimizer keeps its mode, or creates its states in
            the format of each parameter.
        format: the format of the parameters, or its name, as for `as_expansion`.
        overrides: a dict from patterns of names to formats, as for `as_expansion`; None keeps a
            tensor unchanged.

    Returns:
        The model and the optimizer that were given.

    Raises:
        TypeError: not a module and an optimizer; an invalid format; an optimizer that wraps
            another one.
        ValueError: an override that matches nothing; an unknown mode; an optimizer of another
            model, or without a parameter that becomes an expansion; a number beyond the range of
            the format.
        RuntimeError: the call is inside a step; a sharded model; a parameter that a graph, a view
            or a weak reference holds.

    A call that raises leaves model and optimizer unchanged.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> model, optimizer = mcf.prepare(model, optimizer)
        >>> model.weight.format, model.bias.format
        (mcf.bf16x2, mcf.bf16x3)

        Norms and biases that remain float32, for a model that runs under `torch.autocast`:

        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> vectors = {name: None for name, p in model.named_parameters() if p.dim() < 2}
        >>> model, optimizer = mcf.prepare(model, optimizer, overrides=vectors)
        >>> model.bias.dtype
        torch.float32
    """
    TrainingConversion("prepare", model, optimizer, format, mode, overrides).carry_out()
    return model, optimizer


class TrainingConversion:
    """A planned change of the formats of a model and of the states of its optimizer.

    Raises what `change_format` does, and changes nothing.
    """

    def __init__(
        self,
        where: str,
        model: nn.Module,
        optimizer: Optimizer,
        format: Format | str | None,
        mode: Mode | None,
        overrides: Overrides | None,
    ) -> None:
        given = [model, optimizer, *([mode] if isinstance(mode, Optimizer) else [])]
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer) or given[2:]:
            raise TypeError(
                f"{where}: got {' and '.join(type(x).__name__ for x in given)}; give a module and "
                "a torch.optim.Optimizer over its parameters. With several optimizers, call it for "
                "each of them"
            )
        if current_step() is not None:
            raise RuntimeError(f"{where}: a step is under way; call it between two steps")
        found = None if format is None else require_format(format, where)
        own = {id(p) for p in model.parameters()}
        if not any(id(p) in own for p in parameters_of(optimizer)):
            raise ValueError(
                f"{where}: no parameter of this optimizer ({type(optimizer).__name__}) is one of "
                f"this {type(model).__name__}; give the optimizer that was made of "
                "model.parameters(), after the last change of them"
            )
        self.model, self.optimizer = model, optimizer
        self.of_model = plan_conversion(model, found, overrides or {})
        self.changed = {id(held.x): held for held in self.of_model.changed if held.is_parameter}
        if mode is None and (plan := plan_of(optimizer)) is not None:
            mode = plan.given
        new_formats = [
            self.changed[id(p)].wanted if id(p) in self.changed else format_of(p)
            for p in parameters_of(optimizer)
        ]
        self.mode = mode
        self.plan = None if mode is None else CollagePlan(optimizer, mode, new_formats)

    def carry_out(self, compare: Callable[[str, Tensor, Tensor], None] | None = None) -> None:
        """Convert; of each tensor, `compare` is called with its name, the old and the new one."""
        optimizer, plan, changed = self.optimizer, self.plan, self.changed
        parameters = list(parameters_of(optimizer))
        made_for = {id(p): _formats_made(p) for p in parameters if id(p) in changed}
        self.of_model.carry_out(
            None if compare is None else lambda held, new: compare(held.name, _whole(held), new)
        )
        for p in parameters:
            state, own = optimizer.state.get(p), format_of(p)
            if not state or (id(p) not in changed and plan is None):
                continue
            old = dict(state)
            if plan is not None and own is not None:
                plan.convert(p, own, state)
            if id(p) in changed:
                wanted = for_shape(own.of_states, p.shape) if own else PLAIN[p.dtype]
                for name, x in old.items():
                    is_left = plan is None or plan.leaves(name)
                    if is_left and _is_made_for(x, name, p, made_for[id(p)] - {wanted}):
                        state[name] = as_state(x, wanted, p, name) if own else x.to(p.dtype)
            owner = changed[id(p)].name if id(p) in changed else _name_in(self.model, p)
            for name, x in old.items():
                if compare is not None and state[name] is not x:
                    compare(f"{owner}.{name}", x, state[name])
        if self.mode is not None:
            collage(optimizer, self.mode)


def _whole(held: Held) -> Tensor:
    return held.x.detach() if held.loaded is None else held.loaded


def _formats_made(p: Tensor) -> set[Format]:
    """Return the formats of the states that optimizers make for a parameter."""
    own = format_of(p)
    return {PLAIN[p.dtype]} if own is None else {own, own.of_states, own.nearest}


def _is_made_for(x: object, name: str, p: Tensor, made: set[Format]) -> bool:
    """Whether a state is a number for each element of a parameter, in one of some formats."""
    return (
        isinstance(x, Tensor)
        and name != "step"
        and x.shape == p.shape
        and x.is_floating_point()
        and stored_format_of(x) in made
    )


def _name_in(model: nn.Module, p: Tensor) -> str:
    return next((name for name, q in model.named_parameters() if q is p), "a parameter")


# ----------------------------------------------------------------------------------- losses


def in_format(format: Format, x: Tensor, count: Tensor | None = None) -> Tensor:
    """Return a tensor in a format, or as a plain one, rounded once."""
    if format.arithmetic == "plain":
        return as_plain(x, format.dtype)
    return value_in(x, format, count)


def differing(x: Tensor, y: Tensor) -> int:
    """Return the number of elements of two tensors in one format with other bits, NaNs aside."""
    differ = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    for a, b in zip(components_of(x), components_of(y), strict=True):
        other = a != b
        if a.is_floating_point():
            other = (other & ~(a.isnan() & b.isnan())) | (a.signbit() != b.signbit())
        differ |= other
    return int(differ.sum())


def components_of(x: Tensor) -> Sequence[Tensor]:
    """Return the components of an expansion, or a plain tensor itself."""
    return x.components if isinstance(x, MCFTensor) else [x]


def _widely(x: Tensor) -> Tensor:
    """Return numbers in float64, or in two float32 terms without it."""
    return as_plain(x, torch.float64) if has_float64(x.device) else value_of(x, named(PAIR))


@torch.no_grad()
def _lost(old: Tensor, new: Tensor) -> Loss | None:
    """Return the loss of a tensor in the new format."""
    old, new = local(old).detach(), local(new).detach()
    source = stored_format_of(old)
    elements = differing(old, in_format(source.nearest, new))
    if not elements:
        return None
    exact, found = _widely(old), _widely(new)
    off = (exact - found).norm() / exact.norm()
    return Loss(elements, old.numel(), float(off))
