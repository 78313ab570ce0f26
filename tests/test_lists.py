"""`torch._foreach_*` and fused steps: as one tensor after the other, whatever the tensors share."""

import random

import pytest
import torch
from helpers import assert_same_terms, sample
from torch import nn

import mcftensor as mcf

FORMATS = (mcf.bf16x2, mcf.bf16x3)


def tensors(rng):
    """Expansions of two formats and plain tensors, a deferred one, and parts and views of them."""
    whole = [sample(rng.choice(FORMATS), 6, seed=i) for i in range(3)]
    whole += [torch.linspace(1, 2, 6).bfloat16(), whole[0] * 2]
    parts = [x[part] for x in whole for part in (slice(3), slice(3, None))]
    overlapping = [x[1:4] for x in whole if isinstance(x, mcf.MCFTensor)]  # plain ones may not
    return whole, [*whole, *parts, *overlapping]


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("seed", range(40))
def test_lists_whose_tensors_share_memory(seed):
    found = []
    for in_list in (True, False):
        rng = random.Random(seed)
        whole, pool = tensors(rng)
        targets = [rng.choice(pool) for _ in range(4)]
        sources = [rng.choice([x for x in pool if x.shape == t.shape]) for t in targets]
        if in_list:
            torch._foreach_add_(targets, sources)
        else:
            for target, source in zip(targets, sources, strict=True):
                target.add_(source)
        found.append([mcf.as_plain(x, torch.float64) for x in whole])
    for together, one_by_one in zip(*found, strict=True):
        torch.testing.assert_close(together, one_by_one, rtol=0, atol=0)


def test_a_parameter_given_twice_takes_two_steps():
    once, twice = (nn.Parameter(sample(mcf.bf16x2, 5)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([twice, twice], lr=0.1, fused=True)
    for p in (once, twice):
        p.grad = torch.ones(5).bfloat16()
    optimizer.step()
    expected = torch.optim.SGD([once], lr=0.1, fused=True)
    expected.step()
    expected.step()
    assert_same_terms(twice, once)


def test_a_parameter_given_twice_to_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        moved = []
        for count in (3, 1 << 20):
            p = nn.Parameter(mcf.as_expansion(torch.ones(count)))
            with pytest.warns(UserWarning, match="duplicate"):
                optimizer = torch.optim.AdamW([p, p], lr=0.1, fused=True)
            p.grad = torch.ones(count).bfloat16()
            optimizer.step()
            moved.append(mcf.as_plain(p, torch.float32))
        assert moved[1].eq(moved[0][0]).all()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["add", "copy", "exp", "neg", "sqrt", "zero"])
def test_lists_written_to_are_of_another_version(name):
    operands = {"add": [1.0], "copy": [[torch.ones(3)]]}.get(name, [])
    x, plain = sample(mcf.bf16x2, 3), torch.ones(3)
    for target in (x, plain):
        getattr(torch, f"_foreach_{name}_")([target], *operands)
    assert x._version == plain._version == 1
