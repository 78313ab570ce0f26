"""In place and with `out=`: all terms are written, or none."""

import pytest
import torch

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, gappy, parameter, sample
from support.matrix import published, refuses

pytest.importorskip("expecttest")  # of which torch's operator database makes use
variants = pytest.importorskip("support.variants")

FORMATS = [mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2]

by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


# Wants a float64 result, as in PyTorch itself; another shape.
RAISE_IN_PLACE = {"float_power", "resize_"}
# A list of tensors.
RAISE_WITH_OUT = {"histogramdd"}
# No tensor; of the first sample, none from floats.
NOTHING_TO_WRITE = {"equal", "normal.number_mean"}
# Within them PyTorch writes expansions into plain tensors that have no shape yet.
NOT_INTO_PLAIN = {"_batch_norm_with_update", "linalg.solve", "linalg.solve_ex"}


@pytest.mark.thinned(of=45)
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.fp32x2], ids=lambda f: f.name)
@pytest.mark.parametrize("name", variants.IN_PLACE)
def test_in_place(name, format):
    outcome = variants.in_place(name, format, limit=1)
    raises, computes = name in RAISE_IN_PLACE, published(name, format)["computed"] > 0
    raises |= refuses(name, format)
    assert (outcome.raised > 0) == raises
    assert (outcome.computed > 0) == (computes and not raises)


@pytest.mark.thinned(of=45)
@pytest.mark.parametrize("name", variants.WITH_OUT)
def test_out(name):
    outcome = variants.with_out(name, mcf.bf16x2, limit=1)
    raises, computes = name in RAISE_WITH_OUT, published(name, mcf.bf16x2)["computed"] > 0
    assert (outcome.raised > 0) == raises
    writes = computes and not raises and name not in NOTHING_TO_WRITE
    assert (outcome.computed > 0) == writes
    assert (outcome.plain > 0) == (writes and name not in NOT_INTO_PLAIN)


@pytest.mark.slow
@by_format
@pytest.mark.parametrize("name", variants.IN_PLACE)
def test_every_sample_in_place(name, format):
    outcome = variants.in_place(name, format)
    computes = published(name, format)["computed"] > 0 and not refuses(name, format)
    assert (outcome.computed > 0) == (computes and name != "float_power")


@pytest.mark.slow
@by_format
@pytest.mark.parametrize("name", variants.WITH_OUT)
def test_every_sample_with_out(name, format):
    outcome = variants.with_out(name, format)
    computes = published(name, format)["computed"] > 0 and not refuses(name, format)
    if computes and name not in RAISE_WITH_OUT | {"equal"}:
        assert outcome.computed > 0


class TestAllTerms:
    """float64 does not hold these values."""

    @pytest.fixture(
        params=[f for f in mcf.formats.FORMATS if f.min_exponent < -100], ids=lambda f: f.name
    )
    def x(self, request):
        return gappy(request.param)

    @pytest.mark.parametrize("name", ["tril_", "triu_"])
    def test_in_place(self, x, name):
        x = x.view(2, 3)
        expected = getattr(x, name.rstrip("_"))()
        assert getattr(x, name)() is x
        assert_same_terms(x, expected)

    def test_out(self, x):
        indices = torch.tensor([4, 0])
        calls = [
            lambda **out: torch.cat([x, x], **out),
            lambda **out: torch.gather(x, 0, indices, **out),
            lambda **out: torch.index_select(x, 0, indices, **out),
            lambda **out: torch.take(x, indices, **out),
            lambda **out: torch.where(x > 1, x, -x, **out),
            lambda **out: torch.amax(x.view(2, 3), 1, **out),
            lambda **out: torch.nextafter(x, -x, **out),
            lambda **out: torch.maximum(x, x.flip(0), **out),
        ]
        for call in calls:
            expected = call()
            out = torch.full_like(expected, torch.nan)
            assert call(out=out) is out
            assert_same_terms(out, expected)

    def test_out_of_several_results(self, x):
        values, indices = torch.full_like(x, torch.nan), torch.empty(6, dtype=torch.long)
        result = torch.sort(x, out=(values, indices))
        assert result.values is values
        assert result.indices is indices
        assert_same_terms(values, x.sort().values)
        assert torch.equal(indices, x.sort().indices)

    def test_indices_into_a_plain_out(self, x):
        out = torch.empty((), dtype=torch.long)
        torch.argmax(x, out=out)
        assert out == x.argmax()


