"""Log-probabilities and losses of logits: errors against mpmath and float64, and the same bits for
every division of batch and vocabulary."""

import math

import mpmath
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.reproducible import row_chunks, softmax_terms
from support.ranks import on_ranks

pytestmark = pytest.mark.with_float64("sums of exponentials are computed in float64")
mine = mcf.functional
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
LEAST = {torch.bfloat16: -133, torch.float16: -24, torch.float32: -149}


def half_ulp(x, dtype):
    """Half of an ulp of numbers in float64."""
    exponent = torch.frexp(x.abs()).exponent.double() - PRECISION[dtype] - 1
    return torch.exp2(exponent.clamp(min=LEAST[dtype] - 1.0))


def logits(*shape, dtype=torch.bfloat16, seed=0, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def bound(classes):
    """Of the relative error of a sum of exponentials."""
    return 2.0**-42 + classes * 2.0 ** -(softmax_terms.binary_places(classes) + 1)


def test_the_exponential_is_within_its_bound():
    d = torch.cat([-torch.rand(3000, dtype=torch.float64) * 64, torch.tensor([0.0, -64.0])])
    deep = -torch.rand(1000, dtype=torch.float64) * 636 - 64
    with mpmath.workprec(200):
        for numbers, most in ((d, -44.0), (deep, -41.8)):
            got = softmax_terms.exponential(numbers, -700.0).tolist()
            errors = [
                abs(mpmath.mpf(y) / mpmath.exp(mpmath.mpf(x)) - 1)
                for x, y in zip(numbers.tolist(), got, strict=True)
            ]
            assert 2.0 ** (most - 3) < max(errors) < 2.0**most


def test_the_exponential_is_exact_at_a_power_and_never_grows():
    """What is out of range counts as the least."""
    x = torch.tensor([math.nan, -math.inf, -701.0, 1.0, math.inf], dtype=torch.float64)
    assert softmax_terms.exponential(x, -700.0).unique().numel() == 1


def test_the_logarithm_is_within_its_bound():
    x = torch.exp2(torch.rand(3000, dtype=torch.float64) * 80 - 40)
    x = torch.cat([x, 1 + torch.rand(1000, dtype=torch.float64) * 1e-3])
    got = softmax_terms.natural_logarithm(x).tolist()
    with mpmath.workprec(200):
        errors = [
            abs(mpmath.mpf(y) / mpmath.log(mpmath.mpf(a)) - 1)
            for a, y in zip(x.tolist(), got, strict=True)
        ]
    assert 2.0**-54 < max(errors) < 2.0**-50
    special = softmax_terms.natural_logarithm(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64))
    assert special[:2].tolist() == [0.0, -math.inf]
    assert math.isnan(special[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 3000.0])
def test_logsumexp_against_mpmath(dtype, scale):
    x = logits(12, 37, dtype=dtype, scale=scale)
    got = mine.logsumexp(x)
    assert got.dtype == torch.float32
    with mpmath.workprec(300):
        for row, result in zip(x.double().tolist(), got.double().tolist(), strict=True):
            exact = mpmath.log(mpmath.fsum(mpmath.exp(mpmath.mpf(v)) for v in row))
            ulp = half_ulp(torch.tensor(float(exact), dtype=torch.float64), torch.float32).item()
            assert abs(result - exact) <= ulp + bound(37)


def test_places_leave_room_for_the_sum():
    for classes in (1, 2, 3, 4096, 32768, 32769, 262144, softmax_terms.MOST_CLASSES):
        places = softmax_terms.binary_places(classes)
        assert classes * (2**places + 2) < 2**63
        assert places == 50 or classes * 2**places > 2**61


def test_a_sum_of_as_many_equal_logits():
    """All terms at the top of their range."""
    x = torch.full((1, 1 << 18), 7.5).bfloat16()
    expected = 7.5 + 18 * math.log(2)
    assert mine.logsumexp(x).item() == torch.tensor(expected).item()


def oracle(case, x, **other):
    """PyTorch's function of logits in float64."""
    return case(F, x.double(), **other)


def _targets(rows, classes):
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(classes, (rows,), generator=generator)
    target[1] = -100
    return target


