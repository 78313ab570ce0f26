"""What is on the tape of a step is what it would be if it had been carried out at once."""

import copy
import gc
import io
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import mcftensor as mcf
from mcftensor.dispatch import defer
from mcftensor.formats import default_format
from mcftensor.passes import traces
from mcftensor.passes.traces import Operation, Trace, Variable
from mcftensor.tensor import tape
from mcftensor.tensor.tensor import MCFTensor
from support.helpers import a_step, assert_same_terms, sample
from support.taping import expression, own, values, waiting

pytestmark = pytest.mark.usefixtures("within_a_step")


CHAINS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y * 3,
    "rsub": lambda x, y: 1 - x,
    "mul": lambda x, y: x * y * y,
    "div": lambda x, y: (x / y) / 3,
    "reciprocal": lambda x, y: x.reciprocal() + 1,
    "sqrt": lambda x, y: (x.sqrt() / 0.3).add(1e-8),
    "square": lambda x, y: (x * 2).square(),
    "addcmul": lambda x, y: (x * 2).addcmul(y, x, value=0.1),
    "addcdiv": lambda x, y: x.addcdiv(x * 3, y, value=-0.1),
    "lerp": lambda x, y: x.lerp(y * y, 0.1),
    "in place": lambda x, y: (x * y).add_(1).mul_(3),
    "itself": lambda x, y: (z := x + y) * z,
    "foreach": lambda x, y: torch._foreach_add(torch._foreach_sqrt([x, y]), 1e-8)[0],
}


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("chain", CHAINS)
def test_the_same_bits(chain, format, at_once):
    x, y = values(format)
    expected = at_once(CHAINS[chain], x, y)
    assert type(expected) is MCFTensor
    got = CHAINS[chain](x, y)
    assert waiting(got) == (format.rounding == "nearest")
    for name in ("shape", "dtype", "device", "format", "role", "requires_grad", "is_leaf"):
        assert getattr(got, name) == getattr(expected, name)
    assert (got.stride(), got.storage_offset()) == (expected.stride(), expected.storage_offset())
    if format.rounding == "nearest":
        assert_same_terms(got, expected)
    assert type(got) is MCFTensor


def test_metadata_of_views(at_once):
    whole = sample(mcf.bf16x2, 6, 7)
    for x in (whole[2:4], whole[:1, :3], whole[3], whole[1:1]):
        expected, got = at_once(torch.mul, x, x), x * x
        assert (got.shape, got.stride()) == (expected.shape, expected.stride())
        assert got.storage_offset() == expected.storage_offset()
        assert got.components[0].stride() == got.stride()


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    return torch.load(io.BytesIO(file.getvalue()))


def copied(x):
    return torch.zeros_like(x).copy_(x)


READERS = {
    "components": lambda x: [t.clone() for t in x.components],
    "repr": repr,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "item": lambda x: x[0, 0].item(),
    "view": lambda x: x.view(-1),
    "transposed": lambda x: x.t(),
    "index": lambda x: x[1:, ::2],
    "copy_": copied,
    "copy_ to plain": lambda x: torch.zeros(x.shape, dtype=torch.float64).copy_(x),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "to": lambda x: x.to(torch.float64),
    "as_plain": lambda x: mcf.as_plain(x, torch.float64),
    "as_expansion": lambda x: mcf.as_expansion(x, mcf.fp64x2),
    "parameter": lambda x: nn.Parameter(x).detach(),
    "twice": lambda x: x * x,
    "sum": lambda x: x.sum(),
    "compared": lambda x: [x < 1, x == x.clone(), torch.equal(x, x), x.isnan()],
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "stack": lambda x: torch.stack([x, x]),
    "matmul": lambda x: x @ x.t(),
    "exp": lambda x: x.exp(),
    "flatten": lambda x: [getattr(x, n).clone() for n in x.__tensor_flatten__()[0]],
    "in place": lambda x: x.add_(1).mul_(0.1),
    "filled": lambda x: x.fill_(2),
    "assigned": lambda x: x.__setitem__(0, 0.3) or x,
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "foreach": lambda x: torch._foreach_mul([x, x], 3.0),
    "foreach_copy_": lambda x: torch._foreach_copy_([y := torch.empty_like(x)], [x]) or y,
    "vmap": torch.func.vmap(lambda row: row * 2 + row),
}


