"""`make gpu` by all its stages on a CPU, and what it makes of results."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpu
import roofline
from machine_code.kernels import WORK
from speed import gpu_report

ROOT = Path(__file__).parents[2]


def quick(folder):
    return gpu.parse(["--device", "cpu", "--quick", "--out", str(folder)])


@pytest.mark.slow
def test_all_stages_run_and_are_not_run_again(tmp_path, capsys):
    arguments = ["--device", "cpu", "--quick", "--by", "me", "--out", str(tmp_path)]
    assert gpu.main(arguments) == 0
    record = json.loads((tmp_path / "results.json").read_text())
    assert list(record["stages"]) == ["selfcheck", "tests", "kernels", "steps", "training"]
    assert all(x["status"] == 0 for x in record["stages"].values())
    assert list(record["stages"]["training"]["figures"]["strategies"]) == list(gpu.STRATEGIES)
    for x in record["stages"]["training"]["figures"]["strategies"].values():
        assert 0 < x["loss"] < 10
    page = (tmp_path / "report.md").read_text()
    assert "Measured by me." in page
    assert "164 checks passed on cpu" in page
    capsys.readouterr()
    assert gpu.main(arguments) == 0
    assert capsys.readouterr().out.count("done before") == 5


def test_a_stage_is_kept_and_one_that_takes_too_long_is_broken_off(tmp_path):
    def stage(name, code, limit=60):
        return gpu.Stage(name, [sys.executable, "-c", code], limit)

    count = f"from pathlib import Path; p = Path({str(tmp_path / 'n')!r}); p.open('a').write('1')"
    for _ in range(2):
        found = gpu.run(stage("one", f"{count}; print('said')"), tmp_path)
        assert (found["status"], found["text"]) == (0, ["said"])
    assert (tmp_path / "n").read_text() == "1"
    found = gpu.run(
        stage("two", "print('so far', flush=True); import time; time.sleep(60)", 3), tmp_path
    )
    assert found["status"] == "broken off after 3 s"
    assert found["text"] == ["so far"]
    assert gpu.run(stage("three", "raise SystemExit(3)"), tmp_path)["status"] == 3


def test_without_a_gpu_it_ends_in_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "none")]) == 2
    found = capsys.readouterr()
    assert len(found.err.splitlines()) == 1
    assert "PyTorch finds no GPU" in found.err
    assert not found.out
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.skipif(any(map(Path.exists, map(Path, ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")))),
                    reason="there is a GPU")  # fmt: skip
def test_make_gpu_without_a_gpu_ends_in_one_sentence_before_it_installs():
    command = ["make", "--no-print-directory", "gpu", "VENV=/nowhere/venv"]  # within another make
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert "No GPU is at hand" in line


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("has_gpu", "torch_finds_it", "options", "unpinned"),
    [
        (False, False, "", set()),
        (True, False, "", {"triton"}),
        (True, True, "--system-site-packages ", {"torch", "triton"}),
    ],
)
def test_make_installs_for_the_gpu_that_is_there(
    has_gpu, torch_finds_it, options, unpinned, tmp_path
):
    """A PyTorch that finds the GPU stays, and each PyTorch for GPUs chooses its Triton."""
    pins = {"numpy": "numpy==2.1", "torch": "torch==2.13.0", "torchao": "torchao==1"}
    pins["triton"] = 'triton==3.9 ; python_version >= "3.11"'
    (tmp_path / "constraints.txt").write_text("\n".join(pins.values()) + "\n")
    (tmp_path / "pyproject.toml").touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    script = f"""#!/bin/sh
