"""Stochastic rounding of the last term: without error in the mean, and from torch's generator."""

import contextlib
import copy
import io
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mcftensor as mcf
from common.oracle import BASES, integers, is_normalized, round_fraction, scale_of, total
from common.probes import Strategy, displacement
from mcftensor.arithmetic import noise
from mcftensor.arithmetic.rounding import move, split_by_noise
from mcftensor.kernels import eager
from mcftensor.kernels.eager import indices
from mcftensor.passes.expressions import evaluate
from support.helpers import Given, assert_same_terms, compiled_whole, same_terms, sample

bf16x2sr = mcf.Format(torch.bfloat16, 2, "stochastic")
STOCHASTIC = [
    bf16x2sr,
    mcf.Format(torch.bfloat16, 3, "stochastic"),
    mcf.Format(torch.bfloat16, 4, "stochastic"),
    mcf.Format(torch.float16, 2, "stochastic"),
    mcf.Format(torch.float32, 2, "stochastic"),
    mcf.Format(torch.float64, 2, "stochastic"),
]
every_format = pytest.mark.parametrize("f", STOCHASTIC, ids=lambda f: f.name)
DRAWS = 100_000


def value(x):
    """The exact number of an expansion of one element."""
    return mcf.exact.to_fraction(x.reshape(()))


def assert_no_error_in_the_mean(x, exact):
    """All elements of x are roundings of one exact number: neighbours of it, right in the mean."""
    terms = torch.stack([t.double().cpu() for t in x.components])
    alike = (terms == terms[:, :1]).all(0)
    others = terms[:, ~alike]
    one = exact_sum(terms[:, 0])
    if alike.all():  # exact, or so near that a hundred thousand draws do not leave
        assert abs(one - exact) <= Fraction(mcf.finfo(x.format).eps) * abs(exact) / DRAWS
        return
    assert (others == others[:, :1]).all()
    numbers = [one, exact_sum(others[:, 0])]
    low, high = sorted(numbers)
    assert low < exact < high
    share = alike.double().mean().item()
    share = share if one == high else 1 - share
    expected = float((exact - low) / (high - low))
    deviation = (expected * (1 - expected) / x.numel()) ** 0.5
    assert abs(share - expected) <= 4 * deviation
    # The two are neighbours: their distance is one unit in the last place of the last term.
    info = mcf.finfo(x.format)
    assert high - low <= max(4 * info.eps * abs(exact), info.smallest_subnormal)


def exact_sum(column):
    return sum(map(Fraction, column.tolist()), Fraction(0))


def many(f, number, device="cpu", count=DRAWS):
    """One number in every element."""
    x = mcf.exact.from_exact(number, f, device=device)
    return mcf.MCFTensor([t.expand(count).contiguous() for t in x.components], f)


# -------------------------------------------------------------------------------------- the mean


@pytest.mark.thinned(of=3)
@every_format
def test_arithmetic_is_right_in_the_mean(f, device):
    p, q = Fraction(10, 3), Fraction(-7, 9)
    x, y = many(f, p, device), many(f, q, device)
    p, q = value(x[0]), value(y[0])
    for result, exact in (
        (x + y, p + q),
        (x - y, p - q),
        (x * y, p * q),
        (torch.addcmul(y, x, x), q + p * p),
        (x * 0.7, p * Fraction(0.7)),
        (x + torch.tensor(1e-3, dtype=torch.float64), p + Fraction(1e-3)),
    ):
        assert_no_error_in_the_mean(result, exact)


@pytest.mark.thinned(of=3)
@every_format
def test_quotients_and_roots_are_right_in_the_mean(f, device):
    # No expansion holds the exact result; a far longer one comes near enough.
    x, y = many(f, Fraction(10, 3), device), many(f, Fraction(7, 9), device)
    p, q = value(x[0]), value(y[0])
    assert_no_error_in_the_mean(x / y, p / q)
    scale = 4**300
    root = Fraction(math.isqrt(int(p * scale)), 2**300)
    assert_no_error_in_the_mean(x.sqrt(), root)


