"""Arithmetic on tensors: the right operation, at the format's precision, in every form torch has.

What the operations cost in accuracy is tested, against exact rationals, where they are defined;
here float64 is the reference, for formats that it resolves.
"""

import operator
from typing import ClassVar

import pytest
import torch

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, parameter, sample

RESOLVED = [mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2]
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": torch.div,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def tolerance(format: mcf.Format) -> float:
    return 8 * max(format.u**format.terms, 2.0**-52)


def positive(format: mcf.Format, seed: int, device: str = "cpu") -> mcf.MCFTensor:
    return sample(format, 64, seed=seed, device=device).abs() + 0.5


@pytest.mark.parametrize("format", RESOLVED, ids=lambda f: f.name)
class TestAgainstFloat64:
    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize("name", BINARY)
    def test_binary(self, name, format, device):
        x, y = positive(format, 0, device), positive(format, 1, device)
        plain = torch.rand(64, device=device) + 0.5
        op = BINARY[name]
        cases = [(x, y), (x, 0.1), (x, plain), (x, plain.double()), (x, plain.to(format.base))]
        if name != "rsub":
            cases += [(0.1, x), (plain, x)] if name in "+-*/" else []
        for a, b in cases:
            result = op(a, b)
            assert result.format == format
            wide = [exact(t) if isinstance(t, torch.Tensor) else t for t in (a, b)]
            scale = max(exact(t).abs().max() for t in (x, y))
            error = (exact(result) - op(*wide)).abs().max() / scale
            assert error <= tolerance(format)

    def test_ternary(self, format, device):
        x, a, b = (positive(format, i, device) for i in range(3))
        for plain in (False, True):
            if plain:
                a, b = a.components[0], b.components[0]
            wide = [exact(t) for t in (x, a, b)]
            for op in (
                torch.addcmul,
                lambda x, a, b: torch.addcmul(x, a, b, value=-0.001),
                lambda x, a, b: torch.addcdiv(x, a, b, value=-0.3),
                lambda x, a, b: torch.lerp(x, a, 0.1),
                lambda x, a, b: torch.lerp(x, a, 0.9),
                lambda x, a, b: torch.lerp(x, a, b / 4),
                lambda x, a, b: torch.add(x, a, alpha=-0.01),
                lambda x, a, b: torch.sub(x, a, alpha=0.01),
            ):
                result = op(x, a, b)
                error = (exact(result) - op(*wide)).abs() / (op(*wide).abs() + 1)
                assert error.max() <= tolerance(format)

    def test_unary(self, format, device):
        x = positive(format, 0, device)
        for op in (
            torch.sqrt,
            torch.reciprocal,
            torch.square,
            lambda x: x**2,
            lambda x: x**3,
            lambda x: x**0.5,
            lambda x: x**-1,
            lambda x: 1 - x,
            lambda x: 1 / x,
        ):
            result = op(x)
            expected = op(exact(x))
            assert ((exact(result) - expected) / (expected.abs() + 1)).abs().max() <= tolerance(
                format
            )

    def test_fma(self, format):
        x, y, z = (positive(format, i) for i in range(3))
        for operands in ((x, y, z), (x, 0.1, z), (x, y, 3), (0.1, x, x.components[0])):
            wide = [exact(t) if isinstance(t, torch.Tensor) else t for t in operands]
            result = mcf.fma(*operands)
            assert result.format == format
            error = (exact(result) / (wide[0] * wide[1] + wide[2]) - 1).abs().max()
            assert error <= tolerance(format)


class TestNumbers:
    def test_a_number_enters_at_full_double_precision(self):
        x = mcf.as_expansion(torch.ones(1, dtype=torch.float64), mcf.bf16x2)
        for _ in range(100):
            x.mul_(0.999)
        assert abs(exact(x).item() / 0.999**100 - 1) < 100 * mcf.bf16x2.u**2 / 2
        wide = mcf.as_expansion(torch.ones(1, dtype=torch.float64), mcf.bf16x3)
        wide.mul_(0.1)
        assert abs(exact(wide).item() - 0.1) <= 0.1 * 2.0**-25

    def test_a_tensor_without_dimensions_is_a_number_beside_one_that_has_some(self):
        p = parameter(mcf.bf16x3, 5)
        y = p * torch.tensor(0.999, dtype=torch.float64)
        assert isinstance(y, mcf.MCFTensor)
        torch.testing.assert_close(exact(y), exact(p) * 0.999, rtol=2.0**-24, atol=0)
        scalar = parameter(mcf.bf16x3)
        assert type(scalar * torch.tensor(0.999, dtype=torch.bfloat16)) is torch.Tensor


