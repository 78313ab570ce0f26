"""The contract of formats: what numbers, arithmetic and structure promise, the toys included.

`test_contract_in_training.py` has what programs do with them; `support/contract.py` has the
formats, the exceptions with their reasons, and the oracles. A format of a module of yours joins
them by `pytest -p my_module tests/formats -k my_format`.
"""

import copy
import inspect
import itertools
import pickle
from fractions import Fraction
from operator import setitem

import pytest
import torch
from torch.nn import functional as F

import mcftensor as mcf
from mcftensor.formats import ExpansionFormat
from support import contract, toys
from support.contract import (
    assert_near,
    assert_same,
    by,
    fractions,
    is_nearest,
    loss,
    makes,
    numbers,
    over,
    propagates,
    sample,
    saved_and_loaded,
    shares,
    stores,
    unit,
)

HALF = Fraction(1, 2)


def in_nearest(x):
    return mcf.MCFTensor(x.components, x.format.nearest)


def test_a_toy_with_a_scale_has_at_most_60_lines():
    for toy in (toys.Int8Blocks, toys.ScaledTail):
        lines = inspect.getsource(toy) + inspect.getsource(toys._power_below)
        assert lines.count("\n") <= 60


def test_each_exception_is_one_of_some_format():
    for exempt in contract.EXEMPT:
        assert any(map(exempt.which, contract.FORMATS)), exempt
    assert contract.QUICK.issubset(f.name for f in contract.FORMATS)


# ------------------------------------------------------------------------------- what is stored


