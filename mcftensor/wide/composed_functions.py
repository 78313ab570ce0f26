"""Functions that PyTorch composes with numbers of the dtype of one term, composed of all terms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mcftensor.dispatch.operands import expansions
from mcftensor.dispatch.system import WIDE
from mcftensor.dispatch.torch_functions import OF_TORCH_2_13
from mcftensor.tensor import MCFTensor
from mcftensor.wide import exact_constants as exact
from mcftensor.wide.elementary import constant_in, like, nearest_value


def _quantile(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose share is a value, since PyTorch rounds numbers to the dtype of x."""

    def of_values(x: Tensor, q: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, MCFTensor) and not isinstance(q, MCFTensor):
            q = nearest_value(q, x.format.nearest, x.device)
        return func(x, q, *args, **kwargs)

    return of_values


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return a norm by its parts; PyTorch rounds eps to the dtype of one term."""
    dims = list(range(-len(shape), 0))
    eps = torch.finfo(WIDE).eps if eps is None else eps
    scaled = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return attention by the operations that PyTorch's kernels fuse."""
    by_parts = torch.ops.aten._scaled_dot_product_attention_math
    if options.get("scale") is None and isinstance(query, MCFTensor):
        share = Fraction(1, query.shape[-1])
        query = query * like(query, lambda bits: exact.sqrt(share, bits))
        options = {"scale": 1.0}
    made: Tensor = by_parts(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
    return made


_OF_HEADS = inspect.signature(F.multi_head_attention_forward)


def _attention_of_heads(*given: Any, **options: Any) -> Any:
    """Return attention of heads. Weights of queries are multiplied by what PyTorch's float64 root
    of 1 / features lacks."""
    bound = _OF_HEADS.bind(*given, **options)
    bound.apply_defaults()
    call = bound.arguments
    format = expansions([*call.values()])[0]._format
    count, device = call["embed_dim_to_check"], call["query"].device
    features = count // call["num_heads"]
    used = Fraction(math.sqrt(1 / features))

    def lacking(bits: int) -> Fraction:
        return exact.sqrt(Fraction(1, features), bits) / used

    factor = constant_in(format, lacking, device).expand(count)
    factors = torch.cat([factor, torch.ones_like(factor), torch.ones_like(factor)])
    if call["use_separate_proj_weight"]:
        call["q_proj_weight"] = call["q_proj_weight"] * factor.unsqueeze(1)
    else:
        call["in_proj_weight"] = call["in_proj_weight"] * factors.unsqueeze(1)
    if call["in_proj_bias"] is not None:
        call["in_proj_bias"] = call["in_proj_bias"] * factors
    made, weights = F.multi_head_attention_forward(**call | {"need_weights": True})
    return made, weights if call["need_weights"] else None


def _linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
    """Return losses without chunks, which PyTorch's own operator has alone."""
    made: Tensor = F.linear_cross_entropy(*args, **kwargs)
    return made


COMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {
    **{
        getattr(kind, name): _quantile(getattr(kind, name))
        for kind in (torch, Tensor)
        for name in ("quantile", "nanquantile")
    },
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _attention_of_heads,
    **dict.fromkeys(OF_TORCH_2_13, _linear_cross_entropy),
}
"""Replacements of functions that PyTorch composes with numbers of the dtype of one term."""
