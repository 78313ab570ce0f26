"""What compiled code is made with, where it is kept, and what happens where there is none."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import mcftensor as mcf
from mcftensor.kernels import cpu, eager, execute, first_use, kernel_cache
from support.helpers import small_model
from support.kernel_cases import assert_same_bits, expression, operand, run, way

EAGER = eager.run
REASON = "runs without compiled code"

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """As in a new process with nothing compiled."""
    cpu.find.cache_clear()
    monkeypatch.setattr(first_use, "_SAID", set())
    monkeypatch.setattr(kernel_cache, "_PRIVATE", [])
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(tmp_path / "cache"))
    yield
    cpu.find.cache_clear()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def compute(name, operation, monkeypatch, format="bf16x2"):
    """The result of an operation on the same operands in one of the ways, eager code at hand."""
    torch.manual_seed(5)
    format = mcf.Format.from_name(format)
    operands = [operand(format, 501) for _ in range(2)]
    with way(name), monkeypatch.context() as patch:
        patch.setattr(eager, "run", EAGER)
        return run(expression(operation, format), *operands)


def assert_one_warning_and_right_results(monkeypatch, match, reason=REASON):
    for operation in ("add", "mul"):  # each a program of its own
        expected = compute("eager", operation, monkeypatch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = compute("cpp", operation, monkeypatch)
        assert_same_bits(got, expected)
        assert len(caught) == (operation == "add")
        for warning in caught:
            assert reason in str(warning.message)
            assert match in str(warning.message)


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_one_warning_and_right_results(monkeypatch, "CXX")


def test_a_system_that_tells_of_its_processor_by_python_alone(monkeypatch, tmp_path):
    """As Windows, which has neither /proc nor `os.uname`."""
    read = Path.read_text

    def read_text(path, *options, **named):
        if path.parts[1:2] == ("proc",):
            raise FileNotFoundError(path)
        return read(path, *options, **named)

    monkeypatch.delattr(os, "uname")
    monkeypatch.setattr(Path, "read_text", read_text)
    for known in (cpu._processor, cpu.vector_bytes):
        monkeypatch.setattr(cpu, known.__name__, known.__wrapped__)
    test_no_compiler(monkeypatch, tmp_path)
    assert cpu.vector_bytes() == 16


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


@pytest.mark.skipif("avx2" not in cpu._processor().split(), reason="needs a processor with AVX2")
def test_vectors_are_as_narrow_as_pytorch_is_told_to_take_them():
    """In a process of its own, since PyTorch reads the variable once."""
    lines = [
        "import torch, mcftensor as mcf",
        "from mcftensor.kernels import cpu",
        "x = mcf.as_expansion(torch.ones(1 << 20), mcf.bf16x2)",
        "assert (x * x).eq(1).all()",
        "print(torch.backends.cpu.get_cpu_capability(), cpu.vector_bytes())",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        check=True,
        capture_output=True,
        env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2"},
        text=True,
    )
    assert done.stdout.split() == ["AVX2", "32"]


def test_a_compiler_that_makes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "exit 0"))
    assert_one_warning_and_right_results(monkeypatch, "cannot open shared object file")


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
    execute.kernel_of.cache_clear()
    model = mcf.as_expansion(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not (tmp_path / "cache").exists()


def made(monkeypatch):
    """A list that kernels are put into when they are made."""
    kernels, make = [], execute.Kernel

    def spy(*args):
        kernels.append(make(*args))
        return kernels[-1]

    monkeypatch.setattr(execute, "Kernel", spy)
    return kernels


@needs_compiler
@pytest.mark.parametrize("length", [1 << 18, 8])
def test_work_that_adds_up_is_compiled(length, monkeypatch, tmp_path):
    """Calls on small tensors too, of which each takes Python some time."""
    execute.kernel_of.cache_clear()
    operands = [operand(mcf.bf16x2, length) for _ in range(2)]
    kernels = made(monkeypatch)
    steps = -(-cpu.BUILD_AFTER // (length + execute.OF_A_CALL))
    for step in range(1, steps + 2):
        run(expression("add", mcf.bf16x2), *operands)
        (kernel,) = kernels
        assert (kernel.launch is not None) == (step >= steps)


def test_a_directory_that_is_full(monkeypatch, tmp_path):
    """What was used longest ago goes, and nothing that was not put there."""
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 1000)
    other = tmp_path / "cache" / "letters.txt"
    other.parent.mkdir()
    other.write_text("x" * 2000)

    def make(scratch):
        (scratch / "draft").write_text("x" * 300)
        return scratch / "draft"

    keys = [kernel_cache.key_of(i) for i in range(5)]
    paths = []
    for i, key in enumerate(keys):
        paths.append(kernel_cache.keep(key, make))
        os.utime(paths[i], (i, i))
        if i == 2:
            assert kernel_cache.kept(keys[0]) == paths[0]
    assert [path.exists() for path in paths] == [True, False, False, True, True]
    assert other.exists()
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 0)
    assert kernel_cache.keep(keys[1], make) == paths[1]
    assert [path.exists() for path in paths] == [False, True, False, False, False]
    assert sorted(path.name for path in other.parent.iterdir()) == sorted(
        [other.name, paths[1].name]
    )


@needs_compiler
def test_code_that_was_removed_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 0)
    for operation in ("add", "mul", "add"):
        expected = compute("eager", operation, monkeypatch)
        assert_same_bits(compute("cpp", operation, monkeypatch), expected)
        assert len(list((tmp_path / "cache").iterdir())) == 1


PROGRAM = """
import mcftensor as mcf, torch
from mcftensor.kernels import execute
kernels, make = [], execute.Kernel
execute.Kernel = lambda *args: kernels.append(make(*args)) or kernels[-1]
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