ROWS, CLASSES = 9, 41
TARGET = _targets(ROWS, CLASSES)
WEIGHT = torch.rand(CLASSES, generator=torch.Generator().manual_seed(6)) + 0.1
SHARES = torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(7)).softmax(-1)
OTHER = logits(ROWS, CLASSES, seed=8).double()


def _selective(f, x):
    index = TARGET.clamp(min=0)
    if f is mine:
        return mine.selective_log_softmax(x, index)
    return x.log_softmax(-1).gather(-1, index[:, None]).squeeze(-1)


def _several(f, x):
    index = torch.stack([TARGET.clamp(min=0), TARGET.clamp(min=0), TARGET.clamp(min=0) // 2], -1)
    if f is mine:
        return mine.selective_log_softmax(x, index)
    return x.log_softmax(-1).gather(-1, index)


def _kl(f, x, **given):
    if f is mine:
        return mine.kl_div(x, **given)
    target = given.pop("target").double()
    target = target.log_softmax(-1) if given.get("log_target") else target
    way = given.pop("reduction")
    result = F.kl_div(x.log_softmax(-1), target, reduction="none", **given)
    sums = {"rows": result.sum(-1), "sum": result.sum(), "mean": result.mean()}
    return sums.get(way, result.sum() / len(x))


def _ce(**given):
    def case(f, x):
        plain = {
            k: v.double() if f is F and isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in given.items()
        }
        return f.cross_entropy(x, **plain)

    return case


CASES = {
    "logsumexp": lambda f, x: x.logsumexp(-1) if f is F else mine.logsumexp(x),
    "log_softmax": lambda f, x: f.log_softmax(x, -1),
    "columns": lambda f, x: f.log_softmax(x, 0),
    "selective": _selective,
    "several": _several,
    **{
        f"cross_entropy-{way}-{w}-{s}": _ce(
            target=TARGET, weight=WEIGHT if w else None, reduction=way, label_smoothing=s
        )
        for way in ("none", "mean", "sum")
        for w in (False, True)
        for s in (0.0, 0.125)
    },
    "probabilities": _ce(target=SHARES),
    "weighted probabilities": _ce(target=SHARES, weight=WEIGHT, label_smoothing=0.25),
    **{
        f"kl-{way}-{log}": lambda f, x, way=way, log=log: _kl(
            f,
            x,
            target=(OTHER.bfloat16() if log else SHARES),
            reduction=way,
            log_target=log,
        )
        for way in ("rows", "sum", "mean", "batchmean")
        for log in (False, True)
    },
}


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_against_float64(name, dtype):
    case, x = CASES[name], logits(ROWS, CLASSES, dtype=dtype).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    got, exact = case(mine, x), case(F, exact_x)
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    slack = 2.0**-24 * exact.abs().max().item() if exact.dim() == 0 else 0.0
    error = (got.double() - exact).abs()
    assert (error <= half_ulp(exact, torch.float32) + slack + 64 * bound(CLASSES)).all()
    upstream = torch.linspace(0.5, 2.0, max(got.numel(), 1)).view(got.shape)
    got.backward(upstream)
    exact.backward(upstream.double())
    assert x.grad.dtype == dtype
    error = (x.grad.double() - exact_x.grad).abs()
    weight = exact_x.grad.abs().sum() + upstream.abs().sum()
    # A mean or a sum gives rows gradients in float32; weighted probabilities are float32 too.
    inherited = 2.0**-24 * exact_x.grad.abs() if exact.dim() == 0 else 0.0
    inherited = 2.0**-22 * weight if name == "weighted probabilities" else inherited
    assert (error <= half_ulp(exact_x.grad, dtype) + inherited + weight * bound(CLASSES)).all()


COMPILED = ("logsumexp", "columns", "several", "probabilities", "kl-rows-True")


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*COMPILED, "cross_entropy-mean-True-0.125"])
@pytest.mark.filterwarnings("ignore:<class .torch.autograd.function:DeprecationWarning")  # torch's
def test_compiled_they_are_one_graph_with_the_same_bits(name, backend):
    leaves = [logits(ROWS, CLASSES).requires_grad_() for _ in range(2)]

    def run(x):
        return CASES[name](mine, x)

    values = [run(leaves[0]), torch.compile(run, fullgraph=True, backend=backend)(leaves[1])]
    for value in values:
        value.backward(torch.linspace(0.5, 2.0, max(value.numel(), 1)).view(value.shape))
    assert torch.equal(*values)
    assert torch.equal(*[x.grad for x in leaves])


