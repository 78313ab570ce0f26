"""Readings as a table, a figure, and in TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mcftensor.checkpoint.checkpoint_error import extra
from mcftensor.meters.edq.readings import Reading, StateReading
from mcftensor.tensor import text_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from mcftensor.meters.edq.meter import EDQ


Row = Sequence[str]
_HEADS = ("elements", "update", "ratio", "lost", "ratio leading", "lost leading")


def table(last: Reading | None, readings: Mapping[str, Reading], limit: int | None) -> Table:
    """Return a table of one reading per row, largest loss first, the whole model last."""
    heads = [head.replace(" ", "\n") for head in _HEADS]
    below = [("all", *_cells(last))] if last else []
    return _screen("table", _title(last), ["parameter"], heads, _rows(readings, limit), below)


def notebook(last: Reading | None, readings: Mapping[str, Reading], limit: int | None) -> str:
    """Return the same table for a notebook."""
    whole = [("all", *_cells(last))] if last else []
    rows = [("parameter", *_HEADS), *_rows(readings, limit), *whole]
    return text_tables.as_html(rows, [_title(last)])


def _title(last: Reading | None) -> str:
    return f"Updates of step {last['step']}" if last else "No reading yet"


def _rows(readings: Mapping[str, Reading], limit: int | None) -> list[tuple[str, ...]]:
    items = sorted(readings.items(), key=lambda item: _loss(item[1]), reverse=True)
    return [(name, *_cells(reading)) for name, reading in items[:limit]]


def state_table(
    last: Mapping[str, StateReading],
    readings: Mapping[str, Mapping[str, StateReading]],
    limit: int | None = None,
) -> Table:
    """Return a table of one state of one parameter per row, largest loss first, the whole model
    last.
    """
    heads = ["elements", "ratio", "lost", "zero beside\na first moment", "saturated\nblocks"]
    found = [(name, state, x) for name, own in readings.items() for state, x in own.items()]
    found.sort(key=lambda row: math.inf if row[2]["ratio"] is None else row[2]["ratio"])
    rows = [(name, state, *_state_cells(x)) for name, state, x in found[:limit]]
    below = [("all", state, *_state_cells(x)) for state, x in last.items()]
    names = ["parameter", "state"]
    return _screen("state_table", "What states kept", names, heads, rows, below)


def _screen(
    caller: str, title: str, names: Row, heads: Row, rows: Sequence[Row], below: Sequence[Row]
) -> Table:
    screen: Table = extra("rich.table", f"EDQ.{caller}").Table(title=title)
    for name in names:
        screen.add_column(name, overflow="fold")
    for head in heads:
        screen.add_column(head, justify="right")
    for row in rows:
        screen.add_row(*row)
    screen.add_section()
    for row in below:
        screen.add_row(*row)
    return screen


def figure(history: Sequence[Reading]) -> Figure:
    """Plot the ratio above and the lost share below, over the steps; for expansions also of leading
    terms.
    """
    figure: Figure = extra("matplotlib.figure", "EDQ.figure").Figure(
        figsize=(7, 6), layout="constrained"
    )
    upper, lower = figure.subplots(2, 1, sharex=True)
    steps = [reading["step"] for reading in history]
    for axes, kind, heading in (
        (upper, "ratio", "EDQ ratio: 1 means that nothing is lost"),
        (lower, "lost", "Share of elements whose update is lost"),
    ):
        for name, label, line in (
            (kind, "whole", {"color": "#0072B2"}),
            (f"{kind}_leading", "leading term", {"color": "#D55E00", "linestyle": "--"}),
        ):
            values: list[Any] = [reading[name] for reading in history]  # type: ignore[literal-required]
            if name != kind and values == [reading[kind] for reading in history]:  # type: ignore[literal-required]
                continue  # plain parameters have one term
            numbers = [math.nan if value is None else value for value in values]
            # Marked, since one sample alone makes no line.
            axes.plot(steps, numbers, label=label, marker=".", **line)
        axes.set_title(heading if history else "No reading yet", loc="left", fontsize="medium")
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), max(1.05, high) if kind == "ratio" else high)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xlabel("step")
    upper.legend(frameon=False)
    return figure


_FIGURES = ("edq", "ratio", "lost", "ratio_leading", "lost_leading", "update_norm", "largest")
_OF_STATES = ("ratio", "lost", "zero", "saturated")


def to_tensorboard(
    writer: Any, prefix: str = "edq", *, parameters: bool = False
) -> Callable[[EDQ], None]:
    """Return a callback that writes every reading to TensorBoard.

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
        >>> meter = mcf.EDQ(opt, callback=mcf.meters.edq.to_tensorboard(Print()))
        >>> opt.param_groups[0]["params"][0].grad = torch.ones(4)
        >>> opt.step()
        edq/edq 1.0 1
        edq/ratio 1.0 1
        edq/lost 0.0 1
        edq/ratio_leading 1.0 1
        edq/lost_leading 0.0 1
        edq/update_norm 1.0 1
        edq/largest 1.0 1
    """

    def write(meter: EDQ) -> None:
        reading = meter.last
        assert reading is not None
        figures: dict[str, Any] = {f"{prefix}/{name}": reading[name] for name in _FIGURES}  # type: ignore[literal-required]
        if parameters:
            for name, one in meter.per_parameter.items():
                figures[f"{prefix}_ratio/{name}"] = one["ratio"]
                figures[f"{prefix}_lost/{name}"] = one["lost"]
        for state, own in meter.states[-1].items():
            figures |= {f"{prefix}_states/{state}/{name}": own[name] for name in _OF_STATES}  # type: ignore[literal-required]
        for tag, value in figures.items():
            if value is not None:
                writer.add_scalar(tag, value, reading["step"])

    return write


def decimal(value: float | None) -> str:
    """Return a ratio as text."""
    return "-" if value is None else f"{value:.4f}"


def percent(value: float | None) -> str:
    """Return a share as text."""
    return "-" if value is None else f"{100 * value:.4g} %"


def _cells(reading: Reading) -> tuple[str, ...]:
    return (
        f"{reading['numel']:,}",
        f"{reading['update_norm']:.3g}",
        decimal(reading["ratio"]),
        percent(reading["lost"]),
        decimal(reading["ratio_leading"]),
        percent(reading["lost_leading"]),
    )


def _state_cells(x: StateReading) -> tuple[str, ...]:
    return (
        f"{x['numel']:,}",
        decimal(x["ratio"]),
        percent(x["lost"]),
        percent(x["zero"]),
        f"{x['saturated']:,}",
    )


def _loss(reading: Reading) -> tuple[float, float, int]:
    lost, ratio = reading["lost"], reading["ratio"]
    return (lost or 0.0, -math.inf if ratio is None else -ratio, reading["numel"])
