"""Formats that users make do all that named ones do."""

import copy
import io

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, sample, small_model

OWN = [
    mcf.Format(torch.bfloat16, 4),
    mcf.Format(torch.bfloat16, 6),
    mcf.Format(torch.float16, 3),
    mcf.Format(torch.float32, 4),
    mcf.Format(torch.float64, 3),
    mcf.Format(torch.bfloat16, 2, rounding="stochastic"),
    mcf.Format(torch.float32, 3, rounding="stochastic"),
]
every_format = pytest.mark.parametrize("f", OWN, ids=lambda f: f.name)


QUICK = [(OWN[0], "fused"), (OWN[5], "fused"), (OWN[5], "foreach")]


@pytest.mark.parametrize(
    ("f", "path"),
    [
        pytest.param(f, path, marks=[] if (f, path) in QUICK else pytest.mark.slow)
        for f in OWN
        for path in ("for-loop", "foreach", "fused")
        if f.terms < 6
    ],
    ids=str,
)
def test_training(f, path):
    """Every path moves weights as float64 does, to the precision of the format."""
    options = {"foreach": path == "foreach", "fused": path == "fused"}
    model = mcf.as_expansion(small_model(), f)
    reference = copy.deepcopy(small_model()).double()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        q.data = exact(p.detach())
    before = [q.detach().clone() for q in reference.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    oracle = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    for i in range(3):
        generator = torch.Generator().manual_seed(i)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(f.base) + 1
            q.grad = p.grad.double()
        optimizer.step()
        oracle.step()
    # Of weights of order one, moved by some 1e-2. The second moments of float16, some 1e-3, have
    # 2^-24 as their last place.
    tolerance = {torch.bfloat16: 4e-3 if f.terms == 2 else 1e-6, torch.float16: 3e-3}
    for p, q, start in zip(model.parameters(), reference.parameters(), before, strict=True):
        assert p.format == optimizer.state[p]["exp_avg_sq"].format == f
        moved = (q.detach() - start).norm()
        error = (exact(p.detach()) - q.detach()).norm() / moved
        assert error <= tolerance.get(f.base, 1e-11)


@every_format
def test_models_compute_save_and_load(f):
    model = mcf.as_expansion(small_model(), f)
    model(torch.randn(3, 4, dtype=f.base)).sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = mcf.as_expansion(small_model(seed=1), f)
    other.load_state_dict(torch.load(file, weights_only=True))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_terms(p.detach(), q.detach())


@every_format
def test_values_compute(f):
    x = sample(f, 6, 5)
    tolerance = max(2.0**-50, 2.0 ** -(f.precision - 6))
    for ours, plain in (
        (x.sum(0), exact(x).sum(0)),
        (x @ x.t(), exact(x) @ exact(x).t()),
        (x.mean(), exact(x).mean()),
        (x.sort(1)[0], exact(x).sort(1)[0]),
        (torch.where(x > 0, x, 0.1), torch.where(exact(x) > 0, exact(x), 0.1)),
    ):
        assert ours.format == f
        assert (exact(ours) - plain).abs().max() <= tolerance * (1 + plain.abs().max()) * 8
    if f.precision <= 48:
        assert (exact(x.exp()) - exact(x).exp()).abs().max() <= tolerance * 100
    else:
        with pytest.raises(NotImplementedError, match=f.name):
            x.exp()


@every_format
def test_exact_numbers(f):
    x = mcf.from_exact(["1/3", "0.1"], f)
    assert mcf.as_expansion(x, f).format == f
    assert_same_terms(mcf.from_exact(mcf.to_fraction(x), f), x)
    assert "format=" + f.name in repr(x)


@pytest.mark.parametrize("f", [OWN[0], OWN[3]], ids=lambda f: f.name)
def test_collage_and_compile(f):
    torch.compiler.reset()
    weight = nn.Parameter(sample(f, 7))
    its_oracle = nn.Parameter(exact(weight.detach()))
    optimizer = mcf.collage(torch.optim.AdamW([weight], lr=1e-2, fused=True), "full")
    oracle = torch.optim.AdamW([its_oracle], lr=1e-2, fused=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for i in range(2):
        weight.grad = torch.full((7,), 0.5 + i, dtype=f.base)
        its_oracle.grad = weight.grad.double()
        step()
        oracle.step()
    assert optimizer.state[weight]["exp_avg_sq"].format == f
    torch.testing.assert_close(
        exact(weight.detach()), its_oracle.detach(), rtol=2**-22, atol=2**-22
    )


def test_the_longest_format_meets_a_stochastic_one():
    x, y = sample(OWN[1], 4), sample(OWN[5], 4)
    for result in (x + y, y + x, torch.cat([x, y]), torch.maximum(x, y), torch.where(x > y, x, y)):
        assert result.format == OWN[1]
    assert x.add_(y).format == OWN[1]
    assert y.add_(x).format == OWN[5]
