"""Lessons as notebooks (nbformat 4.5): blocks of Python are cells, and what is shown under them is
their output. Mathematics stays between dollars, which notebooks set."""

from __future__ import annotations

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

# Blocks of code, in turn with what is between them.
BLOCK = re.compile(r"^```(python|output)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[([^\]]+)\]\(([^)]+\.svg)\)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)")
PLAY = re.compile(r"^<div class=\"play\" data-play=\"(\w+)\".*?</div>\n", re.MULTILINE)
FOLDED = re.compile(r"<details markdown>\n<summary>(.*?)</summary>\n|</details>\n")
SITE = "https://mcftensor.github.io/mcftensor/latest"
NOTE = "To run this, install the library first: `pip install .` in a clone of it."


def notebook(page: Path) -> str:
    """A page of Markdown as the JSON of a notebook."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str, **rest: Any) -> None:
        if text.strip():
            source = text.strip("\n").splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": source}
            cells.append(cell | rest)

    text = page.read_text()
    end = 0
    for block in BLOCK.finditer(text):
        add("markdown", prose(text[end : block.start()], page))
        end = block.end()
        if block[1] == "python":
            add("code", block[2], execution_count=None, outputs=[])
        else:
            lines = block[2].splitlines(keepends=True)
            output = {"output_type": "stream", "name": "stdout", "text": lines}
            cells[-1]["outputs"] = [output]
    add("markdown", prose(text[end:], page))
    cells[0]["source"] += ["\n\n", NOTE]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    made = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def prose(text: str, page: Path) -> str:
    """Text of a page that reads alone: figures inside, answers open, links to other lessons."""
    here = f"{SITE}/{page.parent.name}/{page.stem}.html"
    text = PLAY.sub(rf"[A calculator for this]({here}#play=\1) is on the page.\n", text)
    text = FOLDED.sub(lambda m: f"**{m[1]}**\n" if m[1] else "", text)
    text = IMAGE.sub(lambda m: f"![{m[1]}]({inside(page.parent / m[2])})", text)
    return LINK.sub(link, text)


def inside(image: Path) -> str:
    """A picture as an address that holds it."""
    return "data:image/svg+xml;base64," + base64.b64encode(image.read_bytes()).decode()


def link(found: re.Match[str]) -> str:
    """To the notebook of another lesson, or to another host, or only its text."""
    file, _, _ = found[2].partition("#")
    if "://" in file:
        return found[0]
    stem, kind = posixpath.splitext(file)
    return f"[{found[1]}]({stem}.ipynb)" if kind == ".md" and "/" not in stem else found[1]
