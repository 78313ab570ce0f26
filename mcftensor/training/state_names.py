"""The kinds of optimizer states, by name, and their formats in the compact modes."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mcftensor.formats import Format, bf16i16, for_shape, is_vector, mxfp8, q4, ue4, ue5m3

FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg", "exp_avg_diff", "mu", "m"})
"""Names of states that follow the gradient."""

SECOND_MOMENTS = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta", "exp_inf", "nu", "v"}
)
"""Names of states that follow the square or magnitude of the gradient or of updates."""

_AMBIGUOUS = frozenset({"v"})
"""Second moments in some packages, and velocities in others, which are signed."""

WIDE = {
    "sum": "it only grows, by ever smaller parts of itself",
    "grad_avg": "its square is taken from square_avg, and what is left is close to zero",
    "step_size": "it is what the weights move by",
    "ax": "it is an average of weights",
}
"""States that one byte does not do for, and why."""


_OF_BITS = {8: (mxfp8, ue5m3), 4: (q4, ue4)}
"""The formats of first and second moments, by the bits of a code."""


def compact_format(
    name: str, shape: torch.Size, names: Collection[str], bits: int = 8
) -> Format | None:
    """Return the format of a state in the mode "compact", or None for a state that is no moment.

    Args:
        name: of the state.
        shape: of the state and its parameter.
        names: of all states of the parameter.
        bits: of a code: 8, or 4 in the mode "compact4".
    """
    if name not in FIRST_MOMENTS | SECOND_MOMENTS:
        return None
    if is_vector(shape) or name in _AMBIGUOUS or not WIDE.keys().isdisjoint(names):
        return bf16i16
    format = _OF_BITS[bits][name in SECOND_MOMENTS]
    return for_shape(format.nearest if name == "max_exp_avg_sq" else format, shape)