class TestConversion:
    @over()
    def test_zeros_and_ones_come_back(self, format):
        for value in (0.0, 1.0):
            x = torch.full((2, 40), value)
            y = mcf.as_expansion(x, format)
            assert (y.format, y.dtype, y.shape) == (format, format.dtype, x.shape)
            assert torch.equal(numbers(y), x.double())
            assert torch.equal(mcf.as_plain(y, torch.float32), x)

    @over()
    def test_numbers_are_rounded_once(self, format):
        """Of one size, but for one in each block, since its range may decide about steps; some come
        near the bound, or it would say nothing."""
        x = torch.rand(32, 64, dtype=torch.float64) + 1
        if shares(format):
            x[:, ::32] *= 2.0**-9
        y = mcf.as_expansion(x, format)
        has_scale = propagates(format) or shares(format)
        error = (numbers(y) - x).abs() / (2 if has_scale else x)
        bound = unit(format)
        if isinstance(format, ExpansionFormat):  # each term but the first has a sign of its own
            bound = max(bound / 2 ** (format.terms - 1), mcf.finfo(format).smallest_subnormal)
        assert error.max() <= bound + 2.0**-53
        assert format.precision > 40 or error.max() > bound / 10

    @pytest.mark.thinned(of=2)
    @over("range")
    def test_bit_patterns(self, format):
        """Each number within its own precision, as far as that reaches; the others in steps."""
        x = contract.float32_patterns(4096).view(-1, 1).double().repeat(1, 32)
        x = x.abs() if contract.is_unsigned(format) else x
        info = mcf.finfo(format)
        x = torch.where(x.abs() <= info.max, x, 1.0)
        error = (numbers(mcf.as_expansion(x, format)) - x).abs()
        if stores(format) and format.precision >= 24:
            assert not error[x.abs() >= info.full_precision_min].any()
            assert contract.is_float16(format) or not error.any()
        bound = (x.abs() * unit(format)).maximum(torch.tensor(2 * info.smallest_subnormal))
        is_kept = x.abs() >= info.full_precision_min
        assert (error <= bound)[is_kept].all()
        below = info.full_precision_min * 2 * unit(format)
        assert (error <= max(below, info.smallest_subnormal))[~is_kept].all()

    @over("identity")
    def test_what_was_stored_is_stored_again_as_it_is(self, format):
        x = torch.randn(32, 64, dtype=torch.float64).exp()
        first = mcf.as_expansion(x, format)
        again = mcf.as_expansion(first, format)
        assert torch.equal(numbers(first), numbers(again))
        if format.precision <= 53:
            by_plain = mcf.as_expansion(mcf.as_plain(first, torch.float64), format)
            assert torch.equal(numbers(first), numbers(by_plain))

    @over()
    def test_plain_numbers_are_those_stored(self, format):
        x = sample(format, 3, 40)
        exact = numbers(x)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            found = mcf.as_plain(x, dtype)
            assert type(found) is torch.Tensor
            error = (found.double() - exact).abs()
            assert (error <= exact.abs() * torch.finfo(dtype).eps / 2).all()
        assert torch.equal(torch.tensor(x.tolist(), dtype=torch.float64), exact)
        assert torch.equal(torch.from_numpy(x.double().numpy()), exact)
        assert x.to(format.dtype) is x
        assert [v for row in mcf.exact.to_fraction(x) for v in row] == fractions(x)
        if isinstance(format, ExpansionFormat):
            assert_same(
                mcf.exact.from_exact(mcf.exact.to_fraction(x), format.nearest), in_nearest(x)
            )

    @over("special")
    def test_special_values(self, format):
        x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0]])
        y = numbers(mcf.as_expansion(x, format))
        assert contract.kinds(y)[2:] == ["nan", "finite", "finite", "finite"]
        assert torch.equal(y[0, 3:], torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
        assert contract.kinds(y)[:2] in (["inf", "-inf"], ["nan", "nan"])

    @over("range")
    def test_the_largest(self, format):
        largest = min(torch.finfo(format.dtype).max, mcf.finfo(format).max)
        x = mcf.as_expansion(torch.full((1, 32), largest, dtype=torch.float64), format)
        found = numbers(x)
        assert ((found / largest - 1).abs() <= unit(format) * 2).all()
        again = mcf.as_expansion(mcf.as_plain(x, torch.float64), format)
        assert torch.equal(numbers(again), found)

    @over()
    def test_shapes(self, format):
        for shape in [
            (2, 0),
            (0, 3),
            (1, 1),
            (2, 33),
            (2, 34),
            (2, 3, 11),
            (2, 4, 9),
            (3, 2, 2, 5),
        ]:
            if shape != contract.storable(format, shape):
                with pytest.raises(ValueError, match=r"even second dimension.*shape .*mcf\.mxfp8"):
                    mcf.as_expansion(torch.ones(shape), format)
                continue
            x = mcf.as_expansion(torch.ones(shape), format)
            assert torch.equal(numbers(x), torch.ones(shape, dtype=torch.float64))
            assert mcf.as_plain(x, torch.float32).shape == shape

    @over()
    def test_vectors(self, format):
        for shape in [(), (0,), (1,), (33,)]:
            if shares(format):
                with pytest.raises(
                    ValueError, match=r"two or more dimensions.*shape .*mcf\.bf16i16"
                ):
                    mcf.as_expansion(torch.ones(shape), format)
            else:
                x = mcf.as_expansion(torch.ones(shape), format)
                assert torch.equal(numbers(x), torch.ones(shape, dtype=torch.float64))

    @pytest.mark.thinned(of=4)
    @over(only=lambda f: not propagates(f))
    @pytest.mark.parametrize("other", [mcf.fp32x2, mcf.bf16i16, mcf.bf16x3], ids=lambda f: f.name)
    def test_from_other_formats_and_into_them(self, format, other):
        """With one rounding, by conversion and by `copy_`."""
        x = sample(format, 3, 40)
        bound = 2 * unit(other)
        assert_near(mcf.as_expansion(x, other), fractions(x), bound)
        y = sample(other, 3, 40, seed=1)
        assert_near(mcf.as_expansion(y, format), fractions(y), unit(format))
        assert_near(x.copy_(y), fractions(y), unit(format))
        z = mcf.as_expansion(torch.zeros(3, 40), other)
        assert_near(z.copy_(x), fractions(x), bound)

    @over("range", only=lambda f: is_nearest(f) and stores(f) and f.precision <= 24)
    @pytest.mark.parametrize("step", [0.5 + 2.0**-24, 0.5 - 2.0**-24, 1.0])
    def test_float64_is_rounded_once(self, format, step):
        """Beside a tie, which a float32 in between would round to the other side."""
        last = 2.0 ** (1 - format.precision)
        x = torch.full((1, 32), 1 + step * last, dtype=torch.float64)
        nearest = torch.minimum((x - 1).abs(), (x - 1 - last).abs())  # of two that are stored
        zeros = mcf.as_expansion(torch.zeros(1, 32), format)
        placed = zeros.clone()
        placed[torch.ones(1, 32) > 0] = x[0, 0]
        for y in (
            mcf.as_expansion(x, format),
            zeros.clone().copy_(x),
            zeros.clone().copy_(mcf.as_expansion(x, mcf.fp32x2)),
            zeros.clone().fill_(x[0, 0].item()),
            placed,
        ):
            assert ((numbers(y) - x).abs() <= nearest).all()


# ----------------------------------------------------------------------------------- arithmetic

OUT_OF_PLACE = {
    "add": (lambda x, y: x + y, lambda a, b: a + b),
    "sub alpha": (lambda x, y: torch.sub(x, y, alpha=0.5), lambda a, b: a - HALF * b),
    "rsub": (lambda x, y: 2 - x, lambda a, b: 2 - a),
    "mul": (lambda x, y: x * y, lambda a, b: a * b),
    "mul number": (lambda x, y: x * 0.75, lambda a, b: a * 3 / 4),
    "div": (lambda x, y: x / y, lambda a, b: a / b),
    "reciprocal": (lambda x, y: x.reciprocal(), lambda a, b: 1 / a),
    "square": (lambda x, y: x.square(), lambda a, b: a * a),
    "neg": (lambda x, y: -x, lambda a, b: -a),
    "abs": (lambda x, y: (-x).abs(), lambda a, b: a),
    "addcmul": (lambda x, y: torch.addcmul(x, y, x, value=0.5), lambda a, b: a + HALF * b * a),
    "addcdiv": (lambda x, y: torch.addcdiv(x, y, x, value=0.5), lambda a, b: a + HALF * b / a),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.25), lambda a, b: a + (b - a) / 4),
    "maximum": (torch.maximum, max),
    "vmap": (lambda x, y: torch.vmap(lambda row: row * 0.75)(x), lambda a, b: a * 3 / 4),
    "clamp": (lambda x, y: x.clamp(0.75, 1.5), lambda a, b: min(max(a, Fraction(3, 4)), 3 * HALF)),
    "where": (lambda x, y: torch.where(x > y, x, y), max),
    "foreach": (
        lambda x, y: torch._foreach_add([y, x], [x, y], alpha=0.5)[1],
        lambda a, b: a + HALF * b,
    ),
}
IN_PLACE = {
    "add_": (lambda x, y: x.add_(y, alpha=0.5), lambda a, b: a + HALF * b),
    "sub_": (lambda x, y: x.add_(1).sub_(0.5), lambda a, b: a + HALF),
    "mul_": (lambda x, y: x.mul_(y), lambda a, b: a * b),
    "mul_ number": (lambda x, y: x.mul_(0.75), lambda a, b: a * 3 / 4),
    "div_": (lambda x, y: x.div_(y), lambda a, b: a / b),
    "addcmul_": (lambda x, y: x.addcmul_(y, y, value=0.25), lambda a, b: a + b * b / 4),
    "addcdiv_": (lambda x, y: x.addcdiv_(y, x, value=0.25), lambda a, b: a + b / a / 4),
    "lerp_": (lambda x, y: x.lerp_(y, 0.25), lambda a, b: a + (b - a) / 4),
    "clamp_": (lambda x, y: x.clamp_(min=1.25), lambda a, b: max(a, Fraction(5, 4))),
    "square_": (lambda x, y: x.square_(), lambda a, b: a * a),
    "copy_": (lambda x, y: x.copy_(y), lambda a, b: b),
    "out=": (lambda x, y: torch.mul(x, y, out=x), lambda a, b: a * b),
    "foreach add": (lambda x, y: (torch._foreach_add_([x], [y]), x)[1], lambda a, b: a + b),
    "foreach mul": (lambda x, y: (torch._foreach_mul_([x], [0.75]), x)[1], lambda a, b: a * 3 / 4),
    "foreach addcdiv": (
        lambda x, y: (torch._foreach_addcdiv_([x], [y], [y], 0.5), x)[1],
        lambda a, b: a + HALF,
    ),
}


