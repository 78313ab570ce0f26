"""Operations that ask which numbers are zero."""

from contextlib import nullcontext

import pytest
import torch

import mcftensor as mcf
from support.no_float64 import no_float64

NUMBERS = torch.tensor([[0.0, 1.0, -2.0], [0.0, 0.0, torch.nan]])
OTHERS = torch.tensor([[0.0, 0.0, 3.0], [5.0, 0.0, 0.0]])


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: x.any(), id="any"),
        pytest.param(lambda x, y: x.any(1), id="any, rows"),
        pytest.param(lambda x, y: torch.any(x, (0, 1)), id="any, dims"),
        pytest.param(lambda x, y: x.all(), id="all"),
        pytest.param(lambda x, y: x.all(1, True), id="all, rows"),
        pytest.param(lambda x, y: x.nonzero(), id="nonzero"),
        pytest.param(lambda x, y: x.argwhere(), id="argwhere"),
        pytest.param(lambda x, y: x.count_nonzero(), id="count_nonzero"),
        pytest.param(lambda x, y: x.count_nonzero(1), id="count_nonzero, rows"),
        pytest.param(lambda x, y: x.logical_not(), id="logical_not"),
        pytest.param(lambda x, y: x.logical_and(y), id="logical_and"),
        pytest.param(torch.logical_or, id="logical_or"),
        pytest.param(lambda x, y: y.logical_xor(x), id="logical_xor"),
    ],
)
@pytest.mark.parametrize("without", [False, True], ids=["", "without"])
@pytest.mark.parametrize(
    "format", [mcf.bf16x2, mcf.bf16x3, mcf.fp32x2, mcf.fp32x3, mcf.bf16i16], ids=lambda f: f.name
)
def test_which_numbers_are_zero(format, without, function):
    with no_float64() if without else nullcontext():
        x = mcf.as_expansion(NUMBERS, format)
        assert torch.equal(function(x, OTHERS), function(NUMBERS, OTHERS))


def test_in_float64_pairs():
    x = mcf.as_expansion(NUMBERS.double(), mcf.fp64x2)
    assert torch.equal(x.any(1), NUMBERS.any(1))
    assert torch.equal(x.logical_and(x), NUMBERS.logical_and(NUMBERS))


def test_a_number_with_a_leading_component_of_zero_is_not_zero():
    x = mcf.as_expansion(torch.tensor([1e-45, 0.0]), mcf.bf16i16)
    assert x.components[0].tolist() == [0.0, 0.0]
    assert x.logical_not().tolist() == [False, True]
    assert x.any()
