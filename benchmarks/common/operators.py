"""PyTorch's own operator database, run over value tensors and held against float64."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils._pytree import tree_leaves, tree_map

import mcftensor as mcf
from common.functions import BITS, FUNCTIONS, polygamma
from mcftensor.kernels.without_float64 import has_float64

# To know which test asks for samples, PyTorch reads the sources of all callers: half of the time.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

# The database keeps functions of torch that the first expansion replaces.
mcf.as_expansion(torch.zeros(1), mcf.bf16x2)
for op in op_db:
    if op.name.startswith("masked."):
        op.op = getattr(torch.masked, op.name.removeprefix("masked."))

OPERATORS = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}

# Draw random numbers of the dtype of their input, or leave elements as they come.
RANDOM = {
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
}

# Without float64, the library draws all bits of the format, and so other numbers.
DRAWN = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial"),
    *("normal", "normal.in_place", "normal.number_mean", "rand_like", "randn_like", "uniform"),
}

# Without float64, errors are promised to be at most 2^-44 of these sums of magnitudes; 2^-18 where
# bf16x2 takes PyTorch's own operation in float32.
MAGNITUDES = {
    "_upsample_bilinear2d_aa": lambda x, *args, **kwargs: (
        2.0 ** (44 - 18) * OPERATORS["_upsample_bilinear2d_aa"](x.abs(), *args, **kwargs)
    ),
    "_softmax_backward_data": lambda grad, y, dim, dtype: (
        y.abs() * (grad.abs() + (grad * y).abs().sum(dim, keepdim=True))
    ),
    **{
        name: lambda *args, name=name, **kwargs: OPERATORS[name](
            *tree_map(_magnitude, args), **kwargs
        )
        for name in OPERATORS
        if name == "cumsum" or name.startswith("nn.functional.conv")
    },
}

# Written in Python, convert integer results to the dtype of their input by themselves.
CONVERTING = {"masked.argmax", "masked.argmin"}

# Singular to within rounding, so that every evaluation has its own result.
ILL_CONDITIONED = {"linalg.pinv.singular"}

# Which PyTorch evaluates in float64 with fewer bits than formats have: mpmath's, by arguments.
INEXACT = {
    "special.ndtr": lambda x: FUNCTIONS["ndtr"][1],
    **dict.fromkeys([name for name in OPERATORS if "polygamma" in name], lambda x, n: polygamma(n)),
}

UNITS = 64
"""Errors are at most so many times u^n, elementwise; sums of products come nearest."""


@dataclass
class Outcome:
    """What became of an operator: its samples that computed, those refused, the worst error."""

    computed: int = 0
    refused: int = 0
    units: float = 0.0


def run(name: str, format: mcf.Format, limit: int | None = None) -> Outcome:
    """Run the samples of an operator; raises AssertionError where a promise is broken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(OPERATORS[name], name, format, limit)


def _run(op: Any, name: str, format: mcf.Format, limit: int | None) -> Outcome:
    outcome = Outcome()
    for args, kwargs in inputs(op, format, limit):
        wide = tree_map(as_wide, (args, kwargs))
        expected = attempt(lambda: op(*wide[0], **wide[1]))  # noqa: B023
        if isinstance(expected, Exception):  # samples that float64 refuses say nothing
            continue
        try:
            torch.manual_seed(0)
            result = op(*args, **kwargs)
        except NotImplementedError:
            outcome.refused += 1
            continue
        outcome.computed += 1
        outcome.units = max(outcome.units, compare(name, wide, result, expected, format))
    return outcome


def compare(name: str, wide: Any, result: Any, expected: Any, format: mcf.Format) -> float:
    """Return the largest error of results in units of u^n.

    `wide` has the arguments in float64, and `expected` what PyTorch computes from them. Raises
    AssertionError if an error is larger than `UNITS`.
    """
    is_random = name in RANDOM or (name in DRAWN and not has_float64())
    expected = exactly(name, wide[0], expected)
    parts = [None] * len(tree_leaves(expected))
    if name in MAGNITUDES and not has_float64():
        parts = [MAGNITUDES[name](*wide[0], **wide[1])]
    asked = any(isinstance(x, torch.dtype) for x in tree_leaves(wide))
    found, wanted = tree_leaves(result), tree_leaves(expected)
    assert len(found) == len(wanted)
    return max(
        (
            _compare(name, x, y, format, asked, is_random, size)
            for x, y, size in zip(found, wanted, parts, strict=True)
        ),
        default=0.0,
    )


def exactly(name: str, args: Sequence[Any], inexact: Any) -> Any:
    """The result of an operator that PyTorch evaluates with too few bits, by mpmath; PyTorch's
    result of the other operators, and where mpmath has none."""
    if name.endswith("log_softmax") and inexact.dim() and inexact.numel():
        return _log_softmax(args[0], args[1], inexact)
    if name not in INEXACT or not isinstance(inexact, Tensor):
        return inexact
    function = INEXACT[name](*args)
    with mpmath.workprec(BITS):
        exact = [function(mpmath.mpf(a)) for a in args[0].reshape(-1).tolist()]
    pairs = zip(exact, inexact.reshape(-1).tolist(), strict=True)
    numbers = [b if a is None else float(a) for a, b in pairs]
    return torch.tensor(numbers, dtype=torch.float64).view(inexact.shape)


