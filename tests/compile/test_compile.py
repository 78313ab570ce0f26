"""Compiled code computes what eager code computes, to the last bit."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import mcftensor as mcf
from support.helpers import (
    assert_same_terms,
    compiled_whole,
    exact,
    parameter,
    sample,
    small_model,
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def update(x, g, d):
    """Everything that optimizers do to an expansion, in place and out of place."""
    x.mul_(0.999)
    x.add_(g, alpha=-1e-3)
    x.lerp_(g, 0.1)
    x.addcmul_(g, g, value=1e-3)
    x.addcdiv_(g, d, value=-1e-3)
    x.sub_(g).div_(3)
    return torch.lerp(x * 2 + 1, x.abs().sqrt() / 3, 0.3)


def step_lists(xs, gs, ds):
    torch._foreach_mul_(xs, 0.999)
    torch._foreach_lerp_(xs, gs, 0.1)
    torch._foreach_addcmul_(xs, gs, gs, 1e-3)
    torch._foreach_addcdiv_(xs, gs, ds, [-1e-3, -2e-3])
    torch._foreach_add_(xs, gs, alpha=-0.1)


def every_kernel(x, y, z):
    """Every operation that expansions carry out by a kernel of their own, once."""
    arithmetic = [
        *(x + y, x - y, x * y, x / y, x + 0.1, 1 - x, x * 0.999, 2 / x, x.add(y, alpha=0.3)),
        *(x.reciprocal(), x.abs().sqrt(), x.square(), x**3, mcf.fma(x, y, 0.7)),
        *(torch.addcmul(x, y, z, value=0.1), torch.addcdiv(x, y, z, value=0.1)),
        *(torch.lerp(x, y, 0.3), torch.lerp(x, y, 0.8)),
    ]
    choices = [
        *(torch.maximum(x, y), torch.minimum(x, y), x.clamp(-0.5, 0.5), x.abs(), -x),
        *(torch.where(x > 0, x, 0.3), torch.nextafter(x, y), x.masked_fill(x > 0, 0.1)),
    ]
    moves = [x.t().clone(), torch.cat([x, y]), x[1:], x.flip(0), torch.full_like(x, 0.1)]
    order = [x.sort(0)[0], x.amax(0), x.topk(2, 0)[0], x.median()]
    answers = [x == y, x < y, x >= 0.1, x.argmax(), x.isnan()]
    return arithmetic + choices + moves + order, answers


class TestFunctions:
    @pytest.mark.parametrize(
        ("f", "backend"),
        [
            (mcf.bf16x2, "aot_eager"),
            (mcf.fp32x2, "aot_eager"),
            *(
                pytest.param(f, "inductor", marks=pytest.mark.slow)
                for f in (*mcf.formats.FORMATS, mcf.Format(torch.bfloat16, 4))
            ),
        ],
        ids=str,
    )
    def test_every_kernel(self, f, backend):
        operands = [sample(f, 6, 5, seed=i) for i in range(3)]
        results, answers = every_kernel(*operands)
        compiled = torch.compile(every_kernel, backend=backend, fullgraph=True)
        compiled_results, compiled_answers = compiled(*operands)
        for x, y in zip(results, compiled_results, strict=True):
            assert_same_terms(x, y)
        for x, y in zip(answers, compiled_answers, strict=True):
            assert torch.equal(x, y)

    @pytest.mark.thinned(of=3)
    def test_an_update(self, format):
        x = sample(format, 5, 3)
        g = sample(format, 5, 3, seed=1).components[0]
        d = g.abs() + 1
        y = x.clone()
        expected = update(x, g, d)
        result = torch.compile(update, fullgraph=True)(y, g, d)
        assert_same_terms(y, x)
        assert_same_terms(result, expected)

    def test_inlined_in_a_users_function(self):
        # What the user's own plain arithmetic rounds to is the compiler's affair; it is left alone.
        def users(x, g, d):
            y = update(x, g, d)
            return y.to(torch.float64) * 2, y

        x, g = sample(mcf.bf16x2, 5, 3), sample(mcf.bf16x2, 5, 3, seed=1).components[0]
        d = g.abs() + 1
        x2 = x.clone()
        plain, expansion = users(x, g, d)
        compiled_plain, compiled = torch.compile(users, fullgraph=True)(x2, g, d)
        assert_same_terms(x2, x)
        assert_same_terms(compiled, expansion)
        assert torch.equal(compiled_plain, plain)

    def test_lists(self):
        gs = [torch.randn(4).bfloat16(), torch.randn(3).bfloat16()]
        ds = [g.abs() + 1 for g in gs]
        xs = [sample(mcf.bf16x2, 4), sample(mcf.bf16x3, 3)]
        ys = [x.clone() for x in xs]
        step_lists(xs, gs, ds)
        torch.compile(step_lists, fullgraph=True)(ys, gs, ds)
        for x, y in zip(xs, ys, strict=True):
            assert_same_terms(x, y)

    @pytest.mark.thinned(of=2)
    def test_numbers_put_into_places(self, format):
        def place(x):
            return (
                nn.functional.pad(x, (1, 2), value=0.1),
                x.index_fill(0, torch.tensor([1]), 0.1),
                x.scatter(0, torch.tensor([[1]]), -1 / 3),
                nn.functional.pad(x, (0, 1)),
            )

        x = sample(format, 2, 3)
        compiled = torch.compile(place, fullgraph=True, backend="aot_eager")
        for y, z in zip(place(x), compiled(x), strict=True):
            assert_same_terms(y, z)

    def test_conversion_inside(self):
        def there_and_back(plain):
            x = mcf.as_expansion(plain, mcf.bf16x2)
            return mcf.as_plain(x * 0.999, torch.float32), mcf.as_plain(x * 0.999), x

        plain = torch.randn(7)
        *expected, x = there_and_back(plain)
        *results, y = torch.compile(there_and_back, fullgraph=True)(plain)
        assert_same_terms(x, y)
        assert [r.dtype for r in results] == [torch.float32, torch.bfloat16]
        assert all(map(torch.equal, results, expected))

    def test_layouts(self):
        def compute(x, g):
            return x * 2 + 1, x + g, g.t() * x.t(), mcf.fma(x, g, 3.0)

        x, g = sample(mcf.bf16x2, 6, 4).t(), torch.randn(4, 6).bfloat16()
        compiled = torch.compile(compute, fullgraph=True)
        for y, z in zip(compute(x, g), compiled(x, g), strict=True):
            assert_same_terms(y, z)
            assert y.stride() == z.stride() == z.components[1].stride()

    @pytest.mark.slow
    def test_taken_apart_before_the_first_compilation(self):
        """The compiler's front end is taught when it is there, not when a tensor is taken apart."""
        script = """
import torch, mcftensor as mcf
x = mcf.as_expansion(torch.linspace(-1, 1, 500, dtype=torch.float64), mcf.bf16x2)
y = torch.linspace(1, 2, 500).bfloat16()
x.__tensor_flatten__()
def f(x):
    return x.clone().addcmul_(y, y, value=-0.3)
z = torch.compile(f, fullgraph=True)(x)
assert torch.equal(f(x), z)
"""
        subprocess.run([sys.executable, "-c", script], check=True)

    def test_choices_and_numbers(self):
        def choose(x, y):
            z = torch.where(x > y, x, 0.3)
            return torch.maximum(z, y).clamp(-0.2, 0.9), x == y

        x, y = sample(mcf.bf16x2, 50), sample(mcf.bf16x2, 50, seed=1)
        expected, equal = choose(x, y)
        result, compiled_equal = torch.compile(choose, fullgraph=True)(x, y)
        assert_same_terms(result, expected)
        assert torch.equal(compiled_equal, equal)

    def test_a_parameter_keeps_its_role_and_terms(self):
        p = parameter(mcf.bf16x2, 4)
        q = copy.deepcopy(p)

        def decay(p, g, step_size):
            with torch.no_grad():
                p.mul_(0.999)
                p.addcdiv_(g, g.abs() + 1, value=step_size)
            return p.detach() * 0.5

        g = torch.ones(4, dtype=torch.bfloat16)
        expected = decay(p, g, torch.tensor(-1e-3))
        result = torch.compile(decay, fullgraph=True)(q, g, torch.tensor(-1e-3))
        assert result.role == expected.role == "parameter"
        assert_same_terms(p, q)
        assert_same_terms(result, expected)

    def test_states_made_from_a_parameter_are_expansions(self):
        """As optimizers of other packages make them within their step."""

        @torch.no_grad()
        def make(p):
            return torch.zeros_like(p), torch.full_like(p, 0.1), torch.ones_like(p)

        p = parameter(mcf.bf16x3, 4)
        compiled = torch.compile(make, fullgraph=True)(p)
        for x, y in zip(make(p), compiled, strict=True):
            assert x.role == y.role == "value"
            assert_same_terms(x, y)

    @pytest.mark.parametrize("name", ["add_", "addcmul_", "addcdiv_"])
    def test_a_number_in_a_tensor(self, name):
        """As the step size is when an optimizer is compiled."""

        def change(p, g, number):
            with torch.no_grad():
                if name == "add_":
                    p.add_(g, alpha=number)
                else:
                    getattr(p, name)(g, g, value=number)

        p = parameter(mcf.bf16x3, 6)
        q = copy.deepcopy(p)
        g = torch.randn(6).bfloat16() + 2
        change(p, g, 2.0**-12 / 3)
        torch.compile(change, fullgraph=True)(q, g, torch.tensor(2.0**-12 / 3, dtype=torch.float64))
        assert (q.components[1] != 0).any()
        assert_same_terms(p, q)

    @pytest.mark.parametrize("number", [-0.3, torch.tensor(-0.3, dtype=torch.float64)], ids=type)
    def test_operands_by_name_and_numbers(self, number):
        def change(x, g, number):
            x.addcmul_(tensor2=g, tensor1=g, value=number)
            x.add_(other=g, alpha=number)
            x.add_(g, alpha=2)
            x.add_(0.1, alpha=0.25)

        x, g = sample(mcf.bf16x2, 6), torch.randn(6).bfloat16()
        y = x.clone()
        change(x, g, -0.3)
        torch.compile(change, fullgraph=True)(y, g, number)
        assert_same_terms(y, x)


