"""Losses with margins, and their gradients, against PyTorch's own in float64."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import mcftensor as mcf
from support.no_float64 import no_float64

FORMATS = pytest.mark.parametrize(
    ("format", "mode"),
    [(mcf.fp64x2, nullcontext), (mcf.fp32x3, no_float64), (mcf.fp32x2, no_float64)],
    ids=["fp64x2", "fp32x3 without float64", "fp32x2 without float64"],
)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def values_and_gradient(loss, x):
    x = x.detach().requires_grad_()
    found = loss(x)
    found.sum().backward()
    return found.detach(), x.grad


@pytest.mark.thinned(of=6)
@FORMATS
@REDUCTIONS
@pytest.mark.parametrize("labels", [[0, 1, -1, 0], [[0, 1, -1, 0], [3, -1, 2, 1], [1, 2, 0, 3]]])
def test_labels_end_at_the_first_that_is_negative(labels, reduction, format, mode):
    labels = torch.tensor(labels)
    x = torch.randn(labels.shape)

    def loss(x):
        return F.multilabel_margin_loss(x, labels, reduction=reduction)

    expected = values_and_gradient(loss, x.double())
    with mode():
        found = values_and_gradient(loss, mcf.as_expansion(x, format))
    for y, z in zip(found, expected, strict=True):
        assert y.shape == z.shape
        torch.testing.assert_close(mcf.as_plain(y, torch.float64), z, rtol=1e-13, atol=1e-13)


@pytest.mark.thinned(of=2)
@FORMATS
@REDUCTIONS
def test_a_single_sample_has_no_dimension(reduction, format, mode):
    x = torch.randn(4)
    expected = F.multi_margin_loss(x.double(), torch.tensor(2), reduction=reduction)
    with mode():
        found = F.multi_margin_loss(
            mcf.as_expansion(x, format), torch.tensor(2), reduction=reduction
        )
    torch.testing.assert_close(mcf.as_plain(found, torch.float64), expected, rtol=1e-13, atol=0)


@FORMATS
def test_gradients_of_unfolded_images(format, mode):
    x, g = torch.randn(1, 2, 4, 4), torch.randn(1, 8, 9)
    expected = values_and_gradient(lambda x: F.unfold(x, 2) * g, x.double())[1]
    with mode():
        weight = mcf.as_expansion(g, format)
        found = values_and_gradient(lambda x: F.unfold(x, 2) * weight, mcf.as_expansion(x, format))[
            1
        ]
    torch.testing.assert_close(mcf.as_plain(found, torch.float64), expected, rtol=1e-13, atol=1e-13)
