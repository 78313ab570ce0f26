"""Mathematics in Markdown, written as MathML when the site is built: no script runs in the reader's
browser. `$...$` stands in a line, `$$...$$` as a paragraph of its own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor


class Inline(InlineProcessor):
    """`$u^2$`, with no white space inside the dollars, so that prices stay prices."""

    def handleMatch(  # type: ignore[override]
        self, m: re.Match[str], data: str
    ) -> tuple[str, int, int]:
        """Keep the MathML away from what else Markdown does to text."""
        return self.md.htmlStash.store(convert(m[1])), m.start(0), m.end(0)


class Display(BlockProcessor):
    """A paragraph that begins and ends with `$$`."""

    def test(self, parent: ElementTree.Element, block: str) -> bool:
        """Whether this is one."""
        return block.startswith("$$") and block.rstrip().endswith("$$")

    def run(self, parent: ElementTree.Element, blocks: list[str]) -> None:
        """Write it as one element that may scroll on a narrow screen."""
        formula = convert(blocks.pop(0).strip()[2:-2].strip(), display="block")
        element = ElementTree.SubElement(parent, "div", {"class": "formula"})
        element.text = self.parser.md.htmlStash.store(formula)


class MathML(Extension):
    """Both."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Before backslashes are read as escapes, and after code has been taken out."""
        md.inlinePatterns.register(
            Inline(r"(?<![\\$\w])\$(\S|\S[^$\n]*?\S)\$(?![\d$])", md), "math", 185
        )
        md.parser.blockprocessors.register(Display(md.parser), "math", 95)
