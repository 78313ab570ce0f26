"""A signal in the middle of a write leaves no element with terms of two numbers."""

import signal
from time import perf_counter

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.kernel_cases import way

COUNT = 1 << 20
TRIES = 12

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="needs a timer that sends signals"
)


class Cut(BaseException):
    """As KeyboardInterrupt, but of this test."""


def cut(*unused):
    raise Cut


@pytest.fixture
def interrupted():
    """A function that calls another one, cuts it after some seconds, and says whether it did."""
    before = signal.signal(signal.SIGALRM, cut)

    def call(function, seconds):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            function()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Cut:
            return True
        return False

    yield call
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def assert_old_or_new(x, old, new):
    """Each element whole: every term the old one, or every term the new one."""
    is_old, is_new = (
        torch.stack([a == b for a, b in zip(x.components, y.components, strict=True)]).all(0)
        for y in (old, new)
    )
    assert (is_old | is_new).all()


def number(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(COUNT, generator=generator, dtype=torch.float64) + 1


WRITES = {
    "copy_": lambda x, z: x.copy_(z),
    "copy_ of float64": lambda x, z: x.copy_(mcf.as_plain(z, torch.float64)),
    "copy_ of another format": lambda x, z: x.copy_(mcf.as_expansion(z, mcf.bf16x2)),
    "fill_": lambda x, z: x.fill_(z[0]),
    "zero_": lambda x, z: x.zero_(),
    "add_": lambda x, z: x.add_(z),
    "mul_": lambda x, z: x.mul_(z),
    "clamp_": lambda x, z: x.clamp_(z[0], z[1] + 1),
    "masked_fill_": lambda x, z: x.masked_fill_(x > 1.5, 0.1),
    "out": lambda x, z: torch.div(x, z, out=x),
}


@pytest.mark.parametrize("compiled", ["eager", "cpp"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_is_cut(write, compiled, interrupted):
    old, z = (mcf.as_expansion(number(seed), mcf.bf16x3) for seed in range(2))
    with torch.no_grad(), way(compiled):
        whole, start = old.clone(), perf_counter()
        WRITES[write](whole, z)
        if compiled == "cpp":  # the first call compiled it
            whole, start = old.clone(), perf_counter()
            WRITES[write](whole, z)
        seconds = perf_counter() - start
        for i in range(TRIES):
            x = old.clone()
            if not interrupted(lambda x=x: WRITES[write](x, z), seconds * (i + 1) / TRIES):
                seconds *= 0.7  # the first one took longer
            assert_old_or_new(x, old, whole)


@pytest.mark.parametrize("kind", ["for-loop", "foreach", "fused"])
def test_a_step_that_is_cut(kind, interrupted):
    """Parameters and states hold numbers, of before or after."""
    flags = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

    def training():
        parameters = [nn.Parameter(mcf.as_expansion(number(i), mcf.bf16x3)) for i in range(2)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **flags[kind])
        for i, p in enumerate(parameters):
            p.grad = number(i + 2).bfloat16()
        optimizer.step()
        return parameters, optimizer

    def tensors(parameters, optimizer):
        states = [x for p in parameters for x in optimizer.state[p].values()]
        return [*parameters, *(x for x in states if isinstance(x, mcf.MCFTensor))]

    before = [x.detach().clone() for x in tensors(*training())]
    parameters, optimizer = training()
    start = perf_counter()
    optimizer.step()
    seconds = perf_counter() - start
    after = [x.detach() for x in tensors(parameters, optimizer)]
    for i in range(8):
        parameters, optimizer = training()
        interrupted(optimizer.step, seconds * (i + 1) / 8)
        for x, old, new in zip(tensors(parameters, optimizer), before, after, strict=True):
            if kind == "fused":
                assert_old_or_new(x.detach(), old, new)
            else:  # which writes to states more than once
                leading = mcf.as_plain(x.detach(), torch.float64).to(torch.float32).bfloat16()
                assert (leading - x.components[0]).abs().max() <= 2**-7