@pytest.mark.thinned(of=3)
@every_format
def test_conversions_are_right_in_the_mean(f, device):
    for number in (Fraction(-1, 3), 1 + Fraction(1, 3**60), Fraction(2, 7) ** 3):
        plain = torch.full((DRAWS,), float(number), dtype=torch.float64, device=device)
        assert_no_error_in_the_mean(mcf.as_expansion(plain, f), Fraction(float(number)))
        longer = many(mcf.Format(torch.float64, 3), number, device)
        for x in (mcf.as_expansion(longer, f), torch.zeros_like(many(f, 0, device)).copy_(longer)):
            assert x.format == f
            assert_no_error_in_the_mean(x, value(longer[0]))


def test_what_is_evaluated_wide_is_right_in_the_mean(device):
    x = many(bf16x2sr, Fraction(1, 3), device)
    exact = torch.exp(mcf.as_plain(x[0], torch.float64)).item()
    assert_no_error_in_the_mean(torch.exp(x), Fraction(exact))


@given(
    bits=st.integers(0, 2**15 - 1),
    negative=st.booleans(),
    fraction=st.integers(-127, 127),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_a_move_goes_to_the_neighbour_with_the_probability_of_the_remainder(
    bits, negative, fraction, dtype
):
    x = torch.tensor([bits], dtype=torch.int16).view(dtype)
    x = -x if negative else x
    if not x.isfinite().all():
        return
    base = BASES[dtype]
    here = Fraction(int(integers(x)[0]), 1 << scale_of(dtype))
    ulp = Fraction(2) ** (max(int(np.floor(np.log2(abs(float(here)) or 1))), base.emin))
    ulp = ulp / 2 ** (base.precision - 1) if here else Fraction(2) ** base.quantum
    remainder = ulp * Fraction(fraction, 256)
    if round_fraction(here + remainder, dtype) != here:
        return
    exact = torch.tensor([float(remainder)], dtype=torch.float64)
    assert Fraction(exact.item()) == remainder
    noises = torch.arange(512, dtype=torch.float64) / 512
    moved = move(x.expand(512), exact.expand(512), Given(noises))
    ends = [Fraction(int(n), 1 << scale_of(dtype)) for n in integers(moved)]
    if max(abs(e) for e in ends) >= Fraction(2) ** (base.emax + 1):
        return
    assert abs(sum(ends) / 512 - (here + remainder)) <= ulp / 512
    assert len(set(ends)) <= 2
    if fraction == 0:
        assert set(ends) == {here}


bfloat16s = st.integers(-(2**15), 2**15 - 1).map(
    lambda bits: torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).item()
)


@given(leading=bfloat16s, rest=st.floats(-2.0, 2.0, width=32), fraction=st.integers(-20, 0))
def test_two_float32_levels_are_right_in_the_mean_over_all_noise(leading, rest, fraction):
    if not 2.0**-60 < abs(leading) < 2.0**100:
        return
    levels = [torch.tensor(leading), torch.tensor(rest * leading * 2.0**fraction)]
    every = Given(torch.arange(1 << 16, dtype=torch.float64) / (1 << 16))
    first, last = split_by_noise(levels[0] + levels[1], levels, every)
    assert is_normalized([first, last])
    mean = (exact_sum(first) + exact_sum(last)) / (1 << 16)
    exact = exact_sum(torch.stack(levels))
    ends = {a + b for a, b in set(zip(first.tolist(), last.tolist(), strict=True))}
    assert len(ends) <= 2
    assert abs(mean - exact) <= last.float().abs().max().item() * 2.0**-23


def test_a_step_keeps_in_the_mean_what_float32_loses():
    """A weight near 1, with a unit of 2^-16, moves by 2^-30."""
    count, start = 1 << 20, 1 + 3 * 2.0**-10
    p = nn.Parameter(mcf.as_expansion(torch.full((count,), start), bf16x2sr))
    p.grad = -torch.ones(count, dtype=torch.bfloat16)
    torch.optim.SGD([p], lr=2.0**-30, fused=True).step()
    moved = mcf.as_plain(p.detach(), torch.float64) - start
    assert set(moved.tolist()) == {0.0, 2.0**-16}
    expected = count * 2.0**-14
    assert abs(moved.count_nonzero() - expected) < 4 * expected**0.5


