"""Warnings of steps, and of states, that are not as a training over expansions is meant to be."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mcftensor import convert
from mcftensor.arithmetic.base_types import NARROW
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.checkpoint.checkpoint_error import some
from mcftensor.checkpoint.module_hooks import KEPT, rounded
from mcftensor.formats import Format
from mcftensor.kernels.block_scales import BLOCK_SIZE, block_max, spread
from mcftensor.patches.optimizers import (
    CHECKED,
    STEPS,
    has_expansions,
    looked_at,
    named_parameters_of,
    parameters_of,
)
from mcftensor.patches.table import calls
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import any_format_of, format_of, holder_of, is_held, local
from mcftensor.tensor.implicit_rounding import is_moved
from mcftensor.training.gradient_hooks import Handle
from mcftensor.training.state_names import SECOND_MOMENTS

T = TypeVar("T")


class DetachedParameterWarning(UserWarning):
    """An optimizer steps parameters that the model no longer has, or none that has a gradient.

    Programs that make parameters anew, as loaders do that cast them, leave the old ones to the
    optimizer. Raised once for each optimizer that has expansions, before a step.
    """


class NarrowStateWarning(UserWarning):
    """An optimizer keeps 16-bit states for parameters that are expansions.

    It is raised after its first step, and after the first one since a module was converted. It
    covers plain states of another shape than their parameter, such as preconditioners, whose sums
    and averages need more bits. A step makes states in the parameters' dtype wider; these were made
    before it, in 16 bits by name, or of sharded parameters. It also covers plain states in the
    shape of their parameter without a mode of `collage`, unless they are copies of the gradient:
    they are left from a run in plain 16 bits, where they never decay, or were made in the dtype of
    a gradient. And it covers a learning rate in a tensor of 16 bits, which does not follow a slow
    schedule.
    """


class PlainParameterWarning(UserWarning):
    """An optimizer steps parameters that are plain where expansions were, or are around them.

    They are of 16 bits in a model of expansions: they were frozen when `as_expansion` was called
    with it, or were added since. Or they came into the optimizer after it had stepped expansions,
    or are made of one, as by `torch.cat((p, new))`, which moves leading terms. Or they were rounded
    when `load_state_dict` gave them expansions, and `as_expansion` was not called afterwards; or
    `as_plain` made them plain in the middle of a training. Raised once for each parameter, before
    the first step on it, and by `collage`.
    """


class SaturationWarning(UserWarning):
    """A number in a block of elements with one scale is too large for the format, or is not finite.

    Of its neighbours in the block second moments are raised, and first moments and weights become
    zero, until the number is small again; an infinite second moment stays for good.

    Raised once for each tensor: when an optimizer gives its state dict, which reads all numbers
    anyway, by `mcf.EDQ` on measured steps, and by every 16th step where a scale of a block is the
    largest. Other steps read no numbers.

    On measured steps, and on every 256th one where a scale is 20 binades above their mean, it is
    also raised if a number is not too large for the format, but for its
    block: most second moments beside it are raised to the smallest number of the block, and their
    weights hardly move until the large one has decayed.
    """


class ZeroMomentWarning(UserWarning):
    """A second moment is zero, the first moment is not, and the weight moves by 100 learning rates.

    The optimizer divides by its eps alone. Squares of gradients below 2^-25 are zero in `float16`
    and in `fp16x2`, whose tails end there. Raised once for each state, by `mcf.EDQ` on measured
    steps. Without it, raised by the step that makes the states, if some of them are zero where
    gradients are not.
    """


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, with the first frame outside of torch and this package as the place."""
    level, frame = 3, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.", "mcftensor.", "contextlib")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    warn_of_plain_parameters(optimizer)
    if optimizer not in _detached:
        _warn_of_detached(optimizer, args, kwargs)


calls.before_step = _before_step


# ----------------------------------------------------------------------------- plain parameters

