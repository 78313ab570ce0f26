"""Tables of losses of 16-bit logits."""

from __future__ import annotations

from tables.sources import load, machine, table

WAYS = ("bf16", "float32 copy", "mcftensor")


def logit_passes() -> str:
    """Time and memory of a forward and a backward pass."""
    result = load("logits")
    rows = [
        (
            x["kind"],
            f"{x['classes']:,}",
            *[f"{x['nanoseconds'][way]:.1f}" for way in WAYS],
            *[f"{result['bytes'][x['kind']][way]:.1f}" for way in WAYS],
        )
        for x in result["passes"]
    ]
    head = (
        *("loss", "logits of a row", "ns a logit: PyTorch in bf16", "float32 copy", "mcftensor"),
        *("bytes a logit: PyTorch in bf16", "float32 copy", "mcftensor"),
    )
    note = (
        f"processor time of forward and backward, in turn (a load of {result['load'][0]:.0f}), "
        "medians; bytes at the peak, beyond the logits, for 128 rows of 131,072. "
    )
    return table(head, rows) + "\n\n" + machine(result, note)
