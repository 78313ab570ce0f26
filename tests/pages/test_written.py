"""What is made of other files and committed, or made of pages, is what they make."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pages = pytest.importorskip("support.pages", reason="sybil is not installed")

ROOT = Path(__file__).parents[2]
WRITE = ROOT / "docs/_ext/write.py"
LESSONS = sorted((ROOT / "docs/tutorials").glob("*.md"))


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True,
    )  # fmt: skip


def test_figures_and_tables_of_pages_are_those_of_the_results():
    done = run(WRITE, "--check")
    assert done.returncode == 0, f"make pages writes anew:\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_a_table_that_is_not_true_is_found(tmp_path):
    """On a copy of the project, which has nothing but what tables are made of."""
    for name in ("docs", "benchmarks", "mcftensor", "studies"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/figures").mkdir()
    (tmp_path / "docs/figures/drawing.py").symlink_to(ROOT / "docs/figures/drawing.py")
    shutil.copytree(WRITE.parent, tmp_path / "docs/_ext")
    (tmp_path / "CONTRIBUTING.md").touch()
    page = tmp_path / "docs/page.md"
    page.write_text("<!-- table: formats -->\n\n<!-- end -->\n")
    script = tmp_path / "docs/_ext/write.py"
    assert run(script).returncode == 0
    page.write_text(page.read_text().replace("| `bf16x2` | 16", "| `bf16x2` | 17"))
    assert run(script, "--check").returncode == 1
    page.write_text("<!-- table: formats -->\n")
    assert "no <!-- end -->" in run(script, "--check").stderr


@pytest.mark.parametrize("folder", ["docs", "mcftensor", "tests", "studies", "examples", "."])
def test_nothing_is_left_of_a_merge(folder):
    """Between the two marks that git leaves, on lines of their own."""
    files = (ROOT / folder).glob("*" if folder == "." else "**/*")
    texts = {".md", ".py", ".toml", ".yml", ".yaml", ".css", ".js", ".txt", ".sh"}
    for path in files:
        if path.suffix in texts and path.is_file():
            assert not re.search(r"^(<{7}|>{7}) ", path.read_text(), re.M), path


def test_pages_have_no_holes_when_they_are_read_as_markdown():
    """Pictures are there, and every mark has something between it and its end."""
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text()
        for image in re.findall(r"!\[[^\]]*\]\(([^):]+)\)", text):
            assert (page.parent / image).exists(), (page.name, image)
        marks = re.findall(r"^<!-- (?:table|section): .*? -->\n(.*?)(?=^<!-- )", text, re.M | re.S)
        assert len(marks) == len(re.findall(r"^<!-- (?:table|section): ", text, re.M)), page.name
        assert all(between.strip() for between in marks), page.name


@pytest.fixture(scope="module")
def notebooks() -> dict[str, dict]:
    """Those of the lessons, by name."""
    code = (
        "import json, sys; from pathlib import Path; import notebooks;"
        "print(json.dumps({p: notebooks.notebook(Path(p)) for p in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, LESSONS)],
        cwd=WRITE.parent, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {Path(p).stem: json.loads(text) for p, text in json.loads(done.stdout).items()}


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.stem)
def test_a_notebook_has_the_code_of_its_page(notebooks, page):
    """Blocks of the page as the tests of pages find them, and what is shown under each."""
    cells = [cell for cell in notebooks[page.stem]["cells"] if cell["cell_type"] == "code"]
    expected: list[tuple[str, str]] = []
    for example in pages.examples(page):
        if example.document.text[example.start :].startswith("```output"):
            expected[-1] = (expected[-1][0], str(example.parsed).strip("\n"))
        else:
            expected.append((str(example.parsed).strip("\n"), ""))
    assert len(expected) > 3
    assert [("".join(c["source"]), shown(c)) for c in cells] == expected


def shown(cell) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"]).strip("\n")


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.stem)
def test_a_notebook_is_of_the_format(notebooks, page):
    """What the schema of nbformat 4.5 asks for."""
    found = notebooks[page.stem]
    assert found.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert found["metadata"]["kernelspec"].keys() >= {"name", "display_name"}
    assert found["metadata"]["language_info"]["name"] == "python"
    ids = [cell["id"] for cell in found["cells"]]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", x) for x in ids)
    required = {
        "markdown": {"cell_type", "id", "metadata", "source"},
        "code": {"cell_type", "id", "metadata", "source", "outputs", "execution_count"},
    }
    for cell in found["cells"]:
        assert cell.keys() == required[cell["cell_type"]]
        assert cell["source"]
        assert all(isinstance(line, str) for line in cell["source"])
        for output in cell.get("outputs", ()):
            assert output.keys() == {"output_type", "name", "text"}
            assert output["output_type"] == "stream"
            assert output["name"] == "stdout"
    prose = "".join(
        "".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "markdown"
    )
    assert "<div" not in prose
    assert "<details" not in prose
    assert not re.search(r"\]\([^)]*(\.md|\.svg)", prose)
