"""Every optimizer goes on to the bit from a state dict, over expansions."""

import copy
import io
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import mcftensor as mcf
from common.roster import PACKAGES, classes, paths, subject
from common.trial import SHAPES, Way, Weights
from support.helpers import assert_same_bits

for package in PACKAGES[1:]:
    pytest.importorskip(package)

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = ("torch.optim", "schedulefree", "prodigyopt")
# A sparse gradient of a parameter without dimensions has one.
WITHOUT_NUMBERS = [("torch.optim", "SparseAdam")]
# Exchanges parameters by their bits.
REFUSED = [("schedulefree", "ScheduleFreeWrapper")]
CASES = [
    pytest.param(
        package,
        name,
        path,
        format,
        id=f"{package}.{name}-{path}-{format.name}",
        marks=[] if package in QUICK and format is mcf.bf16x3 else [pytest.mark.slow],
    )
    for package in PACKAGES
    for name in classes(package)
    for path in paths(package, name)
    for format in (mcf.bf16x3, mcf.bf16x2, mcf.fp32x2, mcf.bf16i16)
]


class Run:
    """Weights of several shapes, a number among them where it can be, and an optimizer."""

    def __init__(self, tried, flags, format):
        self.weights = Weights(Way(format), tried.shapes)
        self.optimizer = tried.make(self.weights, **tried.keywords | flags)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        self.tried = tried

    def train(self, steps):
        for _ in range(steps):
            self.tried.drive(self.optimizer, self.weights, self.optimizer.step)
        return self

    def parameters(self):
        return [p.detach() for p in self.weights.tensors]

    def state(self):
        return copy.deepcopy(self.optimizer.state_dict())


def tensors(state):
    """Of a state dict, in which some optimizers keep objects of their own as well."""
    return [x for x in tree_leaves(state) if isinstance(x, torch.Tensor)]


def seed():
    """Of every generator that an optimizer draws from."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


def drawn():
    """Where the generators are."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def go_on_drawing(states):
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


@pytest.mark.thinned(of=18)
@pytest.mark.parametrize(("package", "name", "path", "format"), CASES)
def test_goes_on_to_the_bit(package, name, path, format):
    tried, flags = subject(package, name), paths(package, name)[path]
    if tried.shapes is SHAPES and (package, name) not in WITHOUT_NUMBERS:
        tried = replace(tried, shapes=(*SHAPES, ()))
    if (package, name) in REFUSED:
        with pytest.raises(TypeError, match="has no bits"):
            Run(tried, flags, format).train(1)
        return
    seed()
    try:
        whole = Run(tried, flags, format).train(6)
    except Exception as error:  # the page on optimizers says which do not run
        if package in QUICK:
            raise
        pytest.skip(str(error)[:100])
    seed()
    stopped = Run(tried, flags, format).train(3)
    states = drawn()
    content = io.BytesIO()
    torch.save({"weights": stopped.parameters(), "optimizer": stopped.state()}, content)
    content.seek(0)
    saved = torch.load(content, weights_only=False)
    resumed = Run(tried, flags, format)
    resumed.weights._generator.set_state(stopped.weights._generator.get_state())
    with torch.no_grad():
        for p, x in zip(resumed.weights.tensors, saved["weights"], strict=True):
            p.copy_(x)
    resumed.optimizer.load_state_dict(saved["optimizer"])
    assert_same_bits(tensors(resumed.state()), tensors(saved["optimizer"]))
    go_on_drawing(states)
    assert_same_bits(resumed.train(3).parameters(), whole.parameters())
