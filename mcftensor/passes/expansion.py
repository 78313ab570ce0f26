"""Arithmetic on expansions, as functions on plain tensors.

An expansion is a sequence of tensors of one dtype and shape, leading term first, normalized: each
term is the nearest float to itself plus all that follow. Operands may also be plain tensors of any
floating dtype, as sequences of one tensor. All operands broadcast. Results are tuples of normalized
terms, in the format of the argument `format`, or by default of the first operand.

Bounds are relative to the exact result unless stated otherwise, in u, the unit roundoff of the base
(2^-8 for bfloat16), to first order. They hold if nothing overflows and no term, of intermediate
products included, is subnormal and loses bits (see `Format.full_precision_min`). A plain operand
with more bits than the format adds an error of at most u²/2 (two terms) or u³/4 (three) of itself.
A result that is not finite is the result in the base alone, with zero tails. x + (-x) is +0, and
the leading term carries the sign of a zero.

`arithmetic/machine_numbers.py` (bases of 16 bits) and `arithmetic/networks.py` (32 and 64 bits)
compute the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcftensor.arithmetic import networks
from mcftensor.arithmetic.eft import same_float_dtype
from mcftensor.formats import MAX_TERMS, PLAIN, Format, require_expansion_format
from mcftensor.kernels.custom_ops import empty_terms, opaque
from mcftensor.passes import format_conversion
from mcftensor.passes.expressions import evaluate
from mcftensor.passes.format_conversion import key_for

Terms = tuple[Tensor, ...]


# ------------------------------------------------------------------- between tensors and terms


def convert(x: Sequence[Tensor], format: Format | str) -> Terms:
    """Convert an expansion or a plain tensor to a format, rounded once.

    *Requires*: normalized terms of any format, or a plain real tensor as a sequence of one.
    Integers pass through float64, so they keep at most 53 bits.

    *Returns*: `format.terms` tensors of the shape of x, normalized.

    *Error*: none if the format holds x; else half an ulp of the last term, at most
    u^n / 2^(n - 1) for n terms (reached), or half the least subnormal. If the format rounds
    stochastically, at most a whole ulp, and no error in the mean.

    *Cost*: from a plain tensor, two passes of one rounding and one subtraction a term; from an
    expansion, a network.

    *Source*: repeated rounding, with a second pass that resolves ties.

    *Special values*: numbers that overflow the base become infinite, with zero tails.

    Raises:
        TypeError: `format` is not a Format.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> third = mcf.expansion.div(
        ...     (torch.tensor(1.0),), (torch.tensor(3.0),), format=mcf.fp32x2
        ... )
        >>> mcf.expansion.convert(third, mcf.bf16x2)
        (tensor(0.3340, dtype=torch.bfloat16), tensor(-0.0007, dtype=torch.bfloat16))
    """
    format = require_expansion_format(format, "convert")
    key = key_for(format, x[0].device)
    return tuple(format_conversion.recode(list(x), PLAIN[x[0].dtype].name, format.name, key))


def expand(x: Tensor, format: Format | str) -> Terms:
    """Return a plain tensor as the terms of an expansion; `convert` for a single tensor.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.expansion.expand(torch.tensor(0.999), mcf.bf16x2)
        (tensor(1., dtype=torch.bfloat16), tensor(-0.0010, dtype=torch.bfloat16))
    """
    return convert((x,), require_expansion_format(format, "expand"))


def collapse(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of the terms of an expansion, rounded once.

    *Requires*: normalized terms; a floating dtype.

    *Returns*: one tensor of the shape of the terms.

    *Error*: half an ulp of `dtype`: the correctly rounded sum.

    *Cost*: one sum a term in float64, rounded to odd, and one conversion.

    *Source*: S. Boldo and G. Melquiond, IEEE Transactions on Computers 57(4), 2008.

    *Special values*: as the leading term.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> terms = mcf.expansion.expand(torch.tensor(0.999), mcf.bf16x2)
        >>> mcf.expansion.collapse(terms, torch.float32)
        tensor(0.9990)
    """
    return format_conversion.collapse(list(terms), PLAIN[terms[0].dtype].name, dtype)


@opaque(lambda values, terms: empty_terms(values, values[0].dtype, terms))
def _renormalize(values: Sequence[Tensor], terms: int) -> list[Tensor]:
    result = networks.distill(values, terms)
    plain = values[0].clone()
    for value in values[1:]:
        plain = plain + value
    return list(networks.replace_nonfinite(result, plain))


