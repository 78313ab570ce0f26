"""PyTorch's own operations in float64, with errors that 48 bits allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.arithmetic import special_functions
from mcftensor.dispatch.write_results import written_to

aten = torch.ops.aten

WIDE = torch.float64

# Functions that PyTorch evaluates in float64 with larger errors than 48 bits allow.
_SHARPER: dict[Any, Callable[..., Tensor]] = {
    aten.binary_cross_entropy_with_logits: special_functions.binary_cross_entropy_with_logits,
    aten.digamma: special_functions.digamma,
    aten.gelu: special_functions.gelu,
    aten.gelu_backward: special_functions.gelu_backward,
    aten.hardsigmoid_backward: special_functions.hardsigmoid_backward,
    aten.igammac: special_functions.igammac,
    aten.igammac_: special_functions.igammac,
    aten._log_softmax: special_functions.log_softmax,
    aten._log_softmax_backward_data: special_functions.log_softmax_backward,
    aten.logaddexp2: special_functions.logaddexp2,
    aten.logit: special_functions.logit,
    aten.logsumexp: special_functions.logsumexp,
    aten.polygamma: special_functions.polygamma,
    aten.polygamma_: lambda x, n: special_functions.polygamma(n, x),
    aten.sinc: special_functions.sinc,
    aten.soft_margin_loss: special_functions.soft_margin_loss,
    aten.special_log_ndtr: special_functions.log_ndtr,
    aten.special_zeta: special_functions.zeta,
}


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
