"""Pages of Markdown as programs: their blocks of Python run in order, in one namespace a page.

A block prints what it prints, and the value of its last line, as a notebook does. Where a block of
`output` follows, that must be it, up to white space, with numbers compared to the digits that are
shown. Blocks with `>>>` are doctests. A block of `diff` is two programs: the one before runs on its
own, and leaves its names in `before`, where what it needs is there; the page goes on with the one
after it. Pages take a `model` and `tokens` for granted; what else they
do is made in a comment, `<!-- invisible-code-block: python ... -->`.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sybil import Document, Example
from sybil.evaluators.doctest import NUMBER, OutputChecker
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from torch import Tensor, nn

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | NUMBER


def run(source: str, namespace: dict[str, Any], path: str = "page", line: int = 1) -> str:
    """Execute a block, and give what it prints and what its last expression is worth."""
    module = ast.parse("\n" * (line - 1) + source, path)
    last = module.body.pop() if module.body and isinstance(module.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(module, path, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), path, "eval"), namespace)
            if value is not None:
                print(repr(value))
    return printed.getvalue()


class Model(nn.Sequential):
    """A language model for seconds, whose outputs have a loss as those of transformers do."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16))

    def forward(self, tokens: Tensor) -> Any:
        scores = super().forward(tokens).float()
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores, tokens))


class Blocks(CodeBlockParser):
    """Blocks of Python, visible or not."""

    language = "python"

    def evaluate(self, example: Example) -> None:
        """Run it, and remember what it printed."""
        line = example.line + example.parsed.line_offset + 1
        example.namespace["_printed"] = run(example.parsed, example.namespace, example.path, line)


class Changes(CodeBlockParser):
    """A program before and after a change."""

    language = "diff"

    def evaluate(self, example: Example) -> None:
        """Run both; of what other libraries do before, as far as they are installed."""
        line = example.line + example.parsed.line_offset + 1
        lines = example.parsed.splitlines()
        old, new = (
            "\n".join(text[1:] if text[:1] in f" {mark}" else "" for text in lines) for mark in "-+"
        )
        before = dict(example.namespace)
        try:
            run(old, before, example.path, line)
        except (ModuleNotFoundError, NotImplementedError) as error:
            if not isinstance(error, ModuleNotFoundError) and "CUDA device" not in str(error):
                raise
        example.namespace["before"] = before
        example.namespace["_printed"] = run(new, example.namespace, example.path, line)


class Outputs(CodeBlockParser):
    """What the block before prints, as the page shows it."""

    language = "output"

    def evaluate(self, example: Example) -> str | None:
        """The difference, or None."""
        found, checker = example.namespace["_printed"], OutputChecker()
        if checker.check_output(example.parsed, found, FLAGS):
            return None
        shown = doctest.Example("", example.parsed)
        return str(checker.output_difference(shown, found, FLAGS))


class Python(PythonCodeBlockParser):
    """Doctests, or else blocks."""

    codeblock_parser_class = staticmethod(lambda *_: Blocks())  # type: ignore[assignment]


def examples(path: Path) -> Iterator[Example]:
    """What a page has to run and to compare, in order."""
    document = Document.parse(str(path), Python(doctest_optionflags=FLAGS), Changes(), Outputs())
    document.namespace |= {"model": Model(), "tokens": torch.arange(16)}
    return iter(document)
