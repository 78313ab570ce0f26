"""`benchmarks/exhaustive.py`: a sample of what it checks, its oracle, and that it finds defects."""

import json
import math
from fractions import Fraction

import pytest
import torch

import exhaustive
from common.oracle import fractions, round_fraction
from exhaustive import TRANSFORMATIONS, Transformation
from mcftensor.arithmetic import eft
from patterns import BASES, EVERY_PATTERN, root_to_odd

every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
OF_PAIRS = [name for name, t in TRANSFORMATIONS.items() if t.operands == 2]
OF_ONE = [name for name, t in TRANSFORMATIONS.items() if t.operands == 1]


def strata(base, seed, device="cpu"):
    """Every exponent and sign, with the fractions 0, 1, all ones, and some drawn."""
    width = base.precision - 1
    drawn = 1 if width == 7 else 5
    random = torch.Generator().manual_seed(seed)
    exponents = torch.arange(2 ** (15 - width))[:, None]
    fractions = torch.tensor([0, 1, 2**width - 1]).expand(len(exponents), 3)
    more = torch.randint(2, 2**width - 1, (len(exponents), drawn), generator=random)
    magnitudes = ((exponents << width) | torch.cat([fractions, more], 1)).flatten()
    patterns = torch.cat([magnitudes, magnitudes - 2**15]).to(torch.int16)
    return base.numbers(patterns.to(device))


def random_pairs(base, seed, size=4000):
    """Patterns drawn from all, half of the pairs alike in exponent."""
    random = torch.Generator().manual_seed(seed)
    a, b = torch.randint(-(2**15), 2**15, (2, size), generator=random)
    near = a + torch.randint(-(2**base.precision), 2**base.precision, (size,), generator=random)
    b[::2] = (near[::2] & 0x7FFF) - (b[::2] < 0) * 2**15
    return base.numbers(a.to(torch.int16)), base.numbers(b.to(torch.int16))


# ------------------------------------------------------------------------------------ the library


@every_base
@pytest.mark.parametrize("name", OF_PAIRS)
def test_every_pair_of_exponents(name, base, device):
    a, b = strata(base, 0, device), strata(base, 1, device)
    for rows in a.patterns[:, None].split(64):
        wrong, outside = TRANSFORMATIONS[name].check(base, base.numbers(rows), b)
        assert not wrong.any()
        assert not outside.all()


@every_base
@pytest.mark.parametrize("name", OF_ONE)
def test_every_number(name, base, device):
    every = base.numbers(EVERY_PATTERN.to(device))
    wrong, outside = TRANSFORMATIONS[name].check(base, every)
    assert not wrong.any()
    assert not outside.any()


@every_base
def test_two_sum_has_no_error_only_where_s_minus_a_overflows(base):
    every = base.numbers(EVERY_PATTERN[:, None])
    largest = base.numbers(torch.tensor([base.infinity - 1, base.infinity - 1 - 2**15]).short())
    _, outside = TRANSFORMATIONS["two_sum"].check(base, every, largest)
    s, e = eft.two_sum(every.floats, largest.floats)
    assert (outside & s.isfinite()).sum() == {"bf16": 126, "fp16": 1022}[base.name]
    assert torch.equal(e.isfinite(), ~outside)
    _, outside = TRANSFORMATIONS["two_sum"].check(base, largest, every)
    s, _ = eft.two_sum(largest.floats, every.floats)
    assert torch.equal(outside, ~s.isfinite())


def test_the_least_two_sum_without_error():
    a, b = torch.tensor([-48.0, 65504.0], dtype=torch.float16)
    assert [x.item() for x in eft.two_sum(b, a)] == [65472.0, -16.0]
    s, e = eft.two_sum(a, b)
    assert s == 65472.0
    assert e.isnan()


# ------------------------------------------------------------------------------------- the oracle


@every_base
def test_values_of_patterns(base):
    every = base.numbers(EVERY_PATTERN)
    finite = every.values.isfinite()
    assert torch.equal(finite, base.is_finite(EVERY_PATTERN))
    assert torch.equal(every.values.isnan(), base.is_nan(EVERY_PATTERN))
    assert every.values[~finite].nan_to_num().unique().numel() == 3  # NaN as 0, and two infinities
    numbers = every.values[finite].tolist()
    assert [Fraction(x) for x in numbers] == fractions(every.floats[finite])
    assert [math.copysign(1, x) < 0 for x in numbers] == (EVERY_PATTERN[finite] < 0).tolist()