@pytest.mark.slow
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


# ------------------------------------------------------------------- what others put in its place


PLANTED = """
#include <cstdint>
#include <cstdio>
__attribute__((constructor)) static void found() { std::fclose(std::fopen("{path}", "w")); }
extern "C" void launch(std::int64_t*, double*, std::int64_t, std::int64_t) {{}}
"""


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """The one file of the cache, with code in it that leaves a trace; and the place of the trace.

    Its name fits what is in it.
    """
    compute("cpp", "add", monkeypatch)
    (library,) = (tmp_path / "cache").iterdir()
    trace = tmp_path / "trace"
    source = tmp_path / "planted.cpp"
    source.write_text(PLANTED.replace("{{}}", "{}").replace("{path}", str(trace)))
    made = tmp_path / "planted.so"
    subprocess.run([*cpu.find(), "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    stem = library.stem.rpartition("_")[0]
    library.unlink()
    place = library.with_name(f"{stem}_{kernel_cache._digest(made.read_bytes())}.so")
    return made.rename(place), trace


def belong_to_a_stranger(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:  # who cannot give files away
        is_own, file = kernel_cache._is_own, path.stat().st_ino
        monkeypatch.setattr(kernel_cache, "_is_own", lambda x: x.st_ino != file and is_own(x))


@needs_compiler
def test_files_of_this_user_are_executed(planted, monkeypatch):
    """So that the next tests can fail."""
    _, trace = planted
    compute("cpp", "add", monkeypatch)
    assert trace.exists()


@pytest.mark.thinned(of=3)
@needs_compiler
@pytest.mark.parametrize("what", ["file", "directory", "parent"])
@pytest.mark.parametrize("how", ["owner", "group", "all"])
def test_what_others_can_write_is_not_executed(planted, what, how, monkeypatch, tmp_path):
    library, trace = planted
    place = {"file": library, "directory": library.parent, "parent": tmp_path / "shared"}[what]
    if what == "parent":
        place.mkdir()
        (tmp_path / "cache").rename(place / "cache")
        monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(place / "cache"))
    if how == "owner":
        belong_to_a_stranger(place, monkeypatch)
    elif how == "group":
        monkeypatch.setattr(kernel_cache, "_is_of_this_user_alone", lambda group: False)
        place.chmod(0o770)
    else:
        place.chmod(0o777)
    expected = compute("eager", "add", monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same_bits(compute("cpp", "add", monkeypatch), expected)
    said = [str(warning.message) for warning in caught]
    if what == "file":
        assert said == []
    else:
        (text,) = said
        assert f"other users can write to {place}." in text
        assert "MCFTENSOR_CACHE_DIR" in text
        (private,) = kernel_cache._PRIVATE
        assert private.stat().st_mode & 0o077 == 0
        assert len(list(private.iterdir())) == 1  # compiled once
    assert not trace.exists()


@needs_compiler
def test_a_directory_among_those_of_others(monkeypatch, tmp_path):
    """As in /tmp: each can remove what is his."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(shared / "cache"))
    compute("cpp", "add", monkeypatch)
    assert len(list((shared / "cache").iterdir())) == 1
    assert kernel_cache._PRIVATE == []


@needs_compiler
def test_a_group_of_this_user_alone(monkeypatch, tmp_path):
    """As with a umask of 002, which some systems have."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    monkeypatch.setattr(kernel_cache, "_is_of_this_user_alone", lambda group: True)
    compute("cpp", "add", monkeypatch)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@needs_compiler
def test_symbolic_links(planted, monkeypatch, tmp_path):
    """Of files they are not followed; the directory may be one."""
    library, trace = planted
    other = library.rename(tmp_path / "other.so")
    library.symlink_to(other)
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(tmp_path / "link"))
    expected = compute("eager", "add", monkeypatch)
    assert_same_bits(compute("cpp", "add", monkeypatch), expected)
    assert not trace.exists()
    kept = [x for x in (tmp_path / "cache").iterdir() if not x.is_symlink()]
    assert len(kept) == 1


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "empty", "changed"])
def test_damaged_files_are_made_anew(damage, monkeypatch, tmp_path):
    expected = compute("cpp", "add", monkeypatch)
    (library,) = (tmp_path / "cache").iterdir()
    whole = library.read_bytes()
    broken = {"truncated": whole[:-1000], "empty": b"", "changed": whole[:-1] + b"x"}[damage]
    library.unlink()  # it is mapped into this process
    library.write_bytes(broken)
    assert_same_bits(compute("cpp", "add", monkeypatch), expected)
    assert library.read_bytes() == whole
    assert list((tmp_path / "cache").iterdir()) == [library]


