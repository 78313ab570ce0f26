"""Stock optimizers on scaled parameters, gradients and states, against float64."""

import copy

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.scales import FP16, exact, is_scaled, normal, rms

TAILED = mcf.scaling.scaled(torch.float16, tail=8)
PATHS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.01}),
}


def steps(kind, path, formats, k=0, n=12):
    """What a parameter comes to on given gradients, of the size 2^k, beside float64."""
    cls, options = OPTIMIZERS[kind]
    options = {**options, **PATHS[path]}
    if k:
        options["lr"] *= 1 if cls is not torch.optim.SGD else 2.0**-k
        options["weight_decay"] = 0.0
        if cls is not torch.optim.SGD:
            options["eps"] = 1e-8 * 2.0**k
    start = [normal(7, 5).components[0].double(), normal(9, seed=1).components[0].double()]
    scaled = [nn.Parameter(mcf.as_expansion(x, formats)) for x in start]
    plain = [nn.Parameter(exact(x)) for x in scaled]
    begin = [p.detach().clone() for p in plain]
    optimizers = cls(scaled, **options), cls(plain, **options)
    for i in range(n):
        for j, (p, q) in enumerate(zip(scaled, plain, strict=True)):
            p.grad = normal(*p.shape, exponent=k, seed=10 * i + j)
            q.grad = exact(p.grad)
        for optimizer in optimizers:
            optimizer.step()
    return scaled, plain, begin, optimizers


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps(kind, path):
    scaled, plain, begin, (optimizer, _) = steps(kind, path, FP16)
    for p, q, x in zip(scaled, plain, begin, strict=True):
        moved, intended = exact(p) - x, q.detach() - x
        # roundings of parameters near 1 to 11 bits, two a step, beside steps of 0.01
        assert (moved - intended).norm() <= 0.06 * intended.norm()
        assert p.format is FP16
        assert torch.isfinite(p.components[0]).all()
    for state in optimizer.state.values():
        for name, x in state.items():
            assert name == "step" or (is_scaled(x) and x.dtype == torch.float16)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["adamw", "amsgrad", "sgd"])
def test_scaled_expansions_keep_22_bits_of_a_step(kind, path):
    scaled, plain, begin, _ = steps(kind, path, mcf.scaling.scaled(mcf.fp16x2))
    for p, q, x in zip(scaled, plain, begin, strict=True):
        moved, intended = exact(p) - x, q.detach() - x
        assert (moved - intended).norm() <= 3e-5 * intended.norm()


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["adamw", "amsgrad", "sgd", "momentum"])
def test_integer_tails_keep_19_bits_of_a_step(kind, path):
    """And what of their states is float16: momentum has 11 bits."""
    scaled, plain, begin, (optimizer, _) = steps(kind, path, TAILED)
    bound = 1e-4 if kind == "sgd" else 1e-3
    for p, q, x in zip(scaled, plain, begin, strict=True):
        moved, intended = exact(p) - x, q.detach() - x
        assert (moved - intended).norm() <= bound * intended.norm()
        assert p.format is TAILED
    for state in optimizer.state.values():
        assert all(x.format is FP16 for name, x in state.items() if name != "step")


def test_products_take_the_leading_float16_of_an_integer_tail():
    p, x = nn.Parameter(mcf.as_expansion(exact(normal(4, 6)) / 3, TAILED)), normal(5, 6, seed=1)
    leading = p.components[0].double() * 2.0 ** p.exponent.item()
    made = nn.functional.linear(x, p)
    made.backward(torch.ones_like(made))
    assert (exact(made) - exact(x) @ leading.t()).abs().max() <= 2.0**-10 * 8
    assert p.grad.format is FP16


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize("k", [-200, -80, -40, 60, 200])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum"])
def test_gradients_of_any_size(kind, path, k):
    scaled, plain, begin, (optimizer, _) = steps(kind, path, FP16, k)
    for p, q, x in zip(scaled, plain, begin, strict=True):
        moved, intended = exact(p) - x, q.detach() - x
        assert (moved - intended).norm() <= 0.06 * intended.norm()
    for state in optimizer.state.values():
        for name, x in state.items():
            assert name == "step" or rms(x) >= 0.9