def same(got, expected):
    if isinstance(got, (list, tuple)) and not isinstance(got, MCFTensor):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            same(a, b)
    elif isinstance(got, MCFTensor):
        assert_same_terms(got, expected)
        assert (got.role, got.stride()) == (expected.role, expected.stride())
    elif isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    else:
        assert got == expected


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.fp32x2], ids=lambda f: f.name)
def test_every_way_to_read(reader, format, at_once):
    x, y = values(format)
    expected = at_once(lambda: READERS[reader](expression(x, y)))
    got = expression(x, y)
    assert waiting(got)
    same(READERS[reader](got), expected)
    after = at_once(expression, x, y)
    if reader not in ("in place", "filled", "assigned"):
        assert_same_terms(got, after)


def test_a_compiled_function_given_one(at_once):
    compiled = torch.compile(lambda z: z * 3 + 1, backend="aot_eager")
    x, y = values()
    expected = at_once(lambda: expression(x, y) * 3 + 1)
    for _ in range(2):
        assert_same_terms(compiled(expression(x, y)), expected)


def test_a_compiled_function_that_calls_methods_of_one(at_once):
    def chain(z):
        return z.mul(3).add_(1) / torch.ones(5, device=z.device, dtype=z.dtype)

    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    expected = at_once(lambda x, y: chain(expression(x, y)), *values())
    assert_same_terms(compiled(expression(*values())), expected)


def test_within_a_compiled_function(at_once):
    compiled = torch.compile(expression, backend="aot_eager", fullgraph=True)
    x, y = values()
    got = compiled(x, y)
    assert type(got) is MCFTensor
    assert_same_terms(got, at_once(expression, x, y))


@pytest.fixture
def runs(monkeypatch):
    """What is run, by the names of the operations and the number of rows."""
    found = []
    write = tape._write

    def spy(trace, results, columns, shapes, *others):
        found.append(([x.name for x in trace.operations], len(shapes)))
        return write(trace, results, columns, shapes, *others)

    monkeypatch.setattr(tape, "_write", spy)
    return found


