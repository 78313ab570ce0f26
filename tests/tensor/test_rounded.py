"""Where an expansion is rounded to a plain tensor though nobody asked: it is said, or an error."""

import threading
import warnings

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, parameter, sample

X, P = sample(mcf.fp32x2, 3), parameter(mcf.fp32x2, 3).detach()
INDEX, MASK = torch.tensor([0, 2, 1]), torch.tensor([True, False, True])
aten = torch.ops.aten

# What writes an expansion, or a result of one, into a plain tensor.
COPIES = {
    "copy_": lambda t, x: t.copy_(x),
    "whole": lambda t, x: t.__setitem__(..., x),
    "element": lambda t, x: t.__setitem__(1, x[1]),
    "indices": lambda t, x: t.__setitem__(INDEX, x),
    "mask": lambda t, x: t.__setitem__(MASK, x[:2]),
    "index_put_": lambda t, x: t.index_put_((INDEX,), x),
    "put_": lambda t, x: t.put_(INDEX, x),
    "scatter_": lambda t, x: t.scatter_(0, INDEX, x),
    "masked_scatter_": lambda t, x: t.masked_scatter_(MASK, x),
    "index_copy_": lambda t, x: t.index_copy_(0, INDEX, x),
    "index_fill_": lambda t, x: t.index_fill_(0, INDEX, x[0]),
    "masked_fill_": lambda t, x: t.masked_fill_(MASK, x[0]),
    "fill_": lambda t, x: t.fill_(x[0]),
    "foreach_copy_": lambda t, x: torch._foreach_copy_([t], [x]),
    "stack": lambda t, x: torch.stack([x[0], x[1], x[2]], out=t),
    "cat": lambda t, x: torch.cat([x[:1], x[1:]], out=t),
}


def functions(dtype, count):
    """In-place operations and those with `out=` that exist for plain tensors of these shapes."""
    skipped = ("random", "set_", "resize", "copy_", "data", "swap", "apply", "map", "uniform")
    made = {}
    for name in sorted(dir(torch.Tensor)):
        is_in_place = name.endswith("_") and not name.startswith("_") and not name.endswith("__")
        if is_in_place and not any(part in name for part in skipped):
            made[name] = lambda t, *xs, name=name: getattr(t, name)(*xs)
    for name in sorted(dir(torch)):
        if not name.startswith("_") and type(getattr(torch, name)) is type(torch.add):
            made[f"{name}(out=)"] = lambda t, *xs, name=name: getattr(torch, name)(*xs, out=t)
    found = []
    for name, function in made.items():
        given = [torch.full((3,), 0.5, dtype=torch.float64) for _ in range(count)]
        target = torch.full((3,), 0.25, dtype=torch.float64)
        before = target.clone()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(target, *given)
        except (TypeError, RuntimeError, ValueError, NotImplementedError, IndexError):
            continue
        if target.shape == before.shape and not torch.equal(target, before):
            found.append(pytest.param(function, count, id=f"{name}-{count}"))
    return found


@pytest.mark.parametrize("role", ["value", "parameter"])
@pytest.mark.parametrize("write", COPIES.values(), ids=COPIES)
class TestCopies:
    def test_are_said(self, write, role):
        x = X.clone() if role == "value" else nn.Parameter(X.clone(), requires_grad=False)
        expected = torch.zeros(3)
        write(expected, mcf.as_plain(X, torch.float32))
        plain = torch.zeros(3)
        with pytest.warns(
            mcf.errors.RoundedWarning, match=r"fp32x2 is rounded to torch\.float32"
        ) as found:
            write(plain, x)
        assert {x.filename for x in found} == {__file__}
        assert torch.equal(plain, expected)

    def test_raise_before_anything_is_written(self, write, role):
        x = X.clone() if role == "value" else nn.Parameter(X.clone(), requires_grad=False)
        plain = torch.zeros(3)
        with mcf.when_rounded("raise"), pytest.raises(mcf.errors.RoundedError, match="as_plain"):
            write(plain, x)
        assert not plain.any()

    def test_into_a_dtype_that_holds_all_are_silent(self, write, role):
        x = X.clone() if role == "value" else nn.Parameter(X.clone(), requires_grad=False)
        plain, expected = (torch.zeros(3, dtype=torch.float64) for _ in range(2))
        write(expected, exact(X))
        write(plain, x)
        assert torch.equal(plain, expected)

    def test_into_the_format_are_silent(self, write, role):
        x = X.clone() if role == "value" else nn.Parameter(X.clone(), requires_grad=False)
        target, expected = torch.zeros_like(X), torch.zeros(3, dtype=torch.float64)
        write(expected, exact(X))
        write(target, x)
        assert torch.equal(exact(target), expected)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16i16], ids=str)
