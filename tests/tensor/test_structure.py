"""Structure operations: the same on every term."""

from operator import setitem

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence, unpad_sequence

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, gappy, parameter, sample

INDEX = torch.tensor([2, 0])

MOVES = {
    "detach": lambda x: x.detach(),
    "alias": torch.ops.aten.alias,
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "view": lambda x: x.view(12),
    "reshape": lambda x: x.t().reshape(2, 6),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1)),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "movedim": lambda x: x.movedim(0, 1),
    "select": lambda x: x[1],
    "slice": lambda x: x[:2, 1:3],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "expand": lambda x: x[:1].expand(5, 4),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "split": lambda x: x.split(2)[1],
    "split sizes": lambda x: x.split([1, 2])[1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind(0)[2],
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 1),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "index": lambda x: x[INDEX.to(x.device)],
    "mask": lambda x: x[torch.arange(12, device=x.device).view(3, 4) % 2 == 0],
    "index_select": lambda x: x.index_select(0, INDEX.to(x.device)),
    "gather": lambda x: x.gather(0, INDEX.to(x.device).view(1, 2)),
    "take": lambda x: x.take(INDEX.to(x.device)),
    "masked_select": lambda x: x.masked_select(torch.ones(3, 4, device=x.device) > 0),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "block_diag": lambda x: torch.block_diag(x, x),
    "narrow_copy": lambda x: torch.narrow_copy(x, 1, 1, 2),
    "to device": lambda x: x.to(x.device, copy=True),
}


@pytest.mark.thinned(of=8)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("make", [sample, parameter])
def test_moves_act_on_every_term(move, make, format, device):
    x = make(format, 3, 4, device=device).detach()
    y = move(x)
    assert y.role == x.role
    assert y.format == format
    for term, source in zip(y.components, x.components, strict=True):
        assert torch.equal(term, move(source))
        assert term.stride() == move(source).stride()


LAYERS = {
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2)[0],
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([2, 4])[1],
    "channel_shuffle": lambda x: F.channel_shuffle(x.view(1, 6, 1), 3),
    "max_unpool1d": lambda x: F.max_unpool1d(x.view(1, 6), torch.arange(6).view(1, 6), 1, 1),
    "block_diag": lambda x: torch.block_diag(x.view(2, 3)),
    "narrow_copy": lambda x: torch.narrow_copy(x, 0, 1, 2),
    "put": lambda x: x.put(torch.tensor([1, -1]), x[:2]),
}


@pytest.mark.parametrize("move", LAYERS.values(), ids=LAYERS.keys())
def test_terms_that_float64_does_not_hold_move(move):
    x = gappy(mcf.fp32x2)
    y = move(x)
    for term, source in zip(y.components, x.components, strict=True):
        assert torch.equal(term, move(source))


@pytest.mark.parametrize("view", ["view", "t", "select", "slice", "split", "as_strided", "expand"])
def test_views_share_memory(view):
    x = sample(mcf.bf16x2, 3, 4)
    y = MOVES[view](x)
    y.zero_() if view != "expand" else y[0].zero_()
    assert (exact(x) == 0).any()


def test_views_of_parameters_update_them():
    p = parameter(mcf.bf16x3, 3, 4)
    expected = exact(p).clone()
    expected[1] *= 0.999
    with torch.no_grad():
        p[1].mul_(0.999)
    torch.testing.assert_close(exact(p), expected, rtol=2.0**-24, atol=0)


