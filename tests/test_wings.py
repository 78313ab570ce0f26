"""The core imports no wing, and works without any of them."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mcftensor as mcf
from mcftensor import wide, wings
from mcftensor.dispatch import torch_functions
from mcftensor.kernels import custom_ops
from mcftensor.wings import WINGS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mcftensor"

SAMPLE = ["tensor/test_arithmetic.py", "training/test_half_weights.py", "files/test_terms.py"]
"""Tests of the core: operators, optimizer steps, checkpoints."""

MORE = [
    *("tensor/test_convert.py", "tensor/test_autograd.py", "tensor/test_structure.py"),
    *("formats/test_contract.py", "training/test_optimizers.py", "training/test_format_change.py"),
    *("files/test_save_file.py", "files/test_resume.py", "meters/test_edq_states.py"),
    *("compile/test_untraced.py", "distributed/test_ddp.py", "patches/test_patches.py"),
]

OF_WINGS = {"scaling": ["formats/test_contract.py", "training/test_format_change.py"]}
"""Files of tests that have cases of a wing at their top."""

USES = {
    "bridge": "mcf.checkpoint.convert_checkpoint",
    "export": "mcf.wings.wing('export')",
    "host": "mcf.host.weights",
    "reproducible": "mcf.exact.sum; mcf.functional.kl_div; mcf.order_free_gradients",
    "scaling": "mcf.scaling.scalify",
    "serving": "mcf.deltas; mcf.apply_deltas; mcf.checkpoint.Delta",
    "tools": "mcf.meters.audit; mcf.meters.Summary",
    "wide": "mcf.as_expansion(torch.ones(2), mcf.fp32x3).exp()",
}


def imported(path: Path) -> set[str]:
    """The modules that a module imports when it runs, anywhere in it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
        elif isinstance(node, ast.Import):
            found |= {x.name for x in node.names}
    return found


def wings_in(names: set[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    return {x[1] for x in parts if x[0] == "mcftensor" and len(x) > 1} & set(WINGS)


def test_the_core_imports_no_wing():
    found = {
        str(path.relative_to(PACKAGE)): wings
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in WINGS and (wings := wings_in(imported(path)))
    }
    assert found == {}


def run(program: str, without: str = "") -> str:
    command = [sys.executable, "-c", f"import sys\n{program}"]
    environment = os.environ | {"MCFTENSOR_WITHOUT": without}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_each_is_imported_at_its_first_use():
    lines = ["import torch, mcftensor as mcf", f"wings = {WINGS}"]
    lines.append("held = lambda: [x for x in wings if f'mcftensor.{x}' in sys.modules]")
    lines.append("print(held())")
    for name, uses in USES.items():
        lines.append(f"before = held(); {uses}; assert {name!r} in held(), {name!r}")
    assert USES.keys() == set(WINGS)
    assert run("\n".join(lines)) == "[]"


def works(files: list[str], *missing: str) -> None:
    """Run tests in a process without some wings, whose names say what is missing."""
    run(
        f"""
import pytest, torch, support.without_wings, mcftensor as mcf
for name in {missing}:
    for use in {USES}[name].split("; "):
        with pytest.raises(ModuleNotFoundError, match=f"No module named 'mcftensor.{{name}}'"):
            eval(use)
files = [f"tests/{{x}}" for x in {files}]
options = ["-q", "--no-header", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, *files], plugins=[support.without_wings]))
""",
        ",".join(missing),
    )


def test_the_core_works_without_all_of_them():
    works(SAMPLE, *WINGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", WINGS)
def test_the_core_works_without_each(name):
    works([x for x in [*SAMPLE, *MORE] if x not in OF_WINGS.get(name, ())], name)


def test_their_operators_are_found_by_name():
    for wing in WINGS:
        importlib.import_module(f"mcftensor.{wing}")
    found = {
        name: function.__module__.split(".")[1] for name, function in custom_ops.DEFINITIONS.items()
    }
    assert {name: part for name, part in found.items() if part in WINGS} == wings.OPERATORS


def test_a_saved_program_is_loaded_in_a_new_process(tmp_path):
    class Sums(torch.nn.Module):
        def forward(self, x):
            return mcf.exact.sum(x, 0), mcf.functional.logsumexp(x, -1)

    x = torch.arange(6.0).view(2, 3)
    torch.export.save(torch.export.export(Sums(), (x,)), tmp_path / "sums.pt2")
    program = f"""
import torch, mcftensor
sums = torch.export.load({str(tmp_path / "sums.pt2")!r}).module()
print([x.tolist() for x in sums(torch.arange(6.0).view(2, 3))])"""
    assert run(program) == str([y.tolist() for y in Sums()(x)])


def test_functions_that_a_wing_replaces_are_those_that_the_core_gives_it():
    assert set(wide.OWN) == torch_functions._OF_WIDE