class TestWhatIsPutDown:
    def test_operations_on_values(self, runs):
        x, y = values()
        runs.clear()
        z = expression(x, y)
        assert waiting(z)
        assert not runs
        _ = z.components, z.components
        assert runs == [(["div", "sqrt", "add"], 1)]

    def test_no_long_chains(self, format, runs):
        (x, _) = values(format)
        z = x
        runs.clear()
        for _ in range(20):
            z = z * 1.5
        _ = z.components
        most = traces.longest(format)
        assert all(len(names) <= most for names, _ in runs)
        assert sum(len(names) for names, _ in runs) == 20

    def test_copies_of_what_others_have(self, at_once):
        x, y = values()
        weight = nn.Parameter(sample(mcf.bf16x2, 3, 5))
        plain = torch.ones(3, 5)
        for function in (
            lambda: weight * 2,
            lambda: weight.detach() * weight,
            lambda: x * plain,
            lambda: x.view(3, 5) + y,
        ):
            expected = at_once(function)
            z = function()
            assert waiting(z)
            assert_same_terms(z, expected)

    def test_lists_that_share_some_tensors_with_earlier_ones(self, at_once):
        x, y = values()

        def chain():
            a, b = torch._foreach_mul([x, y], 2)
            return [z for pair in ([a, y], [b, a], [a, b]) for z in torch._foreach_add(pair, 1)]

        for found, expected in zip(chain(), at_once(chain), strict=True):
            assert_same_terms(found, expected)

    def test_nothing_else(self):
        x, y = values()
        random = mcf.as_expansion(x, mcf.Format.from_name("bf16x2sr"))
        row = own(sample(mcf.bf16x2, 5))
        many = torch.ones(defer.SMALL + 1, dtype=torch.bfloat16)
        with torch.enable_grad():
            assert not waiting(x * y)
        for z in (random * 2, x * row, mcf.as_expansion(many, mcf.bf16x2) * many):
            assert not waiting(z)
        assert not waiting(x.t() * y.t())
        assert not waiting(x[:, ::2] * 2)
        assert not waiting(row[0] * 2)
        assert not waiting(x * torch.tensor(2.0))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ):
            assert not waiting(x * 2)

    def test_errors_are_raised_by_the_operation(self):
        x, y = values()
        z = x * 2
        other = own(sample(mcf.fp32x2, 3, 5))
        for wrong in (
            lambda: x.mul_(own(sample(mcf.bf16x2, 4, 5))),
            lambda: x.add_(other),
            lambda: x.add(y, value=3),
            lambda: x.mul_(2**70),
            lambda: x.mul_("2"),
            lambda: x.lerp_(y),
            lambda: torch._foreach_mul_([x, y], [2.0]),
            lambda: torch._foreach_add_([x], [y, y]),
        ):
            with pytest.raises((RuntimeError, TypeError, ValueError, OverflowError)):
                wrong()
        assert_same_terms(z, x * 2)

    def test_operands_of_other_types_answer(self):
        class Other:
            def __radd__(self, z):
                return "added"

            __rsub__ = __rmul__ = __rtruediv__ = __radd__

        z = expression(*values())
        assert waiting(z)
        assert {z + Other(), z - Other(), z * Other(), z / Other()} == {"added"}

    def test_modes_see_the_functions(self):
        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        seen = []
        z = expression(*values())
        assert waiting(z)
        with Mode():
            z = z.mul_(3).sqrt() + 1
        assert seen == [torch.Tensor.mul_, torch.Tensor.sqrt, torch.Tensor.add]

    def test_writes_to_one_are_counted(self):
        z = expression(*values())
        before = z._version
        z.mul_(3)
        z += 1
        assert waiting(z)
        assert z._version == before + 2

    def test_nothing_under_function_transforms(self, at_once):
        x, y = values()
        expected = at_once(expression, x, y)
        assert_same_terms(torch.func.vmap(expression)(x, y), expected)
        assert_same_terms(torch.func.functionalize(expression)(x, y), expected)

    @pytest.mark.parametrize("format", [mcf.bf16x2, mcf.fp32x2], ids=str)
    def test_a_read_under_other_modes(self, format, at_once):
        expected = at_once(expression, *values(format))
        made = []

        def read(row):
            made[-1].tolist()
            return row.sum()

        for _ in range(2):
            made.append(expression(*values(format)))
            assert waiting(made[-1])
            if len(made) == 1:
                with torch.device("meta"):
                    made[-1].tolist()
            else:
                torch.vmap(read)(torch.ones(2, 3))
            assert_same_terms(made[-1], expected)


def test_operands_may_go(at_once):
    expected = at_once(expression, *values())
    x, y = values()
    z = expression(x, y)
    del x, y
    gc.collect()
    torch.randn(1000)
    assert_same_terms(z, expected)


def test_no_memory_is_kept_after_reading():
    x, y = values()
    terms = [weakref.ref(t.untyped_storage()) for v in (x, y) for t in v.components]
    z = expression(x, y)
    _ = z.components
    del x, y
    gc.collect()
    assert all(term() is None for term in terms)
    assert "_place" not in z.__dict__


def test_nothing_waits_outside_of_steps():
    x, y = values()
    with a_step():
        z = expression(x, y)
        assert waiting(z)
    assert not waiting(z)