class TestFactories:
    def test_what_is_to_hold_a_part_of_a_parameter_is_one(self):
        """As `distribute_tensor` makes it; states of optimizers are values."""
        p = parameter(mcf.bf16x2, 4)
        assert torch.empty_like(p.detach()).role == "parameter"
        assert torch.empty_like(p).role == torch.zeros_like(p.detach()).role == "value"

    def test_like(self, format, device):
        x = sample(format, 3, device=device)
        assert exact(torch.zeros_like(x)).tolist() == [0, 0, 0]
        assert exact(torch.ones_like(x)).tolist() == [1, 1, 1]
        assert exact(x.new_zeros(2)).tolist() == [0, 0]
        assert exact(x.new_ones(2)).tolist() == [1, 1]
        for y in (torch.full_like(x, 0.1), x.new_full((3,), 0.1)):
            assert y.device == x.device
            assert abs(exact(y)[0] - 0.1) <= 0.1 * max(format.u**format.terms, 2.0**-53)
        assert torch.empty_like(x).format == x.new_empty(4).format == format
        assert x.new_empty_strided((2, 2), (1, 2)).stride() == (1, 2)

    def test_new_tensors_of_data_and_of_a_size(self, format):
        """Those that torch makes without asking the class."""
        x = sample(format, 3)
        for role, like in (("value", x), ("parameter", nn.Parameter(x))):
            for y in (like.new_tensor([0.1, 0.2]), like.new([0.1, 0.2])):
                assert (y.format, y.role) == (format, role)
                expected = torch.tensor([0.1, 0.2], dtype=torch.float64)
                assert_same_terms(y, mcf.as_expansion(expected, format))
            for y in (like.new(2, 4), like.new(torch.Size([2, 4]))):
                assert (y.format, y.role, y.shape) == (format, role, (2, 4))
        assert_same_terms(x.new_tensor(x), x)
        assert x.new().shape == (0,)
        assert x.new_tensor(1.0, requires_grad=True).requires_grad
        assert type(x.new_tensor([1, 2], dtype=torch.int64)) is torch.Tensor

    def test_another_dtype_is_plain(self):
        x = sample(mcf.bf16x2, 3)
        for y in (
            torch.zeros_like(x, dtype=torch.float32),
            torch.ones_like(x, dtype=torch.float32),
            torch.full_like(x, 2, dtype=torch.float32),
            x.new_full((3,), 2, dtype=torch.float32),
            x.new_zeros(3, dtype=torch.int64),
        ):
            assert type(y) is torch.Tensor

    @pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16i8, mcf.bf16i16], ids=str)
    @pytest.mark.parametrize(
        "make",
        [
            torch.zeros_like,
            torch.ones_like,
            torch.empty_like,
            lambda x, dtype: torch.full_like(x, 0.1, dtype=dtype),
            lambda x, dtype: x.new_zeros(3, dtype=dtype),
            lambda x, dtype: x.new_ones(3, dtype=dtype),
            lambda x, dtype: x.new_empty(3, dtype=dtype),
            lambda x, dtype: x.new_empty_strided((3,), (1,), dtype=dtype),
            lambda x, dtype: x.new_full((3,), 0.1, dtype=dtype),
        ],
    )
    def test_its_own_dtype_is_that_of_no_tail(self, make, format):
        """FAdam of pytorch_optimizer makes its momentum so."""
        x = mcf.as_expansion(torch.rand(3), format)
        made = make(x, dtype=x.dtype)
        assert made.format == format
        assert [t.dtype for t in made.components] == [t.dtype for t in x.components]


class TestWrites:
    def test_copy_between_equal_formats_is_bare(self, format, device):
        x, y = sample(format, 5, device=device), sample(format, 5, device=device, seed=1)
        assert x.copy_(y) is x
        assert_same_terms(x, y)

    def test_copy_in_from_plain_and_out(self, format, device):
        wide = torch.randn(100, dtype=torch.float64, device=device)
        x = sample(format, 100, device=device)
        x.copy_(wide)
        assert_same_terms(x, mcf.as_expansion(wide, format))
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            plain = torch.empty(100, dtype=dtype, device=device)
            with mcf.when_rounded("ignore"):
                plain.copy_(x)
            assert torch.equal(plain, mcf.as_plain(x, dtype))

    def test_copy_between_formats(self):
        x3, x2 = sample(mcf.bf16x3, 50), sample(mcf.bf16x2, 50)
        kept = exact(x2).clone()
        x3.copy_(x2)
        assert torch.equal(exact(x3), kept)
        wide = sample(mcf.fp32x2, 50, seed=2)
        x2.copy_(wide)
        torch.testing.assert_close(exact(x2), exact(wide), rtol=2.0**-17, atol=0)

    def test_fill_with_numbers_at_full_precision(self, format, device):
        x = sample(format, 3, device=device)
        tolerance = 0.1 * max(format.u**format.terms, 2.0**-53)
        assert x.fill_(0.1) is x
        assert abs(exact(x) - 0.1).max() <= tolerance
        assert exact(x.zero_()).tolist() == [0, 0, 0]
        x.fill_(torch.tensor(2.0, device=device))
        assert exact(x).tolist() == [2, 2, 2]

    def test_setitem_masked_fill_and_where_take_numbers_whole(self, format, device):
        mask = torch.tensor([True, False, True], device=device)
        tolerance = 1.2 * max(format.u**format.terms, 2.0**-53)
        x = sample(format, 3, device=device)
        before, kept = x.clone(), exact(x)[1].item()
        y = x.clone()
        y[mask] = 1.2
        z = x.clone()
        z[0] = 1.2
        z[2:] = 1.2
        filled = [
            y,
            z,
            x.masked_fill(mask, 1.2),
            x.clone().masked_fill_(mask, 1.2),
            torch.where(mask, 1.2, x),
            torch.where(~mask, x, 1.2),
            x.where(~mask, 1.2),
        ]
        for w in filled:
            assert w.format == format
            assert abs(exact(w)[[0, 2]] - 1.2).max() <= tolerance
            assert exact(w)[1] == kept
        assert_same_terms(x, before)

    def test_index_put(self):
        x, values = sample(mcf.bf16x3, 4), sample(mcf.bf16x3, 2, seed=1)
        x[torch.tensor([3, 1])] = values
        assert_same_terms(x[torch.tensor([3, 1])], values)
        x[0] = torch.tensor(3.0)
        assert exact(x)[0] == 3

    @pytest.mark.parametrize(
        "write",
        [
            setitem,
            lambda x, i, z: setitem(x, i, 0.1),
            lambda x, i, z: x.put_(i, z),
            lambda x, i, z: x.scatter_(0, i, z),
            lambda x, i, z: x.scatter_(0, i, 0.1),
            lambda x, i, z: x.index_copy_(0, i, z),
            lambda x, i, z: x.index_fill_(0, i, 0.1),
            lambda x, i, z: x.masked_scatter_(x > -9, z),
            lambda x, i, z: setitem(x, x > -9, z),
        ],
        ids=range(9),
    )
    def test_places_that_are_not_there_leave_all_as_it_was(self, write, format):
        x, z = sample(format, 5), sample(format, 3, seed=1)
        before = x.clone()
        with pytest.raises((IndexError, RuntimeError)):
            write(x, torch.tensor([0, 1, 99]), z)
        assert_same_terms(x, before)


