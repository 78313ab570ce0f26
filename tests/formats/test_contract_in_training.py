"""The contract of formats in programs: optimizers, files, autograd, the compiler, processes."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import mcftensor as mcf
from support import contract
from support.contract import (
    assert_near,
    assert_same,
    by,
    fractions,
    loss,
    makes,
    numbers,
    over,
    parameter,
    propagates,
    sample,
    saved_and_loaded,
    shares,
    unit,
)

# ---------------------------------------------------------------------------------- optimizers

PATHS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SMALL, LARGE = (5, 7), (70, 320)  # eager blocks take the first, kernels the second


def train(weights, path, steps, kind=torch.optim.AdamW, mode=None):
    """Steps over weights that are given; the optimizer, with the same gradients for all."""
    optimizer = kind(weights, lr=1e-2, **PATHS[path])
    if mode is not None:
        mcf.collage(optimizer, mode)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in weights:
            g = torch.rand(p.shape, generator=generator) + 0.5
            p.grad = _gradient_for(p, g.bfloat16())
        optimizer.step()
    return optimizer


def _gradient_for(p, g):
    if isinstance(p, mcf.scaling.ScaledTensor):
        return mcf.as_expansion(g, p.format.lead)
    return g.to(p.dtype)


def momentum(weights, **options):
    return torch.optim.SGD(weights, momentum=0.9, weight_decay=0.01, **options)


class TestSteps:
    @pytest.mark.thinned(of=12)
    @over("parameters")
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, momentum], ids=["AdamW", "SGD"])
    def test_small_tensors(self, format, path, kind):
        self.check(format, SMALL, path, kind)

    @pytest.mark.thinned(of=9)
    @over("parameters")
    @pytest.mark.parametrize("path", PATHS)
    def test_large_tensors(self, format, path):
        self.check(format, LARGE, path, torch.optim.AdamW)

    def check(self, format, shape, path, kind):
        """Weights move as those of float64 do, but for what the formats round away."""
        p = parameter(format, *shape)
        start, writes = numbers(p), 0 if propagates(format) or p.writes is None else p.writes.item()
        q = nn.Parameter(start.clone())
        steps = 3
        optimizer = train([p], path, steps, kind)
        train([q], path, steps, kind)
        assert p.format is format
        if kind is torch.optim.AdamW:
            state = optimizer.state[p]
            assert state["exp_avg"].format is state["exp_avg_sq"].format is format.of_states
            if format.rounding == "balanced":  # the other paths decay a weight, and then move it
                assert p.writes == writes + steps * (1 if path == "fused" else 2)
        moved = (q.detach() - start).abs().max()
        # A step rounds a weight below 2 at most twice, and a state by a share of itself.
        weights = steps * 2 * 2 * (unit(format) + 2.0**-24)
        own = format.lead if propagates(format) and kind is momentum else format.of_states
        state = unit(own) + 2.0**-23  # momentum is in the format of the gradient
        if not propagates(format):  # second moments, some 2^-12, may be small for the type
            state += mcf.finfo(format.of_states).smallest_subnormal * 2.0**12
        of_states = steps * 4 * state * moved
        assert (numbers(p) - q.detach()).abs().max() <= weights + of_states
        assert moved > 0.01

    @over("parameters", "modes")
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("mode", ["full", "plus", "light", "compact", "compact4"])
    @pytest.mark.thinned(of=12)
    def test_modes(self, format, mode, path):
        p = parameter(format, 6, 64)
        q = nn.Parameter(numbers(p))
        optimizer = train([p], path, 3, mode=mode)
        train([q], "for-loop", 3)
        state = optimizer.state[p]
        expected = {
            "full": (format.of_states,) * 2,
            "plus": (None, format.of_states),
            "light": (None, None),
            "compact": (mcf.mxfp8, mcf.ue5m3),
            "compact4": (mcf.q4, mcf.ue4),
        }[mode]
        found = tuple(getattr(state[n], "format", None) for n in ("exp_avg", "exp_avg_sq"))
        assert found == expected
        shares_of_states = {"full": format.of_states.precision, "compact": 4, "compact4": 1}.get(
            mode, 8
        )
        bound = 12 * (unit(format) + 2.0**-24) + 0.06 * 2.0 ** (2 - min(shares_of_states, 8))
        assert (numbers(p) - q.detach()).abs().max() <= bound


# ------------------------------------------------------------------------ files and other copies


class Small(nn.Module):
    """Matrices, and vectors beside them where the format has some."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(40, 6), nn.Linear(6, 2, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def converted(format, seed=0):
    return (
        mcf.scaling.scalify(Small(seed), format)
        if propagates(format)
        else mcf.as_expansion(Small(seed), format)
    )


