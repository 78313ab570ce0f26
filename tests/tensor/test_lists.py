"""`torch._foreach_*` and fused steps: as one tensor after the other, whatever the tensors share."""

import contextlib
import random

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.kernels import cpu
from support.helpers import a_step, assert_same_terms, sample

FORMATS = {
    "expansions": (mcf.bf16x2, mcf.bf16x3),
    "stored": (mcf.bf16i16, mcf.bf16i8.nearest),
    "both": (mcf.bf16x2, mcf.bf16i16),
}


def tensors(rng, formats):
    """Expansions of two formats and plain tensors, a deferred one, and parts and views of them."""
    whole = [sample(rng.choice(formats), 6, seed=i) for i in range(3)]
    whole += [torch.linspace(1, 2, 6).bfloat16(), whole[0] * 2]
    parts = [x[part] for x in whole for part in (slice(3), slice(3, None))]
    overlapping = [x[1:4] for x in whole if isinstance(x, mcf.MCFTensor)]  # plain ones may not
    return whole, [*whole, *parts, *overlapping]


@pytest.mark.thinned(of=6)
@pytest.mark.usefixtures("no_grad")
@pytest.mark.filterwarnings("ignore::mcftensor.errors.RoundedWarning")
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("seed", range(40))
def test_lists_whose_tensors_share_memory(seed, formats):
    found = []
    for in_list in (True, False):
        rng = random.Random(seed)
        whole, pool = tensors(rng, FORMATS[formats])
        targets = [rng.choice(pool) for _ in range(4)]
        sources = [rng.choice([x for x in pool if x.shape == t.shape]) for t in targets]
        if in_list:
            torch._foreach_add_(targets, sources)
        else:
            for target, source in zip(targets, sources, strict=True):
                target.add_(source)
        found.append([mcf.as_plain(x, torch.float64) for x in whole])
    for together, one_by_one in zip(*found, strict=True):
        torch.testing.assert_close(together, one_by_one, rtol=0, atol=0)


