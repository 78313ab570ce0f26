"""How far the gains of the optional first lesson moved: the code of the page is run."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from drawing import FIRST, INK, THIRD, Axis, Drawings, Line, chart

PAGE = Path(__file__).parents[1] / "tutorials/still.md"


def draw() -> Drawings:
    """The mean distance of the gains from 1 after each step, in three formats."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    page: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in code[:4]:
            exec(block, page)
    lines = [
        Line(name, [*enumerate(page[run])][::20], colour, dash, shift=shift, width=width)
        for name, run, colour, dash, shift, width in (
            ("bf16: exactly 0", "bf16", THIRD, "", 0.0, 2.0),
            ("expansions of bf16", "expansions", FIRST, "", -6.0, 2.0),
            ("float32", "float32", INK, "1 5", 10.0, 2.4),
        )
    ]
    x = Axis(0, 600, {float(s): str(s) for s in (0, 200, 400, 600)})
    y = Axis(-0.001, 0.05, {v: f"{v:g}" for v in (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)})
    label = "mean distance of the gains from 1"
    return chart(x, y, lines, "steps of AdamW at a learning rate of 3e-4", label, 150)
