"""Within a step formats that only store numbers go on the tape: PyTorch's own bits, all at once."""

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

import mcftensor as mcf
from mcftensor.passes import decoded_kernels, decoded_traces
from mcftensor.passes.decoded_kernels import Stage
from mcftensor.passes.decoded_traces import Decoded
from mcftensor.passes.operators import OPERATORS
from mcftensor.tensor import GradientTensor, TapedTensor, tape
from mcftensor.tensor.step_tensors import PendingTensor, TapedGradient
from support.eager_kernels import eager_kernels
from support.helpers import bits
from support.kernel_cases import way

pytestmark = pytest.mark.usefixtures("no_grad")

WEIGHTS = [mcf.bf16i16, mcf.bf16i8, mcf.bf16i8.with_rounding("stochastic"), mcf.e4m3i8]
over_weights = pytest.mark.parametrize("format", WEIGHTS, ids=lambda f: f.name)


class Cut(BaseException):
    """As KeyboardInterrupt, but of this test."""


def numbers(format, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return mcf.as_expansion(torch.rand(*shape, generator=generator) + 0.5, format)


class Adam(torch.optim.Optimizer):
    """Adam by ordinary operations, or by those on lists, with states in formats of their own."""

    def __init__(self, params, first, second, in_lists):
        super().__init__(params, {})
        self.in_lists = in_lists
        for i, p in enumerate(self.param_groups[0]["params"]):
            self.state[p]["m"] = numbers(first, *p.shape, seed=10 + i)
            self.state[p]["v"] = numbers(second, *p.shape, seed=20 + i)

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        states = [self.state[p] for p in params]
        ms, vs, gs = [x["m"] for x in states], [x["v"] for x in states], [p.grad for p in params]
        self.seen = []
        if self.in_lists:
            torch._foreach_mul_(params, 0.99)
            torch._foreach_lerp_(ms, gs, 0.1)
            torch._foreach_mul_(vs, 0.9)
            torch._foreach_addcmul_(vs, gs, gs, value=0.1)
            roots = torch._foreach_sqrt(vs)
            torch._foreach_add_(roots, 1e-8)
            torch._foreach_addcdiv_(params, ms, roots, [-0.1 * (i + 1) for i in range(len(ms))])
            self.seen = [*map(type, (*params, *roots))]
            return
        for i, (p, m, v, g) in enumerate(zip(params, ms, vs, gs, strict=True)):
            p.mul_(0.99)
            m.lerp_(g, 0.1)
            v.mul_(0.9).addcmul_(g, g, value=0.1)
            root = v.sqrt().add_(1e-8)
            p.addcdiv_(m, root, value=-0.1 * (i + 1))
            self.seen += [type(p), type(root)]


def after_steps(format, in_lists, *, steps=2, shapes=((3, 40), (3, 40), (2, 64))):
    """All that some steps leave."""
    torch.manual_seed(0)
    params = [nn.Parameter(numbers(format, *shape, seed=i)) for i, shape in enumerate(shapes)]
    optimizer = Adam(params, mcf.mxfp8, mcf.ue5m3, in_lists)
    for step in range(steps):
        for i, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
        optimizer.step()
    states = [x for p in params for x in optimizer.state[p].values()]
    return params, states, optimizer


def left(params, states):
    tensors = [*params, *states]
    counts = [None if x.writes is None else x.writes.item() for x in tensors]
    return [bits(x) for x in tensors], counts


def without_a_tape(*args, **kwargs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mcftensor.dispatch.defer.open_tape", lambda: None)
        params, states, _ = after_steps(*args, **kwargs)
    return left(params, states)


@over_weights
@pytest.mark.parametrize("in_lists", [False, True])
def test_all_of_it_is_on_the_tape_and_no_bit_differs(format, in_lists):
    params, states, optimizer = after_steps(format, in_lists)
    if not (in_lists and format.rounding == "stochastic"):  # keys are drawn row by row
        assert set(optimizer.seen) == {TapedTensor, PendingTensor}
    assert left(params, states) == without_a_tape(format, in_lists)


@over_weights
def test_parts_of_long_rows(format, monkeypatch):
    monkeypatch.setattr(decoded_traces, "TOGETHER", 64)
    found = after_steps(format, False, shapes=((4, 64), (3, 40), (2, 16)))
    monkeypatch.undo()
    expected = without_a_tape(format, False, shapes=((4, 64), (3, 40), (2, 16)))
    assert left(*found[:2]) == expected


def test_lists_go_to_kernels_of_lists_on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    called = []
    for name in ("_foreach_lerp_", "_foreach_sqrt"):
        function = getattr(torch, name)
        monkeypatch.setattr(
            decoded_traces.torch,
            name,
            lambda *a, f=function, n=name, **k: called.append(n) or f(*a, **k),
        )
    work = [decoded_traces._function(name, name == "_foreach_lerp") for name in ("_foreach_lerp",)]
    x, y, out = torch.ones(3), torch.zeros(3), torch.empty(3)
    work[0](x, y, 0.25)
    decoded_traces._function("_foreach_sqrt", False)(torch.full((3,), 4.0), out=out)
    assert called == ["_foreach_lerp_", "_foreach_sqrt"]
    assert x.tolist() == [0.75] * 3
    assert out.tolist() == [2.0] * 3


WHOLE = ((4, 64), (3, 2, 32), (2, 32), (1, 32))


@pytest.mark.thinned(of=4)
@over_weights
@pytest.mark.parametrize("in_lists", [False, True])
@pytest.mark.parametrize("together", [1 << 19, 64])
def test_kernels_have_the_bits_of_pytorchs_operations(format, in_lists, together, monkeypatch):
    monkeypatch.setattr(decoded_traces, "TOGETHER", together)
    with eager_kernels() as ran:
        found = after_steps(format, in_lists, shapes=WHOLE)
    if not (in_lists and format.rounding == "stochastic"):  # keys are drawn row by row
        assert any(isinstance(getattr(x, "__self__", None), Stage) for x in ran)
    assert left(*found[:2]) == without_a_tape(format, in_lists, shapes=WHOLE)


def test_compiled_kernels_have_them_too():
    shapes = ((64, 64), (3, 64), (5, 32))
    with way("cpp"):
        found = after_steps(mcf.bf16i8, False, shapes=shapes)
    assert left(*found[:2]) == without_a_tape(mcf.bf16i8, False, shapes=shapes)


@pytest.mark.parametrize("name", sorted({*OPERATORS} - {"sqrt"}))
def test_operations_are_known_by_their_roundings(name, monkeypatch):
    """Of roots some libraries round otherwise; any other formula is right or is not used."""
    count, keywords = {"lerp": (3, ()), "addcmul": (4, ("value",)), "addcdiv": (4, ("value",))}.get(
        name, (1, ()) if name in ("square", "reciprocal") else (2, ())
    )
    are_numbers = (False,) * (min(count, 3) - (name == "lerp")) + (True,) * (
        len(keywords) + (name == "lerp")
    )
    known = decoded_kernels._is_known.__wrapped__
    assert known(name, are_numbers, keywords)
    right = decoded_kernels._rounded
    monkeypatch.setattr(
        decoded_kernels,
        "_rounded",
        lambda *x, **y: torch.nextafter(right(*x, **y), torch.ones(())),
    )
    assert not known(name, are_numbers, keywords)


def test_where_an_operation_rounds_otherwise_pytorchs_runs(monkeypatch):
    monkeypatch.setattr(decoded_kernels, "stages", decoded_kernels.stages.__wrapped__)
    monkeypatch.setattr(decoded_traces, "stages", decoded_kernels.stages)
    monkeypatch.setattr(decoded_kernels, "_is_known", lambda name, *unused: name != "addcdiv")
    with eager_kernels() as ran:
        found = after_steps(mcf.bf16i16, False, shapes=WHOLE)
    assert not any(isinstance(getattr(x, "__self__", None), Stage) for x in ran)
    assert left(*found[:2]) == without_a_tape(mcf.bf16i16, False, shapes=WHOLE)


@pytest.mark.parametrize("number", [1e39, 2**60 + 1])
def test_numbers_that_are_no_float32_are_pytorchs_affair(number):
    def steps():
        weight = nn.Parameter(numbers(mcf.bf16i16, 3, 4))
        try:
            in_a_step(lambda w: w.mul_(number), weight)
        except RuntimeError as error:
            return str(error)
        return bits(weight)

    with eager_kernels():
        found = steps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mcftensor.dispatch.defer.open_tape", lambda: None)
        assert found == steps()


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16i16], ids=lambda f: f.name)
def test_a_gradient_that_nobody_else_has_is_not_copied(format, is_held):
    weight = nn.Parameter(numbers(format, 3, 4))
    holder = []

    def function(w):
        state = torch.zeros_like(w)
        state.add_(w.grad)
        kind = type(w.grad)
        for x in holder:
            x.zero_()
        return kind, bits(state), bits(w.grad)

    weight.grad = torch.ones(weight.shape, dtype=torch.bfloat16)
    if is_held:
        holder.append(weight.grad.view(-1))

    class Stepping(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            return function(weight)

    kind, state, gradient = Stepping([weight], {}).step()
    assert kind is (GradientTensor if is_held else TapedGradient)
    assert state == bits(mcf.as_expansion(torch.ones(3, 4), format))
    assert gradient[0] == bits(weight.grad)[0]


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("format", WEIGHTS[:2], ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("function", "least", "shapes"),
    [
        (Decoded.run, 300, ((3, 40), (3, 40))),
        (tape._write_numbers, 5, ((3, 40), (3, 40))),
        (Decoded.run, 100, ((2, 32), (2, 32))),
    ],
)
def test_cut_at_any_line_all_is_done(function, least, shapes, format, monkeypatch):
    """An interrupt while the tape runs comes after what was put down has been done."""
    monkeypatch.setattr(decoded_traces, "TOGETHER", 64)
    if shapes == ((2, 32), (2, 32)):
        with eager_kernels():
            cut_at_any_line(function, least, shapes, format)
    else:
        cut_at_any_line(function, least, shapes, format)


def cut_at_any_line(function, least, shapes, format):
    expected = without_a_tape(format, False, steps=1, shapes=shapes)
    file, place = function.__code__.co_filename, 0
    code = None if function is Decoded.run else function.__code__
    while True:
        lines = [place]

        def trace(frame, event, arg, lines=lines):
            if frame.f_code.co_filename != file or frame.f_code is not (code or frame.f_code):
                return None
            if event == "line":
                lines[0] -= 1
                if lines[0] < 0:
                    sys.settrace(None)
                    raise Cut
            return trace

        before = sys.gettrace()
        made = {}
        original = torch.optim.Optimizer.__init__

        def keep(self, params, defaults, made=made, original=original):
            made["optimizer"] = self
            original(self, params, defaults)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.Optimizer, "__init__", keep)
            try:
                sys.settrace(trace)
                after_steps(format, False, steps=1, shapes=shapes)
                was_cut = False
            except Cut:
                was_cut = True
            finally:
                sys.settrace(before)
        if not was_cut:
            assert place > least
            return
        optimizer = made["optimizer"]
        params = optimizer.param_groups[0]["params"]
        states = [x for p in params for x in optimizer.state[p].values()]
        if all(isinstance(p.grad, torch.Tensor) for p in params) and len(optimizer.seen) == 4:
            assert left(params, states) == expected, place
        place += 19 if code is None else 1