@every_base
def test_rounding(base):
    random = torch.Generator().manual_seed(0)
    size = 6_000
    # From no bits left to overflow; of many bits, or at a tie, or beside one.
    low, high = base.min_exponent - base.precision - 3, 4 - base.min_exponent
    exponents = torch.randint(low, high, (size,), generator=random)
    bits = torch.randint(1, 54, (size,), generator=random)
    near = torch.randint(1, base.precision + 3, (size,), generator=random)
    bits = torch.where(torch.rand(size, generator=random) < 0.5, bits, near)
    significands = torch.randint(2**52, 2**53, (size,), generator=random) >> (53 - bits)
    exact = [
        math.ldexp(significand | 1, exponent - width)
        for significand, exponent, width in zip(
            significands.tolist(), exponents.tolist(), bits.tolist(), strict=True
        )
    ]
    exact = [*exact, *(-x for x in exact), 0.0]
    result = base.round(torch.tensor(exact, dtype=torch.float64))
    assert fractions(result) == [round_fraction(Fraction(x), base.dtype) for x in exact]
    magnitudes = result.double().abs()
    assert {0.0, math.inf} <= set(magnitudes.tolist())
    assert ((magnitudes > 0) & (magnitudes < 2.0**base.min_exponent)).sum() > 100
    special = torch.tensor([math.inf, -math.inf, -0.0], dtype=torch.float64)
    assert [str(x) for x in base.round(special).tolist()] == ["inf", "-inf", "-0.0"]
    for payload in (1, 2**51, 2**52 - 1):
        nan = torch.tensor([(0x7FF << 52) + payload]).view(torch.float64)
        assert base.round(nan).isinf().all()


@every_base
def test_exact_sums(base):
    a, b = random_pairs(base, 0)
    keep = (a.values + b.values).abs() < base.overflow(base.precision)
    a, b = base.numbers(a.patterns[keep]), base.numbers(b.patterns[keep])
    assert base.adds_exactly(a, b).sum() > 1000
    assert (~base.adds_exactly(a, b)).any() == (base.name == "bf16")
    _, rounded, error = exhaustive.exact_sum(base, a, b)
    exact = [x + y for x, y in zip(fractions(a.floats), fractions(b.floats), strict=True)]
    assert fractions(rounded) == [round_fraction(x, base.dtype) for x in exact]
    rest = [x - y for x, y in zip(exact, fractions(rounded), strict=True)]
    assert [Fraction(x) for x in error.tolist()] == rest


@every_base
def test_products_are_exact_in_float64(base):
    a, b = random_pairs(base, 1)
    keep = a.values.isfinite() & b.values.isfinite()
    exact = (a.values * b.values)[keep].tolist()
    pairs = zip(fractions(a.floats[keep]), fractions(b.floats[keep]), strict=True)
    assert [Fraction(x) for x in exact] == [x * y for x, y in pairs]


