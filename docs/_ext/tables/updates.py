"""Tables of what updates lose."""

from __future__ import annotations

from tables.sources import load, machine, percent, table


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


def loaded() -> str:
    """A model that is loaded in bf16 and fine-tuned, in several ways."""
    result = load("loaded")
    rows = [
        (
            f"{row['way']}, lr {row['lr']:.0e}".replace("e-0", "e-"),
            f"{row['bytes']:.0f}",
            percent(row["moved"]),
            percent(row["norms moved"]),
            f"{row['after']:.4f}",
            percent(row["gain"]),
        )
        for row in result["rows"]
    ]
    head = (
        "", "bytes a parameter", "weights that moved", "norm weights that moved",
        "nats a byte", "gain",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


def loaded_verdict() -> str:
    """What the diagnosis says of the model as it is loaded, at the smaller rate."""
    rows = load("loaded")["rows"]
    rates = [row for row in rows if row["way"] == "as loaded"]
    return f"```text\n{min(rates, key=lambda row: row['lr'])['verdict']}\n```"
