"""What the tests of the tape share."""

import mcftensor as mcf
from mcftensor.tensor import TapedTensor
from support.helpers import sample


def expression(x, y):
    return (x / y).sqrt() + 0.25


def waiting(x):
    return isinstance(x, TapedTensor)


def own(x):
    """The same values in memory that nobody else has."""
    return mcf.as_expansion(x, x.format)


def values(format=mcf.bf16x2, *shape):
    drawn = [sample(format, *(shape or (3, 5)), seed=i) for i in range(2)]
    made = [own(x.detach().abs().add_(0.5)) for x in drawn]
    assert not any(map(waiting, made))
    return made