def test_a_fused_step_of_adamw_is_right_in_the_mean():
    count, start, gradient, lr, decay = 1 << 17, 0.3, 0.77, 1e-3, 0.1
    p = nn.Parameter(many(bf16x2sr, Fraction(start), count=count))
    optimizer = torch.optim.AdamW([p], lr=lr, weight_decay=decay, fused=True)
    mcf.collage(optimizer, "plus")
    begin = float(value(p.detach()[0]))
    p.grad = torch.full((count,), gradient, dtype=torch.bfloat16)
    g = p.grad[0].item()
    optimizer.step()
    change = -lr * g / (g + 1e-8) - lr * decay * begin
    second = (1 - 0.999) * g * g
    made = [mcf.as_plain(x.detach(), torch.float64) for x in (p, optimizer.state[p]["exp_avg_sq"])]
    for numbers, exact, error in zip(
        made, (begin + change, second), (2.0**-22 * abs(change), 2.0**-23 * second), strict=True
    ):
        assert len(set(numbers.tolist())) == 2
        deviation = numbers.std().item() / count**0.5
        assert abs(numbers.mean().item() - exact) < 4 * deviation + error
    assert torch.corrcoef(torch.stack(made))[0, 1].abs() < 4 / count**0.5  # of one hash


def test_a_fused_step_needs_no_float64():
    p, q = (nn.Parameter(sample(bf16x2sr, 5000)) for _ in range(2))
    gradient = torch.randn(5000).bfloat16()
    for x, context in ((p, contextlib.nullcontext()), (q, mcf.without_float64())):
        torch.manual_seed(5)
        optimizer = mcf.collage(torch.optim.AdamW([x], lr=1e-3, fused=True), "full")
        with context:
            for sign in (1, -1, 1):
                x.grad = sign * gradient
                optimizer.step()
    assert_same_terms(p.detach(), q.detach())


@pytest.mark.parametrize("path", [pytest.param("foreach", marks=pytest.mark.slow), "fused"])
def test_small_updates_of_ones_survive(path):
    """At lr 1e-5 two terms rounded to nearest lose a fifth of the way of weights near 1."""
    nearest, stochastic = (Strategy(f, path) for f in (mcf.bf16x2, bf16x2sr))
    errors = displacement([nearest, stochastic], "ones", lr=1e-5, beta2=0.95, count=100)
    assert errors[nearest.name] >= 0.15
    assert errors[stochastic.name] <= 0.05


# ----------------------------------------------------------------------------------- the generator


@pytest.mark.thinned(of=2)
@every_format
def test_seeds_reproduce_and_draws_differ(f, device):
    x = sample(f, 100, device=device)
    torch.manual_seed(1)
    first, second = x / 3, x / 3
    torch.manual_seed(1)
    assert_same_terms(x / 3, first)
    assert_same_terms(x / 3, second)
    assert not same_terms(first, second) or f.base == torch.float16


def test_one_draw_an_operation():
    x = sample(bf16x2sr, 1000)
    state = torch.get_rng_state()
    key = torch.randint(2**63 - 1, ())
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    result = x * 0.3
    assert torch.equal(torch.get_rng_state(), after)
    terms = [*x.components, torch.tensor(0.3, dtype=torch.float64)]
    with_key = evaluate("mul", "bf16x2sr", terms, ["bf16x2sr", "float64"], [key])
    assert_same_terms(result, mcf.MCFTensor(with_key, bf16x2sr))


def test_what_needs_no_rounding_draws_nothing():
    x, y = sample(bf16x2sr, 50), sample(bf16x2sr, 50, seed=1)
    state = torch.get_rng_state()
    x[3] = 0.1
    x.fill_(0.1)
    x.copy_(y)
    x.masked_fill_(x > 0.3, 0.2)
    _ = (torch.isclose(x, y), x.allclose(y))
    _ = (x == 0.1, x < y, torch.maximum(x, y), torch.where(x > 0, x, 0.3), x.sort(), x.abs())
    _ = (x.clone(), x.view(5, 10), x[2:5], torch.cat([x, y]), -x, x.to(torch.float32))
    assert torch.equal(torch.get_rng_state(), state)
    nearest = mcf.as_expansion(torch.tensor(0.1, dtype=torch.float64), mcf.bf16x2)
    filled = torch.full_like(x, 0.1)
    assert torch.equal(filled.components[1][0], nearest.components[1])