class TestModules:
    def test_forward_and_backward(self):
        model = mcf.as_expansion(small_model())
        reference = copy.deepcopy(model)
        x = torch.randn(3, 4).bfloat16()
        compiled = torch.compile(model, fullgraph=True)
        y, z = compiled(x), reference(x)
        assert type(y) is torch.Tensor
        torch.testing.assert_close(y, z)
        y.float().square().sum().backward()
        z.float().square().sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert type(p.grad) is torch.Tensor
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)

    def test_gradients_through_products_of_parameters_are_plain(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.tensor(1.5))

            def forward(self, x):
                return x * self.w + 0.25 * self.w * self.w

        model = torch.compile(mcf.as_expansion(Scaled()), fullgraph=True)
        model(torch.tensor(2.0, dtype=torch.bfloat16)).backward()
        assert type(model.w.grad) is torch.Tensor
        assert model.w.grad == 2.75

    def test_a_whole_training_step(self):
        model = mcf.as_expansion(small_model())
        optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), "plus")
        compiled = torch.compile(model, fullgraph=True)
        step = torch.compile(optimizer.step)
        x = torch.randn(16, 4).bfloat16()
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = (compiled(x).float() - 1).square().mean()
            loss.backward()
            step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


def eager(optimizer):
    return optimizer.step


