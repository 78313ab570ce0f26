"""The program for usual numbers, and what makes a vector unusual: the bits of eager PyTorch."""

import math

import pytest
import torch

import mcftensor as mcf
from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.rounding import add_signed, split_by_noise
from mcftensor.kernels import Columns, execute
from mcftensor.kernels.program import Signature, record
from mcftensor.kernels.usual_numbers import for_usual_numbers
from mcftensor.passes.format_conversion import encode_columns, encoding
from support.kernel_cases import same


def split(x):
    terms = [torch.empty(x.shape, dtype=torch.bfloat16) for _ in range(2)]
    encode_columns(mcf.bf16x2, [x], [[y] for y in terms], [])
    return terms


def with_last_bits(exponent, *, sign, odd):
    """Float32 numbers with all last 16 bits after a leading term of some exponent and last bit."""
    leading = sign << 31 | exponent << 23 | 0x2A << 17 | odd << 16
    return (torch.arange(1 << 16, dtype=torch.int64) + leading).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("exponent", [*range(0, 30, 3), 127, 253, 254])
def test_every_rest_of_a_leading_term(exponent):
    """Ties and what rounds onto them; from tiny numbers, where rests are subnormal, to infinity."""
    kinds = [(sign, odd) for sign in (0, 1) for odd in (0, 1)]
    x = torch.cat([with_last_bits(exponent, sign=sign, odd=odd) for sign, odd in kinds])
    same("cpp", lambda: split(x))


@pytest.mark.parametrize("leading", [0x3F7F, 0x7F7F, 0x007F, 0x0080, 0x8000, 0x7F80])
def test_next_to_a_power_of_two(leading):
    bits = torch.arange(1 << 16, dtype=torch.int64) + (leading << 16)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    same("cpp", lambda: split(bits.to(torch.int32).view(torch.float32)))


UNUSUAL = (math.inf, -math.inf, math.nan, 1e-42, -1e-42, 2.0**-126, torch.finfo().max, -0.0)


@pytest.mark.parametrize("value", UNUSUAL)
def test_one_unusual_number_at_each_place(value):
    """Of each vector, at each of its elements, and in the elements that fill no vector."""
    x = torch.rand(300 * 257 + 7, generator=torch.Generator().manual_seed(1)) + 0.5
    x[::257] = value
    same("cpp", lambda: split(x))


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30, 1e-30, -1.0])
@pytest.mark.parametrize("formats", [(mcf.bf16x2, "plus"), (mcf.bf16x2, "full"), (mcf.bf16i16, {})])
def test_steps_with_one_unusual_gradient(formats, value):
    format, mode = formats

    def step():
        torch.manual_seed(0)
        p = torch.nn.Parameter(mcf.as_expansion(torch.randn(64, 65).double(), format))
        p.grad = torch.randn(64, 65).to(p.dtype)
        p.grad.view(-1)[::67] = value
        optimizer = torch.optim.AdamW([p], fused=True)
        optimizer = mcf.collage(optimizer, mode) if mode else optimizer
        optimizer.step()
        optimizer.step()
        states = [x for x in optimizer.state[p].values() if isinstance(x, mcf.MCFTensor)]
        return [y for x in (p.detach(), *states) for y in x.components]

    same("cpp", step)


def test_usual_numbers_take_fewer_roundings():
    signature = Signature((torch.float32,), (), (torch.bfloat16,) * 2)
    program = record(encoding(mcf.bf16x2, torch.float32), signature)
    fast, usual = for_usual_numbers(program)
    names = [x.name for x in fast.instructions]
    assert names == ["vector", "leading", "to", "rest", "to"]
    assert usual.finite == usual.rests == [names.index("rest")]


def test_a_rest_that_has_another_use_is_not_rounded():
    def body(vectors, scalars, index):
        first, last = encoding(mcf.bf16x2, torch.float32)(vectors, scalars, index)
        return [first, last, last + 1]

    program = record(body, Signature((torch.float32,), (), (torch.bfloat16,) * 3))
    assert for_usual_numbers(program)[0].instructions


class Pattern(Noise):
    def __init__(self, pattern):
        self.pattern = pattern


