"""Tables of steps and kernels: time and bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from machine_code.catalogue import group_of
from tables.sources import RESULTS, load, machine, table

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


CLASSES = {
    "AVX-512, 2 threads": "steps-cpu",
    "AVX-512, 1 thread": "steps-cpu-1-thread",
    "AVX2, 2 threads": "steps-cpu-avx2",
    "AVX2, 1 thread": "steps-cpu-avx2-1-thread",
}
"""Runs over one large tensor, by the vectors that PyTorch and the kernels use."""


def steps_by_vectors() -> str:
    """Fused AdamW over one large tensor, by the width of vectors and by threads."""
    found = {name: load(file)["workloads"] for name, file in CLASSES.items()}
    every = [workload["one tensor"]["contenders"] for workload in found.values()]
    many = [load(f"{CLASSES[name]}-many")["workloads"]["many tensors"]["contenders"]
            for name in ("AVX-512, 2 threads", "AVX2, 2 threads")]  # fmt: skip
    shown = [
        key for key in every[0] if _is_own(key) and all(ratio(x.get(key)) != "–" for x in every)
    ]
    rows = [
        (named(key).strip("*"), *(ratio(x.get(key)) for x in (*every, *many)))
        for key in sorted(shown, key=lambda key: every[0][key]["ratio"])
    ]
    head = ("", *CLASSES, "2,000 tensors, AVX-512", "2,000 tensors, AVX2")
    return table(head, rows) + "\n\n" + _of_columns("steps-cpu", "cpu_capability", "threads")


def _of_columns(file: str, *varied: str) -> str:
    """The machine of a table whose columns differ in some of its settings."""
    same = {name: x for name, x in load(file)["machine"].items() if name not in varied}
    return machine({"machine": same})


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


def memory_of_training() -> str:
    """The whole training by windows, and what it is of master weights."""
    result = load("train-memory")
    blocks = []
    kinds = {"resident": "the process", "allocated": "PyTorch's allocator"}
    windows = sorted(result["windows"], key=lambda w: [int(x) for x in w.split("x")])
    for kind, words in kinds.items():
        rows = []
        for name in result["windows"][windows[0]]:
            cells = []
            for window in windows:
                found = result["windows"][window]
                own, base = found[name][kind], found["master"][kind]
                share = f"{100 * (own / base - 1):+.0f} %".replace("-", "−")
                cells.append(f"{own / 1e9:.2f} GB" + (f" ({share})" if name != "master" else ""))
            rows.append(
                ({"master": "float32 masters", "bf16": "plain bf16"}.get(name, name), *cells)
            )
        head = [window.replace("x", " × ").replace("1024", "1,024") for window in windows]
        blocks.append(table((words, *head), rows))
    return "\n\n".join(blocks) + "\n\n" + machine(result)


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


def first_steps() -> str:
    """Milliseconds until kernels are there."""
    result = load("first-steps")
    rows = [
        (
            named(name),
            *(f"{1000 * seconds:.{0 if seconds > 0.02 else 1}f}" for seconds in x.values()),
        )
        for name, x in result["contenders"].items()
    ]
    head = ("", "no compiled code, ms", "compiled code at hand, ms", "later steps, ms")
    return table(head, rows) + "\n\n" + machine(result)


def same_path() -> str:
    """Steps over expansions by the path of PyTorch's, over that, on two classes of processors."""
    result, narrow = load("same-path"), load("same-path-avx2")
    kinds = ("plus", "exact", "compact")
    rows = [
        (what, *(f"{x['ratios'][what][kind]:.1f}" for x in (result, narrow) for kind in kinds))
        for what in result["ratios"]
    ]
    head = ("", *(f"{kind}, {name}" for name in ("AVX-512", "AVX2") for kind in kinds))
    return table(head, rows) + "\n\n" + _of_columns("same-path", "cpu_capability")


def threads() -> str:
    """Steps by the number of threads and processes."""
    result = load("threads")
    rows = [
        (way, *(f"{1000 * x['seconds']:.1f} ({x['ratio']:.2f})" for x in found.values()))
        for way, found in result["ways"].items()
    ]
    names = [named(name).strip("*") for name in next(iter(result["ways"].values()))]
    return table(("", *names), rows) + "\n\n" + machine(result)


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


def compiled_kernels() -> str:
    """Registers, occupancy, and widths of accesses of kernels compiled without a device."""
    targets = load("gpu-kernels")["targets"]
    rows = []
    for group in sorted({group_of(name) for kernels in targets.values() for name in kernels}):
        of_group = [
            [x for name, x in kernels.items() if group_of(name) == group and "failed" not in x]
            for kernels in targets.values()
        ]
        cells = [_registers(found) for found in of_group]
        widths = [_widths(kind, itertools.chain(*of_group)) for kind in ("loads", "stores")]
        rows.append((group, f"{max(map(len, of_group))}", *widths, *cells))
    faults = [
        f"{sum('failed' in x or bool(x['faults']) for x in kernels.values())} of {len(kernels)}"
        for kernels in targets.values()
    ]
    heads = ("", "kernels", "bytes a load", "bytes a store", *targets)
    return table(heads, [*rows, ("with a fault", *"–––", *faults)])


