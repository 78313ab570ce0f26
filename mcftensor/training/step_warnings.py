"""Warnings of steps, and of states, that are not as a training over expansions is meant to be."""

from __future__ import annotations

import functools
import itertools
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
from mcftensor.checkpoint.module_hooks import rounded
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels.block_scales import BLOCK_SIZE, block_max, spread
from mcftensor.patches.optimizers import (
    CHECKED,
    STEPS,
    has_expansions,
    looked_at,
    named_parameters_of,
    parameters_of,
    plan_of,
)
from mcftensor.patches.table import calls
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import (
    any_format_of,
    format_of,
    holder_of,
    is_held,
    local,
    stored_format_of,
)
from mcftensor.tensor.implicit_rounding import is_moved
from mcftensor.training.gradient_hooks import Handle
from mcftensor.training.state_names import SECOND_MOMENTS

K = TypeVar("K")
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


_warned: weakref.WeakKeyDictionary[Optimizer, set[tuple[str, Any]]] = weakref.WeakKeyDictionary()
"""The kinds of warnings that an optimizer has had, and the parameter or state of each."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, with the first frame outside of torch and this package as the place."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.", "mcftensor.", "contextlib")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _new(optimizer: Optimizer, kind: str, found: Mapping[K, T]) -> dict[K, T]:
    """Return what was not warned of before; from now on it was."""
    known = _warned.setdefault(optimizer, set())
    new = {name: x for name, x in found.items() if (kind, name) not in known}
    known.update((kind, name) for name in new)
    return new


# ----------------------------------------------------------------------------- plain parameters

_over_expansions: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have stepped expansions."""


def warn_of_plain_parameters(optimizer: Optimizer) -> None:
    """Warn of the plain parameters of an optimizer by name, unless an override keeps them plain."""
    if torch.compiler.is_compiling():
        return
    caller, has_stepped = type(optimizer).__name__, optimizer in _over_expansions
    if kept := rounded(parameters_of(optimizer)):
        _, p, format = kept[0]
        warn(
            f"{caller}: {some([name for name, *_ in kept], 1)} were loaded from expansions in "
            f"{format.name} and are plain {p.dtype}, so they were rounded, and the run that was "
            "saved goes on with other bits. To go on with all terms, call mcf.as_expansion(model) "
            "after load_state_dict, or before it; if plain weights are meant, mcf.as_plain(model)",
            PlainParameterWarning,
        )
    again = {} if optimizer in CHECKED else _plain_again(optimizer)
    if again:
        warn(
            f"{caller} has stepped expansions, and {some(again, 1)} are plain "
            f"{_dtype_of(again)} since mcf.as_plain(model), which converts in place. To export a "
            "model in training, convert a copy: mcf.as_plain(copy.deepcopy(model)). To go on with "
            "plain weights, make the optimizer anew",
            PlainParameterWarning,
        )
    plain = {
        id(p): p
        for p in parameters_of(optimizer)
        if any_format_of(p) is None and p.dtype in NARROW and p.requires_grad
    }
    new = _new(optimizer, "plain", plain)
    if not new:
        return
    modules = convert.converted_modules()
    names = {id(p): name for m in modules for name, p in m.named_parameters()}
    for p in itertools.chain.from_iterable(map(convert.left_plain, modules)):
        new.pop(id(p), None)
    is_late = has_stepped and not again
    made = {i: p for i, p in new.items() if is_moved(p) or (is_late and i not in names)}
    if made:
        found = some(names.get(i, f"one of shape {tuple(p.shape)}") for i, p in made.items())
        warn(
            f"{caller}: parameters are plain {_dtype_of(made)}, where small updates are lost, and "
            f"are made of expansions or came in beside them: {found}. Outside of a step torch.cat, "
            "torch.where and others move leading terms alone if a plain tensor is among their "
            "operands. To keep the format and all terms, give them values: "
            "nn.Parameter(torch.cat([mcf.as_expansion(p), new]))",
            PlainParameterWarning,
        )
    left = {i: p for i, p in new.items() if i in names and i not in made}
    if left:
        warn(
            f"{caller}: parameters of a model of expansions are plain {_dtype_of(left)}, where "
            f"small updates are lost: {some(names[i] for i in left)}. They were frozen when the "
            "model was converted, or are new. Call mcf.as_expansion(model) again, which converts "
            "just these, or leave them as they are by overrides",
            PlainParameterWarning,
        )


