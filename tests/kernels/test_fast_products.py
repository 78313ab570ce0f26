"""`mcf.fast_products`: 16-bit products in float32, on CPUs that are pretended to need it."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.kernels import fast_products

DTYPES = (torch.bfloat16, torch.float16)
FORMATS = (mcf.bf16x2, mcf.bf16i16, mcf.bf16i8, mcf.fp16i16)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"


@pytest.fixture
def _slow(monkeypatch):
    monkeypatch.setattr(fast_products, "slow_dtypes", lambda: frozenset(DTYPES))


def is_replaced(name):
    """Whether the kernel of an operator is that of the context."""
    return "fast_products.py" in torch._C._dispatch_dump(f"aten::{name}")


def whole_numbers(*shape, seed=0):
    """Numbers whose products have exact sums in float32, most of which need more than 11 bits."""
    return torch.randint(-50, 51, shape, generator=torch.Generator().manual_seed(seed)).double()


PRODUCTS = {
    "mm": (lambda a, b, c: torch.mm(a[0], b[0]), "mm"),
    "mm into": (lambda a, b, c: torch.mm(a[0], b[0], out=c.new_empty(7, 5)), "mm.out"),
    "mm into nothing": (lambda a, b, c: torch.mm(a[0], b[0], out=c.new_empty(0)), "mm.out"),
    "transposed": (lambda a, b, c: torch.mm(b[0].mT, a[0].mT), "mm"),
    "bmm": (lambda a, b, c: torch.bmm(a, b), "bmm"),
    "bmm into": (lambda a, b, c: torch.bmm(a, b, out=torch.empty_like(c)), "bmm.out"),
    "addmm": (lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=2, alpha=-3), "addmm"),
    "addmm into": (
        lambda a, b, c: torch.addmm(c[0, 0], a[0], b[0], alpha=2, out=c.new_empty(7, 5)),
        "addmm.out",
    ),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5), "baddbmm"),
    "baddbmm into": (
        lambda a, b, c: torch.baddbmm(c, a, b, out=torch.empty_like(c)),
        "baddbmm.out",
    ),
    "linear": (lambda a, b, c: F.linear(a, b[0].mT, c[0, 0]), "addmm"),
    "convolution": (lambda a, b, c: F.conv1d(a, b[:, :7, :3]), "convolution"),
    "convolution with bias": (
        lambda a, b, c: F.conv1d(a, b[:, :7, :3], c[0, 0, :2]),
        "convolution",
    ),
}


def operands(dtype):
    """(2, 7, 9), (2, 9, 5) and (2, 7, 5)."""
    made = (whole_numbers(2, 7, 9), whole_numbers(2, 9, 5, seed=1), whole_numbers(2, 7, 5, seed=2))
    return [x.to(dtype) for x in made]


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_exact_one_rounded_once(name, dtype):
    product, operator = PRODUCTS[name]
    exact = product(*operands(torch.float64))
    assert not is_replaced(operator)
    with mcf.fast_products():
        assert is_replaced(operator)
        found = product(*operands(dtype))
    assert not is_replaced(operator)
    assert found.dtype == dtype
    assert torch.equal(found, exact.float().to(dtype))
    assert not torch.equal(found.double(), exact), "some are rounded"


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_products_too(dtype):
    """Of a linear layer, whose bias has a sum instead, and of a convolution with its bias."""
    found = {}
    for kind in (torch.float64, dtype):
        a, b, c = operands(kind)
        leaves = [a, b[0].mT, c[0, 0], b[:, :7, :3], c[0, 0, :2]]
        x, weight, bias, taps, shift = (t.clone().requires_grad_() for t in leaves)
        gradient = whole_numbers(2, 7, 5, seed=3).to(kind)
        with mcf.fast_products():
            F.linear(x, weight, bias).backward(gradient)
            found[kind] = [x.grad, weight.grad]
            x.grad = None
            F.conv1d(x, taps, shift).backward(gradient[:, :2].repeat(1, 1, 2)[..., :7])
        found[kind] += [x.grad, taps.grad, shift.grad]
    for own, exact in zip(found[dtype], found[torch.float64], strict=True):
        assert own.dtype == dtype
        assert torch.equal(own, exact.float().to(dtype))


@pytest.mark.usefixtures("_slow")
def test_the_gradient_of_attention_is_that_of_float32():
    q, k, v, g = torch.randn(4, 2, 3, 16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()

    def gradients(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        F.scaled_dot_product_attention(*leaves, is_causal=True).backward(g.to(dtype))
        return [x.grad for x in leaves]

    exact = gradients(torch.float64)
    with mcf.fast_products():
        assert is_replaced(ATTENTION)
        found = gradients(torch.bfloat16)
    for own, right in zip(found, exact, strict=True):
        assert own.dtype == torch.bfloat16
        assert (own - right).norm() < 2**-8 * right.norm()


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_an_expansion_computes_with_its_leading_term(format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 20))
    model = mcf.as_expansion(model, format)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.001)  # so that the other components are not zero
    plain = nn.Sequential(nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 20)).to(format.dtype)
    plain.load_state_dict({name: p.components[0] for name, p in model.state_dict().items()})
    x = torch.randn(50, 40, dtype=format.dtype)
    with mcf.fast_products():
        results = [each(x) for each in (model, plain)]
        for y in results:
            y.square().sum().backward()
    assert torch.equal(*results)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_steps_in_backward_have_the_same_bits(format):
    """The gradients have whole numbers, which round alike, within the context and outside."""
    ends = []
    for context in (contextlib.nullcontext(), mcf.fast_products()):
        torch.manual_seed(0)
        model = mcf.as_expansion(nn.Linear(64, 64), format)
        optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), fused=True), "full")
        x = whole_numbers(8, 64, seed=4).to(format.dtype)
        with context, mcf.step_in_backward(model, optimizer):
            assert torch._C._len_torch_dispatch_stack() == 0, "steps are fused where no mode is on"
            for _ in range(3):
                model(x).backward(torch.ones(8, 64, dtype=format.dtype))
                optimizer.step()
        ends.append([t for p in model.parameters() for t in p.components])
    for own, other in zip(*ends, strict=True):
        assert torch.equal(own, other)


@pytest.mark.usefixtures("_slow")
def test_contexts_nest_and_end_in_any_order():
    """The other order is that of two threads."""
    found = []

    @mcf.fast_products()
    def look():
        found.append(is_replaced("mm"))
        raise ZeroDivisionError

    for _ in range(2):
        first, second = mcf.fast_products(), mcf.fast_products()
        first.__enter__()
        second.__enter__()
        with pytest.raises(ZeroDivisionError):
            look()
        first.__exit__()
        found.append(is_replaced("mm"))
        second.__exit__()
        assert not is_replaced("mm")
        with pytest.raises(ZeroDivisionError):
            look()
        assert not is_replaced("mm")
    assert found == [True] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("_slow")
def test_other_dtypes_keep_their_bits(dtype):
    a = torch.randn(60, 50, dtype=dtype)
    b = torch.randn(50, 40, dtype=dtype)
    outside = a @ b, torch.mm(a, b, out=torch.empty(60, 40, dtype=dtype))
    with mcf.fast_products():
        within = a @ b, torch.mm(a, b, out=torch.empty(60, 40, dtype=dtype))
    assert all(map(torch.equal, outside, within))


@pytest.mark.parametrize("ratio", [2.9, 3.1])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_dtype_is_slow_without_instructions_and_by_time(monkeypatch, has_instructions, ratio):
    seconds = {torch.float32: 1.0, torch.bfloat16: ratio, torch.float16: 1.0}
    monkeypatch.setattr(fast_products, "_has_instructions", lambda dtype: has_instructions)
    monkeypatch.setattr(fast_products, "_seconds", seconds.__getitem__)
    found = fast_products.slow_dtypes.__wrapped__()  # The result is kept for the process.
    assert found == ({torch.bfloat16} if ratio > 3 and not has_instructions else set())


def test_where_products_are_fast_the_context_changes_nothing(monkeypatch):
    monkeypatch.setattr(fast_products, "slow_dtypes", frozenset)
    with mcf.fast_products():
        assert not is_replaced("mm")


def test_pytorch_answers_whether_the_processor_has_instructions(monkeypatch):
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        answer = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
        assert fast_products._has_instructions(dtype) == answer
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not fast_products._has_instructions(torch.bfloat16)