def _registers(kernels: list[dict[str, Any]]) -> str:
    """The most of a thread, and the least occupancy."""
    if not kernels:
        return "–"
    most, least = max(x["registers"] for x in kernels), min(x["occupancy"] for x in kernels)
    return f"{most} ({100 * least:.0f} %)"


def _widths(kind: str, kernels: Iterable[dict[str, Any]]) -> str:
    """The widths of a thread's loads or stores, in bytes."""
    return ", ".join(map(str, sorted({width for x in kernels for width in x[kind]}))) or "–"


def gpus() -> str:
    """What was measured on devices: a row each."""
    rows = [_device(json.loads(x.read_text())) for x in sorted((RESULTS / "gpu").glob("*.json"))]
    head = (
        "", "memory", "torch", "self-check", "plus, of copy bandwidth", "plus, over master weights",
        "tokens a second, plus over autocast", "peak memory, plus over autocast", "measured by",
    )  # fmt: skip
    return table(head, rows) if rows else "*No device has been measured yet.*"


def _device(result: dict[str, Any]) -> tuple[str, ...]:
    found, stages = result["device"], result["stages"]
    figures = {name: x.get("figures", {}) for name, x in stages.items()}

    def steps(workload: str, key: str) -> float | None:
        contenders = figures.get("steps", {}).get("workloads", {}).get(workload, {})
        value: float | None = contenders.get("contenders", {}).get("mcf plus, fused", {}).get(key)
        return value

    def training(key: str) -> float | None:
        both = figures.get("training", {}).get("strategies", {})
        values = [both.get(name, {}).get(key) for name in ("plus", "autocast")]
        return values[0] / values[1] if all(values) else None

    def shown(x: float | None) -> str:
        return "–" if x is None else f"{x:.2f}"

    share = steps("one tensor", "share_of_limit")
    passed = stages["selfcheck"]["status"] == 0 and stages["tests"]["status"] == 0
    return (
        found["name"],
        f"{found['memory'] / 2**30:.0f} GiB",
        result["machine"]["torch"],
        "passed" if passed else "**failed**",
        "–" if share is None else f"{100 * share:.0f} %",
        shown(steps("GPT-2", "ratio")),
        shown(training("tokens_a_second")),
        shown(training("peak_bytes")),
        result["by"] or "–",
    )


def fewer_instructions() -> str:
    """Instructions of steps, before and after."""
    result = load("roofline")
    rows = []
    for name in ("AdamW light", "AdamW plus", "AdamW full", "SGD light"):
        old, new = (result[when][name]["instructions"] for when in ("before", "kernels"))
        rows.append((name, *(f"{old[c]:.1f} → {new[c]:.1f}" for c in ("AVX-512", "AVX2", "sm_90"))))
    return table(
        ("", *(f"{c}, instructions an element" for c in ("AVX-512", "AVX2", "sm_90"))), rows
    )


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


def sums() -> str:
    """Time of exact sums over that of torch.sum, by one thread."""
    result = load("sums")
    names = {
        "torch.sum": "`torch.sum`, ms",
        "mcf.exact.sum": "**`mcf.exact.sum`**",
        "mcf.exact.norm": "**`mcf.exact.norm`**",
        "torch.linalg.vector_norm": "`vector_norm`",
        "torch.sum, float64": "`torch.sum`, in float64",
        "numpy.sum": "`numpy.sum`",
        "math.fsum, of a list": "`math.fsum`",
        "xprec, double-double": "xprec",
    }
    rows = []
    for found in result["sums"]:
        if found["threads"] > 1:
            continue
        spread = ", all exponents" if found["terms"] == "wide" else ""
        times = [found["contenders"].get(name) for name in names]
        figures = [f"{1e3 * times[0]['seconds']:.3f}", *map(ratio, times[1:])]
        power = _SUPERSCRIPTS[len(str(found["size"])) - 1]
        rows.append((f"{found['type']}, 10{power}{spread}", *figures))
    return f"{table(('terms', *names.values()), rows)}\n\n{machine(result, 'One thread. ')}"


def products() -> str:
    """Time of matrix products over that of float64, and errors, by one thread."""
    result = load("products")
    names = {
        "fp64x2": "**`fp64x2`**",
        "fp32x3": "**`fp32x3`**",
        "xprec": "xprec",
        "numpy-quaddtype": "numpy-quaddtype",
        "mpmath": "mpmath",
        "fp32x2": "`fp32x2`, in float64",
        "bf16x3": "`bf16x3`, in float64",
    }
    rows = []
    for found in result["products"]:
        times = [found["contenders"].get(name) for name in names]
        errors = ["–" if x is None else f"2^{x['error']:.1f}" for x in times]
        size, base = found["size"], found["contenders"]["float64"]
        head = f"{size} x {size}"
        rows.append((f"{head}: time", f"{1e3 * base['seconds']:.3f} ms", *map(ratio, times)))
        rows.append((f"{head}: error", f"2^{base['error']:.1f}", *errors))
    return f"{table(('', 'float64', *names.values()), rows)}\n\n{machine(result, 'One thread. ')}"


_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸"