def renormalize(values: Sequence[Tensor], terms: int | None = None) -> Terms:
    """Return the sum of tensors of one dtype as normalized terms.

    *Requires*: two tensors or more, in any order of magnitude, overlapping or not, zeros
    anywhere; no overflow of partial sums.

    *Returns*: `terms` tensors (by default one for each value, at most 6), shapes broadcast.

    *Error*: none if the sum fits into that many terms; else half an ulp of the last one, at
    most u^n / 2^(n - 1) for n terms (reached).

    *Cost*: for k values 3 k (k - 1) flops, 6 (n + 1) k for the n terms, and some for ties.

    *Source*: J. R. Shewchuk, "Adaptive precision floating-point arithmetic and fast robust
    geometric predicates", Discrete & Computational Geometry 18, 1997, theorem 10, which holds for
    any number of values; ties are resolved from the later terms.

    *Special values*: if the sum is not finite, the plain sum with zero tails.

    Raises:
        ValueError: fewer than two values, or a number of terms not from 2 to 6.
        TypeError: values of different dtypes, or of a dtype that is not floating.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> tiny, big = torch.tensor([1.0, 4096.0], dtype=torch.bfloat16)
        >>> mcf.expansion.renormalize((tiny, big))
        (tensor(4096., dtype=torch.bfloat16), tensor(1., dtype=torch.bfloat16))
    """
    count = min(len(values), MAX_TERMS) if terms is None else terms
    if len(values) < 2 or not 2 <= count <= MAX_TERMS:
        raise ValueError(
            f"renormalize: {len(values)} values into {count} terms; give two values or more, and "
            f"ask for 2 to {MAX_TERMS} terms"
        )
    same_float_dtype("renormalize", *values)
    return tuple(_renormalize(list(values), count))


# ------------------------------------------------------------------------------------ arithmetic


def _format_of(name: str, x: Sequence[Tensor]) -> Format:
    if not isinstance(x, Sequence) or not all(isinstance(t, Tensor) for t in x):
        raise TypeError(
            f"{name}: operands are sequences of tensors, leading term first; got "
            f"{type(x).__name__}. Wrap a plain tensor in a tuple: (x,)"
        )
    if len(x) < 2 or len({t.dtype for t in x}) != 1:
        given = ", ".join(str(t.dtype) for t in x)
        raise ValueError(
            f"{name}: the first operand has terms ({given}), which are no expansion of one "
            "dtype; say the format of the result with format="
        )
    return Format(x[0].dtype, len(x))


def apply(operation: str, *operands: Sequence[Tensor], format: Format | str | None = None) -> Terms:
    """Return the result of the elementwise operation of this name.

    The functions below and dispatch call it. Three operations have no function below: `addcmul` and
    `addcdiv` of x, a, b and value, and `lerp` of x, end and weight, as in torch. Their errors are
    relative to |x| + |value a b|, |x| + |value a / b| and, for weights from 0 to 1, |x| + |end|.
    They are 0.55u² for bf16x2, 1.5u² for fp16x2, 4.5u², 7.5u² and 3.5u² for other formats of two
    terms, and 2, 3 and 3 times u^n / 2^(n - 1) for n terms.
    """
    if format is None:
        format = _format_of(operation, operands[0])
    elif isinstance(format, str):
        format = require_expansion_format(format, operation)
    terms = [term for operand in operands for term in operand]
    device = next((t.device for t in terms if t.dim() > 0), terms[0].device)
    key = key_for(format, device)
    formats = [_name_of(operand) for operand in operands]
    return tuple(evaluate(operation, format.name, terms, formats, [] if key is None else [key]))


def _name_of(x: Sequence[Tensor]) -> str:
    return PLAIN[x[0].dtype].name if len(x) == 1 else Format(x[0].dtype, len(x)).name


def add(x: Sequence[Tensor], y: Sequence[Tensor], format: Format | str | None = None) -> Terms:
    """Return x + y.

    *Requires*: normalized expansions; a plain tensor is a sequence of one.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: 0.51u² for bf16x2; u² for fp16x2 (measured 0.75u²); 3u² for fp32x2 and fp64x2 (proved
    for p >= 3, and reached); u³/4 for bf16x3 and fp32x3 (reached). Cancellation does not matter.

    *Cost*: two terms: 3 flops and a split, or a network of 20; three terms: 5 and a split, or 200.

    *Source*: `machine_numbers.py`; M. Joldes, J.-M. Muller, V. Popescu, ACM TOMS 44(2), 2017,
    algorithm 6.

    *Special values*: inf + (-inf) is NaN; x + (-x) is +0; (-0) + (-0) is -0.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.expansion.expand(torch.tensor(1.0), mcf.bf16x2)
        >>> small = torch.tensor(0.001, dtype=torch.bfloat16)
        >>> mcf.expansion.add(x, (small,))
        (tensor(1., dtype=torch.bfloat16), tensor(0.0010, dtype=torch.bfloat16))
    """
    return apply("add", x, y, format=format)