def loss_of_result(format):
    """What rounding in the type that arithmetic gives loses."""
    return torch.finfo(format.result.dtype).eps if stores(format) else unit(format)


TO_FLOAT64 = {
    "sum": lambda x, y: x.sum(0),
    "sum of all": lambda x, y: x.sum(),
    "mean": lambda x, y: x.mean(1),
    "norm": lambda x, y: torch.linalg.vector_norm(x),
    "products": lambda x, y: torch.bmm(x.view(4, 2, 20), y.view(4, 20, 2)),
    "sqrt": lambda x, y: x.sqrt(),
    "amax": lambda x, y: x.amax(0),
    "sort": lambda x, y: x.sort(0)[0],
}
SAME = {
    "gt": lambda x, y: x > y,
    "eq": lambda x, y: x == x.clone(),
    "argmax": lambda x, y: x.argmax(0),
    "isfinite": lambda x, y: x.isfinite(),
    "sign": lambda x, y: (x - y) < 0,
    "topk": lambda x, y: x.topk(2, 0)[1],
}


class TestArithmetic:
    @over()
    @by(OUT_OF_PLACE)
    @pytest.mark.thinned(of=16)
    def test_out_of_place(self, format, do):
        compute, formula = do
        x, y = sample(format, 3, 40), sample(format, 3, 40, seed=1)
        before = contract.bits(x)
        found = compute(x, y)
        expected = [formula(*row) for row in zip(fractions(x), fractions(y), strict=True)]
        if propagates(format):
            assert isinstance(found, mcf.scaling.ScaledTensor)
            assert_near(found, expected, 4 * 2.0**-format.lead.precision)
        elif stores(format) and not (do is OUT_OF_PLACE["where"] and not format.shared):
            assert type(found) is torch.Tensor
            assert found.dtype == format.result.dtype
            assert_near(found, expected, 4 * torch.finfo(found.dtype).eps)
        else:  # a choice among numbers of a storage format moves them
            assert found.format is format
            assert_near(found, expected, loss(format))
        assert contract.bits(x) == before

    @over()
    @by(IN_PLACE)
    @pytest.mark.thinned(of=16)
    def test_in_place(self, format, do):
        compute, formula = do
        x, y = sample(format, 3, 40), sample(format, 3, 40, seed=1)
        if lacks_rule(format, IN_PLACE, do):
            with pytest.raises(NotImplementedError, match="no rule for scales"):
                compute(x, y)
            return
        expected = [formula(*row) for row in zip(fractions(x), fractions(y), strict=True)]
        generator = torch.get_rng_state()
        found = compute(x, y)
        is_drawn = format.rounding == "stochastic"
        assert is_drawn or torch.equal(torch.get_rng_state(), generator)
        assert found is x
        assert found.format is format
        assert_near(found, expected, 2 * loss(format))

    @pytest.mark.wing("wide")
    @pytest.mark.thinned(of=4)
    @over()
    @by(TO_FLOAT64)
    def test_reductions_and_functions(self, format, do):
        x, y = sample(format, 4, 40), sample(format, 4, 40, seed=1)
        last = loss_of_result(format) if makes(format, "reductions") else unit(format.lead)
        found, expected = do(x, y), do(numbers(x), numbers(y))
        bound = 16 * max(last, 2.0**-50)
        assert ((numbers(found) - expected).abs() <= bound * expected.abs().max()).all()

    @pytest.mark.thinned(of=4)
    @over()
    @by(SAME)
    def test_comparisons(self, format, do):
        x, y = sample(format, 5, 8), sample(format, 5, 8, seed=1)
        if do is SAME["isfinite"] and not makes(format, "isfinite"):
            with pytest.raises(NotImplementedError, match="not implemented for 'Float8_e4m3fn'"):
                do(x, y)
        else:
            assert torch.equal(do(x, y), do(numbers(x), numbers(y)))

    @pytest.mark.wing("wide")
    @over(only=lambda f: not propagates(f))
    def test_functions(self, format):
        """exp, out of place and in place."""
        x = sample(format, 4, 40)
        expected = numbers(x).exp()
        last = loss_of_result(format)
        for found, bound in ((x.exp(), last), (x.clone().exp_(), last + unit(format))):
            bound = (32 * bound + 2.0**-52) * expected.max()  # float64's own exp is off, too
            assert ((numbers(found) - expected).abs() <= bound).all()

    @over(only=lambda f: not propagates(f) and stores(f))
    def test_expansions_beside(self, format):
        """The result is one, of the format of the expansion, which may have more bits."""
        x, y = sample(format, 3, 40), sample(mcf.fp32x2, 3, 40, seed=1)
        expected = [a + b for a, b in zip(fractions(x), fractions(y), strict=True)]
        for found in (x + y, y + x, torch._foreach_add([x], [y])[0]):
            assert found.format is mcf.fp32x2
            assert_near(found, expected, loss(mcf.fp32x2))

    def test_the_longest_format_meets_a_stochastic_one(self):
        long, short = mcf.Format(torch.bfloat16, 6), mcf.bf16x2.with_rounding("stochastic")
        x, y = sample(long, 4), sample(short, 4)
        results = (x + y, y + x, torch.cat([x, y]), torch.maximum(x, y), torch.where(x > y, x, y))
        assert {result.format for result in results} == {long}
        assert x.add_(y).format == long
        assert y.add_(x).format == short

    @over()
    def test_operands_of_other_kinds(self, format):
        """Plain tensors of other types, tensors without dimensions, broadcast ones."""
        x = sample(format, 3, 40)
        exact = numbers(x)
        for other in (
            torch.full((3, 40), 0.75).to(
                format.dtype if format.dtype.itemsize > 1 else torch.float16
            ),
            torch.tensor(0.75),
            torch.full((40,), 0.75),
            torch.full((3, 1), 0.75),
        ):
            y = x.clone()
            y.mul_(other)
            error = (numbers(y) - exact * 0.75).abs().max()
            assert error <= 2 * (2 * loss(format) + 2.0**-52)

    @over("special")
    def test_special_values_in_arithmetic(self, format):
        values = [torch.inf, -torch.inf, torch.nan, 0.0, 1.0, 2.0]
        x, y = (torch.tensor([v]) for v in zip(*itertools.product(values, values), strict=True))
        x, y = mcf.as_expansion(x, format), mcf.as_expansion(y, format)
        a, b = numbers(x), numbers(y)
        for compute in (torch.add, torch.sub, torch.mul, torch.div, torch.maximum):
            assert contract.kinds(numbers(compute(x, y))) == contract.kinds(compute(a, b))
        stored = numbers(mcf.as_expansion(a + b, format))  # a format may have no infinity
        assert contract.kinds(numbers(x.add_(y))) == contract.kinds(stored)


