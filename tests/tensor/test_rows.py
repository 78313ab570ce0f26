"""Structure of formats in blocks: rows keep the format, memory is shared or is not, and a number
that a tensor is yet to be multiplied by goes with it."""

import copy
import io
import itertools
import os
import pickle
import sys
from contextlib import contextmanager
from operator import setitem
from pathlib import Path

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, same_terms

PACKAGE = str(Path(mcf.__file__).parent) + os.sep

FORMATS = [mcf.mxfp8, mcf.ue5m3, mcf.e4m3i8]
OTHERS = [
    *(mcf.bf16x2, mcf.bf16x3, mcf.fp32x2, mcf.bf16i16, mcf.bf16i8),
    *(mcf.mxfp8, mcf.ue5m3, mcf.mxfp8.nearest, mcf.ue5m3.with_rounding("stochastic")),
]
SHAPES = [(4, 64), (3, 40), (5, 1), (2, 3, 11), (1, 33), (0, 7), (3, 0)]

by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5


def made(format, *shape, seed=0):
    return mcf.as_expansion(numbers(*shape, seed=seed), format)


def pending(format, *shape):
    """A tensor that is yet to be halved, and half its numbers; a half is exact."""
    x = made(format, *shape)
    half = exact(x) / 2
    x.mul_(0.5)
    assert x._factor.value == 0.5
    return x, half


def saved_and_loaded(x, **options):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


class Cut(BaseException):
    """As KeyboardInterrupt, but of this test."""


@contextmanager
def cut_at(count):
    """Raise before the line of the library that is the next after so many; what is yielded has an
    element if so."""
    lines, is_cut = itertools.count(), []

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and next(lines) == count:
            is_cut.append(True)
            sys.settrace(None)
            raise Cut
        return trace

    sys.settrace(trace)
    try:
        yield is_cut
    except Cut:
        pass
    finally:
        sys.settrace(None)


VIEWS = {
    "slice": lambda x: x[1:3],
    "steps": lambda x: x[::2],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "split": lambda x: x.split(3)[0],
    "sizes": lambda x: x.split([1, 3])[1],
    "chunk": lambda x: x.chunk(2)[1],
    "tensor_split": lambda x: x.tensor_split(3)[0],
    "view": lambda x: x.view(4, 5, 8),
    "view of what is left": lambda x: x.view(4, -1, 8),
    "view of rows that are left": lambda x: x.view(-1, 2, 20),
    "reshape": lambda x: x.reshape(4, 8, 5),
    "flatten": lambda x: x.view(4, 5, 8).flatten(1),
    "unflatten": lambda x: x.unflatten(1, (5, 8)),
    "all": lambda x: x[:, :],
    "dots": lambda x: x[...],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": torch.ops.aten.alias,
    "view_as": lambda x: x.view_as(x),
    "copy": copy.copy,
}


@by_format
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
class TestViews:
    def test_keep_the_format_and_the_numbers(self, format, view):
        x = made(format, 4, 40)
        y = view(x)
        assert y.format is format
        assert torch.equal(exact(y), view(exact(x)))
        assert y._writes is x._writes

    def test_share_memory_both_ways(self, format, view):
        x = made(format, 4, 40)
        y = view(x)
        y.fill_(2.0)
        assert (view(exact(x)) == 2).all()
        x.copy_(numbers(4, 40, seed=1))
        assert torch.equal(exact(y), view(exact(x)))

    def test_of_what_is_yet_to_be_multiplied(self, format, view):
        x, half = pending(format, 4, 40)
        assert torch.equal(exact(view(x)), view(half))
        assert torch.equal(exact(x), half)

    def test_are_multiplied_with_the_whole(self, format, view):
        x = made(format, 4, 40)
        half, y = exact(x) / 2, view(x)
        x.mul_(0.5)
        assert torch.equal(y + 0, view(half).float())
        assert torch.equal(exact(x), half)

    def test_the_whole_is_multiplied_where_they_are(self, format, view):
        x = made(format, 4, 40)
        wanted = exact(x)
        view(wanted).mul_(0.5) if view is not copy.copy else wanted.mul_(0.5)
        view(x).mul_(0.5)
        assert torch.equal(exact(x), wanted)

    def test_a_write_to_them_while_the_whole_is_to_be_multiplied(self, format, view):
        for is_before in (True, False):
            x = made(format, 4, 40)
            wanted = exact(x) / 2
            y = view(x) if is_before else None
            x.mul_(0.5)
            y = y if is_before else view(x)
            y.mul_(2)
            (wanted if view is copy.copy else view(wanted)).mul_(2)
            assert torch.equal(exact(x), wanted)
            assert torch.equal(exact(y), view(wanted))