class TestTargets:
    def test_views_are_written_through(self, format):
        x = sample(format, 4, 3)
        expected = x.clone()
        expected[1:] = -expected[1:].sqrt()
        x[1:].sqrt_().neg_()
        x.T[0, 0].square_()
        expected[0, 0] = expected[0, 0].square()
        assert_same_terms(x, expected)

    def test_elements_that_are_the_same_in_memory(self, format):
        x = sample(format, 1)
        before = x.clone()
        for write in (
            lambda t: t.sqrt_(),
            lambda t: t.add_(1),
            lambda t: t.abs_(),
            lambda t: t.zero_(),
            lambda t: t.copy_(torch.ones(3)),
            lambda t: t.exp_() if format.precision <= 48 else t.sign_(),
            lambda t: torch.sqrt(before.expand(3), out=t),
        ):
            with pytest.raises(RuntimeError, match="single memory location"):
                write(x.expand(3))
            assert_same_terms(x, before)

    def test_overlap_with_an_input(self, format):
        x = sample(format, 3, 3)
        expected = x * x.T
        torch.mul(x, x.T, out=x)
        assert_same_terms(x, expected)
        expected = x[:-1] + x[1:]
        x[1:].add_(x[:-1])
        assert_same_terms(x[1:], expected)
        expected = x[1:].abs().sqrt()
        torch.sqrt(x[1:].abs(), out=x[:-1])
        assert_same_terms(x[:-1], expected)

    def test_strides_stay(self, format):
        x = sample(format, 3, 3)
        out = torch.zeros_like(x).T
        torch.mm(x, x, out=out)
        assert out.stride() == (1, 3)
        assert_same_terms(out, x @ x)

    def test_another_shape_is_refused_before_anything_is_written(self):
        x = sample(mcf.bf16x2, 4, 3)
        values, indices = torch.zeros_like(x), torch.zeros(5, 3, dtype=torch.long)
        with pytest.raises(NotImplementedError, match=r"shape \(4, 3\).*\(5, 3\)"):
            torch.sort(x, out=(values, indices))
        assert exact(values).eq(0).all()
        with pytest.raises(NotImplementedError, match=r"shape \(2, 2\)"):
            x.resize_(2, 2)
        with pytest.raises(NotImplementedError, match="shape"):
            torch.add(x, x, out=x.new_zeros(0))

    def test_a_plain_target_without_elements_takes_the_shape(self):
        x = sample(mcf.bf16x2, 4, 3)
        out = torch.empty(0)
        torch.mm(x, x.T, out=out)
        torch.testing.assert_close(out, exact(x @ x.T).float(), rtol=2.0**-15, atol=2.0**-20)

    def test_integers_do_not_take_fractions(self):
        x = sample(mcf.bf16x2, 3)
        for write in (
            lambda integers: integers.add_(x),
            lambda integers: integers.clamp_(x),
            lambda integers: integers.atan2_(x),
            lambda integers: torch.maximum(x, x, out=integers),
            lambda integers: torch.exp(x, out=integers),
            lambda integers: torch.where(x > 0, x, x, out=integers),
        ):
            integers = torch.zeros(3, dtype=torch.long)
            with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
                write(integers)
            assert integers.eq(0).all()

    def test_out_ends_no_graph_in_silence(self):
        p, out = parameter(mcf.bf16x2, 3), sample(mcf.bf16x2, 3)
        for call in (
            lambda: torch.exp(p, out=out),
            lambda: torch.exp(p, out=torch.zeros(3)),
            lambda: torch.special.ndtr(p, out=out),
            lambda: torch.add(p, p, out=torch.zeros(3)),
        ):
            with pytest.raises(RuntimeError, match="out="):
                call()

    def test_a_parameter_gives_all_its_terms(self, format):
        p, x = parameter(format, 3, 3), sample(format, 3, 3)
        out = torch.zeros_like(x)
        with torch.no_grad():
            torch.inner(p, p, out=out)
        assert_same_terms(out, torch.inner(x, x))

    def test_plain_inputs_enter_at_full_precision(self):
        x = torch.rand(50, dtype=torch.float64)
        out = mcf.as_expansion(torch.zeros(50), mcf.fp32x2)
        torch.exp(x, out=out)
        torch.testing.assert_close(exact(out), x.exp(), rtol=2.0**-48, atol=0)
        torch.linspace(0, 1, 50, out=out)
        expected = torch.linspace(0, 1, 50, dtype=torch.float64)
        torch.testing.assert_close(exact(out), expected, rtol=2.0**-47, atol=0)

    def test_in_inference_mode_and_as_an_operator_of_aten(self, format):
        x = sample(format, 2, 3)
        out = torch.full_like(x, torch.nan)
        assert torch.ops.aten.tril.out(x, 0, out=out) is out
        assert_same_terms(out, x.tril())
        with torch.inference_mode():
            out = torch.full_like(x, torch.nan)
            torch.tril(x, out=out)
            assert_same_terms(out, x.tril())
            x.clone().tril_()

    def test_compiled(self):
        def compute(x, y, out):
            torch.maximum(x, y, out=out)
            torch.exp(y, out=x)
            return y.tril_()

        torch.compiler.reset()
        given = [sample(mcf.bf16x2, 3, 3, seed=seed) for seed in range(3)]
        expected = [x.clone() for x in given]
        compute(*expected)
        torch.compile(compute, fullgraph=True, backend="aot_eager")(*given)
        for x, y in zip(given, expected, strict=True):
            assert_same_terms(x, y)


def test_another_shape_over_the_same_memory():
    x = sample(mcf.bf16x2, 3, 3)
    expected = x.as_strided((2, 2), (1, 3)).clone()
    assert x.as_strided_((2, 2), (1, 3)) is x
    assert_same_terms(x, expected)
    assert_same_terms(x.T, expected.T)