class TestFiles:
    @pytest.mark.thinned(of=3)
    @over("parameters", "pickles")
    @pytest.mark.parametrize("protocol", [2, 3, pickle.HIGHEST_PROTOCOL])
    def test_parameters_stay_parameters(self, format, protocol):
        x = sample(format, 4, 40)
        x.note = "kept"
        assert pickle.loads(pickle.dumps(x, protocol)).note == "kept"
        for p in (x, nn.Parameter(x), nn.Parameter(x, requires_grad=False)):
            for q in (copy.deepcopy(p), pickle.loads(pickle.dumps(p, protocol))):
                assert isinstance(q, nn.Parameter) == isinstance(p, nn.Parameter)
                assert q.requires_grad == p.requires_grad
                assert propagates(format) or q.role == p.role
                assert_same(q, p)

    @over("terms")
    def test_names_of_terms(self, format):
        terms = mcf.checkpoint.as_terms({"x": sample(format, 4, 40)})
        others = [f"x.{format.name}.{c.name}" for c in format.components[1:]]
        assert [name for name in terms if not name.endswith(".writes")] == ["x", *others]

    @over()
    def test_save_file(self, format, tmp_path):
        x = sample(format, 4, 40)
        mcf.save_file({"x": x}, tmp_path / "x.safetensors")
        assert_same(mcf.load_file(tmp_path / "x.safetensors")["x"], x)

    @pytest.mark.thinned(of=3)
    @over("parameters")
    @pytest.mark.parametrize("kind", ["torch", "safetensors", "state dict"])
    def test_models(self, format, kind, tmp_path):
        model, other = converted(format), converted(format, 1)
        with torch.no_grad():
            model.first.weight.mul_(0.75)
        if kind == "safetensors":
            mcf.save_file(model, tmp_path / "x.safetensors")
            state = mcf.load_file(tmp_path / "x.safetensors")
        else:
            state = model.state_dict()
            state = saved_and_loaded(state) if kind == "torch" else state
        other.load_state_dict(state)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert_same(p, q)

    @over("parameters")
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.thinned(of=12)
    def test_a_run_goes_on_with_the_same_bits(self, format, path):
        """Whatever the generator has drawn, unless rounding draws from it."""

        def go(p, optimizer, steps):
            for step in steps:
                generator = torch.Generator().manual_seed(step)
                g = torch.randn(p.shape, generator=generator).bfloat16()
                p.grad = _gradient_for(p, g)
                if format.rounding == "stochastic":
                    torch.manual_seed(step)
                optimizer.step()
                torch.rand(1)

        p, q = parameter(format, 5, 7), parameter(format, 5, 7, seed=1)
        first, second = (torch.optim.AdamW([x], lr=1e-2, **PATHS[path]) for x in (p, q))
        go(p, first, range(2))
        states = saved_and_loaded([{"p": p.detach()}, first.state_dict()])
        with torch.no_grad():
            q.copy_(states[0]["p"])
        second.load_state_dict(states[1])
        go(p, first, range(2, 4))
        go(q, second, range(2, 4))
        assert_same(p, q)


# ------------------------------------------------------- autograd, the compiler, several processes