def test_a_parameter_given_twice_takes_two_steps():
    once, twice = (nn.Parameter(sample(mcf.bf16x2, 5)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([twice, twice], lr=0.1, fused=True)
    for p in (once, twice):
        p.grad = torch.ones(5).bfloat16()
    optimizer.step()
    expected = torch.optim.SGD([once], lr=0.1, fused=True)
    expected.step()
    expected.step()
    assert_same_terms(twice, once)


def test_a_parameter_given_twice_to_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        moved = []
        for count in (3, 1 << 20):
            p = nn.Parameter(mcf.as_expansion(torch.ones(count)))
            with pytest.warns(UserWarning, match="duplicate"):
                optimizer = torch.optim.AdamW([p, p], lr=0.1, fused=True)
            p.grad = torch.ones(count).bfloat16()
            optimizer.step()
            moved.append(mcf.as_plain(p, torch.float32))
        assert moved[1].eq(moved[0][0]).all()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["add", "copy", "exp", "neg", "sqrt", "zero"])
@pytest.mark.unwatched("the mode that watches keeps versions of plain tensors as they are")
def test_lists_written_to_are_of_another_version(name):
    operands = {"add": [1.0], "copy": [[torch.ones(3)]]}.get(name, [])
    x, plain = sample(mcf.bf16x2, 3), torch.ones(3)
    for target in (x, plain):
        getattr(torch, f"_foreach_{name}_")([target], *operands)
    assert x._version == plain._version == 1


def operand(rng, target, seed):
    """Something that may stand beside a target in arithmetic, mostly of its shape."""
    kind = rng.choice(
        ["plain", "plain", "wide", "expansion", "deferred", "scalar", "row", "turned"]
    )
    format = rng.choice([f for f in LONG if f.base == target.dtype])
    shape = {"scalar": (), "row": target.shape[-1:]}.get(kind, target.shape)
    x = sample(format, *shape, seed=seed)
    if kind == "turned" and target.dim() == 2:
        return sample(format, *reversed(shape), seed=seed).t()
    if kind in ("expansion", "row", "turned"):
        return x
    if kind == "deferred":
        return x * 2
    return mcf.as_plain(x, torch.float32 if kind == "wide" else x.dtype)


LONG = (*FORMATS["expansions"], mcf.fp16x2, mcf.fp32x2)
SHAPES = [(5,), (5,), (3, 4), (), (0,), (1, 1)]
IN_PLACE = {
    "add": 1,
    "sub": 1,
    "mul": 1,
    "div": 1,
    "lerp": 1,
    "addcmul": 2,
    "addcdiv": 2,
    "sqrt": 0,
}


@pytest.mark.thinned(of=4)
@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("seed", range(8))
def test_lists_of_all_kinds(name, seed):
    rng = random.Random(seed)
    alike = rng.random() < 0.5  # so that there is something to do together
    kinds = [(rng.choice(LONG), rng.choice(SHAPES)) for _ in range(1 if alike else 6)] * 6
    formats = [(f, shape) for f, shape in kinds[:6]]
    numbers = [0.3 + i for i in range(6)]
    found = []
    for in_list in (True, False):
        targets = [sample(f, *shape, seed=i) for i, (f, shape) in enumerate(formats)]
        rng = random.Random(seed)
        operands = [
            [operand(rng, t, 100 * k + i) for i, t in enumerate(targets)]
            for k in range(IN_PLACE[name])
        ]
        weights = {"lerp": [0.3], "addcmul": [numbers], "addcdiv": [numbers]}.get(name, [])
        if in_list:
            getattr(torch, f"_foreach_{name}_")(targets, *operands, *weights)
        else:
            for i, target in enumerate(targets):
                own = [column[i] for column in operands]
                keywords = {"value": numbers[i]} if name.startswith("addc") else {}
                more = [0.3] if name == "lerp" else []
                getattr(target, f"{name}_")(*own, *more, **keywords)
        found.append(targets)
    for together, one_by_one in zip(*found, strict=True):
        assert_same_terms(together, one_by_one)


def test_lists_that_round_stochastically_draw_for_each_tensor():
    format = mcf.Format.from_name("bf16x2sr")
    ones = [mcf.as_expansion(torch.ones(1000), format) for _ in range(3)]
    torch._foreach_mul_(ones, 1 + 2.0**-20 * (1 + 2.0**-9))  # between two of the format
    tails = [x.components[1] for x in ones]
    assert all(len(x.unique()) == 2 for x in tails)
    assert not torch.equal(tails[0], tails[1])


@pytest.mark.usefixtures("no_grad")
def test_deferred_operands_that_were_changed_by_a_number_and_by_a_tensor():
    format, found = mcf.bf16x2, []
    for in_list in (True, False):
        targets = [sample(format, 3, seed=i) for i in range(2)]
        roots = [mcf.as_expansion(torch.full((3,), 1.1 + i), format).sqrt() for i in range(2)]
        roots[0].mul_(2.0)
        roots[1].mul_(sample(format, 3, seed=2))
        if in_list:
            torch._foreach_add_(targets, roots)
        else:
            for target, root in zip(targets, roots, strict=True):
                target.add_(root)
        found.append(targets)
    for together, one_by_one in zip(*found, strict=True):
        assert_same_terms(together, one_by_one)


@pytest.mark.usefixtures("no_grad")
def test_lists_draw_in_the_order_of_their_tensors():
    format, found = mcf.Format.from_name("bf16x2sr"), []
    for in_list in (True, False):
        torch.manual_seed(0)
        targets = [sample(format, 50, seed=i) for i in range(3)]
        numbers = [
            torch.randn(50).bfloat16(),
            sample(format, 50, seed=4),
            torch.randn(50).bfloat16(),
        ]
        if in_list:
            torch._foreach_mul_(targets, numbers)
        else:
            for target, number in zip(targets, numbers, strict=True):
                target.mul_(number)
        found.append(targets)
    for together, one_by_one in zip(*found, strict=True):
        assert_same_terms(together, one_by_one)


# ------------------------------------------------------------- fused steps without the dispatcher


def test_a_negative_view_as_a_gradient_is_refused_as_by_plain_parameters():
    for format in (None, mcf.bf16x2):
        weight = nn.Parameter(torch.ones(3) if format is None else sample(format, 3))
        weight.grad = torch._neg_view(torch.ones(3, dtype=weight.dtype))
        with pytest.raises(RuntimeError, match="negation"):
            torch.optim.SGD([weight], lr=1.0, fused=True).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_betas_that_are_tensors_are_numbers(dtype):
    found = []
    for as_tensors in (True, False):
        betas = [torch.tensor(x, dtype=dtype) for x in (0.875, 0.99609375)]
        weight = nn.Parameter(sample(mcf.fp32x2, 9))
        lr = torch.tensor(0.01, dtype=torch.float64)
        betas = tuple(betas if as_tensors else map(float, betas))
        optimizer = torch.optim.AdamW([weight], lr=lr, betas=betas, fused=True)
        for i in range(5):
            weight.grad = torch.full((9,), 0.1 * i)
            optimizer.step()
        found.append(weight)
    assert_same_terms(*found)


@pytest.mark.usefixtures("no_grad")
def test_lists_may_be_given_by_name():
    named, placed = (sample(mcf.bf16x2, 3) for _ in range(2))
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False, "is_first_step": False}
    grads = [torch.ones(3).bfloat16()]
    torch._fused_sgd_(self=[named], grads=grads, momentum_buffer_list=[], **options)
    torch._fused_sgd_([placed], grads, [], **options)
    assert_same_terms(named, placed)


