"""What mkdocs is told beyond `mkdocs.yml`: mathematics, figures and tables that are made when the
site is built, and pages that are sections of files elsewhere.

In a page,

- `![what it shows](figures/name.svg)` becomes the drawing that `docs/figures/name.py` makes;
- `<!-- table: name -->` becomes the table that `tables.py` makes of committed results;
- `<!-- section: README.md, Limits -->` becomes that section, and without a title the whole file.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATHS = [str(HERE), str(HERE.parent / "figures"), str(ROOT), str(ROOT / "benchmarks")]
sys.path[:0] = PATHS  # mkdocs takes them away again

import tables
from mathml import MathML
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FIGURE = re.compile(r"^!\[([^\]]+)\]\((?:[./]*)figures/(\w+)\.svg\)$", re.MULTILINE)
TABLE = re.compile(r"^<!-- table: ([\w ]+) -->$", re.MULTILINE)
SECTION = re.compile(r"^<!-- section: ([\w./]+)(?:, ([^>]+))? -->$", re.MULTILINE)
NUMBER = re.compile(r"<td( style=\"[^\"]*\")?>(?=[−+]?\d[^\s<]*( (%|of|\()[^<]*)?</td>)")
RESULT = re.compile(r"\]\((?:\.\./)*benchmarks/results/([\w-]+\.png)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension, which is no package, and find the figures."""
    sys.path[:0] = PATHS
    config.markdown_extensions.append(MathML())  # type: ignore[arg-type]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pictures of benchmarks are part of the site."""
    for path in sorted((ROOT / "benchmarks/results").glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in what is made."""
    up = "../" * page.file.src_uri.count("/")
    markdown = SECTION.sub(lambda m: section(m[1], m[2], page.file.src_uri), markdown)
    markdown = TABLE.sub(lambda m: getattr(tables, m[1].replace(" ", "_"))(), markdown)
    markdown = FIGURE.sub(lambda m: figure(m[2], m[1]), markdown)
    return RESULT.sub(rf"]({up}results/\1)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep figures of tables whole: browsers break 1.2e-05 at its hyphen."""
    return NUMBER.sub(r'<td class="number"\1>', html)


def figure(name: str, caption: str) -> str:
    """A drawing inside the page, where it takes the page's colours and font."""
    drawing = importlib.import_module(name).draw()
    return f'<figure class="drawing">\n{drawing}\n<figcaption>{caption}</figcaption>\n</figure>\n'


def section(file: str, title: str | None, page: str) -> str:
    """The text under a heading, without it; links are those of this page."""
    text = (ROOT / file).read_text()
    _, _, body = text.partition(f"\n## {title}\n" if title else "\n")
    if not body:
        raise ValueError(f"{page}: {file} has no section {title!r}")
    if title:
        body = re.split(r"^## ", body, maxsplit=1, flags=re.MULTILINE)[0]
    folder = posixpath.dirname(page) or "."
    return re.sub(r"\]\(docs/([^)#]+)", lambda m: f"]({posixpath.relpath(m[1], folder)}", body)