def _log_softmax(x: Tensor, dim: int, inexact: Tensor) -> Tensor:
    """By mpmath, over what PyTorch has not masked."""
    rows = []
    for row, other in zip(
        x.movedim(dim, -1).reshape(-1, x.shape[dim]).tolist(),
        inexact.movedim(dim, -1).reshape(-1, x.shape[dim]).tolist(),
        strict=True,
    ):
        with mpmath.workprec(BITS):
            chosen = [mpmath.mpf(a) for a, b in zip(row, other, strict=True) if math.isfinite(b)]
            total = mpmath.log(mpmath.fsum(map(mpmath.exp, chosen))) if chosen else mpmath.mpf(0)
            rows.append(
                [
                    float(a - total) if math.isfinite(b) else b
                    for a, b in zip(row, other, strict=True)
                ]
            )
    shape = inexact.movedim(dim, -1).shape
    return torch.tensor(rows, dtype=torch.float64).view(shape).movedim(-1, dim)


def inputs(op: Any, format: mcf.Format, limit: int | None) -> Iterator[tuple[Any, Any]]:
    """Arguments of an operator, with values for its floating tensors."""
    if torch.float64 not in op.supported_dtypes("cpu"):
        return
    samples = op.sample_inputs("cpu", torch.float64, requires_grad=False)
    for sample in itertools.islice(samples, limit):
        args, kwargs = tree_map(
            lambda x: operand(x, format), ((sample.input, *sample.args), sample.kwargs)
        )
        if any(isinstance(x, mcf.MCFTensor) for x in tree_leaves((args, kwargs))):
            yield args, kwargs


def attempt(call: Callable[[], Any], seed: int = 0) -> Any:
    """Return the result of a call, or the error that it raised."""
    torch.manual_seed(seed)
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        return error


def operand(x: Any, format: mcf.Format) -> Any:
    """Return the value of a dense floating tensor, which requires a gradient if the tensor does;
    all else as it is."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if x.layout != torch.strided or x.is_nested:
        return x
    return mcf.as_expansion(x.detach(), format).requires_grad_(x.requires_grad)


def as_wide(x: Any) -> Any:
    """Expansions in float64; all else as it is."""
    return mcf.as_plain(x, torch.float64) if isinstance(x, mcf.MCFTensor) else x


def _magnitude(x: Any) -> Any:
    return x.abs() if isinstance(x, Tensor) else x


def _compare(
    name: str,
    x: Any,
    y: Any,
    format: mcf.Format,
    asked: bool,
    is_random: bool,
    parts: Tensor | None,
) -> float:
    """Return the error of a result in units of u^n; 0 for exact results.

    Errors may be those that the magnitudes of parts allow, if these are given.
    """
    if not isinstance(y, Tensor):
        assert x == pytest.approx(y, rel=1e-6, nan_ok=True), (x, y)
        return 0.0
    assert isinstance(x, Tensor), type(x)
    assert x.shape == y.shape, (x.shape, y.shape)
    if not y.is_floating_point():
        assert not isinstance(x, mcf.MCFTensor)
        assert x.dtype == y.dtype, (x.dtype, y.dtype)
        assert is_random or torch.equal(x, y)
        return 0.0
    plain = y.dtype != torch.float64 or asked or name in ("double", "float_power")
    if not isinstance(x, mcf.MCFTensor):
        assert plain or name in CONVERTING, f"a plain result of {x.dtype}"
        assert x.dtype == y.dtype or name in CONVERTING, (x.dtype, y.dtype)
        if not is_random:
            relative = max(torch.finfo(y.dtype).eps, UNITS * format.u**format.terms)
            torch.testing.assert_close(x.to(y.dtype), y, rtol=relative, atol=0, equal_nan=True)
        return 0.0
    if is_random or name in ILL_CONDITIONED or y.dtype != torch.float64:
        return 0.0
    x = mcf.as_plain(x, torch.float64)
    assert torch.equal(torch.isnan(x), torch.isnan(y)), (x, y)
    assert torch.equal(x[y.isinf()], y[y.isinf()]), (x, y)
    counts = torch.isfinite(y) & (y.abs() < 2.0**format.max_exponent)
    size = y.abs()
    if parts is not None:
        size = torch.maximum(size, parts * 2.0 ** (format.precision - 44) / UNITS)
    error = (x - y).abs()[counts] / size[counts].clamp_min(format.full_precision_min)
    units = float(error.max() / 2.0**-format.precision) if error.numel() else 0.0
    assert units <= UNITS, f"an error of {units:.3g} u^{format.terms}"
    return units
