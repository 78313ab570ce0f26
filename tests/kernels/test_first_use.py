"""Triton's kernels are tried before their first use, as C++ is: what is wrong is not used.

In Triton's interpreter; what fails stands for a compiler, a driver or a device.
"""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import mcftensor as mcf
from mcftensor.kernels import cuda, eager, execute, first_use, kernel_cache
from mcftensor.kernels import triton as programs
from support.kernel_cases import (
    assert_same_bits,
    expression,
    flat,
    mixtures,
    patterns,
    run,
    step,
    way,
)

interpreter = pytest.importorskip("triton.runtime.interpreter")

EAGER = eager.run
REASON = "mcftensor runs without compiled code on cpu, several times slower: "
FORMAT = mcf.fp32x2

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|underflow|invalid value|divide by zero):RuntimeWarning"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """As in a new process that has tried nothing."""
    monkeypatch.setattr(first_use, "_SAID", set())
    monkeypatch.setenv("MCFTENSOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def compute(monkeypatch):
    """A function that runs another in Triton, eager PyTorch being at hand."""

    def call(function, *, is_tried=True):
        with way("triton", is_tried=is_tried), monkeypatch.context() as patch:
            patch.setattr(eager, "run", EAGER)
            torch.manual_seed(1)
            return flat(function())

    return call


def of(operation, *operands):
    return lambda: run(expression(operation, FORMAT), *operands)


def hard():
    """Two operands with subnormal numbers, some of them in the tails."""
    x = patterns(torch.float32, 3000)
    return [mcf.as_expansion(x.double() * s, FORMAT).components for s in (1.0, 2.0**-30)]


def approximate(monkeypatch):
    """A wrong kernel: division as GPUs have it by default."""
    operations = {**programs._DIALECT.operations, "div": "{0} * (1.0 / {1})"}
    monkeypatch.setattr(programs, "_DIALECT", replace(programs._DIALECT, operations=operations))


def raising(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(cuda._Kernel, "launch", fail)


def flushing(monkeypatch):
    """A device that reads and writes subnormal numbers as zeros."""
    builder = interpreter.InterpreterBuilder

    def flushed(x):
        if x.data.dtype != np.float32:
            return x
        data = np.where(np.abs(x.data) < 2.0**-126, np.copysign(np.float32(0), x.data), x.data)
        return type(x)(data.astype(np.float32), x.dtype)

    for name in ("binary_op", "ternary_op", "unary_op", "create_fma"):
        method = getattr(builder, name)

        def call(self, *args, _method=method):
            handles = [flushed(x) if hasattr(x, "data") else x for x in args]
            return flushed(_method(self, *handles))

        monkeypatch.setattr(builder, name, call)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (approximate, "other bits than PyTorch"),
        (raising, "no kernel image"),
        (flushing, "other bits"),
    ],
)
def test_one_warning_and_right_results(fault, reason, compute, monkeypatch):
    functions = [of(name, *hard()) for name in ("div", "div", "mul")]
    with way("eager"):
        expected = [flat(function()) for function in functions]
    fault(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [compute(function) for function in functions]
    said = [str(x.message) for x in caught if "compiled" in str(x.message)]
    assert len(said) == 1
    assert said[0].startswith(REASON)
    assert reason in said[0]
    assert "https://github.com/mcftensor/mcftensor/issues" in said[0]
    for x, y in zip(got, expected, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("fault", [approximate, flushing])
def test_these_faults_change_results(fault, compute, monkeypatch):
    """Where nothing is tried."""
    function = of("div", *hard())
    with way("eager"):
        expected = flat(function())
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same_bits(compute(function, is_tried=False), expected)


def test_a_run_goes_on(compute, monkeypatch):
    """With more kernels than one, of which none is used."""
    with way("eager"):
        torch.manual_seed(1)
        expected = flat(step("adamw", mixtures("adamw")))
    raising(monkeypatch)
    with pytest.warns(UserWarning, match=REASON) as caught:
        assert_same_bits(compute(lambda: step("adamw", mixtures("adamw"))), expected)
    assert len(caught) == 1


def test_a_warning_as_an_error(compute, monkeypatch):
    """It is one in these tests, for each kernel."""
    raising(monkeypatch)
    x = hard()
    for name in ("mul", "add"):
        with pytest.raises(UserWarning, match=REASON):
            compute(of(name, *x))


@pytest.fixture
def tried(monkeypatch):
    """How operands lie in trials."""
    trials, is_right = [], first_use.is_right

    def spy(body, program, launch, arrangement):
        trials.append(arrangement)
        return is_right(body, program, launch, arrangement)

    monkeypatch.setattr(first_use, "is_right", spy)
    return trials


def scaled(vectors, scalars, index):
    return [vectors[0].double() * scalars[0]]


def scale(x, *numbers):
    """Products of as many tensors with numbers."""
    outputs = [torch.empty_like(x, dtype=torch.float64) for _ in numbers]
    columns = execute.Columns([[x for _ in numbers]], [numbers], [outputs])
    execute.run(scaled, columns)
    return outputs


@pytest.mark.with_float64("its kernel computes in float64")
def test_each_way_to_lie_is_tried_once(compute, tried):
    x, there = torch.randn(70), torch.tensor(0.3, dtype=torch.float64)

    def run_all():
        for _ in range(2):
            for y in (x[:64], x[1:]):
                for numbers in ([0.3], [0.3, 0.7], [there]):
                    results = scale(y, *numbers)
                    for result, number in zip(results, numbers, strict=True):
                        assert torch.equal(result, y.double() * number)
        return []

    compute(run_all)
    assert len(tried) == len(set(tried)) == 6
    assert {(x.there, x.aligned, x.own) for x in tried} == {
        (there, aligned, own)
        for there, own in [((False,), False), ((False,), True), ((True,), False)]
        for aligned in (False, True)
    }


def test_trials_are_kept_by_device_and_driver(compute, tried, monkeypatch):
    x = hard()
    monkeypatch.setattr(cuda, "_machine", lambda device: ("a GPU", "driver 1"))
    for _ in range(2):
        compute(of("add", *x))
    assert len(tried) == 1
    monkeypatch.setattr(cuda, "_machine", lambda device: ("a GPU", "driver 2"))
    compute(of("add", *x))
    assert len(tried) == 2


def test_trials_that_failed_are_not_kept(compute, tried, monkeypatch):
    monkeypatch.setattr(cuda, "_machine", lambda device: ("a GPU", "driver 1"))
    approximate(monkeypatch)
    for i in range(2):
        with pytest.raises(UserWarning, match=REASON):
            compute(of("div", *hard()))
        assert len(tried) == i + 1


def test_a_cache_that_is_full(compute, tried, monkeypatch):
    def full(key, make):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cuda, "_machine", lambda device: ("a GPU", "driver 1"))
    monkeypatch.setattr(kernel_cache, "keep", full)
    compute(of("add", *hard()))
    assert len(tried) == 1


def test_more_threads_are_another_kernel(compute, tried, monkeypatch):
    """As one has whose registers do not suffice."""
    launch = cuda._Kernel.launch

    def spill(self, *args, **options):
        launch(self, *args, **options)
        self.warps = min(2 * self.warps, 16)

    monkeypatch.setattr(cuda._Kernel, "launch", spill)
    compute(of("add", *hard()))
    assert len(tried) == 3  # of 4, 8 and 16 warps


def test_nothing_is_tried_while_a_graph_is_captured(compute, tried, monkeypatch):
    """Eager PyTorch computes; the kernel is tried later."""
    x = hard()
    launched, launch = [], cuda._Kernel.launch

    def spy(self, *args, **options):
        launched.append(args)
        launch(self, *args, **options)

    monkeypatch.setattr(cuda._Kernel, "launch", spy)

    def both():
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "is_capturing", lambda device: True)
            captured = of("add", *x)()
        assert launched == []
        return [*captured, *of("add", *x)()]

    got = compute(both)
    assert len(tried) == 1
    assert len(launched) == 2
    assert_same_bits(got[:2], got[2:])


def test_memory_that_does_not_suffice(compute, monkeypatch):
    """It may do later, and so says nothing of the kernel."""
    launch = cuda._Kernel.launch

    def fail(*args, **options):
        raise torch.OutOfMemoryError

    def both():
        with monkeypatch.context() as patch:
            patch.setattr(cuda._Kernel, "launch", fail)
            with pytest.raises(torch.OutOfMemoryError):
                of("add", *hard())()
        return of("add", *hard())()

    compute(both)
    assert cuda._Kernel.launch is launch
