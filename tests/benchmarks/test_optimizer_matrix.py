"""The page on optimizers: it says what was measured, of every class, and that still holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import mcftensor as mcf
from common.database import configurations, paths_of
from common.roster import PACKAGES, classes, paths, subject
from matrix_page import render
from optimizer_matrix import CONFIGURATION_WAYS, WAYS, measure

for package in PACKAGES[1:]:
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/optimizer-matrix.json").read_text())
PAGE = (ROOT / "docs/optimizers.md").read_text()

# Published figures have two digits, and processors differ in the last bits of a sum.
FACTOR = 2.0
FLOOR = 1e-7

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = {
    "torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Adafactor",
    "pytorch_optimizer.Lion", "pytorch_optimizer.StableAdamW", "pytorch_optimizer.CAME",
    "schedulefree.AdamWScheduleFree", "prodigyopt.Prodigy",
}  # fmt: skip
CASES = [
    pytest.param(
        package,
        name,
        id=f"{package}.{name}",
        marks=[] if f"{package}.{name}" in QUICK else [pytest.mark.slow],
    )
    for package in PACKAGES
    for name in classes(package)
]


def test_the_page_is_what_the_figures_say():
    assert render(PAGE, RESULTS) == PAGE


def test_every_class_is_on_the_page():
    installed = {f"{package}.{name}" for package in PACKAGES for name in classes(package)}
    assert installed == set(RESULTS["classes"])


def assert_published(found, published):
    """Figures are at most what is published, and what did not run still does not."""
    if isinstance(published, str):
        assert isinstance(found, str)
        return
    for way, figure in published.items():
        if isinstance(figure, str):
            assert isinstance(found[way], str), way
        else:
            assert found[way] <= max(FACTOR * figure, FLOOR), (way, found[way], figure)


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize(("package", "name"), CASES)
def test_classes(package, name):
    tried = subject(package, name)
    published = RESULTS["classes"][f"{package}.{name}"]
    for path, flags in paths(package, name).items():
        with_flags = replace(tried, keywords=tried.keywords | flags)
        assert_published(measure(with_flags, WAYS), published["paths"][path])


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        pytest.param(
            name,
            configuration,
            id=f"{name}-{configuration}",
            marks=[] if (name, configuration) == ("SGD", "nesterov") else [pytest.mark.slow],
        )
        for name, found in RESULTS["configurations"].items()
        for configuration in found
    ],
)
def test_configurations_with_plain_gradients(name, configuration):
    tried = configurations(name)[configuration]
    published = RESULTS["configurations"][name][configuration]
    for path, flags in paths_of(name).items():
        with_flags = replace(tried, keywords=tried.keywords | flags)
        assert_published(measure(with_flags, CONFIGURATION_WAYS), published[path])


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULTS["compiled"])
def test_compiled(name):
    torch.compiler.reset()
    package, _, name = name.rpartition(".")
    found = measure(subject(package, name), {"bf16x3": WAYS["bf16x3"]}, compiled=True)
    assert_published(found, RESULTS["compiled"][f"{package}.{name}"])


def test_gradients_accumulate_on_exact_ones():
    p = nn.Parameter(mcf.as_expansion(torch.ones(3), mcf.bf16x2))
    p.grad = mcf.as_expansion(torch.ones(3), mcf.bf16x2)
    (p * torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    assert mcf.as_plain(p.grad, torch.float64).tolist() == [2, 2, 2]
