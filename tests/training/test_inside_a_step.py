"""Within a step of an optimizer a parameter is its number, and nowhere else."""

import copy
import gc
import pickle
import signal
import threading
import types
import weakref
from functools import partial, wraps
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import mcftensor as mcf
from mcftensor.kernels.without_float64 import has_float64, widest
from mcftensor.tensor import GradientTensor, MCFTensor
from support import writing
from support.helpers import assert_same_terms, exact, sample
from support.releases import COMPILED_ATTRIBUTES, COMPILED_SETS, GRAD_DTYPE, LDEXP


class Calling(Optimizer):
    """An optimizer whose step is a function of its parameters."""

    def __init__(self, parameters, function):
        super().__init__(parameters, {})
        self.function = function

    @torch.no_grad()
    def step(self, closure=None):
        return self.function(*self.param_groups[0]["params"], *filter(None, [closure]))


def parameter(format=mcf.bf16x3, *shape, gradient=True):
    p = nn.Parameter(sample(format, *(shape or (3, 4))))
    if gradient:
        p.grad = torch.linspace(-1, 2, p.numel()).view(p.shape).to(p.dtype)
    return p


def in_step(function, *parameters):
    """What a function of parameters gives within a step."""
    return Calling(parameters, function).step()


# ------------------------------------------------------------------------------- where it holds


def test_a_parameter_counts_as_a_value(format):
    p = parameter(format)
    plain = torch.ones(3, 4, dtype=p.dtype)
    for function in (lambda p: p * plain, lambda p: plain.add(p, alpha=0.1), lambda p: p.norm()):
        assert type(function(p.detach())) is torch.Tensor
        result = in_step(function, p)
        assert (type(result), result.role, result.format.nearest) == (
            MCFTensor,
            "value",
            format.nearest,
        )
    torch.testing.assert_close(
        in_step(lambda p: p.norm(), p).double(), exact(p).norm(), rtol=8 * format.u, atol=0
    )


@pytest.mark.parametrize("name", ["closure", "with gradients", "without gradients", "forward"])
def test_a_closure_is_outside(name):
    p = parameter()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    seen = []

    def closure():
        with torch.set_grad_enabled(name == "with gradients"):
            if name == "forward":
                seen.append(type(nn.functional.linear(x, p)))
            seen.append((p.acts_as, type(p * x[:1]), type(p.grad)))

    Calling([p], lambda p, closure: closure()).step(closure)
    assert seen[-1] == ("parameter", torch.Tensor, torch.Tensor)
    assert seen[0] in (torch.Tensor, seen[-1])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["step", "closure", "inner step", "pre hook", "post hook"])
def test_it_ends_with_the_step_that_raises(error, where):
    p = parameter()
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    before = p * x

    def fail(*args):
        raise error

    functions = {
        "step": fail,
        "closure": lambda p, closure: closure(),
        "inner step": lambda p: Calling([p], fail).step(),
    }
    optimizer = Calling([p], functions.get(where, lambda p: None))
    if where == "pre hook":
        optimizer.register_step_pre_hook(fail)
    if where == "post hook":
        optimizer.register_step_post_hook(fail)
    with pytest.raises(error):
        optimizer.step(*[fail] * (where == "closure"))
    assert (p.acts_as, type(p.grad)) == ("parameter", torch.Tensor)
    assert torch.equal(p * x, before)


def test_it_ends_where_a_signal_comes():
    p = parameter()
    held, cut = p.grad, 0

    def interrupt(*args):
        raise KeyboardInterrupt

    optimizer = torch.optim.SGD([p], momentum=0.9, nesterov=True, weight_decay=0.1)
    previous = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # whose callbacks, as hypothesis has one, may swallow an interrupt
    try:
        for i in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + i))
                optimizer.step()
            except KeyboardInterrupt:
                cut += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert (p.acts_as, p.grad is held) == ("parameter", True)
    finally:
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
        torch.set_grad_enabled(True)  # PyTorch's own step may leave that behind
    assert cut > 100


def test_hooks_are_outside():
    p, seen = parameter(), []
    optimizer = Calling([p], lambda p: seen.append(p.acts_as))
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *args: seen.append(p.acts_as))
    optimizer.step()
    assert seen == ["parameter", "value", "parameter"]


def test_recorded_operations_within_a_step_are_outside():
    def function(p):
        with torch.enable_grad():
            y = p * torch.ones(3, 4, dtype=torch.bfloat16)
            (g,) = torch.autograd.grad(y.sum(), p)
        return p.acts_as, type(y), type(g)

    assert in_step(function, parameter()) == ("value", torch.Tensor, torch.Tensor)


