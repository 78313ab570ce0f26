"""What expansion arithmetic claims: a bound for each operation and format, and its operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.formats import (
    Format,
    bf16x2,
    bf16x3,
    fp16x2,
    fp32x2,
    fp32x3,
    fp64x2,
)

# Formats that users make.
bf16x4, bf16x6 = Format(torch.bfloat16, 4), Format(torch.bfloat16, 6)
fp32x4, fp64x3 = Format(torch.float32, 4), Format(torch.float64, 3)
LONGER = [bf16x4, bf16x6, fp32x4, fp64x3]

# Exponents of operands: no tail is lost, and sums and products stay in the range.
MIDDLE = {
    torch.bfloat16: (-20, 20),
    torch.float16: (1, 4),
    torch.float32: (-8, 8),
    torch.float64: (-8, 8),
}
SIZE = {torch.bfloat16: 30_000, torch.float16: 30_000, torch.float32: 20_000, torch.float64: 6_000}

# In units of u^n: the bound that the docstrings state, and what some case must reach.
BOUNDS = {
    "add": {
        bf16x2: (0.51, 0.45),
        fp16x2: (1.0, 0.65),
        fp32x2: (3.0 / (1 - 2.0**-22), 1.5),
        fp64x2: (3.0000001, 1.2),
        bf16x3: (0.251, 0.22),
        fp32x3: (0.251, 0.22),
    },
    "mul": {
        bf16x2: (0.52, 0.45),
        fp16x2: (1.25, 0.85),
        fp32x2: (4.0, 2.8),
        fp64x2: (4.0, 2.8),
        bf16x3: (0.251, 0.22),
        fp32x3: (0.251, 0.22),
    },
    "div": {
        bf16x2: (0.52, 0.45),
        fp16x2: (1.25, 0.8),
        fp32x2: (0.501, 0.45),
        fp64x2: (0.501, 0.45),
        bf16x3: (0.251, 0.22),
        fp32x3: (0.251, 0.22),
    },
    "sqrt": {
        bf16x2: (0.51, 0.45),
        fp16x2: (0.88, 0.7),
        fp32x2: (25 / 8, 2.3),
        fp64x2: (25 / 8, 2.2),
        bf16x3: (0.251, 0.22),
        fp32x3: (0.251, 0.22),
    },
    # Relative to |x y| + |z|, where nothing cancels.
    "fma": {
        bf16x2: (0.52, 0.45),
        fp16x2: (2.0, 0.9),
        fp32x2: (0.501, 0.45),
        fp64x2: (0.501, 0.45),
        bf16x3: (0.251, 0.22),
        fp32x3: (0.251, 0.22),
    },
}
for stated in BOUNDS.values():
    stated |= {f: (1.02 / 2 ** (f.terms - 1), 0.88 / 2 ** (f.terms - 1)) for f in LONGER}
# Quotients and roots go by digits, of fewer than 8 bits each.
BOUNDS["div"] |= {bf16x4: (0.2, 0.11), bf16x6: (0.25, 0.03)}
BOUNDS["sqrt"] |= {bf16x4: (0.2, 0.11), bf16x6: (0.4, 0.03)}


def magnitude(x: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """|x|, term by term."""
    return tuple(torch.where(x[0] < 0, -t, t) for t in x)


def replace_zeros(x: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Divisors: one where x is zero."""
    zero = x[0] == 0
    return (torch.where(zero, 1, x[0]), *(torch.where(zero, 0, t) for t in x[1:]))
