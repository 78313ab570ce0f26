"""Compiled C++ gives the bits of eager PyTorch."""

import pytest
import torch
from kernel_cases import (
    CASES,
    OPERATIONS,
    STEPS,
    expression,
    mixtures,
    nested,
    operand,
    patterns,
    run,
    same,
    step,
)

import mcftensor as mcf
from mcftensor import expansion


@pytest.fixture(autouse=True)
def compiler_at_hand() -> None:
    from mcftensor.kernels import compiler  # noqa: PLC0415

    if compiler.find() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture
def threads():
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_every_operation(name, operation):
    format = mcf.Format.from_name(name)
    count = OPERATIONS[operation]
    for length in (1, 7, 16, 5003):
        operands = [operand(format.nearest, length) for _ in range(count)]
        same("cpp", run, expression(operation, format), *operands)


@pytest.mark.parametrize("name", ["bf16x2", "fp16x2", "fp32x2", "fp64x2", "bf16x2sr"])
def test_scalars(name):
    format = mcf.Format.from_name(name)
    number = torch.tensor(0.3, dtype=torch.float64)
    wide, x = operand(format.nearest, 1003), operand(format.nearest, 1003)
    for special in (number, -number * 0, number / 0, number * 0 / 0, number * 1e-300):
        same("cpp", run, expression("fma", format), wide, (special,), x)
    short = expansion.expand(number, format.nearest)
    same("cpp", run, expression("lerp", format), wide, x, short)
    same("cpp", run, expression("addcdiv", format), short, wide, x, (number,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["bf16x2", "fp16x2", "fp32x2"])
def test_plain_operands_with_all_payloads(name, dtype):
    format = mcf.Format.from_name(name)
    plain = patterns(dtype, 4099)
    same("cpp", run, expression("add", format), operand_of(format), (plain,))
    same("cpp", run, expression("mul", format), operand_of(format), (plain,))


def operand_of(format):
    torch.manual_seed(3)
    return operand(format.nearest, 4099)


@pytest.mark.parametrize("name", ["bf16x2", "bf16x3", "fp16x2", "fp32x2"])
def test_nested_expressions(name):
    same("cpp", run, *nested(mcf.Format.from_name(name), 5003))


def mixed(shapes):
    operands, texts = [], []
    for name, shape in zip(["bf16x2", "fp32x2", "bf16x2", "fp64x2", "fp16x2"], shapes, strict=True):
        format = mcf.Format.from_name(name)
        operands += [operand(format, *shape), operand(format, *shape)]
        texts.append(expression("mul", format))
    return ";".join(texts), operands


def test_several_tensors_of_several_formats():
    text, operands = mixed([(5,), (300, 7), (5003,), (1,), (64,)])
    same("cpp", run, text, *operands)


@pytest.mark.parametrize("count", [2, 3])
def test_threads_divide_the_work_alike(count, threads):
    text, operands = mixed([(100_003,), (5,), (70_001,), (17,), (1,)])
    # Stochastic rounding counts elements.
    random = mcf.Format.from_name("bf16x2sr")
    more = [operand(random.nearest, 150_001) for _ in range(2)]
    work = [(text, *operands), (expression("mul", random), *more)]
    alone = [same("cpp", run, *x) for x in work]
    threads(count)
    together = [same("cpp", run, *x) for x in work]
    for a, b in zip(alone, together, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def more_text(format):
    return expression("mul", format)


def run_compiled(text, *operands):
    return same("cpp", run, text, *operands)


@pytest.mark.parametrize("name", ["bf16x2", "fp32x2", "bf16x2sr"])
class TestLayouts:
    def arranged(self, name, arrange):
        format = mcf.Format.from_name(name)
        return format, [
            tuple(arrange[i](t) for t in operand(format.nearest, 30, 50)) for i in range(2)
        ]

    def check(self, name, first, second):
        format, operands = self.arranged(name, (first, second))
        same("cpp", run, expression("add", format), *operands)
        target = mcf.MCFTensor(operands[0], format)

        def in_place():
            result = mcf.MCFTensor([t.clone() for t in target.components], format)
            result.mul_(mcf.MCFTensor(operands[1], format))
            return [result]

        same("cpp", in_place)

    def test_transposed(self, name):
        self.check(name, torch.Tensor.t, torch.Tensor.t)

    def test_unlike(self, name):
        self.check(name, lambda t: t.t(), lambda t: t.t().contiguous())
        self.check(name, lambda t: t[:30, :30].t(), lambda t: t[:30, :30])

    def test_with_gaps(self, name):
        self.check(name, lambda t: t[:, ::2], lambda t: t[:, ::2])
        self.check(name, lambda t: t[:, 1:], lambda t: t[:, :-1])

    def test_repeated(self, name):
        self.check(name, lambda t: t, lambda t: t[:1].expand(30, 50))

    def test_unaligned(self, name):
        format = mcf.Format.from_name(name)
        operands = [tuple(t[1:] for t in operand(format.nearest, 1003)) for _ in range(2)]
        same("cpp", run, expression("div", format), *operands)


@pytest.mark.parametrize("kind", STEPS)
def test_fused_steps(kind):
    same("cpp", step, kind, mixtures(kind))


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_fused_steps_skip_what_overflowed(kind):
    formats = [("bf16x2", "bf16x2"), ("fp32x2", torch.float32), ("bf16x2sr", "bf16x2sr")]
    same("cpp", step, kind, formats, [(257,)] * 3, 1.0)