@by_format
@pytest.mark.parametrize("elements", ["few", "many"])
def test_a_part_is_written_to_once_it_has_been_multiplied(format, elements):
    """Many are taken part by part, through scratch."""
    shape = (4, 64) if elements == "few" else (2048, 512)
    count = shape[0] * 3 // 4
    x = made(format, *shape)
    wanted, y = exact(x) / 2, x[:count]
    x.mul_(0.5)
    y.add_(torch.zeros(y.shape))
    assert torch.equal(exact(x), wanted)


@by_format
def test_what_raises_multiplies_nothing_twice_and_nothing_less(format):
    for shape in [(4, 64), (2048, 512)]:
        x, half = pending(format, *shape)
        for other in (torch.ones(3), torch.ones(shape, dtype=torch.complex64)):
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                x.add_(other)
        assert torch.equal(exact(x), half)


CUTS = {
    "select": lambda x: x[1],
    "unbind": lambda x: x.unbind(),
    "columns": lambda x: x[:, 1:],
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
    "squeeze_": lambda x: x.squeeze_(),
    "t_": lambda x: x.t_(),
    "a row is written to": lambda x: setitem(x, 1, 0.5),
    "columns are written to": lambda x: setitem(x, (slice(None), 3), 0.5),
}


@by_format
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_views_that_cut_blocks_are_refused(format, cut):
    x, half = pending(format, 4, 40)
    before = x.writes.item()
    with pytest.raises(
        NotImplementedError, match=rf"{format.name} \([14], 40\).*share a scale.*as_plain"
    ):
        cut(x)
    assert x.shape == (4, 40)
    assert x.writes.item() == before
    assert torch.equal(exact(x), half)


COPIES = {
    "clone": lambda x: x.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": lambda x: saved_and_loaded(x, weights_only=True),
    "save in a state dict": lambda x: saved_and_loaded({"x": x}, weights_only=True)["x"],
    "to": lambda x: x.to("cpu", copy=True),
    "dtype": lambda x: x.to("cpu", x.dtype, copy=True),
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "index": lambda x: x[torch.arange(len(x))],
    "mask": lambda x: x[torch.ones(len(x), dtype=torch.bool)],
    "index_select": lambda x: x.index_select(0, torch.arange(len(x))),
    "flip": lambda x: x.flip(0).flip(0),
    "roll": lambda x: x.roll(1, 0).roll(-1, 0),
    "cat": lambda x: torch.cat([x[:1], x[1:]]),
    "pad": lambda x: nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, 3))[:-3].clone(),
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "terms": lambda x: mcf.from_terms(mcf.as_terms({"x": x}))["x"].clone(),
}


@by_format
@by_shape
@pytest.mark.parametrize("take", COPIES.values(), ids=COPIES)
def test_copies(format, shape, take):
    x = made(format, *shape)
    for number in (1, 0.5):
        x.mul_(number)
        wanted = exact(x)
        y = take(x)
        assert_same_terms(x, y)
        assert torch.equal(x.writes, y.writes)
        for z in (x, y):
            z.add_(0.3)
        assert_same_terms(x, y)
        y.zero_()
        assert not x.numel() or not exact(x).eq(0).any()
        x.copy_(wanted)


@by_format
def test_operations_that_take_no_rows_give_plain_numbers(format):
    x, half = pending(format, 4, 40)
    for function in (
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.stack([x, x]),
        lambda x: x.repeat(2, 1),
        lambda x: x.flip(1),
        lambda x: x.roll(1),
        lambda x: x.gather(0, torch.zeros(1, 40, dtype=torch.long)),
        lambda x: x.tril(),
        lambda x: nn.functional.pad(x, (1, 1)),
        lambda x: nn.functional.pad(x, (0, 0, 1, 1), value=1.0),
        lambda x: x[x > 0.3],
        lambda x: x[torch.tensor([0]), torch.tensor([3])],
        lambda x: torch.where(x > 0.3, x, 0.0),
        lambda x: x * 3,
        lambda x: x.sum(0),
        torch.vmap(lambda row: row * 2),
    ):
        y = function(x)
        assert type(y) is torch.Tensor
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), function(half), rtol=1e-6, atol=0)


