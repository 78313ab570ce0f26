"""Every operator of PyTorch over numbers of every kind: values and gradients are as exact as the
format, or the operator is refused."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import mcftensor as mcf
from mcftensor.kernels.without_float64 import has_float64
from support.rotation import VARIABLE, rotated, rotation
from support.scales import FP16

pytest.importorskip("expecttest")  # of which torch's operator database makes use
operators = pytest.importorskip("common.operators")

TERMS = [mcf.bf16x2, mcf.bf16x3, mcf.fp32x2]
STORAGE = [mcf.bf16i16, mcf.bf16i8, mcf.fp16i16]
LONGER = mcf.Format.from_name("fp64x3")
ONE = mcf.as_expansion(torch.ones((), dtype=torch.float64), mcf.fp64x2) + 2.0**-60

UNLIKE = {
    *operators.RANDOM,
    *operators.DRAWN,
    *operators.ILL_CONDITIONED,
    *("pca_lowrank", "svd_lowrank"),  # of random projections
    "nn.functional.multi_head_attention_forward",  # its sample ends below the range of float32
    "nn.functional.hardsigmoid",  # PyTorch's gradient in float64 has a constant of float32
}
"""Operators whose results are not compared; those over terms are, by `operators.compare`."""

SENSITIVE = {
    *("linalg.lstsq", "linalg.lstsq.grad_oriented", "pca_lowrank", "svd_lowrank"),
    *("nn.functional.linear_cross_entropy", "nn.functional.linear_cross_entropy.chunked"),
    *("nn.functional.linear_cross_entropy.chunked_none", "log_softmax.with_dtype"),
}
"""LAPACK's results vary, samples are singular, or small losses cancel in PyTorch's float64:
results are compared by their largest element."""

SUMS = {
    *("__rmatmul__", "grid_sampler_2d", "grid_sampler_3d", "index_reduce.mean", "matmul"),
    "nn.functional.scaled_dot_product_attention",
}
"""The same without float64, where errors of sums are relative to their terms."""

LARGE, SMALL = 10_000, 40
"""Elements of the largest sample, and of the largest for linear algebra in terms, which is slow."""

LINEAR = {
    *(name for name in operators.OPERATORS if name.startswith("linalg.")),
    *("cholesky", "cholesky_inverse", "cholesky_solve", "logdet", "lu", "lu_solve", "matrix_exp"),
    *("norm.nuc", "pca_lowrank", "pinverse", "qr", "svd", "svd_lowrank", "triangular_solve"),
}

DRAWN, MOST, FEW = 40, 12, 2
"""Samples of an operator: drawn, compared if slow cases run too, and compared by default."""

STORED = [f.name for f in STORAGE]
DEFECTS = [
    (
        "PyTorch asks for the dtype of its input, of a result that is plain",
        STORED,
        "torch.ops.aten._safe_softmax.default",
    ),
    (
        "PyTorch's gradient has the dtype of the result and the dtype of the input in one call",
        STORED,
        "_unsafe_masked_index",
    ),
    (
        "PyTorch's gradient takes float16 and the float32 result in one call",
        ["fp16i16"],
        "_softmax_backward_data",
    ),
    (
        "the result has the dtype of the terms",
        ["bf16x2, without float64", "bf16x3, without float64"],
        "torch.ops.aten._safe_softmax.default",
    ),
    (
        "the distance is rounded, and equals no difference in the gradient of the largest one",
        [*(f.name for f in TERMS), "bf16x2, without float64", "bf16x3, without float64"],
        "nn.functional.pdist",
    ),
    (
        "the number of elements, which is no whole number, is rounded to float32",
        [f.name + mode for f in (mcf.bf16x3, mcf.fp32x2) for mode in ("", ", without float64")],
        "masked.std masked.var",
    ),
    (
        "the gradient is the exponential of a logarithm that is rounded",
        ["fp32x2", "fp32x2, without float64"],
        "logsumexp",
    ),
    (
        "the shape of the gradient is that of a convolution without output padding",
        [f"{f.name}, without float64" for f in TERMS],
        "nn.functional.conv_transpose2d nn.functional.conv_transpose3d",
    ),
    (
        "the gradient of a scalar has no dimension to scatter along",
        [f"{f.name}, without float64" for f in TERMS],
        "gather",
    ),
    ("the gradient is beyond the range of float16", ["fp16i16"], "cov float_power"),
    (
        "each use of an input rounds its gradient to bfloat16, and these cancel",
        ["bf16i16", "bf16i8"],
        "cov nn.functional.cosine_similarity",
    ),
    (
        "the tail of 8 bits of an input, whose gradient cancels",
        ["bf16i8"],
        "_batch_norm_with_update _native_batch_norm_legit native_batch_norm"
        " nn.functional.batch_norm",
    ),
    (
        "a constant is rounded to the format of the input",
        ["bf16i8"],
        "nn.functional.alpha_dropout nn.functional.hinge_embedding_loss",
    ),
    ("its result is float16 without a scale, and infinite", [FP16.name], "float_power"),
]
"""Known defects: the reason, the formats, the operators. An operator that is mended fails the test
until its name is deleted."""

KNOWN = {
    (format, name): reason
    for reason, formats, names in DEFECTS
    for format, name in itertools.product(formats, names.split())
}

by_operator = pytest.mark.parametrize("name", rotated(operators.OPERATORS))
by_operator_in_networks = pytest.mark.parametrize(
    "name",
    [
        *rotated(x for x in operators.OPERATORS if x not in LINEAR),
        *(pytest.param(x, marks=pytest.mark.slow) for x in sorted(LINEAR)),
    ],
)
"""Where PyTorch has no algorithm for the numbers, one of linear algebra takes seconds."""


def by_format(*formats: mcf.Format) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("format", formats, ids=lambda f: f.name)


@pytest.fixture
def limit(request) -> int:
    """Return how many samples of an operator are compared."""
    return FEW if request.config.option.markexpr == "not slow" else MOST


@pytest.mark.thinned(of=6)
@by_operator
@by_format(*TERMS)
def test_terms(name, format, limit):
    check(name, format, limit)


@pytest.mark.thinned(of=6)
@by_operator_in_networks
@by_format(*TERMS)
def test_terms_without_float64(name, format, limit):
    with mcf.without_float64():
        check(name, format, limit, ", without float64")


@pytest.mark.thinned(of=3)
@by_operator
@by_format(*STORAGE)
def test_storage(name, format, limit):
    check(name, format, limit)


@by_operator
@by_format(FP16)
def test_scaled(name, format, limit):
    check(name, format, limit)


@pytest.mark.thinned(of=6)
@by_operator_in_networks
@by_format(mcf.fp64x2)
def test_beyond_48_bits(name, format, limit):
    check(name, format, limit)


def check(name: str, format: mcf.Format, limit: int, where: str = "") -> None:
    """Compare samples of an operator; a known defect must show in one of those drawn."""
    known = KNOWN.get((format.name + where, name))
    large = SMALL if name in LINEAR and (where or format is mcf.fp64x2) else LARGE
    faults = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples(name, large)[: DRAWN if known else limit]:
            try:
                compare(name, sample, format)
            except AssertionError as fault:  # noqa: PERF203 (all samples are reported together)
                faults.append(f"{described(sample)}: {fault}")
                if known:
                    return
    assert not known, f"the defect is mended, delete its line: {known}"
    assert not faults, "\n".join([f"{VARIABLE}={rotation()}", *faults])


def described(sample: Any) -> Any:
    return tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, sample[:2])


@functools.cache
def samples(name: str, large: int) -> list[tuple[Any, Any, Callable[[Any], Any]]]:
    """Return samples in float64: the largest, the smallest, then in turn one of every other form.

    If an operator takes a dtype, the largest comes with the dtype of its input, and without.
    """
    op = operators.OPERATORS[name]
    if torch.float64 not in op.supported_dtypes("cpu"):
        return []
    drawn = op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd)
    found = [
        ((x.input, *x.args), x.kwargs, x.output_process_fn_grad)
        for x in itertools.islice(drawn, DRAWN)
    ]
    found = [x for x in found if 0 <= size(x) <= large]
    found.sort(key=size)
    turns: list[Any] = []
    while found:
        turns.append(found.pop(0 if len(turns) % 2 else -1))
    forms: Counter[Any] = Counter()

    def turn(sample: Any) -> int:
        """Return how many samples of its form come before."""
        forms[form(sample)] += 1
        return forms[form(sample)]

    found = sorted(turns, key=turn)
    for args, kwargs, output in found[:1]:
        typed = kwargs | {"dtype": torch.float64}
        if isinstance(operators.attempt(lambda: op(*args, **typed)), Tensor):  # noqa: B023
            found.insert(0, (args, typed, output))
    return found


def is_dense(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided


def size(sample: Any) -> int:
    """Return the number of elements of a sample, or -1 if it has no floating tensor."""
    dense = [x.numel() for x in tree_leaves(sample[:2]) if is_dense(x)]
    return sum(dense) if dense else -1


def form(sample: Any) -> Any:
    """Return the kinds of arguments, dimensions and keywords of a sample."""
    kinds = [x.dim() if isinstance(x, Tensor) else type(x) for x in tree_leaves(sample[0])]
    return (*kinds, *sorted(sample[1]))


def compare(name: str, sample: Any, format: mcf.Format) -> None:
    """Compare the values and the gradients of a sample with those of wider numbers."""
    op, (args, kwargs, output) = operators.OPERATORS[name], sample
    try:
        own = tree_map(lambda x: operand(x, format), (args, kwargs))
    except ValueError:  # the format does not have the range
        return
    theirs = tree_map(lambda x: operand(x, format, widest(format)), own)
    expected = operators.attempt(lambda: run(op, theirs, output))
    if isinstance(expected, Exception):  # samples that PyTorch refuses say nothing
        return
    found = operators.attempt(lambda: run(op, own, output))
    if isinstance(found, Exception):
        plain = tree_map(lambda x: operand(x, format, format.dtype), own)
        refusal = operators.attempt(lambda: run(op, plain, output))
        is_refused = isinstance(found, NotImplementedError) or repr(found) == repr(refusal)
        assert is_refused, f"raises {found!r}"
        return
    formats = formats_in(found)
    assert formats <= formats_in(own) or format is FP16, f"gives {formats}"
    sums_cancel = name in SUMS and not has_float64()
    sums_cancel = sums_cancel or (name == "cumsum" and format is mcf.fp64x2)
    is_sensitive = name in SENSITIVE or sums_cancel
    has_units = format in TERMS and not is_sensitive
    if has_units:
        operators.compare(name, theirs, found[0], expected[0], format)
        found, expected = ([], found[1]), ([], expected[1])
    assert len(found[1]) == len(expected[1]), "the result has no gradient"
    values = len(tree_leaves(expected[0]))
    found, expected = tree_leaves(found), tree_leaves(expected)
    assert len(found) == len(expected)
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        is_whole = i >= values or is_sensitive
        if not is_near(x, y, format, is_whole) and name not in UNLIKE:
            other = run(op, tree_map(lambda x: operand(x, format, coarse(format)), own), output)
            other = tree_leaves(([], other[1]) if has_units else other)[i]
            assert is_near(x, y, format, is_whole, other), f"{x} for {y}"


def formats_in(tree: Any) -> set[mcf.Format]:
    return {x.format for x in tree_leaves(tree) if isinstance(x, mcf.MCFTensor)}


def widest(format: mcf.Format) -> torch.dtype | mcf.Format:
    """Return what the numbers of a format are compared in."""
    if format in STORAGE:
        return torch.float32
    return LONGER if format is mcf.fp64x2 else torch.float64


def coarse(format: mcf.Format) -> torch.dtype:
    """Return a dtype whose own errors say how an operator magnifies errors of rounding."""
    return torch.float64 if format in STORAGE or format is mcf.fp64x2 else torch.float32


def operand(x: Any, format: mcf.Format, wide: torch.dtype | mcf.Format | None = None) -> Any:
    """Return an operand in the format, or one of the format in wide numbers; dtypes likewise."""
    if isinstance(x, torch.dtype) and x in (torch.float64, format.dtype):
        return getattr(wide or format, "dtype", wide)
    if wide is not None:
        return in_numbers(x, wide) if isinstance(x, mcf.MCFTensor) else x
    x = operators.operand(x, format)
    if format is mcf.fp64x2 and isinstance(x, mcf.MCFTensor):
        return (x.detach() * ONE).requires_grad_(x.requires_grad)  # float64 does not hold these
    return x


def in_numbers(x: Tensor, wide: torch.dtype | mcf.Format) -> Tensor:
    convert = mcf.as_expansion if isinstance(wide, mcf.Format) else mcf.as_plain
    return convert(x.detach(), wide).requires_grad_(x.requires_grad)


def run(op: Any, arguments: Any, output: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the result, and the gradients of a weighted sum of it."""
    torch.manual_seed(0)
    result = op(*arguments[0], **arguments[1])
    ends = [y for y in tree_leaves(output(result)) if is_dense(y) and y.requires_grad]
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    gradients: Any = []
    if ends:
        weights = [in_kind_of(y, repeated([1, -0.5, 0.25], y)) for y in ends]
        gradients = torch.autograd.grad(
            ends, leaves, weights, allow_unused=True, materialize_grads=True
        )
    return tree_map(lambda y: y.detach() if isinstance(y, Tensor) else y, result), gradients


