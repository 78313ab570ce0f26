"""Tables of sums without order."""

from __future__ import annotations

from tables.sources import load, machine, percent, table


def order_cost() -> str:
    """Reductions by gloo and without order, in turn."""
    result = load("order-free")
    rows = []
    for x in result["records"]:
        seconds = [f"{1e3 * t:.0f}" for t in x["seconds"].values()]
        ratios = [f"{x[f'ratio to {name}']:.2f}" for name in ("bf16", "float32")]
        ratios.append(f"{x['ratio of processor seconds']:.2f}")
        rows.append((f"{x['elements']:,}", str(x["processes"]), *seconds, *ratios))
    head = (
        *("elements", "processes", "gloo, bf16: ms", "gloo, float32", "without order"),
        *("times bf16", "times float32", "processor time, times bf16"),
    )
    note = (
        f"two cores for all processes (a load of {result['load'][0]:.0f}), "
        "one leaf a process, medians of rounds in turn; ratios are medians of those of each round. "
    )
    return table(head, rows) + "\n\n" + machine(result, note)


def order_noise() -> str:
    """Runs that differ by order alone, and by seeds."""
    result = load("order")
    names = {
        "order": "order of eight leaves, added in bf16",
        "processes": "number of processes: 1, 2, 4, 8",
        "seed": "seed of weights and batches",
        "without order": "order of eight leaves, added without order",
    }
    rows = []
    for kind, name in names.items():
        x = result[kind]
        differ = sum(x["weights that differ"]) / len(x["weights that differ"])
        rows.append(
            (
                name,
                str(len(x["losses"])),
                f"{x['deviation']:.5f}",
                f"{x['range']:.5f}",
                percent(differ),
                f"{sum(x['distance']) / len(x['distance']):.4f}",
            )
        )
    head = (
        *("what differs", "runs", "standard deviation, nats", "range", "weights that differ"),
        "relative distance of weights",
    )
    return table(head, rows)