# ------------------------------------------------------------------------------------ structure

VIEWS = {
    "slice": lambda x: x[1:3],
    "steps": lambda x: x[::2],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "split": lambda x: x.split(3)[0],
    "split sizes": lambda x: x.split([1, 3])[1],
    "chunk": lambda x: x.chunk(2)[1],
    "tensor_split": lambda x: x.tensor_split(3)[0],
    "view": lambda x: x.view(4, 8, 5),
    "view of what is left": lambda x: x.view(4, -1, 5),
    "view of rows that are left": lambda x: x.view(-1, 2, 20),
    "reshape": lambda x: x.reshape(4, 8, 5),
    "flatten": lambda x: x.view(4, 8, 5).flatten(1),
    "unflatten": lambda x: x.unflatten(1, (8, 5)),
    "all": lambda x: x[:, :],
    "dots": lambda x: x[...],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": torch.ops.aten.alias,
    "view_as": lambda x: x.view_as(x),
}
ACROSS = {
    "select": lambda x: x[1],
    "unbind": lambda x: x.unbind()[2],
    "columns": lambda x: x[:, 1:5],
    "split columns": lambda x: x.split(7, 1)[1],
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "flat": lambda x: x.view(-1),
    "other rows": lambda x: x.view(8, 20),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x[:1].expand(5, 40),
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (40, 1)),
    "unfold": lambda x: x.unfold(1, 2, 2),
}
IN_PLACE_ACROSS = {
    "t_": lambda x: x.t_(),
    "squeeze_": lambda x: x.squeeze_(),
    "a row is written to": lambda x: setitem(x, 1, 0.5),
    "a column is written to": lambda x: setitem(x, (slice(None), 3), 0.5),
}
WHOLE_COPIES = {
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "to": lambda x: x.to("cpu", copy=True),
    "dtype": lambda x: x.to("cpu", x.dtype, copy=True),
    "index": lambda x: x[torch.arange(len(x))],
    "mask": lambda x: x[torch.ones(len(x), dtype=torch.bool)],
    "index_select": lambda x: x.index_select(0, torch.arange(len(x))),
    "flip": lambda x: x.flip(0).flip(0),
    "roll": lambda x: x.roll(1, 0).roll(-1, 0),
    "cat": lambda x: torch.cat([x[:1], x[1:]]),
    "pad": lambda x: F.pad(x, (0, 0) * (x.dim() - 1) + (0, 3))[:-3].clone(),
    "copy_": lambda x: x.clone().zero_().copy_(x),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved_and_loaded,
    "save in a state dict": lambda x: saved_and_loaded({"x": x})["x"],
    "terms": lambda x: mcf.checkpoint.from_terms(mcf.checkpoint.as_terms({"x": x}))["x"].clone(),
}
COPIES = {
    "index": lambda x: x[torch.tensor([2, 0, 0])],
    "mask of rows": lambda x: x[torch.tensor([True, False, True, True])],
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 3])),
    "cat": lambda x: torch.cat([x, x[1:]]),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "part": lambda x: x[1:].contiguous().clone(),
}
COPIES_ACROSS = {
    "stack": lambda x: torch.stack([x, x]),
    "cat columns": lambda x: torch.cat([x, x], 1),
    "repeat": lambda x: x.repeat(2, 1),
    "flip columns": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1),
    "gather": lambda x: x.gather(0, torch.zeros(1, 40, dtype=torch.long)),
    "tril": lambda x: x.tril(),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad with a number": lambda x: F.pad(x, (0, 0, 1, 1), value=1.0),
    "mask": lambda x: x[torch.arange(160).view(4, 40) % 3 == 0],
    "pairs": lambda x: x[torch.tensor([0, 1]), torch.tensor([3, 3])],
}

