"""EDQ, effective descent quality: what updates lose, measured on any optimizer."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from mcftensor.convert import as_plain
from mcftensor.shadow import (
    CannotShadow,
    reaches_parameters,
    same,
    shadow_step,
    wide_type,
    widened,
    widened_parameters,
)
from mcftensor.tensor import MCFTensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


class Reading(TypedDict):
    """What one step lost, in the model, a group or a parameter.

    Every figure but the last two is None where no update was intended.
    """

    step: int
    """Number of the step since the meter was attached, from 1 on."""
    edq: float | None
    """⟨Δ/‖Δ‖, Δ̂⟩, in the units of the parameters."""
    ratio: float | None
    """EDQ/‖Δ‖; 1.0 when nothing is lost."""
    lost: float | None
    """Of the elements that were to move, the share that did not."""
    ratio_leading: float | None
    """The ratio with the movement of leading terms alone."""
    lost_leading: float | None
    """The share whose leading term did not move."""
    update_norm: float
    """‖Δ‖, the length of the intended update."""
    numel: int
    """Number of elements measured."""


class FrozenWeightWarning(UserWarning):
    """Most elements of a parameter lose their updates, step after step."""


class EDQ:
    r"""A meter of what the updates of an optimizer lose to rounding.

    On a sampled step it lets the optimizer take the same step twice on copies: in the parameters'
    own precision, and in one wide enough to lose nothing (float64, or `fp64x2` and more terms for
    formats beyond 48 bits). The second gives the intended update :math:`\Delta`, the first the
    movement :math:`\hat\Delta`, and

    .. math::
        \mathrm{EDQ} = \langle \Delta / \lVert\Delta\rVert, \hat\Delta \rangle, \qquad
        \mathrm{ratio} = \mathrm{EDQ} / \lVert\Delta\rVert, \qquad
        \mathrm{lost} = \frac{\#\{i : \Delta_i \ne 0, \hat\Delta_i = 0\}}
                             {\#\{i : \Delta_i \ne 0\}} .

    The ratio is 1 when nothing is lost. It works on any `torch.optim.Optimizer` whose step can be
    taken on copies, over plain parameters of any precision and over expansions, and changes
    neither parameters nor states nor random numbers, to the bit.

    After the real step the meter compares it with the one on copies. Optimizers whose parameters
    depend on each other (Prodigy, D-Adaptation, some forms of Muon) give themselves away there:
    that sample is discarded, and the next step measures all parameters at once.

    Args:
        optimizer: any `torch.optim.Optimizer`. Attach the meter after other hooks on its step.
        every: measure one step of so many, beginning with the first.
        names: names of parameters, as `model.named_parameters()` gives them. By default those
            that the optimizer was given, or `"group.index"`.
        callback: called with the meter after each measured step; see `to_tensorboard`.
        alarm: warn, once a parameter, when at least this share of its elements is lost at each of
            `patience` samples in a row. None for never.
        patience: number of samples in a row that the alarm waits for.
        coupled: measure all parameters at once from the start.

    Attributes:
        last: the latest `Reading` of the whole model, or None.
        history: all readings of the whole model.
        per_group: the latest reading of each parameter group.
        per_parameter: the latest reading of each parameter with a gradient, by name.
        not_metered: names of parameters that cannot be measured, and why.

    Raises:
        TypeError: `optimizer` is no Optimizer.
        ValueError: it steps other optimizers; `every`, `alarm` or `patience` out of range; two
            parameters of one name.

    Warns:
        FrozenWeightWarning: the alarm.
        UserWarning: parameters cannot be measured, or only all at once.

    *Cost*: nothing measurable on other steps. A sampled one takes the time of two more steps, one
    in float64, taken parameter by parameter, and the memory of some ten float64 copies of the
    largest parameter; measured all at once, of the whole model.

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
        arXiv:2405.03637. There, and in the code released with it, the movement is that of the
        leading term; here that is `ratio_leading`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int = 1,
        *,
        names: Iterable[tuple[str, Tensor]] | None = None,
        callback: Callable[[EDQ], object] | None = None,
        alarm: float | None = None,
        patience: int = 10,
        coupled: bool = False,
    ) -> None:
        _check_optimizer(optimizer)
        for name, value in (("every", every), ("patience", patience)):
            if not isinstance(value, int) or value < 1:
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
        self.not_metered: dict[str, str] = {}
        self._names = _unique_names(names)
        self._steps = 0
        self._coupled = coupled or reaches_parameters(optimizer)
        self._again = False
        self._frame: FrameType | None = None
        self._depth = 0
        self._samples: list[_Sample] | None = None
        self._frozen_for: dict[str, int] = {}
        self._warned: set[str] = set()
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    # ------------------------------------------------------------------------------ what it says

    @property
    def last(self) -> Reading | None:
        """The latest reading of the whole model."""
        return self.history[-1] if self.history else None

    def table(self, limit: int | None = None) -> Table:
        """The latest reading of each parameter, what is lost most first.

        Args:
            limit: number of rows, by default all.

        Returns:
            A `rich.table.Table`, for `rich.print`.

        Raises:
            ImportError: rich is not installed.
        """
        Table = _optional("rich.table", "table").Table
        screen = Table(title=f"Updates of step {self.last['step']}" if self.last else "No reading")
        screen.add_column("parameter", overflow="fold")
        for column in ("elements", "update", "ratio", "lost", "ratio\nleading", "lost\nleading"):
            screen.add_column(column, justify="right")
        rows = sorted(self.per_parameter.items(), key=lambda item: _loss(item[1]), reverse=True)
        whole = [("all", self.last)] if self.last else []
        for name, reading in [*rows[:limit], *whole]:
            if name == "all" and reading is self.last:
                screen.add_section()
            screen.add_row(
                name,
                f"{reading['numel']:,}",
                f"{reading['update_norm']:.3g}",
                _decimal(reading["ratio"]),
                _percent(reading["lost"]),
                _decimal(reading["ratio_leading"]),
                _percent(reading["lost_leading"]),
            )
        return screen

    def figure(self) -> Figure:
        """The ratio and the lost share over the steps, of the whole and of leading terms.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure: Figure = _optional("matplotlib.figure", "figure").Figure(
            figsize=(7, 6), layout="constrained"
        )
        upper, lower = figure.subplots(2, 1, sharex=True)
        steps = [reading["step"] for reading in self.history]
        for axes, kind, heading in (
            (upper, "ratio", "EDQ ratio: 1 means that nothing is lost"),
            (lower, "lost", "Share of elements whose update is lost"),
        ):
            for key, label, line in (
                (kind, "whole", {"color": "#0072B2"}),
                (f"{kind}_leading", "leading term", {"color": "#D55E00", "linestyle": "--"}),
            ):
                values = [reading[key] for reading in self.history]  # type: ignore[literal-required]
                axes.plot(
                    steps, [math.nan if v is None else v for v in values], label=label, **line
                )
            axes.set_title(heading, loc="left", fontsize="medium")
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        lower.set_xlabel("step")
        upper.legend(frameon=False)
        return figure

    def __repr__(self) -> str:
        if self.last is None:
            return f"EDQ(every={self.every}, no reading yet)"
        ratio, lost = _decimal(self.last["ratio"]), _percent(self.last["lost"])
        return f"EDQ(every={self.every}, step {self.last['step']}: ratio {ratio}, lost {lost})"

    # ------------------------------------------------------------------------------------- hooks

    def remove(self) -> None:
        """Take the meter off its optimizer. What it has measured stays."""
        for handle in self._handles:
            handle.remove()
        self._names = {}
        self._samples = self._frame = None

    def __enter__(self) -> EDQ:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            return _untraced(self._begin, optimizer, args, kwargs)
        return self._begin(optimizer, args, kwargs)

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # A step that calls the hooked one of its base class arrives twice, one that raised never
        # reaches the other hook.
        if self._frame is not None and _is_running(self._frame):
            self._depth += 1
            return None
        self._frame, self._depth, self._samples = sys._getframe(2), 0, None
        if not self._again and self._steps % self.every:
            return None
        if len(args) > 2 or kwargs.keys() - {"closure"}:
            self._refuse_all(optimizer, "its step is called with arguments other than a closure")
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._samples = self._sample(optimizer, None)
            return None

        def measured_closure() -> Any:
            loss = closure()
            if self._samples is None:  # gradients are those of the first call
                self._samples = self._sample(optimizer, lambda: loss)
            return loss

        if len(args) > 1:
            return (args[0], measured_closure), kwargs
        return args, {**kwargs, "closure": measured_closure}

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():
            _untraced(self._end, optimizer)
        else:
            self._end(optimizer)

    def _end(self, optimizer: Optimizer) -> None:
        if self._depth:
            self._depth -= 1
            return
        self._steps += 1
        samples, self._samples, self._frame = self._samples, None, None
        if samples:
            self._conclude(optimizer, samples)

    # ----------------------------------------------------------------------------------- measure

    def _sample(self, optimizer: Optimizer, loss: Callable[[], Any] | None) -> list[_Sample]:
        """The step about to be taken, on copies of each parameter, or of all of them."""
        places = self._places(optimizer)
        samples: list[_Sample] = []
        for batch in [places] if self._coupled else [[place] for place in places]:
            measured = [place for place in batch if place.parameter.grad is not None]
            if measured and not any(place.name in self.not_metered for place in measured):
                samples += _measured(optimizer, batch, measured, loss)
        return samples

    def _places(self, optimizer: Optimizer) -> list[_Place]:
        return [
            _Place(self._name(group, g, i), g, p)
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
        ]

    def _name(self, group: Mapping[str, Any], g: int, i: int) -> str:
        named = self._names.get(group["params"][i])
        if named is None and "param_names" in group:
            named = group["param_names"][i]
        return named or f"{g}.{i}"

    def _conclude(self, optimizer: Optimizer, samples: list[_Sample]) -> None:
        """Make readings of a sample, if the real step was the one on copies."""
        rows = _totals(samples)
        failed = [s for s, row in zip(samples, rows, strict=True) if row[_FAILED]]
        if any(row[_DIFFERS] for row in rows):
            if self._coupled:
                reason = "its steps cannot be repeated on copies to the bit"
                self._refuse(optimizer, {s.place.name: s.error or reason for s in samples})
            else:
                self._coupled = self._again = True
                self._warn_of_coupling(optimizer)
            return
        self._again = False
        if failed:
            reason = "its step failed on another rank"
            self._refuse(optimizer, {s.place.name: s.error or reason for s in failed})
        measured = [
            (s.place, row) for s, row in zip(samples, rows, strict=True) if not row[_FAILED]
        ]
        if not measured:
            return
        step = self._steps
        self.per_parameter = {place.name: _reading(step, [row]) for place, row in measured}
        self.per_group = [
            _reading(step, [row for place, row in measured if place.group == g])
            for g in range(len(optimizer.param_groups))
        ]
        self.history.append(_reading(step, [row for _, row in measured]))
        if self.alarm is not None:
            for place, _ in measured:
                self._watch(place)
        if self.callback is not None:
            self.callback(self)

    def _watch(self, place: _Place) -> None:
        """Ring the alarm for a parameter that stays frozen."""
        lost = self.per_parameter[place.name]["lost"]
        if lost is None:
            return
        assert self.alarm is not None
        count = self._frozen_for.get(place.name, 0) + 1 if lost >= self.alarm else 0
        self._frozen_for[place.name] = count
        if count == self.patience:
            p = place.parameter
            expansion = isinstance(p, MCFTensor)
            warnings.warn(
                f"EDQ: {place.name} of shape {tuple(p.shape)}, "
                f"{p.format.name if isinstance(p, MCFTensor) else p.dtype}, is frozen: "
                f"{_percent(lost)} of its elements or more lost their update at {count} samples "
                "in a row. "
                + (
                    "Give it a format with more terms, by overrides of mcf.as_expansion"
                    if expansion
                    else "Keep it as an expansion: mcf.as_expansion(model)"
                ),
                FrozenWeightWarning,
                stacklevel=5,
            )

    def _refuse(self, optimizer: Optimizer, reasons: Mapping[str, str]) -> None:
        self.not_metered.update(reasons)
        name, reason = next(iter(reasons.items()))
        others = f" and {len(reasons) - 1} other parameters" if len(reasons) > 1 else ""
        warnings.warn(
            f"EDQ: the updates of {type(optimizer).__name__} cannot be measured for "
            f"{name}{others}: {reason}",
            stacklevel=5,
        )

    def _refuse_all(self, optimizer: Optimizer, reason: str) -> None:
        unknown = [p for p in self._places(optimizer) if p.name not in self.not_metered]
        if unknown:
            self._refuse(optimizer, {place.name: reason for place in unknown})

    def _warn_of_coupling(self, optimizer: Optimizer) -> None:
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [x for state in optimizer.state.values() for x in state.values()]
        elements = sum(x.numel() for x in tensors if isinstance(x, Tensor))
        elements += sum(p.numel() for p in tensors if isinstance(p, Tensor) and p.grad is not None)
        warnings.warn(
            f"EDQ: {type(optimizer).__name__} does not treat parameters one by one. From its next "
            "step on they are measured all at once, which on measured steps takes memory for all "
            f"parameters, gradients and states in float64, {elements * 8 / 2**30:.2g} GiB, and for "
            "copies of them. With coupled=True the first step is measured, too, and this warning "
            "stays away",
            stacklevel=5,
        )


@dataclass(frozen=True)
class _Place:
    """Where a parameter is."""

    name: str
    group: int
    parameter: Tensor


@dataclass
class _Sample:
    """A step of one parameter on copies: sums over its elements, and what it came to."""

    place: _Place
    sums: Tensor
    fingerprint: Tensor | None = None
    error: str | None = None


# The sums over elements of a parameter, of which a reading is made.
_COLUMNS = 9
_UPDATE, _ALONG, _ALONG_LEADING, _INTENDED, _LOST, _LOST_LEADING, _NUMEL, _DIFFERS, _FAILED = range(
    _COLUMNS
)


def _measured(
    optimizer: Optimizer,
    batch: list[_Place],
    measured: list[_Place],
    loss: Callable[[], Any] | None,
) -> list[_Sample]:
    """Samples of the measured parameters of a batch, which are stepped together."""
    parameters = [place.parameter for place in batch]
    try:
        for place in measured:
            wide_type(place.parameter)
        after = shadow_step(optimizer, parameters, same, loss)
    except CannotShadow as error:
        return [_failed(place, _FAILED, error) for place in measured]
    except Exception as error:  # noqa: BLE001 (a meter that fails must not stop the training)
        # The real step will be taken with the other parameters, and may differ.
        return [_failed(place, _DIFFERS, error) for place in measured]
    try:
        wide = _wide_step(optimizer, parameters, loss)
    except Exception as error:  # noqa: BLE001
        return [_failed(place, _FAILED, error) for place in measured]
    with torch.no_grad():
        stepped = zip(batch, after, wide, strict=True)
        return [
            _Sample(place, _sums(place.parameter, a, w), _fingerprint(a))
            for place, a, w in stepped
            if place.parameter.grad is not None
        ]


def _failed(place: _Place, column: int, error: Exception) -> _Sample:
    sums = torch.zeros(_COLUMNS, dtype=torch.float64, device=place.parameter.device)
    sums[column] = 1
    line = str(error).strip().partition("\n")[0]
    known = isinstance(error, CannotShadow)
    return _Sample(place, sums, error=line if known else f"{type(error).__name__}: {line}")


def _wide_step(
    optimizer: Optimizer, parameters: list[Tensor], loss: Callable[[], Any] | None
) -> list[Tensor]:
    try:
        return shadow_step(optimizer, parameters, widened, loss)
    except RuntimeError:  # of dtypes that do not go together
        with contextlib.suppress(RuntimeError):
            return shadow_step(optimizer, parameters, widened_parameters, loss)
        raise


def _sums(before: Tensor, after: Tensor, wide: Tensor) -> Tensor:
    """The columns of a parameter, of the elements on this rank."""
    before, after, wide = (_local(x) for x in (before, after, wide))
    intended = wide - widened(before, before, "parameter")
    intended = torch.view_as_real(intended) if intended.is_complex() else intended
    intended = as_plain(intended, torch.float64)
    pairs = list(zip(_terms(before), _terms(after), strict=True))
    stayed_leading = pairs[0][0] == pairs[0][1]
    moved = moved_leading = pairs[0][1].double() - pairs[0][0].double()
    stayed = stayed_leading
    for old, new in pairs[1:]:
        moved = moved + (new.double() - old.double())
        stayed = stayed & (new == old)
    is_intended = intended != 0
    sums = [
        (intended * intended).sum(),
        (intended * moved).sum(),
        (intended * moved_leading).sum(),
        is_intended.sum(),
        (is_intended & stayed).sum(),
        (is_intended & stayed_leading).sum(),
        torch.tensor(before.numel(), device=intended.device),
        torch.tensor(0, device=intended.device),
        torch.tensor(0, device=intended.device),
    ]
    return torch.stack([x.double() for x in sums])


def _fingerprint(x: Tensor) -> Tensor:
    """The sums of the bit patterns of the terms: tensors that differ have others, by all odds."""
    patterns = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    terms = _terms(_local(x))
    return torch.stack(
        [t.detach().view(patterns[t.element_size()]).sum(dtype=torch.int64) for t in terms]
    )


def _totals(samples: list[_Sample]) -> list[list[float]]:
    """The columns of each sample, over all ranks that hold parts of its parameter."""
    for sample in samples:
        if sample.fingerprint is not None:
            real = _fingerprint(sample.place.parameter)
            sample.sums[_DIFFERS] = (real != sample.fingerprint).any()
    sharded: dict[Any, list[_Sample]] = {}
    for sample in samples:
        placements = getattr(sample.place.parameter, "placements", ())
        dims = tuple(i for i, placed in enumerate(placements) if not placed.is_replicate())
        if dims:
            mesh = sample.place.parameter.device_mesh  # type: ignore[attr-defined]
            sharded.setdefault((mesh, dims), []).append(sample)
    for (mesh, dims), parts in sharded.items():
        rows = torch.stack([sample.sums for sample in parts])
        for dim in dims:
            torch.distributed.all_reduce(rows, group=mesh.get_group(dim))
        for sample, row in zip(parts, rows, strict=True):
            sample.sums = row
    device = samples[0].sums.device
    return torch.stack([sample.sums.to(device) for sample in samples]).tolist()


def _reading(step: int, rows: list[list[float]]) -> Reading:
    """The figures of one or many parameters, from their columns."""
    total = [math.fsum(column) for column in zip(*rows, strict=True)] or [0.0] * _COLUMNS
    norm = math.sqrt(total[_UPDATE])
    intended = total[_INTENDED]
    return Reading(
        step=step,
        edq=total[_ALONG] / norm if norm else None,
        ratio=total[_ALONG] / total[_UPDATE] if norm else None,
        lost=total[_LOST] / intended if intended else None,
        ratio_leading=total[_ALONG_LEADING] / total[_UPDATE] if norm else None,
        lost_leading=total[_LOST_LEADING] / intended if intended else None,
        update_norm=norm,
        numel=int(total[_NUMEL]),
    )


def _local(x: Tensor) -> Tensor:
    """The part of a distributed tensor that is on this rank."""
    return x.to_local() if hasattr(x, "to_local") else x


def _terms(x: Tensor) -> tuple[Tensor, ...]:
    if isinstance(x, MCFTensor):
        return x.components
    return (torch.view_as_real(x) if x.is_complex() else x,)


def _is_running(frame: FrameType) -> bool:
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is frame


@torch._disable_dynamo  # unlike torch.compiler.disable, it does not import the compiler
def _untraced(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"EDQ: got {type(optimizer).__name__}; give a torch.optim.Optimizer")
    name = type(optimizer).__name__
    for attribute, value in vars(optimizer).items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(part, Optimizer) for part in parts):
            raise ValueError(
                f"EDQ: {name} steps other optimizers; meter these: mcf.EDQ(optimizer.{attribute})"
            )
    if not getattr(type(optimizer).step, "hooked", False):
        raise ValueError(
            f"EDQ: {name} does not call hooks on its step, since its class does not call "
            "Optimizer.__init__; without them nothing can be measured"
        )


def _unique_names(names: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    pairs = list(names or ())
    found = {p: name for name, p in reversed(pairs)}
    if len(set(found.values())) < len(found):
        raise ValueError("EDQ: two parameters have the same name; make the names unique")
    return found


def _optional(module: str, method: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f'EDQ.{method}: needs {package}, which is not installed: pip install "mcftensor[tools]"'
        ) from error


def _loss(reading: Reading) -> tuple[float, float, int]:
    lost, ratio = reading["lost"], reading["ratio"]
    return (lost or 0.0, -math.inf if ratio is None else -ratio, reading["numel"])


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.4g} %"


_FIGURES = ("edq", "ratio", "lost", "ratio_leading", "lost_leading", "update_norm")


def to_tensorboard(
    writer: Any, prefix: str = "edq", *, parameters: bool = False
) -> Callable[[EDQ], None]:
    """A callback that writes every reading to TensorBoard.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or another thing with
            `add_scalar(tag, value, step)`.
        prefix: what the tags begin with, as in `edq/ratio`.
        parameters: write ratio and lost share of each parameter, too.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> class Print:
        ...     def add_scalar(self, tag, value, step):
        ...         print(tag, round(value, 4), step)
        >>> opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.5)
        >>> meter = mcf.EDQ(opt, callback=mcf.edq.to_tensorboard(Print()))
        >>> opt.param_groups[0]["params"][0].grad = torch.ones(4)
        >>> opt.step()
        edq/edq 1.0 1
        edq/ratio 1.0 1
        edq/lost 0.0 1
        edq/ratio_leading 1.0 1
        edq/lost_leading 0.0 1
        edq/update_norm 1.0 1
    """

    def write(meter: EDQ) -> None:
        reading = meter.last
        assert reading is not None
        figures: dict[str, Any] = {f"{prefix}/{name}": reading[name] for name in _FIGURES}  # type: ignore[literal-required]
        if parameters:
            for name, one in meter.per_parameter.items():
                figures[f"{prefix}_ratio/{name}"] = one["ratio"]
                figures[f"{prefix}_lost/{name}"] = one["lost"]
        for tag, value in figures.items():
            if value is not None:
                writer.add_scalar(tag, value, reading["step"])

    return write
