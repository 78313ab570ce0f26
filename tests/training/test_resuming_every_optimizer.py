"""Every optimizer goes on to the bit from a state dict, over expansions."""

import copy
import io

import pytest
import torch

import mcftensor as mcf
from common.roster import PACKAGES, classes, paths, subject
from common.trial import SHAPES, Way, Weights
from support.helpers import assert_same_bits

for package in PACKAGES[1:]:
    pytest.importorskip(package)

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = ("torch.optim", "schedulefree", "prodigyopt")
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
    for format in (mcf.bf16x3, mcf.bf16x2, mcf.fp32x2)
]


class Run:
    """Weights of several shapes, a number among them, and an optimizer."""

    def __init__(self, tried, flags, format):
        shapes = tried.shapes if tried.shapes is not SHAPES else (*SHAPES, ())
        self.weights = Weights(Way(format), shapes)
        self.optimizer = tried.make(self.weights, **tried.keywords | flags)
        self.tried = tried

    def train(self, steps):
        for _ in range(steps):
            self.tried.drive(self.optimizer, self.weights, self.optimizer.step)
        return self

    def parameters(self):
        return [p.detach() for p in self.weights.tensors]

    def state(self):
        return copy.deepcopy(self.optimizer.state_dict())


@pytest.mark.parametrize(("package", "name", "path", "format"), CASES)
def test_goes_on_to_the_bit(package, name, path, format):
    tried, flags = subject(package, name), paths(package, name)[path]
    try:
        whole = Run(tried, flags, format).train(6)
    except Exception as error:  # noqa: BLE001  # the page on optimizers says which do not run
        pytest.skip(str(error)[:100])
    stopped = Run(tried, flags, format).train(3)
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
    assert_same_bits(resumed.train(3).parameters(), whole.parameters())
