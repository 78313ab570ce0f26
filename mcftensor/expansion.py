"""Arithmetic on expansions, as functions on plain tensors.

An expansion is a sequence of tensors of one dtype and shape, leading term first, normalized: each
term is the nearest float to itself plus all that follow. Operands may also be plain tensors of
any floating dtype, given as sequences of one, and all broadcast. Results are tuples of terms,
normalized, in the format asked for, or else in that of the first operand.

Bounds are relative to the exact result unless said otherwise, in u, the unit roundoff of the base
(2^-8 for bfloat16), to first order, and hold while nothing overflows and no term loses bits among
the subnormals (see `Format.full_precision_min`), intermediate products included. A plain operand
that has more bits than the format adds an error of at most u²/2 (two terms) or u³/4 (three) of
itself. A result that is not finite is what the base alone gives, with zero tails; x + (-x) is +0;
the leading term carries the sign of a zero.

How each format computes is in `wide.py` (bases of 16 bits) and `networks.py` (32 and 64 bits).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor import networks, wide
from mcftensor.conversion import convert_terms
from mcftensor.eft import same_float_dtype
from mcftensor.formats import MAX_TERMS, Format, require_format
from mcftensor.kernels import Body, Call, run
from mcftensor.noise import indices, key_for, uniform
from mcftensor.operators import empty_terms, opaque, regroup
from mcftensor.rounding import collapse_terms, split_terms

Terms = tuple[Tensor, ...]


# ------------------------------------------------------------------- between tensors and terms


def _empty(operands: Sequence[Tensor], format: str) -> list[Tensor]:
    f = Format.from_name(format)
    return empty_terms(operands, f.base, f.terms)


@opaque(lambda terms, format, key: _empty(terms, format))
def _convert(terms: Sequence[Tensor], format: str, key: Tensor | None) -> list[Tensor]:
    f = Format.from_name(format)
    noise = None if key is None else uniform(key, indices(terms[0]))
    if len(terms) == 1:
        return split_terms(terms[0], f.base, f.terms, noise)
    result = convert_terms(tuple(terms), f.base, f.terms, noise)
    return [x.clone() for x in result] if result[0] is terms[0] else list(result)


def convert(x: Sequence[Tensor], format: Format) -> Terms:
    """An expansion in another format, rounded once.

    *Requires*: normalized terms of any format, or a plain real tensor as a sequence of one;
    integers pass through float64, so of 53 bits at most.

    *Returns*: `format.terms` tensors of the shape of x, normalized.

    *Error*: none where the format holds x; else half an ulp of the last term, at most
    u^n / 2^(n - 1) for n terms (reached), or half the least subnormal. A whole ulp, and none in
    the mean, where the format rounds stochastically.

    *Cost*: from a plain tensor one rounding and one subtraction a term, twice over; from an
    expansion a network.

    *Source*: repeated rounding, with a second pass that resolves ties.

    *Special values*: what overflows the base becomes infinite, with zero tails.

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
    key = key_for(require_format(format, "convert"), x[0].device)
    return tuple(_convert(list(x), format.name, key))


def expand(x: Tensor, format: Format) -> Terms:
    """A plain tensor as the terms of an expansion: `convert` of a single tensor.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.expansion.expand(torch.tensor(0.999), mcf.bf16x2)
        (tensor(1., dtype=torch.bfloat16), tensor(-0.0010, dtype=torch.bfloat16))
    """
    return convert((x,), require_format(format, "expand"))