@pytest.mark.parametrize(
    ("function", "count"), [x for n in (1, 2) for x in functions(torch.float64, n)]
)
def test_every_operation_says_what_it_rounds(function, count, format):
    dtype = format.dtype
    given = [
        mcf.as_expansion(torch.full((3,), 0.501, dtype=torch.float64), format) for _ in range(count)
    ]
    plain = torch.full((3,), 0.25, dtype=dtype)
    before = plain.clone()
    with mcf.when_rounded("raise"):
        try:
            function(plain, *given)
        except mcf.errors.RoundedError:
            assert torch.equal(plain, before)
            return
        except (NotImplementedError, RuntimeError, TypeError):  # it is not there for expansions
            return
    if torch.equal(plain, before):
        return
    # What goes into it unrounded is a number of the dtype.
    wide = torch.full((3,), 0.25, dtype=torch.float64)
    function(wide, *map(mcf.as_plain, given, [torch.float64] * count))
    assert torch.equal(wide, plain.double())


@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.bf16i16], ids=str)
@pytest.mark.parametrize("function", [torch.special.ndtr, torch.nanmean])
def test_functions_that_are_carried_out_whole_say_so(function, format):
    x = mcf.as_expansion(torch.full((3,), 0.501, dtype=torch.float64), format)
    plain = torch.zeros(function(x).shape, dtype=format.dtype)
    with mcf.when_rounded("raise"), pytest.raises(mcf.errors.RoundedError, match=format.name):
        function(x, out=plain)
    assert not plain.any()


def test_an_ode_solver_with_plain_stages_says_so():
    def solved(stages_of):
        y = mcf.as_expansion(torch.ones(1, dtype=torch.float64), mcf.fp32x2)
        h, steps = 2.0**-6, 64
        for _ in range(steps):
            stages = stages_of(y)
            for j, a in enumerate((0.0, 0.5, 0.5, 1.0)):
                stages[j] = -(y + (stages[j - 1] * (a * h) if j else 0.0))
            y = y + (stages[0] + 2 * stages[1] + 2 * stages[2] + stages[3]) * (h / 6)
        return abs(float(y) - float(torch.tensor(-1.0, dtype=torch.float64).exp()))

    with pytest.warns(mcf.errors.RoundedWarning, match="torch.empty_like") as found:
        assert solved(lambda y: torch.empty(4, *y.shape, dtype=y.dtype)) > 1e-9
    assert {x.filename for x in found} == {__file__}
    assert solved(lambda y: torch.empty(4, *y.shape, dtype=y.format)) < 1e-9
    with (
        mcf.when_rounded("raise"),
        pytest.raises(mcf.errors.RoundedError, match=r"of shape \(1,\)"),
    ):
        solved(lambda y: torch.empty(4, *y.shape, dtype=y.dtype))


class TestSetting:
    def test_once_a_line(self):
        plain = torch.zeros(3)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            for _ in range(3):
                plain.copy_(X)
            plain.copy_(X)
        assert len(found) == 2

    def test_it_is_restored(self):
        former = mcf.when_rounded("ignore")
        torch.zeros(3).copy_(X)
        with mcf.when_rounded("raise"):
            with mcf.when_rounded("ignore"):
                torch.zeros(3).copy_(X)
            with pytest.raises(mcf.errors.RoundedError):
                torch.zeros(3).copy_(X)
        torch.zeros(3).copy_(X)
        former.__exit__()
        with pytest.warns(mcf.errors.RoundedWarning):
            torch.zeros(3).copy_(X)

    def test_it_is_that_of_a_thread(self):
        found = []

        def other():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.zeros(3).copy_(X)
            found.extend(caught)

        with mcf.when_rounded("raise"):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert [x.category for x in found] == [mcf.errors.RoundedWarning]

    def test_another_action_is_refused(self):
        with pytest.raises(ValueError, match="'error' is not one of 'ignore', 'warn', 'raise'"):
            mcf.when_rounded("error")