halved = pytest.mark.parametrize("halved", [False, True], ids=["", "halved"])


def taken(format, halved):
    """Numbers, which have just been multiplied in place, or not: formats that share scales may note
    the number beside them. A half is exact, but for scaled terms with more bits than float32."""
    x = sample(format, 4, 40)
    exact = numbers(x)
    if not halved:
        return x, exact
    x.mul_(0.5)
    if not propagates(format):
        return x, exact / 2
    assert_moved(x, exact / 2)
    return x, numbers(x)


class TestStructure:
    @over()
    @by(VIEWS)
    @pytest.mark.thinned(of=16)
    def test_views_keep_the_format_and_share_memory(self, format, do):
        x, exact = taken(format, True)
        y = do(x)
        assert y.format is format

        def are_alike():
            return torch.equal(numbers(y), do(exact)) and torch.equal(numbers(x), exact)

        assert are_alike()
        for target, plain, factor in ((y, do(exact), 0.5), (x, exact, 0.5), (y, do(exact), 2)):
            target.mul_(factor)
            plain.mul_(factor)
            assert propagates(format) or x.writes == y.writes
        assert are_alike()
        y.fill_(2.0)
        do(exact).fill_(2.0)
        assert are_alike()
        x.copy_(sample(format, 4, 40, seed=1))
        exact = numbers(x)
        assert are_alike()

    @over()
    def test_shallow_copies_share_memory(self, format):
        x, exact = taken(format, True)
        y = copy.copy(x)
        y.mul_(0.5)
        assert torch.equal(numbers(x), exact / 2)
        assert torch.equal(numbers(y), exact / 2)
        assert propagates(format) or x.writes == y.writes

    @over()
    @by(ACROSS)
    @pytest.mark.thinned(of=8)
    def test_views_across_rows(self, format, do):
        """Whole blocks alone are viewed; other formats are viewed in any way."""
        x, exact = taken(format, True)
        if shares(format):
            self.check_that_is_refused(x, do)
            return
        y = do(x)
        assert y.format is format
        assert torch.equal(numbers(y), do(exact))
        if do is not ACROSS["expand"]:  # whose elements have one place
            y.fill_(2.0)
        else:
            x.fill_(2.0)
        assert (do(numbers(x)) == 2).all()
        assert (numbers(y) == 2).all()

    @over(only=shares)
    @by(IN_PLACE_ACROSS)
    def test_what_would_cut_a_block_is_refused(self, format, do):
        self.check_that_is_refused(taken(format, True)[0], do)

    def check_that_is_refused(self, x, do):
        before, writes = numbers(x), None if x.writes is None else x.writes.item()
        match = rf"{x.format.name} \([14], 40\).*share a scale"
        with pytest.raises(NotImplementedError, match=match):
            do(x)
        assert x.shape == (4, 40)
        assert torch.equal(numbers(x), before)
        assert x.writes is None or x.writes.item() == writes

    @over()
    @by(WHOLE_COPIES)
    @pytest.mark.parametrize("shape", [(4, 40), (2, 3, 11), (0, 7), (3, 0)], ids=str)
    @pytest.mark.thinned(of=48)
    def test_copies_go_on_as_the_original_does(self, format, do, shape):
        """They keep all that is stored, counts of writes too, in memory of their own."""
        if do is WHOLE_COPIES["pickle"] and not makes(format, "pickles"):
            do = WHOLE_COPIES["save"]
        x = sample(format, *contract.storable(format, shape))
        x.mul_(0.5)
        exact, y = numbers(x), do(x)
        assert keeps(y, format)
        assert_moved(y, exact)
        if makes(format, "identity"):
            assert_same(y, x)
        if format.rounding != "stochastic" and makes(format, "identity"):
            for z in (x, y):
                z.add_(0.3)
            assert_same(y, x)
            exact = numbers(x)
        y.zero_()
        assert torch.equal(numbers(x), exact)

    @over()
    @by(COPIES)
    @pytest.mark.thinned(of=4)
    def test_copies_of_rows(self, format, do):
        for is_halved in (False, True):
            x, exact = taken(format, is_halved)
            y = do(x)
            assert keeps(y, format)
            assert_moved(y, do(exact))
            y.zero_()
            assert torch.equal(numbers(x), exact)

    @over()
    @by(COPIES_ACROSS)
    @pytest.mark.thinned(of=8)
    def test_copies_across_rows(self, format, do):
        for is_halved in (False, True):
            x, exact = taken(format, is_halved)
            y = do(x)
            assert type(y) is torch.Tensor if shares(format) else keeps(y, format)
            assert_moved(y, do(exact))

    @pytest.mark.thinned(of=2)
    @over()
    @pytest.mark.parametrize("shape", [(4, 40), (2, 3, 11), (0, 7)], ids=str)
    def test_factories(self, format, shape):
        shape = contract.storable(format, shape)
        some, whole = (0.75, 3) if format.precision > 1 else (0.5, 4)
        x = sample(format, *shape)
        x.mul_(0.5)
        states = format.of_states if propagates(format) else format
        for make, value in (
            (torch.zeros_like, 0),
            (torch.ones_like, 1),
            (lambda x: torch.full_like(x, some), some),
            (lambda x: torch.full_like(x, whole), whole),
            (lambda x: torch.empty_like(x).zero_(), 0),
            (lambda x: x.new_zeros(x.shape), 0),
            (lambda x: x.new_ones(x.shape), 1),
            (lambda x: x.new_full(x.shape, some), some),
            (lambda x: x.new_empty(x.shape).fill_(some), some),
        ):
            y = make(x)
            assert (y.format, y.shape) == (states, shape)
            assert (numbers(y) == value).all()
        if format.rounding == "balanced":
            likes = (torch.zeros_like(x), torch.full_like(x, some), torch.empty_like(x))
            assert [y.writes.item() for y in likes] == [0, 0, 0]


