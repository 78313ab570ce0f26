"""Digests, and marked elements as gaps and codes: C++ and PyTorch, against Python integers."""

import numpy as np
import pytest
import torch

from mcftensor.kernels import cpu
from mcftensor.serving import changes
from mcftensor.serving.changes import bits_for


@pytest.fixture(params=["compiled", "eager"], autouse=True)
def way(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setattr(changes.COMPILED, "get", lambda _: None)
    elif cpu.find() is None:
        pytest.skip("no compiler")
    else:
        assert changes.COMPILED.get(cpu.BUILD_AFTER) is not None


def codes_of(x):
    return x.view(torch.uint8).numpy().view(f"u{x.element_size()}").tolist()


def read(coded, width):
    """The indices, number by number, as the page says it."""
    bits = np.unpackbits(coded.numpy(), bitorder="little").tolist()
    indices, at = [], 0
    for start in range(0, len(bits) // width * width, width):
        number = sum(bit << k for k, bit in enumerate(bits[start : start + width]))
        at += number
        if number < 2**width - 1:
            indices.append(at)
            at += 1
    return indices


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 70_001])
def test_the_digest(dtype, length):
    generator = torch.Generator().manual_seed(length)
    size = length * dtype.itemsize
    for x in (torch.randint(0, 256, (size,), generator=generator), torch.full((size,), 255)):
        flat = x.to(torch.uint8).view(dtype)
        places = ((2 * i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(length))
        keys = ((place ^ place >> 32) % 2**32 | 1 for place in places)
        own = sum(k * c for k, c in zip(keys, codes_of(flat), strict=True)) % 2**64
        assert changes.digest_of(flat) == own


def test_the_digest_sees_small_changes_of_neighbours():
    """Of any one to three places of 64, each by one or two units up or down."""
    zeros = torch.zeros(64, dtype=torch.uint8)
    keys = [changes.digest_of(zeros.scatter(0, torch.tensor([i]), 1)) for i in range(64)]
    assert min(keys) > 0
    steps = torch.tensor([-2, -1, 0, 1, 2])
    by = torch.cartesian_prod(torch.tensor([1, 2]), steps, steps)
    places = torch.combinations(torch.arange(64), 3)
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        assert (torch.tensor(keys)[places[:, order]] @ by.T).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_the_digest_of_a_change(dtype):
    old, new = (torch.randint(0, 256, (999 * dtype.itemsize,)).to(torch.uint8) for _ in "ab")
    old, new = old.view(dtype), new.view(dtype)
    at = (torch.rand(999) < 0.3).nonzero().view(-1)
    made = old.clone()
    made[at] = new[at]
    change = changes.digest_of_change(at, old[at], new[at])
    assert (changes.digest_of(old) + change) % 2**64 == changes.digest_of(made)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("density", [0.00002, 0.0005, 0.01, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_changes_come_back(density, dtype):
    length = 200_003 if density < 0.01 else 20_003
    chosen = torch.rand(length, generator=torch.Generator().manual_seed(2)) < density
    chosen[length // 2] = True
    bits = bits_for(chosen)
    packed = np.packbits(chosen.numpy(), bitorder="little")
    bits[: len(packed)] = torch.from_numpy(packed)
    x = torch.arange(length, dtype=torch.int64).to(torch.uint8 if dtype == torch.uint8 else dtype)
    width, coded, codes = changes.coded_changes(bits, x)
    expected = chosen.nonzero().view(-1)
    assert read(coded, width) == expected.tolist()
    assert torch.equal(changes.indices_of(coded, width), expected)
    assert torch.equal(codes, x[expected])
    assert coded.nbytes <= -(-length // 8)  # those of a bit for each element


def test_nothing_is_marked():
    x = torch.ones(1000, dtype=torch.bfloat16)
    assert changes.coded_changes(bits_for(x), x) is None


@pytest.mark.parametrize("width", changes.WIDTHS)
def test_each_width(width, way):
    """Gaps of zero, of the most that a number says, and of several numbers, in each width."""
    top = 2**width - 1
    gaps = [0, top - 1, top, top + 1, 3 * top, 0, 5 * top - 1] * 3
    numbers = [n for gap in gaps for n in [top] * (gap // top) + [gap % top]]
    bits = "".join(format(n, f"0{width}b")[::-1] for n in numbers)
    bits += "1" * (-len(bits) % 8)
    coded = np.packbits(np.array(list(bits), dtype=np.uint8), bitorder="little")
    expected = np.cumsum(np.array(gaps) + 1) - 1
    assert changes.indices_of(torch.from_numpy(coded), width).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 20_003])
def test_a_comparison_adds_marks(dtype, length):
    generator = torch.Generator().manual_seed(length)
    x = torch.randint(0, 256, (length * dtype.itemsize,), generator=generator)
    x = x.to(torch.uint8).view(dtype)
    old = x.clone()
    changed = torch.rand(length, generator=generator) < 0.2
    old.view(torch.uint8).view(length, -1)[changed, -1] ^= 64
    bits = bits_for(x)
    bits[0] = 1
    changes.mark_changes(bits, x, old)
    expected = np.packbits(changed.numpy(), bitorder="little")
    expected[0] |= 1
    assert bits[: len(expected)].tolist() == expected.tolist()
    assert not bits[len(expected) :].any()
