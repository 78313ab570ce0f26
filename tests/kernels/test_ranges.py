"""Ranges of integers in programs: every value that an operation takes lies within them."""

import itertools

import pytest
import torch

from mcftensor.kernels.program import Instruction, Place
from mcftensor.kernels.ranges import decided, range_of

RANGES = [(0, 0), (0, 7), (-3, 5), (-9, -2), (4, 12), (-(1 << 31), (1 << 31) - 1)]
ENDS = 1 << 31
DONE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "minimum": min,
    "maximum": max,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
}


def values(least, largest):
    return {*range(least, largest + 1)} if largest - least < 99 else {least, -1, 0, 1, largest}


@pytest.mark.parametrize("name", DONE)
def test_results_lie_in_their_range_and_are_what_it_decides(name):
    for first, second in itertools.product(RANGES, RANGES):
        x = Instruction(name, (Place(0), Place(1)), torch.int32)
        ranges = {0: first, 1: second}
        every = itertools.product(values(*first), values(*second))
        results = {(a, b): DONE[name](a, b) for a, b in every}
        known = range_of(x, ranges)
        if known is not None:
            assert all(known[0] <= y <= known[1] for y in results.values())
        found = decided(x, ranges)
        if isinstance(found, Place):
            assert all(y == pair[found.index] for pair, y in results.items())
        elif found is not None:
            assert set(results.values()) == {found}


def test_what_ranges_decide():
    ranges = {0: (0, 7), 1: (8, 12)}

    def of(name, *operands):
        return decided(Instruction(name, operands, torch.int32), ranges)

    assert of("lt", Place(0), Place(1)) is True
    assert of("ge", Place(0), 8) is False
    assert of("ge", Place(1), 8) is True
    assert of("eq", Place(0), 8) is False
    assert of("eq", Place(0), 7) is None
    assert of("maximum", Place(0), Place(1)) == Place(1)
    assert of("minimum", Place(0), 7) == Place(0)
    assert of("maximum", Place(0), 3) is None


@pytest.mark.parametrize("count", [0, 1, 5, 31])
@pytest.mark.parametrize("first", RANGES)
def test_shifts(first, count):
    for name, shifted in (
        ("shift_left", lambda x: x << count),
        ("shift_right", lambda x: x >> count),
    ):
        known = range_of(Instruction(name, (Place(0), count), torch.int32), {0: first})
        results = [shifted(x) for x in values(*first)]
        assert (known is None) == any(not -ENDS <= y < ENDS for y in results)
        assert known is None or all(known[0] <= y <= known[1] for y in results)