def grow(x: Sequence[Tensor], a: Tensor, format: Format | str | None = None) -> Terms:
    """Return x + a for a plain tensor a, the update of Collage.

    The paper's Grow begins with fast_two_sum. Here, a may be larger than x.

    *Requires*: a normalized expansion, and a tensor of any floating dtype.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: as `add`.

    *Cost*: as `add`.

    *Source*: T. Yu et al., "Collage: Light-Weight Low-Precision Strategy for LLM Training",
    ICML 2024, algorithm 1.

    *Special values*: as `add`.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> weight = mcf.expansion.expand(torch.tensor(1.0), mcf.bf16x2)
        >>> for _ in range(100):
        ...     weight = mcf.expansion.grow(weight, torch.tensor(-1e-4))
        >>> mcf.expansion.collapse(weight, torch.float32)
        tensor(0.9901)
    """
    return apply("add", x, (a,), format=format)


def mul(x: Sequence[Tensor], y: Sequence[Tensor], format: Format | str | None = None) -> Terms:
    """Return x * y.

    *Requires*: normalized expansions; a plain tensor is a sequence of one.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: 0.52u² for bf16x2; 1.25u² for fp16x2 (measured 1.0u²); 4u² for fp32x2 and fp64x2
    (proved for p >= 5, measured 3.6u²); u³/4 for bf16x3 and fp32x3 (reached).

    *Cost*: two terms: 3 flops and a split, or a network of 9 with fma; three: 5, or 600.

    *Source*: `machine_numbers.py`; Joldes, Muller, Popescu 2017, algorithm 12; J.-M. Muller, L.
    Rideau, ACM TOMS 48(1), 2022.

    *Special values*: 0 * inf is NaN; a zero has the sign of the leading terms' product.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.expansion.expand(torch.tensor(0.1, dtype=torch.float64), mcf.fp32x2)
        >>> mcf.expansion.collapse(mcf.expansion.mul(x, x), torch.float64)
        tensor(0.0100, dtype=torch.float64)
    """
    return apply("mul", x, y, format=format)


def fma(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    z: Sequence[Tensor],
    format: Format | str | None = None,
) -> Terms:
    """Return x * y + z, split once.

    *Requires*: normalized expansions; a plain tensor is a sequence of one.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: absolute: u² (|result| + |x y| + |z|) for two terms, u³/2 (|result| + |x y| + |z|) for
    three. Without cancellation that is 2u² and u³ relative (measured 1.1u² for fp16x2, 0.5u² for
    other formats of two terms, 0.25u³ for three).

    *Cost*: two terms: 6 flops and a split, or a network of 130; three: 8, or 900.

    *Source*: `machine_numbers.py`; exact products, and the distillation of `renormalize`.

    *Special values*: as x * y + z of the leading terms.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.expansion.expand(torch.tensor(0.1, dtype=torch.float64), mcf.fp32x2)
        >>> mcf.expansion.collapse(mcf.expansion.fma(x, x, x), torch.float64)
        tensor(0.1100, dtype=torch.float64)
    """
    return apply("fma", x, y, z, format=format)


def div(x: Sequence[Tensor], y: Sequence[Tensor], format: Format | str | None = None) -> Terms:
    """Return x / y.

    *Requires*: normalized expansions; a plain tensor is a sequence of one.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: 0.52u² for bf16x2; 1.25u² for fp16x2 (measured 1.0u²); u²/2 for fp32x2 and fp64x2
    (reached); u³/4 for bf16x3 and fp32x3 (reached).

    *Cost*: two terms: 3 flops and a split, or a network of 250; three: 5, or 1200.

    *Source*: `machine_numbers.py`; long division with exact remainders.

    *Special values*: x / 0 is infinite, 0 / 0 is NaN, x / inf is a zero.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> one, three = (mcf.expansion.expand(torch.tensor(v), mcf.fp32x2) for v in (1.0, 3.0))
        >>> mcf.expansion.div(one, three)
        (tensor(0.3333), tensor(-9.9341e-09))
    """
    return apply("div", x, y, format=format)


def sqrt(x: Sequence[Tensor], format: Format | str | None = None) -> Terms:
    """Return the square root of x.

    *Requires*: a normalized expansion.

    *Returns*: the normalized terms of the result, shape of x.

    *Error*: 0.51u² for bf16x2; 0.88u² for fp16x2 (measured 0.86u²); 3.125u² for fp32x2 and fp64x2
    (proved, measured 2.9u²); u³/4 for bf16x3 and fp32x3 (reached).

    *Cost*: two terms: 2 flops and a split, or a network of 8 with fma; three: 3, or 1000.

    *Source*: `machine_numbers.py`; V. Lefèvre et al., ACM TOMS 49(1), 2023, algorithm 8.

    *Special values*: NaN below 0; the sign of a zero is kept.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.expansion.sqrt(mcf.expansion.expand(torch.tensor(2.0), mcf.fp32x2))
        (tensor(1.4142), tensor(2.4203e-08))
    """
    return apply("sqrt", x, format=format)
