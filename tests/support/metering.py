"""Short runs of optimizers with and without a meter."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import mcftensor as mcf
from support.helpers import parameter

PLAIN = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(6, 4), (4,), ()]
MATRICES = [(6, 4), (4, 3)]


def make(kind, *shape, scale=1.0, seed=0):
    """A parameter in a plain dtype or a format."""
    if isinstance(kind, mcf.Format):
        p = parameter(kind, *shape, seed=seed)
        with torch.no_grad():
            p.mul_(scale)
        return p
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter((scale * torch.randn(shape, generator=generator)).to(kind))


def bits(x):
    """A snapshot of parameters, states and groups, for comparison to the bit."""
    if isinstance(x, mcf.MCFTensor):
        return [bits(term) for term in x.components]
    if isinstance(x, torch.Tensor):
        x = x.detach().to_dense() if x.is_sparse else x.detach()
        return (
            (str(x.dtype), tuple(x.shape), x.contiguous().numpy(force=True).tobytes())
            if (x.dtype != torch.bfloat16)
            else bits(x.contiguous().view(torch.int16))
        )
    if isinstance(x, (list, tuple)):
        return [bits(part) for part in x]
    if isinstance(x, dict):
        return {name: bits(part) for name, part in x.items() if name != "params"}
    return repr(x) if isinstance(x, (int, float, bool, str, type(None))) else None


def gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(build, kind, shapes, metered, steps=3, scheduled=True, steady=False, **options):
    """A short run; what it leaves, and its meter."""
    torch.manual_seed(0)
    parameters = [make(kind, *shape, scale=0.1, seed=i) for i, shape in enumerate(shapes)]
    half = len(shapes) // 2 + 1
    groups = [{"params": parameters[:half]}, {"params": parameters[half:]}]
    optimizer = build([group for group in groups if group["params"]])
    if hasattr(optimizer, "train"):
        optimizer.train()
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1)) if scheduled else None
    meter = mcf.EDQ(optimizer, **options) if metered else None
    for step in range(steps):
        gradients(parameters, 0 if steady else step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    states = list(optimizer.state.values())
    return bits([parameters, states, optimizer.param_groups, torch.get_rng_state()]), meter


def assert_metered(build, kind, shapes, coupled=False, **options):
    """Metering changes not one bit, and every parameter gets figures that make sense."""
    without, _ = train(build, kind, shapes, metered=False, **options)
    found, edq = train(build, kind, shapes, metered=True, coupled=coupled, **options)
    assert found == without
    assert edq.not_metered == {}
    assert len(edq.per_parameter) == len(shapes)
    assert len(edq.history) == options.get("steps", 3)
    return edq


class Stepper(torch.optim.Optimizer):
    """Subtracts the gradient; tests override what they need."""

    def __init__(self, params, **defaults):
        super().__init__(params, {"lr": 1.0, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        p.sub_(p.grad, alpha=group["lr"])


def with_gradient(cls, kind=torch.bfloat16, count=1, **options):
    parameters = [make(kind, 64, seed=i) for i in range(count)]
    optimizer = cls(parameters)
    gradients(parameters, 0)
    return parameters, optimizer, mcf.EDQ(optimizer, **options)
