"""One verdict on the training of any optimizers: the losses of their updates and states."""

from __future__ import annotations

import atexit
import os
import statistics
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mcftensor.meters.edq.meter import EDQ
from mcftensor.meters.edq.report import percent
from mcftensor.patches.optimizers import untraced
from mcftensor.tensor.components import any_format_of, stored_format_of


@dataclass
class Noted:
    """What a diagnosis has seen of an optimizer."""

    name: str
    keeps_mean: bool = False
    """Whether a parameter is rounded at random or balanced."""
    some_plain: bool = False
    states: dict[str, list[str | None]] = field(default_factory=dict)
    """By the names of formats, the names of states that stand still, and None for others."""


class Diagnosis:
    """A meter on every optimizer that steps within a block, and one verdict at its end.

    It needs neither expansions nor access to the optimizers, and so works around the `train` of any
    trainer. Optimizers that a meter refuses are named in the verdict.

    `MCFTENSOR_EDQ=100` in the environment of a program that imports mcftensor does the same for the
    whole program, and prints the verdict when it ends. `MCFTENSOR_EDQ=100:edq.txt` writes it to a
    file at each sample.

    Args:
        every: measure one step of so many, beginning with the first.
        names: names of parameters, or the model, as in `EDQ`.
        file: where the verdict is written at each sample, by the first rank; by default it is
            printed to stderr at the end.

    Attributes:
        meters: the meter of each optimizer that has stepped.

    Raises:
        ValueError: `every` is no whole number from 1 on.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> gain = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([gain], lr=1e-4)
        >>> gain.grad = torch.ones_like(gain)
        >>> with mcf.meters.edq.Diagnosis(every=1) as diagnosis:
        ...     optimizer.step()
        >>> print(diagnosis.verdict())
        EDQ of SGD, measured at 1 of 1 steps
          100 % of updates are lost
          the effective learning rate is 0.00 of yours
          keep the weights as expansions: model = mcf.as_expansion(model)
    """

    def __init__(
        self,
        every: int = 100,
        *,
        names: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.meters: list[EDQ] = []
        self._every, self._names = every, names
        self._file = None if file is None else Path(file)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._refused: dict[str, str] = {}
        self._noted: dict[EDQ, Noted] = {}
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"Diagnosis: every={every!r}; give a whole number from 1 on")

    def __enter__(self) -> Diagnosis:
        self._handle = register_optimizer_step_pre_hook(self._attach)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        for meter in self.meters:
            meter.remove()
        self._say(at_end=True)

    def verdict(self) -> str:
        """Return the findings so far, a line for each optimizer."""
        found = ["\n  ".join(self._lines(meter)) for meter in self.meters]
        found += [f"EDQ of {name}: not measured: {why}" for name, why in self._refused.items()]
        return "\n".join(found) or "EDQ: no optimizer has stepped"

    def _lines(self, meter: EDQ) -> list[str]:
        """Return the findings of one optimizer: a title, what it loses, and what helps."""
        found = Finding(meter, self._noted[meter])
        return [*found.lines(), *found.advice()]

    def _attach(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            untraced(self._attach_now, optimizer)
        else:
            self._attach_now(optimizer)

    def _attach_now(self, optimizer: Optimizer) -> None:
        if optimizer in self._seen or any(meter.is_sampling for meter in self.meters):
            return
        self._seen.add(optimizer)
        known = weakref.ref(optimizer)
        try:
            meter = EDQ(
                optimizer,
                self._every,
                names=self._names,
                callback=lambda meter: self._note(meter, known()),
            )
        except (TypeError, ValueError) as error:
            self._refused[type(optimizer).__name__] = str(error).removeprefix("EDQ: ")
            return
        self.meters.append(meter)
        self._noted[meter] = Noted(type(optimizer).__name__)

    def _note(self, meter: EDQ, optimizer: Optimizer | None) -> None:
        """Record the kinds of parameters, and the states that stand still."""
        assert optimizer is not None
        noted = self._noted[meter]
        noted.states.clear()
        for name, p in meter.parameters_of(optimizer).items():
            own = any_format_of(p)
            noted.some_plain |= own is None
            noted.keeps_mean |= own is not None and own.rounding != "nearest"
            for state, reading in meter.per_state.get(name, {}).items():
                x = optimizer.state[p][state]
                format = any_format_of(x)
                kept, lost = reading["ratio"] or 0.0, reading["lost"]
                # Rounding at random moves few elements at a time, and keeps the mean.
                keeps_mean = format is not None and format.rounding != "nearest"
                stands = lost is not None and lost > 0.5 and not (keeps_mean and kept > 0.5)
                kind = stored_format_of(x).name
                noted.states.setdefault(kind, []).append(state if stands else None)
        self._say(at_end=False)

    def _say(self, *, at_end: bool) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        if self._file is not None:
            self._file.write_text(self.verdict() + "\n", encoding="utf-8")
        elif at_end:
            print(self.verdict(), file=sys.stderr)


class Finding:
    """The losses of one optimizer.

    Attributes:
        lost: the median share of elements that should have moved and did not, or None.
        rate: the median share of the intended movement that was made, or None.
        rate_at_end: the same in the last quarter of the samples.
        loses: whether the weights lose a good part of their updates.
        frozen: by the names of formats, the names of states that stand still.
    """

    lost: float | None = None
    rate: float | None = None
    rate_at_end: float | None = None

    def __init__(self, meter: EDQ, noted: Noted) -> None:
        self._meter, self._noted = meter, noted
        measured = [(x["lost"], x["ratio"]) for x in meter.history if x["ratio"] is not None]
        if measured:
            self.lost, self.rate = _medians(measured)
            _, self.rate_at_end = _medians(measured[3 * len(measured) // 4 :])
        rates = (self.rate, self.rate_at_end)
        self.loses = any(x is not None and not x >= _KEPT for x in rates)  # or is NaN
        self.frozen = {kind: [x for x in found if x] for kind, found in noted.states.items()}

    def lines(self) -> list[str]:
        """Return a title and the losses."""
        meter, noted = self._meter, self._noted
        said = [f"EDQ of {noted.name}, measured at {len(meter.history)} of {meter.steps} steps"]
        if self.lost is None or self.rate is None or self.rate_at_end is None:
            reasons = sorted(set(meter.not_metered.values()))
            return [*said, *(reasons or ["no update was intended"])]
        what = "of updates are lost"
        if self.lost > 1 - _KEPT and self.rate > _KEPT and noted.keeps_mean:
            what = "of elements wait for a later step: rounding keeps their mean"
        said.append(f"{percent(round(self.lost, 3))} {what}")
        for kind, frozen in self.frozen.items():
            if frozen:
                of, are = len(noted.states[kind]), "is" if len(frozen) == 1 else "are"
                names = ", ".join(sorted(set(frozen)))
                said.append(f"of {of} {kind} states {len(frozen)} {are} frozen ({names})")
        at_end = self.rate_at_end < _KEPT <= self.rate
        later = f", and {self.rate_at_end:.2f} in the last quarter" if at_end else ""
        return [*said, f"the effective learning rate is {self.rate:.2f} of yours{later}"]

    def advice(self) -> list[str]:
        """Return what helps, if anything is lost."""
        if self.loses and not self._noted.some_plain:
            return ["give the weights a finer format: mcf.change_format(model, optimizer, ...)"]
        if self.loses:
            return ["keep the weights as expansions: model = mcf.as_expansion(model)"]
        if any(self.frozen.values()):
            return ["keep the states as expansions, or in float32: mcf.collage(optimizer, mode)"]
        return []


def _medians(measured: Sequence[tuple[float | None, float | None]]) -> list[float]:
    """Return the median of each column."""
    return [statistics.median(float(y or 0) for y in x) for x in zip(*measured, strict=True)]


_KEPT = 0.9
"""The share of updates above which a training loses next to nothing."""


def diagnose_process(setting: str) -> None:
    """Begin a diagnosis of all that this process trains, as `MCFTENSOR_EDQ` says.

    Raises:
        ValueError: the setting is not a number of steps, with or without a colon and a file.
    """
    every, _, file = setting.partition(":")
    if not every.isdecimal() or not int(every):
        raise ValueError(
            f"MCFTENSOR_EDQ={setting!r}; give how many steps lie between two that are measured, "
            "and if you like a file after a colon: MCFTENSOR_EDQ=100:edq.txt"
        )
    diagnosis = Diagnosis(int(every), file=file or None)
    diagnosis.__enter__()
    atexit.register(diagnosis.__exit__)
