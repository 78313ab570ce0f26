"""Stock SGD, Adam and AdamW over expansions, against themselves in float64."""

import importlib
from fractions import Fraction

import pytest
import torch
from torch import nn

import mcftensor as mcf
from common.probes import Strategy, decay, displacement, frozen_weight, second_moment
from mcftensor.passes.optimizer_steps import integer_power
from support.helpers import assert_same_terms, exact, sample, small_model
from support.rotation import rotated

PATHS = ["for-loop", "foreach", "fused"]
FLAGS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("path", PATHS)
class TestProbes:
    @pytest.mark.thinned(of=4)
    @pytest.mark.parametrize(
        ("format", "mode", "allowed"),
        [
            (mcf.bf16x3, "full", 1e-4),
            (mcf.bf16x2, "full", 1e-2),
            (mcf.bf16x2, "plus", 2e-2),
            (mcf.bf16x2, "light", 4e-2),
        ],
        ids=lambda x: getattr(x, "name", str(x)),
    )
    def test_a_weight_of_one_moves(self, path, format, mode, allowed):
        assert abs(frozen_weight(Strategy(format, path, mode)) - 1) <= allowed

    def test_a_plain_one_does_not(self, path):
        assert frozen_weight(Strategy(torch.bfloat16, path)) == 0
        assert frozen_weight(Strategy(torch.float32, path)) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("kind", ["ones", "small"])
@pytest.mark.parametrize("path", rotated(PATHS))
def test_decay(path, kind):
    ratio, _ = decay(Strategy(mcf.bf16x3, path), kind, count=512)
    assert abs(ratio - 0.99005) <= 1e-4
    _, moved = decay(Strategy(mcf.bf16x2, path), kind, count=512)
    assert abs(moved - 1) <= 0.12
    if path == "fused":
        plain, _ = decay(Strategy(torch.bfloat16, path), kind, count=512)
        assert plain == 1


class TestDisplacement:
    """Bounds for 1000 steps; the errors at other learning rates are in the documentation."""

    COUNT = 4096

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize("kind", ["small", "ones"])
    @pytest.mark.parametrize(
        ("path", "mode", "bounds"),
        [
            ("fused", "full", (1.5e-4, 4e-3)),
            ("fused", "plus", (1e-3, 4e-3)),
            ("for-loop", "full", (1e-3, 8e-2)),
            ("foreach", "full", (1e-3, 8e-2)),
        ],
    )
    def test_two_terms(self, path, mode, bounds, kind):
        strategy = Strategy(mcf.bf16x2, path, mode)
        errors = displacement([strategy], kind, 1e-4, 0.999, self.COUNT)
        assert errors[strategy.name] <= bounds[("small", "ones").index(kind)]

    @pytest.mark.thinned(of=4)
    @pytest.mark.parametrize("kind", ["small", "ones"])
    @pytest.mark.parametrize(("lr", "beta2"), [(1e-4, 0.999), (1e-5, 0.95)])
    @pytest.mark.parametrize("path", rotated(PATHS))
    def test_three_terms_beat_float32_four_times(self, kind, lr, beta2, path):
        plain, strategy = Strategy(torch.float32, "for-loop"), Strategy(mcf.bf16x3, path)
        errors = displacement([plain, strategy], kind, lr, beta2, self.COUNT)
        assert errors[plain.name] <= 3e-2
        assert errors[strategy.name] <= errors[plain.name] / 4


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("beta2", [0.999, 0.95, 0.99])
def test_second_moment_neither_freezes_nor_drifts(beta2):
    assert abs(second_moment(Strategy(mcf.bf16x2, "fused", "plus"), beta2) - 1) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("path", ["for-loop", "foreach"])
@pytest.mark.parametrize("beta2", [0.95, 0.99, 0.999])
def test_second_moment_in_the_other_paths(path, beta2):
    assert abs(second_moment(Strategy(mcf.bf16x2, path, "plus"), beta2) - 1) <= 1e-3


def test_plain_second_moment_does_drift():
    assert second_moment(Strategy(torch.bfloat16), 0.999) > 1.5


class TestBytesPerParameter:
    """Measured from the tensors, gradient included."""

    @pytest.mark.parametrize(
        ("mode", "expected"), [("light", 10), ("plus", 12), ("full", 14), (None, 14)]
    )
    def test_of_adamw_over_bf16x2(self, mode, expected):
        model = mcf.as_expansion(nn.Linear(64, 64), mcf.bf16x2)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if mode:
            mcf.collage(optimizer, mode)
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        tensors = [t for p in model.parameters() for t in (p, p.grad)]
        tensors += [x for s in optimizer.state.values() for k, x in s.items() if k != "step"]
        terms = [t for x in tensors for t in getattr(x, "components", (x,))]
        held = sum(t.untyped_storage().nbytes() for t in terms)
        assert held / sum(p.numel() for p in model.parameters()) == expected


