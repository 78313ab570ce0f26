"""Structure of formats in blocks: rows keep the format, memory is shared or is not, and a number
that a tensor is yet to be multiplied by goes with it."""

import itertools
import linecache
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, same_terms

PACKAGE = str(Path(mcf.__file__).parent) + os.sep
LOCKED = "with LOCK:"

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
        # Its second event precedes the release, where no signal can come.
        takes_lock = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == LOCKED
        if event == "line" and not takes_lock and next(lines) == count:
            is_cut.append(True)
            sys.settrace(None)
            raise Cut
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield is_cut
    except Cut:
        pass
    finally:
        sys.settrace(before)


@pytest.mark.thinned(of=2)
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
    @pytest.mark.thinned(of=8)
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


class TestNumbersIntoPlaces:
    @by_format
    def test_places_that_are_not_there(self, format):
        x, half = pending(format, 4, 40)
        with pytest.raises(IndexError):
            x[torch.tensor([7])] = 0.3
        assert torch.equal(exact(x), half)


class TestFactories:
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
    message = r"two or more dimensions.*shape .*mcf\.bf16i16"
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
        lambda: mcf.checkpoint.from_terms(
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

    @pytest.mark.thinned(of=3)
    @by_format
    def test_a_write_that_is_cut_leaves_codes_and_scales_of_one_number(self, format):
        """Whether it has been multiplied is noted right after, and may be lost."""
        x = mcf.as_expansion(torch.full((2, 32), 3.0), format.nearest)
        x.mul_(0.5)
        for write in (
            x._factor.apply,
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