def keeps(y, format):
    """Whether copies are in a format; what rules compute of scaled ones is rounded to nearest."""
    return y.format is format or (propagates(format) and y.format is format.nearest)


def assert_moved(y, expected):
    """The numbers that are expected, whatever their format; one more rounding of some."""
    if getattr(y, "format", None) is None or makes(y.format, "identity"):
        assert torch.equal(numbers(y), expected)
    else:
        assert ((numbers(y) - expected).abs() <= unit(y.format) * expected.abs()).all()


def mask():
    return torch.arange(160).view(4, 40) % 3 == 0


V = 0.30078125  # of 7 bits
WRITES = {
    "x[1:]": lambda x: setitem(x, slice(1, None), V),
    "x[mask]": lambda x: setitem(x, mask(), V),
    "x[i, j]": lambda x: setitem(x, (torch.tensor([0]), torch.tensor([3])), V),
    "fill_": lambda x: x.fill_(V),
    "fill_ of a tensor": lambda x: x.fill_(torch.tensor(V)),
    "zero_": lambda x: x.zero_(),
    "masked_fill_": lambda x: x.masked_fill_(mask(), V),
    "masked_fill_ of a tensor": lambda x: x.masked_fill_(mask(), torch.tensor(V, dtype=x.dtype)),
    "index_put_": lambda x: x.index_put_((torch.tensor([0, 2]),), torch.tensor(V, dtype=x.dtype)),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1]), V),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([1]), values(x, 1, 40)),
    "scatter_": lambda x: x.scatter_(1, torch.zeros(4, 1, dtype=torch.long), V),
    "masked_scatter_": lambda x: x.masked_scatter_(mask(), values(x, 160)),
}
ADDITIONS = {
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1]), values(x, 1, 40)),
    "scatter_add_": lambda x: x.scatter_add_(
        1, torch.zeros(4, 1, dtype=torch.long), values(x, 4, 1)
    ),
}


