"""Tables of what updates lose."""

from __future__ import annotations

from common.probes import random_updates
from tables.sources import load, machine, percent, table


def edq_values() -> str:
    """Updates of some size on small weights, measured anew."""
    rows = []
    for size in (1e-6, 1e-5):
        edq = random_updates(size)
        one, two = edq.per_parameter["plain"], edq.per_parameter["pair"]
        rows.append(
            (
                f"{size:.0e}".replace("e-0", "e-"),
                f"{one['ratio']:.3f}",
                percent(one["lost"] or 0),
                f"{two['ratio_leading']:.3f}",
                f"{two['ratio']:.3f}",
                percent(two["lost"] or 0),
            )
        )
    head = ("s", "bf16: ratio", "lost", "bf16x2, leading: ratio", "bf16x2: ratio", "lost")
    return table(head, rows)


def edq_strategies() -> str:
    """What the updates of the study's five strategies lose."""
    rows = [
        (
            {"master": "master weights", "bf16": "plain bf16"}.get(x["strategy"], x["strategy"]),
            f"{x['ratio']:.4f}",
            f"{100 * x['lost']:.2g} %",
            f"{x['ratio_leading']:.4f}",
            f"{100 * x['lost_leading']:.2g} %",
            f"{x['final_nats']:.4f}",
        )
        for x in load("edq-study")["findings"]["strategies"]
    ]
    head = (
        "lr 3e-4, beta2 0.999", "ratio", "lost", "ratio, leading", "lost, leading", "nats a byte"
    )  # fmt: skip
    return table(head, rows)


def edq_rates() -> str:
    """The same in plain bf16 and in "plus", by learning rate."""
    found = {(x["lr"], x["strategy"]): x for x in load("edq-study")["findings"]["rates"]}
    rows = []
    for lr in sorted({lr for lr, _ in found}, reverse=True):
        plain, plus = found[lr, "bf16"], found[lr, "plus"]
        pairs = [(f"{x['ratio']:.3f}", percent(x["lost"])) for x in (plain, plus)]
        nats = [f"{x['final_nats']:.3f}" for x in (plain, plus)]
        rows.append((f"{lr:.0e}".replace("e-0", "e-"), *pairs[0], *pairs[1], *nats))
    head = ("lr", "bf16: ratio", "lost", "plus: ratio", "lost", "nats, bf16", "plus")
    return table(head, rows)


def edq_cost() -> str:
    """Steps with a meter, beside steps without."""
    result = load("edq-cost")
    rows = []
    for case, found in result["seconds"].items():
        ratios = [found[kind] / found["without"] for kind in ("not sampled", "sampled")]
        rows.append((case, f"{1e3 * found['without']:.1f}", f"{ratios[0]:.2f}", f"{ratios[1]:.0f}"))
    head = (
        "AdamW over", "milliseconds a step", "with a meter, not sampled, times as long", "sampled"
    )  # fmt: skip
    size = f"{result['parameters']:,} parameters in the shapes of a GPT-2"
    hooks = f"the hooks alone take {1e6 * result['hook_seconds']:.1f} µs a step"
    return table(head, rows) + "\n\n" + machine(result, f"{size}; {hooks}. ")


def loaded() -> str:
    """A model that is loaded in bf16 and fine-tuned, in several ways."""
    result = load("loaded")
    rows = [
        (
            f"{row['way']}, lr {row['lr']:.0e}".replace("e-0", "e-"),
            f"{row['bytes']:.0f}",
            percent(row["moved"]),
            percent(row["norms moved"]),
            f"{row['made']:.3f}",
            f"{row['after']:.4f}",
            percent(row["gain"]),
        )
        for row in result["rows"]
    ]
    head = (
        "", "bytes a parameter", "weights that moved", "norm weights that moved", "movement",
        "nats a byte", "gain",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


def loaded_verdict() -> str:
    """What the diagnosis says of the model as it is loaded, at the smaller rate."""
    rows = load("loaded")["rows"]
    rates = [row for row in rows if row["way"] == "as loaded"]
    return f"```text\n{min(rates, key=lambda row: row['lr'])['verdict']}\n```"
