"""What a newcomer tries first works, or says what does."""

import decimal
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mcftensor as mcf
from support.helpers import assert_same_terms, sample

INPUTS = {
    "Linear": (lambda: nn.Linear(4, 2), [(3, 4)]),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3), [(1, 3, 5, 5)]),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 4, 3), [(1, 3, 5)]),
    "LayerNorm": (lambda: nn.LayerNorm(4), [(3, 4)]),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 2), [(3, 4), (3, 4)]),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), [(3, 4), (3, 4), (3, 4)]),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), [(3, 4)]),
}


class TestFloat32Input:
    @pytest.mark.parametrize("with_gradients", [True, False])
    @pytest.mark.parametrize("name", INPUTS)
    def test_the_error_says_what_to_cast(self, name, with_gradients):
        make, shapes = INPUTS[name]
        model = mcf.as_expansion(make())
        match = r"bf16x.*compute in torch\.bfloat16 and meet.*x\.to\(torch\.bfloat16\).*autocast\('"
        with torch.set_grad_enabled(with_gradients), pytest.raises(RuntimeError, match=match):
            model(*[torch.ones(shape) for shape in shapes])

    @pytest.mark.parametrize("name", INPUTS)
    def test_what_it_says_works(self, name):
        make, shapes = INPUTS[name]
        model = mcf.as_expansion(make())
        model(*[torch.ones(shape).to(torch.bfloat16) for shape in shapes])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if name in ("Linear", "Conv2d", "ConvTranspose1d", "MultiheadAttention"):
                model(*[torch.ones(shape) for shape in shapes])
            else:  # as of a model in plain bf16
                with pytest.raises(RuntimeError, match=r"x\.to\(torch\.bfloat16\)|dtype"):
                    model(*[torch.ones(shape) for shape in shapes])

    def test_other_errors_are_those_of_torch(self):
        model = mcf.as_expansion(nn.Linear(4, 2))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
            model(torch.ones(3, 5).bfloat16())
        assert "x.to" not in str(error.value)


class TestFormatsAsDtypes:
    def test_to(self, format):
        x = torch.rand(3, dtype=torch.float64)
        for made in (x.to(format), x.to(dtype=format), torch.Tensor.to(x, format, copy=True)):
            assert_same_terms(made, mcf.as_expansion(x, format))
        assert x.to(mcf.bf16x2).to(format).format is format
        kept = sample(format, 3)
        assert kept.to(format) is kept
        assert kept.to(format, copy=True) is not kept
        assert_same_terms(
            torch.tensor([1, 2]).to(format), mcf.as_expansion(torch.tensor([1.0, 2.0]), format)
        )

    def test_a_value_stands_for_its_format(self, format):
        value, x = sample(format, 2), torch.tensor([1 / 3, 2.0**20 + 1], dtype=torch.float64)
        for given in (x, x.long(), mcf.as_expansion(x, mcf.fp32x2)):
            stays = isinstance(given, mcf.MCFTensor) and given.dtype == format.dtype
            wanted = given if stays else mcf.as_expansion(given.double(), format)
            for made in (given.to(value), given.to(tensor=value, copy=True), given.type_as(value)):
                assert_same_terms(made, wanted)
        assert x.to(nn.Parameter(value)).dtype == format.dtype  # as a model computes
        assert type(x.to(nn.Parameter(value))) is torch.Tensor

    def test_a_value_that_is_only_stored_stands_for_its_numbers(self):
        x = torch.tensor([1 / 3], dtype=torch.float64)
        made = x.to(mcf.as_expansion(torch.ones(1), mcf.bf16i16))
        assert torch.equal(made, x.float())
        assert made.dtype == torch.float32

    def test_gradients_pass(self):
        x = torch.ones(3, requires_grad=True)
        (x.to(mcf.bf16x2) * 3).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0))
        with pytest.raises(ValueError, match=r"bf16x2 of shape \(3,\).*into bf16x3.*detach"):
            nn.Parameter(sample(mcf.bf16x2, 3)).to(mcf.bf16x3)

    def test_what_makes_tensors(self, format):
        tenth = torch.full((2,), 0.1, dtype=format)
        plain = torch.full((2,), 0.1, dtype=torch.float64)
        assert_same_terms(tenth, mcf.as_expansion(plain, format))
        assert_same_terms(torch.tensor([0.1, 0.1], dtype=format), tenth)
        assert_same_terms(torch.zeros_like(plain, dtype=format), torch.zeros(2, dtype=format))
        assert torch.rand(2, dtype=format, requires_grad=True).requires_grad
        assert torch.empty(2, device="meta", dtype=format).is_meta

    def test_results(self):
        x = torch.rand(100)
        assert_same_terms(x.sum(dtype=mcf.bf16x2), mcf.as_expansion(x.double().sum(), mcf.bf16x2))
        with pytest.raises(TypeError, match=r"sum: fp64x2 is a format.*x\.to\(mcf\.fp64x2\)"):
            x.sum(dtype=mcf.fp64x2)

    def test_elsewhere_they_are_refused(self):
        for call in (
            lambda: nn.Linear(2, 2).to(mcf.bf16x2),
            lambda: mcf.as_expansion(nn.Linear(2, 2)).to(mcf.bf16x2),
            lambda: torch.add(torch.ones(2), mcf.bf16x2),
        ):
            with pytest.raises(TypeError, match=r"bf16x2 is a format.*mcf\.as_expansion\(x, "):
                call()

    def test_under_compile(self):
        x = torch.rand(3)
        compiled = torch.compile(lambda x: x.to(mcf.bf16x2) * 3, backend="eager")
        assert_same_terms(compiled(x), mcf.as_expansion(x, mcf.bf16x2) * 3)


