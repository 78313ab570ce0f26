"""Log-probabilities and losses of a vocabulary that processes divide: the bits of the whole."""

import math

import pytest
import torch
import torch.distributed as dist

import mcftensor as mcf
from mcftensor.reproducible import row_chunks
from support.ranks import on_ranks

pytestmark = pytest.mark.with_float64("sums of exponentials are computed in float64")

mine = mcf.functional
ROWS, CLASSES = 7, 90
ENDS = {1: (90,), 2: (31, 90), 4: (1, 47, 47, 90)}  # of parts; one of four is empty
TARGET = torch.tensor([0, 30, -100, 31, 89, 47, 46])
INDEX = torch.tensor([[0, 89, 0], [30, 31, 31], [1, 1, 1], [46, 47, 0], [5, 5, 80], [2, 3, 4]])


def draw(*shape, seed=0, scale=4.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


SHARES = draw(ROWS, CLASSES, seed=1).softmax(-1)
WEIGHT = draw(CLASSES, seed=2).abs() + 0.1
OTHER = draw(ROWS, CLASSES, seed=3).bfloat16()


def _cases():
    """Functions of logits, of the cut that takes a part of what is divided, and of a group."""
    index = torch.cat([INDEX, INDEX[:1]])
    yield "logsumexp", lambda x, cut, **g: mine.logsumexp(x, **g)
    yield "log_softmax", lambda x, cut, **g: mine.log_softmax(x, **g)
    yield "selective", lambda x, cut, **g: mine.selective_log_softmax(x, index[:, 1], **g)
    yield "several", lambda x, cut, **g: mine.selective_log_softmax(x, index, **g)
    for way in ("none", "mean", "sum"):
        for weight in (None, WEIGHT):
            for smoothing in (0.0, 0.125):
                yield (
                    f"cross_entropy {way} {weight is not None} {smoothing}",
                    lambda x, cut, way=way, weight=weight, smoothing=smoothing, **g: (
                        mine.cross_entropy(x, TARGET, weight, -100, way, smoothing, **g)
                    ),
                )
    yield "probabilities", lambda x, cut, **g: mine.cross_entropy(x, cut(SHARES), **g)
    yield (
        "weighted probabilities",
        lambda x, cut, **g: mine.cross_entropy(
            x, cut(SHARES), WEIGHT, label_smoothing=0.25, reduction="none", **g
        ),
    )
    for way in ("rows", "sum", "batchmean", "mean"):
        yield f"kl {way}", lambda x, cut, way=way, **g: mine.kl_div(x, cut(SHARES), way, **g)
        yield (
            f"kl of logits {way}",
            lambda x, cut, way=way, **g: mine.kl_div(x, cut(OTHER), way, log_target=True, **g),
        )


CASES = dict(_cases())
# One for each way through the functions; all others are combinations of these.
SOME = (
    "logsumexp", "log_softmax", "selective", "several", "cross_entropy none False 0.0",
    "cross_entropy mean True 0.125", "cross_entropy sum False 0.125", "probabilities",
    "weighted probabilities", "kl rows", "kl of logits rows", "kl of logits mean",
)  # fmt: skip


def cut(x):
    """The part of this process, along the last dimension."""
    ends = (0, *ENDS[dist.get_world_size()])
    rank = dist.get_rank()
    return x[..., ends[rank] : ends[rank + 1]]


def logits(dtype, special):
    x = draw(ROWS, CLASSES).to(dtype)
    if special:
        x[2, 80], x[3], x[4, 3], x[5, 47] = math.nan, -math.inf, math.inf, -math.inf
    return x


def same(a, b):
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and a.shape == b.shape


def check(name, dtype, special):
    whole = logits(dtype, special).requires_grad_()
    part = cut(whole.detach()).clone().requires_grad_()
    expected = CASES[name](whole, lambda x: x)
    got = CASES[name](part, cut, group=dist.group.WORLD)
    upstream = draw(*expected.shape, seed=4, scale=1.0)
    is_divided = name == "log_softmax"
    assert same(got, cut(expected) if is_divided else expected), name
    expected.backward(upstream)
    got.backward(cut(upstream) if is_divided else upstream)
    assert same(part.grad, cut(whole.grad)), name


def check_some():
    for name in SOME:
        check(name, torch.bfloat16, True)
        check(name, torch.float32, False)


@on_ranks(1)
def test_one_process_has_the_bits_of_no_group():
    check_some()


@on_ranks(2)
def test_two_processes_have_the_bits_of_the_whole():
    check_some()


@on_ranks(4)
def test_four_processes_of_which_one_has_no_class_have_the_bits_of_the_whole():
    check_some()


@pytest.mark.slow
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@on_ranks(4)
def test_every_combination(dtype, special):
    for name in CASES:
        check(name, dtype, special)


@on_ranks(2)
def test_chunks_of_parts_have_no_part_in_the_bits():
    chunk, long = row_chunks.CHUNK, row_chunks.LONG
    try:
        row_chunks.CHUNK, row_chunks.LONG = 13, 1
        for name in ("log_softmax", "several", "probabilities", "kl of logits rows"):
            check(name, torch.bfloat16, False)
    finally:
        row_chunks.CHUNK, row_chunks.LONG = chunk, long


@on_ranks(2)
def test_the_gradient_of_divided_target_logits():
    x, y = logits(torch.bfloat16, False), OTHER.clone().requires_grad_()
    own = cut(OTHER).clone().requires_grad_()
    mine.kl_div(x, y, "sum", log_target=True).backward()
    mine.kl_div(cut(x), own, "sum", log_target=True, group=dist.group.WORLD).backward()
    assert torch.equal(own.grad, cut(y.grad))


@on_ranks(2)
def test_sums_of_float32_exponentials_have_other_bits():
    """The control: what `torch.exp` and a sum over processes give."""
    x = draw(200, CLASSES)
    most = x.amax(-1, keepdim=True)
    part = (cut(x) - most).exp().sum(-1)
    dist.all_reduce(part)
    divided, whole = most[:, 0] + part.log(), x.logsumexp(-1)
    assert not torch.equal(divided, whole)
    assert torch.equal(mine.logsumexp(cut(x), group=dist.group.WORLD), mine.logsumexp(x))


@on_ranks(2)
def test_errors_of_groups():
    x, group = logits(torch.bfloat16, False), dist.group.WORLD
    rank = dist.get_rank()
    with pytest.raises(TypeError, match="log_softmax: group is 3; give a process group"):
        mine.log_softmax(x, group=3)
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(TypeError, match="give a process group that has this process"):
            mine.kl_div(x, OTHER, group=alone)
    with pytest.raises(ValueError, match=r"rank 0 of the group have shape \(7, 90\).*rank 1 .*6"):
        mine.logsumexp(x[: 7 - rank], group=group)
    with pytest.raises(ValueError, match="have 0 classes together"):
        mine.logsumexp(x[:, :0], group=group)
    with pytest.raises(IndexError, match="give 0 to 179"):
        mine.selective_log_softmax(x, torch.full((7,), 180), group=group)
    with pytest.raises(ValueError, match=r"give \(180,\)"):
        mine.cross_entropy(x, TARGET, WEIGHT, group=group)