def in_kind_of(like: Tensor, x: Tensor) -> Tensor:
    return in_numbers(x, like.format if isinstance(like, mcf.MCFTensor) else like.dtype)


def repeated(numbers: list[float], like: Tensor) -> Tensor:
    count = like.numel()
    return torch.tensor(numbers).repeat(count // len(numbers) + 1)[:count].view(like.shape)


def unit_and_bound(format: mcf.Format) -> tuple[float, int]:
    """Return the unit roundoff of results, and how many units errors have."""
    if format in STORAGE:
        return 2.0**-24, 4  # float32's, in which PyTorch rounds alike
    return (2.0**-11, 16) if format is FP16 else (2.0**-format.precision, operators.UNITS)


def is_near(
    x: Any, y: Any, format: mcf.Format, is_whole: bool, other: Tensor | None = None
) -> bool:
    """Compare a result with the expected one, elementwise; a gradient by its largest element.

    Errors may be so many units of the result, or of those that it has in another dtype.
    """
    if not isinstance(y, Tensor):
        return x == pytest.approx(y, rel=1e-6, nan_ok=True)
    assert isinstance(x, Tensor), f"{x!r} for a tensor"
    assert x.shape == y.shape, (x.shape, y.shape)
    if not y.dtype.is_floating_point:
        assert x.dtype == y.dtype, (x.dtype, y.dtype)
        return torch.allclose(x, y, equal_nan=True)
    if y.layout != torch.strided:
        return True
    (unit, units), floor = unit_and_bound(format), 0.0
    if isinstance(x, mcf.MCFTensor) and format is FP16:
        floor = 2.0 ** (x.exponent.item() - 23)
    elif format in TERMS:
        floor = units * unit * format.full_precision_min
    elif isinstance(x, mcf.MCFTensor) and format in STORAGE:
        unit = max(unit, 2.0**-x.format.precision)
        if y.dtype != torch.float32:  # x.bfloat16() is x
            return True
    elif format in STORAGE and is_whole:
        y, numbers = y.to(x.dtype), torch.finfo(x.dtype)
        unit, floor = max(unit, numbers.eps / 2), numbers.tiny * numbers.eps
    x, y = exact(x, format), exact(y, format)
    error, size = double((x - y).abs()), double(y).abs()
    finite = torch.isfinite(size)
    if not torch.allclose(double(x)[~finite], double(y)[~finite], equal_nan=True):
        return False
    limit = unit * size
    if other is not None:
        scale = unit if format in STORAGE else torch.finfo(other.dtype).eps / 2
        limit = limit + double((exact(other, format) - y).abs()) * (unit / scale)
    if is_whole and finite.any():
        limit = limit[finite].max()
        if size[finite].max() < 2.0**-45:  # zero, which float64 rounds
            floor = max(floor, units * unit)
    return bool((error <= units * limit + floor)[finite].all())


def exact(x: Tensor, format: mcf.Format) -> Tensor:
    return in_numbers(x.detach(), LONGER if format is mcf.fp64x2 else torch.float64)


def double(x: Tensor) -> Tensor:
    return mcf.as_plain(x, torch.float64)
