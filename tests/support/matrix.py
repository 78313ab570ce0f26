"""The published matrix of operators: what computes, in which format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mcftensor as mcf
from mcftensor.kernels.without_float64 import has_float64

MATRIX = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/operator-matrix.json").read_text()
)
SAME_RELEASE = torch.__version__.split("+")[0] == MATRIX["machine"]["torch"].split("+")[0]
"""Whether torch has the operators and samples of the matrix."""


def published(name: str, format: mcf.Format) -> dict[str, Any]:
    """What the matrix says of an operator; nothing of what another release has added."""
    if name not in MATRIX["operators"] and not SAME_RELEASE:
        pytest.skip("the matrix is of another release of torch")
    return MATRIX["operators"][name][format.name]


_SPECIAL = (
    *("airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "erfcx", "i0e", "i1", "i1e"),
    *("log_ndtr", "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0"),
    *("modified_bessel_k1", "ndtri", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "zeta"),
    "legendre_polynomial_p",
    *(f"{kind}chebyshev_polynomial_{x}" for kind in ("", "shifted_") for x in "tuvw"),
)
_FUNCTIONAL = (
    *("ctc_loss", "embedding_bag", "fractional_max_pool2d", "fractional_max_pool3d"),
    *("grid_sample", "interpolate.bicubic", "interpolate.bilinear", "interpolate.linear"),
    *("interpolate.trilinear", "rrelu", "upsample_bilinear"),
)
_LINEAR = ("householder_product", "ldl_factor", "ldl_factor_ex", "ldl_solve")

REFUSED = {
    *("_segment_reduce.lengths", "_segment_reduce.offsets", "_upsample_bilinear2d_aa", "angle"),
    *("geqrf", "grid_sampler_2d", "grid_sampler_3d", "hash_tensor", "histc", "histogram"),
    *("histogramdd", "i0", "igamma", "igammac", "ldexp", "ormqr", "resize_", "resize_as_"),
    *("stft", "triangular_solve"),
    *(f"fft.{x}" for x in ("hfft", "hfft2", "hfftn", "irfft", "irfft2", "irfftn")),
    *(f"linalg.{name}" for name in _LINEAR),
    *(f"nn.functional.{name}" for name in _FUNCTIONAL),
    *(f"special.{name}" for name in _SPECIAL),
}
"""What needs float64 in formats of more bits than float32 serves; `docs/reference/devices.md`."""


def refuses(name: str, format: mcf.Format) -> bool:
    """Return whether an operator needs float64, and there is none."""
    return name in REFUSED and format is not mcf.bf16x2 and not has_float64()
