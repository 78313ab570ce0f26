"""Writes to what a deferred result reads, and to deferred results, never change its value."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.tensor.stepping import stepping
from support.taping import expression, values, waiting
from support.helpers import assert_same_terms, sample

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
def test_memory_that_was_handed_out_is_not_waited_for(hand_out, at_once):
    x, y = (mcf.as_expansion(torch.full((4, 3), v).double(), mcf.fp32x2) for v in (3.0, 2.0))
    expected = at_once(torch.mul, x, y)
    held = HANDED_OUT[hand_out](x)
    z = x * y
    assert not waiting(z)
    held += 1
    assert_same_terms(z, expected)


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


def test_readers_are_remembered_when_others_are_forgotten():
    x, y = (mcf.as_expansion(torch.full((4,), v), mcf.bf16x2) for v in (2.0, 3.0))
    for _ in range(3):
        kept = [x * y for _ in range(3 * deferred._FEW)]
        x.add_(1.0)
        assert all(product.tolist()[0] == 6.0 for product in kept)
        x.sub_(1.0)


def test_in_several_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong = []

    @torch.no_grad()
    @stepping()
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