def test_exact_results_stay_exact():
    x = sample(bf16x2sr, 4_000)
    assert_same_terms(x + 0, x)
    assert_same_terms(x * 1, x)
    assert_same_terms(mcf.as_expansion(x, bf16x2sr), x)
    assert_same_terms(x * 2 / 2, x)


def hashed(key, index, stream):
    """The 32 bits of an element, in Python's integers."""
    mask = 2**32 - 1
    key += stream % 2 * 0x9E3779B97F4A7C15
    z = (index + key) & mask
    z = (z ^ (z >> 17)) * (((key >> 31) ^ 0xED5AD4BB) | 1) & mask
    z = (z ^ (z >> 11)) * 0xAC4C1B51 & mask
    z = (z ^ (z >> 15)) * 0x31848BAB & mask
    z ^= z >> 14
    return (z ^ z << 16) & mask if stream > 1 else z


@pytest.mark.with_float64("the numbers are given in float64")
def test_the_numbers_are_those_of_the_formula():
    index = [0, 1, 2, 77, 2**31, 2**32 - 1, 2**32, 2**40 + 5]
    for key in (0, 1, 2**31, 2**62 + 12345, 2**63 - 2):
        for stream in range(4):
            wanted = [hashed(key, i, stream) for i in index]
            found = noise.Random(torch.tensor(key), torch.tensor(index), stream)
            assert found.uniform().tolist() == [z / 2**32 for z in wanted]
            for count in (1, 8, 16, 20, 31):
                assert found.bits(count).tolist() == [z >> (32 - count) for z in wanted]
    grid = noise.Random(torch.tensor(5), indices(torch.empty(3, 4)))
    assert grid.bits(16).flatten().tolist() == [hashed(5, i, 0) >> 16 for i in range(12)]


def relation(x, y):
    """How far 256 x 256 counts of pairs of bytes are from equal ones, in standard deviations."""
    counts = np.bincount((x * 256 + y).numpy(), minlength=1 << 16)
    expected = len(x) / (1 << 16)
    return (((counts - expected) ** 2 / expected).sum() - 65535) / (2 * 65535) ** 0.5


def test_places_halves_and_keys_are_unrelated():
    n = 1 << 20
    for key in (0, 2**40 + 17, 0x1234567887654321):
        moved = (key + 7) % 2**32 + (key >> 32 ^ 0x5A5A5A5) * 2**32
        x, other_half, other_hash = (
            noise.Random(torch.tensor(key), torch.arange(n), stream).bits(16)
            for stream in (0, 2, 1)
        )
        next_key, same_places = (
            noise.Random(torch.tensor(k), torch.arange(n)).bits(16) for k in (key + 1, moved)
        )
        pairs = {
            "both bytes": (x >> 8, x & 255),
            "same places": (x[7:] >> 8, same_places[:-7] >> 8),
        }
        for name, y in (
            *(("half", other_half), ("hash", other_hash), ("key", next_key)),
            *((f"{lag} places", x.roll(lag)) for lag in (1, 2, 3, 64, 1000, 1 << 16)),
        ):
            pairs[f"first bytes, other {name}"] = x >> 8, y >> 8
            pairs[f"last bytes, other {name}"] = x & 255, y & 255
        assert {k: z for k, (x, y) in pairs.items() if abs(z := relation(x, y)) > 5} == {}


def test_one_place_is_unrelated_from_step_to_step():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(2**63 - 1, (1 << 20,), generator=generator)
    x, neighbour = (noise.Random(keys, torch.tensor(i)).bits(16) for i in (12345, 12346))
    assert abs(relation(x >> 8, x & 255)) < 5
    assert abs(relation(x >> 8, x.roll(1) >> 8)) < 5
    assert abs(relation(x >> 8, neighbour >> 8)) < 5