def _dtype_of(found: Mapping[Any, Tensor]) -> torch.dtype:
    return next(iter(found.values())).dtype


def _plain_again(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters that became plain since the optimizer was made or stepped."""
    had_expansions = optimizer in _over_expansions or plan_of(optimizer) is not None
    names = convert.left_expansions() if had_expansions else {}
    if has_expansions(optimizer):
        _over_expansions.add(optimizer)
    CHECKED.add(optimizer)
    own = ((names.get(id(p)), p) for p in parameters_of(optimizer))
    return {name: p for name, p in own if name is not None and format_of(p) is None}


# -------------------------------------------------------------------------- detached parameters


def _warn_of_detached(optimizer: Optimizer, arguments: Iterable[object]) -> None:
    if ("detached", None) in _warned.get(optimizer, ()):
        return
    chosen = list(looked_at(optimizer))
    gone = [p for p in chosen if _is_gone(p)]
    if any(p.grad is not None for p in chosen):  # others have theirs by now
        held = ((p, holder_of(p)) for p in chosen if p.grad is None)
        gone += [p for p, own in held if own is not None and own[0]() is None]
    if gone:
        found = f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} no longer in the module"
    elif _has_gradients(optimizer, arguments):
        return
    elif named := [p for p in parameters_of(optimizer) if _holder(p) is not None]:
        found = f"none of its parameters has a gradient: {_names(named)}"
    else:
        return
    _new(optimizer, "detached", {None: found})
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


def _has_gradients(optimizer: Optimizer, arguments: Iterable[object]) -> bool:
    """Whether a gradient is there, or will be by a closure, or was and has stepped in backward."""
    own = optimizer._optimizer_step_pre_hooks.values()
    return (
        any(p.grad is not None for p in parameters_of(optimizer))
        or any(map(callable, arguments))
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


def _warn_of_narrow_states(optimizer: Optimizer) -> None:
    """Warn of narrow states after a step that has made states, or makes none.

    A state in the shape of its parameter is an expansion, or plain because a mode says so, or a
    copy of the gradient, or from before the conversion of its parameter, or made in the dtype of
    its gradient.
    """
    has_mode = plan_of(optimizer) is not None
    found = {
        (name, x.shape == p.shape): x.dtype
        for p, state in optimizer.state.items()
        if isinstance(p, Tensor) and format_of(p) and isinstance(state, dict)
        for name, value in state.items()
        for x in tree_leaves(value)
        if type(x) is Tensor and x.dtype in NARROW
        if x.shape != p.shape or not (has_mode or _is_gradient(x, p))
    }
    if found:
        states = sorted(found.items(), key=str)
        moments = {name for name, is_like in found if is_like}
        mode = "plus" if moments <= SECOND_MOMENTS else "full"  # the first leaves others plain
        repairs = ". ".join(_REPAIRS[kind] for kind in sorted({like for _, like in found}))
        warn(
            f"{type(optimizer).__name__} keeps states in 16 bits beside parameters that are "
            f"expansions: {', '.join(f'{name} ({PLAIN[x].name})' for (name, _), x in states)}. "
            f"What they sum or average loses small changes. {repairs.format(mode=mode)}",
            NarrowStateWarning,
        )


def _is_gradient(x: Tensor, p: Tensor) -> bool:
    """Return whether a state is the gradient of this step, or its negative, which loses nothing."""
    g = p.grad
    if type(g) is not Tensor or g.dtype != x.dtype or g.shape != x.shape or is_fake(g):
        return False
    return torch.equal(x, g) or torch.equal(x, -g)


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


# ---------------------------------------------------------- states that their formats do not hold

_RANGE = (
    "Keep them in a format with the range of float32: mcf.collage(optimizer, 'compact'), or "
    "weights in mcf.fp16i16"
)
_CLIP = (
    "Clip gradients, look for the step whose gradient was that large, and drop the states of these "
    "parameters, or keep them in mcf.bf16i16: mcf.collage(optimizer, {'exp_avg_sq': mcf.bf16i16})"
)

_UNHELD = {
    "saturated": (
        SaturationWarning,
        "numbers are too large for their format, or not finite: {blocks}. Neighbours in a block of "
        "32 hardly move while this lasts",
        _CLIP,
    ),
    "raised": (
        SaturationWarning,
        "beside one large number, most second moments of a block of 32 are raised to the smallest "
        "number that its scale allows: {blocks}. Their weights hardly move until the large one has "
        "decayed",
        _CLIP,
    ),
    "zero": (
        ZeroMomentWarning,
        "second moments in {format} are zero where first moments are not, and a weight moved by "
        "{largest:.0f} learning rates, since the step divides by eps alone: {names}",
        _RANGE,
    ),
}
"""What a format does not hold: the category, the sentence and the repair."""

Unheld = Mapping[str, Mapping[str, tuple[float, Tensor]]]
"""By kinds of these and by names: the number of blocks, or the largest movement in learning rates;
and the tensor."""


def warn_of_unheld(optimizer: Optimizer, unheld: Unheld) -> None:
    """Warn of tensors that their formats do not hold, once of each; figures of 0 are left out."""
    for kind, found in unheld.items():
        new = _new(optimizer, kind, {name: pair for name, pair in found.items() if pair[0]})
        if new:
            category, sentence, repair = _UNHELD[kind]
            largest, x = max(new.values(), key=lambda pair: pair[0])
            blocks = [
                f"{name} of shape {tuple(x.shape)} in {stored_format_of(x).name}: {n} "
                f"block{'s' * (n > 1)}"
                for name, (n, x) in new.items()
            ]
            format = stored_format_of(x).name
            told = sentence.format(
                blocks=some(blocks, 5), names=some(new), largest=largest, format=format
            )
            warn(f"{type(optimizer).__name__}: {told}. {repair}", category)


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


_APART, _SELDOM = 20, 256
"""Binades between the largest scale and their mean, and steps, after which numbers are read."""


def _look_at_scales(optimizer: Optimizer) -> None:
    """Warn of states with saturated blocks, which are looked for where a scale is the largest, and
    with raised ones, where a scale is far from the others.

    Scales are a thirty-third of the bytes of a state.
    """
    own = {name: _in_blocks(x) for name, x in _tensors_of(optimizer).items()}
    found = {name: x for name, x in own.items() if x is not None and x.numel()}
    if not found:
        return
    # A view, or `x.components`, would have the next step copy what it may write in place.
    scales = [x._held()[i].float() for x in found.values() for i in x.format.shared]
    largest = torch.stack(torch._foreach_max(scales)).tolist()
    means = torch.stack([y.mean() for y in scales]).tolist()
    unheld: dict[str, dict[str, tuple[float, Tensor]]] = {"saturated": {}, "raised": {}}
    for (name, x), most, mean in zip(found.items(), largest, means, strict=True):
        if most >= _extremes(x.format)[0]:
            unheld["saturated"][name] = int(saturated_blocks(x) or 0), x
        elif most - mean > _APART and STEPS[optimizer] % _SELDOM == 0:
            unheld["raised"][name] = int(raised_blocks(x) or 0), x
    warn_of_unheld(optimizer, unheld)


def _look_at_all(optimizer: Optimizer) -> None:
    """Warn of states and parameters with saturated blocks."""
    if torch.compiler.is_compiling():
        return
    tensors = _tensors_of(optimizer)
    found = {name: (int(saturated_blocks(x) or 0), x) for name, x in tensors.items()}
    warn_of_unheld(optimizer, {"saturated": found})


def _tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters and states of an optimizer by their names."""
    tensors: dict[str, Any] = {}
    for name, _, p in named_parameters_of(optimizer):
        own = optimizer.state.get(p)
        states = own if isinstance(own, dict) else {}
        tensors |= {name: p, **{f"{key} of {name}": x for key, x in states.items()}}
    return {name: x for name, x in tensors.items() if isinstance(x, Tensor)}


# ----------------------------------------------------------------------------- counts of blocks

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
    own = _in_blocks(x)
    if own is None:
        return None
    limit = _extremes(own.format)[1]
    saturated = (block_max((~(part.abs() < limit)).to(torch.int32)).sum() for part in _parts(own))
    return sum(saturated, start=torch.zeros((), dtype=torch.int64, device=own.device))


def raised_blocks(x: Tensor) -> Tensor | None:
    """Count the blocks with most elements raised to the smallest number beside the largest.

    Args:
        x: a tensor, whose blocks on this rank are counted.

    Returns:
        The count as an int64 without dimensions on the device of x, without synchronization;
        None if small elements round to zero, or elements share no scales.
    """
    own = _in_blocks(x)
    smallest = 0.0 if own is None else _extremes(own.format)[2]
    if own is None or not smallest:
        return None
    total = torch.zeros((), dtype=torch.int64, device=own.device)
    for numbers in _parts(own):
        # Floats that are not negative have the order of their patterns.
        largest = block_max(numbers.view(torch.int32)).view(torch.float32)
        raised = (numbers > 0) & (numbers <= 2 * smallest * spread(largest, numbers))
        rows = raised.flatten(1)
        rows = F.pad(rows, (0, -rows.shape[1] % BLOCK_SIZE))
        total += (rows.unflatten(1, (-1, BLOCK_SIZE)).sum(2) > BLOCK_SIZE // 2).sum()
    return total


def _in_blocks(x: Tensor) -> MCFTensor | None:
    """Return this rank's part of a tensor with data whose elements share scales, or None."""
    x = local(x)
    if not isinstance(x, MCFTensor) or not x.format.shared or is_fake(x) or x.is_meta:
        return None
    return x


def _parts(x: Any) -> Iterator[Tensor]:
    """Yield the decoded numbers, whole rows at a time."""
    rows = max(1, _PART // max(1, x.numel() // max(1, x.shape[0])))
    for part in zip(*(y.split(rows) for y in x.detach()._read()), strict=True):
        (numbers,) = x.format.decode(part)
        yield numbers


@functools.lru_cache(maxsize=64)
def _extremes(format: Format) -> tuple[int, float, float]:
    """Return the largest scale of a block, the largest number, and the number that 1e-30 becomes
    beside a 1, which is 0 if it rounds to zero.
    """
    x = torch.full((2, BLOCK_SIZE), 1e-30, device="cpu")
    x[0], x[1, 0] = torch.finfo(torch.float32).max, 1.0
    components = format.nearest.encode(Sum([x]), None)
    (numbers,) = format.decode(components)
    (place,) = format.shared
    return int(components[place].max()), float(numbers.amax()), float(numbers[1, 1])


# ------------------------------------------------------------------------------------------ hooks


def _before_step(optimizer: Optimizer, *arguments: Any) -> None:
    warn_of_plain_parameters(optimizer)
    _warn_of_detached(optimizer, arguments)


def _after_step(optimizer: Optimizer) -> None:
    _warn_of_narrow_rate(optimizer)
    _warn_of_vanished(optimizer)
    _warn_of_narrow_states(optimizer)


calls.before_step = _before_step
calls.after_step = _after_step
calls.now_and_then = _look_at_scales
calls.when_saved = _look_at_all