def test_steps_that_do_not_turn_gradients_off_work_on_data():
    class Old(Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            assert torch.is_grad_enabled()
            for p in self.param_groups[0]["params"]:
                x = torch.ones(3, 4, dtype=torch.bfloat16)
                assert (type(p * x), p.dtype) == (torch.Tensor, torch.bfloat16)  # a forward pass
                assert p.data.dtype == torch.float32
                self.change = p.grad.data.add(p.data, alpha=0.1)
                p.data.add_(self.change, alpha=-0.1)

    p = parameter()
    held, before = p.grad, exact(p)
    expected = p.grad.double() + before * 0.1
    optimizer = Old([p])
    optimizer.step()
    torch.testing.assert_close(exact(optimizer.change), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exact(p), before - 0.1 * expected, rtol=1e-6, atol=1e-6)
    assert p.grad is held


def test_nested_steps():
    p, other = parameter(), parameter()
    seen = []

    def outer(p):
        p.grad.mul_(1 / 3)
        Calling([p, other], lambda p, other: seen.append((p.grad, other.acts_as))).step()
        seen.append((p.grad, other.acts_as))

    in_step(outer, p)
    ((inner, in_inner), (after, in_outer)) = seen
    assert inner is after
    assert inner.components[1].any()
    assert (in_inner, in_outer) == ("value", "value")


def test_another_thread_is_outside():
    p, seen = parameter(), []
    entered, looked = threading.Event(), threading.Event()

    def look():
        with torch.no_grad():
            entered.wait(10)
            seen.append((p.acts_as, type(p.grad)))
            looked.set()

    def function(p):
        entered.set()
        looked.wait(10)
        seen.append((p.acts_as, type(p.grad)))

    thread = threading.Thread(target=look)
    thread.start()
    in_step(function, p)
    thread.join()
    assert seen == [("parameter", torch.Tensor), ("value", GradientTensor)]


def test_two_steps_in_two_threads():
    parameters = [parameter() for _ in range(2)]
    barrier, results = threading.Barrier(2), {}

    def function(p):
        barrier.wait(10)
        p.grad.mul_(1 / 3)
        barrier.wait(10)
        return p.grad, p.acts_as

    def run(i):
        results[i] = in_step(function, parameters[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    [x.start() for x in threads]
    [x.join() for x in threads]
    assert results[0][0] is not results[1][0]
    assert [role for _, role in results.values()] == ["value", "value"]
    assert all(type(p.grad) is torch.Tensor for p in parameters)


def test_a_generator_that_takes_steps_leaves_nothing_behind():
    p = parameter()

    def training():
        for _ in range(2):
            in_step(lambda p: p.mul_(0.999), p)
            yield

    for _ in training():
        assert p.acts_as == "parameter"


def test_classes_that_are_made_later_and_those_with_a_step_of_their_parent():
    class Child(Calling):
        pass

    class Grandchild(Child):
        def step(self, closure=None):
            return super().step(closure)

    for cls in (Child, Grandchild):
        assert cls([parameter()], lambda p: p.acts_as).step() == "value"


def test_steps_wrapped_by_schedulers_and_scalers():
    p, seen = parameter(), []
    optimizer = Calling([p], lambda p: seen.append(p.acts_as))
    optimizer.param_groups[0]["lr"] = 1.0
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert seen == ["value"] * 2


@torch.no_grad()
def decay_by_copy(optimizer, *args):
    """A step as it is written over float32, right only over numbers."""
    for p in optimizer.param_groups[0]["params"]:
        p.copy_(p - 1e-4 * p.grad)


def after_steps(prepare, count=100):
    """What steps make of one, where 0.99 is right, and the optimizer."""
    p = nn.Parameter(mcf.as_expansion(torch.ones(8)))
    own = type("Own", (torch.optim.SGD,), {})  # of which other tests have no optimizer
    optimizer = own([p], lr=0.0)
    prepare(optimizer)
    for _ in range(count):
        optimizer.zero_grad()
        p.grad = torch.ones(8, dtype=torch.bfloat16)
        optimizer.step()
        assert type(p.grad) is torch.Tensor
        assert p.acts_as == "parameter"
    return exact(p)[0].item(), optimizer


class Stepping:
    """A step that is an object."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.known = True

    def __call__(self):
        decay_by_copy(self.optimizer)


def on_the_object(optimizer):
    optimizer.step = types.MethodType(decay_by_copy, optimizer)


def with_a_scheduler(optimizer):
    on_the_object(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)


def around_the_one_before(optimizer):
    before = optimizer.step

    @wraps(before)
    def step(*args):
        decay_by_copy(optimizer)
        return before(*args)

    optimizer.step = step


def an_object(optimizer):
    optimizer.step = Stepping(optimizer)
    assert optimizer.step.known


def around_the_one_of_a_scheduler(optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    around_the_one_before(optimizer)


def on_the_class(optimizer):
    type(optimizer).step = decay_by_copy


def on_the_class_with_optimizers_made_later(optimizer):
    on_the_class(optimizer)
    type(optimizer)([torch.ones(1)])


ASSIGNED = [
    on_the_object,
    lambda optimizer: setattr(optimizer, "step", lambda: decay_by_copy(optimizer)),
    lambda optimizer: setattr(optimizer, "step", partial(decay_by_copy, optimizer)),
    with_a_scheduler,
    around_the_one_before,
    around_the_one_of_a_scheduler,
    an_object,
    on_the_class,
    on_the_class_with_optimizers_made_later,
]


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("prepare", ASSIGNED)
def test_a_step_that_is_assigned_is_one(prepare):
    value, _ = after_steps(prepare)
    assert value == pytest.approx(0.99, abs=1e-3)  # the format has about 16 bits


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_another_one_goes_on_to_is_no_part_of_it(fused):
    def run(wrap):
        p, seen = nn.Parameter(sample(mcf.bf16x2, 3, 4)), []
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=fused)
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *args: seen.append((p.acts_as, type(p.grad))))
        step = optimizer.step
        if wrap:
            optimizer.step = lambda: step(None)
        for i in range(4):
            p.grad = torch.linspace(-1, 2 + i, 12).view(3, 4).bfloat16()
            optimizer.step()
        assert seen == [("parameter", torch.Tensor)] * 8
        return p, optimizer.state[p]["momentum_buffer"]

    for own, expected in zip(run(True), run(False), strict=True):
        assert type(own) is type(expected)
        assert_same_terms(own, expected)


@torch.no_grad()
def test_a_closure_of_an_assigned_step_is_outside():
    p, seen = parameter(), []
    optimizer = Calling([p], lambda p: None)
    optimizer.step = lambda closure: (seen.append(p.acts_as), closure(), seen.append(p.acts_as))
    optimizer.step(lambda: seen.append(p.acts_as))
    assert seen == ["value", "parameter", "value"]


def test_steps_that_are_assigned_back_are_as_before():
    optimizer = Calling([parameter()], lambda p: p.acts_as)
    step = optimizer.step
    optimizer.step = lambda: "another"
    assert optimizer.step() == "another"
    optimizer.step = step
    assert optimizer.step is step
    del optimizer.step
    assert optimizer.step() == "value"


def test_schedulers_and_wrappers_that_go_on_to_a_step_are_left_alone():
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    assert optimizer.step._wrapped_by_lr_sched
    for step in (optimizer.step, torch.no_grad()(optimizer.step)):
        optimizer.step = step
        assert optimizer.step is step


def test_an_optimizer_is_copied_without_the_step_that_was_assigned():
    optimizer = Calling([parameter()], None)
    optimizer.step = types.MethodType(decay_by_copy, optimizer)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert "step" not in vars(copied)


@COMPILED_ATTRIBUTES
def test_compiled_steps_set_attributes_of_optimizers_over_plain_parameters():
    p = nn.Parameter(torch.ones(3))

    def scale(p):
        optimizer.scale = 3.0
        p.mul_(optimizer.scale)

    optimizer = Calling([p], scale)
    torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    assert p.tolist() == [3.0] * 3


@COMPILED_SETS
def test_compiled_steps_beside_order_free_gradients_of_another_model():
    other = mcf.as_expansion(nn.Linear(32, 32), mcf.bf16i16)
    handle = mcf.order_free_gradients(other, microbatches=2)
    p = nn.Parameter(torch.ones(3))
    optimizer = Calling([p], lambda p: p.mul_(3.0))
    torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    handle.remove()
    assert p.tolist() == [3.0] * 3


def test_an_assigned_step_over_plain_parameters_is_itself():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = Calling([p], lambda p: None)
    optimizer.step = lambda: p.grad
    assert optimizer.step() is p.grad


def test_an_optimizer_over_plain_parameters_sees_none_of_it():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    assert in_step(lambda p: p.grad, p) is p.grad


# ------------------------------------------------------------------------------------ gradients


def test_a_gradient_reads_as_one_expansion_and_is_the_same_afterwards(format):
    p = parameter(format)
    held, bits = p.grad, p.grad.clone()
    first, second = in_step(lambda p: (p.grad, p.grad), p)
    assert first is second
    assert (first.format, first.role, first.shape) == (format.nearest, "value", p.shape)
    assert p.grad is held
    assert torch.equal(held, bits)
    assert torch.equal(exact(first), bits.double())


READS = {
    "lerp_": lambda p, g: torch.zeros_like(p).lerp_(g, 0.1),
    "addcmul_": lambda p, g: torch.zeros_like(p).addcmul_(g, g, value=0.1),
    "foreach lerp_": lambda p, g: torch._foreach_lerp_([torch.zeros_like(p)], [g], 0.1),
    "add": lambda p, g: g.add(p, alpha=0.1),
    "foreach add": lambda p, g: torch._foreach_add([g], [p], alpha=0.1),
    "square": lambda p, g: g.square(),
    "neg": lambda p, g: -g,
    "clone": lambda p, g: g.clone(),
    "norm": lambda p, g: g.norm(),
    "double": lambda p, g: g.double(),
    "matmul": lambda p, g: g @ g.t(),
    "copy_": lambda p, g: torch.zeros_like(p).copy_(g),
    "view": lambda p, g: g.view(-1).square(),
    "chunk": lambda p, g: [x.square() for x in g.chunk(2)],
    "zeros_like": lambda p, g: torch.zeros_like(g),
    "maximum": lambda p, g: torch.maximum(g, p),
    "finite": lambda p, g: g.isfinite().all(),
}


def by_kind(x):
    if isinstance(x, (list, tuple)):
        return [by_kind(y) for y in x]
    return exact(x) if isinstance(x, MCFTensor) else x


@pytest.mark.parametrize("read", READS)
def test_reading_a_gradient_makes_no_tails(read):
    p = parameter()

    def function(p):
        result = READS[read](p, p.grad)
        assert isinstance(p.grad, GradientTensor)
        return result

    whole = mcf.as_expansion(p.grad, p.format)
    value = mcf.as_expansion(p.detach(), p.format)
    got, expected = in_step(function, p), READS[read](value, whole)
    for a, b in zip(by_kind([got]), by_kind([expected]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


INTO_PLAIN = {
    "lerp_": lambda m, g: m.lerp_(g, 0.1),
    "addcmul_": lambda m, g: m.addcmul_(g, g, value=0.1),
    "foreach lerp_": lambda m, g: torch._foreach_lerp_([m], [g], 0.1),
    "foreach addcmul_": lambda m, g: torch._foreach_addcmul_([m], [g], [g], 0.1),
    "out": lambda m, g: torch.mul(g, g, out=m),
}


@pytest.mark.parametrize("write", INTO_PLAIN)
def test_a_plain_state_takes_a_gradient_as_it_does_without_expansions(write):
    p, moments = parameter(), torch.full((2, 3, 4), 0.3, dtype=torch.bfloat16)

    def function(p):
        INTO_PLAIN[write](moments[0], p.grad)
        assert type(p.grad) is GradientTensor

    in_step(function, p)
    INTO_PLAIN[write](moments[1], p.grad)
    assert torch.equal(*moments)


UNITS = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
FORMATS = ["bf16x3", *(pytest.param(x, marks=pytest.mark.slow) for x in (
    "bf16x2", "fp16x2", "fp32x2", "bf16i16", "bf16i8"
))]  # fmt: skip


REFUSED_WITHOUT_FLOAT64 = {"igamma_", "igammac_", "ldexp_", "resize_as_"}


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float16, torch.float32),
        pytest.param(torch.float64, marks=pytest.mark.with_float64("the target is of it")),
    ],
)
@pytest.mark.parametrize("kind", ["gradient", "parameter"])
@pytest.mark.filterwarnings("ignore")
def test_every_operation_that_writes_to_plain_tensors_takes_one(name, dtype, kind):
    format, refused = mcf.Format.from_name(name), set()
    for operation, (func, places) in writing.operations().items():
        if operation == "ldexp_" and LDEXP.args[0]:
            continue
        own = [i for i, (x, _) in enumerate(places) if i and x in ("tensor", "tensors")]
        for chosen in {*[(i,) for i in own], tuple(own)}:

            def made(i, shape, chosen=chosen):
                x = writing.numbers(i, shape)
                if i not in chosen:
                    return x.to(dtype)
                p = nn.Parameter(mcf.as_expansion(x, format))
                p.grad = x.to(format.dtype)
                return p

            def wide(i, shape, made=made):
                x = made(i, shape)
                if type(x) is torch.Tensor:
                    return x.double()
                return x.grad.double() if kind == "gradient" else exact(x)

            def given(i, shape, made=made):
                x = made(i, shape)
                return x.grad if kind == "gradient" and isinstance(x, MCFTensor) else x

            expected = writing.call(func, places, wide)
            run = partial(writing.call, func, places, given)
            try:
                got = in_step(lambda p, run=run: run(), parameter())
            except NotImplementedError:
                refused.add(operation)
                continue
            for a, b in zip(
                *([x] if torch.is_tensor(x) else x for x in (got, expected)), strict=True
            ):
                what = f"{operation}, places {chosen}"
                assert (type(a), a.dtype) == (torch.Tensor, dtype), what
                error = (a.double() - b).abs() / (b.abs() + 1e-3 * b.abs().max() + 1e-30)
                assert error.nan_to_num(0).max() <= 12 * UNITS[dtype], what
    assert refused <= (set() if has_float64() else REFUSED_WITHOUT_FLOAT64)


@pytest.mark.parametrize("name", ["bf16x2", "bf16x3"])
def test_a_float32_state_keeps_its_bits_where_it_meets_a_parameter(name):
    p = parameter(mcf.Format.from_name(name))
    state = torch.full((3, 4), 1 / 3)
    in_step(lambda p: state.add_(p, alpha=1e-7), p)
    expected = torch.full((3, 4), 1 / 3).double() + 1e-7 * exact(p)
    torch.testing.assert_close(state.double(), expected, rtol=2.0**-23, atol=0)


WRITES = {
    "add_": lambda p, g: g.add_(p, alpha=0.01),
    "mul_": lambda p, g: g.mul_(1 / 3),
    "foreach add_": lambda p, g: torch._foreach_add_([g], [p], alpha=0.01),
    "foreach mul_": lambda p, g: torch._foreach_mul_([g], 1 / 3),
    "addcmul_": lambda p, g: g.addcmul_(p, p, value=0.1),
    "sub_ mean": lambda p, g: g.sub_(g.mean(1, keepdim=True)),
    "clamp_": lambda p, g: g.clamp_(-1 / 3, 1 / 3),
    "copy_": lambda p, g: g.copy_(p),
    "zero_": lambda p, g: g.zero_(),
    "row": lambda p, g: g[1].mul_(1 / 3),
    "flat": lambda p, g: g.view(-1)[2:5].add_(1 / 3),
    "setitem": lambda p, g: g.__setitem__((0, 1), 1 / 3),
    "data": lambda p, g: g.data.mul_(1 / 3),
    "detached": lambda p, g: g.detach().mul_(1 / 3),
    "clip": lambda p, g: nn.utils.clip_grad_norm_([p], 0.1),
    "out": lambda p, g: torch.mul(g, 1 / 3, out=g),
    "component": lambda p, g: g.components[1].fill_(2**-20),
}


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("alone", [True, False])
def test_changes_of_a_gradient_count_with_all_terms(write, alone, monkeypatch):
    if not alone:
        monkeypatch.setattr("mcftensor.dispatch.evaluate.lying_alike", lambda *a, **b: None)
    p = parameter()
    held = p.grad

    def function(p):
        WRITES[write](p, p.grad)
        return p.grad

    value = nn.Parameter(mcf.as_expansion(p.detach(), p.format))
    value.grad = mcf.as_expansion(held, p.format)
    with torch.no_grad():
        WRITES[write](mcf.as_expansion(p.detach(), p.format), value.grad)
        if write == "clip":
            nn.utils.clip_grad_norm_([value], 0.1)
    got = in_step(function, p)
    assert_same_terms(got, value.grad)
    assert p.grad is held
    assert torch.equal(held, mcf.as_plain(value.grad, p.dtype))


def test_views_get_their_tails_with_the_whole():
    def function(p):
        flat, rows = p.grad.view(-1), p.grad.unbind()
        turned = p.grad.t()[1:]
        p.grad.mul_(1 / 3)
        whole = exact(p.grad)
        assert torch.equal(exact(flat), whole.view(-1))
        assert torch.equal(exact(rows[1]), whole[1])
        turned.add_(1 / 3)
        assert torch.equal(exact(p.grad)[:, 1:], exact(turned).t())
        return exact(p.grad) != mcf.as_plain(p.grad, p.dtype).double()

    assert in_step(function, parameter()).any()


def test_gradients_given_within_a_step_are_plain_after_it():
    p = parameter()
    expected = exact(p.grad) / 3

    def function(p):
        p.grad = p.grad / 3
        assert_same_terms(p.grad, mcf.as_expansion(expected, p.format))
        return p.grad

    given = in_step(function, p)
    assert type(p.grad) is torch.Tensor
    assert torch.equal(p.grad, expected.bfloat16())
    p.grad.zero_()
    assert_same_terms(given, mcf.as_expansion(expected, p.format))


@GRAD_DTYPE
def test_other_gradients_are_what_they_were():
    for x in (None, torch.ones(3, 4), torch.ones(3, 4).half(), sample(mcf.bf16x2, 3, 4)):
        p = parameter(gradient=False)
        p.grad_dtype = None
        p.grad = x
        assert in_step(lambda p: p.grad, p) is x
    p = parameter()
    in_step(lambda p: setattr(p, "grad", None), p)
    assert p.grad is None
    assert in_step(lambda p: p.grad, p) is None


def test_a_gradient_that_is_a_part_of_a_graph_stays_one():
    class Recording(Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            (p,) = self.param_groups[0]["params"]
            self.changed = p - 0.1 * p.grad

    p = parameter(gradient=False)
    x = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    (p.grad,) = torch.autograd.grad((p * x * x).sum(), p, create_graph=True)
    optimizer = Recording([p])
    optimizer.step()
    (of_x,) = torch.autograd.grad(optimizer.changed.sum(), x)
    assert torch.equal(of_x, torch.full_like(of_x, -0.2))
    p.grad = None


@pytest.mark.parametrize("name", ["bf16x2", "bf16x3", "fp32x2", "bf16i16", "bf16i8"])
@pytest.mark.parametrize("kind", ["expansion", "float32", "base"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivatives_within_a_step(name, kind):
    format = mcf.Format.from_name(name)
    p, q = (parameter(format, gradient=False) for _ in range(2))
    x = torch.linspace(0.5, 1, 12).view(3, 4).to(p.dtype)

    def loss(p, q, x):
        return (p**3 * x + p * q * q).sum()

    loss(p, q, x).backward(create_graph=True)
    held = p.grad
    vectors = [torch.where(torch.arange(12).view(3, 4) % 3 == i, 1.0, -1.0) for i in range(2)]

    def function(p, q):
        grads = [p.grad, q.grad]
        assert [type(g) for g in grads] == [GradientTensor] * 2
        assert all(g.requires_grad and g.grad_fn is not None for g in grads)
        zs = [v.to(p.dtype) if kind == "float32" else v.to(format.dtype) for v in vectors]
        if kind == "expansion":
            zs = [torch.zeros_like(g).add_(v) for g, v in zip(grads, vectors, strict=True)]
        found = torch.autograd.grad(grads, [p, q], zs, retain_graph=True)
        p.grad.mul_(1.0)
        return found, torch.autograd.grad(grads, [p, q], zs)

    found, again = in_step(function, p, q)
    leading = [x.components[0].detach().double().requires_grad_() for x in (p, q)]
    firsts = torch.autograd.grad(loss(*leading, x.double()), leading, create_graph=True)
    expected = torch.autograd.grad(firsts, leading, [v.double() for v in vectors])
    for got in (found, again):
        for a, b in zip(got, expected, strict=True):
            assert (type(a), a.dtype) == (torch.Tensor, format.dtype)
            eps = torch.finfo(format.dtype).eps
            torch.testing.assert_close(a.double(), b, rtol=4 * eps, atol=4 * eps)
    assert p.grad is held
    p.grad = q.grad = None


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_read_with_and_without_a_graph():
    p = parameter(gradient=False)
    (p * p * torch.ones(3, 4, dtype=p.dtype)).sum().backward(create_graph=True)

    def function(p):
        without = p.grad
        with torch.enable_grad():
            recorded = p.grad
        return type(without), type(recorded), recorded.requires_grad, p.grad is without

    assert in_step(function, p) == (GradientTensor, torch.Tensor, True, True)
    p.grad = None


def test_a_sparse_gradient_has_the_dtype_of_numbers():
    def function(p):
        assert (p.grad.layout, p.grad.dtype) == (torch.sparse_coo, torch.float32)
        assert p.grad is p.grad
        read = p.grad.to_dense()
        p.grad.mul_(1 / 3)
        return read

    p = parameter()
    dense = p.grad
    p.grad = sparse = dense.to_sparse()
    assert torch.equal(in_step(function, p), dense.float())
    assert p.grad is sparse
    assert torch.equal(sparse.to_dense(), (dense.float() / 3).bfloat16())


def test_a_gradient_given_in_the_dtype_of_numbers():
    p = parameter()
    given = p.grad.double().div(3).float()

    def function(p):
        p.grad = given.to(p.dtype)
        assert p.grad is given
        p.grad.mul_(3)

    in_step(function, p)
    assert p.grad.dtype == torch.bfloat16
    assert torch.equal(p.grad, given.bfloat16())


# --------------------------------------------------------------------------------------- dtypes


def test_the_dtype_is_that_of_the_number(format):
    p = parameter(format)
    dtypes = in_step(lambda p: (p.dtype, p.grad.dtype, (p * 2).dtype, p.data.dtype), p)
    assert set(dtypes) == {torch.float32 if format.precision <= 24 else widest()}
    assert p.dtype == format.dtype


SAME = {
    "to": lambda p: p.to(p.dtype),
    "to by name": lambda p: p.to(dtype=p.dtype),
    "to a device": lambda p: p.to("cpu", torch.float32),
    "to itself": lambda p: p.to(p),
    "to another": lambda p: p.to(tensor=torch.ones(2)),
    "float": lambda p: p.float(),
    "type": lambda p: p.type(torch.float32),
    "type_as": lambda p: p.type_as(torch.ones(2)),
}
ROUNDED = {
    "to": lambda p: p.to(torch.bfloat16),
    "to a device": lambda p: p.to("cpu", torch.bfloat16, copy=True),
    "to another": lambda p: p.to(torch.ones(2, dtype=torch.bfloat16)),
    "bfloat16": lambda p: p.bfloat16(),
    "type": lambda p: p.type(torch.bfloat16),
    "type_as": lambda p: p.type_as(torch.ones(2, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("convert", SAME)
def test_a_conversion_to_its_dtype_is_the_identity(convert):
    p = parameter()
    assert in_step(SAME[convert], p) is p


@pytest.mark.parametrize("convert", ROUNDED)
def test_a_conversion_to_the_base_rounds(convert):
    p = parameter()
    rounded = in_step(ROUNDED[convert], p)
    assert type(rounded) is torch.Tensor
    assert torch.equal(rounded, mcf.as_plain(p.detach(), torch.bfloat16))
    assert rounded.data_ptr() != p.components[0].data_ptr()


def test_other_conversions_and_those_of_plain_tensors():
    p, x = parameter(), torch.full((2,), 1 / 3, dtype=torch.float64)

    def function(p):
        assert torch.equal(p.double(), p.to(torch.float64))
        assert p.to(p.dtype, copy=True) is not p
        assert_same_terms(p.to(p.dtype, copy=True), p.detach())
        assert x.to(p).dtype == x.type_as(p).dtype == torch.float32
        assert p.type() == "torch.BFloat16Tensor"
        return p.double()

    assert torch.equal(in_step(function, p), exact(p))
    assert p.float().dtype == torch.float32
    assert p.to(p.dtype) is p


def test_the_way_out_leads_to_the_base():
    def function(p):
        return mcf.as_plain(p).dtype, mcf.as_plain(p, torch.float32).dtype

    assert in_step(function, parameter()) == (torch.bfloat16, torch.float32)


NARROW = {
    "zeros_like": lambda x, d: torch.zeros_like(x, dtype=d),
    "ones_like": lambda x, d: torch.ones_like(input=x, dtype=d),
    "full_like": lambda x, d: torch.full_like(x, 0.1, dtype=d),
    "empty_like": lambda x, d: torch.empty_like(x, dtype=d).zero_(),
    "memory format": lambda x, d: torch.zeros_like(x, memory_format=torch.preserve_format, dtype=d),
    "new_zeros": lambda x, d: x.new_zeros((2, 3), dtype=d),
    "new_full": lambda x, d: x.new_full((2, 3), 0.1, dtype=d),
    "new_tensor": lambda x, d: x.new_tensor([0.1, 0.2], dtype=d),
    "sum": lambda x, d: x.sum(0, dtype=d),
    "mean": lambda x, d: torch.mean(x, dtype=d),
    "cumsum": lambda x, d: x.cumsum(0, dtype=d),
    "softmax": lambda x, d: x.softmax(0, dtype=d),
    "softmax by place": lambda x, d: torch.softmax(x, 0, d),
    "log_softmax of a module": lambda x, d: nn.functional.log_softmax(x, dim=0, dtype=d),
    "norm": lambda x, d: torch.norm(x, dtype=d),
}


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("make", NARROW)
@pytest.mark.parametrize(
    "name",
    [
        *("bf16x2", "bf16x3", "fp16x2", "bf16i16", "bf16i8"),
        pytest.param("fp32x2", marks=pytest.mark.with_float64("p.dtype is the base without it")),
    ],
)
def test_what_is_made_in_the_base_by_its_name_is_plain(name, make):
    format = mcf.Format.from_name(name)
    p = parameter(format)
    for read in (lambda p: p, lambda p: p.grad):
        made = in_step(lambda p, read=read: NARROW[make](read(p), format.dtype), p)
        assert (type(made), made.dtype) == (torch.Tensor, format.dtype)
        wide = exact(p) if read(p) is p else p.grad.double()
        expected = NARROW[make](wide, torch.float64)
        u = torch.finfo(format.dtype).eps
        torch.testing.assert_close(made.double(), expected, rtol=u, atol=u / 8)


def test_random_numbers_in_the_base_are_those_of_plain_tensors():
    p = parameter()
    torch.manual_seed(0)
    drawn = in_step(lambda p: torch.rand_like(p, dtype=torch.bfloat16), p)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3, 4, dtype=torch.bfloat16))


def test_what_is_made_without_a_dtype_is_an_expansion(format):
    def function(p):
        return [
            torch.zeros_like(p),
            torch.zeros_like(p.grad),
            torch.zeros_like(p, memory_format=torch.preserve_format),
            p.new_zeros(3),
            p.sum(0),
        ]

    assert all(type(x) is MCFTensor for x in in_step(function, parameter(format)))


@pytest.mark.parametrize("name", ["bf16x2", "bf16x3", "fp16x2", "bf16i16"])
def test_a_momentum_in_the_base_is_not_what_it_is_converted_to(name):
    format = mcf.Format.from_name(name)
    p = parameter(format)
    momentum = []

    def function(p):
        if not momentum:
            momentum.append(torch.zeros_like(p.grad, dtype=format.dtype))
        momentum[0].mul_(0.9).add_(p.grad)
        update = momentum[0].to(p.grad.dtype)
        assert update is not momentum[0]
        p.sub_(update.mul_(1e-3))

    before, gradient = exact(p), p.grad.double()
    m, moved = torch.zeros(3, 4, dtype=format.dtype), torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(20):
        in_step(function, p)
        m.mul_(0.9).add_(gradient.to(m.dtype))
        moved += 1e-3 * m.double()
    assert torch.equal(momentum[0], m)
    torch.testing.assert_close(before - exact(p), moved, rtol=1e-3, atol=1e-4)


def test_a_conversion_to_the_dtype_of_numbers_is_the_identity_of_every_format(format):
    p = parameter(format)
    assert in_step(lambda p: p.to(p.dtype), p) is p


def test_states_that_are_made_of_the_dtype_keep_their_bits():
    def function(p):
        norms = torch.zeros(3, dtype=p.dtype)
        return norms.add_(p.square().sum(1)), torch.full((), 0.1, dtype=p.dtype)

    p = parameter()
    norms, number = in_step(function, p)
    torch.testing.assert_close(norms.double(), exact(p).square().sum(1), rtol=1e-6, atol=0)
    assert number.dtype == torch.float32


# ------------------------------------------------------------------------- gradients, continued


def test_gradients_of_accumulation_stay_expansions():
    model = mcf.as_expansion(nn.Linear(3, 2))
    mcf.accumulate_gradients(model)
    for _ in range(2):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    held = model.weight.grad
    assert isinstance(held, MCFTensor)
    seen = in_step(lambda p: p.grad, model.weight)
    assert seen is held
    in_step(lambda p: setattr(p, "grad", p.grad * 2), model.weight)
    assert_same_terms(model.weight.grad, held * 2)


def test_what_an_optimizer_keeps_of_a_gradient_does_not_change_with_it():
    p = parameter()

    def function(p):
        p.grad.mul_(1 / 3)
        return p.grad, p.grad.view(-1)

    kept, flat = in_step(function, p)
    before = exact(kept)
    p.grad.fill_(7)
    assert torch.equal(exact(kept), before)
    del flat


def test_a_closure_makes_new_gradients():
    p = parameter()

    def closure():
        p.grad.fill_(5)

    def function(p, closure):
        p.grad.mul_(1 / 3)
        closure()
        return p.grad

    assert torch.equal(
        exact(Calling([p], function).step(closure)), torch.full((3, 4), 5.0).double()
    )


def test_a_fused_step_is_given_plain_gradients(monkeypatch):
    seen = []
    made = GradientTensor.over
    monkeypatch.setattr(GradientTensor, "over", lambda *args: seen.append(args) or made(*args))
    p = parameter()
    for cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        cls([p], lr=1e-3, fused=True).step()
    assert seen == []
    cls([p], lr=1e-3).step()
    assert len(seen) == 1


def test_a_fused_kernel_called_by_another_optimizer_reads_the_plain_gradient():
    def function(p):
        torch._fused_sgd_(
            [p], [p.grad], [], lr=0.1, momentum=0.0, weight_decay=0.01, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip
        return type(p.grad)

    p, q = parameter(), parameter()
    assert in_step(function, p) is GradientTensor
    torch.optim.SGD([q], lr=0.1, weight_decay=0.01, fused=True).step()
    assert_same_terms(p, q)


def test_nothing_of_a_step_is_kept_after_it():
    p = parameter()
    (read,) = in_step(lambda p: [weakref.ref(p.grad)], p)
    gc.collect()
    assert read() is None


@pytest.mark.parametrize("format", [mcf.bf16x3, mcf.fp32x3], ids=str)
@pytest.mark.parametrize("name", ["mul", "add", "div"])
def test_a_gradient_has_the_format_of_its_parameter_on_the_tape_too(format, name):
    """Beside a shorter format: an earlier operation has put it on the tape."""

    def formats():
        p = nn.Parameter(mcf.as_expansion(torch.rand(3, 5) + 0.5, format))
        p.grad = torch.randn(3, 5).to(p.dtype)
        x = mcf.as_expansion(torch.rand(3, 5) + 0.5, mcf.Format(format.dtype, 2))
        found = []

        class Stepping(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                fresh = getattr(x, name)(p.grad)
                x.add_(p.grad)
                found.extend([fresh.format, getattr(x, name)(p.grad).format])

        Stepping([p], {}).step()
        return found

    assert formats() == [format, format]
    with mock.patch("mcftensor.dispatch.defer.open_tape", return_value=None):
        assert formats() == [format, format]