class TestWhatIsAskedFor:
    def test_conversions(self):
        with mcf.when_rounded("raise"):
            assert X.to(torch.float16).dtype == X.half().dtype == torch.float16
            assert [float(x) for x in X] == X.numpy().tolist() == X.tolist()
            torch.zeros(3).copy_(mcf.as_plain(X, torch.float32))
            torch.zeros(3, dtype=torch.int64).copy_(X)

    @pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16x3, mcf.bf16i8, mcf.bf16i16], ids=str)
    def test_float32_holds_formats_of_24_bits(self, format):
        with mcf.when_rounded("raise"):
            torch.zeros(3).copy_(sample(format, 3))
            for dtype in (torch.bfloat16, torch.float16):
                with pytest.raises(mcf.errors.RoundedError, match=format.name):
                    torch.zeros(3, dtype=dtype).copy_(sample(format, 3))

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize("mode", ["light", "plus", "compact", "full"])
    @pytest.mark.parametrize("path", ["fused", "foreach", "for-loop"])
    @pytest.mark.parametrize("decay", [0.0, 0.1])
    def test_states_that_collage_makes_plain(self, mode, path, decay):
        p = parameter(mcf.bf16x2, 2, 64)
        options = {"fused": path == "fused", "foreach": path == "foreach"}
        optimizer = torch.optim.Adam([p], weight_decay=decay, **options)
        mcf.collage(optimizer, mode)
        with mcf.when_rounded("raise"):
            for _ in range(2):
                p.grad = torch.ones(2, 64, dtype=torch.bfloat16)
                optimizer.step()

    def test_parameters_in_forward(self):
        p, plain = parameter(mcf.fp32x2, 3), torch.zeros(3)
        with mcf.when_rounded("raise"), torch.no_grad():
            plain.add_(p)
            torch.mul(p, plain, out=plain)

    def test_gradients_that_a_step_changes(self):
        p = parameter(mcf.bf16x2, 3)
        p.grad = torch.ones(3, dtype=torch.bfloat16)

        class Clips(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                p.grad.mul_(0.999)
                p.sub_(p.grad)

        with mcf.when_rounded("raise"):
            Clips([p], {}).step()

    def test_copies_of_parameters_in_a_step_are_not(self):
        p, slow = parameter(mcf.bf16x2, 3), torch.zeros(3, dtype=torch.bfloat16)

        class Looks(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                slow.copy_(p)

        with mcf.when_rounded("raise"), pytest.raises(mcf.errors.RoundedError, match="copy_"):
            Looks([p], {}).step()


def test_a_plain_model_keeps_what_it_loads_unless_that_is_to_raise():
    state = mcf.as_expansion(nn.Linear(3, 2), mcf.fp32x2).state_dict()
    model = nn.Linear(3, 2)
    model.load_state_dict(state)
    assert_same_terms(mcf.as_expansion(model, mcf.fp32x2).weight, state["weight"])
    with mcf.when_rounded("raise"), pytest.raises(RuntimeError, match="fp32x2"):
        nn.Linear(3, 2).load_state_dict(state)


@pytest.mark.with_float64("scaled formats compute in float64")
@pytest.mark.parametrize("write", ["copy_", "index", "add_", "out=", "_foreach_copy_"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_with_a_scale_are_rounded_with_a_word(write, dtype):
    """Their range is that of no type of 16 bits: 1e6 is infinite in float16, and 1e-9 zero."""
    x = mcf.as_expansion(torch.tensor([1e6, 1e-9]), mcf.scaling.scaled(torch.float16, tail=8))
    target = torch.zeros(2, dtype=dtype)
    ways = {
        "copy_": lambda: target.copy_(x),
        "index": lambda: target.__setitem__(slice(None), x),
        "add_": lambda: target.add_(x),
        "out=": lambda: torch.mul(x, 1.0, out=target),
        "_foreach_copy_": lambda: torch._foreach_copy_([target], [x]),
    }
    with mcf.when_rounded("raise"):
        if dtype.itemsize > 2:
            ways[write]()
            assert target[0] == pytest.approx(1e6, rel=1e-4)
        else:
            with pytest.raises(mcf.errors.RoundedError, match=r"scaled\(fp16i8\)"):
                ways[write]()
            assert not target.any()
