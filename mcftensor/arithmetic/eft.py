"""Error-free transformations: a rounded result and its exact error, both of the operands' dtype.

Every function takes plain floating-point tensors of one dtype (bfloat16, float16, float32 or
float64), which broadcast, and returns new tensors of that dtype. Each function is opaque to
compilers, so that it is exact in compiled code too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcftensor.arithmetic.base_types import BASES, wider_than
from mcftensor.arithmetic.rounding import add_odd
from mcftensor.kernels.custom_ops import empty_terms, inline, opaque
from mcftensor.kernels.without_float64 import widest


def same_float_dtype(name: str, *tensors: Tensor) -> torch.dtype:
    """Return the common dtype of the tensors.

    Raises:
        TypeError: if dtypes differ or are no floats; names the caller and all dtypes.
    """
    dtypes = [x.dtype for x in tensors]
    if dtypes[0] in BASES and len(set(dtypes)) == 1:
        return dtypes[0]
    raise TypeError(
        f"{name}: operands of dtypes {', '.join(str(d) for d in dtypes)}; all must have one dtype "
        "of bfloat16, float16, float32, float64: convert them with .to(dtype)"
    )


def _pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    hi, lo = empty_terms((a, b), a.dtype, 2)
    return hi, lo


@opaque(_pair)
def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum of two tensors and its exact error.

    *Requires*: no overflow, neither in a + b nor in s - a, which can overflow if |b| is the
    largest float. The operands may come in any order.

    *Returns*: `(s, e)`, shapes broadcast, with s = RN(a + b) and s + e = a + b.

    *Error*: none, subnormals included.

    *Cost*: 6 flops.

    *Source*: D. Knuth, The Art of Computer Programming 2, 4.2.2, theorem B; O. Møller, BIT 5, 1965.

    *Special values*: e is NaN or infinite where a + b is not finite.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> a, b = torch.tensor([1.0, 0.001], dtype=torch.bfloat16)
        >>> mcf.eft.two_sum(a, b)
        (tensor(1., dtype=torch.bfloat16), tensor(0.0010, dtype=torch.bfloat16))
    """
    same_float_dtype("two_sum", a, b)
    s = a + b
    bb = s - a
    aa = s - bb
    return s, (a - aa) + (b - bb)


@opaque(_pair)
def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and its exact error, for operands in order of magnitude.

    *Requires*: a = 0, or the exponent of a not below the exponent of b (|a| >= |b| suffices). No
    overflow.
    On unordered operands the error is wrong in most cases; use `two_sum` there.

    *Returns*: `(s, e)`, shapes broadcast, with s = RN(a + b) and s + e = a + b.

    *Error*: none under the requirement.

    *Cost*: 3 flops.

    *Source*: T. J. Dekker, Numerische Mathematik 18, 1971.

    *Special values*: e is NaN or infinite where a + b is not finite.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> a, b = torch.tensor([256.0, 1.0], dtype=torch.bfloat16)
        >>> mcf.eft.fast_two_sum(a, b)
        (tensor(256., dtype=torch.bfloat16), tensor(1., dtype=torch.bfloat16))
    """
    same_float_dtype("fast_two_sum", a, b)
    s = a + b
    return s, b - (s - a)


@opaque(lambda a: _pair(a, a))
def split(a: Tensor) -> tuple[Tensor, Tensor]:
    """Split significands into two halves. Products of two halves are exact.

    *Requires*: nothing. Large operands are scaled against overflow in the computation.

    *Returns*: `(hi, lo)`, shape of a, with hi + lo = a. They have at most 4 + 3, 5 + 5, 12 + 11 and
    26 + 26 bits for the four dtypes in the order above.

    *Error*: none. If hi would round up to infinity, as for the largest floats, a itself is returned
    as hi, with lo = 0.

    *Cost*: 4 flops and the scaling.

    *Source*: G. W. Veltkamp, 1968; T. J. Dekker, Numerische Mathematik 18, 1971.

    *Special values*: infinities and NaN are returned as hi with lo = 0.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.eft.split(torch.tensor(1.0 + 2.0**-20))
        (tensor(1.), tensor(9.5367e-07))
    """
    low_bits = (BASES[same_float_dtype("split", a)].precision + 1) // 2
    large = a.abs() > torch.finfo(a.dtype).max * 2.0 ** -(low_bits + 1)
    x = torch.where(large, a * 2.0 ** -(low_bits + 2), a)
    c = x * (2.0**low_bits + 1)
    hi = c - (c - x)
    hi = torch.where(large, hi * 2.0 ** (low_bits + 2), hi)
    hi = torch.where(torch.isfinite(hi), hi, a)
    return hi, torch.where(torch.isfinite(a), a - hi, 0)


@opaque(_pair)
def two_prod(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded product of two tensors and its exact error.

    *Requires*: no overflow, and no underflow of the error: the exponents of a and b add up to at
    least e_min + p - 1, which is -119 for bfloat16, -4 for float16, -103 for float32 and -970 for
    float64.

    *Returns*: `(p, e)`, shapes broadcast, with p = RN(a * b) and p + e = a * b.

    *Error*: none under the requirement.

    *Cost*: 2 multiplications and 1 subtraction in the next wider type. Float64, which has no wider
    type, and float32 without float64 take 17 flops by Dekker's product, and scaling.

    *Source*: T. J. Dekker, Numerische Mathematik 18, 1971 (float64).

    *Special values*: e is NaN or infinite where a * b is not finite.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> a = torch.tensor(1.0078125, dtype=torch.bfloat16)
        >>> mcf.eft.two_prod(a, a)
        (tensor(1.0156, dtype=torch.bfloat16), tensor(6.1035e-05, dtype=torch.bfloat16))
    """
    dtype = same_float_dtype("two_prod", a, b)
    wider = wider_than(a)
    if wider is not None:
        exact = a.to(wider) * b.to(wider)
        product = exact.to(dtype)
        return product, (exact - product.to(wider)).to(dtype)
    product = a * b
    # Dekker's partial products can overflow where the product does not: scale the larger operand.
    limit, factor = (2.0**900, 2.0**64) if dtype == torch.float64 else (2.0**100, 2.0**16)
    large = product.abs() > limit
    first = a.abs() >= b.abs()
    a = torch.where(large & first, a * (1 / factor), a)
    b = torch.where(large & ~first, b * (1 / factor), b)
    if dtype == torch.float64:
        error = _error(a, b)
        return product, torch.where(large, error * factor, error)
    small = product.abs() < 2.0**-76  # errors that float32 would lose and float64 keeps
    a = torch.where(small & ~first, a * 2.0**100, a)
    b = torch.where(small & first, b * 2.0**100, b)
    error = _error(a, b)
    lost = error + (a * b - product * 2.0**100)
    error = torch.where(large, error * factor, error)
    return product, torch.where(small, lost * 2.0**-100, error)


