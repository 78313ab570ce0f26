"""What the pages say is so: their code runs, and prints what they show."""

from pathlib import Path

import pytest

pages = pytest.importorskip("pages", reason="sybil is not installed")

ROOT = Path(__file__).parents[1]
# Those of the trainers run in tests/ecosystem, each on its own.
ELSEWHERE = {ROOT / "docs/trainers.md"}
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - ELSEWHERE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for example in pages.examples(page):
        example.evaluate()


def test_an_output_that_is_not_what_is_printed_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 / 3)\n```\n\n```output\n0.35\n```\n")
    first, second = pages.examples(page)
    first.evaluate()
    with pytest.raises(Exception, match=r"0\.35"):
        second.evaluate()