def test_a_scaled_gradient_that_formats_share():
    gradient = torch.full((3,), 8.0).bfloat16()
    weights = [nn.Parameter(mcf.as_expansion(torch.ones(3), f)) for f in FORMATS["expansions"]]
    for weight in weights:
        weight.grad = gradient
    optimizer = torch.optim.SGD(weights, lr=0.125, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [[0.875] * 3] * 2


@pytest.mark.parametrize("path", ["foreach", "fused"])
def test_steps_in_several_formats_draw_in_the_order_of_parameters(path):
    random, found = mcf.Format.from_name("bf16x2sr"), []
    for formats in ([random, mcf.bf16x3, random], [random, random]):
        torch.manual_seed(0)
        weights = [nn.Parameter(sample(f, 40, seed=7)) for f in formats]
        for weight in weights:
            weight.grad = torch.full((40,), 0.3).bfloat16()
        torch.optim.SGD(weights, lr=1e-3, **{path: True}).step()
        found.append([weights[0], weights[-1]])
    for one, other in zip(*found, strict=True):
        assert_same_terms(one, other)


def test_one_transposed_tensor_among_many(monkeypatch):
    """Kernels are asked for what is laid out alike; facts are found some hundred at a time."""
    monkeypatch.setattr(cpu, "LOOK_AFTER", 0)
    monkeypatch.setattr(cpu, "BUILD_AFTER", 0)
    x = [sample(mcf.bf16x2, 3, 2).t(), *(sample(mcf.bf16x2, 2, 3, seed=i) for i in range(1, 300))]
    y = [sample(mcf.bf16x2, 2, 3, seed=1000 + i) for i in range(300)]
    for found, a, b in zip(torch._foreach_mul(x, y), x, y, strict=True):
        assert_same_terms(found, a * b)


ONE_AFTER_THE_OTHER = {
    "a target twice": lambda x, d: ([d, d], [x, x]),
    "each the other's operand": lambda x, d: ([d, x], [x, d]),
    "what the next one reads": lambda x, d: ([x, d], [d, x]),
    "what two of a kind read": lambda x, d: ((e := x + 1, d), (d, e)),
    "a plain view of the next": lambda x, d: ([x, x[:]], [x[:], x]),
    "of other layouts": lambda x, d: (
        [x, (e := x.t().contiguous().t() * 1.0), d],
        [d, x, e],
    ),
    "the transposed next to it": lambda x, d: ([(y := x.mT.clone().mT), x, d], [x, y, y]),
}


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("case", ONE_AFTER_THE_OTHER)
def test_rows_that_read_the_targets_of_others(case, in_step):
    found = []
    for in_list in (True, False):
        with a_step() if in_step else contextlib.nullcontext():
            x = sample(mcf.bf16x2, 3, 3) * 1.0
            targets, operands = map(list, ONE_AFTER_THE_OTHER[case](x, x * 2))
            if in_list:
                torch._foreach_mul_(targets, operands)
            else:
                for target, operand in zip(targets, operands, strict=True):
                    target.mul_(operand)
            found.append([x, *targets])
    for together, one_by_one in zip(*found, strict=True):
        assert_same_terms(together, one_by_one)


@pytest.mark.usefixtures("no_grad")
def test_a_large_tensor_and_a_part_of_it(monkeypatch):
    """One that only stores is written to block by block, each after the next one was read."""
    monkeypatch.setattr("mcftensor.passes.decoded_traces.TOGETHER", 8)
    x = mcf.as_expansion(torch.arange(100.0), mcf.bf16i16)
    x[1:].add_(x[:-1])
    assert x.tolist() == [0.0, *(2.0 * i - 1 for i in range(1, 100))]