def test_nothing_waits_after_a_step_that_raises(at_once):
    x, y = values()
    expected = at_once(expression, x, y)
    kept = []

    class Interrupted(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            kept.append(expression(x, y))
            assert waiting(kept[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted([nn.Parameter(sample(mcf.bf16x2, 3))], {}).step()
    assert not waiting(kept[0])
    assert_same_terms(kept[0], expected)


class TestInferenceMode:
    def test_a_result_read_outside(self, at_once):
        x, y = values()
        with torch.inference_mode():
            z = expression(x, y)
        assert_same_terms(z, at_once(expression, x, y))

    def test_a_result_read_inside(self, at_once):
        x, y = values()
        z = expression(x, y)
        with torch.inference_mode():
            terms = [t.tolist() for t in z.components]
        assert terms == [t.tolist() for t in at_once(expression, x, y).components]

    def test_operands_from_inside(self, at_once):
        with torch.inference_mode():
            x, y = values()
        assert_same_terms(expression(x, y), at_once(expression, x, y))


@pytest.mark.with_float64("without it, bf16x3 takes networks, of which a pass has four at most")
@pytest.mark.parametrize("foreach", [False, True])
def test_adamw_is_one_pass_for_all_that_is_alike(foreach, runs):
    shapes = [(3, 5), (3, 5), (7,), (4, 5), (7,)]
    weights = [
        nn.Parameter(
            mcf.as_expansion(torch.randn(shape).bfloat16(), default_format(torch.Size(shape)))
        )
        for shape in shapes
    ]
    optimizer = torch.optim.AdamW(weights, foreach=foreach)
    for _ in range(3):
        runs.clear()
        for w in weights:
            w.grad = torch.randn(w.shape).bfloat16()
        optimizer.step()
    chain = ["mul", "lerp", "mul", "addcmul", "sqrt", "div", "add", "addcdiv"]
    assert sorted(runs, key=lambda x: x[1]) == [(chain, 2), (chain, 3)]


@pytest.mark.with_float64("it compares both")
def test_the_length_of_a_trace_depends_on_float64():
    trace = Trace().with_variable(Variable(mcf.bf16x3, "tensor"))
    for _ in range(4):
        trace = trace.then(Operation("sqrt", mcf.bf16x3, (0,), 0))
    with mcf.without_float64():
        assert trace.is_full
    assert not trace.is_full


def test_threads_that_read_and_write():
    """What one thread has computed is not what another writes afterwards."""
    x = mcf.as_expansion(torch.full((2**20,), 2.0), mcf.bf16x2)
    with torch.no_grad():
        y = x * 3
    together = threading.Barrier(2)

    def write():
        together.wait()
        with torch.no_grad():
            x.mul_(100)

    def read():
        together.wait()
        return mcf.as_plain(y, torch.float64).clone()

    with ThreadPoolExecutor(2) as pool:
        found, _ = pool.submit(read), pool.submit(write).result()
    assert (found.result() == 6).all()


def test_readers_of_one_result_in_threads():
    x = mcf.as_expansion(torch.full((64,), 2.0), mcf.bf16x2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(300):
                with torch.no_grad(), a_step():
                    y = x * 3
                    together = threading.Barrier(4)

                    def read(y=y, together=together):
                        together.wait()
                        return y._read()[0].sum()

                    found = [pool.submit(read) for _ in range(4)]
                    assert all(f.result() == 6 * 64 for f in found)
    finally:
        sys.setswitchinterval(interval)


def test_saving_a_tensor_gives_its_memory_to_nobody():
    """So that it may be written to on the tape as before."""
    (x, _) = values()
    assert waiting(x.mul_(3))
    torch.save(x, io.BytesIO())
    assert waiting(x.mul_(3))
    shared = copy.copy(x)
    assert not waiting(x.mul_(3))
    del shared
    assert waiting(x.mul_(3))
