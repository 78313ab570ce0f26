"""What belongs to a release agrees: versions, supported releases, recipes."""

import re
from pathlib import Path

import pytest
import yaml

import mcftensor as mcf

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_versions_agree():
    assert yaml.safe_load(text("CITATION.cff"))["version"] == mcf.__version__
    newest = re.search(
        r"^## \[([^\]]+)\] - (Unreleased|\d{4}-\d\d-\d\d)$", text("CHANGELOG.md"), re.M
    )
    assert newest[1] == mcf.__version__


def test_one_address():
    home = ABOUT["urls"]["Homepage"]
    assert yaml.safe_load(text("CITATION.cff"))["url"] == home
    assert ABOUT["urls"]["Changelog"].startswith(home)
    assert ABOUT["urls"]["Issues"].startswith(home)


def test_the_workflow_tests_the_oldest_torch_and_what_the_readme_says():
    (oldest,) = re.findall(r"torch>=([\d.]+)", " ".join(ABOUT["dependencies"]))
    matrix = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]["tests"]["strategy"]
    tested = {(x["torch"], x["python"]) for x in matrix["matrix"]["include"]}
    assert f"{oldest}.0" in {torch for torch, _ in tested}
    assert "newest" in {torch for torch, _ in tested}
    for _, python in tested:
        assert f"Programming Language :: Python :: {python}" in ABOUT["classifiers"]
    assert min(tuple(map(int, p.split("."))) for _, p in tested) == (3, 10)
    assert ABOUT["requires-python"] == ">=3.10"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_is_there(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {name for step in steps for name in re.findall(r"\bmake ([\w-]+)", step)}
    scripts = {name for step in steps for name in re.findall(r"(\.ci/\w+)", step)}
    assert targets or scripts
    for name in targets:
        assert re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), name
    for name in scripts:
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_every_target_is_phony():
    targets = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert targets == phony


def test_what_a_commit_is_checked_with_is_what_lint_runs():
    hooks = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    entries = [hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks]
    for tool in entries:
        assert f"$(BIN)/{tool}" in MAKEFILE
