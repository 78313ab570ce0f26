"""Products of 8-bit data: E4M3 forward, E5M2 for gradients, natively or in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mcftensor.scaling.exponents import half_log2, known
from mcftensor.scaling.scaled import ScaledTensor, is_scaled
from mcftensor.scaling.scaled_format import of_dtype
from mcftensor.scaling.scaled_numbers import Unrounded, by_size, count, number, stored

E4M3 = of_dtype(torch.float8_e4m3fn)
E5M2 = of_dtype(torch.float8_e5m2)


def fp8_product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y of two 8-bit scaled matrices as scaled float16.

    `torch._scaled_mm` computes the product where it can: on a CPU always; on a GPU if all sides are
    multiples of 16 and not both operands are E5M2. Otherwise the data is multiplied in float32,
    which holds every product of 8-bit floats exactly.

    Args:
        x: (m, k), in `scaled(torch.float8_e4m3fn)` or `scaled(torch.float8_e5m2)`.
        y: (k, n), in one of the same formats.

    Returns:
        (m, n): products of the data, summed in float32, divided by √k rounded down to a power of
        two, and rounded to float16.

    Raises:
        TypeError: an operand has another format.
        ValueError: an operand is no matrix, or sides do not match.

    *Error*: the error of the sum in float32 and of one rounding to float16; see `as_expansion` for
    the error of the 8-bit data.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> e4m3 = mcf.scaling.scaled(torch.float8_e4m3fn)
        >>> x = mcf.as_expansion(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), e4m3)
        >>> mcf.scaling.fp8_product(x, x)
        MCFTensor([[ 7., 10.],
                   [15., 22.]], format=scaled(float16), exponent=2)
    """
    a, b = _eight_bits(x), _eight_bits(y)
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[0]:
        raise ValueError(
            f"fp8_product: shapes {tuple(x.shape)} and {tuple(y.shape)}; give (m, k) and (k, n)"
        )
    own = a._component0, b._component0
    if _is_native(*own):
        count("fp8", "native")
        one = torch.ones((), device=x.device)
        columns = own[1].t().contiguous().t()  # as `torch._scaled_mm` needs it
        data = torch._scaled_mm(own[0].contiguous(), columns, one, one, out_dtype=torch.float32)
    else:
        count("fp8", "emulated")
        data = number(a).mantissa @ number(b).mantissa
    made = Unrounded(data, known(a.exponent) + known(b.exponent)).raised(half_log2(x.shape[1]))
    return stored(made, of_dtype(torch.float16))


def _eight_bits(x: Tensor) -> ScaledTensor:
    if not is_scaled(x) or x.format not in (E4M3, E5M2):
        given = x.format.name if is_scaled(x) else f"plain {x.dtype}"
        raise TypeError(
            f"fp8_product: an operand of shape {tuple(x.shape)} is {given}; convert it with "
            "mcf.as_expansion(x, mcf.scaling.scaled(torch.float8_e4m3fn))"
        )
    return x


def _is_native(x: Tensor, y: Tensor) -> bool:
    if 0 in (*x.shape, *y.shape) or type(x) is not Tensor:
        return False
    if x.device.type == "cpu":
        return True
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 9):
        return False
    return all(n % 16 == 0 for n in (*x.shape, *y.shape)) and {x.dtype, y.dtype} != {E5M2.dtype}


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, columns = by_size(x.reshape(-1, x.shape[-1]), E4M3), by_size(weight, E4M3)
        ctx.save_for_backward(rows, columns)
        ctx.shape = x.shape
        return fp8_product(rows, columns.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, columns = ctx.saved_tensors
        g = by_size(gradient.reshape(-1, gradient.shape[-1]), E5M2)
        needs_x, needs_weight = ctx.needs_input_grad
        dx = fp8_product(g, columns).view(ctx.shape) if needs_x else None
        return dx, fp8_product(g.t(), rows) if needs_weight else None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias by 8-bit products: x and weight as E4M3, the gradient as E5M2.

    The 8-bit data is saved for backward.

    Args:
        x: (..., k), scaled or plain.
        weight: (n, k).
        bias: (n,), added in float16 or in its format.

    Returns:
        (..., n) as scaled float16.

    *Error*: relative 2^-4 for each number of x and weight, 2^-3 for each of a gradient, unless the
    number is below 2^-14 or 2^-28 of the largest one.
    """
    made = _Fp8Linear.apply(x, weight)
    return made if bias is None else made + bias


class Fp8Linear(nn.Linear):
    """`nn.Linear` with 8-bit products; `scalify(model, products="fp8")` makes these."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, as `nn.Linear` does."""
        return fp8_linear(x, self.weight, self.bias)