@by_format
def test_cat_with_others_is_of_numbers(format):
    x = made(format, 2, 40)
    for other in (numbers(1, 40).float(), made(mcf.bf16i16, 1, 40), made(mcf.bf16x2, 1, 40)):
        y = torch.cat([x, other])
        assert torch.equal(exact(y), torch.cat([exact(x), exact(other)]))
    for other in FORMATS:
        z = made(other, 1, 40)
        y = torch.cat([x, z])
        assert getattr(y, "format", None) is (format if other is format else None)
        assert torch.equal(exact(y), torch.cat([exact(x), exact(z)]))


class TestCopiesBetweenFormats:
    @by_shape
    @pytest.mark.parametrize(
        ("target", "source"),
        [pair for pair in itertools.product(OTHERS, OTHERS) if any(f.shared for f in pair)],
        ids=lambda f: f.name,
    )
    def test_one_rounding(self, target, source, shape):
        x = made(source, *shape)
        y, wanted = (mcf.as_expansion(torch.zeros(shape), target) for _ in range(2))
        torch.manual_seed(0)
        y.copy_(x)
        if target.nearest is source.nearest:
            assert all(map(torch.equal, x.components, y.components))
            return
        torch.manual_seed(0)
        wanted.copy_(exact(x))
        assert_same_terms(y, wanted)

    @by_format
    def test_float64_is_rounded_once(self, format):
        """Beside a tie, which a float32 in between would round to the other side."""
        tie, above = 1 + 2.0**-format.precision, 1 + 2.0 ** (1 - format.precision)
        x = torch.tensor([[tie + 2.0**-40, tie - 2.0**-40, tie]], dtype=torch.float64)
        own = format.nearest
        for y in (
            mcf.as_expansion(x, own),
            mcf.as_expansion(torch.zeros(1, 3), own).copy_(x),
            mcf.as_expansion(torch.zeros(1, 3), own).copy_(mcf.as_expansion(x, mcf.fp32x2)),
        ):
            assert exact(y).tolist() == [[above, 1.0, 1.0]]
        for i, wanted in enumerate([above, 1.0, 1.0]):
            y = mcf.as_expansion(torch.zeros(1, 3), own).fill_(x[0, i].item())
            assert exact(y).eq(wanted).all()
            z = mcf.as_expansion(torch.zeros(1, 3), own)
            z[torch.ones(1, 3) > 0] = x[0, i]
            assert exact(z).eq(wanted).all()

    @by_format
    def test_what_is_broadcast(self, format):
        for other in (
            torch.tensor(0.75),
            torch.full((40,), 0.75),
            torch.full((3, 1), 0.75, dtype=torch.float64),
            mcf.as_expansion(torch.full((1, 40), 0.75), format),
            mcf.as_expansion(torch.full((40,), 0.75), mcf.bf16x2),
        ):
            x = made(format, 3, 40)
            x.mul_(0.5)
            assert exact(x.copy_(other)).eq(0.75).all()

    @by_format
    def test_a_copy_takes_the_place_of_what_was_to_be_multiplied(self, format):
        x, _ = pending(format, 3, 40)
        y, half = pending(format, 3, 40)
        x.copy_(y)
        assert torch.equal(exact(x), half)
        x.mul_(0.5)
        x[1:].copy_(y[1:])
        half[0] /= 2
        assert torch.equal(exact(x), half)


PLACEMENTS = {
    "fill_": lambda x: x.fill_(0.3),
    "fill_ of a tensor": lambda x: x.fill_(torch.tensor(0.3)),
    "zero_": lambda x: x.zero_(),
    "masked_fill_": lambda x: x.masked_fill_(mask(x), 0.3),
    "masked_fill_ of a tensor": lambda x: x.masked_fill_(mask(x), torch.tensor(0.3)),
    "index_put_": lambda x: x.index_put_((torch.tensor([0, 2]),), torch.tensor(0.3)),
    "x[i, j]": lambda x: setitem(x, (torch.tensor([0]), torch.tensor([3])), 0.3),
    "x[mask]": lambda x: setitem(x, mask(x), 0.3),
    "x[1:]": lambda x: setitem(x, slice(1, None), 0.3),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1]), 0.3),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([1]), torch.full((1, 40), 0.3)),
    "scatter_": lambda x: x.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 0.3),
    "masked_scatter_": lambda x: x.masked_scatter_(mask(x), torch.full((160,), 0.3)),
}