def test_the_gradient_of_a_divergence_for_its_target():
    x, y = logits(6, 50), logits(6, 50, seed=1).requires_grad_()
    exact_y = y.detach().double().requires_grad_()
    mine.kl_div(x, y, "sum", log_target=True).backward()
    q, p = exact_y.log_softmax(-1), x.double().log_softmax(-1)
    (q.exp() * (q - p)).sum().backward()
    error = (y.grad.double() - exact_y.grad).abs()
    assert (error <= half_ulp(exact_y.grad, torch.bfloat16) + 64 * bound(50)).all()


def _bits(x):
    """Values and gradients of all functions, of logits of shape (6, V)."""
    rows, classes = x.shape
    index = torch.arange(rows) * 3
    other = logits(rows, classes, seed=3)[: len(x)]
    found = []
    for function in (
        mine.logsumexp,
        lambda v: mine.log_softmax(v, dtype=torch.bfloat16),
        lambda v: mine.selective_log_softmax(v, index),
        lambda v: mine.cross_entropy(v, index, reduction="none", label_smoothing=0.1),
        lambda v: mine.kl_div(v, other, "rows", log_target=True),
        lambda v: mine.kl_div(v, other.float().softmax(-1), "rows"),
    ):
        leaf = x.detach().requires_grad_()
        value = function(leaf)
        value.backward(torch.ones_like(value))
        found += [value.detach(), leaf.grad]
    return found


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("chunk", "long"), [(7, 1 << 12), (61, 1), (200, 1 << 12), (1000, 1)])
def test_chunks_have_no_part_in_the_bits(monkeypatch, dtype, chunk, long):
    x = logits(6, 101, dtype=dtype)
    expected = _bits(x)
    monkeypatch.setattr(row_chunks, "CHUNK", chunk)
    monkeypatch.setattr(row_chunks, "LONG", long)
    assert all(map(torch.equal, _bits(x), expected))


