"""A NaN has one bit pattern, whatever computed it, and wherever it stands."""

import pytest
import torch

import mcftensor as mcf
from support.kernel_cases import PATTERNS, way

SIZES = [(), (4,), (40,), (300, 300)]
OPERATIONS = {
    "zero by zero": lambda x, nan: (x - x) / (x - x),
    "infinities": lambda x, nan: (x / 0) - (x / 0),
    "root": lambda x, nan: (x * 0 - 1).sqrt(),
    "product": lambda x, nan: nan * x,
    "number": lambda x, nan: nan * -2.5,
    "in place": lambda x, nan: (x * 1).add_(nan),
    "addcdiv": lambda x, nan: torch.addcdiv(x, nan, x, value=-0.5),
    "minus": lambda x, nan: -nan,
    "abs": lambda x, nan: (-nan).abs(),
    "maximum": torch.maximum,
    "filled": lambda x, nan: torch.full_like(x, -torch.nan),
    "put": lambda x, nan: torch.where(x == x, nan, x),
    "largest": lambda x, nan: nan.amax(),
    "sum": lambda x, nan: nan.sum(),
    "mean": lambda x, nan: nan.mean(),
    "list": lambda x, nan: torch._foreach_mul([nan, x], [x, nan])[1],
    "plain": lambda x, nan: mcf.as_expansion(
        torch.full(x.shape, -1, dtype=PATTERNS[x.dtype.itemsize]).view(x.dtype), x.format
    ),
    "another": lambda x, nan: mcf.as_expansion(
        mcf.as_expansion(nan, mcf.Format(x.dtype, 3)), x.format
    ),
}


def patterns(x):
    return set(x.view(PATTERNS[x.dtype.itemsize]).flatten().tolist())


@pytest.mark.thinned(of=28)
@pytest.mark.parametrize("name", ["eager", "cpp"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_pattern(operation, size, name, format):
    expected = patterns(torch.full((1,), torch.nan, dtype=format.dtype))
    numbers = torch.linspace(-3, 3, 90000, dtype=torch.float64)[: torch.Size(size).numel()]
    with way(name):
        x = mcf.as_expansion(numbers.reshape(size) + 3.5, format)
        result = OPERATIONS[operation](x, torch.full_like(x, torch.nan))
        leading, *tails = result.components
    assert patterns(leading) == expected
    assert not any(tail.any() for tail in tails)


def test_another_nan_is_not_equal():
    """So that the first can fail."""
    negative = torch.tensor([-1], dtype=torch.int16).view(torch.bfloat16)
    assert negative.isnan().all()
    assert patterns(negative) != patterns(torch.full((1,), torch.nan, dtype=torch.bfloat16))
