"""Functions that PyTorch evaluates in float64 with fewer bits than float64 has.

Each function takes and returns float64 tensors, as PyTorch's function of the same name does. Its
relative error is a few roundings where PyTorch loses digits: in the tails of `gelu` and of
the normal distribution, at zeros of `digamma`, `logit`, `sinc` and `tanhshrink`, where one element
dominates `log_softmax` or its gradient, for small arguments of `igammac`, and in all of
`polygamma(1, x)`.
Functions that call no error-free transformation are differentiable. They also take expansions, in
which constants are functions of exact numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from mcftensor.arithmetic import eft
from mcftensor.kernels.custom_ops import inline

_two_prod, _two_sum = inline(eft.two_prod), inline(eft.two_sum)

# Constants as sums of two floats.
_ROOT_HALF = (0.7071067811865476, -4.833646656726457e-17)
_ROOT_8_OVER_PI = (1.5957691216057308, -9.96930880911092e-17)
_CUBIC = (0.044715, float(Fraction("0.044715") - Fraction(0.044715)))  # of gelu by tanh
_ROOT_OF_DIGAMMA = (1.4616321449683622, 9.549995429965697e-17)


def _finite(error: Tensor) -> Tensor:
    """Replace the error by 0 where the result is not finite."""
    return torch.nan_to_num(error, 0.0, 0.0, 0.0)


def _series(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Evaluate a polynomial, constant term first."""
    result = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result


# ------------------------------------------------------------------------- normal distribution


def ndtr(x: Tensor) -> Tensor:
    """The normal distribution function, erfc(-x / sqrt(2)) / 2.

    It is corrected by the rounding error of the argument, which erfc magnifies by x².
    """
    argument = x * -_ROOT_HALF[0]
    with torch.no_grad():
        _, error = _two_prod(x, torch.full_like(x, -_ROOT_HALF[0]))
        error = _finite(error - x * _ROOT_HALF[1])
    slope = torch.exp(-argument * argument) * (2 / math.sqrt(math.pi))
    return 0.5 * (torch.special.erfc(argument) - slope * error)


def _density(x: Tensor) -> Tensor:
    """The normal density, exp(-x²/2) / sqrt(2 pi), corrected by the error of the square."""
    square, error = _two_prod(x, x)
    return torch.exp(-0.5 * square) * (1 - 0.5 * _finite(error)) * (1 / math.sqrt(2 * math.pi))


def log_ndtr(x: Tensor) -> Tensor:
    """The logarithm of `ndtr`."""
    tail = torch.log(torch.special.erfcx(-x * _ROOT_HALF[0]) * 0.5) - 0.5 * x * x
    return torch.where(x < -1, tail, torch.log1p(-ndtr(-x)))


# ---------------------------------------------------------------------------------------- gelu


def _logistic_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """s(z) and s(-z) for the logistic function s and z = sqrt(8 / pi) (x + 0.044715 x³).

    z is evaluated as two floats, since s magnifies the error of z by z.
    """
    square, low = _two_prod(x, x)
    cubic, error = _two_prod(square, torch.full_like(x, _CUBIC[0]))
    factor, rest = _two_sum(torch.ones_like(x), cubic)
    rest = rest + (error + square * _CUBIC[1] + low * _CUBIC[0])
    product, low = _two_prod(x, factor)
    z, error = _two_prod(product, torch.full_like(x, _ROOT_8_OVER_PI[0]))
    low = low + x * rest
    error = _finite(error + low * _ROOT_8_OVER_PI[0] + product * _ROOT_8_OVER_PI[1])
    power = torch.exp(-z.abs()) * (1 - torch.copysign(error, error * z))
    near, far = 1 / (1 + power), power / (1 + power)
    return torch.where(z < 0, far, near), torch.where(z < 0, near, far)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x * ndtr(x), or PyTorch's approximation "tanh" of it, x * s(z)."""
    return x * (ndtr(x) if approximate == "none" else _logistic_parts(x)[0])


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """The gradient of `gelu`; its relative error grows near the minimum of gelu, at -0.75."""
    if approximate == "none":
        return grad * (ndtr(x) + x * _density(x))
    s, rest = _logistic_parts(x)
    slope = _ROOT_8_OVER_PI[0] * (1 + 3 * _CUBIC[0] * x * x)
    return grad * (s * (1 + x * rest * slope))


