"""Another thread that copies a tensor gets the numbers before or after a write, never of both."""

import copy
import os
import threading
import time

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.kernels import LOCK
from support.forks import fork, needs_fork
from support.helpers import assert_same_bits

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.fp32x2, mcf.bf16i16, mcf.bf16i8, mcf.mxfp8]


def a_copy_of(x):
    made = torch.empty_like(x)
    with torch.no_grad():
        return made.copy_(x)


COPIES = {
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
    "copy_": a_copy_of,
    "to": lambda x: x.to("cpu", copy=True),
    "indexed": lambda x: x[torch.arange(len(x))],
    "as_plain": lambda x: mcf.as_plain(x, torch.float64),
}


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.with_float64("as_plain into it is a way to copy")
def test_a_copy_waits_for_a_write(format, way):
    x = mcf.as_expansion(torch.rand(4, 64), format)
    new = mcf.as_expansion(torch.rand(4, 64), format)
    before = [y.clone() for y in x.components]
    found = []
    thread = threading.Thread(target=lambda: found.append(COPIES[way](x)))
    with LOCK:  # as a write does
        x.components[0].copy_(new.components[0])
        thread.start()
        thread.join(0.05)
        assert not found, "the copy has not waited"
        for old, part in zip(x.components[1:], new.components[1:], strict=True):
            old.copy_(part)
    thread.join()
    right = COPIES[way](new)
    assert_same_bits(found[0], right)
    assert any(not torch.equal(y, z) for y, z in zip(before, new.components, strict=True))


def assert_waits(write, p, before):
    """Call it in another thread; it writes once the lock is free."""
    thread = threading.Thread(target=write)
    with LOCK:
        thread.start()
        thread.join(0.05)
        assert all(torch.equal(a, b) for a, b in zip(p.components, before, strict=True))
    thread.join()
    assert any(not torch.equal(a, b) for a, b in zip(p.components, before, strict=True))


WRITES = {
    "add_": lambda p, y: p.add_(y, alpha=1e-3),
    "_foreach_add_": lambda p, y: torch._foreach_add_([p, p], [y, y], alpha=1e-3),
    "copy_": lambda p, y: p.copy_(y),
    "mul_": lambda p, y: p.mul_(0.5),
    "zero_": lambda p, y: p.zero_(),
    "exp_": lambda p, y: p.exp_(),
    "masked_fill_": lambda p, y: p.masked_fill_(y > 0.5, 2.0),
    "index_copy_": lambda p, y: p.index_copy_(0, torch.arange(4), y),
    "setitem": lambda p, y: p.__setitem__(slice(1, 3), y[1:3]),
}


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("format", FORMATS[:5], ids=str)
def test_a_write_takes_the_lock(format, way):
    p = nn.Parameter(mcf.as_expansion(torch.rand(4, 64), format))
    y = mcf.as_expansion(torch.rand(4, 64), format)
    before = [x.clone() for x in p.components]

    @torch.no_grad()
    def write():
        WRITES[way](p, y)

    assert_waits(write, p, before)


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize("mode", ["full", "compact"])
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16i8], ids=str)
def test_a_step_takes_the_lock(format, mode, options):
    p = nn.Parameter(mcf.as_expansion(torch.rand(40, 64), format))
    optimizer = mcf.collage(torch.optim.AdamW([p], **options), mode)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = [x.clone() for x in p.components]
    assert_waits(optimizer.step, p, before)


@needs_fork
def test_a_child_that_steps_while_another_thread_of_its_parent_did():
    weight = nn.Parameter(mcf.as_expansion(torch.ones(4, 4), mcf.bf16x2))
    weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([weight], foreach=False)
    optimizer.step()
    holds = threading.Event()

    def hold():
        with LOCK:
            holds.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    child = fork(optimizer.step)
    optimizer.step()
    thread.join()
    for _ in range(300):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
    assert pid
    assert status == 0
