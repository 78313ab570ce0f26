"""The command line tells a mistake before PyTorch is imported."""

import os
import subprocess
import sys

import pytest


@pytest.fixture
def status(tmp_path):
    """The status with which Python leaves where importing torch is status 99."""
    (tmp_path / "torch.py").write_text("raise SystemExit(99)")
    (tmp_path / "another.py").write_text("import mcftensor")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, capture_output=True, check=False, env=os.environ | {"PYTHONPATH": paths}
        ).returncode

    return run


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["convert", "--help"], 0),
        ([], 2),
        (["memory"], 2),
        (["audit", "a", "b", "--threshold", "2"], 2),
        (["memory", "7B"], 99),
    ],
)
def test_options_are_parsed_without_torch(status, arguments, expected):
    assert status("-m", "mcftensor", *arguments) == expected


def test_options_of_other_programs_are_theirs(status):
    assert status("-m", "another", "--help") == 99
    assert status("-m", "another", "mcftensor") == 99
    assert status("-c", "import mcftensor", "--help") == 99
