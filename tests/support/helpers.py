"""What several tests need: full expansions, comparisons of all terms, small models, devices."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import mcftensor as mcf
from mcftensor.arithmetic.noise import Noise
from mcftensor.formats import ExpansionFormat
from mcftensor.tensor import step_context

# Formats that only store numbers, with each rounding.
STORED = [
    mcf.bf16i16,
    mcf.bf16i8,
    mcf.bf16i8.nearest,
    mcf.bf16i8.with_rounding("stochastic"),
    mcf.Format(torch.bfloat16, 1, rounding="balanced"),
]

# Those of them that draw nothing, each of another kind.
KEPT = [mcf.bf16i16, mcf.bf16i8, mcf.Format(torch.bfloat16, 1, rounding="balanced")]

# The same for modules, of which a format of rows is one of matrices.
IN_MODULES = [*KEPT, mcf.e4m3i8]

# Those that store matrices alone.
SCALED = [
    mcf.e4m3i8,
    mcf.e4m3i8.nearest,
    mcf.e4m3i8.with_rounding("stochastic"),
    mcf.e4m3i16,
]


def over_formats(
    *formats: mcf.Format | None, slow: Sequence[mcf.Format] = ()
) -> pytest.MarkDecorator:
    """A test over the formats that are the default, and over others, some of them slow ones."""
    others = [pytest.param(f, marks=pytest.mark.slow) for f in slow]
    every = [None, *formats, *others]
    return pytest.mark.parametrize("format", every, ids=lambda f: f.name if f else "default")


over_one = over_formats(mcf.bf16i8, slow=(KEPT[0], KEPT[2]))


requires_cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def sample(format: mcf.Format, *shape: int, device: str = "cpu", seed: int = 0) -> mcf.MCFTensor:
    """Random values whose every component is busy."""
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(format, ExpansionFormat):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x.square() if format.name.startswith("ue") else x
        stored = mcf.as_expansion(x, format.nearest)  # the same on all ranks
        return mcf.MCFTensor(stored.components, format).to(device)
    terms = []
    for i in range(format.terms):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * format.u**i
        terms.append(x.to(format.base))
    return mcf.MCFTensor(mcf.expansion.renormalize(terms), format).to(device)


class Given(Noise):
    """Noise that a test says."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def uniform(self) -> Tensor:
        return self.numbers

    def bits(self, count: int) -> Tensor:
        return (self.numbers * 2**count).to(torch.int32)


def gappy(format: mcf.Format) -> mcf.MCFTensor:
    """Values whose last terms lie far below what float64 would hold beside the leading ones."""
    leading = torch.tensor([1.0, 1.0, 2.0, 1.0, -3.0, 2.0], dtype=format.base)
    last = torch.tensor([1.0, -1.0, 0.0, 2.0, 5.0, 1.0], dtype=format.base) * 2.0**-90
    middle = [torch.zeros_like(leading)] * (format.terms - 2)
    return mcf.MCFTensor([leading, *middle, last], format)


def parameter(format: mcf.Format, *shape: int, device: str = "cpu", seed: int = 0) -> nn.Parameter:
    return nn.Parameter(sample(format, *shape, device=device, seed=seed))


def exact(x: Tensor) -> Tensor:
    """The value in float64, for formats that it holds."""
    return mcf.as_plain(x, torch.float64).cpu()


def same_terms(x: mcf.MCFTensor, y: mcf.MCFTensor) -> bool:
    return x.format == y.format and all(
        torch.equal(a, b) for a, b in zip(x.components, y.components, strict=True)
    )


def assert_same_terms(x: mcf.MCFTensor, y: mcf.MCFTensor) -> None:
    assert x.format == y.format
    for a, b in zip(x.components, y.components, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def expansions_alive(optimizer: torch.optim.Optimizer, monkeypatch) -> list[int]:
    """How many states are expansions whenever `torch.zeros_like` makes another: filled later."""
    alive: list[int] = []
    original = torch.zeros_like

    def counting(x, **keywords):
        if isinstance(x, mcf.MCFTensor):
            states = [y for state in optimizer.state.values() for y in state.values()]
            alive.append(sum(isinstance(y, mcf.MCFTensor) for y in states))
        return original(x, **keywords)

    monkeypatch.setattr(torch, "zeros_like", counting)
    return alive


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


def compiled_whole(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step as it is traced: without hooks, and without the ends of graphs around it."""
    step = type(optimizer).step.__wrapped__.__wrapped__

    @torch.compile(fullgraph=True)
    def whole() -> None:
        step(optimizer)

    return torch.no_grad()(whole)


def all_terms(model: nn.Module) -> list[Tensor]:
    """Every term of every parameter."""
    terms: list[Tensor] = []
    for p in model.parameters():
        terms += p.components if isinstance(p, mcf.MCFTensor) else [p]
    return terms


def bits(x: Tensor) -> list[tuple[object, ...]]:
    terms = x.components if isinstance(x, mcf.MCFTensor) else (x.detach(),)
    return [(str(t.dtype), t.shape, t.reshape(-1).view(torch.uint8).tolist()) for t in terms]


def assert_same_bits(state: object, other: object) -> None:
    """Of two trees of tensors, expansions and numbers."""
    leaves, structure = tree_flatten(state)
    others, its_structure = tree_flatten(other)
    assert structure == its_structure
    for x, y in zip(leaves, others, strict=True):
        assert type(x) is type(y)
        if isinstance(x, torch.Tensor):
            assert getattr(x, "format", None) == getattr(y, "format", None)
            assert bits(x) == bits(y)
        else:
            assert x == y


@contextlib.contextmanager
def a_step() -> Iterator[step_context.Step]:
    """What `stepping.in_step` does, for the lines of a test."""
    outer = step_context._thread.step
    step_context._thread.step = step = step_context.Step(outer)
    try:
        yield step
    finally:
        step_context._thread.step = outer
        step.end()