def split_by_pattern(vectors, scalars, index):
    *levels, pattern = vectors
    return split_by_noise(sum(levels[1:], levels[0]), levels, Pattern(pattern))


def split_of(levels, seed=0):
    """Terms of a sum of levels that noise rounds."""
    torch.manual_seed(seed)
    pattern = torch.randint(-(1 << 31), 1 << 31, levels[0].shape).to(torch.int32)
    terms = [torch.empty(levels[0].shape, dtype=torch.bfloat16) for _ in range(2)]
    execute.run(
        split_by_pattern, Columns([[x] for x in (*levels, pattern)], [], [[y] for y in terms])
    )
    return terms


@pytest.mark.parametrize("exponent", [*range(0, 30, 3), 127, 253, 254])
def test_noise_beside_every_rest_of_a_leading_term(exponent):
    """Of one float32, and of two whose sum lies near one half of its last bit, by another tail."""
    kinds = [(sign, odd) for sign in (0, 1) for odd in (0, 1)]
    x = torch.cat([with_last_bits(exponent, sign=sign, odd=odd) for sign, odd in kinds])
    for seed in range(4):
        same("cpp", lambda seed=seed: split_of([x], seed))
        for share in (2.0**-24, -(2.0**-24), 2.0**-25, 0.0, -0.0):
            same("cpp", lambda seed=seed, share=share: split_of([x, x * share], seed))


@pytest.mark.parametrize("leading", [0x3F7F, 0x7F7F, 0x007F, 0x0080, 0x8000, 0x7F80, 0xBF7F])
def test_noise_next_to_a_power_of_two(leading):
    """Below it, the last place is half as large as above."""
    bits = torch.arange(1 << 16, dtype=torch.int64) + (leading << 16)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    x = bits.to(torch.int32).view(torch.float32)
    for seed in range(4):
        same("cpp", lambda seed=seed: split_of([x], seed))
        for share in (2.0**-24, -(2.0**-24), 2.0**-25):
            same("cpp", lambda seed=seed, share=share: split_of([x, x * share], seed))


@pytest.mark.parametrize("value", UNUSUAL)
def test_noise_and_one_unusual_number_at_each_place(value):
    x = torch.rand(300 * 257 + 7, generator=torch.Generator().manual_seed(1)) + 0.5
    x[::257] = value
    same("cpp", lambda: split_of([x]))
    same("cpp", lambda: split_of([x, x * 2.0**-25]))


@pytest.mark.parametrize("count", [1, 2])
def test_noise_takes_shorter_roundings(count):
    signature = Signature((*[torch.float32] * count, torch.int32), (), (torch.bfloat16,) * 2)
    fast, usual = for_usual_numbers(record(split_by_pattern, signature))
    names = [x.name for x in fast.instructions if x.dtype == torch.bfloat16]
    assert names == ["to", "near", "narrow"]
    assert len(usual.finite) == 1
    assert not usual.rests


def test_a_sum_that_keeps_the_sign_of_zero_tells_its_terms():
    def body(vectors, scalars, index):
        a, b = [torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in vectors]
        return encoding(mcf.bf16x2, torch.float32)([add_signed(a, b)], scalars, index)

    program = record(body, Signature((torch.float32,) * 2, (), (torch.bfloat16,) * 2))
    fast, usual = for_usual_numbers(program)
    assert [fast.instructions[i].name for i in usual.finite] == ["rest"]


@pytest.mark.parametrize("value", UNUSUAL)
def test_sums_with_one_unusual_term(value):
    """Of both terms in turn, also where the other one is zero."""

    def sums(a, b):
        out = [torch.empty(a.shape, dtype=torch.bfloat16) for _ in range(2)]
        execute.run(split_of_sum, Columns([[a], [b]], [], [[y] for y in out]))
        return out

    for other in (0.75, 0.0, -0.0):
        x = torch.rand(300 * 257 + 7, generator=torch.Generator().manual_seed(1)) + 0.5
        y = torch.full_like(x, other)
        x[::257] = value
        same("cpp", lambda x=x, y=y: sums(x, y))
        same("cpp", lambda x=x, y=y: sums(y, x))


def split_of_sum(vectors, scalars, index):
    return encoding(mcf.bf16x2, torch.float32)([add_signed(*vectors)], scalars, index)
