"""A signal in the middle of a write leaves no element with terms of two numbers."""

import functools
import signal
import sys
from operator import setitem
from time import perf_counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mcftensor as mcf
from mcftensor.kernels.program import Signature, record
from mcftensor.tensor.step_context import current_step
from support.kernel_cases import way

COUNT = 1 << 17
TRIES = 12

# What is cut may be a collection of garbage, which cannot raise.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.unwatched("the mode that watches is cut, too"),
]

needs_timers = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="needs a timer that sends signals"
)


class Cut(BaseException):
    """As KeyboardInterrupt, but of this test."""


def cut(*unused):
    raise Cut


@pytest.fixture
def interrupted():
    """A function that calls another one, cuts it after some seconds, and says whether it did."""
    before = signal.signal(signal.SIGALRM, cut)

    def call(function, seconds):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            function()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Cut:
            return True
        return False

    yield call
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def assert_old_or_new(x, old, new):
    """Each element whole: every term the old one, or every term the new one."""
    is_old, is_new = (
        torch.stack([a == b for a, b in zip(x.components, y.components, strict=True)]).all(0)
        for y in (old, new)
    )
    assert (is_old | is_new).all()


def number(seed, count=COUNT):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64) + 1


WRITES = {
    "copy_": lambda x, z: x.copy_(z),
    "copy_ of float64": lambda x, z: x.copy_(mcf.as_plain(z, torch.float64)),
    "copy_ of another format": lambda x, z: x.copy_(mcf.as_expansion(z, mcf.bf16x2)),
    "fill_": lambda x, z: x.fill_(z[0]),
    "zero_": lambda x, z: x.zero_(),
    "add_": lambda x, z: x.add_(z),
    "mul_": lambda x, z: x.mul_(z),
    "clamp_": lambda x, z: x.clamp_(z[0], z[1] + 1),
    "masked_fill_": lambda x, z: x.masked_fill_(x > 1.5, 0.1),
    "out": lambda x, z: torch.div(x, z, out=x),
}


