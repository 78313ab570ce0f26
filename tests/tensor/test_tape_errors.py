"""After an error while the tape runs, all tensors hold what they would without a tape."""

import functools
from contextlib import suppress

import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.kernels import eager, execute
from mcftensor.tensor import tape
from support.helpers import a_step, assert_same_terms, exact, sample
from support.kernel_cases import way
from support.taping import own, values

pytestmark = pytest.mark.usefixtures("no_grad")

FORMATS = [mcf.bf16x2, mcf.fp32x2]
over_formats = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


class Cut(BaseException):
    """As KeyboardInterrupt, but of this test."""


def step(p, q):
    """A step of a few operations on each of two tensors, to which the same is done."""
    made = [x.square().add_(1) for x in (p, q)]
    for x, y in zip((p, q), made, strict=True):
        x.addcdiv_(x, y, value=-0.1)
        y.mul_(1.1)
    return p, q, *made


def two(format, shape=(3, 5)):
    return [own(x) for x in values(format, *shape)]


def expected(format, shape=(3, 5)):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mcftensor.dispatch.defer.open_tape", lambda: None)
        return step(*two(format, shape))


def raising(error, calls=1):
    """What raises when it is called, so many times."""
    left = [error] * calls

    def wrapped(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if left:
                raise left.pop()
            return function(*args, **kwargs)

        return call

    return wrapped


def in_a_step_that_breaks(function, *args, at="run_alike", error=None):
    """The results of a function within a step whose tape raises an error at its end."""
    found, error = [], error or RuntimeError("broken")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)) as raised:
        _end_by(error, at, patch, lambda: found.extend(function(*args)))
    assert raised.value is error
    return found


def _end_by(error, at, patch, function):
    with a_step():
        function()
        patch.setattr(tape, at, raising(error)(getattr(tape, at)))


@over_formats
@pytest.mark.parametrize("error", [RuntimeError("broken"), torch.OutOfMemoryError("full"), Cut()])
@pytest.mark.parametrize("where", ["run_alike", "_write", "_empty"])
def test_a_run_that_raises(where, error, format):
    got = in_a_step_that_breaks(step, *two(format), at=where, error=error)
    for a, b in zip(got, expected(format), strict=True):
        assert_same_terms(a, b)


@over_formats
def test_an_error_that_is_caught(format, monkeypatch):
    """Of reading one tensor: the other, to which the same was done, loses nothing."""
    with a_step():
        p, q, *made = step(*two(format))
        monkeypatch.setattr(tape, "run_alike", raising(RuntimeError("broken"))(tape.run_alike))
        with pytest.raises(RuntimeError, match="broken"):
            _ = p.components
        q.add_(1)
    p_, q_, *made_ = expected(format)
    for a, b in zip((p, q, *made), (p_, q_.add_(1), *made_), strict=True):
        assert_same_terms(a, b)


@over_formats
def test_of_several_strands_all_are_run(format):
    (x, _), (y, _) = two(format), two(format, (2, 3))
    before = [x.clone(), y.clone()]
    in_a_step_that_breaks(lambda: (x.mul_(2), y.add_(3)))
    assert_same_terms(x, before[0] * 2)
    assert_same_terms(y, before[1] + 3)


def test_an_operation_that_always_raises(monkeypatch):
    """It alone is missing, with what would read its result."""
    (x, y), (a, b) = two(mcf.bf16x2), two(mcf.bf16x2)

    def broken(expression, *args):
        if expression.operation == "sqrt":
            raise ArithmeticError("no roots")
        return carry_out(expression, *args)

    carry_out = tape.carry_out
    monkeypatch.setattr(tape, "carry_out", broken)

    def with_roots():
        x.mul_(2).sqrt_().add_(1)
        z = y.sqrt()
        y.add_(x)
        return z, z * 2, y * 2

    z, w, v = in_a_step_that_breaks(with_roots)
    assert_same_terms(x, a.mul_(2).add_(1))
    assert_same_terms(y, b.add_(a))
    assert_same_terms(v, b * 2)
    for lost in (z, w):
        with pytest.raises(RuntimeError, match="never made"):
            exact(lost)
        with a_step(), pytest.raises(RuntimeError, match="never made"):
            x.add_(lost)
    assert_same_terms(x, a)
    with a_step():
        made = x * 2
        with pytest.raises(RuntimeError, match="never made"):
            made.add_(z)
    assert_same_terms(made, a * 2)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("compiled", ["eager", "cpp"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("time", range(4))
def test_a_cut_before_or_after_a_write(time, after, compiled, monkeypatch):
    """Nothing is done twice, nor left out, wherever a signal comes in many blocks."""
    monkeypatch.setattr(eager, "CHUNK", 8)
    module, name = (eager, "run_whole") if compiled == "eager" else (execute, "launch")
    function, called = getattr(module, name), []

    def cut(*args, **kwargs):
        called.append(args)
        if not after and len(called) == time + 1:
            raise Cut
        function(*args, **kwargs)
        if after and len(called) == time + 1:
            raise Cut

    with way(compiled):
        wanted = expected(mcf.bf16x2)
        with a_step():
            step(*two(mcf.bf16x2))
        with a_step() as current:
            got = step(*two(mcf.bf16x2))
            with monkeypatch.context() as patch, suppress(Cut):
                patch.setattr(module, name, cut)
                current.tape.run()
    assert len(called) > (time if compiled == "eager" else 0)
    for a, b in zip(got, wanted, strict=True):
        assert_same_terms(a, b)


def test_the_end_of_a_step_whose_tape_raises(monkeypatch):
    """Gradients are left, and the next step is as any other."""
    p = nn.Parameter(sample(mcf.bf16x2, 3, 5))
    q = nn.Parameter(sample(mcf.bf16x2, 3, 5))
    with torch.enable_grad():
        twin = p.detach().clone(), q.detach().clone()

    class Half(torch.optim.Optimizer):
        def step(self):
            for group in self.param_groups:
                for x in group["params"]:
                    x.grad.mul_(2)
                    x.add_(x.grad, alpha=-0.5)

    optimizer = Half([p, q], {})
    for x in (p, q):
        x.grad = torch.ones(3, 5, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(tape, "run_alike", raising(RuntimeError("broken"))(tape.run_alike))
        with pytest.raises(RuntimeError, match="broken"):
            optimizer.step()
    for x, y in zip((p, q), twin, strict=True):
        assert_same_terms(x, y - 1)
        assert type(x.grad) is torch.Tensor
        assert (x.grad == 2).all()
    optimizer.step()
    for x, y in zip((p, q), twin, strict=True):
        assert_same_terms(x, y - 1 - 2)