def train(model, kind, keywords, mode, step_of):
    optimizer = kind(model.parameters(), lr=1e-2, **keywords)
    if mode:
        mcf.collage(optimizer, mode)
    step = step_of(optimizer)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        step()
    return list(model.parameters())


def run(kind, keywords, mode, step_of):
    return train(mcf.as_expansion(small_model()), kind, keywords, mode, step_of)


def whole(model):
    """All weights in float64, one after the other."""
    return torch.cat([exact(p.detach()).flatten() for p in model.parameters()])


FUSED, FOREACH, FOR_LOOP = {"fused": True}, {"foreach": True}, {"foreach": False}


@pytest.mark.filterwarnings("ignore:.*Profiler.*")
class TestOptimizerSteps:
    @pytest.mark.thinned(of=9)
    @pytest.mark.parametrize("mode", ["light", "plus", "full"])
    @pytest.mark.parametrize(
        ("kind", "keywords"),
        [
            (torch.optim.AdamW, {"amsgrad": True}),
            (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
            (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ],
        ids=lambda x: getattr(x, "__name__", "options"),
    )
    @pytest.mark.parametrize("path", [FUSED, FOREACH, FOR_LOOP], ids=["fused", "foreach", "loop"])
    def test_compiled_steps_move_weights_as_in_float64(self, kind, keywords, path, mode):
        """Which eager steps do too: compilers leave steps over expansions as they are."""
        graphs = CompileCounter()
        model = mcf.as_expansion(small_model())
        oracle = mcf.as_plain(copy.deepcopy(model), torch.float64)
        start = whole(model)
        keywords = keywords | path
        train(model, kind, keywords, mode, lambda o: torch.compile(o.step, backend=graphs))
        train(oracle, kind, keywords, None, eager)
        exact_move = whole(oracle) - start
        error = (whole(model) - start - exact_move).norm() / exact_move.norm()
        assert error <= (2**-13 if (path, mode) == (FUSED, "full") else 2**-8)
        assert graphs.frame_count == 0

    @pytest.mark.parametrize(
        "path", [FOREACH, pytest.param(FOR_LOOP, marks=pytest.mark.slow)], ids=str
    )
    def test_sgd_compiled_whole(self, path):
        expected = run(torch.optim.SGD, {"momentum": 0.9} | path, "full", eager)
        found = run(torch.optim.SGD, {"momentum": 0.9} | path, "full", compiled_whole)
        for p, q in zip(expected, found, strict=True):
            assert_same_terms(p, q)

    @pytest.mark.thinned(of=4)
    @pytest.mark.parametrize("mode", ["plus", "full"])
    @pytest.mark.parametrize("path", [FOREACH, FOR_LOOP], ids=["foreach", "loop"])
    def test_adamw_compiled_whole(self, path, mode):
        """torch computes bias corrections in float64 in eager code and in float32 when compiling.

        1 - 0.999 then has a relative error of 2^-14, as for plain float32 tensors; with the same
        numbers the operations give the same bits (`TestFunctions`).
        """
        expected = run(torch.optim.AdamW, path, mode, eager)
        found = run(torch.optim.AdamW, path, mode, compiled_whole)
        for p, q in zip(expected, found, strict=True):
            tail = exact(p).abs() * 2.0 ** (1 - p.format.precision)
            moved = 3e-2 * (2.0**-14 if mode == "full" else 2.0**-8)
            assert ((exact(p) - exact(q)).abs() <= tail + moved).all()


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16x3, mcf.bf16i16, mcf.bf16i8], ids=str)
@pytest.mark.unwatched("the mode that watches has functions compiled again")
def test_functions_that_a_step_compiles(format):
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def orthogonal(x, g):
        return x * 2 + g.square() @ x

    class Stepping(torch.optim.Optimizer):
        def __init__(self, params, function):
            super().__init__(params, {})
            self.function = function

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                m = p.grad.lerp(p, 0.1)
                update = self.function((m * 0.9).add(p), p.grad)
                p.mul_(0.9).add_(update, alpha=-0.1)

    left = []
    for function in (orthogonal, lambda x, g: x * 2 + g.square() @ x):
        params = [parameter(format, 4, 4, seed=i) for i in range(3)]
        for i, p in enumerate(params):
            p.grad = sample(mcf.bf16x2, 4, 4, seed=9 + i).components[0]
        optimizer = Stepping(params, function)
        for _ in range(4):
            optimizer.step()
        left.append([[x.tolist() for x in p.components] for p in params])
    assert left[0] == left[1]
    assert counter.frame_count == 1


def test_what_a_graph_leaves_to_eager_code():
    """Algorithms of linear algebra read numbers, and nothing of the library begins a graph."""
    x = sample(mcf.fp64x2, 4, 4) + mcf.as_expansion(4 * torch.eye(4).double(), mcf.fp64x2)
    counter = CompileCounter()

    def solved(x):
        lower = torch.linalg.cholesky(x @ x.t())
        return torch.linalg.solve(x, lower * 2) + torch.linalg.qr(x).R + torch.linalg.det(x)

    assert_same_terms(torch.compile(solved, backend=counter)(x), solved(x))
    assert counter.frame_count <= 4
