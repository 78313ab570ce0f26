"""The numbers in which a call computes, chosen once: by the format of its result and the device.

`kernels/without_float64.py` says what a device has. For calls, this module alone decides by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mcftensor.arithmetic import special_functions
from mcftensor.dispatch.schemas import written_to
from mcftensor.formats import Format
from mcftensor.kernels.without_float64 import widest
from mcftensor.tensor import GradientTensor, MCFTensor

aten = torch.ops.aten

WIDE = torch.float64

PRECISION = 48
"""Bits of the longest format that float64 serves; its five other bits cover evaluation errors."""

PRECISION_OF_FLOAT32 = 19
"""The same for float32, where float64 is not available."""

System = Literal["stored", "float64", "terms", "float32 terms"]


def system_of(format: Format, device: torch.device) -> System:
    """Return the numbers in which a call computes whose results are in a format.

    "stored": those that the format stores. "float64": one evaluation, rounded once. "terms": of the
    base, for formats of more than 48 bits. "float32 terms": where float64 is missing.
    """
    if format.arithmetic == "numbers":
        return "stored"
    if format.precision > PRECISION:
        return "terms"
    return "float64" if widest(device) == WIDE else "float32 terms"


def serves(format: Format, device: torch.device) -> bool:
    """Return whether float64 is there, and one evaluation has all bits that a format promises."""
    return format.precision <= PRECISION and widest(device) == WIDE


def holds_all(x: MCFTensor) -> bool:
    """Return whether float64 is there, and holds every number of an expansion's format."""
    return not x._format.exceeds_float64 and widest(x.device) == WIDE


def may_round(x: MCFTensor) -> bool:
    """Return whether float64 is there, and may round elements of an expansion."""
    is_kept = not x._format.exceeds_float64 or isinstance(x, GradientTensor)
    return not is_kept and widest(x.device) == WIDE


SHARPER: dict[Any, Callable[..., Tensor]] = {
    aten.binary_cross_entropy_with_logits: special_functions.binary_cross_entropy_with_logits,
    aten.hardsigmoid_backward: special_functions.hardsigmoid_backward,
    aten._log_softmax: special_functions.log_softmax,
    aten._log_softmax_backward_data: special_functions.log_softmax_backward,
    aten.logaddexp2: special_functions.logaddexp2,
    aten.logit: special_functions.logit,
    aten.logsumexp: special_functions.logsumexp,
    aten.sinc: special_functions.sinc,
}
"""Functions that PyTorch evaluates with larger errors than 48 bits allow, as compositions for
float64 and for longer formats."""

_SHARPER: dict[Any, Callable[..., Tensor]] = {
    **SHARPER,
    aten.digamma: special_functions.digamma,
    aten.gelu: special_functions.gelu,
    aten.gelu_backward: special_functions.gelu_backward,
    aten.igammac: special_functions.igammac,
    aten.igammac_: special_functions.igammac,
    aten.polygamma: special_functions.polygamma,
    aten.polygamma_: lambda x, n: special_functions.polygamma(n, x),
    aten.soft_margin_loss: special_functions.soft_margin_loss,
    aten.special_log_ndtr: special_functions.log_ndtr,
    aten.special_zeta: special_functions.zeta,
}
"""The same, and such functions for float64 alone."""


def evaluated(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype = WIDE
) -> Any:
    """Run an operation on tensors of a dtype; in float64, with errors that 48 bits allow."""
    sharper = _SHARPER.get(func.overloadpacket)
    if sharper is None or dtype != WIDE:
        return func(*args, **kwargs)
    targets = written_to(func, tuple(args), kwargs)
    options = {name: x for name, x in kwargs.items() if not any(x is y for y in targets)}
    result = sharper(*args, **options)
    return targets[0].resize_(result.shape).copy_(result) if targets else result