@pytest.mark.thinned(of=9)
@needs_timers
@pytest.mark.parametrize("compiled", ["eager", "cpp"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_is_cut(write, compiled, interrupted):
    with way(compiled):
        if compiled == "cpp":  # the first call compiles it
            WRITES[write](*numbers())
        assert_whole_after_signals(WRITES[write], interrupted)


def numbers(count=COUNT):
    return [mcf.as_expansion(number(seed, count), mcf.bf16x3) for seed in range(2)]


@torch.no_grad()
def assert_whole_after_signals(write, interrupted):
    old, z = numbers()
    whole, start = old.clone(), perf_counter()
    write(whole, z)
    seconds = perf_counter() - start
    for i in range(TRIES):
        x = old.clone()
        if not interrupted(lambda x=x: write(x, z), seconds * (i + 1) / TRIES):
            seconds *= 0.7  # the first one took longer
        assert_old_or_new(x, old, whole)


def even(x):
    return torch.arange(0, len(x), 2)


def mask(x):
    return torch.arange(len(x)) % 3 > 0


def square(x):
    side = int(len(x) ** 0.5)
    return x[: side * side].view(side, side)


PLACEMENTS = {
    "x[i] = number": lambda x, z: setitem(x, 3, 0.1),
    "x[i] = v": lambda x, z: setitem(square(x), 1, square(z)[0]),
    "x[1:] = v": lambda x, z: setitem(x, slice(1, None), z[1:]),
    "x[1:] = float64": lambda x, z: setitem(x, slice(1, None), mcf.as_plain(z[1:], torch.float64)),
    "x[mask] = number": lambda x, z: setitem(x, mask(x), 0.1),
    "x[mask] = v": lambda x, z: setitem(x, mask(x), z[mask(x)]),
    "x[indices] = number": lambda x, z: setitem(x, even(x), 0.1),
    "x[indices] = v": lambda x, z: setitem(x, even(x), z[even(x)]),
    "index_put_": lambda x, z: x.index_put_((even(x),), z[0]),
    "sums of index_put_": lambda x, z: x.index_put_((even(x),), z[0], accumulate=True),
    "put_": lambda x, z: x.put_(even(x), z[even(x)]),
    "scatter_": lambda x, z: x.scatter_(0, even(x), z),
    "scatter_ of a number": lambda x, z: x.scatter_(0, even(x), 0.1),
    "scatter_add_": lambda x, z: x.scatter_add_(0, even(x), z),
    "masked_scatter_": lambda x, z: x.masked_scatter_(mask(x), z),
    "index_copy_": lambda x, z: x.index_copy_(0, even(x), z[even(x)]),
    "index_fill_": lambda x, z: x.index_fill_(0, even(x), 0.1),
    "index_add_": lambda x, z: x.index_add_(0, even(x), z[even(x)]),
    "copy_ of a row": lambda x, z: square(x).copy_(square(z)[0]),
    "copy_ into a transposed view": lambda x, z: square(x).t().copy_(square(z)),
    "tril_": lambda x, z: square(x).tril_(),
    "fill_diagonal_": lambda x, z: square(x).fill_diagonal_(0.1),
    "normal_": lambda x, z: x.normal_(generator=torch.Generator().manual_seed(0)),
    "uniform_": lambda x, z: x.uniform_(generator=torch.Generator().manual_seed(0)),
    "bernoulli_": lambda x, z: x.bernoulli_(generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.thinned(of=9)
@needs_timers
@pytest.mark.parametrize("write", PLACEMENTS)
def test_a_placement_that_is_cut(write, interrupted):
    assert_whole_after_signals(PLACEMENTS[write], interrupted)


def found_between_bytecodes(function, look):
    """Whatever a function that looks finds while another one runs: Python handles signals between
    two bytecodes, wherever a timer happens to strike."""
    found = set()

    def trace(frame, event, unused):
        frame.f_trace_opcodes = True
        found.add(look())
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return found


def memory_of(terms):
    """Arrays over the memory of terms, to look at without an operation, which might be traced."""
    return [t.view(torch.int16).numpy() for t in terms]


def bits_of(memory):
    return b"".join([array.tobytes() for array in memory])


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("write", WRITES | PLACEMENTS)
def test_terms_between_the_bytecodes_of_a_write(write):
    old, z = numbers(9)
    x, whole = old.clone(), old.clone()
    with torch.no_grad():
        (WRITES | PLACEMENTS)[write](whole, z)
        found = found_between_bytecodes(
            lambda: (WRITES | PLACEMENTS)[write](x, z),
            functools.partial(bits_of, memory_of(x.components)),
        )
    assert {bits_of(memory_of(y.components)) for y in (old, whole)} <= found
    for bits in found:
        stack = torch.frombuffer(bytearray(bits), dtype=torch.bfloat16).view(3, 9)
        assert_old_or_new(mcf.MCFTensor(list(stack), x.format), old, whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.squeeze_(),
        lambda x: x.as_strided_((3,), (2,)),
    ],
    ids=["t_", "unsqueeze_", "squeeze_", "as_strided_"],
)
def test_shapes_between_the_bytecodes_of_a_change(change):
    x = numbers(9)[0].view(9, 1).clone()
    every = [*x.components, x]
    found = found_between_bytecodes(
        lambda: change(x), lambda: tuple((tuple(t.shape), t.stride()) for t in every)
    )
    assert sorted(len(set(of_each)) for of_each in found) == [1, 1]


def test_memory_between_the_bytecodes_of_an_exchange():
    x, new = numbers(9)
    old = [t.data_ptr() for t in x.components]
    found = found_between_bytecodes(
        lambda: setattr(x, "data", new), lambda: tuple(t.data_ptr() for t in x.components)
    )
    assert found == {tuple(old), tuple(t.data_ptr() for t in new.components)}


@pytest.mark.thinned(of=3)
@needs_timers
@pytest.mark.parametrize("kind", ["for-loop", "foreach", "fused"])
def test_a_step_that_is_cut(kind, interrupted):
    """Parameters and states hold numbers, of before or after."""
    flags = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

    def training():
        parameters = [nn.Parameter(mcf.as_expansion(number(i), mcf.bf16x3)) for i in range(2)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **flags[kind])
        for i, p in enumerate(parameters):
            p.grad = number(i + 2).bfloat16()
        optimizer.step()
        return parameters, optimizer

    def tensors(parameters, optimizer):
        states = [x for p in parameters for x in optimizer.state[p].values()]
        return [*parameters, *(x for x in states if isinstance(x, mcf.MCFTensor))]

    before = [x.detach().clone() for x in tensors(*training())]
    parameters, optimizer = training()
    start = perf_counter()
    optimizer.step()
    seconds = perf_counter() - start
    after = [x.detach() for x in tensors(parameters, optimizer)]
    for i in range(8):
        parameters, optimizer = training()
        interrupted(optimizer.step, seconds * (i + 1) / 8)
        for x, old, new in zip(tensors(parameters, optimizer), before, after, strict=True):
            if kind == "fused":
                assert_old_or_new(x.detach(), old, new)
            else:  # which writes to states more than once
                leading = mcf.as_plain(x.detach(), torch.float64).to(torch.float32).bfloat16()
                assert (leading - x.components[0]).abs().max() <= 2**-7


def of_an_optimizer(kind, **options):
    parameters = [nn.Parameter(mcf.as_expansion(torch.rand(3, 3), mcf.bf16x2)) for _ in range(2)]
    optimizer = kind(parameters, **options)
    for p in parameters:
        p.grad = torch.rand(3, 3).bfloat16()
    return parameters, optimizer


def a_step():
    return of_an_optimizer(torch.optim.AdamW, foreach=False, fused=False)[1].step


def with_a_closure():
    (p, _), optimizer = of_an_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)

    def closure():
        optimizer.zero_grad()
        loss = (p @ torch.ones(3, 3, dtype=torch.bfloat16)).sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Looking(torch.optim.Optimizer):
    """Reads, in inference mode and within a mode of dispatch, what is on the tape."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        mode = Passing()
        (p, _) = self.param_groups[0]["params"]
        records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            x, y = p * 2 + 1, p * 3 + 1
            with torch._C._InferenceMode(True):
                x.components  # noqa: B018
                p.view(-1)
            torch._C._push_on_torch_dispatch_stack(mode)
            y.components  # noqa: B018
        finally:
            while torch._C._len_torch_dispatch_stack():
                torch._C._pop_torch_dispatch_stack(None)
            torch._C._set_grad_enabled(records)


def with_a_look():
    return of_an_optimizer(Looking)[1].step


def a_recording():
    signature = Signature((torch.float32,), (), (torch.float32,))
    return lambda: record(lambda vectors, *others: [vectors[0] + 1], signature)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("make", [a_step, with_a_closure, with_a_look, a_recording])
def test_what_is_cut_leaves_the_thread_as_it_was(make):
    """As it begins any of the functions that it calls, for the first time or the last."""
    called = []
    work = make()

    def run(function=None, time=0):
        """Do it, and cut it where a function is called for the n-th time."""
        called.clear()

        def watch(frame, event, argument):
            if event == "call":
                code = frame.f_code
                name = f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}"
                called.append(name)
                if name == function and called.count(name) == time:
                    raise Cut

        try:
            sys.setprofile(watch)
            work()
        except Cut as cut:
            return cut  # with all that its traceback holds
        finally:
            sys.setprofile(None)

    for _ in range(3):
        run()
    places = {(name, 1) for name in called} | {(name, called.count(name)) for name in called}
    assert len(places) > (20 if make is a_recording else 100)
    for name, time in sorted(places):
        cut = run(name, time)
        assert torch._C._is_torch_function_enabled(), name
        assert torch._C._len_torch_dispatch_stack() == 0, name
        assert not torch.is_inference_mode_enabled(), name
        assert current_step() is None, name
        assert torch.is_grad_enabled() or make is not a_recording, name
        torch.set_grad_enabled(True)  # which PyTorch's own steps may leave off
        del cut
        work()
