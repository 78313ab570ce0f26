"""Collage modes: which states of a stock optimizer are expansions."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mcftensor.convert import as_expansion, as_plain
from mcftensor.dispatch.operands import as_state
from mcftensor.formats import PLAIN, Format, SecondMoments, for_shape, require_format
from mcftensor.passes.optimizer_steps import RULES
from mcftensor.patches.optimizers import (
    breaks_graphs,
    have_states_made_by_plan,
    is_of_torch,
    parameters_of,
    plan_of,
)
from mcftensor.patches.table import calls
from mcftensor.tensor.components import any_format_of, format_of, stored_format_of
from mcftensor.training.shadow import CannotShadow, plain_step, trial_of, trying
from mcftensor.training.state_names import FIRST_MOMENTS, SECOND_MOMENTS, WIDE, compact_format
from mcftensor.training.step_warnings import warn_of_plain_parameters

Opt = TypeVar("Opt", bound=Optimizer)
Mode = str | Mapping[str, Format | str | None]

# Choices for a state, other than plain (None), a given format, or the bits of codes.
_OWN = "expansion in the format of the parameter"
_FUSED = tuple(rule.optimizer for rule in RULES.values())
_MODES: dict[str, dict[str, Any]] = {
    "light": dict.fromkeys(FIRST_MOMENTS | SECOND_MOMENTS),
    "plus": dict.fromkeys(FIRST_MOMENTS)
    | dict.fromkeys(SECOND_MOMENTS, _OWN)
    | {"momentum_buffer": _OWN},  # which is the update, and not divided by another moment
    "full": {},
    "compact": dict.fromkeys(FIRST_MOMENTS | SECOND_MOMENTS, 8),
    "compact4": dict.fromkeys(FIRST_MOMENTS | SECOND_MOMENTS, 4),
}


def collage(optimizer: Opt, mode: Mode) -> Opt:
    r"""Choose the states of an optimizer that are expansions, and return the optimizer.

    If the parameters are expansions (`as_expansion`), the states that a stock optimizer creates by
    `torch.zeros_like` are expansions too. A mode changes that:

    - `"light"`: first and second moments are plain tensors of the base dtype;
    - `"plus"`: second moments are expansions, first moments plain. A plain bf16 second moment
      cannot decay at $\beta_2 = 0.999$, which rounds to 1. A `momentum_buffer`, such as SGD's, is
      an expansion too, because it is the update itself;
    - `"compact"`: first moments are in `mxfp8` and second moments in `ue5m3`, of one byte. States
      that need more than one byte are in `bf16i16`, which is float32: the states of vectors,
      Adagrad's `sum`, the averages of a centered RMSprop, and `v`, which is a second moment in
      some packages and a velocity in others. The largest second moment of AMSGrad rounds to
      nearest. In a for-loop or foreach step that `torch.compile` traces as one graph, states are
      rounded twice, and second moments become 3 % too low at a $\beta_2$ of 0.999;
    - `"compact4"`: as `"compact"`, with first moments in `q4` and second moments in `ue4`, of
      half a byte. Tensors with an odd second dimension have those of `"compact"`;
    - `"full"`: every state of the parameter's shape is an expansion, also if the optimizer
      creates it from the gradient, like SGD's momentum buffer;
    - a dict from names of states to formats. None makes a state plain; other states stay as the
      optimizer creates them. If the format has one byte, the states of vectors are in `bf16i16`.

    If the class has a fused step (Adam, AdamW, SGD, Adagrad) and neither `foreach` nor `fused` was
    given, `collage` selects the fused path, which is the fastest and rounds least; the optimizer's
    `repr` shows `fused: True`. A group with a sparse gradient leaves the fused path.

    Existing states are converted at once. Others are converted when they are created, or at the
    end of the step that creates them. The mode persists through `load_state_dict` and
    `add_param_group`; another call replaces it. Deep copies and pickles of the optimizer keep it.

    Args:
        optimizer: any `torch.optim.Optimizer` over expansion parameters.
        mode: one of the names above, or a dict from names of states to formats or names of these.

    Returns:
        The same optimizer.

    Raises:
        TypeError: `optimizer` is not an Optimizer, or a wrapper without hooks; a value of the dict
            is not a format.
        ValueError: an unknown mode; no parameter is an expansion; the optimizer has no state of a
            given name (found by a trial step on a dummy parameter; for optimizers outside torch,
            at the end of the first step); a format whose terms have another dtype than the
            parameters, or that cannot store the state.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2))
        >>> opt = mcf.collage(torch.optim.AdamW(model.parameters()), "plus")
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> opt.step()
        >>> state = opt.state[model.weight]
        >>> state["exp_avg"].dtype, state["exp_avg_sq"].format
        (torch.bfloat16, mcf.bf16x2)

    References:
        T. Yu et al., "Collage: Light-Weight Low-Precision Strategy for LLM Training", ICML 2024,
        arXiv:2405.03637.

    !!! warning
        Two things differ from the paper. Weight decay is compensated in every mode. The
        multiplication of the second moment is correct: in the code released with the paper
        it overwrites its own operand, and the moment becomes a third to a half of its value.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"collage: got {type(optimizer).__name__}; give a torch.optim.Optimizer over "
            "parameters that mcf.as_expansion has converted"
        )
    warn_of_plain_parameters(optimizer)
    mode = {**mode} if isinstance(mode, Mapping) else mode  # copies take it up later
    plan = CollagePlan(optimizer, mode, list(map(format_of, parameters_of(optimizer))))
    previous = plan_of(optimizer)
    for handle in previous.handles if previous is not None else ():
        handle.remove()
    optimizer.__dict__["_collage"] = plan
    reference: weakref.ref[Optimizer] = weakref.ref(optimizer)
    optimizer.__dict__["__deepcopy__"] = functools.partial(_deepcopy, reference, mode)
    optimizer.__dict__["__reduce_ex__"] = functools.partial(_reduce, reference, mode)
    plan.attach(optimizer)
    plan.apply(optimizer)
    return optimizer


