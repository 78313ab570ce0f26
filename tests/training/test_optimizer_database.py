"""torch's own database of optimizers: every configuration, in every path, against float64."""

import functools
from dataclasses import replace

import pytest
import torch

import mcftensor as mcf
from common.database import cases, configurations, paths_of
from common.trial import Way, displacement, error
from support.optimizers import SAMPLE

STEPS = 6
FORMATS = [mcf.bf16x3, mcf.fp32x2]
CASES = cases()

QUICK = ("SGD", "nesterov", mcf.bf16x3)  # of compiled steps; others are in test_compile.py

slow = [pytest.mark.slow]


@functools.cache
def measured(name, configuration, path, way, compiled=False):
    subject = configurations(name)[configuration]
    keywords = subject.keywords | ({} if compiled else paths_of(name)[path])
    subject = replace(subject, keywords=keywords, steps=STEPS)
    if compiled:
        torch.compiler.reset()
    exact = displacement(subject, Way(torch.float64))
    return error(displacement(subject, way, compiled=compiled), exact)


def assert_more_exact_than_float32(case, format, compiled=False):
    name = case[0]
    found = measured(*case, Way(format), compiled)
    if name == "Muon":  # orthogonalizes in bfloat16, whatever it is given
        assert found <= 2e-2
    else:
        assert found <= measured(*case, Way(torch.float32), compiled)


def test_every_class_has_its_sample():
    assert set(SAMPLE) == {name for name, _, _ in CASES}
    assert all(configuration in configurations(name) for name, configuration in SAMPLE.items())


@pytest.mark.thinned(of=18)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(case), marks=[] if SAMPLE[case[0]] == case[1] else slow)
        for case in CASES
    ],
)
def test_more_exact_than_float32(case, format):
    assert_more_exact_than_float32(case, format)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "configuration", "format"),
    [
        pytest.param(
            name,
            configuration,
            format,
            id=f"{name}-{configuration}-{format.name}",
            marks=[] if (name, configuration, format) == QUICK else slow,
        )
        for name, configuration, path in CASES
        for format in FORMATS
        if path == "for-loop" and name != "LBFGS"
    ],
)
def test_compiled(name, configuration, format):
    """LBFGS does not compile over plain tensors either."""
    assert_more_exact_than_float32((name, configuration, "for-loop"), format, compiled=True)