@needs_compiler
def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    """Code is compiled, and kept as long as the process lives."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert_one_warning_and_right_results(monkeypatch, "MCFTENSOR_CACHE_DIR", "compiles anew")
    assert len(list(kernel_cache._PRIVATE[0].iterdir())) == 2


@needs_compiler
def test_a_disk_that_is_full(monkeypatch, tmp_path):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel_cache.Path, "replace", full)
    assert_one_warning_and_right_results(monkeypatch, "No space left on device")


# ---------------------------------------------------------------- compilers that are not IEEE's


FAST = ["-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-ffp-contract=fast"]


@pytest.mark.thinned(of=2)
@needs_compiler
@pytest.mark.parametrize("flag", FAST)
def test_flags_for_fast_arithmetic_are_undone(flag, monkeypatch):
    monkeypatch.setenv("CXX", f"c++ {flag}")
    for operation in ("add", "mul", "div"):
        expected = compute("eager", operation, monkeypatch)
        assert_same_bits(compute("cpp", operation, monkeypatch), expected)
    assert sys.float_info.min / 2 > 0


@pytest.mark.thinned(of=4)
@needs_compiler
@pytest.mark.parametrize("flag", FAST)
@pytest.mark.parametrize(("name", "operation"), [("bf16x2", "div"), ("fp32x2", "mul")])
def test_compilers_that_insist_on_fast_arithmetic(name, operation, flag, monkeypatch, tmp_path):
    """What they make is not kept where it has other bits, and subnormal numbers survive it."""
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", f'exec c++ "$@" {flag}'))
    expected = compute("eager", operation, monkeypatch, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same_bits(compute("cpp", operation, monkeypatch, name), expected)
    assert all("other bits than PyTorch" in str(warning.message) for warning in caught)
    assert len(list((tmp_path / "cache").iterdir())) == 1 - len(caught)
    assert sys.float_info.min / 2 > 0
    assert caught or flag != "-ffast-math"


@needs_compiler
def test_a_process_that_flushes_stays_so(monkeypatch):
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that flushes")
    try:
        compute("cpp", "mul", monkeypatch)
        assert sys.float_info.min / 2 == 0
    finally:
        torch.set_flush_denormal(False)
