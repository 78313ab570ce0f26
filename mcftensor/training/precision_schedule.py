"""`PrecisionSchedule`: when a model in training changes its format."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mcftensor.convert import Overrides
from mcftensor.formats import Format, require_format
from mcftensor.meters.edq.meter import EDQ
from mcftensor.tensor.components import format_of
from mcftensor.training.collage import Mode
from mcftensor.training.format_change import FormatChange, change_format

_WHEN = "{'step': 900}, {'lr': 1e-5} or {'lost': 0.01}"


class PrecisionSchedule:
    """Change the format of a model in training when it is needed, by `change_format`.

    Small updates come late: a model may train in few bytes, and get tails when its learning rate
    decays, or parameter by parameter where updates begin to be lost. Call `step` once after each
    step of the optimizer, and of its learning-rate scheduler.

    Args:
        model: the module.
        optimizer: its optimizer.
        format: the format to change to, or its name.
        when: a dict with one of

            - `"step"`: after so many steps;
            - `"lr"`: once the learning rate of every group has fallen to this, from above it;
            - `"lost"`: where the meter says that more than this share of the elements of a
              parameter, 0.01 say, were to move and did not: that parameter alone.
        mode: a mode for `collage` from then on; by default the optimizer keeps its mode.
        overrides: as in `change_format`: the formats of some parameters, None to leave them out.
        meter: for `"lost"`, an `EDQ` of the optimizer, with `names=model`.

    Attributes:
        steps: the number of calls of `step`.
        changes: the result of each change.

    Raises:
        TypeError: `when` is not such a dict, or `format` is not a format.
        ValueError: `"lost"` without a meter, or a number out of range.

    !!! note
        Balanced and stochastic rounding move few elements at a time and lose nothing in the mean,
        so that a meter counts many as lost. `"lost"` is for formats rounded to nearest and for
        plain models.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> balanced = mcf.Format(torch.bfloat16, 1, rounding="balanced")
        >>> model = mcf.as_expansion(torch.nn.Linear(64, 64), balanced)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        >>> late = mcf.PrecisionSchedule(model, optimizer, mcf.bf16i8, when={"step": 2})
        >>> found = []
        >>> for _ in range(3):
        ...     model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        ...     optimizer.step()
        ...     done = late.step()
        ...     found.append(model.weight.format.name)
        >>> found
        ['bf16br', 'bf16i8', 'bf16i8']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        format: Format | str,
        *,
        when: Mapping[str, float],
        mode: Mode | None = None,
        overrides: Overrides | None = None,
        meter: EDQ | None = None,
    ) -> None:
        if not isinstance(when, Mapping) or len(when) != 1 or not {*when} < {"step", "lr", "lost"}:
            raise TypeError(f"PrecisionSchedule: when={when!r}; give one of {_WHEN}")
        ((self._kind, self._limit),) = when.items()
        if self._limit < 0 or (self._kind == "lost" and self._limit >= 1):
            raise ValueError(
                f"PrecisionSchedule: when={when!r}; steps and learning rates are not negative, and "
                "a share is below 1"
            )
        if (meter is None) == (self._kind == "lost"):
            raise ValueError(
                f"PrecisionSchedule: when={when!r} with meter={meter!r}; 'lost' needs one, "
                "meter=mcf.EDQ(optimizer, every=100, names=model), and nothing else does"
            )
        self.model, self.optimizer, self.meter = model, optimizer, meter
        self.format = require_format(format, "PrecisionSchedule")
        self.mode, self.overrides = mode, dict(overrides or {})
        self.steps = 0
        self.changes: list[FormatChange] = []
        self._changed: list[str] = []  # the names of parameters, or "*" for the whole model
        self._was_above = False

    def step(self) -> FormatChange | None:
        """Change the format if it is time, and return the change; else return None."""
        self.steps += 1
        if self._kind == "lost":
            return self._change([name for name in self._losing() if name not in self._changed])
        is_time = "*" not in self._changed and self._is_time()
        return self._change(["*"] if is_time else [])

    def _is_time(self) -> bool:
        if self._kind == "step":
            return self.steps >= self._limit
        is_above = max(float(group["lr"]) for group in self.optimizer.param_groups) > self._limit
        self._was_above |= is_above
        return self._was_above and not is_above

    def _losing(self) -> list[str]:
        """Return the parameters with too many lost elements in the latest reading."""
        assert self.meter is not None
        readings = self.meter.per_parameter
        own = dict(self.model.named_parameters())
        if unknown := sorted(readings.keys() - own.keys()):
            raise ValueError(
                f"PrecisionSchedule: the meter has {unknown[0]!r}, which is no parameter of the "
                "model; give it the names, mcf.EDQ(optimizer, names=model)"
            )
        return [
            name
            for name, reading in readings.items()
            if reading["lost"] is not None
            and reading["lost"] > self._limit
            and format_of(own[name]) is not self._wanted(name)
        ]

    def _wanted(self, name: str) -> Format | str | None:
        matches = (x for pattern, x in self.overrides.items() if fnmatchcase(name, pattern))
        return next(matches, self.format)

    def _change(self, names: Iterable[str]) -> FormatChange | None:
        names = list(names)
        if not names:
            return None
        self._changed += names
        if names == ["*"]:
            done = change_format(
                self.model, self.optimizer, self.format, self.mode, overrides=self.overrides
            )
        else:
            alone = {glob.escape(name): self._wanted(name) for name in names}
            done = change_format(
                self.model, self.optimizer, None, self.mode, overrides={**alone, "*": None}
            )
        self.changes.append(done)
        return done

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "steps": self.steps,
            "was_above": self._was_above,
            "changed": list(self._changed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, and repeat its changes of format. Load it before the
        states of the model and the optimizer.
        """
        self.steps, self._was_above = state["steps"], state["was_above"]
        missing = [name for name in state["changed"] if name not in self._changed]
        self._change(missing)
