"""What compiled code is made with, where it is kept, and what happens where there is none."""

import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

import mcftensor as mcf
from mcftensor.kernels import blocks, cpu, running
from support.helpers import small_model
from support.kernel_cases import assert_same_bits, expression, operand, run, way

BLOCKS = blocks.run
REASON = "runs without compiled code"

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """As in a new process with nothing compiled."""
    cpu.find.cache_clear()
    monkeypatch.setattr(cpu, "_REASONS", [])
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(tmp_path / "cache"))
    yield
    cpu.find.cache_clear()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def compute(name, operation, monkeypatch):
    """The result of an operation on the same operands in one of the ways, eager code at hand."""
    torch.manual_seed(5)
    operands = [operand(mcf.bf16x2, 501) for _ in range(2)]
    with way(name):
        monkeypatch.setattr(blocks, "run", BLOCKS)
        return run(expression(operation, mcf.bf16x2), *operands)


def assert_one_warning_and_right_results(monkeypatch, match):
    for operation in ("add", "mul"):  # each a program of its own
        expected = compute("eager", operation, monkeypatch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = compute("cpp", operation, monkeypatch)
        assert_same_bits(got, expected)
        assert len(caught) == (operation == "add")
        for warning in caught:
            assert REASON in str(warning.message)
            assert match in str(warning.message)


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_one_warning_and_right_results(monkeypatch, "CXX")


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "echo no such flag >&2; exit 1"))
    assert_one_warning_and_right_results(monkeypatch, "no such flag")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_makes_nonsense(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "echo nonsense > kernel.so"))
    torch.manual_seed(5)
    expected = compute("eager", "add", monkeypatch)
    with pytest.warns(UserWarning, match=REASON):
        assert_same_bits(compute("cpp", "add", monkeypatch), expected)


def test_a_compiler_that_makes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "exit 0"))
    assert_one_warning_and_right_results(monkeypatch, "cannot keep compiled code")


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    if cpu.find() is None:
        pytest.skip("needs a C++ compiler")
    assert_one_warning_and_right_results(monkeypatch, "MCFTENSOR_CACHE_DIR")


@needs_compiler
@pytest.mark.parametrize("directory", [".", "cache"])
def test_relative_paths(monkeypatch, tmp_path, directory):
    monkeypatch.chdir(tmp_path)
    script(tmp_path / "cxx", 'exec c++ "$@"')
    monkeypatch.setenv("CXX", "./cxx")
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", directory)
    expected = compute("eager", "mul", monkeypatch)
    assert_same_bits(compute("cpp", "mul", monkeypatch), expected)
    assert len(list((tmp_path / directory).glob("*.so"))) == 1


def test_small_work_is_not_compiled(monkeypatch, tmp_path):
    running.kernel_of.cache_clear()
    model = mcf.as_expansion(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not (tmp_path / "cache").exists()


def made(monkeypatch):
    """A list that kernels are put into when they are made."""
    kernels, make = [], running.Kernel

    def spy(*args):
        kernels.append(make(*args))
        return kernels[-1]

    monkeypatch.setattr(running, "Kernel", spy)
    return kernels


@needs_compiler
def test_work_that_adds_up_is_compiled(monkeypatch, tmp_path):
    running.kernel_of.cache_clear()
    operands = [operand(mcf.bf16x2, 1 << 18) for _ in range(2)]
    kernels = made(monkeypatch)
    for step in range(1, 6):
        run(expression("add", mcf.bf16x2), *operands)
        (kernel,) = kernels
        assert (kernel.launch is not None) == (step << 18 >= running.BUILD_AFTER)


def test_a_directory_that_is_full(monkeypatch, tmp_path):
    """What was used longest ago goes, and nothing that was not put there."""
    monkeypatch.setattr(cpu, "MOST_BYTES", 1000)
    other = tmp_path / "cache" / "letters.txt"
    other.parent.mkdir()
    other.write_text("x" * 2000)
    paths = [other.parent / f"mcftensor_kernel_{i}.so" for i in range(5)]
    for i, path in enumerate(paths):
        path.write_text("x" * 300)
        os.utime(path, (i, i))
        cpu.tidy(path)
        if i == 2:
            assert cpu.is_kept(paths[0])
    assert [path.exists() for path in paths] == [True, False, False, True, True]
    assert other.exists()
    monkeypatch.setattr(cpu, "MOST_BYTES", 0)
    paths[1].write_text("x" * 300)
    cpu.tidy(paths[1])
    assert [path.exists() for path in paths] == [False, True, False, False, False]
    assert sorted(path.name for path in other.parent.iterdir()) == sorted(
        [other.name, paths[1].name]
    )


@needs_compiler
def test_code_that_was_removed_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "MOST_BYTES", 0)
    for operation in ("add", "mul", "add"):
        expected = compute("eager", operation, monkeypatch)
        assert_same_bits(compute("cpp", operation, monkeypatch), expected)
        assert len(list((tmp_path / "cache").iterdir())) == 1


PROGRAM = """
import mcftensor as mcf, torch
from mcftensor.kernels import running
kernels, make = [], running.Kernel
running.Kernel = lambda *args: kernels.append(make(*args)) or kernels[-1]
torch.manual_seed(0)
x, y = (mcf.as_expansion(torch.randn(4096, 300, dtype=torch.float64), mcf.bf16x2) for _ in "xy")
z = x * y + x
kernel = [k for k in kernels if k.worked or k.launch][-1]
assert kernel.launch is not None
print(mcf.as_plain(z, torch.float64).sum().item())
"""


def start():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@needs_compiler
def test_processes_share_what_is_compiled(monkeypatch, tmp_path):
    log = tmp_path / "log"
    cxx = script(tmp_path / "cxx", f'echo compiled >> {log}\nsleep 0.3\nexec c++ "$@"')
    monkeypatch.setenv("CXX", cxx)
    both = [start(), start()]  # each compiles, or finds what the other has
    results = {process.communicate(timeout=120)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(results) == 1
    compilations = len(log.read_text().splitlines())
    kept = sorted((tmp_path / "cache").iterdir())
    assert kept
    assert all(path.suffix == ".so" for path in kept)
    assert len(kept) <= compilations <= 2 * len(kept)
    later = start()
    assert {later.communicate(timeout=120)[0]} == results
    assert len(log.read_text().splitlines()) == compilations
