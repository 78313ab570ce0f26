"""What is changed in torch: alone by `mcftensor/patches`, and not needed where torch differs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import mcftensor as mcf
from mcftensor.patches.table import TABLE, Patch, after_import
from support.cases import cases_of
from support.writes_to_torch import writes

PACKAGE = Path(mcf.__file__).parent
NAMES = {row.attribute for row in TABLE}
INSTALLED = [row for row in TABLE if importlib.util.find_spec(row.name.partition(".")[0])]
WAITING = [row.name for row in TABLE if row.change is not None and not row.before]


@pytest.fixture(scope="module")
def answers(request):
    """What is warned of where a name is not as it was, by the names of the tests that run; and what
    a process finds that imports the library, and makes an expansion late.
    """
    test = test_without_a_patch_one_warning_says_what_is_lost_and_all_else_works
    rows = [case.callspec.params["row"] for case in cases_of(request.session, test)]
    late = [name for name in WAITING if name.startswith("torch.")]
    command = [sys.executable, "-W", "error", "-m", "support.patch_losses"]
    command.append(json.dumps([[row.name for row in rows], late]))
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


@pytest.fixture
def warned_of(answers):
    return answers[0]


@pytest.fixture
def process(answers):
    return answers[1]


def test_few_changes_do_not_wait_and_say_why():
    early = [row for row in TABLE if row.before]
    assert len(early) <= 3
    assert early == [row for row in TABLE if row.when == "import mcftensor"]


def test_without_an_expansion_torch_is_as_it_was(process):
    assert process["changed without expansions"] == []


def test_the_first_expansion_makes_all_changes_that_wait(process):
    by_calls = {row.name for row in TABLE if row.when.startswith("mcf.")}
    waited = {name for name in WAITING if name.startswith("torch.")}  # others are not imported
    assert set(process["changed with one"]) == waited - by_calls


def test_whatever_makes_the_first_expansion_makes_the_changes(process):
    assert process["ways that change nothing"] == []


def test_a_step_that_a_scheduler_kept_before_the_first_expansion_is_over_numbers(process):
    before, after = process["steps"]
    assert before == after


def test_nothing_finds_modules_while_nothing_waits(process):
    assert "_Finder" not in process["finders"]


@pytest.mark.thinned(of=18)
@pytest.mark.parametrize("row", INSTALLED, ids=lambda row: row.name.removeprefix("torch."))
def test_without_a_patch_one_warning_says_what_is_lost_and_all_else_works(row, warned_of):
    package = row.name.partition(".")[0]
    message = f"this {package} has no {row.name} as mcftensor knows it: {row.loss}"
    assert warned_of[row.name] == [["PatchWarning", message]]


@pytest.mark.parametrize(
    "found",
    [{"one": 1}, lambda wanted, other: None],
    ids=["another kind", "other arguments"],
)
def test_what_is_not_as_expected_stays(found):
    owner = SimpleNamespace(function=found)
    columns = {"why": "", "releases": "", "when": "", "kind": type(lambda: 0)}
    row = Patch("torch.function", loss=str(found), change=id, takes=("wanted", "x"), **columns)
    with pytest.warns(mcf.errors.PatchWarning, match="torch has no torch.function as"):
        row.install(owner)
    assert owner.function is found


@pytest.mark.parametrize(
    "path",
    sorted({*PACKAGE.rglob("*.py")} - {*PACKAGE.joinpath("patches").rglob("*.py")}),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_other_file_writes_to_torch(path):
    assert writes(path.read_text(), NAMES) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.finfo = None",
        "nn.Module._apply = None",
        "del Optimizer.step",
        "setattr(Optimizer, name, None)",
        "type(optimizer).anything = None",
        "importlib.import_module('torch.optim').SGD = None",
        "torch.optim.optimizer.types.append(int)",
        "classes[int] = None",
        "for cls in (torch.optim.SGD, torch.optim.Adam): cls.anything = None",
        "layer._flat_weight_refs = []",
        "module._load_state_dict_pre_hooks.clear()",
        "module._load_state_dict_pre_hooks |= {}",
        "x.other, x._backward_hooks = None, None",
        "torch.ops.aten.__class__ = None",
    ],
)
def test_a_write_to_torch_is_found(line):
    imports = (
        "import importlib, torch\nfrom torch import nn\nfrom torch.optim import Optimizer\n"
        "from torch.utils.data._utils.collate import table as classes\n"
    )
    assert writes(imports + line, NAMES) == [5]


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.ones(3); x[0] = 1; x.grad = None",
        "module = nn.Linear(3, 2); module.extra = torch.float32",
        "torch.ops.mcftensor.__class__ = dict",
        "names = [torch.float32]; found = dict(names); found[torch] = 1",
    ],
)
def test_writes_to_what_is_made_are_not_counted(line):
    assert writes(f"import torch\nfrom torch import nn\n{line}", NAMES) == []


def test_functions_wait_for_an_import(tmp_path, monkeypatch):
    module = tmp_path / "imported_late.py"
    module.write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    finders, calls = [*sys.meta_path], []
    for number in range(2):
        after_import("imported_late", lambda number=number: calls.append(number))
    with pytest.raises(ZeroDivisionError):
        __import__("imported_late")
    assert calls == []
    module.write_text("value = 1")
    assert __import__("imported_late").value == 1
    assert calls == [0, 1]
    assert sys.meta_path == finders
    after_import("imported_late", lambda: calls.append(2))
    assert calls == [0, 1, 2]
