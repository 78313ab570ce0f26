"""Tables of bits, range and spacing."""

from __future__ import annotations

import torch

import mcftensor as mcf
from tables.sources import table

PLAIN = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 E4M3": torch.float8_e4m3fn,
    "fp8 E5M2": torch.float8_e5m2,
}
OWN = ("bf16x2", "bf16x3", "bf16i8", "bf16i16", "fp16x2", "fp32x2")


def number_formats() -> str:
    """Machine formats, and what the library makes of them."""
    rows = []
    for name, dtype in PLAIN.items():
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        rows.append((name, info.bits, info.eps, info.max, info.smallest_normal, least))
        if name == "fp32":  # of 19 bits in registers, 32 in memory; subnormals vary by device
            largest = 2.0**128 - 2.0**117
            rows.append(("tf32", 19, 2.0**-10, largest, info.smallest_normal, None))
    for name in OWN:
        own = mcf.finfo(name)
        rows.append(
            (f"`{name}`", own.bits, own.eps, own.max, own.smallest_normal, own.smallest_subnormal)
        )
    return table(
        ("format", "bits", "spacing at 1", "largest", "least normal", "least number"),
        [
            (name, str(bits), *(f"{x:.3g}" if x else "–" for x in rest))
            for name, bits, *rest in rows
        ],
    )
