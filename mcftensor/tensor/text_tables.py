"""Tables as text and as HTML for notebooks, and tensors in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torch import Tensor

from mcftensor.formats import Format

Rows = Sequence[Sequence[str]]
"""Rows of a table; the first one has the headings."""

FEW = 8
"""The largest number of elements that a notebook shows with their components."""


def as_text(rows: Rows, notes: Sequence[str] = ()) -> str:
    """Return a table as text, the first column aligned to the left, with notes below."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *notes])


def as_html(rows: Rows, notes: Sequence[str] = ()) -> str:
    """Return a table as HTML, with notes as paragraphs below."""
    first, *others = rows
    heads = "".join(f"<th>{escape(x)}</th>" for x in first)
    cells = ["".join(f"<td>{escape(x)}</td>" for x in row) for row in others]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    below = "".join(f"<p>{escape(x)}</p>" for x in notes)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{below}"


def size(count: int) -> str:
    """Return a number of bytes as text, in the largest unit in which it is at least 1."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    for larger in units:
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def numbers(
    heading: str, about: str, format: Format, components: Sequence[Tensor], values: Tensor | None
) -> str:
    """Return the HTML of a tensor: how it is stored and, if given, its values with their
    components.
    """
    stored = [str(x.dtype).removeprefix("torch.") for x in components]
    note = f"{format.name} ({' + '.join(stored)}), {about}"
    if values is None or any(x.shape != values.shape for x in components):
        return f"<pre>{escape(heading)}</pre><p>{escape(note)}</p>"
    columns = [x.detach().flatten().tolist() for x in (values, *components)]
    rows = [[f"{x:.17g}" for x in row] for row in zip(*columns, strict=True)]
    names = [component.name for component in format.components]
    return f"<pre>{escape(heading)}</pre>{as_html([['number', *names], *rows], [note])}"