ADAM = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
]
SGD = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.5, "maximize": True},
]
OPTIMIZERS = [
    *((torch.optim.Adam, k) for k in ADAM),
    *((torch.optim.AdamW, k) for k in ADAM),
    *((torch.optim.SGD, k) for k in SGD),
]


def run(kind, keywords, path, weights, *, steps=6, lr=1e-2, collage=None):
    optimizer = kind(weights, lr=lr, **keywords, **FLAGS[path])
    if collage:
        mcf.collage(optimizer, collage)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for w in weights:
            gradient = torch.randn(w.shape, generator=generator).bfloat16()
            w.grad = gradient.to(device=w.device, dtype=w.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.thinned(of=18)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "keywords"),
    OPTIMIZERS,
    ids=lambda x: ("-".join(x) or "plain") if isinstance(x, dict) else x.__name__,
)
def test_every_option_does_what_torch_does(kind, keywords, path, device):
    formats = [mcf.bf16x2, mcf.bf16x3, mcf.fp16x2]
    for format in formats:
        start = sample(format, 40, device=device)
        expansion = nn.Parameter(start.clone())
        reference = nn.Parameter(exact(start))
        run(kind, keywords, path, [expansion], collage="full")
        run(kind, keywords, "for-loop", [reference])
        error = (exact(expansion) - reference.detach()).abs().max()
        # L2 decay adds the leading term to a plain gradient outside of the fused path. In fp16x2 a
        # second moment of 1e-3 and less is near the end of the range, and loses bits.
        loose = "weight_decay" in keywords and kind is not torch.optim.AdamW and path != "fused"
        short = format == mcf.fp16x2 and kind is not torch.optim.SGD
        bound = 2e-3 if loose or short else 40 * max(format.u**format.terms, 2.0**-25)
        assert error <= bound, format.name


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("format", [mcf.fp32x2, mcf.fp32x3, mcf.fp64x2], ids=lambda f: f.name)
@pytest.mark.parametrize("path", PATHS)
def test_wider_bases(format, path):
    start = sample(format, 20)
    for kind, keywords in ((torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, SGD[3])):
        expansion = nn.Parameter(start.clone())
        reference = nn.Parameter(exact(start))
        run(kind, keywords, path, [expansion], collage="full")
        run(kind, keywords, "for-loop", [reference])
        error = (exact(expansion) - reference.detach()).abs().max()
        # L2 decay outside of the fused path goes through the leading term; AdamW has none.
        loose = kind is torch.optim.SGD and path != "fused"
        assert error <= 40 * max(format.u / 20 if loose else format.u**2, 2.0**-50)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("path", PATHS)
def test_a_learning_rate_in_a_tensor(kind, path):
    start = sample(mcf.bf16x2, 30)
    by_number, by_tensor = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    if path == "foreach" and kind is not torch.optim.SGD:
        pytest.skip("torch refuses a tensor lr with foreach unless capturable")
    run(kind, {}, path, [by_number], lr=2.0**-7)
    run(kind, {}, path, [by_tensor], lr=torch.tensor(2.0**-7))
    torch.testing.assert_close(exact(by_tensor), exact(by_number), rtol=0, atol=4 * 2.0**-17)


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_lists_mix_formats_and_plain_parameters(kind, path):
    def weights():
        return [
            nn.Parameter(sample(mcf.bf16x2, 3)),
            nn.Parameter(sample(mcf.bf16x3, 5)),
            nn.Parameter(torch.ones(4)),
            nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
        ]

    together = weights()
    run(kind, {}, path, together)
    generator = torch.Generator().manual_seed(5)
    alone = weights()
    optimizers = [kind([w], lr=1e-2, **FLAGS[path]) for w in alone]
    for _ in range(6):
        for w, optimizer in zip(alone, optimizers, strict=True):
            w.grad = torch.randn(w.shape, generator=generator).bfloat16().to(w.dtype)
            optimizer.step()
    for a, b in zip(together, alone, strict=True):
        if isinstance(a, mcf.MCFTensor):
            assert_same_terms(a, b)
        else:
            assert torch.equal(a, b)


