"""A step has the same bits in whatever way it is carried out: compiled or not, by one thread or
two, on memory laid out in any way, across the borders of blocks."""

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.kernels import eager
from support.helpers import assert_same_bits
from support.kernel_cases import way

COUNT = 3 * eager.CHUNK // 2 + 77
STEPS = {
    "AdamW-fused": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, fused=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "AdamW-for-loop": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "SGD-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "Adagrad-fused": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
}


def not_aligned(x, format):
    """Rows after the first one, which count as if they were the whole."""
    padded = mcf.as_expansion(nn.functional.pad(x, (0, 0, 1, 0)), format)
    rows = [component[1:] for component in padded.components]
    return mcf.MCFTensor.of(rows, format, writes=padded.writes)


LAYOUTS = {
    "contiguous": mcf.as_expansion,
    "transposed": lambda x, f: mcf.as_expansion(x.mT.contiguous(), f).mT,
    "strided": lambda x, f: mcf.as_expansion(x.repeat_interleave(2, -1), f)[:, ::2],
    "not aligned": not_aligned,
}
FORMATS = [
    *(mcf.bf16x2, mcf.bf16x3, mcf.fp32x2),
    mcf.Format(torch.bfloat16, 2, rounding="stochastic"),
    mcf.bf16x2.with_rounding("balanced"),
    *(mcf.bf16i16, mcf.bf16i8),
    mcf.Format(torch.bfloat16, 1, rounding="balanced"),
]


def trained(kind, format, layout, name, threads):
    """What two steps make of parameters of several sizes, and of their states."""
    torch.manual_seed(3)
    # What every format holds, so that no layout draws random numbers for it.
    numbers = [torch.randn(2, n).bfloat16().double() for n in (COUNT // 2, 5)]
    gradients = [[torch.randn_like(x) for x in numbers] for _ in range(2)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with way(name):
            parameters = [nn.Parameter(LAYOUTS[layout](x, format)) for x in numbers]
            optimizer = mcf.collage(STEPS[kind](parameters), "plus")
            torch.manual_seed(4)
            for row in gradients:
                for p, g in zip(parameters, row, strict=True):
                    p.grad = g.to(p.dtype)
                optimizer.step()
            states = [optimizer.state[p] for p in parameters]
            return [
                [p.detach().contiguous(), *(x.contiguous() for x in state.values())]
                for p, state in zip(parameters, states, strict=True)
            ]
    finally:
        torch.set_num_threads(before)


@pytest.mark.thinned(of=33)
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_same_bits(kind, format, layout):
    expected = trained(kind, format, "contiguous", "eager", 1)
    ways = [("eager", 2)]
    if layout in ("contiguous", "transposed", "not aligned"):  # what is not dense is not compiled
        ways += [("cpp", 1), ("cpp", 2)]
    for name, threads in ways:
        assert_same_bits(trained(kind, format, layout, name, threads), expected)
