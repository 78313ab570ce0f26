"""What the pages say is so: their code runs, and prints what they show."""

import json
import re
import sys
from pathlib import Path

import pytest

import mcftensor as mcf
from pretraining.strategies import STRATEGIES

pages = pytest.importorskip("support.pages", reason="sybil is not installed")

ROOT = Path(__file__).parents[2]
# Those of the trainers run in tests/ecosystem, each on its own.
ELSEWHERE = {ROOT / "docs/trainers.md"}
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - ELSEWHERE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    formats = sys.modules[mcf.Format.__module__]  # of which a page makes new ones
    monkeypatch.setattr(formats, "_REGISTRY", dict(formats._REGISTRY))
    for example in pages.examples(page):
        example.evaluate()


def test_an_output_that_is_not_what_is_printed_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 / 3)\n```\n\n```output\n0.35\n```\n")
    first, second = pages.examples(page)
    first.evaluate()
    with pytest.raises(Exception, match=r"0\.35"):
        second.evaluate()


def test_a_change_runs_before_and_after(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```diff\n-x = 1\n+x = 2\n y = x / {}\n```\n".replace("{}", "(x - z)"))
    for z, kind in ((0, None), (1, ZeroDivisionError), (2, ZeroDivisionError)):
        (example,) = pages.examples(page)
        example.namespace["z"] = z
        if kind is None:
            example.evaluate()
            assert (example.namespace["before"]["x"], example.namespace["x"]) == (1, 2)
        else:
            with pytest.raises(kind):
                example.evaluate()


def test_a_change_goes_without_a_library_that_is_not_there(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```diff\n-import no_such_library\n+x = 2\n```\n")
    (example,) = pages.examples(page)
    example.evaluate()
    assert example.namespace["x"] == 2


def test_questions_quote_what_the_library_says():
    source = "".join(path.read_text() for path in sorted((ROOT / "mcftensor").rglob("*.py")))
    source = re.sub(r'"\s+f?"', "", source)  # texts that go over several lines
    page = (ROOT / "docs/guides/questions.md").read_text()
    quotes = re.findall(r"^`([^`]+)`\n:   (?!PyTorch's error)", page, re.MULTILINE)
    assert len(quotes) > 20
    for quote in quotes:
        for part in quote.split("…"):
            assert part.strip() in source, quote


RESULTS = ROOT / "benchmarks/results"


def rows(text, title):
    """Cells of the table of the README under a header that begins so, by their first."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()[2:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: cells for first, *cells in table}


@pytest.mark.parametrize(
    "file",
    ["README.md", "Makefile", "CONTRIBUTING.md", "studies/README.md", "docs/start.md"],
)
def test_the_number_of_strategies_is_the_same_everywhere(file):
    words = ("eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen")
    found = re.findall(r"small GPT in (\w+)(?: precision)? strategies", (ROOT / file).read_text())
    assert [words.index(word) + 8 for word in found] == [len(STRATEGIES)]


def test_the_readme_has_the_training_of_the_results():
    found = rows((ROOT / "README.md").read_text(), "| | bytes a parameter |")
    seeds = [json.loads((RESULTS / f"pretrain-seed{i}.json").read_text()) for i in range(3)]
    names = {"master weights": "master", "plain bf16": "bf16"}
    assert {"master weights", "plain bf16", "plus"} < found.keys()
    for row, (size, *nats, lost, seconds) in found.items():
        name = names.get(row, row)
        first = seeds[0]["strategies"][name]
        finals = [x["strategies"][name]["final"] for x in seeds]
        key = "nats" if name == "master" else "difference_to_master"
        given = [float(x.replace("−", "-")) for x in nats]
        assert given == pytest.approx([x[key] for x in finals], abs=6e-5)
        assert float(lost.rstrip(" %")) / 100 == pytest.approx(finals[0]["lost"], rel=0.2)
        assert float(size) == pytest.approx(first["bytes_per_parameter"], abs=6e-3)
        assert float(seconds) == pytest.approx(first["seconds_per_step"], abs=6e-4)
