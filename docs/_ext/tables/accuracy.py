"""Tables of errors and formats."""

from __future__ import annotations

import math

from drawing import superscript

import mcftensor as mcf
from tables.sources import load, machine, table


def witness() -> str:
    """What steps of the small GPT did, against the same steps in float64."""
    rows = [
        (
            name,
            f"{found['displacement_matrices']:.1e}",
            f"{found['displacement_vectors']:.1e}",
            f"{found['second_moment']:.5f}",
            f"{found['largest_run']:.5f} ({found['largest_exact']:.5f})",
        )
        for name, result in load("pretrain-seed0")["strategies"].items()
        if (found := result.get("witness"))
    ]
    head = (
        "", "displacement, matrices", "displacement, vectors", "second moment, over the exact one",
        "largest update, in learning rates (exact)",
    )  # fmt: skip
    return table(head, rows)


_EAGER = ("torch float32, for-loop", "bf16x2 plus, for-loop", "bf16x3 full, for-loop")


def displacement() -> str:
    """Relative error of what AdamW's weights moved by in 1000 steps."""
    result = load("accuracy")
    columns = result["displacement"]
    names = next(iter(columns.values()))
    rows = []
    for name in names:
        if not name.endswith("fused") and name not in _EAGER:
            continue  # foreach steps have the errors of a for-loop
        decay = result["decay"].get(name)
        rows.append(
            (
                name,
                *(f"{column[name]:.1e}" for column in columns.values()),
                f"{result['frozen weight'][name]:.4f}",
                f"{decay['ones'][1]:.4f}" if decay else "–",
            )
        )
    head = (
        "AdamW", "lr 1e-4, small", "lr 1e-4, ones", "lr 1e-5, small", "lr 1e-5, ones",
        "weight of 1, moved", "pure decay, moved",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


def storage() -> str:
    """The same where moments are float32, so that the storage of weights counts alone."""
    result = load("storage")
    columns = [*result["displacement"].values()][:4]
    rows = [
        (
            name.replace(", fused", ""),
            f"{size:.3g}",
            *(f"{column[name]['error']:.1e}" for column in columns),
        )
        for name, size in result["bytes"].items()
        if not name.endswith("for-loop")
    ]
    head = (
        "weights", "bytes", "lr 1e-4, small", "lr 1e-4, ones", "lr 1e-5, small", "lr 1e-5, ones",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


def envelope() -> str:
    """Claimed bounds and measured worst cases of expansion arithmetic."""
    result = load("envelope")
    rows = []
    for name, operations in result["formats"].items():
        cells = [f"{e['worst']:.3f} of {e['bound']:g}" for e in operations.values()]
        rows.append((f"`{name}`", *cells, f"{operations['add']['cases']:,}"))
    symbols = {"add": "+", "mul": "×", "div": "÷", "sqrt": "√"}
    operations = next(iter(result["formats"].values()))
    head = ("worst case, of bound, in uⁿ", *(symbols[o] for o in operations), "cases, each")
    return table(head, rows) + "\n\n" + machine(result)


def formats() -> str:
    """The formats, with bits, bytes and range."""
    rows = [
        (
            f"`{f.name}`",
            str(f.precision),
            str(f.bytes),
            f"2{superscript(round(math.log2(f.full_precision_min)))}",
            f"{mcf.finfo(f).max:.1e}",
        )
        for f in mcf.formats.FORMATS
    ]
    return table(("format", "bits", "bytes", "full precision from", "largest"), rows)