class TestNamesOfFormats:
    def test_wherever_a_format_is_taken(self):
        x = torch.rand(3)
        assert mcf.as_expansion(x, "fp32x2").format is mcf.fp32x2
        model = mcf.as_expansion(nn.Linear(2, 2), "bf16x3", overrides={"bias": "bf16i16"})
        assert (model.weight.format, model.bias.format) == (mcf.bf16x3, mcf.bf16i16)
        optimizer = mcf.collage(torch.optim.AdamW(model.parameters()), {"exp_avg": "bf16x2"})
        model(torch.ones(1, 2).bfloat16()).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].format is mcf.bf16x2
        assert mcf.exact.from_exact("0.1", "bf16x3").format is mcf.bf16x3
        assert mcf.finfo("bf16x2") == mcf.finfo(mcf.bf16x2)
        assert len(mcf.expansion.convert((x,), "fp32x3")) == len(mcf.expansion.expand(x, "fp32x3"))
        assert len(mcf.expansion.add((x,), (x,), format="fp32x2")) == 2
        assert mcf.MCFTensor([x, x * 0], "fp32x2").format is mcf.fp32x2
        with mcf.accumulate_gradients(model, "bf16x3"):
            pass

    @pytest.mark.parametrize(
        ("bad", "what"),
        [
            ("bf16x9", "not a format"),
            ("bfloat16", "a plain dtype"),
            ("float32", "a plain dtype"),
            ("", "not a format"),
        ],
    )
    def test_what_is_none(self, bad, what):
        for call in (
            lambda: mcf.as_expansion(torch.ones(2), bad),
            lambda: mcf.exact.from_exact("0.1", bad),
            lambda: mcf.finfo(bad),
        ):
            with pytest.raises(TypeError, match=f"{bad!r} is {what}.*its name as a string"):
                call()