def test_where_keeps_the_role_and_takes_keywords():
    p, x = parameter(mcf.bf16x2, 3), sample(mcf.bf16x2, 3)
    mask = torch.tensor([True, False, True])
    assert torch.where(mask, p, 0.0).role == "parameter"
    assert torch.where(mask, x, 1.2).role == "value"
    expected = torch.where(mask, x, 1.2)
    for y in (torch.where(mask, input=x, other=1.2), x.where(mask, other=1.2)):
        assert_same_terms(y, expected)
    assert_same_terms(x.where(condition=mask, other=1.2), expected)
    with pytest.raises(RuntimeError, match="condition to be a boolean tensor"):
        torch.where(x, torch.ones(3), torch.zeros(3))


def test_copies_between_the_widest_formats_keep_what_fits():
    terms = [torch.tensor([2.0**e]) for e in (0, -30, -60)]
    three = mcf.MCFTensor(terms, mcf.fp32x3)
    two = torch.zeros_like(sample(mcf.fp64x2, 1)).copy_(three)
    assert two.components[0].item() == 1 + 2.0**-30
    assert two.components[1].item() == 2.0**-60
    back = torch.zeros_like(three).copy_(two)
    assert_same_terms(back, three)


def test_cat_pads_formats_of_one_base_and_takes_plain_tensors():
    a, b = sample(mcf.bf16x2, 2), sample(mcf.bf16x3, 2)
    joined = torch.cat([a, b, torch.ones(1)])
    assert joined.format == mcf.bf16x3
    assert torch.equal(exact(joined), torch.cat([exact(a), exact(b), torch.ones(1).double()]))
    with pytest.raises(ValueError, match=r"cat: .*bf16x2 and fp32x2"):
        torch.cat([a, sample(mcf.fp32x2, 2)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequences_are_padded_and_packed_in_their_format(side, format):
    x = sample(format, 6, 2)
    parts = [x[:1], x[1:4], x[4:]]
    third = mcf.as_expansion(torch.tensor(1 / 3, dtype=torch.float64), format)
    padded = pad_sequence(parts, padding_value=1 / 3, padding_side=side)
    assert padded.shape == (3, 3, 2)
    assert_same_terms(padded[1, 0], third.expand(2))
    assert_same_terms(padded[2 if side == "left" else 0, 0], x[0])
    packed = pack_sequence(parts, enforce_sorted=False)
    assert_same_terms(packed.data, x[[1, 4, 0, 2, 5, 3]])
    again, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=1 / 3)
    wanted = pad_sequence(parts, batch_first=True, padding_value=1 / 3)
    assert_same_terms(again, wanted)
    assert lengths.tolist() == [1, 3, 2]
    assert_same_terms(unpad_sequence(again, lengths, batch_first=True)[1], parts[1])
