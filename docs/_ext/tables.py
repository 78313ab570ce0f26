"""Tables of the pages, from the results that are committed under `benchmarks/results`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from drawing import superscript

import mcftensor as mcf
from common.probes import random_updates
from mcftensor.patches.table import TABLE

FIGURE = re.compile(r"[+−\d–]")
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def load(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, figures to the right."""
    rows = list(rows)
    rule = [
        "---:" if all(FIGURE.match(cell) for cell in column) else "---"
        for column in zip(*rows, strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def machine(result: dict[str, Any], note: str = "") -> str:
    """One line about where figures come from."""
    m = result["machine"]
    if isinstance(m, str):
        return f"<small>{note}{m}</small>"
    cpu = m.get("cpu") or f"a {m['device'].upper()}"
    threads = f", {m['threads']} thread{'s' * (m['threads'] > 1)}" if "threads" in m else ""
    return f"<small>{note}{cpu}{threads}, torch {m['torch']}, Python {m['python']}</small>"


# ------------------------------------------------------------------------------------------- speed

PEERS = {
    "master weights": ("PyTorch, float32 master weights", "exact float32"),
    "torch bf16, fused": ("PyTorch, plain bf16", "bf16"),
    "optimi Kahan, foreach": ("optimi, Kahan", "bf16 + bf16"),
    "torchao stochastic": ("torchao, stochastic rounding", "bf16, right in the mean"),
    "torchao 8 bit": ("torchao, 8-bit states", "bf16"),
    "heavyball bf16+8": ("heavyball, bf16 + 8 bits", "bf16 + int8"),
    "pytorch_optimizer Kahan": ("pytorch_optimizer, Kahan", "bf16 + bf16"),
    "pytorch_optimizer Flash 24": ("FlashAdamW of pytorch_optimizer, 24 bits", "bf16 + int8"),
    "bitsandbytes 32 bit": ("bitsandbytes, 32-bit states", "bf16"),
    "bitsandbytes 8 bit": ("bitsandbytes, 8-bit states", "bf16"),
    "mcf light, fused": ("**mcftensor, light**", "bf16 + bf16"),
    "mcf plus, fused": ("**mcftensor, plus**", "bf16 + bf16"),
    "mcf full, fused": ("**mcftensor, full**", "bf16 + bf16"),
    "mcf exact, fused": ("**mcftensor, exact**", "bf16 + int16, which is float32"),
    "mcf compact, fused": ("**mcftensor, compact**", "bf16 + int8, moments of a byte"),
}


def contenders(workload: str) -> dict[str, Any]:
    """What was measured: of GPT-2 in the run of fewer contenders."""
    file = {"one tensor": "steps-cpu", "GPT-2": "steps-cpu-gpt2", "many tensors": "steps-cpu-many"}
    found: dict[str, Any] = load(file[workload])["workloads"][workload]["contenders"]
    return found


def ratio(entry: dict[str, Any] | None) -> str:
    """Time of a step over that of master weights."""
    return f"{entry['ratio']:.2f}" if entry and entry.get("ratio") else "–"


def held(key: str) -> float | None:
    """Bytes a parameter of one large tensor: weights, bf16 gradients and states."""
    if key == "master weights":  # its steps hold gradients in float32, too
        key += ", gradients freed"
    found: float | None = contenders("one tensor")[key].get("bytes_held")
    return found


def rounded(size: float | None) -> str:
    """Bytes with a digit, where there is one."""
    return f"{size:.1f}".removesuffix(".0") if size else "–"


def peers() -> str:
    """What a weight is kept as, and what a step costs; the fastest over one large tensor first."""
    one, gpt, many = (contenders(w) for w in ("one tensor", "GPT-2", "many tensors"))
    rows = [
        (name, kept, rounded(held(key)), *(ratio(w.get(key)) for w in (one, gpt, many)))
        for key, (name, kept) in sorted(PEERS.items(), key=lambda item: one[item[0]]["ratio"])
    ]
    head = ("AdamW", "a weight is kept as", "bytes a parameter", *workloads())
    return table(head, rows) + "\n\n" + machine(load("steps-cpu"))


def features() -> str:
    """What each can do, as its documentation has it; bytes as measured, where they were."""

    def sizes(*keys: str) -> str:
        found = sorted({x for key in keys if (x := held(key))})
        return " to ".join(rounded(x) for x in (found[:1] + found[1:][-1:]))

    light, flash = "pytorch_optimizer Kahan", "pytorch_optimizer Flash 24"
    rows = [
        ("**mcftensor**", "any, as they are", sizes("mcf compact, fused", "mcf full, fused"),
         "yes", "run as they are, not in one graph", "yes", "yes, `bf16i16`", "yes"),
        ("PyTorch, float32, autocast", "any, as they are", sizes("master weights"),
         "yes", "yes", "yes", "yes", "no"),
        ("PyTorch, plain bf16", "any, as they are", sizes("torch bf16, fused"),
         "yes", "yes", "yes", "no", "no"),
        ("optimi", "8 of its own", sizes("optimi Kahan, foreach"),
         "yes", "no", "–", "no", "no"),
        ("flashoptim", "5 of its own", f"{sizes(flash)} (its port)",
         "no", "–", "even shards", "nearly, with 32 bits", "a warning"),
        ("torchao", "Adam, AdamW of its own", sizes("torchao 8 bit", "torchao stochastic"),
         "with a compiler", "yes, by itself", "yes", "no", "no"),
        ("heavyball", "over 30 of its own", sizes("heavyball bf16 states", "heavyball fp32 states"),
         "with a compiler", "yes, by itself", "–", "nearly, with 16 bits", "no"),
        ("bitsandbytes", "9 of its own", sizes("bitsandbytes 8 bit", "bitsandbytes 32 bit"),
         "yes", "–", "–", "no", "no"),
        ("pytorch_optimizer", "over 100 of its own", sizes(light, flash),
         "yes", "–", "–", "no", "no"),
        ("Transformer Engine", "Adam, AdamW, SGD of its own", "8 to 14 (by its options)",
         "no", "no", "yes", "yes, remainders", "no"),
    ]  # fmt: skip
    head = (
        "", "optimizers", "bytes a parameter, AdamW", "CPU", "compiled steps", "`fully_shard`",
        "float32 exactly", "meter of lost updates",
    )  # fmt: skip
    return table(head, rows)


def workloads() -> list[str]:
    """Heads of columns: how many elements there are, and what they take in bf16."""
    files = ("steps-cpu", "steps-cpu-gpt2", "steps-cpu-many")
    heads = []
    for file in files:
        ((name, found),) = load(file)["workloads"].items()
        size, count = found["parameters"], found["tensors"]
        of = "one tensor" if count == 1 else f"{count:,} tensors"
        title = "GPT-2: " if name == "GPT-2" else ""
        heads.append(f"{title}{of}, {size / 1e6:,.3g} M elements ({2 * size / 1e6:,.0f} MB)")
    return heads


def _steps(is_shown: Any) -> str:
    """Contenders, the fastest over the largest single tensor first."""
    found = [contenders(w) for w in ("one tensor", "GPT-2", "many tensors")]

    def cell(entry: dict[str, Any] | None) -> str:
        if not entry or not entry.get("seconds"):
            return "–"
        time = 1000 * entry["seconds"]
        return f"{time:,.{0 if time >= 100 else 1}f} ({entry['ratio']:.2f})"

    shown = [key for key, entry in found[0].items() if entry.get("ratio") and is_shown(key)]
    rows = [
        (named(key), rounded(held(key)), *(cell(w.get(key)) for w in found))
        for key in sorted(shown, key=lambda key: found[0][key]["ratio"])
    ]
    return table(("", "bytes a parameter", *workloads()), rows)


def named(key: str) -> str:
    """A contender, in the words of the pages."""
    words = {
        "SGD, ": "",
        "mcf ": "mcftensor, ",
        "torch ": "PyTorch, ",
        "PyTorch, fp32": "PyTorch, float32 alone",
        "fp32": "float32",
        "master weights": "PyTorch, float32 master weights",
        "mcftensor, none": "mcftensor, no mode",
        " 8 bit": ", 8-bit states",
        " 32 bit": ", 32-bit states",
        "ao fp8": "ao, fp8 states",
    }
    name = key
    for old, new in words.items():
        name = name.replace(old, new)
    return f"**{name}**" if "mcf" in key and "fused" in key else name


def _is_own(key: str) -> bool:
    """Whether it is of PyTorch or this library, and AdamW."""
    return key.startswith(("master", "torch ", "mcf ")) and key != "master weights, gradients freed"


def steps() -> str:
    """AdamW of PyTorch and of this library."""
    return _steps(_is_own) + "\n\n" + machine(load("steps-cpu"))


def steps_of_others() -> str:
    """AdamW of other libraries."""
    others = _steps(lambda key: not _is_own(key) and not key.startswith(("SGD", "master")))
    return others + "\n\n" + machine(load("steps-cpu"))


def steps_of_sgd() -> str:
    """SGD with momentum."""
    return _steps(lambda key: key.startswith("SGD")) + "\n\n" + machine(load("steps-cpu"))


def states() -> str:
    """What moments of one byte lose, and those of others."""
    result = load("states")
    rows = []
    for name, found in result["moments"].items():
        cells = []
        for x in found.values():
            moment = "" if x["second_moment"] is None else f" ({x['second_moment']:.2f})"
            largest = f"{x['largest']:,.0f}" if x["largest"] >= 100 else f"{x['largest']:.2f}"
            cells.append(f"{x['displacement']:.3f}, {largest}{moment}")
        rows.append((name, f"{result['bytes'][name]:g}", *cells))
    head = ("moments", "bytes of both", *next(iter(result["moments"].values())))
    missing = [f"{name} ({reason})" for name, reason in result["missing"].items()]
    note = f"\n\nNot on a CPU: {'; '.join(missing)}." if missing else ""
    return table(head, rows) + note + "\n\n" + machine(result)


def peaks() -> str:
    """Memory of a step of training."""
    results = [load(f"train-cpu-{model}") for model in ("1.3M", "124M")]
    names = [x for x in results[0]["strategies"] if x in results[1]["strategies"]]
    rows = []
    for name in names:
        cells = []
        for result in results:
            peak = result["strategies"][name]["peak_bytes"]
            cells.append(f"{peak / 1e6:,.0f} MB ({peak / result['parameters']:.1f})")
        rows.append(({"master": "float32 masters", "bf16": "plain bf16"}.get(name, name), *cells))
    heads = [
        f"{x['parameters'] / 1e6:,.1f} M parameters, {x['tokens_a_step']:,} tokens a step"
        for x in results
    ]
    note = "In brackets bytes a parameter. "
    return table(("", *heads), rows) + "\n\n" + machine(results[1], note)


def compiling() -> str:
    """Seconds of the first compiled step."""
    result = load("compiling")
    rows = [
        (
            row["path"],
            f"{row['bf16']['first step']:.1f}",
            f"{row['expansions']['first step']:.1f}",
            f"{row['ratio']:.2f}",
        )
        for row in result["rows"]
    ]
    head = ("path", "plain bf16, seconds", "expansions, seconds", "ratio")
    return table(head, rows) + "\n\n" + machine(result)


def overhead() -> str:
    """What parameters that are expansions add to the functions of models."""
    result = load("overhead")
    rows = []
    for part, unit, factor in (("microseconds", "µs", 1), ("seconds", "ms", 1e3)):
        for name, found in result[part].items():
            times = [f"{factor * found[kind]:.1f}" for kind in ("bf16", "expansions")]
            ratio = found["expansions"] / found["bf16"]
            rows.append((f"{name}, {unit}", *times, f"{ratio:.2f}"))
    head = ("", "plain bf16", "expansions", "ratio")
    return table(head, rows) + "\n\n" + machine(result)


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
                f"{100 * (one['lost'] or 0):.1f} %",
                f"{two['ratio_leading']:.3f}",
                f"{two['ratio']:.3f}",
                f"{100 * (two['lost'] or 0):.1f} %",
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
        pairs = [(f"{x['ratio']:.3f}", f"{100 * x['lost']:.1f} %") for x in (plain, plus)]
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


# ---------------------------------------------------------------------------------------- training


def pretraining() -> str:
    """Validation loss of the small GPT, as the difference to master weights."""
    runs = [load(f"pretrain-seed{seed}")["strategies"] for seed in range(3)]
    rows = []
    for name in runs[0]:
        final = [run[name]["final"] for run in runs]
        cells = [
            f"{f['nats']:.4f}"
            if name == "master"
            else f"{f['difference_to_master']:+.4f}".replace("-", "−")
            for f in final
        ]
        kept = [f"{final[0]['edq_ratio']:.4f}", f"{100 * final[0]['lost']:.2f} %"]
        rows.append((name, *cells, *kept, f"{runs[0][name]['bytes_per_parameter']:.2f}"))
    head = ("", "seed 0", "seed 1", "seed 2", "EDQ ratio", "updates lost", "bytes a parameter")
    return table(head, rows) + "\n\n" + machine(load("pretrain-seed0"))


# Name in the study: what is trained how, and in which types are parameters, gradients and
# activations, states, and the operands of products.
SCALING = {
    "float32": ("float32", "float32", "float32", "float32", "float32"),
    "stochastic": ("`scalify(model)`", "float16, stochastic", "float16", "float16", "float16"),
    "scaled": ("the same, to nearest", "float16", "float16", "float16", "float16"),
    "scaled8": ("`tail=8`", "float16 and int8", "float16", "float16", "float16"),
    "pairs": ("`fp16x2`", "fp16x2", "float16", "fp16x2", "float16"),
    "weights": ("float32 states", "float16", "float16", "float32", "float16"),
    "weights8": ("the same, `tail=8`", "float16 and int8", "float16", "float32", "float16"),
    "masters": ("float32 masters", "float32, and float16 of it", "float16", "float32", "float16"),
    "fp8": ('`products="fp8"`', "float16, stochastic", "float16", "float16", "E4M3, E5M2"),
    "fp8masters": (
        "float32 masters", "float32, and float16 of it", "float16", "float32", "E4M3, E5M2"
    ),
    "float16": ("unscaled", "float16", "float16", "float16", "float16"),
    "float16eps": ("unscaled, eps 1e-6", "float16", "float16", "float16", "float16"),
    "halfgrads": (
        "unscaled, float32 masters", "float32, and float16 of it", "float16", "float32", "float16"
    ),
    "gradscaler": (
        "`torch.amp.GradScaler`", "float32, and float16 of it", "float16", "float32", "float16"
    ),
}  # fmt: skip


def scaling() -> str:
    """Losses of the study of scaled training, as differences to float32 seed by seed."""
    result = load("scaling")
    base = {seed: run["validation"] for seed, run in result["runs"]["float32"].items()}
    earlier = result.get("earlier", {})
    rows = []
    for name, words in SCALING.items():
        runs = result["runs"][name]
        cells, off = [], []
        for seed, reference in base.items():
            run = runs.get(seed)
            if run is None:
                cells.append("–")
            elif run["validation"] is None:
                cells.append(f"NaN in step {run['steps'] + 1}")
            elif name == "float32":
                cells.append(f"{reference:.4f}")
            else:
                off.append(run["validation"] - reference)
                mark = "†" if seed in earlier.get(name, ()) else ""
                cells.append(_signed(off[-1]) + mark)
        mean = _signed(sum(off) / len(off)) if off else "–"
        zeros = [100 * run["zeros"] for run in runs.values()]
        share = sum(zeros) / len(zeros)
        rows.append((*words, *cells, mean, f"{share:.2g} %" if share else "0"))
    head = (
        "", "parameters", "gradients, activations", "states", "products",
        *(f"seed {seed}" for seed in base), "mean", "gradients that are zero",
    )  # fmt: skip
    note = ""
    if earlier:
        note = (
            "\n\n† Run while gradients of gains, biases and values still went by their size; on "
            f"seed 0 the rule changed losses by at most {_most_by_rule(result)}."
        )
    return table(head, rows) + note + "\n\n" + machine(result)


def _signed(x: float) -> str:
    return f"{x:+.4f}".replace("-", "−")


def _most_by_rule(result: dict[str, Any]) -> str:
    before = result["before_the_rule"]
    changes = {n: abs(result["runs"][n]["0"]["validation"] - x) for n, x in before.items()}
    eight = max(x for n, x in changes.items() if n.startswith("fp8"))
    others = max(x for n, x in changes.items() if not n.startswith("fp8"))
    return f"{others:.5f}, with 8-bit products {eight:.4f}"


def scaling_sizes() -> str:
    """Between which powers of two the root mean square of data lies over the training."""
    runs = load("scaling")["runs"]
    kinds = {
        "activations": "activations",
        "gradients": "gradients of parameters",
        "parameters": "parameters",
        "exp_avg": "first moments",
        "exp_avg_sq": "second moments",
    }
    rows = []
    for name in ("float32", "stochastic", "scaled8", "fp8"):
        cells = []
        for kind in kinds:
            found = [x for xs in runs[name]["0"]["sizes"].get(kind, {}).values() for x in xs]
            known = [x for x in found if x is not None]
            cells.append(" to ".join(f"{x:.1f}" for x in _rounded(known)) if known else "–")
        rows.append((SCALING[name][0], *(cell.replace("-", "−") for cell in cells)))
    return table(("log₂ of the root mean square", *kinds.values()), rows)


def _rounded(found: Sequence[float]) -> tuple[float, float]:
    return round(min(found), 1) + 0.0, round(max(found), 1) + 0.0  # no negative zero


def rates() -> str:
    """Loss of compact at other learning rates, and what its steps did."""
    result = load("pretrain-rates")
    rows = []
    for rate, seeds in result["rates"].items():
        found = [seed["compact"] for seed in seeds.values()]
        off = [x["compact"]["nats"] - x["master"]["nats"] for x in seeds.values()]
        moments = [x["witness"]["second_moment"] for x in found]
        largest = [x["witness"]["largest_run"] / x["witness"]["largest_exact"] for x in found]
        cells = [f"{x:+.4f}".replace("-", "−") for x in (*off, sum(off) / len(off))]
        rows.append((rate, *cells, f"{min(moments):.4f}", f"{max(largest):.2f}"))
    head = (
        "learning rate", "seed 0", "seed 1", "seed 2", "mean", "second moment, over the exact one",
        "largest update, over the exact one",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


# ---------------------------------------------------------------------------------------- findings


def signed(x: float, half: float | None = None, digits: int = 4) -> str:
    """A difference, and half the length of its interval."""
    text = f"{x:+.{digits}f}".replace("-", "−")
    return text if half is None else f"{text} ± {half:.{digits}f}"


def rate(x: float) -> str:
    """A learning rate of one digit."""
    return f"{x:g}" if x >= 0.01 else f"{x:.0e}".replace("e-0", "e-")


def findings_stored() -> str:
    """What weights in 8-bit terms moved by, against float64."""
    result = load("findings-eight")
    head, *columns = (name for name in result["stored"][0] if not name.endswith(" half"))
    rows = [
        (f"`{row[head]}`", f"{row['bytes']}", *(f"{row[c]:.1e}" for c in columns[1:]))
        for row in result["stored"]
    ]
    names = (
        "weights",
        "bytes",
        *(f"lr {rate(float(c.split()[0]))}, {c.split()[1]}" for c in columns[1:]),
    )
    return table(names, rows) + "\n\n" + machine(result)


def findings_trained() -> str:
    """What trainings with such weights came to."""
    rows = [
        (
            f"`{row['format']}`",
            f"{row['ratio']:.3f}",
            f"{100 * row['lost']:.1f} %",
            f"{row['displacement_matrices']:.1e}",
            f"{row['validation']:.4f}"
            if not row["gap_half"]
            else signed(row["gap"], row["gap_half"]),
        )
        for row in load("findings-eight")["trained"]
    ]
    return table(("weights", "EDQ ratio", "lost", "displacement", "nats a byte"), rows)


def findings_beta2() -> str:
    """Losses of each strategy and learning rate by beta2, and how clear the best one is."""
    result = load("findings-beta2")
    rows = []
    for row in result["best"]:
        losses = [
            f"**{loss:.4f}**" if beta2 == row["beta2"] else f"{loss:.4f}"
            for beta2, loss in zip(result["beta2s"], row["losses"], strict=True)
        ]
        second = f"{signed(row['worse'], row['half'])} ({row['second']:g})"
        rows.append((f"{row['strategy']}, lr {rate(row['lr'])}", *losses, second))
    head = ("", *(f"beta2 {x:g}" for x in result["beta2s"]), "second best, to the best")
    return table(head, rows)


def findings_moments() -> str:
    """What beta2 does to second moments, and to the loss beside master weights."""
    result = load("findings-beta2")
    lr = min(row["lr"] for row in result["cells"])
    rows = [
        (
            row["strategy"],
            f"{row['beta2']:g}",
            signed(row["gap"], row["gap_half"]),
            f"{row['ratio']:.3f}",
            f"{row['second_ratio']:.3f}",
            f"{row['second_moment']:.3f}",
            f"{row['largest']:.2f}",
            f"{row['displacement_matrices']:.1e}",
        )
        for row in result["cells"]
        if row["lr"] == lr and row["strategy"] != "master"
    ]
    head = (
        f"lr {rate(lr)}", "beta2", "nats from master weights", "EDQ ratio", "ratio of v",
        "v over exact", "largest update over exact", "displacement",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


def findings_prediction() -> str:
    """Rank correlations of what meters say with what a run loses."""
    result = load("findings-prediction")
    predictors = [name for name in result["correlations"][0] if name not in ("group", "runs")]

    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return "–"
        low, high = (f"{x:.2f}" for x in found["interval"])
        return f"{found['rho']:.2f} ({low} to {high})".replace("-", "−")

    rows = [
        (row["group"], str(row["runs"]), *(cell(row[name]) for name in predictors))
        for row in result["correlations"]
    ]
    head = ("runs of", "number", *(name.replace("|", "\\|") for name in predictors))
    return table(head, rows) + "\n\n" + machine(result)


def findings_growth() -> str:
    """The error of weights at the first check and the last, and how it grows."""
    result = load("findings-growth")
    found: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        cells = found.setdefault((row["strategy"], row["kind"]), [])
        cells += [f"{row['error'][0]:.1e}", f"{row['error'][-1]:.1e}"]
        cells.append(f"{row['slope']:.2f} ± {row['slope_half']:.2f}")
        if row["source"] == "real":
            cells.append(f"{row['second_moment'][-1]:.3f}")
    rows = [(f"{strategy}, {kind}", *cells) for (strategy, kind), cells in found.items()]
    rows.sort(key=lambda row: row[0].partition(", ")[2])
    steps = result["rows"][0]["steps"]
    ends = [f"step {steps[0]}", f"step {steps[-1]:,}", "slope"]
    head = ("", *(f"{source}: {x}" for source in ("random", "real") for x in ends), "v over exact")
    return table(head, rows) + "\n\n" + machine(result)


def findings_others() -> str:
    """What light and plus do for other optimizers."""
    result = load("findings-others")

    def number(x: float | None, form: str) -> str:
        return "–" if x is None else format(x, form)

    rows = [
        (
            f"{row['optimizer']}, {row['strategy']}",
            rate(row["lr"]),
            f"{row['validation']:.4f}"
            if row["strategy"] == "master"
            else signed(row["gap"], row["gap_half"]),
            number(row["ratio"], ".3f"),
            number(row["lost"] and 100 * row["lost"], ".1f") + " %",
            number(row["displacement_matrices"], ".1e"),
            number(row["displacement_vectors"], ".1e"),
        )
        for row in result["rows"]
    ]
    head = (
        "", "lr", "nats, and from master weights", "EDQ ratio", "lost", "displacement, matrices",
        "vectors",
    )  # fmt: skip
    return table(head, rows) + "\n\n" + machine(result)


# ---------------------------------------------------------------------------------------- accuracy


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


def formats() -> str:
    """What there is."""
    rows = [
        (
            f"`{f.name}`",
            str(f.precision),
            str(f.bytes),
            f"2{superscript(round(math.log2(f.full_precision_min)))}",
            f"{mcf.finfo(f).max:.1e}",
        )
        for f in mcf.FORMATS
    ]
    return table(("format", "bits", "bytes", "full precision from", "largest"), rows)


# ----------------------------------------------------------------------------------------- patches


def patches() -> str:
    """What is changed in PyTorch, by the occasion; names that are changed alike stand together."""
    occasions: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for row in TABLE:
        alike = occasions.setdefault(row.when, {})
        alike.setdefault((row.why, row.loss, row.releases), []).append(f"`{row.name}`")
    parts = []
    for when, groups in occasions.items():
        parts.append(f"## With `{when}`")
        for (why, loss, releases), names in groups.items():
            head = f"{', '.join(names)} (torch {releases})"
            parts.append(f"{head}\n:   {why} *Without it,* {loss}")
    return "\n\n".join(parts)


# --------------------------------------------------------------------------------------- operators


def outcome(entry: dict[str, Any]) -> str:
    """What became of the samples of one operator in one format."""
    if not entry["computed"]:
        return "raises" if entry["refused"] else "–"
    units = f"{entry['units']:.2f}".rstrip("0").rstrip(".") if entry["units"] else "0"
    return f"{units}, some raise" if entry["refused"] else units


def operator_summary() -> str:
    """How many compute, in each format."""
    result = load("operator-matrix")
    rows = []
    for name in next(iter(result["operators"].values())):
        entries = [formats[name] for formats in result["operators"].values()]
        computed = [e for e in entries if e["computed"]]
        refused = sum(1 for e in entries if e["refused"] and not e["computed"])
        rows.append(
            (
                f"`{name}`",
                str(len(computed)),
                str(refused),
                str(len(entries) - len(computed) - refused),
                f"{max(e['units'] for e in computed):.1f}",
            )
        )
    head = ("format", "compute", "raise", "take no floats", "worst error")
    return table(head, rows) + "\n\n" + machine(result)


def operators() -> str:
    """One row each, by the first letter of its name or by its module."""
    result = load("operator-matrix")["operators"]
    groups: dict[str, list[str]] = {}
    for name in result:
        module, dot, _ = name.rpartition(".")
        known = module in ("fft", "linalg", "masked", "nn.functional", "signal.windows", "special")
        groups.setdefault(module if known and dot else "torch", []).append(name)
    parts = []
    for module in sorted(groups, key=lambda m: (m != "torch", m)):
        rows = [
            (f"`{name}`", *(outcome(entry) for entry in result[name].values()))
            for name in groups[module]
        ]
        head = ("operator", *next(iter(result.values())))
        parts.append(f"## {module}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def roofline() -> str:
    """By what kernels are bound on processors that were not there."""
    result = load("roofline")
    names = [p["name"] for p in result["processors"]]
    rows = []
    for name, found in result["kernels"].items():
        ratios = [found["processors"][p] for p in names]
        cells = [f"{x['computing'] / x['memory']:.2f}" for x in ratios]
        moved = found["read"] + found["written"]
        rows.append((name, f"{moved:.4g}", *[f"**{c}**" if float(c) > 1 else c for c in cells]))
    return table(("", "bytes", *(n.replace(" (", "<br>(") for n in names)), rows)


def fewer_instructions() -> str:
    """Instructions of steps, before and after."""
    result = load("roofline")
    shown = ("AdamW light", "AdamW plus", "AdamW full", "SGD light")
    codes = ("AVX-512", "AVX2", "sm_90")
    models = ("Xeon Platinum 8380 (Ice Lake)", "EPYC 9654 (Zen 4)")
    rows = []
    for name in shown:
        old, new = result["before"][name], result["kernels"][name]
        cells = [f"{old['instructions'][c]:.1f} → {new['instructions'][c]:.1f}" for c in codes]
        for model in models:
            ratio = new["processors"][model]["computing"] / old["computing"][model]
            cells.append(f"{ratio:.2f}")
        rows.append((name, *cells))
    heads = [f"{c}, instructions an element" for c in codes]
    return table(("", *heads, *(f"cycles on {m}, after over before" for m in models)), rows)


def measured_roofline() -> str:
    """Predictions on the CPU at hand."""
    result = load("roofline")
    measured = result["measured"]
    rows = []
    for name, found in measured["kernels"].items():
        for threads, x in found.items():
            predicted = max(x["computing"], x["memory"])
            bound = "computing" if x["computing"] > x["memory"] else "memory"
            rows.append(
                (
                    name,
                    threads,
                    bound,
                    f"{predicted:,.0f}",
                    f"{x['measured']:,.0f}",
                    f"{x['measured'] / predicted:.2f}",
                )
            )
    head = ("", "threads", "bound by", "predicted", "measured, ps an element", "ratio")
    return table(head, rows) + "\n\n" + machine(result)