@pytest.mark.with_float64("the numbers are given in float64")
def test_the_numbers_are_uniform_and_independent():
    n = 200_000
    keys = [noise.draw_key(torch.device("cpu")) for _ in range(3)]
    streams = [noise.Random(k, torch.arange(n), s).uniform() for k in keys for s in range(3)]
    for x in streams:
        counts = torch.histc(x, 64, 0, 1)
        chi_square = ((counts - n / 64) ** 2 / (n / 64)).sum().item()
        assert 63 - 5 * 126**0.5 < chi_square < 63 + 5 * 126**0.5
    stack = torch.stack([*streams, streams[0].roll(1), streams[0].roll(1000)])
    correlation = torch.corrcoef(stack) - torch.eye(len(stack))
    assert correlation.abs().max() < 5 / n**0.5


def test_what_one_step_writes_is_rounded_independently():
    """A parameter and its state do not move up and down together."""
    count, lr, momentum = 1 << 14, 2.0**-12, 0.875
    start, buffer, gradient = torch.rand(3, count, dtype=torch.float64) + 1
    gradient = gradient.bfloat16()
    p = nn.Parameter(mcf.as_expansion(start, bf16x2sr))
    optimizer = torch.optim.SGD([p], lr=lr, momentum=momentum, fused=True)
    state = optimizer.state[p]["momentum_buffer"] = mcf.as_expansion(buffer, bf16x2sr)
    p.grad = gradient
    before, at_rest = (mcf.as_plain(x.detach(), torch.float64) for x in (p, state))
    optimizer.step()
    exact = momentum * at_rest + gradient
    went_up = mcf.as_plain(state, torch.float64) > exact
    p_went_up = mcf.as_plain(p.detach(), torch.float64) > before - lr * exact
    both = torch.stack([went_up, p_went_up]).double()
    assert (both.mean(1) - 0.5).abs().max() < 0.1  # some sums are exact
    assert torch.corrcoef(both)[0, 1].abs() < 4 / count**0.5


def test_neither_layout_nor_blocks_matter(monkeypatch):
    x, y = sample(bf16x2sr, 64, 33), sample(bf16x2sr, 64, 33, seed=1)
    torch.manual_seed(2)
    expected = x * y
    torch.manual_seed(2)
    assert_same_terms((x.t().contiguous().t() * y), expected)
    p = nn.Parameter(x.clone())
    p.grad = y.components[0]
    stepped = step(p)
    monkeypatch.setattr(eager, "CHUNK", 100)
    torch.manual_seed(2)
    assert_same_terms(x * y, expected)
    q = nn.Parameter(x.clone())
    q.grad = y.components[0]
    assert_same_terms(step(q), stepped)


def step(p):
    torch.manual_seed(3)
    torch.optim.AdamW([p], lr=1e-2, fused=True).step()
    return p.detach()


# --------------------------------------------------------------------------------------- compiled


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_operations_draw_the_same_numbers(backend, device):
    def function(x, y):
        a, b = x * y, x * y  # which a compiler would merge
        return torch.addcmul(a, b, y) / y

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for grad in (False, True):
        x = sample(bf16x2sr, 64, device=device).requires_grad_(grad)
        y = sample(bf16x2sr, 64, device=device, seed=1)
        compiled(x, y)  # compiling may draw numbers of its own
        torch.manual_seed(3)
        expected = function(x, y)
        torch.manual_seed(3)
        assert_same_terms(compiled(x, y), expected)
        assert not same_terms(function(x, y), expected)


def full_sgd(parameters, **options):
    return mcf.collage(torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options), "full")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for-loop"])
def test_compiled_steps_draw_the_same_numbers(foreach, device):
    def run():
        torch.manual_seed(4)
        parameters = [nn.Parameter(sample(f, 17, device=device)) for f in STOCHASTIC[:2]]
        optimizer = full_sgd(parameters, foreach=foreach)
        take_step = compiled_whole(optimizer)
        for i in range(4):
            for p in parameters:
                generator = torch.Generator().manual_seed(i)
                p.grad = torch.randn(17, generator=generator).bfloat16().to(device)
            if i == 2:  # now all is compiled
                torch.manual_seed(6)
            take_step()
            if i == 1:
                saved = copy.deepcopy(parameters), copy.deepcopy(optimizer.state_dict())
        return saved, parameters

    (middle, state), compiled = run()
    optimizer = full_sgd(middle, foreach=foreach)
    optimizer.load_state_dict(state)
    torch.manual_seed(6)
    for i in (2, 3):
        for p in middle:
            generator = torch.Generator().manual_seed(i)
            p.grad = torch.randn(17, generator=generator).bfloat16().to(device)
        optimizer.step()
    for p, q in zip(middle, compiled, strict=True):
        assert_same_terms(p.detach(), q.detach())


