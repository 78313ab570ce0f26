"""Weights that a state of an optimizer completes: how each program stores the two.

All are state dicts as in torch.optim, with one more state:

- *Transformer Engine*'s FusedAdam: `master_param`, float32, or with `store_param_remainders` int16,
  the difference of the bits of float32 and bfloat16. The split is the same as in `bf16i16`.
  Steps are counted by the group. Read: Transformer Engine 2.20 (apex has the same split).
- *flashoptim*: `error_bits`, integers e; 127 or 32767 are half an ulp of the weight.
  PyTorch casts states to the dtype of the weight, so 8 bits are saved as numbers of that dtype, 16
  as its bit patterns, and `master_bytewidth` of the group says which. Moments are plain, or, with
  `compress_state_dict`, codes and a float16 scale for every 32 of them: `exp_avg::quantized` and
  `exp_avg::scales`, the scales as bit patterns of bfloat16 where the weight is one. Everything
  becomes the float32 that flashoptim computes with. Read: flashoptim 0.1.3 and 0.1.4.
- *optimi*: `kahan_comp`, the compensation of Kahan's sum, of the weight's dtype and shape; None, or
  one byte, of parameters that are float32. The sum of the two is the number, so they are an
  expansion of two terms. The moments, unlike in torch.optim, are corrected for bias already, and
  are read unchanged. Read: torch-optimi 0.3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcftensor.checkpoint.checkpoint_error import CheckpointError
from mcftensor.checkpoint.entries import Contents, Entry, Group
from mcftensor.formats import PLAIN, Format
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import normalized

States = dict[str, Any]


CHUNK_SIZE = 1 << 16
"""Elements that are worked on at once, so that beside operands and results little is held."""


def in_chunks(
    function: Callable[..., Sequence[Tensor]],
    operands: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """Return the results, of given dtypes, of an elementwise function on tensors of one shape."""
    results = [torch.empty(operands[0].shape, dtype=dtype, device="cpu") for dtype in dtypes]
    places = [result.view(-1).split(CHUNK_SIZE) for result in results]
    blocks = zip(*(x.reshape(-1).split(CHUNK_SIZE) for x in operands), strict=True)
    for i, block in enumerate(blocks):
        for place, part in zip(places, function(*block), strict=True):
            place[i].copy_(part)
    return results


def complete(contents: Contents, parameters: list[str] | None) -> None:
    """Put whole weights in the place of narrow ones, and take what completed them from the states.

    States then go by the names of their parameters.
    """
    completing = {
        i: _MASTERS[key] for i, state in contents.states.items() for key in _MASTERS if key in state
    }
    if not completing:
        return
    names = _names(contents, parameters)
    groups = contents.group_of()
    states = {}
    for i, state in contents.states.items():
        if i not in names:
            raise CheckpointError(f"the states of parameter {i} are in no group of the optimizer")
        name = names[i]
        if name not in contents.weights:
            raise CheckpointError(f"{name} has states and no weight; its name is another there")
        states[name] = state
        if i in completing:
            states[name] = own = dict(state)
            contents.weights[name] = completing[i](contents.weights[name], own, groups[i])
    contents.states = states
    for group in contents.groups or []:
        group["params"] = [names[i] for i in group["params"]]


def _names(contents: Contents, parameters: list[str] | None) -> dict[Any, str]:
    """Return the names of the parameters that an optimizer numbers."""
    numbers = contents.parameters()
    if all(isinstance(i, str) for i in numbers):
        return {i: i for i in numbers}
    groups = contents.groups or []
    parameters = parameters or contents.names()
    if parameters is None and len(groups) == 1:
        parameters = [e.name for e in contents.weights.values() if e.format.dtype.is_floating_point]
    if parameters is None or len(parameters) != len(numbers):
        raise CheckpointError(
            f"the optimizer numbers its {len(numbers)} parameters, in {len(groups)} groups, and "
            f"which of the {len(contents.weights)} weights these are is not said; give parameters, "
            "their names in the order in which the optimizer got them, as of "
            "model.named_parameters()"
        )
    return dict(zip(numbers, parameters, strict=True))


def _require(fits: bool, weight: Entry, part: Entry, what: str, told: str = "") -> None:
    if not fits or part.shape != weight.shape:
        raise CheckpointError(
            f"{what} of {weight.name} is of {part.format.name} and shape {tuple(part.shape)}, and "
            f"the weight of {weight.format.name} and shape {tuple(weight.shape)}{told}; it belongs "
            "to another parameter"
        )


# --------------------------------------------------------------------------- Transformer Engine


def _of_transformer_engine(weight: Entry, state: States, group: Group) -> Entry:
    if "step" in group:
        state.setdefault("step", float(group["step"]))
    return with_master(weight, state.pop("master_param"))


def with_master(weight: Entry, part: Entry) -> Entry:
    """Return a float32 weight, from its rounding and either itself or the bits that the rounding
    lacks.
    """
    is_remainder = part.format == PLAIN[torch.int16] and weight.format == PLAIN[torch.bfloat16]
    fits = is_remainder or part.format == PLAIN[torch.float32]
    _require(fits, weight, part, "the master weight")

    def read() -> Tensor:
        if is_remainder:
            return in_chunks(_joined, [weight.read(), part.read()], [torch.float32])[0]
        x = part.read()
        _require_rounding(weight, x)
        return x

    return Entry(weight.name, PLAIN[torch.float32], weight.shape, read)


def _joined(leading: Tensor, tail: Tensor) -> list[Tensor]:
    bits = (leading.view(torch.int16).to(torch.int32) << 16) + tail
    return [bits.view(torch.float32)]


def _require_rounding(weight: Entry, x: Tensor) -> None:
    """Require that a weight is the rounding of its master, of the same parameter and step."""
    differ = 0
    blocks = (y.reshape(-1).split(CHUNK_SIZE) for y in (x, weight.read()))
    for master, found in zip(*blocks, strict=True):
        rounded = master.to(weight.format.dtype)
        differ += int(((rounded != found) & ~(rounded.isnan() & found.isnan())).sum())
    if differ:
        raise CheckpointError(
            f"{differ} of {x.numel()} elements of {weight.name} are not their master weights "
            f"rounded to {weight.format.name}: these are of another parameter, or of another step"
        )


# ----------------------------------------------------------------------------------- flashoptim

_CODES, _SCALES = "::quantized", "::scales"
_BLOCK = 32
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}


def _of_flashoptim(weight: Entry, state: States, group: Group) -> Entry:
    """Return the corrected weight; moments become plain."""
    for key in [key for key in state if key.endswith(_CODES)]:
        name = key.removesuffix(_CODES)
        codes, scales = state.pop(key), state.get(name + _SCALES)
        blocks = -(-codes.shape.numel() // _BLOCK)
        if not isinstance(scales, Entry) or scales.shape.numel() != blocks:
            raise CheckpointError(
                f"{key} of {weight.name} lacks its {blocks} scales, {name}::scales"
            )
        state[name] = _moment(f"{weight.name}, {name}", codes, scales, name == "exp_avg_sq")
    for key in [key for key in state if key.endswith(_SCALES)]:
        del state[key]
    errors = state.pop("error_bits", None)
    if not isinstance(errors, Entry):
        return weight
    width = group.get("master_bytewidth", 0)
    bits = {torch.int8: 8, torch.int16: 16}.get(errors.format.dtype)
    if errors.format.dtype in _MANTISSA:
        bits = {3: 8, 4: 16}.get(width)
    fits = weight.format.dtype in _MANTISSA and bits is not None
    _require(fits, weight, errors, "error_bits", f", with master_bytewidth {width or None!r}")

    def together(x: Tensor, e: Tensor) -> list[Tensor]:
        if e.is_floating_point():
            e = e.view(torch.int16) if bits == 16 else e.to(torch.int8)
        return [corrected(x, e)]

    def read() -> Tensor:
        return in_chunks(together, [weight.read(), errors.read()], [torch.float32])[0]

    return Entry(weight.name, PLAIN[torch.float32], weight.shape, read)


def corrected(x: Tensor, errors: Tensor) -> Tensor:
    """Return weights plus errors in units of half an ulp, in float32."""
    mantissa = _MANTISSA[x.dtype]
    bias = 127 if x.dtype == torch.bfloat16 else 15
    exponent = (x.abs().view(torch.int16).to(torch.int32) >> mantissa).clamp(min=1) - bias
    unit = exponent - mantissa - 1  # below float32's range near zero, so it goes in two factors
    half = unit >> 1
    share = errors.to(torch.float32) / torch.iinfo(errors.dtype).max
    return x.to(torch.float32) + share * torch.exp2(half) * torch.exp2(unit - half)


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


# --------------------------------------------------------------------------------------- optimi


def _of_optimi(weight: Entry, state: States, group: Group) -> Entry:
    """Return the sum of weight and compensation."""
    if "step" in group:
        state.setdefault("step", float(group["step"]))
    part = state.pop("kahan_comp")
    if not isinstance(part, Entry) or part.format == PLAIN[torch.uint8]:
        return weight
    fits = weight.format.dtype in _MANTISSA and part.format == weight.format
    _require(fits, weight, part, "kahan_comp")
    format = Format(weight.format.dtype, 2)

    def together(*terms: Tensor) -> Sequence[Tensor]:
        return normalized(terms, format)[0]

    def read() -> Tensor:
        return MCFTensor.of(
            in_chunks(together, [weight.read(), part.read()], [format.dtype] * 2), format
        )

    return Entry(weight.name, format, weight.shape, read)


_MASTERS: dict[str, Callable[[Entry, States, Group], Entry]] = {
    "master_param": _of_transformer_engine,
    "error_bits": _of_flashoptim,
    "exp_avg::quantized": _of_flashoptim,  # which may be without a correction
    "momentum_buffer::quantized": _of_flashoptim,
    "kahan_comp": _of_optimi,
}
"""By the state that tells the layout. They take out of the states what completes the weight."""