_over_expansions: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have stepped expansions."""
_told: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()


def warn_of_plain_parameters(optimizer: Optimizer) -> None:
    """Warn of the plain parameters of an optimizer by name, unless an override keeps them plain."""
    if torch.compiler.is_compiling():
        return
    name, has_stepped = type(optimizer).__name__, optimizer in _over_expansions
    if KEPT and (kept := rounded(parameters_of(optimizer))):
        _, p, format = kept[0]
        warn(
            f"{name}: {some([x for x, *_ in kept], 1)} were loaded from expansions in "
            f"{format.name} and are plain {p.dtype}, so they were rounded, and the run that was "
            "saved goes on with other bits. To go on with all terms, call mcf.as_expansion(model) "
            "after load_state_dict, or before it; if plain weights are meant, mcf.as_plain(model)",
            PlainParameterWarning,
        )
    left = {} if optimizer in CHECKED else _left_plain(optimizer)
    if left:
        warn(
            f"{name} has stepped expansions, and {some(left, 1)} are plain "
            f"{next(iter(left.values())).dtype} since mcf.as_plain(model), which converts in "
            "place. To export a model in training, convert a copy: "
            "mcf.as_plain(copy.deepcopy(model)). To go on with plain weights, make the optimizer "
            "anew",
            PlainParameterWarning,
        )
    others = [p for p in parameters_of(optimizer) if not isinstance(p, MCFTensor)]
    plain = [p for p in others if p.dtype in NARROW and p.requires_grad and format_of(p) is None]
    told = _told.setdefault(optimizer, set()) if plain else set()
    new = [p for p in plain if id(p) not in told]
    if not new:
        return
    told.update(map(id, new))
    modules = convert.converted_modules()
    names = {id(p): name for m in modules for name, p in m.named_parameters()}
    meant = {id(p) for m in modules for p in convert.left_plain(m)}
    new = [p for p in new if id(p) not in meant]
    is_late = has_stepped and not left
    entered = [p for p in new if is_moved(p) or (is_late and id(p) not in names)]
    if entered:
        found = some(names.get(id(p), f"one of shape {tuple(p.shape)}") for p in entered)
        warn(
            f"{name}: parameters are plain {entered[0].dtype}, where small updates are lost, and "
            f"are made of expansions or came in beside them: {found}. Outside of a step torch.cat, "
            "torch.where and others move leading terms alone if a plain tensor is among their "
            "operands. To keep the format and all terms, give them values: "
            "nn.Parameter(torch.cat([mcf.as_expansion(p), new]))",
            PlainParameterWarning,
        )
    new = [p for p in new if id(p) in names and not any(p is q for q in entered)]
    if new:
        warn(
            f"{name}: parameters of a model of expansions are plain {new[0].dtype}, where small "
            f"updates are lost: {some(names[id(p)] for p in new)}. They were frozen when the model "
            "was converted, or are new. Call mcf.as_expansion(model) again, which converts just "
            "these, or leave them as they are by overrides",
            PlainParameterWarning,
        )


def _left_plain(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters that became plain since the optimizer was made or stepped."""
    had_expansions = optimizer in _over_expansions or "_collage" in optimizer.__dict__
    names = convert.left_expansions() if had_expansions else {}
    if has_expansions(optimizer):
        _over_expansions.add(optimizer)
    CHECKED.add(optimizer)
    own = ((names.get(id(p)), p) for p in parameters_of(optimizer))
    return {name: p for name, p in own if name is not None and format_of(p) is None}


# -------------------------------------------------------------------------- detached parameters

_detached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that the warning has been raised for."""


def _warn_of_detached(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    chosen = list(looked_at(optimizer))
    gone = [p for p in chosen if _is_gone(p)]
    if any(p.grad is not None for p in chosen):  # others have theirs by now
        held = ((p, holder_of(p)) for p in chosen if p.grad is None)
        gone += [p for p, own in held if own is not None and own[0]() is None]
    if gone:
        found = f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} no longer in the module"
    elif _has_gradients(optimizer, args, kwargs):
        return
    elif named := [p for p in parameters_of(optimizer) if _holder(p) is not None]:
        found = f"none of its parameters has a gradient: {_names(named)}"
    else:
        return
    _detached.add(optimizer)
    warn(
        f"{type(optimizer).__name__}: {found}. The step does not train a model whose parameters "
        "were made anew since, as by setattr(module, name, nn.Parameter(...)). Write to parameters "
        "in place, or convert with mcf.as_expansion(model) and make the optimizer again",
        DetachedParameterWarning,
    )


def _holder(p: Any) -> Any:
    """Return the module that owned a parameter at its conversion, if it exists, and the name."""
    held = holder_of(p)
    owner = None if held is None else held[0]()
    return None if held is None or owner is None else (owner, held[1])


def _is_gone(p: Any) -> bool:
    """Return whether the module that owned p at its conversion exists and no longer owns it."""
    holder = _holder(p)
    if holder is None or is_held(p):
        return False
    # It may have moved, as parametrizations do it.
    for module in [holder[0], *convert.converted_modules()]:
        for part in module.modules():
            for name, own in part._parameters.items():
                if own is p:
                    vars(p)["_holder"] = weakref.ref(part), name, id(p)
                    return False
    return True


def _has_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether a gradient is there, or will be by a closure, or was and has stepped in backward."""
    own = optimizer._optimizer_step_pre_hooks.values()
    return (
        any(p.grad is not None for p in parameters_of(optimizer))
        or any(callable(x) for x in (*args, *kwargs.values()))
        or any(isinstance(getattr(hook, "__self__", None), Handle) for hook in own)
    )