def _error(a: Tensor, b: Tensor) -> Tensor:
    """a * b - RN(a * b)."""
    (ah, al), (bh, bl) = _split(a), _split(b)
    return al * bl - (((a * b - ah * bh) - al * bh) - ah * bl)


@opaque(lambda a, b, c: empty_terms((a, b, c), a.dtype, 1)[0])
def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once.

    *Requires*: no overflow and no underflow of a * b (see `two_prod`).

    *Returns*: RN(a * b + c), shape broadcast.

    *Error*: half an ulp.

    *Cost*: about 20 operations: the exact product and sum, rounded to odd and then to nearest.

    *Source*: S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008.

    *Special values*: as a * b + c in IEEE arithmetic.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> a, c = torch.tensor([1.0078125, -1.015625], dtype=torch.bfloat16)
        >>> mcf.eft.fma(a, a, c), a * a + c
        (tensor(6.1035e-05, dtype=torch.bfloat16), tensor(0., dtype=torch.bfloat16))
    """
    same_float_dtype("fma", a, b, c)
    wider = wider_than(a)
    if wider is not None:
        return add_odd(a.to(wider) * b.to(wider), c.to(wider)).to(a.dtype)
    uh, ul = _two_prod(a, b)
    th, tl = _two_sum(c, ul)
    vh, vl = _two_sum(uh, th)
    total = vh + add_odd(tl, vl)
    return torch.where(torch.isfinite(total) & (total != 0), total, a * b + c)


@opaque(lambda a: empty_terms((a,), a.dtype, 1)[0])
def sqrt(a: Tensor) -> Tensor:
    """The square root, rounded to nearest.

    On CPUs, torch.sqrt is wrong by one unit in the last place in one of 150 float32 and float64
    results. The bounds of expansion arithmetic need correct rounding.

    *Requires*: nothing. Tiny operands are scaled against underflow in the computation.

    *Returns*: RN(sqrt(a)), shape of a.

    *Error*: half an ulp.

    *Cost*: one square root in float64. Float64 itself, and other types without float64, also take
    an fma and the neighbours of the result.

    *Source*: Tuckerman's test (float64): R. Agarwal et al., "New scalar and vector elementary
    functions for the IBM System/370", IBM J. Res. Dev. 30(2), 1986.

    *Special values*: NaN below 0; the sign of a zero is kept.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.eft.sqrt(torch.tensor(2.0))
        tensor(1.4142)
    """
    dtype = same_float_dtype("sqrt", a)
    wide = torch.promote_types(dtype, widest(a.device))
    if dtype != wide == torch.float64:
        return torch.sqrt(a.to(wide)).to(dtype)
    return _root(a.to(wide)).to(dtype)  # a wider type has 2p + 2 bits or more: it rounds once


def _root(a: Tensor) -> Tensor:
    tiny = a < (2.0**-960 if a.dtype == torch.float64 else 2.0**-80)
    power = 2.0**128 if a.dtype == torch.float64 else 2.0**32
    scaled = torch.where(tiny, a * power * power, a)
    root = torch.sqrt(scaled)
    remainder = _fma(-root, root, scaled)
    above = torch.nextafter(root, torch.full_like(root, torch.inf))
    below = torch.nextafter(root, torch.zeros_like(root))
    # Midway to a neighbour the remainder is root * gap + gap² / 4; it is a multiple of gap².
    up = remainder > root * (above - root)
    down = remainder <= root * (below - root)
    nearest = torch.where(up, above, torch.where(down, below, root))
    nearest = torch.where(a > 0, nearest, root)
    return torch.where(tiny, nearest * (1 / power), nearest)


_two_sum, _split, _two_prod, _fma = inline(two_sum), inline(split), inline(two_prod), inline(fma)