def in_a_step(function, weight=None):
    weight = nn.Parameter(numbers(mcf.bf16i16, 3, 4)) if weight is None else weight
    weight.grad = torch.ones(weight.shape, dtype=torch.bfloat16)

    class Stepping(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            return function(weight)

    return Stepping([weight], {}).step()


USES = {
    "numpy": np.asarray,
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0].item(),
    "repr": repr,
    "data_ptr": lambda x: x.data_ptr(),
    "view": lambda x: x.view(-1).add_(0),
    "a function in C": lambda x: torch._foreach_norm([x]),
    "an operator": torch.ops.aten.sum.default,
    "out": lambda x: torch.exp(torch.zeros(3, 4), out=x).log_().add_(1),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "detach": lambda x: x.detach(),
    "requires_grad_": lambda x: x.requires_grad_().requires_grad_(False),
    "a bool": lambda x: bool((x == x).all()),
    "matmul": lambda x: x @ x.t(),
    "a plain target": lambda x: torch.zeros(3, 4).add_(x),
    "a plain list": lambda x: torch._foreach_add([torch.zeros(3, 4)], [x]),
    "data": lambda x: setattr(torch.zeros(3, 4), "data", x),
    "a capsule": lambda x: torch.from_dlpack(torch.to_dlpack(x)),
    "another class": lambda x: x.as_subclass(nn.Parameter),
    "a compiled function": torch.compile(lambda x: x * 2, backend="eager"),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("use", USES)
def test_a_result_becomes_a_plain_tensor(use):
    kept = []

    def step(weight):
        root = weight.sqrt()
        assert type(root) is PendingTensor
        assert (root.dtype, root.shape, root.device.type) == (torch.float32, (3, 4), "cpu")
        kept.append(root)
        USES[use](root)

    in_a_step(step)
    assert type(kept[0]) is torch.Tensor
    if use != "out":
        assert torch.equal(kept[0], (torch.rand(3, 4, generator=seeded()) + 0.5).sqrt())


def seeded():
    return torch.Generator().manual_seed(0)


def test_a_result_lends_its_memory_to_a_plain_tensor():
    def step(weight):
        root, plain = weight.sqrt(), torch.zeros(2)
        plain.data = root
        assert torch.equal(plain, root)
        assert plain.data_ptr() == root.data_ptr()
        root.mul_(2)
        assert torch.equal(plain, root)
        assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.sqrt() * 2)), root)

    in_a_step(step)