def test_binary_places_elements_rows_and_threads_have_no_part_in_the_bits():
    x = logits(40, 103)
    target = torch.arange(40)
    order = torch.randperm(103, generator=torch.Generator().manual_seed(2))

    def losses(x, target):
        leaf = x.detach().requires_grad_()
        loss = mine.cross_entropy(leaf, target, reduction="none")
        loss.sum().backward()
        return loss.detach(), leaf.grad

    loss, gradient = losses(x, target)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(103)
    moved = losses(x[:, order], inverse[target])
    assert torch.equal(moved[0], loss)
    assert torch.equal(moved[1], gradient[:, order])
    for start, stop in ((0, 1), (3, 20), (39, 40)):
        part = losses(x[start:stop], target[start:stop])
        assert torch.equal(part[0], loss[start:stop])
        assert torch.equal(part[1], gradient[start:stop])
    strided = torch.stack([x, x], -1)[..., 0]
    assert all(map(torch.equal, losses(strided, target), (loss, gradient)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert all(map(torch.equal, losses(x, target), (loss, gradient)))
    finally:
        torch.set_num_threads(threads)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    for way in ("mean", "sum"):
        a, b = (mine.cross_entropy(x[i], target[i], reduction=way) for i in (shuffled, target))
        assert torch.equal(a, b)


def test_batches_of_more_dimensions():
    x = logits(3, 5, 4, 23)
    for view in (x, x[:, 1:], x.transpose(0, 2)):
        assert torch.equal(
            mine.logsumexp(view), mine.logsumexp(view.reshape(-1, 23)).view(view.shape[:-1])
        )
    images, target = x.movedim(-1, 1), torch.zeros(3, 5, 4, dtype=torch.long)
    got = mine.cross_entropy(images, target, reduction="none")
    assert torch.equal(
        got.flatten(), mine.cross_entropy(x.view(-1, 23), target.flatten(), reduction="none")
    )
    one = mine.cross_entropy(x[0, 0, 0], torch.tensor(2))
    assert torch.equal(one, mine.cross_entropy(x[0, 0, :1], torch.tensor([2])))
    assert mine.logsumexp(x, 1, keepdim=True).shape == (3, 1, 4, 23)
    assert mine.logsumexp(x[:0]).shape == (0, 5, 4)


def test_special_values_are_those_of_torch():
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [[1, -inf, 2], [inf, 1, 2], [-inf, -inf, -inf], [nan, 1, 2], [inf, -inf, 0]]
    ).bfloat16()
    same = {"rtol": 1e-6, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(mine.logsumexp(x), x.float().logsumexp(-1), **same)
    torch.testing.assert_close(mine.log_softmax(x), x.float().log_softmax(-1), **same)
    target = torch.tensor([2, 0, 0, 1, 2])
    for smoothing in (0.0, 0.1):
        given = {"reduction": "none", "label_smoothing": smoothing}
        torch.testing.assert_close(
            mine.cross_entropy(x, target, **given),
            F.cross_entropy(x.float(), target, **given),
            **same,
        )
    leaf = x[:1].clone().requires_grad_()
    mine.cross_entropy(leaf, target[:1]).backward()
    assert leaf.grad[0, 1] == 0
    assert mine.kl_div(x[:1], x[:1], "rows", log_target=True).item() == 0
    ignored = torch.full((5,), -100)
    assert mine.cross_entropy(x, ignored).isnan()
    assert mine.cross_entropy(x, ignored, reduction="sum") == 0


def test_errors_say_what_to_give():
    x = logits(3, 5)
    index = torch.tensor([0, 1, 5])
    for error, text, call in (
        (TypeError, "logsumexp: logits are torch.float64", lambda: mine.logsumexp(x.double())),
        (TypeError, "bf16x2; give", lambda: mine.log_softmax(mcf.as_expansion(x, mcf.bf16x2))),
        (TypeError, "dtype is torch.float64", lambda: mine.log_softmax(x, dtype=torch.float64)),
        (IndexError, "dim is 2, and the logits", lambda: mine.logsumexp(x, 2)),
        (ValueError, r"\(3, 0\), with 0 along", lambda: mine.logsumexp(x[:, :0])),
        (IndexError, "give 0 to 4", lambda: mine.cross_entropy(x, index)),
        (IndexError, "give 0 to 4", lambda: mine.selective_log_softmax(x, index)),
        (TypeError, "index is torch.int32", lambda: mine.selective_log_softmax(x, index.int())),
        (ValueError, r"give an index of shape \(3,\)",
         lambda: mine.selective_log_softmax(x, index[:2])),
        (TypeError, "target is torch.int32", lambda: mine.cross_entropy(x, index.int())),
        (ValueError, r"target has \(2,\)", lambda: mine.cross_entropy(x, index[:2])),
        (ValueError, "reduction is 'all'", lambda: mine.cross_entropy(x, index, reduction="all")),
        (ValueError, "label_smoothing is 2",
         lambda: mine.cross_entropy(x, index, label_smoothing=2)),
        (ValueError, r"weight has shape \(3,\)",
         lambda: mine.cross_entropy(x, index, weight=torch.ones(3))),
        (ValueError, "reduction is 'none'", lambda: mine.kl_div(x, x, "none")),
        (ValueError, r"target has \(2, 5\)", lambda: mine.kl_div(x, x[:2])),
        (ValueError, "give target.detach", lambda: mine.kl_div(x, x.float().requires_grad_())),
        (ValueError, "give target.detach",
         lambda: mine.cross_entropy(x, x.float().requires_grad_())),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()


@on_ranks(2)
def test_a_divided_vocabulary_has_the_bits_of_the_whole():
    whole = logits(7, 90)
    whole[2, 80], whole[3], whole[4, 3] = math.nan, -math.inf, math.inf
    part = whole[:, :31] if dist.get_rank() == 0 else whole[:, 31:]
    leaf, own = whole.clone().requires_grad_(), part.clone().requires_grad_()
    expected = mine.logsumexp(leaf)
    got = mine.logsumexp(own, group=dist.group.WORLD)
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    expected.backward(torch.ones(7))
    got.backward(torch.ones(7))
    gradient = leaf.grad[:, :31] if dist.get_rank() == 0 else leaf.grad[:, 31:]
    assert torch.equal(own.grad.nan_to_num(7.0), gradient.nan_to_num(7.0))
