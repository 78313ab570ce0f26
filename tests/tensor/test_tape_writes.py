"""Writes to what an operation on the tape reads or makes never change what it comes to."""

import copy
import gc
import sys
import threading

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.tensor import tape
from mcftensor.tensor.step_tensors import PendingTensor
from support.helpers import a_step, assert_same_terms, sample
from support.taping import expression, own, values, waiting

pytestmark = pytest.mark.usefixtures("within_a_step")


WRITES = {
    "add_": lambda x: x.add_(1),
    "copy_": lambda x: x.copy_(torch.ones(3, 5)),
    "zero_": lambda x: x.zero_(),
    "view before": None,
    "row": lambda x: x[0].mul_(2),
    "view after": lambda x: x.view(-1)[3:].fill_(7),
    "transposed": lambda x: x.t().add_(1),
    "detached": lambda x: x.detach().add_(1),
    "data": lambda x: x.data.add_(1),
    "set data": lambda x: setattr(x, "data", torch.zeros_like(x)),
    "setitem": lambda x: x.__setitem__((0, 0), 3.0),
    "foreach": lambda x: torch._foreach_add_([x, sample(mcf.bf16x2, 2)], 1.0),
    "foreach_copy_": lambda x: torch._foreach_copy_([x], [torch.ones(3, 5)]),
    "foreach_zero_": lambda x: torch._foreach_zero_([x]),
    "out": lambda x: torch.add(torch.ones(3, 5), 1, out=x),
    "component": lambda x: x.components[0].add_(1),
    "clamp_": lambda x: x.clamp_(max=0.75),
    "normal_": lambda x: x.normal_(),
    "fused": lambda x: torch._fused_sgd_(
        [x], [torch.ones(3, 5)], [], lr=0.1, momentum=0.0, weight_decay=0.0, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_an_operand(write, at_once):
    for which in range(2):
        operands = values()
        view = operands[which][1:]
        expected = at_once(expression, *operands)
        z, longer = expression(*operands), expression(*operands) * 2
        if write == "view before":
            view.add_(1)
        else:
            WRITES[write](operands[which])
        assert_same_terms(z, expected)
        assert_same_terms(longer, at_once(torch.mul, expected, 2))


def test_a_write_to_an_operand_without_dimensions(at_once):
    x = sample(mcf.bf16x2)
    expected = at_once(torch.mul, x, 3)
    z = x * 3
    x.add_(1)
    assert_same_terms(z, expected)


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_write_by_compiled_code(calls_before, at_once):
    torch._dynamo.reset()
    triple = torch.compile(lambda x: x.mul_(3), backend="aot_eager", fullgraph=True)
    for _ in range(calls_before):
        triple(values()[0])
    x, _ = values()
    expected = at_once(torch.sqrt, x)
    z = x.sqrt()
    assert waiting(z)
    triple(x)
    assert_same_terms(z, expected)


HANDED_OUT = {
    "components": lambda x: x.components[0],
    "numpy": lambda x: x.components[0].numpy(),
    "data of a component": lambda x: x.components[0].data,
    "view": lambda x: x.view(-1),
    "row": lambda x: x[0],
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "taken apart": lambda x: x._component0 if x.__tensor_flatten__() else None,
    "shallow copy": copy.copy,
    "dlpack": lambda x: torch.from_dlpack(x.components[0]),
}


@pytest.mark.parametrize("hand_out", HANDED_OUT)
def test_memory_that_was_handed_out_before(hand_out, at_once):
    x, y = (mcf.as_expansion(torch.full((4, 3), v).double(), mcf.fp32x2) for v in (3.0, 2.0))
    expected = at_once(torch.mul, x, y)
    held = HANDED_OUT[hand_out](x)
    z = x * y
    assert not waiting(x)
    held += 1
    assert_same_terms(z, expected)
    x.mul_(0)  # which others are to see
    assert not waiting(x)
    assert not torch.as_tensor(mcf.as_plain(torch.as_tensor(held), torch.float64)).any()


@pytest.mark.parametrize("hand_out", HANDED_OUT)
def test_memory_that_is_handed_out_later(hand_out, at_once):
    x, y = (mcf.as_expansion(torch.full((4, 3), v).double(), mcf.fp32x2) for v in (3.0, 2.0))
    expected = at_once(torch.mul, x, y)
    z = x * y
    assert waiting(z)
    held = HANDED_OUT[hand_out](x)
    assert not waiting(z)
    held += 1
    assert_same_terms(z, expected)


class TestOrderOfListedWrites:
    def test_what_is_written_first_and_read_by_another(self, at_once):
        def update(x, y, other):
            torch._foreach_add_([x, y], [other, x * 2])
            return x, y

        expected = at_once(update, *values(), sample(mcf.bf16x2, 3, 5, seed=7))
        got = update(*values(), sample(mcf.bf16x2, 3, 5, seed=7))
        for a, b in zip(got, expected, strict=True):
            assert_same_terms(a, b)

    def test_what_is_written_first_and_copied_for_another(self, at_once):
        """A column is copied as a whole where one of its tensors has other holders."""

        def update(x, y, other):
            view = other[:]
            torch._foreach_addcdiv_([x, y], [x, y], [other, x])
            return x, y, view

        expected = at_once(update, *values(), values()[1])
        for a, b in zip(update(*values(), values()[1]), expected, strict=True):
            assert_same_terms(a, b)

    def test_another_kernel_in_between(self, at_once):
        def update(x, y, other):
            z = other.clone()
            torch._foreach_add_([z, y, x], [other, x * 2, other])
            return x, y, z

        expected = at_once(update, *values(), sample(mcf.bf16x2, 3, 5, seed=7))
        got = update(*values(), sample(mcf.bf16x2, 3, 5, seed=7))
        for a, b in zip(got, expected, strict=True):
            assert_same_terms(a, b)

    def test_deferred_targets(self, at_once):
        def update(x, y):
            z = x * 2
            torch._foreach_add_([z, x], [x, y])
            torch._foreach_mul_([x, z], [y, 3 * x])
            return x, y, z

        for a, b in zip(update(*values()), at_once(update, *values()), strict=True):
            assert_same_terms(a, b)

    def test_shifted_views_of_one_tensor(self, at_once):
        def update(x, y):
            x[:-1].add_(x[1:] * 2)
            x.view(-1)[1:].mul_(x.view(-1)[:-1] + 1)
            return x

        assert_same_terms(update(*values()), at_once(update, *values()))


def test_writes_to_a_result(at_once):
    def update(x, y):
        z = x * y
        first = z + 1
        z.add_(5)
        second = z * 2
        z.copy_(y)
        third = z - 1
        z = y * 3
        z.data = torch.zeros_like(x)
        fourth = z + 1
        z.mul_(3)
        return first, second, third, fourth, z

    for a, b in zip(update(*values()), at_once(update, *values()), strict=True):
        assert_same_terms(a, b)


@pytest.mark.parametrize("change", [list.clear, lambda c: c.__setitem__(slice(None), [7.0, 7.0])])
def test_a_list_of_numbers_is_the_callers(change, at_once):
    """Who changes it, or empties it, changes nothing that was asked for before."""

    def update(x, y):
        numbers = [2.0, 3.0]
        torch._foreach_mul_([x, y], numbers)
        made = torch._foreach_add([x, y], numbers)
        tensors = [x, y]
        torch._foreach_mul_(tensors, 1.5)
        change(numbers)
        tensors.clear()
        return x, y, *made

    for a, b in zip(update(*values()), at_once(update, *values()), strict=True):
        assert_same_terms(a, b)


def test_many_results_of_operands_that_change():
    x, y = (mcf.as_expansion(torch.full((4,), v), mcf.bf16x2) for v in (2.0, 3.0))
    for _ in range(3):
        kept = [x * y for _ in range(3 * tape.FEW)]
        x.add_(1.0)
        assert all(product.tolist()[0] == 6.0 for product in kept)
        x.sub_(1.0)


class TestGradients:
    """Plain tensors, which anybody may write to."""

    @pytest.mark.parametrize(
        "write",
        [
            lambda g: g.zero_(),
            lambda g: g.data.zero_(),
            lambda g: g.numpy().fill(0),
            lambda g: g.view(-1)[3:].fill_(7),
        ],
    )
    def test_written_to_behind_our_back(self, write, at_once):
        found = []
        for call in (at_once, lambda function: function()):
            x, y = values()
            weight = nn.Parameter(own(x))
            plain = weight.grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(
                torch.float32 if "numpy" in str(write.__code__.co_names) else torch.bfloat16
            )

            def update(weight=weight, plain=plain, y=y):
                weight.add_(weight.grad, alpha=-0.1)
                write(plain)
                weight.addcmul_(weight.grad, y, value=0.5)
                return weight

            found.append(call(update))
        assert_same_terms(*found)

    def test_written_to_through_us(self, at_once):
        found = []
        for call in (at_once, lambda function: function()):
            x, y = values()
            weight = nn.Parameter(own(x))
            weight.grad = torch.linspace(-1, 1, 15).view(3, 5).bfloat16()

            def update(weight=weight, y=y):
                weight.add_(weight.grad, alpha=-0.1)
                weight.grad.mul_(y)
                weight.add_(weight.grad)
                return weight

            found.append(call(update))
        assert_same_terms(*found)


def test_an_alias_sees_writes_when_it_reads():
    x, _ = values()
    view = x[1:]
    before = mcf.as_plain(x, torch.float64)
    x.mul_(2)
    assert torch.equal(mcf.as_plain(view, torch.float64), before[1:] * 2)
    x.mul_(2)
    late = x.detach()
    x.mul_(2)
    assert torch.equal(mcf.as_plain(late, torch.float64), before * 8)


def test_two_optimizers_of_one_parameter(at_once):
    def train():
        torch.manual_seed(0)
        weights = [nn.Parameter(mcf.as_expansion(torch.randn(4, 4), mcf.bf16x2)) for _ in range(5)]
        every = [torch.optim.AdamW(weights), torch.optim.SGD(weights, lr=0.1, momentum=0.9)]
        for _ in range(3):
            for w in weights:
                w.grad = torch.randn(4, 4).bfloat16()
            for optimizer in every:
                optimizer.step()
        return weights

    for a, b in zip(train(), at_once(train), strict=True):
        assert_same_terms(a, b)


def test_a_step_within_a_step(at_once):
    def train():
        torch.manual_seed(0)
        w = nn.Parameter(mcf.as_expansion(torch.randn(4, 4), mcf.bf16x2))
        inner = torch.optim.SGD([w], lr=0.1)

        class Outer(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                w.mul_(0.9)
                inner.step()
                w.mul_(0.9)

        w.grad = torch.randn(4, 4).bfloat16()
        Outer([w], {}).step()
        return w

    assert_same_terms(train(), at_once(train))


def test_a_step_that_raises_half_way(at_once):
    def train():
        torch.manual_seed(0)
        weights = [nn.Parameter(mcf.as_expansion(torch.randn(4, 4), mcf.bf16x2)) for _ in range(3)]

        class Failing(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                for i, w in enumerate(weights):
                    w.mul_(0.9)
                    if i == 1:
                        w.add_(torch.ones(5))
                    w.add_(1)

        with pytest.raises(RuntimeError):
            Failing(weights, {}).step()
        return weights

    for a, b in zip(train(), at_once(train), strict=True):
        assert_same_terms(a, b)


def test_reads_in_the_middle_of_a_step(at_once):
    def update(x, y):
        found = []
        for _ in range(4):
            x.mul_(0.9).addcmul_(y, y, value=0.1)
            found.append(x.sum().item())
            z = x.sqrt().add_(1)
            y.lerp_(z, 0.1)
            found.append(float(y.max()) > 1)
            x.addcdiv_(y, z, value=-found[-2] / 100)
        return x, y, found

    (x, y, found), (a, b, expected) = update(*values()), at_once(update, *values())
    assert found == expected
    assert_same_terms(x, a)
    assert_same_terms(y, b)


def test_results_that_only_torch_holds(at_once):
    weight = nn.Parameter(own(values()[0]), requires_grad=False)
    weight.grad = own(values()[1]) * 3
    gc.collect()
    assert_same_terms(weight.grad, at_once(lambda: own(values()[1]) * 3))


def test_writes_are_counted():
    x, y = values()
    before = x._version, y._version
    x.mul_(2)
    torch._foreach_add_([x, y], 1.0)
    assert (x._version, y._version) == (before[0] + 2, before[1] + 1)


def test_in_several_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong = []

    @torch.no_grad()
    @a_step()
    def work():
        try:
            operands = [mcf.as_expansion(torch.full((4,), 2.0)) for _ in range(20)]
            for _ in range(25):
                squares = [x * x for x in operands]
                torch._foreach_add_(operands, 1.0)
                wrong.extend(z.tolist() for z in squares if z.tolist() != [4.0] * 4)
                torch._foreach_sub_(operands, 1.0)
        except Exception as error:  # noqa: BLE001
            wrong.append(error)

    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_tensors_that_are_swapped(at_once):
    """As modules that are converted or loaded do, in the middle of a step, too."""

    def update(x, y):
        x.mul_(2)
        z = y.square()
        on_tape.append(waiting(x) and waiting(z))
        torch.utils.swap_tensors(x, z)
        return x.add_(1), y.add_(x), z.mul_(7)

    on_tape = []
    for a, b in zip(at_once(update, *values()), update(*values()), strict=True):
        assert_same_terms(a, b)
    assert on_tape == [False, True]


@pytest.mark.parametrize("format", [mcf.ue5m3, mcf.mxfp8], ids=lambda f: f.name)
def test_a_multiplication_of_what_a_list_has_copied(format, at_once):
    """A list is copied if one of its tensors has another owner, the others too."""
    drawn = [sample(mcf.bf16x3, 3, 5, seed=i).abs() for i in range(2)]
    x, y = (mcf.as_expansion(z, format) for z in drawn)
    x = x.detach()
    y.reciprocal_()
    (y + 1).tolist()  # y has left the tape, and still is its own
    assert y._is_own
    found = torch._foreach_add([x, y], [0.25, -0.25])
    assert isinstance(found[1], PendingTensor)
    torch._foreach_mul_([x, y], 0.001)
    expected = at_once(lambda z: z.reciprocal_() - 0.25, mcf.as_expansion(drawn[1], format))
    assert torch.equal(found[1], expected)