@pytest.mark.parametrize("significand", [1, 2, 3, 4, 9, 10, 1000, 2047])
@pytest.mark.parametrize("exponent", [-140, -25, -4, -3, 0, 1, 90])
def test_roots_are_rounded_to_odd(significand, exponent):
    square = Fraction(significand) * Fraction(2) ** exponent
    root = Fraction(root_to_odd(significand, exponent))
    last = Fraction(2) ** (exponent // 2 - 30)
    if root**2 != square:
        assert (root / last) % 2 == 1
        assert (root - last) ** 2 < square < (root + last) ** 2


# ---------------------------------------------------------------------------------- the judgement


def other_sum(s, e):
    return torch.nextafter(s, torch.full_like(s, torch.inf)), e


def no_error(s, e):
    return s, torch.zeros_like(e)


def opposite_error(s, e):
    return s, -e


def larger_error(s, e):
    return s, torch.nextafter(e, torch.full_like(e, torch.inf))


def unsigned_zero(s, e):
    return torch.where(s == 0, 0.0, s), e


@every_base
@pytest.mark.parametrize("name", OF_PAIRS)
@pytest.mark.parametrize("defect", [other_sum, no_error, opposite_error, larger_error])
def test_judges_see_every_defect(name, defect, base):
    transformation = TRANSFORMATIONS[name]
    a, b = random_pairs(base, 2)
    s, e = transformation.function(a.floats, b.floats)
    wrong, outside = transformation.judge(base, defect(s, e), a, b)
    # An error of zero is its own opposite, and right where nothing was lost.
    changed = (e != 0) if defect in (no_error, opposite_error) else torch.ones_like(outside)
    assert torch.equal(wrong[~outside], changed[~outside])
    assert wrong[~outside].sum() > 100


@every_base
@pytest.mark.parametrize("name", OF_PAIRS)
def test_judges_want_the_sign_of_zero(name, base):
    zero = base.numbers(torch.tensor([-(2**15)]).short())
    other = base.numbers(torch.tensor([0 if name == "two_prod" else -(2**15)]).short())
    transformation = TRANSFORMATIONS[name]
    results = transformation.function(zero.floats, other.floats)
    assert not transformation.judge(base, results, zero, other)[0].any()
    assert transformation.judge(base, unsigned_zero(*results), zero, other)[0].all()


@every_base
@pytest.mark.parametrize("name", OF_PAIRS)
def test_judges_want_an_error_that_shows_overflow(name, base):
    largest = base.numbers(
        torch.tensor([base.infinity - 1, base.infinity, base.infinity + 1]).short()
    )
    transformation = TRANSFORMATIONS[name]
    results = transformation.function(largest.floats, largest.floats)
    wrong, outside = transformation.judge(base, results, largest, largest)
    assert outside.all()
    assert not wrong.any()
    assert transformation.judge(base, no_error(*results), largest, largest)[0].all()


@every_base
def test_judge_of_halves(base):
    a = base.numbers(EVERY_PATTERN)
    judge = TRANSFORMATIONS["split"].judge
    hi, lo = eft.split(a.floats)
    parts = lo != 0
    whole, _ = judge(base, (a.floats, torch.zeros_like(a.floats)), a)
    assert whole[parts].any()
    # A number of few bits may stay whole, one of more may not.
    significands = a.significands[whole]
    assert (significands >= (significands & -significands) << {8: 4, 11: 5}[base.precision]).all()
    for results in ((hi, -lo), (hi, torch.zeros_like(lo)), (-hi, lo)):
        assert judge(base, results, a)[0][parts].all()


@every_base
def test_judge_of_roots(base):
    a = base.numbers(EVERY_PATTERN)
    root = eft.sqrt(a.floats)
    for direction in (-1.0, torch.inf):
        other = torch.nextafter(root, torch.full_like(root, direction))
        wrong, _ = TRANSFORMATIONS["sqrt"].judge(base, other, a)
        assert torch.equal(wrong, ~root.isnan() & (other != root))
        assert wrong.sum() > 2**14


# ------------------------------------------------------------------------------------ the program


@pytest.fixture
def run(tmp_path):
    """Run the program; return its exit status and what it wrote."""

    def run(*arguments):
        out = tmp_path / "exhaustive.json"
        status = exhaustive.main([*arguments, "--out", str(out)])
        return status, json.loads(out.read_text())

    return run


def test_the_program(run, device, capsys):
    status, record = run("--sample", "16384", "--device", device)
    assert status == 0
    assert record["sample"] == 16384
    assert [(row["base"], row["transformation"]) for row in record["results"]] == [
        (base, name) for base in BASES for name in TRANSFORMATIONS
    ]
    for row in record["results"]:
        assert row["cases"] == (4 * 65536 if row["transformation"] in OF_PAIRS else 4)
        assert row["wrong"] == 0
        assert row["outside"] < row["cases"]
    assert "fast_two_sum" in capsys.readouterr().out


def defective(a, b):
    s, e = eft.two_sum(a, b)
    return s, torch.where((a == 1) & (b == 2.0**-20), e * 2, e)


def test_the_program_names_what_is_wrong(run, monkeypatch, capsys):
    planted = Transformation(defective, exhaustive.judge_two_sum)
    monkeypatch.setitem(TRANSFORMATIONS, "two_sum", planted)
    monkeypatch.setattr(exhaustive, "leading_patterns", lambda sample: [0x3F80, 0x3F81])
    status, record = run("--base", "bf16", "--transformation", "two_sum", "fast_two_sum")
    assert status == 1
    two_sum, fast_two_sum = record["results"]
    assert two_sum["wrong"] == 1
    assert two_sum["first_wrong"] == ["3f80 3580"]
    assert fast_two_sum["wrong"] == 0
    assert "3f80 3580" in capsys.readouterr().out


def test_samples_have_one_pattern_of_every_stratum():
    assert sorted(exhaustive.leading_patterns(1)) == list(range(-(2**15), 2**15))
    patterns = exhaustive.leading_patterns(1000)
    assert patterns == exhaustive.leading_patterns(1000)
    assert [(x + 2**15) // 1000 for x in patterns] == list(range(66))


@pytest.mark.slow
@pytest.mark.parametrize("way", [("--jobs", "2"), ("--compile",)], ids=" ".join)
def test_other_ways_count_the_same(way, run):
    arguments = ("--sample", "8192", "--transformation", *OF_PAIRS)
    (_, plain), (_, other) = run(*arguments), run(*arguments, *way)
    for row in plain["results"] + other["results"]:
        del row["seconds"]
    assert plain["results"] == other["results"]


@pytest.mark.slow
@every_base
@pytest.mark.parametrize("name", OF_PAIRS)
def test_compiled_judges_judge_the_same(name, base):
    transformation = TRANSFORMATIONS[name]
    judge = torch.compile(transformation.judge, fullgraph=True, dynamic=False)
    a, b = random_pairs(base, 3)
    for defect in (other_sum, no_error, larger_error, unsigned_zero):
        results = defect(*transformation.function(a.floats, b.floats))
        for found, expected in zip(
            judge(base, results, a, b), transformation.judge(base, results, a, b), strict=True
        ):
            assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_larger_sample(run):
    status, _ = run("--sample", "256")
    assert status == 0
