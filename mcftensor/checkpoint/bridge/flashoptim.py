"""flashoptim: narrow weights, a correction of 8 or 16 bits as a state, and quantized moments.

Layout: torch.optim's state dict. `error_bits` are integers e, of which 127 or 32767 are half an ulp
of the weight; PyTorch casts states to the dtype of the weight, so 8 bits are saved as numbers of
that dtype and 16 as its bit patterns, and `master_bytewidth` of the group says which. Moments are
plain, or, with `compress_state_dict`, codes and a float16 scale for every 32 of them:
`exp_avg::quantized` and `exp_avg::scales`, the scales as bit patterns of bfloat16 where the weight
is one. Read: flashoptim 0.1.3 and 0.1.4.

Everything becomes the float32 that flashoptim computes with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.bridge.chunked import CHUNK_SIZE, in_chunks
from mcftensor.checkpoint.bridge.entries import Entry, Group
from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.formats import PLAIN

KEY = "error_bits"

_CODES, _SCALES = "::quantized", "::scales"
_BLOCK = 32
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}


def master(weight: Entry, state: dict[str, Any], group: Group) -> tuple[Entry, dict[str, Any]]:
    """The corrected weight, and the other states, of which the moments are plain."""
    states = moments(weight, state)
    errors = states.pop(KEY, None)
    if not isinstance(errors, Entry):
        return weight, states
    dtype, bits = weight.format.dtype, _bits(errors, group)
    if dtype not in _MANTISSA or errors.shape != weight.shape or bits is None:
        raise CheckpointError(
            f"{KEY} of {weight.name} are of {errors.format.name} and shape {tuple(errors.shape)}, "
            f"and the weight of {weight.format.name} and shape {tuple(weight.shape)}, with "
            f"master_bytewidth {group.get('master_bytewidth')!r}; they belong to another parameter"
        )

    def read() -> Tensor:
        def together(x: Tensor, e: Tensor) -> list[Tensor]:
            if e.is_floating_point():
                e = e.view(torch.int16) if bits == 16 else e.to(torch.int8)
            return [corrected(x, e)]

        return in_chunks(together, [weight.read(), errors.read()], [torch.float32])[0]

    return Entry(weight.name, PLAIN[torch.float32], weight.shape, read), states


def _bits(errors: Entry, group: Group) -> int | None:
    own = {torch.int8: 8, torch.int16: 16}
    if errors.format.dtype in _MANTISSA:
        return {3: 8, 4: 16}.get(group.get("master_bytewidth", 0))
    return own.get(errors.format.dtype)


def corrected(x: Tensor, errors: Tensor) -> Tensor:
    """Weights and what is to be added to them, in units of half an ulp, in float32."""
    mantissa = _MANTISSA[x.dtype]
    bias = 127 if x.dtype == torch.bfloat16 else 15
    exponent = (x.abs().view(torch.int16).to(torch.int32) >> mantissa).clamp(min=1) - bias
    unit = exponent - mantissa - 1  # below float32's range near zero, so it goes in two factors
    half = unit >> 1
    share = errors.to(torch.float32) / torch.iinfo(errors.dtype).max
    return x.to(torch.float32) + share * torch.exp2(half) * torch.exp2(unit - half)


def moments(weight: Entry, state: dict[str, Any]) -> dict[str, Any]:
    """States of which those in codes are float32."""
    states = {}
    for key, x in state.items():
        name = key.removesuffix(_CODES)
        if key.endswith(_SCALES):
            continue
        if name == key:
            states[key] = x
            continue
        scales = state.get(name + _SCALES)
        blocks = -(-x.shape.numel() // _BLOCK)
        if not isinstance(scales, Entry) or scales.shape.numel() != blocks:
            raise CheckpointError(
                f"{key} of {weight.name} lacks its {blocks} scales, {name}::scales"
            )
        states[name] = _moment(f"{weight.name}, {name}", x, scales, is_square=name == "exp_avg_sq")
    return states


def _moment(name: str, codes: Entry, scales: Entry, is_square: bool) -> Entry:
    def read() -> Tensor:
        factors = scales.read().reshape(-1)
        if factors.dtype == torch.bfloat16:
            factors = factors.view(torch.float16)
        its_factors = iter(factors.split(CHUNK_SIZE // _BLOCK))

        def decoded(x: Tensor) -> list[Tensor]:
            # What codes were cast to holds them exactly.
            x = x.to(torch.float32) / (255 if is_square else 127)
            if not is_square:
                x = x / (2 - x.abs())
            x = x * next(its_factors).float().repeat_interleave(_BLOCK)[: x.numel()]
            return [x.square() if is_square else x]

        return in_chunks(decoded, [codes.read()], [torch.float32])[0]

    return Entry(name, PLAIN[torch.float32], codes.shape, read)