def test_results_change_places():
    def step(weight):
        root, square = weight.sqrt(), weight.square()
        torch.utils.swap_tensors(root, square)
        plain = torch.zeros(2)
        torch.utils.swap_tensors(square, plain)
        number = mcf.as_plain(weight, torch.float32)
        assert torch.equal(root, number.square())
        assert torch.equal(plain, number.sqrt())
        assert square.tolist() == [0, 0]

    in_a_step(step)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_a_result_that_a_transform_holds(transform):
    def step(weight):
        plain = mcf.as_plain(weight, torch.float32)
        root, number = weight.sqrt(), plain.sqrt()
        if transform == "vmap":
            found, expected = torch.vmap(lambda x: x * x + x)(root), number * number + number
        elif transform == "grad":
            found, expected = torch.func.grad(lambda x: (x * x).sum())(root), 2 * number
        else:
            found = torch.func.jvp(torch.square, (root,), (weight.square(),))[1]
            expected = 2 * number * plain.square()
        assert torch.equal(found, expected)
        assert torch.equal(root, number)
        assert type(root) is torch.Tensor

    in_a_step(step)


def test_memory_taken_while_a_transform_holds_the_result():
    def step(weight):
        root = weight.sqrt()

        def function(x):
            x.sum()
            assert type(root) is PendingTensor
            root.resize_(2)
            assert root.shape == (2,)
            return torch.zeros(4)

        torch.vmap(function)(root)
        assert root.shape == (2,)

    in_a_step(step)