@opaque(lambda terms, dtype: empty_terms(terms, dtype, 1)[0])
def _collapse(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return collapse_terms(terms, dtype)


def collapse(terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of the terms of an expansion, rounded once.

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
    return _collapse(list(terms), dtype)


@opaque(lambda values, terms: empty_terms(values, values[0].dtype, terms))
def _renormalize(values: Sequence[Tensor], terms: int) -> list[Tensor]:
    result = networks.distill(values, terms)
    plain = values[0].clone()
    for value in values[1:]:
        plain = plain + value
    return list(networks.settle(result, plain))


def renormalize(values: Sequence[Tensor], terms: int | None = None) -> Terms:
    """Any tensors of one dtype as the normalized terms of their sum.

    *Requires*: two tensors or more, in any order of magnitude, overlapping or not, zeros
    anywhere; no overflow of partial sums.

    *Returns*: `terms` tensors (by default as many as were given, 6 at most), shapes broadcast.

    *Error*: none where the sum fits into that many terms; else half an ulp of the last one, at
    most u^n / 2^(n - 1) for n terms (reached).

    *Cost*: for k values 3 k (k - 1) flops, 6 (n + 1) k for the n terms, and some for ties.

    *Source*: J. R. Shewchuk, "Adaptive precision floating-point arithmetic and fast robust
    geometric predicates", Discrete & Computational Geometry 18, 1997, theorem 10, which holds for
    any number of values; ties are resolved from the later terms.

    *Special values*: where the sum is not finite, the plain sum with zero tails.

    Raises:
        ValueError: fewer than two values, or a number of terms not from 2 to 6.
        TypeError: values of different dtypes, or not of floating dtype.

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


def _network(two: Callable[..., Terms], more: Callable[..., Terms]) -> Callable[..., Terms]:
    return lambda *operands: (two if len(operands[0]) == 2 else more)(*operands)


_add = _network(networks.add2, networks.add)
_mul = _network(networks.mul2, networks.mul)
_fma = _network(networks.fma2, networks.fma)


def _addcmul(x: Terms, a: Terms, b: Terms, value: Terms) -> Terms:
    return _fma(_mul(value, a), b, x)


def _addcdiv(x: Terms, a: Terms, b: Terms, value: Terms) -> Terms:
    return _add(x, networks.div(_mul(value, a), b))


def _lerp(x: Terms, end: Terms, weight: Terms) -> Terms:
    difference = _add(end, networks.neg(x))
    one = tuple(torch.ones_like(w) if i == 0 else torch.zeros_like(w) for i, w in enumerate(weight))
    near = _fma(weight, difference, x)
    far = _fma(_add(weight, networks.neg(one)), difference, end)
    return tuple(torch.where(weight[0].abs() < 0.5, n, f) for n, f in zip(near, far, strict=True))


# name: (evaluated wide, evaluated by networks)
_OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Terms]]] = {
    "add": (wide.add, _add),
    "mul": (wide.mul, _mul),
    "div": (wide.div, networks.div),
    "sqrt": (wide.sqrt, _network(networks.sqrt2, networks.sqrt)),
    "fma": (wide.fma, _fma),
    "addcmul": (wide.addcmul, _addcmul),
    "addcdiv": (wide.addcdiv, _addcdiv),
    "lerp": (wide.lerp, _lerp),
}


def _enter(operand: list[Tensor], base: torch.dtype, terms: int) -> Terms:
    """An operand of a network: the number of terms of the base that it computes with."""
    if any(term.dtype != base for term in operand):
        operand = [part for term in operand for part in split_terms(term, base, terms)]
    if len(operand) > terms:
        return networks.settle(networks.distill(operand, terms), operand[0])
    return *operand, *[torch.zeros_like(operand[0])] * (terms - len(operand))


def _body(
    operation: str, lengths: Sequence[int], are_scalars: Sequence[bool], format: Format
) -> Body:
    """An operation as a function of the vectors and scalars among the terms of its operands.

    Stochastic rounding takes a key as the last scalar; networks compute one term more for it.
    """
    by_wide, by_network = _OPERATIONS[operation]
    terms = format.terms + (format.rounding == "stochastic")

    def body(vectors: Sequence[Tensor], scalars: Sequence[Any], index: Tensor) -> Sequence[Tensor]:
        left = {True: iter(scalars), False: iter(vectors)}
        operands = regroup([next(left[is_scalar]) for is_scalar in are_scalars], lengths)
        noise = uniform(scalars[-1], index) if format.rounding == "stochastic" else None
        if format.wide is not None:
            result = by_wide(*operands, wide=format.wide)
            return split_terms(result, format.base, format.terms, noise)
        longer = by_network(*(_enter(operand, format.base, terms) for operand in operands))
        return networks.shorten(longer, noise) if noise is not None else longer

    return body


def _calls(
    operation: str,
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    formats: str,
    keys: Sequence[Tensor],
    outputs: Sequence[Sequence[Tensor]],
) -> Iterator[tuple[Hashable, Callable[[], Body], Call]]:
    """What each tensor of a list asks of the kernels."""
    rest, more_keys = iter(terms), iter(keys)
    names = formats.split()
    count = len(lengths) // len(names)
    for i, (name, output) in enumerate(zip(names, outputs, strict=True)):
        own = tuple(lengths[i * count : (i + 1) * count])
        block = list(itertools.islice(rest, sum(own)))
        format = Format.from_name(name)
        shaped = output[0].dim() > 0
        are_scalars = tuple([shaped and x.dim() == 0 for x in block])
        vectors = [x for x, is_scalar in zip(block, are_scalars, strict=True) if not is_scalar]
        scalars = [x for x, is_scalar in zip(block, are_scalars, strict=True) if is_scalar]
        if format.rounding == "stochastic":
            scalars.append(next(more_keys))
        make = functools.partial(_body, operation, own, are_scalars, format)
        yield (operation, own, are_scalars, name), make, Call(vectors, scalars, output)


def _outputs(
    terms: Sequence[Tensor], lengths: Sequence[int], formats: str
) -> list[list[Tensor]]:
    names = formats.split()
    count = len(lengths) // len(names)
    sizes = [sum(lengths[i : i + count]) for i in range(0, len(lengths), count)]
    return [_empty(own, name) for own, name in zip(regroup(terms, sizes), names, strict=True)]


@opaque(
    lambda operation, terms, lengths, formats, keys: [
        *itertools.chain(*_outputs(terms, lengths, formats))
    ],
    lays_out=True,
)
def evaluate(
    operation: str,
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    formats: str,
    keys: Sequence[Tensor],
) -> list[Tensor]:
    """One elementwise operation on each of a list of tensors, in formats of their own.

    `terms` holds the operands of the first, one after the other, then those of the second, and so
    on; `lengths` their numbers of terms; `formats` names, with spaces between; `keys` one key for
    each format that rounds stochastically.
    """
    outputs = _outputs(terms, lengths, formats)
    run(_calls(operation, terms, lengths, formats, keys, outputs))
    return list(itertools.chain(*outputs))


@opaque(
    lambda operation, targets, terms, lengths, formats, keys: None,
    mutates=("targets",),
)
def evaluate_(
    operation: str,
    targets: Sequence[Tensor],
    terms: Sequence[Tensor],
    lengths: Sequence[int],
    formats: str,
    keys: Sequence[Tensor],
) -> None:
    """The same, written into the terms of the targets, which may be among the operands."""
    outputs = regroup(targets, [Format.from_name(name).terms for name in formats.split()])
    run(_calls(operation, terms, lengths, formats, keys, outputs))


def _format_of(name: str, x: Sequence[Tensor]) -> Format:
    if not isinstance(x, Sequence) or not all(isinstance(t, Tensor) for t in x):
        raise TypeError(
            f"{name}: operands are sequences of tensors, leading term first; got "
            f"{type(x).__name__}. Wrap a plain tensor in a tuple: (x,)"
        )
    if len(x) < 2 or len({t.dtype for t in x}) != 1:
        given = ", ".join(str(t.dtype) for t in x)
        raise ValueError(
            f"{name}: the first operand has terms ({given}), which are no expansion of one dtype; "
            "say the format of the result with format="
        )
    return Format(x[0].dtype, len(x))


def apply(operation: str, *operands: Sequence[Tensor], format: Format | None = None) -> Terms:
    """The elementwise operation of this name; the functions below call it, and so does dispatch.

    Three have no function of their own: `addcmul` and `addcdiv` of x, a, b and value, and `lerp` of
    x, end and weight, as in torch. Their errors, relative to |x| + |value a b|, |x| + |value a / b|
    and, for weights from 0 to 1, |x| + |end|: 0.55u² for bf16x2, 1.5u² for fp16x2, 4.5u², 7.5u² and
    3.5u² for other formats of two terms, 2, 3 and 3 times u^n / 2^(n - 1) for n terms.
    """
    if format is None:
        format = _format_of(operation, operands[0])
    terms = [term for operand in operands for term in operand]
    device = next((t.device for t in terms if t.dim() > 0), terms[0].device)
    key = key_for(format, device)
    keys = [] if key is None else [key]
    return tuple(evaluate(operation, terms, [len(o) for o in operands], format.name, keys))


def add(x: Sequence[Tensor], y: Sequence[Tensor], format: Format | None = None) -> Terms:
    """x + y.

    *Requires*: normalized expansions; a plain tensor is a sequence of one.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: 0.51u² for bf16x2; u² for fp16x2 (measured 0.75u²); 3u² for fp32x2 and fp64x2 (proved
    for p >= 3, and reached); u³/4 for bf16x3 and fp32x3 (reached). Cancellation does not matter.

    *Cost*: two terms: 3 flops and a split, or a network of 20; three terms: 5 and a split, or 200.

    *Source*: `wide.py`; M. Joldes, J.-M. Muller, V. Popescu, ACM TOMS 44(2), 2017, algorithm 6.

    *Special values*: inf + (-inf) is NaN; x + (-x) is +0; (-0) + (-0) is -0.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.expansion.expand(torch.tensor(1.0), mcf.bf16x2)
        >>> small = torch.tensor(0.001, dtype=torch.bfloat16)
        >>> mcf.expansion.add(x, (small,))
        (tensor(1., dtype=torch.bfloat16), tensor(0.0010, dtype=torch.bfloat16))
    """
    return apply("add", x, y, format=format)


def grow(x: Sequence[Tensor], a: Tensor, format: Format | None = None) -> Terms:
    """x + a for a plain tensor a: the update of Collage.

    Unlike the paper's Grow, which begins with fast_two_sum, a may be larger than x.

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


def mul(x: Sequence[Tensor], y: Sequence[Tensor], format: Format | None = None) -> Terms:
    """x * y.

    *Requires*: normalized expansions; a plain tensor is a sequence of one.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: 0.52u² for bf16x2; 1.25u² for fp16x2 (measured 1.0u²); 4u² for fp32x2 and fp64x2
    (proved for p >= 5, measured 3.6u²); u³/4 for bf16x3 and fp32x3 (reached).

    *Cost*: two terms: 3 flops and a split, or a network of 9 with fma; three: 5, or 600.

    *Source*: `wide.py`; Joldes, Muller, Popescu 2017, algorithm 12; J.-M. Muller, L. Rideau,
    ACM TOMS 48(1), 2022.

    *Special values*: 0 * inf is NaN; the sign of a zero is that of the leading terms' product.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.expansion.expand(torch.tensor(0.1, dtype=torch.float64), mcf.fp32x2)
        >>> mcf.expansion.collapse(mcf.expansion.mul(x, x), torch.float64)
        tensor(0.0100, dtype=torch.float64)
    """
    return apply("mul", x, y, format=format)


def fma(
    x: Sequence[Tensor], y: Sequence[Tensor], z: Sequence[Tensor], format: Format | None = None
) -> Terms:
    """x * y + z, split once.

    *Requires*: normalized expansions; a plain tensor is a sequence of one.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: absolute: u² (|result| + |x y| + |z|) for two terms, u³/2 (|result| + |x y| + |z|) for
    three. Where nothing cancels that is 2u² and u³ relative (measured 1.1u² for fp16x2, 0.5u² for
    other formats of two terms, 0.25u³ for three).

    *Cost*: two terms: 6 flops and a split, or a network of 130; three: 8, or 900.

    *Source*: `wide.py`; exact products, and the distillation of `renormalize`.

    *Special values*: as x * y + z of the leading terms.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.expansion.expand(torch.tensor(0.1, dtype=torch.float64), mcf.fp32x2)
        >>> mcf.expansion.collapse(mcf.expansion.fma(x, x, x), torch.float64)
        tensor(0.1100, dtype=torch.float64)
    """
    return apply("fma", x, y, z, format=format)


def div(x: Sequence[Tensor], y: Sequence[Tensor], format: Format | None = None) -> Terms:
    """x / y.

    *Requires*: normalized expansions; a plain tensor is a sequence of one.

    *Returns*: the normalized terms of the result, shapes broadcast.

    *Error*: 0.52u² for bf16x2; 1.25u² for fp16x2 (measured 1.0u²); u²/2 for fp32x2 and fp64x2
    (reached); u³/4 for bf16x3 and fp32x3 (reached).

    *Cost*: two terms: 3 flops and a split, or a network of 250; three: 5, or 1200.

    *Source*: `wide.py`; long division with exact remainders.

    *Special values*: x / 0 is infinite, 0 / 0 is NaN, x / inf is a zero.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> one, three = (mcf.expansion.expand(torch.tensor(v), mcf.fp32x2) for v in (1.0, 3.0))
        >>> mcf.expansion.div(one, three)
        (tensor(0.3333), tensor(-9.9341e-09))
    """
    return apply("div", x, y, format=format)


def sqrt(x: Sequence[Tensor], format: Format | None = None) -> Terms:
    """The square root of x.

    *Requires*: a normalized expansion.

    *Returns*: the normalized terms of the result, shape of x.

    *Error*: 0.51u² for bf16x2; 0.88u² for fp16x2 (measured 0.86u²); 3.125u² for fp32x2 and fp64x2
    (proved, measured 2.9u²); u³/4 for bf16x3 and fp32x3 (reached).

    *Cost*: two terms: 2 flops and a split, or a network of 8 with fma; three: 3, or 1000.

    *Source*: `wide.py`; V. Lefèvre et al., ACM TOMS 49(1), 2023, algorithm 8.

    *Special values*: NaN below 0; the sign of a zero stays.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.expansion.sqrt(mcf.expansion.expand(torch.tensor(2.0), mcf.fp32x2))
        (tensor(1.4142), tensor(2.4203e-08))
    """
    return apply("sqrt", x, format=format)