def values(x, *shape):
    return torch.full(shape, V, dtype=x.dtype)


class TestWritesIntoPlaces:
    @over()
    @by(WRITES)
    @pytest.mark.thinned(of=12)
    def test_round_to_nearest_and_do_not_count(self, format, do):
        for is_halved in (False, True):
            x, exact = taken(format, is_halved)
            if lacks_rule(format, WRITES, do):
                with pytest.raises(NotImplementedError, match="no rule for scales"):
                    do(x)
                return
            before = None if propagates(format) or x.writes is None else x.writes.item()
            do(x)
            do(exact)
            if propagates(format):
                assert (numbers(x) - exact).abs().max() <= 4 * loss(format)
                continue
            assert torch.equal(numbers(x), numbers(mcf.as_expansion(exact, format.nearest)))
            is_noted = is_halved and shares(format)  # what was noted is written with it
            assert before is None or is_noted or x.writes.item() == before

    @pytest.mark.wing("wide")
    @over("without rules")
    @by(ADDITIONS)
    def test_additions_are_ordinary_writes(self, format, do):
        x, exact = taken(format, False)
        before = None if x.writes is None else x.writes.item()
        do(x)
        do(exact)
        assert (numbers(x) - exact).abs().max() <= 2 * (2 * loss(format) + 2.0**-52)
        assert before is None or x.writes.item() == before + 1

    @over()
    def test_rows(self, format):
        x, exact = taken(format, False)
        x[1:].copy_(x[:3].clone())
        exact[1:] = exact[:3].clone()
        assert (numbers(x) - exact).abs().max() <= 4 * loss(format)


def lacks_rule(format, table, do):
    (name,) = (name for name, function in table.items() if function is do)
    return propagates(format) and name in contract.WITHOUT_RULES


# ----------------------------------------------------------------- rounding, facts, and printing


def has_room_below_its_last_bit(f):
    """Whether what arithmetic near 1 is evaluated in sees a share of it."""
    if propagates(f):
        return False
    return f.precision < (21 if stores(f) else 40) and mcf.finfo(f).full_precision_min < 0.1