def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `hardsigmoid`, for which PyTorch rounds 1/6 to float32."""
    return torch.where(x.abs() < 3, grad * (torch.ones_like(x) / 6), 0.0)


# ------------------------------------------------------------------------------- gamma function


def _hurwitz(s: int, x: float) -> float:
    """The Hurwitz zeta function, by the Euler-Maclaurin formula."""
    n = x + 40
    total = math.fsum([(x + k) ** -s for k in range(40)])
    b2, b4, b6 = s / 12, s * (s + 1) * (s + 2) / 720, math.prod(range(s, s + 5)) / 30240
    rest = n / (s - 1) + 0.5 + b2 / n - b4 / n**3 + b6 / n**5
    return total + rest * n**-s


# The Taylor coefficients of digamma at its positive root.
_AT_ROOT = [0.0] + [(-1) ** (k + 1) * _hurwitz(k + 1, _ROOT_OF_DIGAMMA[0]) for k in range(1, 24)]


def digamma(x: Tensor) -> Tensor:
    """The digamma function, by a Taylor series near the positive root, else by PyTorch's function.

    Below 0 it is reflected by the exact distance to the nearest pole. Near its negative zeros,
    parts of similar size cancel.
    """
    distance = (x - _ROOT_OF_DIGAMMA[0]) - _ROOT_OF_DIGAMMA[1]
    is_near = distance.abs() < 0.25
    near = distance * _series(_AT_ROOT[1:], distance.where(is_near, 0.0))
    found = torch.where(is_near, near, torch.special.digamma(x))
    offset = x - torch.round(x)
    mirrored = torch.special.digamma(1 - x) - math.pi / torch.tan(math.pi * offset)
    return torch.where((x < 0) & (offset != 0), mirrored, found)


def zeta(s: Tensor | float, x: Tensor | float) -> Tensor:
    """The Hurwitz zeta function.

    For x below 0 PyTorch adds as many terms as x has units. Here, for integer s, the result is the
    sum over all integers minus the other half of that sum.
    """
    s, x = torch.as_tensor(s, dtype=torch.float64), torch.as_tensor(x, dtype=torch.float64)
    s, x = s.to(x.device) if s.dim() == 0 else s, x.to(s.device) if x.dim() == 0 else x
    offset = x - torch.round(x)
    is_mirrored = (x < 0) & (offset.abs() > 0) & (s > 1) & (s == torch.floor(s))
    found = torch.special.zeta(s, torch.where(is_mirrored, 1.0, x))
    y, f = torch.where(is_mirrored, x, -0.5), torch.where(is_mirrored, offset, 0.5)
    other = torch.special.zeta(s, 1 - f) - torch.special.zeta(s, 1 - y)
    sign = torch.where(torch.remainder(s, 2) == 1, -1.0, 1.0)
    return torch.where(is_mirrored, torch.special.zeta(s, f) + sign * other, found)


def polygamma(n: int, x: Tensor) -> Tensor:
    """The n-th derivative of `digamma`."""
    if n == 0:
        return digamma(x)
    if n < 0:
        return torch.special.polygamma(n, x)  # raises PyTorch's error
    factor = math.gamma(n + 1.0) if n <= 170 else math.inf
    return (factor if n % 2 else -factor) * zeta(n + 1.0, x)


# --------------------------------------------------------------------------------- other zeros


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """log(x / (1 - x)); near 1/2 it is 2 atanh(2x - 1), whose argument is exact."""
    if eps is not None:
        x = torch.where(x < eps, x.clamp(min=eps), x.clamp(max=1 - eps))  # eps may be above 1/2
    far = torch.log(x) - torch.log1p(-x)
    return torch.where((x - 0.5).abs() < 0.25, 2 * torch.atanh(2 * x - 1), far)


def sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x), from the exact distance to the nearest integer."""
    whole, pi = torch.round(x), torch.acos(x.new_full((), -1.0))
    sine = torch.sin(pi * (x - whole))
    sine = torch.where(torch.remainder(whole, 2) == 1, -sine, sine)
    return torch.where(x == 0, 1.0, sine / (pi * x))


def _tanhshrink_coefficients(count: int) -> list[float]:
    """The coefficients of x^(2k) in (x - tanh(x)) / x^3, by tanh' = 1 - tanh^2."""
    tanh = [Fraction(1)]
    while len(tanh) <= count:
        square = sum(map(operator.mul, tanh, reversed(tanh)))
        tanh.append(-square / (2 * len(tanh) + 1))
    return [-float(x) for x in tanh[1:]]


_OF_TANHSHRINK = _tanhshrink_coefficients(24)


def tanhshrink(x: Tensor) -> Tensor:
    """x - tanh(x), by its series near 0."""
    is_near = x.abs() < 0.5
    near = x.where(is_near, 0.0)
    square = near * near
    return torch.where(is_near, near * square * _series(_OF_TANHSHRINK, square), x - torch.tanh(x))