@pytest.mark.parametrize("path", PATHS)
def test_second_moments_have_room_below(path):
    p = nn.Parameter(normal(3))
    p.grad = mcf.as_expansion(torch.tensor([1.0, 2.0**-12, 2.0**-17]), FP16)
    optimizer = torch.optim.AdamW([p], **PATHS[path])
    optimizer.step()
    state = optimizer.state[p]["exp_avg_sq"]
    assert (exact(state) != 0).all()
    assert 2.0**13 <= state.components[0].max() < 2.0**15


def test_stochastic_rounding_keeps_small_steps_in_the_mean():
    start = torch.full((4000,), 1.5)
    for rounding, kept in (("nearest", 0.0), ("stochastic", 1.0)):
        p = nn.Parameter(
            mcf.as_expansion(start, mcf.scaling.scaled(torch.float16, rounding=rounding))
        )
        optimizer = torch.optim.SGD([p], lr=1.0)
        for _ in range(50):
            p.grad = mcf.as_expansion(torch.full((4000,), 2.0**-13), FP16)
            optimizer.step()
        moved = (1.5 - exact(p)).mean().item()
        assert moved == pytest.approx(kept * 50 * 2.0**-13, rel=0.02)


def test_states_of_stochastic_parameters_are_rounded_to_nearest():
    p = nn.Parameter(
        mcf.as_expansion(torch.ones(3), mcf.scaling.scaled(torch.float16, rounding="stochastic"))
    )
    assert torch.zeros_like(p).format is FP16
    assert (p * 2).format is FP16
    assert p.detach().format is p.format


def test_clipping_and_accumulation():
    p, q = nn.Parameter(normal(40, exponent=-3)), nn.Parameter(normal(5, exponent=2, seed=1))
    (p.sum() * 3).backward()
    (p * p).sum().backward()
    q.grad = normal(5, exponent=10)
    gradients = [exact(p) * 2 + 3, exact(q.grad)]
    assert torch.allclose(exact(p.grad), gradients[0], rtol=2e-3, atol=1e-3)
    total = torch.nn.utils.clip_grad_norm_([p, q], 1.0)
    expected = torch.cat(gradients).norm()
    assert total.item() == pytest.approx(expected.item(), rel=1e-3)
    for x, y in zip((p, q), gradients, strict=True):
        assert torch.allclose(exact(x.grad), y / expected, rtol=4e-3, atol=1e-6)


def test_sums_of_many_gradients():
    p = nn.Parameter(normal(3))
    with mcf.accumulate_gradients(nn.ParameterList([p])):
        for size in (2.0**-50, *[2.0**-62] * 64):
            (p * size).sum().backward()
    assert p.grad.format is mcf.scaling.scaled(mcf.fp16x2)
    assert (exact(p.grad) == 2.0**-50 * (1 + 2.0**-6)).all()  # one float16 stays as it is
    optimizer = torch.optim.SGD([p], lr=2.0**50)
    before = exact(p)
    optimizer.step()
    assert (exact(p) - before + 1 + 2.0**-6).abs().max() <= 2.0**-10


@pytest.mark.parametrize("path", PATHS)
def test_a_run_goes_on_with_the_same_bits(path, tmp_path):
    scaled, _, _, (optimizer, _) = steps("adamw", path, FP16, n=3)
    torch.save((scaled, optimizer.state_dict()), tmp_path / "run")
    others, state = torch.load(tmp_path / "run", weights_only=True)
    again = torch.optim.AdamW(others)
    again.load_state_dict(state)
    for p, q in zip(scaled, others, strict=True):
        p.grad = normal(*p.shape, seed=77)
        q.grad = copy.deepcopy(p.grad)
    optimizer.step()
    again.step()
    for p, q in zip(scaled, others, strict=True):
        assert torch.equal(exact(p), exact(q))