def _names(parameters: Iterable[Tensor]) -> str:
    """Return the first three names, as their modules call them."""
    paths = {
        id(part): f"{path}." if path else ""
        for module in convert.converted_modules()
        for path, part in module.named_modules()
    }
    held = [own for own in map(holder_of, parameters) if own is not None]
    return some(paths.get(id(reference()), "") + name for reference, name in held)


# -------------------------------------------------------------------------------- narrow states

_REPAIRS = {
    False: "If it has an option for their dtype, give float32",
    True: "They are from before mcf.as_expansion(model), or were made in the dtype of a gradient: "
    "call mcf.collage(optimizer, {mode!r}), which converts states that exist",
}
"""By whether a state has the shape of its parameter."""


def _after_step(optimizer: Optimizer) -> None:
    """Warn of narrow states after a step that has made states, or makes none.

    A state in the shape of its parameter is an expansion, or plain because a mode says so, or a
    copy of the gradient, or from before the conversion of its parameter, or made in the dtype of
    its gradient.
    """
    if not optimizer.state and all(p.grad is None for p in parameters_of(optimizer)):
        return
    STEPS[optimizer] = 0
    has_mode = "_collage" in optimizer.__dict__
    found = {
        (name, x.shape == p.shape): x.dtype
        for p, state in optimizer.state.items()
        if isinstance(p, Tensor) and format_of(p) and isinstance(state, dict)
        for name, value in state.items()
        for x in tree_leaves(value)
        if type(x) is Tensor and x.dtype in NARROW
        if x.shape != p.shape or not (has_mode or _is_gradient(x, p))
    }
    _warn_of_narrow_rate(optimizer)
    _warn_of_vanished(optimizer)
    if found:
        states = sorted(found.items(), key=str)
        told = ", ".join(f"{name} ({str(dtype)[6:]})" for (name, _), dtype in states)
        moments = {name for name, is_like in found if is_like}
        mode = "plus" if moments <= SECOND_MOMENTS else "full"  # the first leaves others plain
        repairs = ". ".join(_REPAIRS[kind] for kind in sorted({like for _, like in found}))
        repairs = repairs.format(mode=mode)
        warn(
            f"{type(optimizer).__name__} keeps states in 16 bits beside parameters that are "
            f"expansions: {told}. What they sum or average loses small changes. {repairs}",
            NarrowStateWarning,
        )


def _is_gradient(x: Tensor, p: Tensor) -> bool:
    """Return whether a state is the gradient of this step, or its negative, which loses nothing."""
    g = p.grad
    if type(g) is not Tensor or g.dtype != x.dtype or g.shape != x.shape or is_fake(g):
        return False
    return torch.equal(x, g) or torch.equal(x, -g)


def _warn_of_vanished(optimizer: Optimizer) -> None:
    """Warn of second moments in two float16 terms that are zero beside gradients that are not."""
    found: dict[str, Format] = {}
    for name, _, p in named_parameters_of(optimizer):
        state, g = optimizer.state.get(p), None if p.grad is None else local(p.grad)
        own = state if isinstance(state, dict) else {}
        for key in SECOND_MOMENTS & own.keys():
            x = local(own[key])
            format = format_of(x)
            if format is None or format.shared or format.dtype is not torch.float16:
                continue
            if type(g) is not Tensor or g.shape != x.shape or is_fake(g) or g.is_meta:
                continue
            if bool(((x.detach() == 0) & (g != 0)).any()):
                found[f"{key} of {name}"] = format
    if found:
        warn(
            f"{type(optimizer).__name__}: second moments in {next(iter(found.values())).name} are "
            f"zero where gradients are not, since the square is below the range of the format, and "
            f"weights will move by many learning rates: {some(found)}. {_RANGE}",
            ZeroMomentWarning,
        )


_RANGE = (
    "Keep them in a format with the range of float32: mcf.collage(optimizer, 'compact'), or "
    "weights in mcf.fp16i16"
)


