"""The meter: hooks on an optimizer, a sample now and then, readings of it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from mcftensor.meters.edq import report
from mcftensor.meters.edq.readings import (
    Place,
    Reading,
    Sample,
    StateReading,
    parameter_reading,
    record_differences,
    state_reading,
    take_samples,
    totals,
)
from mcftensor.patches.optimizers import named_parameters_of, parameters_of, untraced
from mcftensor.tensor.components import format_of
from mcftensor.training.gradient_hooks import Handle
from mcftensor.training.shadow import Original, reaches_parameters, require_single
from mcftensor.training.step_warnings import warn, warn_of_unheld

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


class FrozenWeightWarning(UserWarning):
    """Most elements of a parameter lose their updates, step after step."""


class EDQ(Handle):
    r"""A meter of what the updates of an optimizer lose to rounding.

    On a sampled step it lets the optimizer take the same step twice on copies: in the parameters'
    own precision, and in one wide enough to lose nothing (float64, or `fp64x2` and more terms for
    formats beyond 48 bits). The second gives the intended update $\Delta$, the first the movement
    $\hat\Delta$, and

    $$
    \mathrm{EDQ} = \left\langle \frac{\Delta}{\|\Delta\|}, \hat\Delta \right\rangle, \qquad
    \mathrm{ratio} = \frac{\mathrm{EDQ}}{\|\Delta\|}, \qquad
    \mathrm{lost} = \frac{\#\{i : \Delta_i \neq 0, \hat\Delta_i = 0\}}{\#\{i : \Delta_i \neq 0\}}
    $$

    The ratio is 1 when nothing is lost. It works on any `torch.optim.Optimizer` whose step can be
    taken on copies, over plain parameters of any precision and over expansions. Parameters, states
    and random numbers are the same to the bit with and without a meter.

    After the real step the meter compares it with the one on copies. Optimizers whose parameters
    depend on each other (Prodigy, D-Adaptation, some forms of Muon) give themselves away there:
    that sample is discarded, and the next step measures all parameters at once.

    Args:
        optimizer: any `torch.optim.Optimizer`. Attach the meter after hooks that run before its
            step, and before hooks that run after it.
        every: measure one step of so many, beginning with the first.
        names: names of parameters, as `model.named_parameters()` gives them, or the model. By
            default the names given to the optimizer, or `"group.index"`.
        callback: called with the meter after each measured step; see `to_tensorboard`.
        alarm: warn, once a parameter, when at least this share of its elements is lost at each of
            `patience` samples in a row. None for never. Formats with balanced or stochastic
            rounding have no alarm: most of their elements wait for a later step.
        patience: number of samples in a row that the alarm waits for.
        coupled: measure all parameters at once from the start.

    Attributes:
        last: the latest `Reading` of the whole model; None before the first sample.
        history: all readings of the whole model.
        per_group: the latest reading of each parameter group.
        per_parameter: the latest reading of each parameter with a gradient, by name.
        states: for each sample, a `StateReading` of each state of the whole model by its name: the
            kept part of the intended change, the number of zero second moments with a nonzero
            first moment, and the number of blocks with one scale and a number too large for it or
            for its neighbours.
        per_state: the latest of these for each parameter, by its name and the name of the state.
        not_metered: names of parameters that cannot be measured, and why.

    Raises:
        TypeError: `optimizer` is no Optimizer.
        ValueError: it steps other optimizers; `every`, `alarm` or `patience` out of range; two
            parameters of one name.

    Warns:
        FrozenWeightWarning: the alarm.
        SaturationWarning: a state in blocks with one scale holds a number too large for it, or for
            its neighbours.
        ZeroMomentWarning: a second moment is zero, the first moment is not, and the weight moves by
            100 learning rates.
        UserWarning: parameters cannot be measured, or only all at once.

    *Cost*: nothing measurable on other steps. A sampled one takes tens of times as long as a fused
    step of plain tensors, and the memory of some six float64 copies of the largest parameter;
    measured all at once, of the whole model.

    *Resolution*: movements are exact. Intended updates are resolved to 2^-53 of a parameter.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> gain = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        >>> opt = torch.optim.SGD([gain], lr=1e-4)
        >>> with mcf.EDQ(opt) as edq:
        ...     gain.grad = torch.ones_like(gain)
        ...     opt.step()
        >>> edq.last["ratio"], edq.last["lost"], round(edq.last["update_norm"], 10)
        (0.0, 1.0, 0.0002)

    References:
        T. Yu et al., "Collage: Light-Weight Low-Precision Strategy for LLM Training", ICML 2024,
        arXiv:2405.03637. There, and in the code released with it, the movement is measured on the
        leading term; here that is `ratio_leading`.
    """

    is_sampling = False
    """Whether steps of copies are being taken."""

    def __init__(
        self,
        optimizer: Optimizer,
        every: int = 1,
        *,
        names: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
        callback: Callable[[EDQ], object] | None = None,
        alarm: float | None = None,
        patience: int = 10,
        coupled: bool = False,
    ) -> None:
        require_single("EDQ", optimizer, "meter these: mcf.EDQ({})")
        if not getattr(type(optimizer).step, "hooked", False):
            raise ValueError(
                f"EDQ: {type(optimizer).__name__} does not call hooks on its step, since its class "
                "does not call Optimizer.__init__; without them nothing can be measured"
            )
        for name, value in (("every", every), ("patience", patience)):
            if not hasattr(value, "__index__") or isinstance(value, bool) or value < 1:
                raise ValueError(f"EDQ: {name}={value!r}; give a whole number from 1 on")
        if alarm is not None and not 0 < alarm <= 1:
            raise ValueError(f"EDQ: alarm={alarm!r} is a share of elements, above 0 and up to 1")
        self.every = every
        self.callback = callback
        self.alarm = alarm
        self.patience = patience
        self.history: list[Reading] = []
        self.per_group: list[Reading] = []
        self.per_parameter: dict[str, Reading] = {}
        self.states: list[dict[str, StateReading]] = []
        self.per_state: dict[str, dict[str, StateReading]] = {}
        self.not_metered: dict[str, str] = {}
        self._names = unique_names(names, "EDQ")
        bases = type(optimizer).__mro__[1:]
        self._bases = [c for c in bases if "step" in vars(c) and c is not Optimizer]
        self._steps = 0
        self._coupled = coupled or reaches_parameters(optimizer)
        self._again = self._due = self._compiled = False
        self._samples: list[Sample] | None = None
        self._frozen_for: dict[str, int] = {}
        self._rung: set[str] = set()
        self._refused: set[str] = set()
        self._handles: tuple[RemovableHandle, ...] = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    # ---------------------------------------------------------------------------------- reports

    @property
    def last(self) -> Reading | None:
        """The latest reading of the whole model; None before the first sample."""
        return self.history[-1] if self.history else None

    @property
    def steps(self) -> int:
        """Steps since the meter was attached."""
        return self._steps

    def table(self, limit: int | None = None) -> Table:
        """Return the latest reading of each parameter, largest loss first, for `rich.print`.

        Args:
            limit: number of rows, by default all.

        Raises:
            ImportError: rich is not installed.
        """
        return report.table(self.last, self.per_parameter, limit)

    def state_table(self, limit: int | None = None) -> Table:
        """Return the latest reading of each state of each parameter, largest loss first.

        Args:
            limit: number of rows, by default all.

        Raises:
            ImportError: rich is not installed.
        """
        return report.state_table(self.states[-1] if self.states else {}, self.per_state, limit)

    def figure(self) -> Figure:
        """Plot the ratio and the lost share over the steps, of the whole and of leading terms.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return report.figure(self.history)

    def __repr__(self) -> str:
        if self.last is None:
            return f"EDQ(every={self.every}, no reading yet)"
        ratio, lost = report.decimal(self.last["ratio"]), report.percent(self.last["lost"])
        return f"EDQ(every={self.every}, step {self.last['step']}: ratio {ratio}, lost {lost})"

    def _repr_html_(self) -> str:
        return report.notebook(self.last, self.per_parameter, limit=20)

    # ------------------------------------------------------------------------------------- hooks

    def remove(self) -> None:
        """Remove the meter from its optimizer. Its measurements stay.

        Call it between steps: PyTorch does not allow the removal of hooks while it calls them.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        self._names = {}
        self._samples = None

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements and their place: numbers and names, for `torch.save`."""
        state = {name.lstrip("_"): getattr(self, name) for name in _STATE}
        return {
            name: sorted(x) if isinstance(x, set) else copy.copy(x) for name, x in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another meter, with its next sample at the same step."""
        for name in _STATE:
            kind = type(getattr(self, name))  # sets are lists there
            if name.lstrip("_") in state:  # older ones have no readings of states
                setattr(self, name, kind(state[name.lstrip("_")]))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return untraced(self._begin, optimizer, args, kwargs, torch.compiler.is_compiling())

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any, compiled: bool) -> Any:
        """Take a sample, or return arguments of the step with a closure that takes it."""
        if self._bases and _is_nested(optimizer, self._bases):
            return None
        self._samples = None
        self._due = self._again or self._steps % self.every == 0
        if not self._due:
            return None
        self._compiled = compiled
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        expected = len(args) <= 2 and not kwargs.keys() - {"closure"}
        if not expected or (closure is not None and not callable(closure)):
            self._refuse_all(optimizer, "its step is called with arguments other than a closure")
            return None
        if closure is None:
            self._samples = self._sample(optimizer, None)
            return None

        def measured_closure(*inner: Any, **options: Any) -> Any:
            loss = closure(*inner, **options)
            if self._samples is None and self._handles:  # the first call made the gradients
                value = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, loss)
                self._samples = self._sample(optimizer, lambda: value)
            return loss

        if len(args) > 1:
            return (args[0], measured_closure), kwargs
        return args, {**kwargs, "closure": measured_closure}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        untraced(self._end, optimizer)

    def _end(self, optimizer: Optimizer) -> None:
        if self._bases and _is_nested(optimizer, self._bases):
            return
        self._steps += 1
        samples, self._samples = self._samples, None
        if samples:
            self._conclude(optimizer, samples)
        elif self._due and samples is None:
            self._refuse_all(optimizer, "its step did not call its closure")
        elif self._due and _gradients(optimizer):
            self._refuse_all(optimizer, "its step makes its gradients by itself")

    # ----------------------------------------------------------------------------------- measure

    def _sample(self, optimizer: Optimizer, loss: Callable[[], Any] | None) -> list[Sample]:
        """Take the coming step on copies, batch by batch of parameters."""
        self.is_sampling = True
        try:
            original = Original(optimizer)
            samples: list[Sample] = []
            for batch in self._batches(optimizer):
                taken = take_samples(original, batch, loss)
                if len(batch) > 1 and not self._coupled and any(s.error for s in taken):
                    taken = [s for place in batch for s in take_samples(original, [place], loss)]
                samples += taken
            return samples
        except Exception as error:  # noqa: BLE001 (a meter that fails must not stop the training)
            self._refuse_all(optimizer, f"{type(error).__name__}: {error}")
            return []
        finally:
            self.is_sampling = False

    def parameters_of(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the parameters of an optimizer by the names in readings."""
        return {place.name: place.parameter for place in self._places(optimizer)}

    def _batches(self, optimizer: Optimizer) -> list[list[Place]]:
        """Return batches of parameters to step together: all, or as many as have the size of the
        largest.
        """
        places = self._places(optimizer)
        measured = [place for place in places if place.parameter.grad is not None]
        if self._coupled:
            return [places] if measured else []
        limit = max([_SMALL, *(place.parameter.numel() for place in measured)])
        batches: list[list[Place]] = []
        room = 0
        for place in measured:
            room -= place.parameter.numel()
            if room < 0 or not batches:
                batches.append([])
                room = limit - place.parameter.numel()
            batches[-1].append(place)
        return batches

    def _places(self, optimizer: Optimizer) -> list[Place]:
        places: dict[str, Place] = {}
        for given, (g, i), p in named_parameters_of(optimizer):
            name = self._names.get(p, given)
            name = f"{name} ({g}.{i})" if name in places else name
            places[name] = Place(name, g, p)
        return list(places.values())

    def _conclude(self, optimizer: Optimizer, samples: list[Sample]) -> None:
        """Make readings of a sample, if the real step was the one on copies."""
        record_differences(samples, optimizer.state)
        totals([(sample, None) for sample in samples])
        self._again = False
        if any(sample.differs for sample in samples):
            error = next((s.error for s in samples if s.error), None)
            if not (self._compiled or self._coupled):
                self._coupled = self._again = True
                self._warn_of_coupling(optimizer, error)
                return
            reason = error or "its steps cannot be repeated on copies to the bit"
            if self._compiled:
                reason = "its compiled step rounds otherwise than the one on copies"
            self._refuse(optimizer, {s.place.name: reason for s in samples})
            return
        reason = "its step failed on another rank"
        failed = {s.place.name: s.error or reason for s in samples if s.has_failed}
        if failed:
            self._refuse(optimizer, failed)
        measured = [s for s in samples if s.place.name not in failed]
        if not measured:
            return
        rates = [_rate(group) for group in optimizer.param_groups]
        self.per_parameter = {
            s.place.name: parameter_reading(self._steps, [s], rates) for s in measured
        }
        self.per_group = [
            parameter_reading(self._steps, [s for s in measured if s.place.group == g], rates)
            for g in range(len(rates))
        ]
        self.history.append(parameter_reading(self._steps, measured, rates))
        self._conclude_states(optimizer, measured)
        for sample in measured:
            self.not_metered.pop(sample.place.name, None)
            self._watch(sample.place)
        if self.callback is not None:
            self.callback(self)

    def _conclude_states(self, optimizer: Optimizer, samples: list[Sample]) -> None:
        """Make readings of states, and warn of numbers that they do not hold."""
        chosen = [(s, state) for s in samples for state in s.rows if state is not None]
        totals(chosen)
        self.per_state = {}
        of_all: dict[str, list[Tensor]] = {}
        unheld: dict[str, dict[str, tuple[float, Tensor]]] = {
            "saturated": {},
            "raised": {},
            "zero": {},
        }
        for s, state in chosen:
            name, row = s.place.name, s.rows[state]
            one = state_reading(self._steps, [row])
            self.per_state.setdefault(name, {})[state] = one
            of_all.setdefault(state, []).append(row)
            largest = self.per_parameter[name]["largest"] or 0.0
            figures = {
                "saturated": one["saturated"],
                "raised": 0 if one["saturated"] else one["raised"],
                "zero": largest if one["zero"] and largest >= _FAR else 0,
            }
            held = optimizer.state[s.place.parameter][state]
            for kind, figure in figures.items():
                unheld[kind][f"{state} of {name}"] = figure, held
        self.states.append({x: state_reading(self._steps, rows) for x, rows in of_all.items()})
        warn_of_unheld(optimizer, unheld)

    def _watch(self, place: Place) -> None:
        """Ring the alarm for a parameter that stays frozen."""
        lost = self.per_parameter[place.name]["lost"]
        format = format_of(place.parameter)
        # Other roundings let most elements wait for a later step, and keep their mean.
        keeps_mean = format is not None and format.rounding != "nearest"
        if self.alarm is None or lost is None or keeps_mean:
            return
        count = self._frozen_for.get(place.name, 0) + 1 if lost >= self.alarm else 0
        self._frozen_for[place.name] = count
        if count >= self.patience and place.name not in self._rung:
            self._rung.add(place.name)
            p = place.parameter
            advice = "Keep it as an expansion: mcf.as_expansion(model)"
            if format:
                advice = "Give it a format with more terms, by overrides of mcf.as_expansion"
            warn(
                f"EDQ: {place.name} of shape {tuple(p.shape)}, "
                f"{format.name if format else p.dtype}, is frozen: {report.percent(lost)} of its "
                f"elements lost their update, the last of {count} samples in a row. {advice}",
                FrozenWeightWarning,
            )

    def _refuse(self, optimizer: Optimizer, reasons: Mapping[str, str]) -> None:
        """Say, once a parameter, that it could not be measured. The next sample tries again."""
        new = [name for name in reasons if name not in self._refused]
        self._refused.update(new)
        self.not_metered.update(reasons)
        if new:
            others = f" and {len(new) - 1} other parameters" if len(new) > 1 else ""
            warn(
                f"EDQ: the updates of {type(optimizer).__name__} cannot be measured for "
                f"{new[0]}{others}: {reasons[new[0]]}",
            )

    def _refuse_all(self, optimizer: Optimizer, reason: str) -> None:
        self._samples, self._due = [], False
        self._refuse(optimizer, {place.name: reason for place in self._places(optimizer)})

    def _warn_of_coupling(self, optimizer: Optimizer, error: str | None) -> None:
        states = list(optimizer.state.values())
        held = [list(parameters_of(optimizer)), _gradients(optimizer), states]
        elements = sum(x.numel() for x in tree_leaves(held) if isinstance(x, Tensor))
        warn(
            f"EDQ: {type(optimizer).__name__} does not treat parameters one by one"
            f"{f' ({error})' if error else ''}. From its next step on they are measured all at "
            "once, which on measured steps takes memory for all parameters, gradients and states "
            f"in float64, {elements * 8 / 2**30:.2g} GiB, and for copies of them. With "
            "coupled=True the first step is measured, too, and this warning stays away",
        )


# Parameters are measured together up to this many elements, or the number of the largest.
_SMALL = 1 << 20

# Learning rates. Adam's updates are at most (1 - beta1) / sqrt(1 - beta2) of them once its moments
# have settled: 3.2 at the default betas, 32 at a beta2 of 0.99999.
_FAR = 100

# What a resumed meter goes on with.
_STATE = (
    *("_steps", "history", "per_group", "per_parameter", "states", "per_state", "not_metered"),
    *("_coupled", "_again", "_frozen_for", "_rung", "_refused"),
)


def _rate(group: Mapping[str, Any]) -> float | None:
    """Return the learning rate of a group, if that is one number."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        rate = rate.item() if rate.numel() == 1 else None
    return float(rate) if isinstance(rate, (int, float)) else None


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def _is_nested(optimizer: Optimizer, bases: Sequence[type]) -> bool:
    """Whether this hook is called by a step within the step of the same optimizer.

    So it is where a class calls the step of one of its bases, and both have hooks.
    """
    if not any(getattr(base.__dict__["step"], "hooked", False) for base in bases):
        return False
    code = type(optimizer).step.__code__  # of what calls the hooks
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        steps += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def unique_names(
    names: nn.Module | Iterable[tuple[str, Tensor]] | None, caller: str
) -> dict[Tensor, str]:
    """Names by their parameters; TypeError or ValueError where they are none, or not unique."""
    if isinstance(names, nn.Module):
        names = names.named_parameters()
    pairs = list(names or ())
    kinds = (str, Tensor)
    are_two = all(isinstance(x, (tuple, list)) and len(x) == 2 for x in pairs)
    if not are_two or not all(all(map(isinstance, x, kinds)) for x in pairs):
        raise TypeError(
            f"{caller}: names are pairs of a name and a parameter, as of model.named_parameters()"
        )
    found = {p: name for name, p in reversed(pairs)}
    if len(set(found.values())) < len(found):
        raise ValueError(f"{caller}: two parameters have the same name; make the names unique")
    return found