def test_plain_rows_beside_ours_are_pytorchs():
    def step(weight):
        plain = torch.full((3, 4), 0.3, dtype=torch.bfloat16)
        first, second = torch._foreach_mul([weight, plain], [weight, plain])
        assert second.dtype == torch.bfloat16
        assert torch.equal(second, plain * plain)
        assert first.dtype == torch.float32

    in_a_step(step)


def test_what_nobody_has_any_longer_is_not_made(monkeypatch):
    made = []
    monkeypatch.setattr(decoded_traces, "_function", lambda *a: made.append(a))

    def step(weight):
        weight.sqrt()
        weight.square()

    in_a_step(step)
    assert made == []


class Halving(mcf.Format):
    """A bfloat16 and a tail in a type that kernels do not have."""

    name = "bf16_and_e5m2"
    components = (
        mcf.formats.Component("leading", torch.bfloat16),
        mcf.formats.Component("tail", torch.float8_e5m2),
    )
    numbers = mcf.formats.Machine(torch.float32)

    def decode(self, stored):
        leading, tail = stored
        return (leading.float() + tail.float(),)

    def encode(self, number, noise):
        x = number.to(torch.float32)
        leading = x.to(torch.bfloat16)
        rest = torch.where(leading.isfinite(), x - leading.float(), 0)
        return leading, rest.to(torch.float8_e5m2)


