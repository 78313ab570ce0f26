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


def displacement() -> str:
    """Relative error of what AdamW's weights moved by in 1000 steps."""
    result = load("accuracy")
    columns = result["displacement"]
    names = next(iter(columns.values()))
    rows = []
    for name in names:
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
    columns = result["displacement"].values()
    rows = [
        (name, f"{size:.3g}", *(f"{column[name]['error']:.1e}" for column in columns))
        for name, size in result["bytes"].items()
    ]
    head = (
        "weights", "bytes", "lr 1e-4, small", "lr 1e-4, ones", "lr 1e-5, small", "lr 1e-5, ones",
        "lr 1e-6, small", "lr 1e-6, ones",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


def weights() -> str:
    """The part of that table which is about ways of other libraries, fused, by bytes."""
    result = load("storage")
    columns = result["displacement"].values()
    names = {
        "torch float32, fused": "float32, PyTorch",
        "bf16i16, fused": "`bf16i16`: bf16 + int16",
        "bf16x2, fused": "`bf16x2`: bf16 + bf16",
        "bf16i8 balanced, fused": "`bf16i8`: bf16 + int8, balanced",
        "flashoptim, 24 bits, emulated": "flashoptim, 24 bits: bf16 + int8, emulated",
        "heavyball, bf16+8, emulated": "heavyball: bf16 + int8, at random, emulated",
        "bf16 balanced, fused": "bf16, balanced",
        "bf16 stochastic, fused": "bf16, stochastic",
    }
    rows = [
        (
            shown,
            f"{result['bytes'][name]:.3g}",
            *(f"{column[name]['error']:.1e}" for column in columns),
        )
        for name, shown in names.items()
    ]
    head = (
        "weights", "bytes", "lr 1e-4, small", "lr 1e-4, ones", "lr 1e-5, small", "lr 1e-5, ones",
        "lr 1e-6, small", "lr 1e-6, ones",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


def second_moment() -> str:
    """Over the exact one, after 5000 steps."""
    result = load("accuracy")["second moment"]
    betas = list(next(iter(result.values())))
    rows = [(name, *(f"{row[beta]:.4f}" for beta in betas)) for name, row in result.items()]
    return table(("", *(f"beta2 {beta}" for beta in betas)), rows)


def exhaustive() -> str:
    """Error-free transformations over all pairs."""
    result = load("exhaustive")
    rows = [
        (
            f"`{entry['transformation']}`",
            entry["base"],
            f"{entry['cases']:,}",
            f"{entry['cases'] - entry['outside']:,}",
            f"{entry['wrong']:,}",
        )
        for entry in result["results"]
    ]
    head = ("", "type", "pairs of bit patterns", "within its requirements", "wrong")
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


def functions() -> str:
    """Measured errors and times of elementary functions."""
    result = load("functions")
    rows = []
    for name, entry in result["functions"].items():
        worst = [f"{entry['worst'][f]:.3f} of {b:.3f}" for f, b in result["bounds"].items()]
        time = entry["time"]
        nanoseconds = [f"{time[f]:.1f}" for f in ("float64", "fp64x2")]
        rows.append((name, *worst, *nanoseconds, f"{time['ratio']:.0f}"))
    head = (
        "worst case, of bound, in uⁿ", *(f"`{f}`" for f in result["bounds"]),
        "ns, float64", "ns, `fp64x2`", "ratio",
    )  # fmt: skip
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