class TestAutograd:
    @over("parameters", "plain gradients")
    def test_gradients_are_plain(self, format):
        """Those of a plain model of the compute tensors of parameters, bit by bit."""
        model = converted(format)
        plain = Small().to(format.dtype)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.data = (p + torch.zeros(p.shape, dtype=p.dtype)).detach()
        x = torch.randn(3, 40).to(format.dtype)
        for m in (model, plain):
            y = m(x)
            assert y.dtype == format.dtype
            y.float().square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(p.grad) is torch.Tensor
            assert torch.equal(p.grad, q.grad)

    @over("parameters", only=shares)
    @by(
        {
            "t": lambda x: x.t(),
            "row": lambda x: x[1],
            "columns": lambda x: x[:, 3:20],
            "flat": lambda x: x.view(-1),
            "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1),
            "of a view": lambda x: x.t()[1:5].t(),
            "unbind": lambda x: x.unbind()[2],
            "chunk": lambda x: x.chunk(3, dim=1)[1],
        }
    )
    def test_views_across_the_rows_of_a_parameter(self, format, do):
        """They show the compute tensor, hold the number, and are not written to."""
        p = parameter(format, 5, 40)
        y, zeros = do(p), torch.zeros(5, 40, dtype=p.dtype)
        computed = do((p + zeros).detach())
        assert (y.shape, y.stride(), y.role) == (computed.shape, computed.stride(), "parameter")
        assert torch.equal(y + do(zeros), computed)
        assert torch.equal(numbers(y), do(numbers(p)))
        (y * torch.ones(y.shape, dtype=p.dtype)).sum().backward()
        q = torch.zeros(5, 40, requires_grad=True)
        do(q).sum().backward()
        assert torch.equal(p.grad.float(), q.grad)
        with torch.no_grad():
            p.mul_(-0.3)
            assert torch.equal(numbers(y), do(numbers(p)))
            before = contract.bits(p)
            for write in (
                lambda y: y.add_(1),
                lambda y: y.zero_(),
                lambda y: y.copy_(torch.ones(y.shape)),
                lambda y: y.normal_(),
            ):
                with pytest.raises(TypeError, match="crosses the rows of a parameter"):
                    write(do(p))
        assert contract.bits(p) == before

    @pytest.mark.thinned(of=4)
    @over("parameters")
    def test_training_goes_down(self, format):
        model = converted(format)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        x = torch.randn(16, 40)
        x = mcf.as_expansion(x, format.lead) if propagates(format) else x.to(format.dtype)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            value = (model(x) - 1).square().mean()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        assert losses[-1] < losses[0] / 2


class TestCompiler:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch.compiler.reset()

    @pytest.mark.thinned(of=10)
    @over()
    def test_an_update(self, format):
        def update(x, g):
            x.mul_(0.75)
            x.add_(g, alpha=0.5)
            x.addcmul_(g, g, value=0.25)
            x.lerp_(g, 0.25)
            x.addcdiv_(g, g, value=0.25)
            torch._foreach_mul_([x], 0.5)
            torch._foreach_add_([x], [g])
            x[1:].sub_(g[1:])
            return x.clone()

        g = torch.rand(3, 40)
        g = mcf.as_expansion(g, format.lead) if propagates(format) else g.bfloat16()
        x = sample(format, 3, 40)
        y = x.clone()
        torch.manual_seed(0)
        expected = update(x, g)
        torch.manual_seed(0)
        found = torch.compile(update, backend="aot_eager", fullgraph=True)(y, g)
        if format.rounding == "stochastic" or not makes(format, "compiled bits"):
            assert (numbers(y) - numbers(x)).abs().max() <= 8 * unit(format)
        else:
            assert_same(y, x)
            assert_same(found, expected)

    @pytest.mark.thinned(of=8)
    @over("parameters", "plain gradients")
    def test_a_module(self, format):
        model = converted(format)
        x = torch.randn(3, 40).to(format.dtype)
        expected = model(x)
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(found, expected)
        found.float().sum().backward()
        assert all(type(p.grad) is torch.Tensor for p in model.parameters())

    @pytest.mark.thinned(of=8)
    @over("parameters", "plain gradients", only=lambda f: f.rounding != "stochastic")
    def test_a_step(self, format):
        p = parameter(format, 5, 7)
        q = copy.deepcopy(p)
        optimizers = [torch.optim.AdamW([x], lr=1e-2, fused=True) for x in (p, q)]
        step = torch.compile(optimizers[1].step, backend="aot_eager")
        for i in range(2):
            p.grad = q.grad = torch.full((5, 7), 0.5 + i, dtype=p.dtype)
            optimizers[0].step()
            step()
        assert_same(q, p)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """One process, as a group."""
    path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class TestProcesses:
    @pytest.mark.thinned(of=2)
    @over("processes")
    def test_distributed_tensors(self, format, mesh):
        x = sample(format, 5, 40)
        for placement in (Replicate(), Shard(0)):
            y = distribute_tensor(x, mesh, [placement])
            assert y.to_local().format is format
            assert_same(y.full_tensor(), x)
            assert_same(copy.deepcopy(y).full_tensor(), x)
            y = distribute_tensor(x.clone(), mesh, [placement])
            y.mul_(0.75)
            assert_near(y.full_tensor(), [v * 3 / 4 for v in fractions(x)], 2 * loss(format))

    @over("processes")
    def test_collectives(self, format, mesh):
        x = sample(format, 5, 40)
        y = x.clone()
        dist.broadcast(y, 0)
        assert_same(y, x)
        dist.all_reduce(y)
        assert (numbers(y) - numbers(x)).abs().max() <= 2 * loss(format) * 2