@pytest.fixture(scope="module")
def halving():
    """Registered late: the contract is collected for the formats that are known by then."""
    return Halving().register()


@pytest.mark.parametrize("path", ["for-loop", "foreach", "fused"])
@torch.enable_grad()
def test_types_that_kernels_do_not_have_train_by_eager_code(path, halving):
    weight = nn.Parameter(mcf.as_expansion(torch.ones(1 << 15), halving))
    options = {"foreach": path == "foreach", "fused": path == "fused"}
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0, **options)
    for _ in range(40):
        weight.grad = torch.ones(1 << 15, dtype=torch.bfloat16)
        optimizer.step()
    moved = 1 - mcf.as_plain(weight.detach(), torch.float64)
    assert (moved - 0.04).abs().max() < 2e-3


@pytest.mark.parametrize("format", [mcf.bf16i16, mcf.bf16i8], ids=lambda f: f.name)
@pytest.mark.parametrize("part", [0, 1])
def test_an_operation_that_always_raises(format, part, monkeypatch):
    """It alone is missing, with what would read its result; also where it raises for a part."""
    monkeypatch.setattr(decoded_traces, "TOGETHER", 64)
    find, calls = decoded_traces._function, [part]

    def broken(name, is_in_place):
        def root(*args, **kwargs):
            calls[0] -= 1
            if calls[0] < 0:
                raise ArithmeticError("no roots")
            return find(name, is_in_place)(*args, **kwargs)

        return root if name == "sqrt" else find(name, is_in_place)

    monkeypatch.setattr(decoded_traces, "_function", broken)
    results = []

    def step(weight):
        root, double = weight.sqrt(), weight * 2
        results.extend([root, root * 3, (root * 3).add_(1).square(), double])
        weight.mul_(2).sqrt_() if part == 0 else weight.mul_(2)
        weight.add_(1)
        double.add_(root)
        weight.sub_(root)

    weight = nn.Parameter(numbers(format, 3, 64))
    with pytest.raises(ArithmeticError, match="no roots"):
        in_a_step(step, weight)
    before = mcf.as_plain(numbers(format, 3, 64), torch.float32)
    expected = numbers(format, 3, 64).mul_(2).add_(1)
    *lost, double = results
    if part == 0:
        assert bits(weight.detach()) == bits(expected)
        assert torch.equal(double, before * 2)
    for x in lost:
        with pytest.raises(RuntimeError, match="never made"):
            x.tolist()


@pytest.mark.parametrize("times", [1, 1000])
def test_no_memory_for_a_result(times, monkeypatch):
    """All else is done; the result, too, where there is memory in the end."""
    results, left, empty = [], [times], tape._empty

    def full(*args):
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("full")
        return empty(*args)

    def step(weight):
        results.append(weight.sqrt())
        weight.mul_(2).add_(1)
        monkeypatch.setattr(tape, "_empty", full)

    weight = nn.Parameter(numbers(mcf.bf16i16, 3, 4))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        in_a_step(step, weight)
    before = numbers(mcf.bf16i16, 3, 4)
    if times == 1:
        assert torch.equal(results[0], before.sqrt())
    else:
        with pytest.raises(RuntimeError, match="never made"):
            results[0].tolist()
    assert bits(weight.detach()) == bits(before.mul_(2).add_(1))
