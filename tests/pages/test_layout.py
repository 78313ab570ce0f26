"""The package is laid out as its pages say: one concept a file, and each entry with a caller."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mcftensor"
HANDLERS = [path for x in ("dispatch", "operators") for path in (PACKAGE / x).glob("*.py")]
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted(x.parent for x in PACKAGE.glob("*/**/__init__.py"))

BUDGETS = {
    "arithmetic": 2050,
    "bridge": 1285,
    "checkpoint": 2880,
    "dispatch": 4400,
    "export": 1510,
    "formats": 2285,
    "host": 690,
    "kernels": 5380,
    "meters": 1430,
    "operators": 2280,
    "passes": 2430,
    "patches": 2190,
    "reproducible": 3100,
    "scaling": 2660,
    "serving": 1110,
    "sums": 400,
    "tensor": 3300,
    "tools": 2352,
    "training": 2965,
    "wide": 5280,
}
"""Lines of a folder. Whoever exceeds one makes another part shorter, or says why in a commit."""

AXES = {
    "has_float64": 8,
    "is_bare|is_compiling|is_transformed": 26,
    r"_role\b|common_role": 21,
    r"\.shared\b|is_shared": 32,
    "is_scaled|ScaledFormat|format.rules": 21,
    "TapedTensor": 5,
}
"""Questions about one axis, and how many files ask them. Each belongs to one stage, so a number may
only become smaller."""

_ALIKE = "one operation: on floats, on the terms of a number, on tensors of terms"
_AS_CONSTANT = "one function, of a rational, and of terms or of float64"
_BACK_ENDS = "one operation, for two back ends"
SHARED = {
    "fma": _ALIKE,
    "sqrt": _ALIKE,
    "add": _ALIKE,
    "mul": _ALIKE,
    "div": _ALIKE,
    "two_prod": _ALIKE,
    **dict.fromkeys(("atan", "exp", "log"), _AS_CONSTANT),
    **dict.fromkeys(
        ("gelu", "digamma", "ndtr", "softplus", "tanhshrink"),
        "one function, of terms and of float64",
    ),
    **dict.fromkeys(
        ("log_softmax", "logsumexp"), "one function, of what formats store and of logits"
    ),
    "parts": "what an exponential, or a logarithm, is put together from",
    "power_of_two": "of an integer in the base, or of a scale's exponent",
    "where": "a choice of terms, or of expansions",
    "like": "an expansion like another: a constant, or of the same layout",
    "source": _BACK_ENDS,
    "launch": _BACK_ENDS,
    "run": "an elementwise function over columns: eagerly, or by the best way there is",
    "collapse": "the rounded sum: of terms, or of what a format stores",
    "Place": "two meanings: of an instruction in a program, of a parameter in an optimizer",
    "prepare": "two meanings: convert a model and its optimizer, and meet the first expansion",
}
"""Public names of more than one module, and why."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_folder_has_a_page_that_names_its_modules(folder):
    page = (folder / "README.md").read_text()
    named = set(re.findall(r"`([a-z0-9_/]+)\.py`", page))
    own = {name for name in named if "/" not in name}
    assert own == {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert [name for name in named - own if not (PACKAGE / f"{name}.py").exists()] == []
    assert len(page.splitlines()) <= 70


def test_files_have_names_of_their_own():
    found = [path.name for path in MODULES if path.name != "__init__.py"]
    assert len(found) == len(set(found))


def test_public_names_have_one_meaning():
    places = defaultdict(set)
    for path in MODULES:
        for statement in ast.parse(path.read_text()).body:
            is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            if is_definition and not statement.name.startswith("_"):
                places[statement.name].add(path)
    assert {name for name, paths in places.items() if len(paths) > 1} == SHARED.keys()


def test_the_page_on_design_names_each_folder():
    page = (ROOT / "docs/design/index.md").read_text()
    folders = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert [name for name in folders if f"`{name}/`" not in page] == []


@pytest.mark.parametrize("folder", sorted(BUDGETS))
def test_folders_keep_to_their_budgets(folder):
    lines = sum(path.read_text().count("\n") for path in (PACKAGE / folder).rglob("*.py"))
    assert 0.9 * BUDGETS[folder] <= lines <= BUDGETS[folder]


def test_each_folder_has_a_budget():
    assert {path.name for path in FOLDERS if path.parent == PACKAGE} == BUDGETS.keys()


@pytest.mark.parametrize("question", AXES)
def test_no_more_files_ask_about_an_axis(question):
    found = [path for path in MODULES if re.search(question, path.read_text())]
    assert len(found) <= AXES[question]


def test_few_modules_stand_at_the_top():
    top = {path.stem for path in PACKAGE.glob("*.py")}
    tools = {"__main__", "options"}
    assert (
        top
        == {"__init__", "convert", "errors", "exact", "functional", "selfcheck", "wings"} | tools
    )


@pytest.mark.parametrize("path", sorted(HANDLERS), ids=lambda path: path.stem)
def test_each_entry_names_its_caller(path):
    source = path.read_text()
    comments, headings = _comments(source)
    missing = [
        ast.unparse(entry)
        for call, entry in _entries(ast.parse(source))
        if entry.end_lineno not in comments
        and not headings.intersection(range(call.lineno, entry.lineno))
    ]
    assert missing == []


def _entries(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.expr]]:
    """What is registered, and the call or set that it stands in."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="implements")):
                yield from ((node, entry) for entry in node.args)
            case ast.AnnAssign(target=ast.Name(id="FUNCTIONS" | "WHOLE"), value=ast.Set(elts=all_)):
                yield from ((node, entry) for entry in all_)
            case ast.AnnAssign(
                target=ast.Name(id="_CHOICES" | "ALGORITHMS"), value=ast.Dict(values=all_)
            ):
                yield from ((node, entry) for entry in all_)


def _comments(source: str) -> tuple[set[int], set[int]]:
    """The lines that end in a comment, and those that are one."""
    found = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    headings = {token.start[0] for token in found if token.line.lstrip().startswith("#")}
    return {token.start[0] for token in found} - headings, headings