# ------------------------------------------------------------------------------- the whole library


@pytest.mark.thinned(of=2)
@every_format
def test_results_are_normalized(f):
    x, y = sample(f, 3_000), sample(f, 3_000, seed=1)
    for result in (x + y, x * y, x / (y.abs() + 1), x - y, (x * x).sqrt(), x + 1e-3):
        assert result.format == f
        assert is_normalized(result.components)


def test_special_values():
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40]
    plain = torch.tensor(special, dtype=torch.float64)
    x = mcf.as_expansion(plain, bf16x2sr)
    assert x.components[0].isinf().tolist() == [False] * 2 + [True] * 2 + [False] * 4
    assert x.components[0].signbit()[:2].tolist() == [False, True]
    assert x.components[0].isnan().tolist() == [False] * 4 + [True] + [False] * 3
    assert (x.components[1][:5] == 0).all()
    assert (x - x)[:2].components[0].tolist() == [0, 0]
    assert (x * 4).components[0].isinf().tolist() == [False] * 2 + [True] * 2 + [False] + [
        True,
        True,
        False,
    ]
    assert all((t[2:4] == 0).all() for t in (x * 4).components[1:])


def test_formats_of_operands_meet():
    x, y = sample(bf16x2sr, 5), sample(mcf.bf16x3, 5)
    assert (x + y).format == (y + x).format == mcf.Format(torch.bfloat16, 3, "stochastic")
    assert y.add_(x).format == mcf.bf16x3
    assert (x + 1).format == torch.zeros_like(x).format == torch.exp(x).format == bf16x2sr
    nearest = mcf.as_expansion(x, mcf.bf16x2)
    assert torch.equal(nearest.components[1], x.components[1])
    assert mcf.as_expansion(nearest, bf16x2sr).format == bf16x2sr


def test_models_optimizers_and_files_keep_the_format():
    model = mcf.as_expansion(nn.Linear(4, 3), bf16x2sr)
    optimizer = mcf.collage(torch.optim.AdamW(model.parameters(), fused=True), "plus")
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert model.weight.format == optimizer.state[model.weight]["exp_avg_sq"].format == bf16x2sr
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same_terms(loaded["weight"], model.weight.detach())
    assert copy.deepcopy(model).bias.format == bf16x2sr
    assert "bf16x2sr" in repr(model.weight)


def test_the_meter_leaves_the_generator_alone():
    def run(metered):
        torch.manual_seed(0)
        p = nn.Parameter(sample(bf16x2sr, 50))
        optimizer = torch.optim.AdamW([p], lr=1e-5)
        edq = mcf.EDQ(optimizer, every=1) if metered else None
        for _ in range(3):
            p.grad = torch.ones(50, dtype=torch.bfloat16)
            optimizer.step()
        return p.detach(), edq

    (plain, _), (metered, edq) = run(False), run(True)
    assert_same_terms(metered, plain)
    assert edq.last["lost"] < 1


def test_errors_stay_below_one_unit_of_the_last_place():
    f = bf16x2sr
    x = sample(f, 20_000)
    result = x * 0.7
    scale = scale_of(torch.bfloat16) + scale_of(torch.float64)
    exact = total(x.components) * int(integers(torch.tensor([0.7], dtype=torch.float64))[0])
    error = total(result.components, scale) - exact
    relative = np.array(
        [abs(int(e)) / abs(int(t)) if t else 0 for e, t in zip(error, exact, strict=True)]
    )
    assert 0.9 * mcf.finfo(f).eps <= relative.max() <= 1.01 * mcf.finfo(f).eps