def _warn_of_narrow_rate(optimizer: Optimizer) -> None:
    """Warn of a learning rate that rounds to itself when a schedule multiplies it."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    narrow = [x.dtype for x in rates if isinstance(x, Tensor) and x.dtype in NARROW]
    if narrow and has_expansions(optimizer):
        warn(
            f"{type(optimizer).__name__}: the learning rate is a tensor of {narrow[0]}. A schedule "
            "that changes it by less than its resolution a step, such as a factor of 0.999, leaves "
            "it as it is. Give a number, or a tensor of torch.float32",
            NarrowStateWarning,
        )


# -------------------------------------------------------------------------------- saturation

# Elements that are decoded together.
_PART = 1 << 20


def saturated_blocks(x: Tensor) -> Tensor | None:
    """Count the blocks with a number that is not finite, or is the largest of the format.

    Args:
        x: a tensor, whose blocks on this rank are counted.

    Returns:
        The count as an int64 without dimensions on the device of x, without synchronization;
        None if elements share no scales.
    """
    x = local(x.detach())
    if not isinstance(x, MCFTensor) or not x.format.shared or is_fake(x) or x.is_meta:
        return None
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    limit = _largest(x.format)
    for numbers in _parts(x):
        total += block_max((~(numbers.abs() < limit)).to(torch.int32)).sum()
    return total


def raised_blocks(x: Tensor) -> Tensor | None:
    """Count the blocks with most elements raised to the smallest number beside the largest.

    Args:
        x: a tensor, whose blocks on this rank are counted.

    Returns:
        The count as an int64 without dimensions on the device of x, without synchronization;
        None if small elements round to zero, or elements share no scales.
    """
    x = local(x.detach())
    if not isinstance(x, MCFTensor) or not x.format.shared or is_fake(x) or x.is_meta:
        return None
    smallest = _smallest(x.format)
    if not smallest:
        return None
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for numbers in _parts(x):
        # Floats that are not negative have the order of their patterns.
        largest = block_max(numbers.view(torch.int32)).view(torch.float32)
        raised = (numbers > 0) & (numbers <= 2 * smallest * spread(largest, numbers))
        rows = raised.flatten(1)
        rows = F.pad(rows, (0, -rows.shape[1] % BLOCK_SIZE))
        total += (rows.unflatten(1, (-1, BLOCK_SIZE)).sum(2) > BLOCK_SIZE // 2).sum()
    return total


def _parts(x: MCFTensor) -> Iterator[Tensor]:
    """Yield the decoded numbers, whole rows at a time."""
    rows = max(1, _PART // max(1, x.numel() // max(1, x.shape[0])))
    for part in zip(*(y.split(rows) for y in x._read()), strict=True):
        (numbers,) = x.format.decode(part)
        yield numbers


def _look_at_scales(optimizer: Optimizer) -> None:
    """Warn of states with saturated blocks, which are looked for where a scale is the largest, and
    with raised ones, where a scale is far from the others.

    Scales are a thirty-third of the bytes of a state.
    """
    if torch.compiler.is_compiling():
        return
    held = {name: local(x) for name, x in _tensors_of(optimizer).items()}
    found = {
        name: x
        for name, x in held.items()
        if isinstance(x, MCFTensor) and x.format.shared and x.numel() and not x.is_meta
    }
    if not found or any(map(is_fake, found.values())):
        return
    # A view, or `x.components`, would have the next step copy what it may write in place.
    scales = [x._held()[i].float() for x in found.values() for i in x.format.shared]
    largest = torch.stack(torch._foreach_max(scales)).tolist()
    means = torch.stack([y.mean() for y in scales]).tolist()
    at_limit: dict[str, tuple[int, Tensor]] = {}
    apart: dict[str, tuple[int, Tensor]] = {}
    for (name, x), most, mean in zip(found.items(), largest, means, strict=True):
        if most >= _largest_scale(x.format):
            at_limit[name] = int(saturated_blocks(x)), x  # type: ignore[arg-type]
        elif most - mean > _APART and STEPS[optimizer] % _SELDOM == 0:
            count = raised_blocks(x)
            apart[name] = 0 if count is None else int(count), x
    warn_of_saturation(optimizer, at_limit)
    warn_of_raised(optimizer, apart)


_APART, _SELDOM = 20, 256
"""Binades between the largest scale and their mean, and steps, after which numbers are read."""


@functools.lru_cache(maxsize=64)
def _largest_scale(format: Format) -> int:
    """Return the scale of a block with the largest number of a format."""
    (place,) = format.shared
    return int(format.nearest.encode(Sum([_most()]), None)[place].max())


def _most() -> Tensor:
    return torch.full((1, BLOCK_SIZE), torch.finfo(torch.float32).max, device="cpu")


@functools.lru_cache(maxsize=64)
def _largest(format: Format) -> float:
    """Return the number at which a format saturates."""
    return float(format.decode(format.nearest.encode(Sum([_most()]), None))[0].amax())


@functools.lru_cache(maxsize=64)
def _smallest(format: Format) -> float:
    """Return the number that 1e-30 becomes beside a 1, or 0 if it rounds to zero."""
    beside = torch.full((1, BLOCK_SIZE), 1e-30, device="cpu")
    beside[0, 0] = 1.0
    return float(format.decode(format.nearest.encode(Sum([beside]), None))[0][0, 1])


_warned: weakref.WeakKeyDictionary[Optimizer, set[tuple[str, str]]] = weakref.WeakKeyDictionary()


def warn_of_saturation(optimizer: Optimizer, found: Mapping[str, tuple[int, Tensor]]) -> None:
    """Warn of tensors of an optimizer with saturated blocks, each by its name and count."""
    if text := _new_blocks(optimizer, "saturated", found):
        warn(
            f"{type(optimizer).__name__}: numbers are too large for their format, or not finite: "
            f"{text}. Neighbours in a block of 32 hardly move while this lasts. {_REPAIR}",
            SaturationWarning,
        )


def warn_of_raised(optimizer: Optimizer, found: Mapping[str, tuple[int, Tensor]]) -> None:
    """Warn of second moments in blocks with most elements raised, each by its name and count."""
    if text := _new_blocks(optimizer, "raised", found):
        warn(
            f"{type(optimizer).__name__}: beside one large number, most second moments of a block "
            f"of 32 are raised to the smallest number that its scale allows: {text}. Their weights "
            f"hardly move until the large one has decayed. {_REPAIR}",
            SaturationWarning,
        )


_REPAIR = (
    "Clip gradients, look for the step whose gradient was that large, and drop the states of these "
    "parameters, or keep them in mcf.bf16i16: mcf.collage(optimizer, {'exp_avg_sq': mcf.bf16i16})"
)


def _new_blocks(
    optimizer: Optimizer, kind: str, found: Mapping[str, tuple[int, Tensor]]
) -> str | None:
    """Return a text about the tensors that were not warned of before."""
    new = _new(optimizer, kind, {name: x for name, x in found.items() if x[0]})
    parts = [
        f"{name} of shape {tuple(x.shape)} in {local(x).format.name}: {count} "  # type: ignore[attr-defined]
        f"block{'s' * (count > 1)}"
        for name, (count, x) in list(new.items())[:5]
    ]
    parts += [f"and {len(new) - 5} more"] * (len(new) > 5)
    return "; ".join(parts) or None


def _new(optimizer: Optimizer, kind: str, found: Mapping[str, T]) -> dict[str, T]:
    """Return what was not warned of before; from now on it was."""
    known = _warned.setdefault(optimizer, set())
    new = {name: x for name, x in found.items() if (kind, name) not in known}
    known.update((kind, name) for name in new)
    return new


def warn_of_zeros(optimizer: Optimizer, found: Mapping[str, tuple[float, Tensor]]) -> None:
    """Warn of second moments that are zero, each by its name and the largest movement."""
    new = _new(optimizer, "zero", found)
    if not new:
        return
    largest, x = max(new.values(), key=lambda pair: pair[0])
    format = any_format_of(x)
    kind = format.name if format else str(x.dtype).removeprefix("torch.")
    warn(
        f"{type(optimizer).__name__}: second moments in {kind} are zero where first moments are "
        f"not, and a weight moved by {largest:.0f} learning rates, since the step divides by eps "
        f"alone: {some(new)}. {_RANGE}",
        ZeroMomentWarning,
    )


def _tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters and states of an optimizer by their names."""
    tensors: dict[str, Any] = {}
    for name, _, p in named_parameters_of(optimizer):
        own = optimizer.state.get(p)
        states = own if isinstance(own, dict) else {}
        tensors |= {name: p, **{f"{key} of {name}": x for key, x in states.items()}}
    return {name: x for name, x in tensors.items() if isinstance(x, Tensor)}


def _check_when_saved(optimizer: Optimizer) -> None:
    """Look at all states and parameters of an optimizer that gives its state dict."""
    if torch.compiler.is_compiling():
        return
    tensors = _tensors_of(optimizer)
    counts = {name: saturated_blocks(x) for name, x in tensors.items()}
    found = {name: (int(n), tensors[name]) for name, n in counts.items() if n is not None}
    warn_of_saturation(optimizer, found)


calls.after_step = _after_step
calls.now_and_then = _look_at_scales
calls.when_saved = _check_when_saved
