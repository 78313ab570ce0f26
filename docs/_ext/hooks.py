"""What mkdocs is told beyond `mkdocs.yml`: mathematics, figures inside of pages, notebooks of
lessons, and sections that are files elsewhere.

In a page,

- `![what it shows](figures/name.svg)` becomes the drawing itself, in the colours of the page, and
  its narrow form on a phone;
- what is between `<!-- section: examples/README.md -->` and `<!-- end -->` becomes that file
  without its title;
- what is between `<!-- table: name -->` and `<!-- end -->` is committed: `write.py` makes it.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))  # mkdocs takes it away again

import notebooks
from mathml import MathML
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DRAWINGS = HERE.parent / "figures"
LONG = 40
"""Rows of a table that the search leaves out."""

FIGURE = re.compile(r"^!\[([^\]]+)\]\((?:[./]*)figures/(\w+)\.svg\)$", re.MULTILINE)
SECTION = re.compile(
    r"^<!-- section: ([\w./]+) -->$(?:(?!^<!-- ).)*^<!-- end -->$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"^<!-- (table: .*|end) -->$", re.MULTILINE)
TABLE = re.compile(r"<table(>.*?</table>)", re.DOTALL)
TITLE = re.compile(r"^# .*\n", re.MULTILINE)
NUMBER = re.compile(r"<td( style=\"[^\"]*\")?>(?=[−+]?\d[^\s<]*( (%|of|±)[^<]*| \([^<]*\))?</td>)")
FOR_FEW = (
    *("design/", "reference/index", "reference/accuracy.html#each-operator"),
    *(f"reference/accuracy.html#{module}" for module in ("torch", "fft", "linalg", "nnfunctional")),
    *("findings", "larger", "benchmarks", "speed"),
)
"""Pages that search results show last."""
COMPOUND = re.compile(r"\b[A-Za-z][a-z0-9]+(?:[A-Z][a-z0-9]*)+\b|\b[A-Z]{2,}[a-z][A-Za-z0-9]*\b")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
KEY = re.compile(r"(?<=_str;)(for\(var (\w)=this\.final[^}]*\2=\2\+\w\+\w\.id)")
RESULT = re.compile(r"\]\((?:\.\./)*benchmarks/results/([\w-]+\.png)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension, which is no package, and the version."""
    config.markdown_extensions.append(MathML())  # type: ignore[arg-type]
    found = re.search(r'__version__ = "(.+)"', (ROOT / "mcftensor/__init__.py").read_text())
    config.repo_name = f"{config.site_name} {found[1] if found else ''}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pictures of benchmarks and notebooks are part of the site."""
    for path in sorted((ROOT / "benchmarks/results").glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    for file in [file for file in files if has_notebook(file)]:
        content = notebooks.notebook(Path(config.docs_dir) / file.src_uri)
        path = Path(file.src_uri).with_suffix(".ipynb").as_posix()
        files.append(File.generated(config, path, content=content))
    return files


def has_notebook(file: File) -> bool:
    """Whether a page can be saved as a notebook: a lesson."""
    return file.src_uri.endswith(".md") and file.src_uri.startswith("tutorials/")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in what is elsewhere."""
    up = "../" * page.file.src_uri.count("/")
    markdown = SECTION.sub(lambda m: section(m[1], page.file.src_uri), markdown)
    markdown = MARK.sub("", markdown)
    markdown = FIGURE.sub(lambda m: figure(m[2], m[1]), markdown)
    if has_notebook(page.file):
        name = f"{page.file.name}.ipynb"
        button = f'\n[Save as a notebook]({name}){{ .notebook download="{name}" }}\n'
        markdown = TITLE.sub(lambda m: m[0] + button, markdown, count=1)
    return RESULT.sub(rf"]({up}results/\1)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep figures of tables whole, which browsers break at hyphens as in 1.2e-05. Keep long
    tables out of the search, which would find nothing else."""
    html = NUMBER.sub(r'<td class="number"\1>', html)
    return TABLE.sub(
        lambda m: f"<table data-search-exclude{m[1]}" if m[1].count("<tr>") > LONG else m[0], html
    )


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Pages hold their notebook, which a page opened from a disk cannot fetch. The link to the
    repository asks no other host for its stars."""
    output = output.replace(' data-md-component="source"', "")
    if not has_notebook(page.file):
        return output
    content = notebooks.notebook(Path(config.docs_dir) / page.file.src_uri)
    data = content.replace("</", "<\\/")  # the same JSON, in which no element ends
    script = f'<script type="application/json" id="notebook">{data}</script>\n</body>'
    return output.replace("</body>", script, 1)


def on_post_build(config: MkDocsConfig) -> None:
    """Words are found by how they begin, so give each section the ends of its compounds as words:
    `dataparallel` and `parallel` of DistributedDataParallel."""
    separate_digits(Path(config.site_dir))
    path = Path(config.site_dir) / "search/search_index.json"
    index = json.loads(path.read_text())
    for section in index["docs"]:
        if section["location"].startswith(FOR_FEW):
            section["boost"] = 0.3
        text = re.sub(r"<[^>]+>", " ", f"{section['title']} {section['text']}")
        if ends := sorted({end for word in COMPOUND.findall(text) for end in ends_of(word)}):
            section["text"] += f"<p>{' '.join(ends)}</p>"
    path.write_text(json.dumps(index, separators=(",", ":")))


def separate_digits(site: Path) -> None:
    """Give lunr distinct keys for distinct nodes of its graph of words. It joins labels and numbers
    of nodes, so `a` to 1 and `2` to 3 has the key of `a` to 12 and `3` to …: the two are merged,
    words appear that no page has, and a query that meets one finds nothing."""
    [worker] = site.glob("assets/javascripts/workers/search.*.min.js")
    code, count = KEY.subn(r'\1+","', worker.read_text())
    if count != 1:
        raise PluginError("The search of this mkdocs-material joins its keys elsewhere: see KEY.")
    worker.write_text(code)


def ends_of(word: str) -> list[str]:
    """What a compound ends in, by its capitals."""
    parts = PART.findall(word)
    return ["".join(parts[i:]).lower() for i in range(1, len(parts))]


def figure(name: str, caption: str) -> str:
    """A drawing inside the page, where it takes the page's colours and font, for two widths."""
    wide, narrow = (
        (DRAWINGS / f"{name}{kind}.svg").read_text().strip() for kind in ("", "-narrow")
    )
    return (
        f'<figure class="drawing" data-search-exclude>\n<div class="wide">{wide}</div>\n'
        f'<div class="narrow">{narrow}</div>\n<figcaption>{caption}</figcaption>\n</figure>\n'
    )


def section(file: str, page: str) -> str:
    """The text under the title of a file; links are those of this page."""
    _, _, body = (ROOT / file).read_text().partition("\n")
    folder = posixpath.dirname(page) or "."
    return re.sub(r"\]\(docs/([^)#]+)", lambda m: f"]({posixpath.relpath(m[1], folder)}", body)