class TestRounding:
    @over("rounding")
    def test_ways(self, format):
        assert format.with_rounding(format.rounding) is format
        for rounding in ("nearest", "stochastic", "balanced"):
            try:
                other = format.with_rounding(rounding)
            except ValueError as error:
                assert "terms" in str(error) or format.name in str(error)  # noqa: PT017
                continue
            assert other.rounding == rounding
            assert other.components == format.components
            assert other.with_rounding(format.rounding) is format
        assert format.nearest.rounding == ("nearest" if format.takes_key else format.rounding)

    @pytest.mark.thinned(of=4)
    @over(
        "rounding",
        "even steps",
        only=lambda f: not is_nearest(f) and has_room_below_its_last_bit(f),
    )
    def test_small_updates_survive_in_the_mean(self, format):
        """Of which rounding to nearest loses all."""
        last = 2.0 ** (1 - format.precision)
        x, nearest = (
            mcf.as_expansion(torch.ones(16, 64, dtype=torch.float64), f)
            for f in (format, format.nearest)
        )
        update = torch.full((16, 64), 0.07 * last, dtype=torch.float64)
        for _ in range(300):
            x.add_(update)
            nearest.add_(update)
        moved = (numbers(x) - 1) / last
        slack = 5 if format.rounding == "balanced" else 30
        assert (moved - 21).abs().max() < slack
        assert (moved.mean() - 21).abs() < 3
        if stores(format):
            assert (numbers(nearest) == 1).all()

    @over("counts")
    def test_writes_are_counted_where_rounding_is_balanced(self, format):
        x = sample(format.nearest if format.takes_key else format, 4, 40)
        x = mcf.MCFTensor(x.components, format)
        if format.rounding != "balanced":
            assert x.writes is None or format.rounding == "stochastic"
            return
        y = torch.full((4, 40), 0.1, dtype=torch.float64)
        assert mcf.as_expansion(y, format).writes == 1
        for write in (
            lambda x: x.add_(0.3),
            lambda x: x.div_(1.5),
            lambda x: x.sqrt_(),
            lambda x: x.clamp_(max=0.9),
            lambda x: x.copy_(y),
            lambda x: torch._foreach_add_([x], 0.3),
            lambda x: torch.add(x, 0.3, out=x),
            lambda x: torch.maximum(x, mcf.as_expansion(y, format), out=x),
            lambda x: torch._foreach_maximum_([x], [mcf.as_expansion(y, format)]),
            lambda x: x[1:].add_(0.3),
            lambda x: x.data.add_(0.3),
            lambda x: x.detach().add_(0.3),
        ):
            before = x.writes.item()
            write(x)
            write(x)
            assert x.writes.item() == x[1:].writes.item() == before + 2
        before = x.writes.item()
        x.fill_(0.1)
        x[1:] = 0.3
        x.masked_fill_(mask(), 0.7)
        x.zero_()
        _ = (x + 1, x.sum(), x == 0.1, x.clone(), x[1:])
        assert x.writes.item() == before
        assert x.writes.dtype == torch.int64
        assert x.writes.shape == ()


class TestFacts:
    @over("finfo")
    def test_finfo(self, format):
        """Of numbers that are the largest of their block."""
        info = mcf.finfo(format)
        own = format.nearest

        def held(x):
            made = mcf.as_expansion(torch.full((1, 32), x, dtype=torch.float64), own)
            return numbers(made)[0, 0].item()

        assert info.bits == 8 * format.bytes
        assert info.min == -info.max
        if stores(format):
            assert info.eps == 2.0 ** (1 - format.precision)
            assert held(info.max) == info.max
            for x in (info.smallest_normal, info.full_precision_min):
                assert held(x * (1 + info.eps)) == x * (1 + info.eps)
            assert held(info.smallest_subnormal) == info.smallest_subnormal
        if format.precision <= 48 and is_nearest(own):
            assert abs(held(1 + info.eps / 2.1) - 1) <= info.eps

    @over()
    def test_names(self, format):
        known = mcf.scaling.ScaledFormat if propagates(format) else mcf.Format
        assert known.from_name(format.name) is format
        assert copy.deepcopy(format) is pickle.loads(pickle.dumps(format)) is format
        assert eval(repr(format), {"mcf": mcf, "torch": torch}) is format
        widths = [
            c.dtype.itemsize / (2 if c.is_packed else 1)
            for c in format.components
            if not c.is_shared
        ]
        assert format.bytes == sum(widths)

    @over()
    def test_printing(self, format):
        x = mcf.as_expansion(torch.tensor([[1.0, 0.75], [2.0, 1.5]]), format)
        for shown in (repr(x), str(x)):
            assert "[1.0000, 0.7500]" in shown
            assert f"format={format.name}" in shown
        assert f"format={format.name}" in repr(x.to("meta"))
        if makes(format, "parameters"):
            text = repr(torch.nn.Parameter(x))
            assert text.startswith("Parameter containing:\n")
            assert text.endswith("requires_grad=True)")