class TestForms:
    """The in-place, out= and foreach forms give the terms that the plain form gives."""

    CASES: ClassVar = {
        "add": (lambda x, a, b: (x, a), {"alpha": -0.01}),
        "sub": (lambda x, a, b: (x, a), {}),
        "mul": (lambda x, a, b: (x, 0.999), {}),
        "div": (lambda x, a, b: (x, b), {}),
        "addcmul": (lambda x, a, b: (x, a, b), {"value": 0.001}),
        "addcdiv": (lambda x, a, b: (x, a, b), {"value": -0.001}),
        "lerp": (lambda x, a, b: (x, a, 0.1), {}),
        "sqrt": (lambda x, a, b: (b,), {}),
        "reciprocal": (lambda x, a, b: (b,), {}),
        "neg": (lambda x, a, b: (x,), {}),
        "abs": (lambda x, a, b: (x,), {}),
    }

    @pytest.mark.thinned(of=12)
    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("plain", [False, True], ids=["expansions", "plain operands"])
    def test_agree(self, name, plain, format, device):
        arrange, keywords = self.CASES[name]
        x = sample(format, 9, device=device)
        a, b = sample(format, 9, device=device, seed=1), sample(format, 9, device=device, seed=2)
        b = b.abs() + 1
        if plain:
            a, b = a.components[0], (b if name in ("sqrt", "reciprocal") else b.components[0])
        args = arrange(x, a, b)
        expected = getattr(torch, name)(*args, **keywords)

        target = args[0].clone()
        assert getattr(target, name + "_")(*args[1:], **keywords) is target
        assert_same_terms(target, expected)

        out = torch.zeros_like(x)
        if name != "lerp":
            assert getattr(torch, name)(*args, **keywords, out=out) is out
            assert_same_terms(out, expected)

        if name == "add":
            foreach = torch._foreach_add([x, x], [a, a], **keywords)
        elif name == "lerp":
            foreach = torch._foreach_lerp([x, x], [a, a], 0.1)
        elif name in ("addcmul", "addcdiv"):
            foreach = getattr(torch, f"_foreach_{name}")(
                [x, x], [a, a], [b, b], [keywords["value"]] * 2
            )
        elif name == "mul":
            foreach = torch._foreach_mul([x, x], 0.999)
        else:
            foreach = getattr(torch, f"_foreach_{name}")(*([t, t] for t in args))
        for y in foreach:
            assert_same_terms(y, expected)

    def test_foreach_lists_mix_formats_and_plain_tensors(self):
        tensors = [sample(mcf.bf16x2, 3), sample(mcf.bf16x3, 2), torch.ones(4)]
        gradients = [torch.ones(3), torch.ones(2), torch.ones(4)]
        expected = [t.clone().add_(g, alpha=-0.5) for t, g in zip(tensors, gradients, strict=True)]
        torch._foreach_add_(tensors, gradients, alpha=-0.5)
        assert_same_terms(tensors[0], expected[0])
        assert_same_terms(tensors[1], expected[1])
        assert type(tensors[2]) is torch.Tensor
        assert torch.equal(tensors[2], expected[2])
        with pytest.raises((ValueError, RuntimeError)):
            torch._foreach_add_(tensors, gradients[:2])

    def test_plain_targets_take_the_whole_and_round_once(self):
        x = sample(mcf.bf16x2, 50)
        target = torch.ones(50)
        target.mul_(x)
        torch.testing.assert_close(target.double(), exact(x), rtol=2.0**-16, atol=0)
        p = parameter(mcf.bf16x2, 50).detach()
        target = torch.ones(50, dtype=torch.bfloat16)
        target.add_(p, alpha=0.1)  # L2 decay of a gradient: as the leading term
        assert torch.equal(target, torch.add(torch.ones_like(target), p.components[0], alpha=0.1))