class TestNumbersIntoPlaces:
    @by_format
    @pytest.mark.parametrize("write", PLACEMENTS.values(), ids=PLACEMENTS)
    def test_round_to_nearest_and_do_not_count(self, format, write):
        x = made(format, 4, 40)
        wanted, before = exact(x).float(), x.writes.item()
        write(x)
        write(wanted)
        nearest = mcf.as_expansion(wanted, format.nearest)
        assert torch.equal(exact(x), exact(nearest))
        assert x.writes.item() == before

    @by_format
    @pytest.mark.parametrize("write", PLACEMENTS.values(), ids=PLACEMENTS)
    def test_where_something_is_to_be_multiplied(self, format, write):
        x, half = pending(format, 4, 40)
        write(x)
        half = half.float()
        untouched = half.clone()
        write(untouched)
        is_old = untouched == half
        assert torch.equal(exact(x).float()[is_old], half[is_old])

    @by_format
    def test_places_that_are_not_there(self, format):
        x, half = pending(format, 4, 40)
        with pytest.raises(IndexError):
            x[torch.tensor([7])] = 0.3
        assert torch.equal(exact(x), half)

    @by_format
    def test_sums_are_ordinary_writes(self, format):
        x = made(format, 4, 40)
        before = x.writes.item()
        x.index_add_(0, torch.tensor([1]), torch.ones(1, 40))
        x.scatter_add_(1, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
        assert x.writes.item() == before + 2


def mask(x):
    return torch.arange(x.numel()).view(x.shape) % 3 == 0


class TestFactories:
    @by_format
    @by_shape
    def test_like(self, format, shape):
        x, _ = pending(format, *shape)
        for make, value in (
            (torch.zeros_like, 0),
            (torch.ones_like, 1),
            (lambda x: torch.full_like(x, 0.75), 0.75),
            (lambda x: torch.full_like(x, 3), 3),
            (lambda x: torch.empty_like(x).zero_(), 0),
            (lambda x: x.new_zeros(x.shape), 0),
            (lambda x: x.new_ones(x.shape), 1),
            (lambda x: x.new_full(x.shape, 0.75), 0.75),
            (lambda x: x.new_empty(x.shape).fill_(0.75), 0.75),
        ):
            y = make(x)
            assert (y.format, y.shape, y.role) == (format, shape, "value")
            assert y.writes == 0
            assert exact(y).eq(value).all()
        assert x._factor.value == 0.5

    @by_format
    def test_other_dtypes_devices_and_layouts(self, format):
        x = made(format, 2, 3, 4, 5)
        for make in (torch.zeros_like, torch.ones_like, torch.empty_like):
            assert type(make(x, dtype=torch.float64)) is torch.Tensor
            assert make(x, dtype=x.dtype).format is format
            y = make(x, device="meta")
            assert (y.format, y.device.type, y.shape) == (format, "meta", x.shape)
            y = make(x, memory_format=torch.channels_last)
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert y.components[1].shape == x.components[1].shape
        assert x.new_zeros(3, 4, device="meta").format is format
        assert type(x.new_zeros(3, dtype=torch.float64)) is torch.Tensor
        assert type(torch.rand_like(x)) is torch.Tensor

    @by_format
    def test_meta(self, format):
        x = made(format, 3, 40).to("meta")
        assert (x.format, x.device.type) == (format, "meta")
        x.mul_(0.5)
        x.add_(1)
        assert x[1:].shape == (2, 40)
        assert "meta" in repr(x)

    @by_format
    def test_other_dtypes_leave_the_format(self, format):
        for dtype in {torch.float64, torch.float16, torch.bfloat16, torch.float32} - {format.dtype}:
            x, half = pending(format, 3, 40)
            y = x.to(dtype)
            assert type(y) is torch.Tensor
            assert torch.equal(y, half.to(dtype))
        assert x.to(x.dtype) is x
        assert x.to(torch.int32).dtype == torch.int32


@by_format
def test_strides_of_templates(format):
    """Blocks go by the order of indices, whatever the order in memory."""
    plain = numbers(2, 4, 3, 5)
    for x in (
        plain,
        plain.to(memory_format=torch.channels_last),
        plain.transpose(1, 2).contiguous().transpose(1, 2),
        numbers(2, 4, 3, 10)[..., ::2],
    ):
        y = mcf.as_expansion(x, format.nearest)
        assert torch.equal(exact(y), exact(mcf.as_expansion(x.contiguous(), format.nearest)))
        assert torch.equal(exact(y.contiguous()), exact(y))
        assert torch.equal(exact(y[1:]), exact(y)[1:])
        z = torch.zeros_like(y)
        assert z.stride() == torch.zeros_like(x).stride()
        for _ in range(2):
            z.add_(x)
            z.mul_(0.5)
            z.add_(0)
        wanted = torch.zeros_like(y.contiguous())
        for _ in range(2):
            wanted.add_(x.contiguous())
            wanted.mul_(0.5)
            wanted.add_(0)
        assert torch.equal(exact(z), exact(wanted))


@by_format
@pytest.mark.parametrize("shape", [(), (7,), (0,), (64,)], ids=str)
def test_vectors_are_refused_at_every_entrance(format, shape):
    x = made(format, 2, 4)
    message = r"rows.*shape .*mcf\.bf16i16"
    for enter in (
        lambda: mcf.as_expansion(numbers(*shape), format),
        lambda: mcf.as_expansion(mcf.as_expansion(numbers(*shape), mcf.bf16i16), format),
        lambda: x.new_zeros(shape),
        lambda: x.new_empty(shape),
        lambda: x.new_ones(shape),
        lambda: x.new_full(shape, 2.0),
        lambda: mcf.MCFTensor(
            [torch.zeros(shape, dtype=c.dtype) for c in format.components], format
        ),
        lambda: mcf.from_terms(
            {
                "x": torch.zeros(shape, dtype=torch.uint8),
                **{
                    f"x.{format.name}.{c.name}": torch.zeros(shape, dtype=c.dtype)
                    for c in format.components[1:]
                },
            }
        ),
    ):
        with pytest.raises(ValueError, match=message):
            enter()


@pytest.mark.parametrize("format", [mcf.mxfp8, mcf.ue5m3], ids=lambda f: f.name)
def test_parameters_are_refused(format):
    with pytest.raises(TypeError, match=f"Parameter: {format.name} stores the states"):
        nn.Parameter(made(format, 2, 4))
    with pytest.raises((TypeError, ValueError), match=format.name):
        mcf.as_expansion(nn.Linear(3, 4), format)


@by_format
def test_data_is_taken(format):
    x, y = made(format, 3, 40), made(format, 3, 40, seed=1)
    half = exact(y) / 2
    y.mul_(0.5)
    x.data = y
    assert torch.equal(exact(x), half)
    x.mul_(0.5)
    assert torch.equal(exact(y), half / 2)
    y.add_(1)
    assert torch.equal(exact(x), exact(y))
    assert x._writes is y._writes


@by_format
def test_printing(format):
    x = mcf.as_expansion(torch.tensor([[1.0, 2.0], [0.5, 0.25]]), format)
    assert repr(x) == (
        f"MCFTensor([[1.0000, 2.0000],\n           [0.5000, 0.2500]], format={format.name})"
    )
    x.mul_(0.5)
    assert "[0.5000, 1.0000]" in repr(x)
    assert repr(format) == f"mcf.{format.name}"
    assert eval(repr(format.nearest), {"mcf": mcf}) is format.nearest


@by_format
def test_inference_mode(format):
    x = made(format, 3, 40)
    with torch.inference_mode():
        y = made(format, 3, 40)
        y.mul_(0.5)
        y[1:].mul_(2)
        assert x[1:].is_inference() is False
        assert y[1:].is_inference()
    assert torch.equal(exact(y)[0], exact(x)[0] / 2)
    assert torch.equal(exact(y)[1:], exact(x)[1:])


@by_format
def test_deterministic_algorithms(format):
    x = made(format, 3, 40)
    torch.use_deterministic_algorithms(True)
    try:
        x.mul_(0.5)
        x.add_(1)
        x.index_put_((torch.tensor([0]),), torch.tensor(0.5))
        assert exact(torch.empty_like(x)).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert exact(x)[0].eq(0.5).all()


class TestWhatIsYetToBeMultiplied:
    @by_format
    def test_is_noted_exactly(self, format):
        x = made(format, 3, 40)
        wanted = exact(x)
        for _ in range(1000):
            x.mul_(0.999)
        assert torch.equal(x.writes, torch.tensor(1))
        torch.testing.assert_close((x + 0).double(), wanted * 0.999**1000, rtol=3e-7, atol=0)

    @by_format
    @pytest.mark.parametrize("number", [2.0, 0.0, -0.5, 1.5, float("nan"), torch.tensor(0.5)])
    def test_other_factors_are_written(self, format, number):
        x = made(format, 3, 40)
        before = x.writes.item()
        if format is mcf.ue5m3 and not number >= 0:
            assert exact(x.mul_(number)).isnan().all()
            return
        wanted = mcf.as_expansion(exact(x) * number, format.nearest)
        x.mul_(number)
        assert x._factor.value == 1
        assert x.writes.item() == before + 1
        if number in (2.0, 0.0, -0.5):
            assert torch.equal(exact(x), exact(wanted))

    @by_format
    def test_products_stay_numbers_of_float32(self, format):
        """Where each of two products is one, and that of the factors is none."""
        x = mcf.as_expansion(torch.full((2, 32), 2.0**120), format)
        for _ in range(2):
            x.mul_(2.0**-100)
        assert exact(x).eq(2.0**-80).all()

    @by_format
    def test_in_lists(self, format):
        xs = [made(format, 3, 40), made(mcf.bf16i16, 3, 40), made(format, 2, 8)]
        wanted = [exact(x) * 0.5 for x in xs]
        torch._foreach_mul_(xs, 0.5)
        assert [getattr(x._factor, "value", None) for x in xs] == [0.5, None, 0.5]
        torch._foreach_mul_(xs, [1.0, 1.0, 0.25])
        wanted[2] *= 0.25
        for x, own in zip(xs, wanted, strict=True):
            assert torch.equal(exact(x), own)

    @by_format
    def test_is_read_by_every_operation(self, format):
        reads = (
            lambda x: x + 0,
            lambda x: 0 + x,
            lambda x: x.sqrt().square(),
            lambda x: torch.ones(4, 40, dtype=torch.float64).mul_(x),
            lambda x: torch._foreach_add([x], 0)[0],
            lambda x: torch.add(x, 0),
            lambda x: torch.zeros(4, 40).addcmul_(x, torch.ones(4, 40)),
            lambda x: torch.ones(4, 40).lerp_(x, 1.0),
            lambda x: torch.empty(4, 40).copy_(x),
            lambda x: mcf.as_expansion(torch.zeros(4, 40), mcf.fp32x2).add_(x),
            lambda x: mcf.as_expansion(torch.zeros(4, 40), mcf.bf16i16).copy_(x),
            lambda x: torch.maximum(x, torch.zeros(4, 40)),
            lambda x: torch.stack([x.double(), x.double()])[1],
            lambda x: torch.tensor(x.tolist()),
            lambda x: torch.from_numpy(x.numpy()),
            lambda x: mcf.as_plain(x, torch.float64),
            lambda x: format.decode(x.components)[0],
        )
        for read in reads:
            x, half = pending(format, 4, 40)
            torch.testing.assert_close(exact(read(x)), half, rtol=1e-6, atol=0)

    @by_format
    @pytest.mark.parametrize("other", [mcf.bf16x2, mcf.bf16x3, mcf.fp32x2], ids=lambda f: f.name)
    def test_beside_expansions(self, format, other):
        x, half = pending(format, 4, 40)
        y = mcf.as_expansion(numbers(4, 40, seed=1), other)
        for z, wanted in (
            (x * y, half * exact(y)),
            (y - x, exact(y) - half),
            (torch.addcmul(y, x, y, value=0.5), exact(y) + half * exact(y) / 2),
            (y.clone().addcdiv_(x, x), exact(y) + 1),
            (torch._foreach_add([y, y], [x, x])[1], exact(y) + half),
        ):
            torch.testing.assert_close(exact(z), wanted, rtol=2.0**-14, atol=0)
        x.add_(y)
        torch.testing.assert_close(exact(x), half + exact(y), rtol=0.13, atol=0)
        z, half = pending(format, 4, 40)
        torch._foreach_add_([z], [y])
        assert same_terms(x, z)

    @by_format
    def test_a_write_that_is_cut_leaves_codes_and_scales_of_one_number(self, format):
        """Whether it has been multiplied is noted right after, and may be lost."""
        x = mcf.as_expansion(torch.full((2, 32), 3.0), format.nearest)
        x.mul_(0.5)
        for write in (
            x._factor.settle,
            lambda: x.add_(1.0),
            lambda: x.copy_(torch.full((2, 32), 2.5)),
            lambda: x.fill_(2.5),
        ):
            for i in itertools.count():
                with cut_at(i) as is_cut:
                    write()
                (found,) = exact(x).unique().tolist()
                assert found in (1.5, 2.5, 0.75, 1.25), i
                if not is_cut:
                    break
                x.fill_(3.0)
                x.mul_(0.5)
            assert i > 3
