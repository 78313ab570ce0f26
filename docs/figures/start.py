"""What the two trainings of the first page kept of their updates: the code of the page is run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from drawing import FIRST, THIRD, Axis, Drawings, Line, chart

PAGE = Path(__file__).parents[1] / "start.md"


def draw() -> Drawings:
    """The ratio of each sample, in plain bf16 and in expansions."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    page: dict[str, Any] = {}
    folder = Path.cwd()
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(elsewhere)  # the page saves a file
        try:
            for block in code[:2]:
                exec(block, page)
        finally:
            os.chdir(folder)
    lines = [
        Line(name, [(r["step"], r["ratio"]) for r in page[meter].history], colour)
        for name, meter, colour in (
            ("bf16x2, plus", "edq", FIRST),
            ("plain bf16", "plain_bf16", THIRD),
        )
    ]
    x = Axis(0, 300, {float(s): str(s) for s in (0, 100, 200, 300)})
    y = Axis(0, 1.1, {0.0: "0", 0.5: "0.5", 1.0: "1"})
    return chart(x, y, lines, "steps of AdamW at a learning rate of 1e-4", "ratio", 110)