class TestFormats:
    def test_of_one_base_the_longer_wins_and_in_place_stays(self):
        x2, x3 = sample(mcf.bf16x2, 3), sample(mcf.bf16x3, 3)
        assert (x2 + x3).format == (x3 * x2).format == mcf.bf16x3
        assert torch.lerp(x2, x3, 0.1).format == mcf.bf16x3
        assert x2.add_(x3).format == mcf.bf16x2
        assert torch.maximum(x2, x3).format == mcf.bf16x3

    def test_unlike_bases_raise_and_name_the_repair(self):
        x, y = sample(mcf.bf16x2, 3), sample(mcf.fp32x2, 3)
        before = x.clone()
        for mix in (lambda: x + y, lambda: x.add_(y), lambda: torch.maximum(x, y), lambda: x > y):
            with pytest.raises(ValueError, match=r"bf16x2 and fp32x2.*as_expansion"):
                mix()
        assert_same_terms(x, before)

    def test_foreign_operands_raise(self):
        x = sample(mcf.bf16x2, 3)
        with pytest.raises(ValueError, match="complex64"):
            x + torch.ones(3, dtype=torch.complex64)
        with pytest.raises(ValueError, match="sparse"):
            x * torch.ones(3).to_sparse()
        with pytest.raises(ValueError, match="real number"):
            x * 1j
        with pytest.raises(TypeError, match="no operand is an expansion"):
            mcf.fma(torch.ones(3), 1, 2)

    @pytest.mark.parametrize(
        "format",
        [
            mcf.bf16x2,
            pytest.param(mcf.fp32x2, marks=pytest.mark.with_float64("it is refused before")),
        ],
        ids=lambda f: f.name,
    )
    def test_sparse_results_raise_and_name_the_operation(self, format):
        x = sample(format, 3, 3)
        with pytest.raises(NotImplementedError, match=r"_to_sparse.*sparse_coo.*as_plain"):
            x.to_sparse()

    def test_integers_and_masks_enter_exactly(self):
        x = sample(mcf.fp32x2, 3)
        assert torch.equal(exact(x * torch.tensor([0, 1, 2])), exact(x) * torch.tensor([0, 1, 2]))
        assert exact(x * (x != x)).tolist() == [0, 0, 0]

    @pytest.mark.wing("wide")
    @pytest.mark.with_float64("without it, they are refused before")
    def test_what_cannot_carry_the_precision_raises_and_names_the_repair(self):
        x = sample(mcf.fp64x2, 3)
        before = x.clone()
        for call in (x.i0, lambda: torch.special.i1(x), x.i0_, lambda: torch.fft.fft(x)):
            with pytest.raises(NotImplementedError, match=r"fp64x2 \(3,\).*as_plain"):
                call()
        assert_same_terms(x, before)
        with pytest.raises(NotImplementedError, match="complex"):
            torch.fft.fft(sample(mcf.bf16x2, 3))


class TestSpecialValues:
    def test_follow_the_base(self, format):
        nan, inf = float("nan"), float("inf")
        values = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.5], dtype=format.base)
        for name in ("add", "sub", "mul", "div"):
            plain = getattr(torch, name)(values[:, None], values)
            x, y = (mcf.as_expansion(v, format) for v in (values[:, None], values))
            result = getattr(torch, name)(x, y)
            leading, *tails = result.components
            torch.testing.assert_close(leading, plain, rtol=0, atol=0, equal_nan=True)
            zeros = (plain == 0) & ~torch.isnan(plain)
            assert torch.equal(torch.signbit(leading)[zeros], torch.signbit(plain)[zeros])
            for tail in tails:
                assert (tail == 0)[~torch.isfinite(plain)].all()

    def test_overflow_gives_infinity_with_zero_tails(self, format):
        x = mcf.as_expansion(
            torch.full((2,), torch.finfo(format.base).max, dtype=format.base), format
        )
        for y in (x * x, x + x):
            assert torch.isinf(y.components[0]).all()
            assert all((t == 0).all() for t in y.components[1:])

    def test_x_minus_x_is_positive_zero(self, format):
        x = sample(format, 20)
        for y in (x - x, x + (-x)):
            assert all((t == 0).all() for t in y.components)
            assert not torch.signbit(y.components[0]).any()