# -------------------------------------------------------------------------- sums of exponentials


def _rest(x: Tensor, maximum: Tensor, dim: int | tuple[int, ...], keepdim: bool) -> Tensor:
    """The sum of exp(x - maximum) minus 1, an exact argument for log1p."""
    is_largest = x == maximum
    others = torch.exp(x - maximum).masked_fill(is_largest, 0.0).sum(dim, keepdim)
    return others + (is_largest.sum(dim, keepdim) - 1)


def log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """The logarithm of softmax, by log1p.

    PyTorch takes the logarithm of a sum near 1, and returns 0 where one element dominates.
    """
    if not x.numel():
        return x.clone()
    maximum = x.amax(dim, keepdim=True)
    # An infinite maximum makes the whole row NaN, as in PyTorch.
    return (x - maximum) - torch.log1p(_rest(x, maximum, dim, True) + 0 * maximum)


def logsumexp(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """PyTorch's logsumexp with log1p: exact where the largest element is near 0 and dominates."""
    if not x.numel():
        return torch.log(x.exp().sum(dim, keepdim))
    maximum = x.amax(dim, keepdim=True)
    return x.amax(dim, keepdim=keepdim) + torch.log1p(_rest(x, maximum, dim, keepdim))


def is_largest(y: Tensor, dim: int) -> Tensor:
    """Return whether an element is the first of the largest ones of its row."""
    places = y.argmax(dim, keepdim=True)
    return torch.zeros(y.shape, dtype=torch.bool, device=y.device).scatter(dim, places, True)


def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The gradient of `log_softmax`, from its result y; of the largest element by expm1."""
    if not y.numel():
        return grad * y
    p, is_first = y.exp(), is_largest(y, dim)
    others = torch.where(is_first, 0.0, grad).sum(dim, keepdim=True)
    of_largest = -grad * torch.expm1(y) - p * others
    return torch.where(is_first, of_largest, grad - p * grad.sum(dim, keepdim=True))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def reduced(loss: Tensor, reduction: int) -> Tensor:
    """Reduce a loss; PyTorch numbers the reductions none (0), mean (1) and sum (2)."""
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """Binary cross entropy with logits, as a sum of two parts of the same sign.

    PyTorch's parts cancel: its loss is 0 for correct predictions far from 0.
    """
    positive = target if pos_weight is None else target * pos_weight
    loss = (1 - target) * softplus(x) + positive * softplus(-x)
    return reduced(loss if weight is None else loss * weight, reduction)


def soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """log1p(exp(-x target)), without the overflow of PyTorch's exp."""
    return reduced(softplus(-x * target), reduction)


def logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    """log2(2^x + 2^y), accurate where two equal powers sum to about 1.

    PyTorch takes log2 of numbers near 1 and 2 there.
    """
    larger, smaller = torch.maximum(x, y), torch.minimum(x, y)
    difference = torch.where(larger == smaller, 0.0, smaller - larger)  # 0 for equal infinities too
    log_2 = torch.log(x.new_full((), 2.0))
    near = (larger + 1) + torch.log1p(torch.expm1(difference * log_2) / 2) / log_2
    far = larger + torch.log1p(torch.exp2(difference)) / log_2
    return torch.where(difference > -0.5, near, far)


# --------------------------------------------------------------------- incomplete gamma function

_EULER = 0.5772156649015329
_LOG_GAMMA = [-_EULER, *((-1) ** k * _hurwitz(k, 1.0) / k for k in range(2, 52))]
"""Taylor's series of lgamma(1 + a) / a."""


def igammac(a: Tensor, x: Tensor) -> Tensor:
    """The upper incomplete gamma function.

    It is PyTorch's, except for small a and x. There PyTorch takes lgamma(1 + a) of a rounded sum.
    Here the result is 1 - igammac's complement, whose series starts with 1, so that 1 is left out
    of both.
    """
    is_small = (a > 0) & (a < 0.5) & (x > 0) & (x <= 1.1)  # up to where PyTorch leaves its series
    b, y = a.where(is_small, 0.25), x.where(is_small, 0.5)
    exponent = b * (torch.log(y) - _series(_LOG_GAMMA, b))
    term, total = torch.ones_like(y), torch.zeros_like(y)
    for n in range(1, 20):
        term = term * (-y / n)
        total = total + term / (b + n)
    near = -torch.expm1(exponent) - torch.exp(exponent) * b * total
    return torch.where(is_small, near, torch.special.gammaincc(a, x))