def mode_of(optimizer: Optimizer) -> str | None:
    """Return the mode that `collage` has given an optimizer, `"by name"` for a dict, or None."""
    plan = plan_of(optimizer)
    return None if plan is None else plan.mode


def _deepcopy(original: weakref.ref[Optimizer], mode: Mode, memo: Any) -> Optimizer:
    """Return a copy of an optimizer, in the same mode."""
    optimizer = original()
    assert optimizer is not None
    own = {name: optimizer.__dict__.pop(name) for name in ("__deepcopy__", "__reduce_ex__")}
    try:
        copied = copy.deepcopy(optimizer, memo)
    finally:
        optimizer.__dict__.update(own)
    return collage(copied, mode)


def _reduce(original: weakref.ref[Optimizer], mode: Mode, protocol: Any) -> tuple[Any, ...]:
    """Return the pickled form of an optimizer: PyTorch's, and the mode."""
    optimizer = original()
    assert optimizer is not None
    reduced: Any = type(optimizer).__reduce_ex__(optimizer, protocol)
    make, arguments, state, *_ = reduced
    return make, arguments, (state, mode), None, None, _restore


def _restore(optimizer: Optimizer, state: tuple[dict[str, Any], Mode]) -> None:
    optimizer.__setstate__(state[0])
    collage(optimizer, state[1])


def _choose_fused(optimizer: Optimizer) -> None:
    """Select torch's fused path for groups without a chosen path, if the class and tensors allow
    it.
    """
    if not (isinstance(optimizer, _FUSED) and is_of_torch(type(optimizer).step)):
        return
    devices = {"cpu"} if isinstance(optimizer, torch.optim.Adagrad) else {"cpu", "cuda"}
    for group in (optimizer.defaults, *optimizer.param_groups):
        parameters = group.get("params", ())
        options = [group.get(name, "none") for name in ("foreach", "fused")]
        if (
            options == [None, None]
            and not group.get("differentiable")
            and len({hasattr(p, "_local_tensor") for p in parameters}) <= 1
            and all(p.device.type in devices and p.is_floating_point() for p in parameters)
        ):
            group["fused"] = True
            for p in parameters:  # torch's fused steps count on the device, in float32
                count = optimizer.state.get(p, {}).get("step")
                if isinstance(count, Tensor):
                    optimizer.state[p]["step"] = count.to(p.device, torch.float32)


