"""Operators of other packages over expansions."""

import pytest
import torch

import mcftensor as mcf


@torch.library.custom_op("elsewhere::update_", mutates_args=("p",))
def update_(p: torch.Tensor, g: torch.Tensor) -> None:
    p.sub_(g)


@torch.library.custom_op("elsewhere::doubled", mutates_args=())
def doubled(p: torch.Tensor) -> torch.Tensor:
    return 2 * p


def test_what_writes_in_place_is_refused():
    """Their kernels are made for a few dtypes, and take the memory of others for these."""
    p = torch.nn.Parameter(mcf.as_expansion(torch.ones(3), mcf.bf16x2))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="operator of another package"):
        update_(p, torch.ones(3))
    assert mcf.as_plain(p).tolist() == [1.0] * 3


def test_what_reads_computes():
    p = torch.nn.Parameter(mcf.as_expansion(torch.full((3,), 1.001), mcf.bf16x2))
    with torch.no_grad():
        assert torch.equal(doubled(p), 2 * p.components[0])
