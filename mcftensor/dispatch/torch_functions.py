"""Functions that are handled before PyTorch decomposes them or sends them to dispatch.

For values, some functions reject 16-bit dtypes, some convert to float32 by themselves, and some
magnify the rounding of one part in the next.

For parameters, the functions of models use leading terms. Without autograd, a compiler or a tracer
they call PyTorch's own code with the leading terms directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from mcftensor.arithmetic import special_functions
from mcftensor.arithmetic.base_types import NARROW
from mcftensor.dispatch import derivatives
from mcftensor.dispatch.default_handler import explained, unlike_dtypes
from mcftensor.dispatch.operands import (
    common_format,
    expansions,
    is_float,
    leaves,
    mapped,
    plainly,
    refusal,
    value_of,
    with_leading,
)
from mcftensor.dispatch.registry import SHORTCUTS
from mcftensor.dispatch.rounded_arguments import first_if_rounded, has_rests
from mcftensor.dispatch.storage_formats import decoded, say_what_is_rounded
from mcftensor.dispatch.store import assign_tree, require_no_grad
from mcftensor.dispatch.system import PRECISION_OF_FLOAT32, WIDE, serves
from mcftensor.formats import PLAIN, Format, PlainFormat, named
from mcftensor.kernels.columns import is_bare, is_wrapped
from mcftensor.kernels.without_float64 import widest
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.step_context import current_step, outside
from mcftensor.wings import wing, wing_or_none

# ----------------------------------------------------------------------------------- of values

_METHODS = (
    *("quantile", "nanquantile", "nanmean", "logdet", "slogdet", "norm"),
    "isclose",  # its decomposition would draw random numbers
    "det",  # its gradient wants float32 or float64
)

_ISCLOSE = (torch.isclose, Tensor.isclose)
_COVARIANCES = (torch.cov, Tensor.cov, torch.corrcoef, Tensor.corrcoef)

# PyTorch's own functions cancel, and dispatch sees only their parts.
_SHARPER = {torch.special.ndtr: special_functions.ndtr, F.tanhshrink: special_functions.tanhshrink}

OF_TORCH_2_13 = [*filter(None, [getattr(F, "linear_cross_entropy", None)])]

_OF_MACHINE_TYPES: set[Callable[..., Any]] = {
    *(torch.stft, Tensor.stft, torch.istft, Tensor.istft),
    *(F.fractional_max_pool2d, F.fractional_max_pool3d),
    # torch.fft.rfft, torch.fft.ihfft2
    *(getattr(torch.fft, name) for name in dir(torch.fft) if re.fullmatch("i?[rh]?fft[2n]?", name)),
}
"""Functions without an algorithm for terms."""

_OF_NUMBERS: set[Callable[..., Any]] = {
    *(getattr(kind, name) for kind in (torch, Tensor) for name in ("cummax", "cummin")),
    *(getattr(kind, name) for kind in (torch, Tensor, F) for name in ("softmax", "log_softmax")),
    F.cross_entropy,
}
"""Functions whose gradients PyTorch makes of the result and of the input's dtype, which is narrower
for storage formats."""

_OF_OPERATORS: set[Callable[..., Any]] = {
    *(torch.lerp, Tensor.lerp, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d),
    *(getattr(x, name) for x in (torch, Tensor) for name in ("var", "std")),
    *(torch.var_mean, torch.std_mean),
    *(F.cross_entropy, F.gaussian_nll_loss, F.poisson_nll_loss),
}
"""Functions that PyTorch composes of operators, which serve 16-bit terms as they are."""

_OF_WIDE: set[Callable[..., Any]] = {
    *_OF_OPERATORS,
    *(torch.pow, Tensor.pow, Tensor.__pow__, Tensor.__rpow__),
    *(F.gelu, torch.logaddexp2, Tensor.logaddexp2),
    *(
        function
        for name in (
            *("exp2", "log2", "log10", "erf", "erfc", "ndtr"),
            *("erfinv", "sinc", "tanhshrink", "deg2rad", "rad2deg"),
        )
        for function in derivatives.functions(name)
    ),
}
"""Functions that PyTorch, or its derivative, forms with float64 constants. The wing `wide` replaces
them in formats of more than 48 bits, and without float64."""

WHOLE: set[Callable[..., Any]] = {
    # torch.quantile, x.quantile
    *(getattr(torch, name) for name in _METHODS),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *_OF_MACHINE_TYPES,
    # called by these names
    torch.complex,
    torch.linalg.det,
    torch.linalg.multi_dot,  # this and the next two take operands of one dtype alone
    torch.linalg.vecdot,
    *(torch.inner, torch.Tensor.inner, torch.tensordot),
    torch.linalg.matrix_norm,
    torch.linalg.matrix_rank,
    torch.linalg.norm,
    torch.linalg.vander,
    torch.rms_norm,
    torch.view_as_complex,
    *_SHARPER,
    *derivatives.OWN,
    *_OF_WIDE,
    *_OF_NUMBERS,
    *_COVARIANCES,
    torch.cdist,
    # the modules of nn that have these names
    F.multi_head_attention_forward,
    F.rms_norm,
    F.scaled_dot_product_attention,  # transformers
    *OF_TORCH_2_13,
}  # fmt: skip


_IF_NECESSARY = "use_mm_for_euclid_dist_if_necessary"  # more than 25 rows


class _Converted(torch.autograd.Function):
    """A tensor in another format, plain or not; its gradient is in the format of the tensor."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, source: str, target: str
    ) -> tuple[Tensor, Any]:
        return _Converted.apply(x, source, target), in_dims[0]

    @staticmethod
    def forward(x: Tensor, source: str, target: str) -> Tensor:
        return _in_format(x, target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.source, ctx.target = inputs

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        made: Tensor = _Converted.apply(tangent, ctx.source, ctx.target)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if is_wrapped(grad) or (torch.is_grad_enabled() and grad.requires_grad):
            return _Converted.apply(grad, ctx.target, ctx.source), None, None
        return _in_format(grad, ctx.source), None, None


def _in_format(x: Tensor, name: str) -> Tensor:
    format = named(name)
    return plainly(x, format.dtype) if isinstance(format, PlainFormat) else value_of(x, format)


def converted(x: Tensor, source: Format, target: Format) -> Tensor:
    """Return a tensor in another format, plain or not; gradients pass through with all terms."""
    made: Tensor = _Converted.apply(x, source.name, target.name)
    return made


def evaluate_whole(func: Callable[..., Any], *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """Run a function of values in float64, and split its results, or round them into `out`.

    Beyond 48 bits, and without float64, call the function itself, whose operators are dispatched
    one by one. PyTorch composes some of 16-bit tensors with conversions to float32, so that formats
    of such terms are evaluated in float32 terms.

    Raises:
        NotImplementedError: a result is complex.
    """
    found = expansions((args, kwargs, out))
    name = getattr(func, "__name__", str(func))
    format = common_format(name, found)
    if func is torch.cdist:
        return _cdist(*args, **kwargs)
    if func in _COVARIANCES and widest(found[0].device) == WIDE:
        x = args[0] if args else kwargs.pop("input")
        return func(_below_first(x), *args[1:], **kwargs)
    if func in _ISCLOSE and has_rests((args, kwargs)):
        return wing("wide").in_longer_format(func, args, kwargs)
    has_own = func in derivatives.OWN or func in _OF_WIDE
    is_stored = format.arithmetic == "numbers"
    is_composed = func in _OF_OPERATORS and (format.dtype in NARROW or is_stored)
    if func in _OF_NUMBERS:
        is_composed = not is_stored and (not has_own or is_composed)
    if is_composed:
        return func(*args, **kwargs, **({} if out is None else {"out": out}))
    is_long = not serves(format, found[0].device)
    own = derivatives.OWN.get(func)
    if func in _OF_WIDE and is_long and format.dtype not in NARROW and wing_or_none("wide"):
        own = wing("wide").OWN[func]  # without the wing, operators raise, but for those of steps
    if own is not None and format.arithmetic == "terms":
        result = own(format, *args, **kwargs)
        return result if out is None else _assigned(name, out, result, found, (args, kwargs))
    is_plain = has_own and func not in _SHARPER and not (is_stored and func in _OF_NUMBERS)
    if is_plain and not (is_long and format.dtype in NARROW):
        return func(*args, **kwargs, **({} if out is None else {"out": out}))
    if is_stored:
        if out is not None:
            say_what_is_rounded(func, leaves(out), found)
        if kwargs.get("dtype") == format.dtype:
            kwargs = {name: x for name, x in kwargs.items() if name != "dtype"}
        (args, kwargs), _ = decoded(mapped(partial(_in_numbers, format), (args, kwargs)))
        return func(*args, **kwargs, **({} if out is None else {"out": out}))
    wide: Format = PLAIN[WIDE]
    if is_long:
        func = wing("wide").COMPOSED.get(func, func)
        if format.dtype not in NARROW:
            return func(*args, **kwargs, **({} if out is None else {"out": out}))
        wide = Format(torch.float32, max(2, -(-format.precision // 24)))
        if func in _OF_MACHINE_TYPES and format.precision <= PRECISION_OF_FLOAT32:
            wide = PLAIN[torch.float32]

    def widen(x: Any) -> Any:
        if isinstance(x, MCFTensor):
            return converted(x, x.format, wide)
        if is_float(x):
            return x.to(wide.dtype)
        return wide.dtype if x == format.dtype and isinstance(x, torch.dtype) else x

    def narrow(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_complex():
            raise refusal(name, found, "its result is complex")
        if isinstance(x, Tensor) and x.dtype == wide.dtype:
            return converted(x, wide, format)
        return x

    sharper = _SHARPER.get(func, func)
    result = sharper(*mapped(widen, args), **mapped(widen, kwargs))
    if out is None:
        return tree_map(narrow, result)
    return _assigned(name, out, result, found, (args, kwargs))


def _in_numbers(format: Format, x: Any) -> Any:
    """Return the decoded numbers of a stored tensor whose gradient flows through them, and their
    dtype for the dtype of the format."""
    if isinstance(x, torch.dtype):
        return format.result.dtype if x == format.dtype else x
    if not isinstance(x, MCFTensor) or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return converted(x, x.format, x.format.result)


def _assigned(name: str, out: Any, result: Any, found: list[MCFTensor], operands: Any) -> Any:
    """Write a result to `out`, through which no gradient flows."""
    require_no_grad(name, (operands, out))
    return assign_tree(name, out, result, found)


def _cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: str = _IF_NECESSARY) -> Tensor:
    """Return distances by differences; PyTorch's products of matrices would cancel."""
    mode = "donot_use_mm_for_euclid_dist" if compute_mode == _IF_NECESSARY else compute_mode
    return torch.cdist(x, y, p, mode)


def _below_first(x: Tensor) -> Tensor:
    """Return the differences of observations from the first one, if float64 rounds some numbers.

    Covariances are those of the differences. They and their means are exact.
    """
    if not isinstance(x, MCFTensor) or not x.dim() or not has_rests(x):
        return x
    return x - MCFTensor.of(first_if_rounded(list(x._read()), x._format.name), x._format)


# ------------------------------------------------------------------------------- of parameters

# PyTorch checks the dtypes of these functions before dispatch.
_OF_ONE_DTYPE = (
    *(F.bilinear, F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
)

# Functions that change none of their arguments. Embeddings may change theirs, and are not here.
FUNCTIONS: set[Callable[..., Any]] = {
    # nn.Linear, nn.LayerNorm, and the other modules of these names
    *(F.linear, F.layer_norm, F.group_norm, F.rms_norm, F.prelu),
    *_OF_ONE_DTYPE,
    # x @ weight, torch.matmul, x.mm
    *(torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm, torch.mv),
    *(Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm, Tensor.matmul, Tensor.mm, Tensor.mv),
}


def at_once(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function of parameters and plain tensors on leading terms.

    Return NotImplemented for other operands, and unless only eager PyTorch runs.
    """
    if (
        "out" in kwargs
        or torch.is_grad_enabled()
        or not is_bare()
        or forward_ad._current_level >= 0  # tangents are carried on
        or torch._C._get_tracing_state() is not None
        or torch._C._is_any_autocast_enabled()  # casts of parameters are kept
    ):
        return NotImplemented
    plain = with_leading((*args, *kwargs.values()))
    if plain is None:
        return NotImplemented
    count = len(args)
    named = dict(zip(kwargs, plain[count:], strict=True))
    try:
        return func(*plain[:count], **named)
    except RuntimeError as error:
        raise explained(error, args, kwargs) from error


def _in_one_dtype(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `at_once`; raise a helpful error for operands of unlike dtypes."""
    result = at_once(func, args, kwargs)
    if result is NotImplemented and not torch._C._is_any_autocast_enabled():
        found = expansions((args, kwargs))
        if all(x.acts_as == "parameter" for x in found):
            error = unlike_dtypes(f"{func.__name__}: input and weight are of unlike dtypes", args)
            if error is not None:
                raise error
    return result


SHORTCUTS.update(dict.fromkeys(FUNCTIONS, at_once))
SHORTCUTS.update(dict.fromkeys(_OF_ONE_DTYPE, _in_one_dtype))

# ----------------------------------------------------------------------------------- of both


def _differentiated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward pass that a step calls outside of the step.

    Its formulas use the leading terms of parameters, as in a forward pass.
    """
    if current_step() is None:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return outside(lambda: func(*args, **kwargs))


SHORTCUTS[torch.autograd.grad] = _differentiated  # AdaHessian, Sophia