class TestGradScaling:
    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
    def test_fused_steps_unscale_and_skip(self, kind):
        keywords = {"momentum": 0.9} if kind is torch.optim.SGD else {"amsgrad": True}
        start = sample(mcf.bf16x2, 30)
        plain, scaled = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        optimizers = [kind([w], lr=1e-2, fused=True, **keywords) for w in (plain, scaled)]
        gradient = torch.randn(30).bfloat16()
        for found_inf in (0.0, 1.0, 0.0):
            plain.grad = gradient.clone()
            scaled.grad = gradient * 1024
            optimizers[1].grad_scale = torch.tensor(1024.0)
            optimizers[1].found_inf = torch.tensor(found_inf)
            before = scaled.detach().clone()
            optimizers[1].step()
            if found_inf:
                assert_same_terms(scaled.detach(), before)
            else:
                optimizers[0].step()
            assert torch.equal(scaled.grad, gradient)
        assert_same_terms(plain, scaled)
        for name, x in optimizers[0].state[plain].items():
            assert torch.equal(x, optimizers[1].state[scaled][name])

    def test_with_torchs_scaler(self):
        model = mcf.as_expansion(small_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        before = exact(model[0].weight).clone()
        scaler.scale(model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (exact(model[0].weight) != before).any()


def test_schedulers_and_clipping():
    model = mcf.as_expansion(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert norm <= 1.1e-3
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)


def test_fused_powers_of_beta_are_exact_to_the_last_bits(device):
    for beta in (0.9, 0.999, 0.95):
        for step in (1, 2, 7, 1000, 123457):
            base = torch.tensor(beta, dtype=torch.float64, device=device)
            power = integer_power(base, torch.tensor(float(step), device=device))
            assert float(power) == integer_power(beta, float(step))
            true = Fraction(beta) ** step if step < 2000 else None
            expected = float(true) if true is not None else beta**step
            assert float(power) == pytest.approx(expected, rel=step * 2.0**-52)


@pytest.mark.thinned(of=3)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize(
    ("format", "state"),
    [(mcf.fp32x3, mcf.fp32x2), (mcf.fp32x2, mcf.fp32x3), (mcf.bf16x3, mcf.bf16x2)],
    ids=lambda f: f.name,
)
def test_fused_states_in_another_format(kind, format, state):
    start = sample(format, 20)
    weight, reference = nn.Parameter(start.clone()), nn.Parameter(exact(start))
    names = ("exp_avg", "exp_avg_sq") if kind is torch.optim.Adam else ("momentum_buffer",)
    keywords = {"weight_decay": 0.1} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    optimizer = run(kind, keywords, "fused", [weight], collage=dict.fromkeys(names, state))
    run(kind, keywords, "for-loop", [reference])
    assert {optimizer.state[weight][name].format for name in names} == {state}
    assert weight.format == format
    error = (exact(weight) - reference.detach()).abs().max()
    assert error <= 40 * max(format.u**format.terms, state.u**state.terms / 10, 2.0**-50)


def test_fused_steps_of_large_tensors_are_those_of_their_parts():
    start = sample(mcf.bf16x2, 600, 601)
    whole = nn.Parameter(start.clone())
    parts = [nn.Parameter(start[:300].clone()), nn.Parameter(start[300:].clone())]
    gradient = torch.randn(600, 601).bfloat16()
    for weights, gradients in (([whole], [gradient]), (parts, [gradient[:300], gradient[300:]])):
        optimizer = torch.optim.AdamW(weights, lr=1e-2, amsgrad=True, fused=True)
        for _ in range(2):
            for w, g in zip(weights, gradients, strict=True):
                w.grad = g.clone()
            optimizer.step()
    assert_same_terms(whole.detach(), torch.cat(parts).detach())


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_between_forward_and_backward_is_noticed(foreach):
    model = mcf.as_expansion(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    for p in model.parameters():
        p.grad = torch.ones_like(p.components[0])
    loss = model(torch.ones(1, 4, dtype=torch.bfloat16)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_parameters_that_began_at_different_steps(cls):
    """Each in one fused call with another takes the step that it takes alone."""

    def trained(rows):
        torch.manual_seed(1)
        start, gradients = torch.randn(2, 40), torch.randn(3, 2, 40).bfloat16()
        parameters = [nn.Parameter(mcf.as_expansion(start[row], mcf.bf16x2)) for row in rows]
        optimizer = cls(parameters, lr=0.1, fused=True, **options)
        for step in range(3):
            for p, row in zip(parameters, rows, strict=True):
                p.grad = None if row and not step else gradients[step, row]
            optimizer.step()
        return parameters

    options = {"lr_decay": 0.5} if cls is torch.optim.Adagrad else {}
    together = trained([0, 1])
    for row, p in enumerate(together):
        (alone,) = trained([row])
        assert_same_terms(p.detach(), alone.detach())


def test_the_rate_of_adagrad_decays_as_torchs():
    start, gradients = torch.rand(20, dtype=torch.float64) + 1, torch.randn(3, 20).double()
    p, q = nn.Parameter(mcf.as_expansion(start, mcf.fp32x2)), nn.Parameter(start.clone())
    fused = torch.optim.Adagrad([p], lr=0.1, lr_decay=0.5, fused=True)
    reference = torch.optim.Adagrad([q], lr=0.1, lr_decay=0.5)
    for gradient in gradients:
        p.grad, q.grad = gradient.float(), gradient.float().double()
        fused.step()
        reference.step()
    torch.testing.assert_close(exact(p.detach()), q.detach(), rtol=1e-12, atol=0)


def test_a_state_of_float64_is_computed_in_float64():
    p = nn.Parameter(mcf.as_expansion(torch.ones(20, dtype=torch.float64), mcf.bf16x2))
    optimizer = torch.optim.AdamW([p], lr=0.1, betas=(0.75, 0.75), fused=True)
    p.grad = torch.full((20,), 0.5, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.full((20,), 1 / 7, dtype=torch.float64)
    optimizer.step()
    found = optimizer.state[p]["exp_avg"]
    assert found.dtype == torch.float64
    expected = torch.full_like(found, 0.75 / 7 + 0.25 * 0.5)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)


def test_a_fused_step_that_cannot_be_taken_moves_nothing():
    """torch's own reads beyond the end of such a gradient."""
    parameters = [nn.Parameter(mcf.as_expansion(torch.ones(n), mcf.bf16x2)) for n in (4, 5, 6)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    for p in parameters:
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    optimizer.step()
    states = [x for p in parameters for x in (p, *optimizer.state[p].values()) if x.dim()]
    before = [x.detach().clone() for x in states]
    parameters[1].grad.data = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(2\)"):
        optimizer.step()
    for x, y in zip(states, before, strict=True):
        assert_same_terms(x.detach(), y)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_steps_on_meta_are_refused_by_torch(name):
    model = mcf.as_expansion(nn.Linear(3, 2)).to("meta")
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True)
    for p in model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype, device="meta")
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params"):
        optimizer.step()


@pytest.mark.parametrize("mode", [None, "plus", "full"])
def test_a_first_step_that_overflows_leaves_momentum_at_zero(mode):
    """torch makes the buffers of its fused SGD without values, which such a step does not write."""
    p = nn.Parameter(mcf.as_expansion(torch.ones(1000), mcf.bf16x2))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
    if mode:
        mcf.collage(optimizer, mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for gradient in (float("inf"), 4.0):
        used = [torch.full((1000,), 1e30, dtype=torch.bfloat16) for _ in range(8)]
        del used  # what is made without values has these
        p.grad = torch.full((1000,), gradient, dtype=torch.bfloat16)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        if gradient != 4.0:
            assert not exact(optimizer.state[p]["momentum_buffer"]).any()
            assert (exact(p) == 1).all()
    assert torch.allclose(exact(p), torch.tensor(0.8, dtype=torch.float64), atol=1e-3)


def _lr_as_tensor(optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)


def _float64_steps(optimizer):
    for state in optimizer.state.values():
        state["step"] = state["step"].double()


def _shared_step(optimizer):
    first, second, *_ = optimizer.state.values()
    second["step"] = first["step"]


@pytest.mark.parametrize(
    "change",
    [lambda optimizer: None, _lr_as_tensor, _float64_steps, _shared_step],
    ids=["as made", "tensor lr", "float64 steps", "shared step"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}, {"amsgrad": True}],
    ids=["adam", "adamw", "amsgrad"],
)
@pytest.mark.parametrize("kinds", [[mcf.bf16x2, mcf.bf16x3], [mcf.bf16x2, None]], ids=str)
def test_fused_adam_without_grouping(kinds, options, change, monkeypatch):
    """Parameters, states and step counts are those of PyTorch's own function."""
    found, grouped = [], []
    group = torch.optim.Optimizer._group_tensors_by_device_and_dtype
    spy = staticmethod(lambda *args, **kwargs: grouped.append(args) or group(*args, **kwargs))
    monkeypatch.setattr(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", spy)
    for of_torch in (False, True):
        if of_torch:
            module = importlib.import_module("torch.optim.adam")
            monkeypatch.setattr(module, "_fused_adam", module._fused_adam.__wrapped__)
        torch.manual_seed(0)
        weights = [nn.Parameter(sample(f, 40, seed=7) if f else torch.ones(3)) for f in kinds]
        optimizer = torch.optim.Adam(weights, lr=1e-2, fused=True, **options)
        for step in range(4):
            for weight in weights:
                weight.grad = torch.randn(weight.shape).to(weight.dtype)
            optimizer.step()
            if step == 1:
                change(optimizer)
        if None not in kinds and change not in (_lr_as_tensor, _float64_steps):
            assert bool(grouped) == of_torch
        found.append([*weights, *(x for y in optimizer.state.values() for x in y.values())])
    for a, b in zip(*found, strict=True):
        if isinstance(a, mcf.MCFTensor):
            assert_same_terms(a, b)
        else:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