class TestShowing:
    def test_one_number_by_a_specification(self, format):
        x = mcf.as_expansion(torch.tensor(2.0, dtype=torch.float64), format) / 3
        assert f"{x:.2f}" == "0.67"
        assert f"{x:>8.1e}" == " 6.7e-01"
        assert float(f"{x}") == x.item()
        assert f"{sample(mcf.bf16x2, 8).sum():+.3f}"[0] in "+-"

    def test_more_digits_than_a_float_has(self):
        x = mcf.exact.from_exact("2/3", mcf.fp64x2)
        assert f"{x:.30f}" == "0." + "6" * 29 + "7"
        assert f"{mcf.exact.from_exact('inf', mcf.fp64x2):.3f}" == "inf"

    def test_tensors_of_one_dimension_have_none(self):
        with pytest.raises(TypeError, match="format"):
            f"{sample(mcf.bf16x2, 3):.2f}"

    @pytest.mark.parametrize(
        ("number", "format", "spec", "expected"),
        [
            ("12345678901234567.89", mcf.fp64x2, ".2f", "12345678901234567.89"),
            (10**23, mcf.fp64x2, ".0f", "1" + "0" * 23),
            ("2.5000000000000000001", mcf.fp32x2, ".0f", "3"),
            ("2.5000000000000000001", mcf.fp32x3, ".1g", "3"),
            ("2.5000000000000000001", mcf.fp32x3, ">8.0e", "   3e+00"),
            (2**0 + 2.0**-60, mcf.bf16x2, ".0%", "100%"),
            (1234567, mcf.bf16x3, "_.2f", "1_234_567.00"),
            (1000000, mcf.bf16x2, ".3g", "1e+06"),
            ("-0.3", mcf.bf16x2, "+.0f", "-0"),
            ("nan", mcf.fp64x2, ".2f", "nan"),
            ("-inf", mcf.fp64x2, "8.1f", "    -inf"),
        ],
    )
    def test_digits_are_rounded_once(self, number, format, spec, expected):
        assert f"{mcf.exact.from_exact(number, format):{spec}}" == expected

    def test_all_digits_are_printed_on_demand(self):
        x = mcf.exact.from_exact([["1/3", "-2/7"], ["1e-20", "0"]], mcf.fp64x2)
        short = repr(x)
        torch.set_printoptions(precision=30)
        try:
            text, one = repr(x), repr(mcf.exact.from_exact("1/3", mcf.fp64x2))
            assert repr(sample(mcf.bf16x2, 2)).count(".") == 2  # as torch shows it
        finally:
            torch.set_printoptions(profile="default")
        assert one == f"MCFTensor(0.{'3' * 30}, format=fp64x2)"
        assert f"3.{'3' * 30}e-1" in text
        assert "-2.857142857142857142857142857143e-1" in text
        assert text.startswith("MCFTensor([[")
        assert text.endswith("]], format=fp64x2)")
        assert repr(x) == short

    def test_decimals(self, format):
        x = sample(format, 2, 3)
        for row, fractions in zip(mcf.exact.to_decimal(x), mcf.exact.to_fraction(x), strict=True):
            for found, expected in zip(row, fractions, strict=True):
                error = abs(Fraction(found) - expected)
                assert error <= abs(expected) * Fraction(2) ** -format.precision
        with decimal.localcontext() as context:
            context.prec = 7
            third = mcf.exact.from_exact("1/3", mcf.fp64x2)
            assert mcf.exact.to_decimal(third, 20) == Decimal("0.33333333333333333333")

    def test_decimals_of_all_else(self):
        assert mcf.exact.to_decimal(torch.tensor(0.5)) == Decimal("0.5")
        tenth = torch.tensor(0.1)
        assert mcf.exact.to_decimal(tenth, 40) == Decimal(tenth.item())
        assert mcf.exact.to_decimal(tenth, 3) == Decimal("0.100")
        found = mcf.exact.to_decimal(mcf.as_expansion(torch.tensor([torch.inf, -0.0, torch.nan])))
        assert [str(x) for x in found] == ["Infinity", "-0", "NaN"]
        with pytest.raises(TypeError, match=r"to_decimal: got torch\.int64"):
            mcf.exact.to_decimal(torch.tensor(1))
        with pytest.raises(ValueError, match="digits"):
            mcf.exact.to_decimal(torch.tensor(1.0), 0)

    def test_bytes_of_all_components(self, format):
        x = sample(format, 3, 4)
        assert x.nbytes == 12 * format.bytes
        assert nn.Parameter(x).nbytes == x.nbytes
        scaled = sample(mcf.mxfp8, 3, 64)
        assert scaled.nbytes == sum(t.nbytes for t in scaled.components) == 3 * 64 + 3 * 2
        p = nn.Parameter(sample(mcf.bf16x2, 2, 2))
        assert F.linear(torch.ones(1, 2).bfloat16(), p).nbytes == 4
