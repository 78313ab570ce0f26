"""Rules of softmax, likelihood losses and attention: in float32, and balanced in backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mcftensor.scaling.exponents import is_free, times_power
from mcftensor.scaling.rule_table import aten, plain_operand, rule
from mcftensor.scaling.scaled_numbers import Unrounded, number


def _chances(chances: Tensor, n: int, dtype: torch.dtype | None) -> Unrounded:
    """Return probabilities of n outcomes as numbers with mean 1, up to n = 2^14, for float16."""
    whole = min(max(1, n).bit_length() - 1, 14)
    return Unrounded(times_power(chances, whole), -whole, "by rule", dtype)


@rule(aten._softmax)
def _softmax(x: Any, dim: int, to_float: bool) -> Unrounded:
    """Return softmax, such as of attention in single steps."""
    dtype = torch.float32 if to_float else None
    return _chances(number(x).plain().softmax(dim), x.shape[dim] if x.dim() else 1, dtype)


@rule(aten._safe_softmax)
def _safe_softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> Unrounded:
    """Return softmax of masked attention: fully masked rows are zero."""
    return _chances(torch.nan_to_num(number(x).plain().softmax(dim), 0.0), x.shape[dim], dtype)


@rule(aten._softmax_backward_data)
def _softmax_backward(gradient: Any, result: Any, dim: int, dtype: torch.dtype) -> Unrounded:
    g, chances = number(gradient), number(result)
    inner = (g.mantissa * chances.plain()).sum(dim, keepdim=True)
    made = chances.mantissa * (g.mantissa - inner)
    return Unrounded(made, g.exponent + chances.exponent, "by size", dtype)


@rule(aten._log_softmax)
def _log_softmax(x: Any, dim: int, to_float: bool) -> Unrounded:
    dtype = torch.float32 if to_float else None
    return Unrounded(number(x).plain().log_softmax(dim), 0, "to fit", dtype)


@rule(aten._log_softmax_backward_data)
def _log_softmax_backward(gradient: Any, result: Any, dim: int, dtype: torch.dtype) -> Unrounded:
    g = number(gradient)
    made = aten._log_softmax_backward_data(g.mantissa, number(result).plain(), dim, torch.float32)
    return Unrounded(made, g.exponent, "by size", dtype)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, takes_operator=True)
def _loss(func: Any, *args: Any) -> tuple[Unrounded, Tensor]:
    made, total = func(*map(plain_operand, args))
    return Unrounded(made, 0, "to fit" if made.dim() else "by size"), total


# --------------------------------------------------------------------------------------- attention

_MATH, _FLASH = 0, 1


@rule(aten._fused_sdp_choice)
def _way_of_attention(q: Any, k: Any, v: Any, *how: Any, **also: Any) -> int:
    """Choose attention as one operator on a CPU, else as steps with rules."""
    dropout = how[1] if len(how) > 1 else also.get("dropout_p", 0.0)
    fits = q.dim() == 4 and k.shape[1] == q.shape[1] and v.shape[-1] == q.shape[-1]
    return _FLASH if q.device.type == "cpu" and dropout == 0 and fits else _MATH


@rule(aten._scaled_dot_product_flash_attention_for_cpu)
def _attention(
    q: Any, k: Any, v: Any, *how: Any, attn_mask: Any = None, **also: Any
) -> tuple[Unrounded, Tensor]:
    """Return means of values at the scale of the values; softmax and scores are in float32."""
    values, mask = number(v), None if attn_mask is None else number(attn_mask).plain()
    scored = number(q).plain(), number(k).plain()
    made, sums = aten._scaled_dot_product_flash_attention_for_cpu(
        *scored, values.mantissa, *how, attn_mask=mask, **also
    )
    return Unrounded(made, values.exponent), sums


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward(
    gradient: Any, q: Any, k: Any, v: Any, *how: Any, attn_mask: Any = None, scale: Any = None
) -> tuple[Unrounded, Unrounded, Unrounded]:
    """Compute in units of the gradient's and the values' data, since the result is linear in both.

    Gradients of values are means of gradients. Gradients of queries and keys can have any size.
    """
    made, sums, dropout, is_causal = how
    g, values = number(gradient), number(v)
    mask = None if attn_mask is None else number(attn_mask).plain()
    parts = g.mantissa, number(q).plain(), number(k).plain(), values.mantissa
    if is_free(sums) and sums.abs().amax() > _EXACT_SCORES:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        dq, dk, dv = _attention_backward_in_steps(*parts, mask, is_causal, scale)
    else:
        own = number(made).at(values.exponent), sums, dropout, is_causal
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts, *own, attn_mask=mask, scale=scale
        )
    s = g.exponent + values.exponent
    return (
        Unrounded(dq, s, "by size"),
        Unrounded(dk, s, "by size"),
        Unrounded(dv, g.exponent),
    )


_EXACT_SCORES = 2.0**10
"""The largest scores for the kernel. It recomputes scores in another order, and takes their
exponentials: for larger scores float32 is too coarse for that."""


def _attention_backward_in_steps(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values; probabilities sum to one to the last bits."""
    scores = q @ k.mT * scale
    if is_causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.where(past, -math.inf)
    if mask is not None:
        scores = scores + mask
    chances = torch.nan_to_num(scores.softmax(-1), 0.0)
    slope = g @ v.mT
    slope = chances * (slope - (slope * chances).sum(-1, keepdim=True)) * scale
    return slope @ k, slope.mT @ q, chances.mT @ g