[ "$1" = -c ] && {{ {"echo torch" if torch_finds_it else "exit 1"}; exit; }}
echo "$@" >> said; mkdir -p .venv/bin; cp python .venv/bin/pip
"""
    (tmp_path / "python").write_text(script)
    (tmp_path / "python").chmod(0o755)
    gpus = f"GPUS={tmp_path if has_gpu else '/nowhere'}"
    command = ["make", "-s", "install", "PYTHON=./python", "VENV=.venv", gpus]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    made, installed = (tmp_path / "said").read_text().splitlines()
    assert made == f"-m venv {options}.venv"
    assert "-c .venv/constraints.txt" in installed
    kept = (tmp_path / ".venv/constraints.txt").read_text().splitlines()
    assert kept == [pin for name, pin in pins.items() if name not in unpinned]


KERNELS = {
    "fast": {"memory": 10.0, "computing": 4.0, "measured": 11.0, "ratio": 1.1},
    "slow": {"memory": 10.0, "computing": 12.0, "measured": 17.0, "ratio": 17 / 12},
    "too fast": {"memory": 10.0, "computing": 4.0, "measured": 6.0, "ratio": 0.6},
}


def record(status=0):
    contenders = {
        "mcf plus, fused": {
            "bytes_held": 12.0,
            "seconds": 1e-3,
            "ratio": 0.7,
            "share_of_limit": 0.9,
        },
        "absent": {"failed": "ModuleNotFoundError: none"},
    }
    one = {"contenders": contenders}
    training = {
        name: {"tokens_a_second": speed, "peak_bytes": peak, "loss": 9.1}
        for name, speed, peak in (("plus", 1200.0, 3e9), ("autocast", 1000.0, 4e9))
    }
    stages = {
        "selfcheck": {"text": ["200 checks passed on cuda in 50 s"]},
        "tests": {"text": ["x.py ..", "===== 70 passed in 3s ====="]},
        "kernels": {"figures": {"at hand": {"bandwidth": 9e11, "kernels": KERNELS}}, "text": []},
        "steps": {"figures": {"workloads": {"one tensor": one, "GPT-2": one}}, "text": []},
        "training": {"figures": {"model": "124M", "strategies": training}, "text": []},
    }
    return {
        "by": "somebody",
        "machine": {"mcftensor": "1", "torch": "2.13.0", "python": "3.12"},
        "device": {"name": "GPU X", "memory": 8 << 30, "capability": "sm_90", "runtime": "CUDA 13"},
        "stages": {name: {"seconds": 60.0, "status": status} | x for name, x in stages.items()},
    }


def test_the_page_says_what_is_off():
    assert gpu_report.flagged(record()["stages"]["kernels"]["figures"]) == (["slow"], ["too fast"])
    page = gpu_report.page(record())
    for part in ("GPU X", "sm_90, 8 GiB, CUDA 13", "70 passed in 3s", "200 checks passed",
                 "| slow | 10.00 | 12.00 | 17.00 | 1.42 ← |",
                 "| too fast | 10.00 | 4.00 | 6.00 | 0.60 ← |",
                 "slower than predicted: slow. More than a third faster than predicted: too fast.",
                 "absent: ModuleNotFoundError",
                 "1,200", "Measured by somebody."):  # fmt: skip
        assert part in page
    assert "Tests: its words" not in page
    assert "failed: 1" in gpu_report.page(record(1))
    assert "Tests: its words" in gpu_report.page(record(1))


def test_pages_have_a_row_for_each_device(tmp_path, monkeypatch):
    for folder in ("docs/figures", "docs/_ext"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    from tables import speed  # noqa: PLC0415

    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    assert speed.gpus() == "*No device has been measured yet.*"
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/x.json").write_text(json.dumps(record()))
    (tmp_path / "gpu/y.json").write_text(json.dumps(record(1)))
    rows = speed.gpus().splitlines()[2:]
    assert rows[0] == ("| GPU X | 8 GiB | 2.13.0 | passed | 90 % | 0.70 | 1.20 | 0.75 | somebody |")
    assert "**failed**" in rows[1]


def test_predictions_beside_measurements(monkeypatch):
    some = {name: WORK[name] for name in ("AdamW plus", "float32 to bf16x2")}
    monkeypatch.setattr("machine_code.kernels.WORK", some)
    monkeypatch.setattr("speed.clocks.bandwidth", lambda device, clock, size: 1e9)
    found = roofline.at_hand("cpu", 1 << 16)["kernels"]
    assert list(found) == list(some)
    for x in found.values():
        assert x["ratio"] == pytest.approx(x["measured"] / max(x["memory"], x["computing"]))


def test_the_notebook_runs_the_same_programs():
    found = json.loads((ROOT / "examples/gpu.ipynb").read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    code = "".join("".join(x["source"]) + "\n" for x in found["cells"] if x["cell_type"] == "code")
    for program in re.findall(r"python (\w+/\w+\.py)", code):
        assert (ROOT / program).exists()
    assert "benchmarks/gpu.py" in code
    assert all(x["id"] and x["source"] for x in found["cells"])