class CollagePlan:
    """One mode, and the hooks by which it reaches states that come later."""

    def __init__(
        self, optimizer: Optimizer, mode: Mode, of_parameters: Sequence[Format | None]
    ) -> None:
        # The hooks of some wrappers, such as Accelerate's, are not called after steps or after
        # states are loaded.
        register = type(optimizer).register_load_state_dict_post_hook
        if "_optimizer_step_post_hooks" not in vars(optimizer) or not (
            hasattr(optimizer, "_optimizer_load_state_dict_post_hooks")
            or register is not Optimizer.register_load_state_dict_post_hook
        ):
            raise TypeError(
                f"collage: {type(optimizer).__name__} passes its steps on to another optimizer; "
                "give that one, as by mcf.collage(optimizer.optimizer, mode)"
            )
        formats = [format for format in of_parameters if format]
        if not formats and any(map(any_format_of, parameters_of(optimizer))):
            raise TypeError(
                "collage: the parameters of this optimizer are scaled, and so are its states, by "
                "mcf.scaling.scalify; leave collage out, or take the model back with "
                "mcf.as_plain(model, torch.float32) and convert it with mcf.as_expansion(model)"
            )
        if not formats:
            raise ValueError(
                "collage: no parameter of this optimizer is an expansion; call "
                "mcf.as_expansion(model) first, or again where parameters were frozen when it was "
                "called, or were added to the model since"
            )
        self.mode = mode if isinstance(mode, str) else "by name"
        self.given = mode
        self.unchecked: set[str] = set()
        self.formatted: list[int] = []  # identities of states, which torch's steps compare
        if isinstance(mode, Mapping):
            self.named = {name: _format_given(name, given, formats) for name, given in mode.items()}
            known = {name for state in optimizer.state.values() for name in state}
            known = (known | _trial_names(optimizer)) - {"step"}
            if known:
                _require_known(set(self.named), known)
            else:
                self.unchecked = set(self.named)
        elif isinstance(mode, str) and mode in _MODES:
            self.named = _MODES[mode]
        else:
            raise (ValueError if isinstance(mode, str) else TypeError)(
                f"collage: unknown mode {mode!r}; use 'light', 'plus', 'full', 'compact', "
                "'compact4', or a dict from names of states to formats. Weights' formats go to "
                "mcf.as_expansion(model, format), or mcf.prepare(model, optimizer, format=format)"
            )
        self.makes_plain = None in self.named.values()

    def attach(self, optimizer: Optimizer) -> None:
        """Have the mode reach states that come later."""
        self.handles = [optimizer.register_load_state_dict_post_hook(self.apply)]
        if not breaks_graphs(optimizer):  # torch's own steps see themselves what is new
            apply = self.apply
            self.handles.append(optimizer.register_step_post_hook(lambda own, *_: apply(own)))
        have_states_made_by_plan(type(optimizer))

    def make_states(
        self,
        optimizer: Optimizer,
        initialize: Callable[..., Any],
        group: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Make the states of a group, parameter by parameter, and convert them at once.

        The first step then needs no more memory than the others.
        """
        states = optimizer.state
        is_sgd = isinstance(optimizer, torch.optim.SGD)
        for p in group["params"]:
            format = format_of(p)
            if format is None or states.get(p) or p.grad is None:
                continue
            unused = [[] if isinstance(a, list) else a for a in args]
            initialize(optimizer, {**group, "params": [p]}, *unused, **kwargs)
            self.convert(p, format, states[p])
            # SGD makes its buffer from the first gradient, plain: give it a zero to add that to.
            # With dampening the two are not the same.
            if is_sgd and group["momentum"] and not group["dampening"]:
                wanted = self._wanted("momentum_buffer", p, format)
                if wanted is not None and wanted.arithmetic != "plain":
                    states[p]["momentum_buffer"] = as_expansion(torch.zeros_like(p), wanted)

    def after_initializing(self, optimizer: Optimizer, group: dict[str, Any], found: Any) -> None:
        """Leave the fused path if gradients are sparse, given the result of `_init_group`."""
        if isinstance(optimizer, torch.optim.Adagrad):
            found = found[0]
        if found and isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
            group["fused"] = False

    def apply(self, optimizer: Optimizer) -> None:
        """Bring every state to what the mode says."""
        _choose_fused(optimizer)  # groups may have been added or loaded
        for p, state in optimizer.state.items():
            format = format_of(p)
            if state and format is not None:
                self.convert(p, format, state)

    def _wanted(
        self, name: str, p: Tensor, own: Format, names: Collection[str] = ()
    ) -> Format | None:
        """Return the format of a state, given the names of the others, or None to leave it."""
        if name == "step" or self.leaves(name):
            return None
        choice: Any = self.named.get(name, _OWN)
        if choice is None:
            return PLAIN[own.dtype]
        if choice is _OWN:
            return own.of_states
        if isinstance(choice, int):
            return compact_format(name, p.shape, names, choice)
        return for_shape(choice, p.shape) if choice.packed or p.dim() < 2 else choice

    def leaves(self, name: str) -> bool:
        """Whether the mode leaves a state as the optimizer makes it."""
        return name not in self.named and self.given != "full"

    def convert(self, p: Tensor, own: Format, state: dict[str, Any]) -> None:
        """Bring the states of a parameter in some format to what the mode says."""
        if self.unchecked and state:
            _require_known(self.unchecked, set(state))
            self.unchecked = set()
        for name, x in state.items():
            wanted = self._wanted(name, p, own, state)
            if wanted is None or not isinstance(x, Tensor):
                continue
            is_settled = stored_format_of(x) == wanted  # after the first step all are
            if is_settled and getattr(getattr(x, "_local_tensor", x), "is_part", False):
                state[name] = x.clone()  # a padded shard
            elif not is_settled and x.shape == p.shape and x.is_floating_point():
                is_plain = wanted.arithmetic == "plain"
                state[name] = as_plain(x, own.dtype) if is_plain else as_state(x, wanted, p, name)


def _in_format_of_parameter(p: Tensor, x: Tensor, name: Any) -> Tensor:
    """Return a loaded state; from another dtype it is converted to the format that the optimizer
    makes.
    """
    format = format_of(p)
    rounds = x.is_floating_point() and x.dtype != p.dtype and name != "step"
    format = format.of_states if format else None
    return as_state(x, format, p, str(name)) if format and rounds and x.shape == p.shape else x


calls.as_loaded = _in_format_of_parameter


def _format_given(name: str, given: object, formats: list[Format]) -> Format | None:
    """Return the format that a mode names for a state."""
    if given is None:
        return None
    format = require_format(given, f"collage: mode[{name!r}]")
    if not format.shared:
        for own in formats:
            if format.dtype not in (own.dtype, own.of_states.dtype):
                raise ValueError(
                    f"collage: mode[{name!r}] is {format.name}, beside parameters in {own.name}; a "
                    f"state has terms of the parameter's dtype, {own.dtype}"
                )
        return format
    reason = WIDE.get(name)
    if name in FIRST_MOMENTS and isinstance(format, SecondMoments):
        reason = "it has negative numbers, which this format has not"
    if reason:
        raise ValueError(
            f"collage: mode[{name!r}] is {format.name}, which {name} cannot be in: {reason}. Use "
            f"mcf.bf16i16{'' if name in WIDE else ' or mcf.mxfp8'}"
        )
    return format


def _require_known(names: set[str], known: set[str]) -> None:
    missing = sorted(names - known)
    if missing:
        raise ValueError(
            f"collage: this optimizer has no state {', '.join(map(repr, missing))}; its states are "
            f"{', '.join(sorted(map(repr, known)))}"
        )


def _trial_names(optimizer: Optimizer) -> set[str]:
    """Return the names of the states that a step makes, from a trial step with a dummy parameter.

    Empty for a step that is not torch's own, which might reach for more than this parameter.
    """
    step = plain_step(optimizer)
    if not inspect.unwrap(step).__module__.startswith("torch.optim."):
        return set()
    dummy = torch.nn.Parameter(torch.ones(2, 2, device="cpu"))
    dummy.grad = torch.ones(2, 2, device="cpu")
    names: set[str] = set()
    # LBFGS wants a closure, SparseAdam sparse gradients, Adagrad before torch 2.12 its states.
    with contextlib.suppress(CannotShadow, LookupError, RuntimeError, TypeError), trying():
        for g in range(len(optimizer.param_groups)):
            trial = trial_of(optimizer, {g: [dummy]})
            step(trial)
            names |= set(trial.state.get(dummy, {}))
        return names
    return set()
