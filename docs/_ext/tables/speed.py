"""Tables of steps and kernels: time and bytes."""

from __future__ import annotations

import json
from typing import Any

from tables.sources import RESULTS, load, machine, table

PEERS = {
    "master weights": "PyTorch, float32 master weights",
    "torch bf16, fused": "PyTorch, plain bf16",
    "optimi Kahan, foreach": "optimi, Kahan",
    "torchao stochastic": "torchao, stochastic rounding",
    "torchao 8 bit": "torchao, 8-bit states",
    "heavyball bf16+8": "heavyball, bf16 + 8 bits",
    "pytorch_optimizer Kahan": "pytorch_optimizer, Kahan",
    "pytorch_optimizer Flash 24": "FlashAdamW of pytorch_optimizer, 24 bits",
    "bitsandbytes 32 bit": "bitsandbytes, 32-bit states",
    "bitsandbytes 8 bit": "bitsandbytes, 8-bit states",
    "mcf light, fused": "**mcftensor, light**",
    "mcf plus, fused": "**mcftensor, plus**",
    "mcf full, fused": "**mcftensor, full**",
    "mcf exact, fused": "**mcftensor, exact**",
    "mcf compact, fused": "**mcftensor, compact**",
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
    """What a step costs; the fastest over one large tensor first."""
    one, gpt, many = (contenders(w) for w in ("one tensor", "GPT-2", "many tensors"))
    rows = [
        (name, rounded(held(key)), *(ratio(w.get(key)) for w in (one, gpt, many)))
        for key, name in sorted(PEERS.items(), key=lambda item: one[item[0]]["ratio"])
    ]
    head = ("AdamW", "bytes a parameter", "one tensor", "GPT-2", "2,000 tensors")
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
    """Fused AdamW of PyTorch and of this library over one large tensor, by vectors and threads, and
    over other workloads, as ratios to master weights."""
    found = [load(file)["workloads"]["one tensor"]["contenders"] for file in CLASSES.values()]
    found.append(contenders("GPT-2"))
    many = (f"{CLASSES[name]}-many" for name in ("AVX-512, 2 threads", "AVX2, 2 threads"))
    found += [load(file)["workloads"]["many tensors"]["contenders"] for file in many]
    left_out = ("mcf none, fused", "torch fp32, fused")
    shown = [
        key for key in found[0]
        if _is_own(key) and ("fused" in key or key.startswith("master")) and key not in left_out
    ]  # fmt: skip
    rows = [
        (
            named(key).replace(", fused", ""),
            rounded(held(key)),
            *(_of_master(key, x) for x in found),
        )
        for key in sorted(shown, key=lambda key: found[0][key]["ratio"])
    ]
    classes = [name.replace("AVX", "one tensor, AVX") for name in CLASSES]
    others = ("GPT-2, AVX-512", "2,000 tensors, AVX-512", "2,000 tensors, AVX2")
    head = ("fused AdamW", "bytes a parameter", *classes, *others)
    return table(head, rows) + "\n\n" + _of_columns("steps-cpu", "cpu_capability", "threads")


def short(key: str) -> str:
    """A contender of a table in which all steps are fused."""
    return named(key).replace(", fused", "")


def _of_master(key: str, found: dict[str, Any]) -> str:
    """The ratio, and of master weights themselves the time."""
    if key == "master weights":
        return f"{1000 * found[key]['seconds']:.0f} ms"
    return ratio(found.get(key))


CLASSES = {
    "AVX-512, 2 threads": "steps-cpu",
    "AVX-512, 1 thread": "steps-cpu-1-thread",
    "AVX2, 2 threads": "steps-cpu-avx2",
    "AVX2, 1 thread": "steps-cpu-avx2-1-thread",
}
"""Runs over one large tensor, by the vectors that PyTorch and the kernels use."""


def _of_columns(file: str, *varied: str) -> str:
    """The machine of a table whose columns differ in some of its settings."""
    same = {name: x for name, x in load(file)["machine"].items() if name not in varied}
    return machine({"machine": same})


def states() -> str:
    """What moments of one byte lose, and those of others."""
    result = load("states")
    rows = []
    scenarios = ("one size", "beta2 0.999", "beta2 0.95", "one gradient x 3000", "2 % not zero")
    for name, found in result["moments"].items():
        if "emulated" in name or name.endswith(("foreach", "for-loop")) or "stochastic" in name:
            continue  # as the classes themselves, and as fused
        cells = []
        for x in map(found.get, scenarios):
            moment = "" if x["second_moment"] is None else f" ({x['second_moment']:.2f})"
            cells.append(lost(x) + moment)
        rows.append((name, f"{result['bytes'][name]:g}", *cells))
    head = ("moments", "bytes of both", *scenarios)
    return table(head, rows) + "\n\n" + machine(result)


def lost(x: dict[str, Any]) -> str:
    """The error of the movement of weights, and the largest update."""
    largest = f"{x['largest']:,.0f}" if x["largest"] >= 100 else f"{x['largest']:.2f}"
    return f"{x['displacement']:.3f}, {largest}"


def floors() -> str:
    """What ideal second moments lose, and those of four bits."""
    result = load("floor")
    names = {
        "q4, ue4": "`q4`, `ue4`",
        "exact, ue4": "exact, `ue4`",
        "q4, ideal": "`q4`, ideal",
        "exact, ideal": "exact, ideal",
        "exact, ideal of 5 bits": "exact, ideal of 5 bits",
    }
    scenarios = ("one size", "beta2 0.999", "beta2 0.95", "one gradient x 3000", "2 % not zero")
    found = result["moments"]
    rows = [(text, *map(lost, map(found[name].get, scenarios))) for name, text in names.items()]
    return table(("first moments, second moments", *scenarios), rows) + "\n\n" + machine(result)


def memory_of_training() -> str:
    """The whole training by windows, and what it is of master weights."""
    result = load("train-memory")
    windows = sorted(result["windows"], key=lambda w: [int(x) for x in w.split("x")])
    rows = []
    for name in result["windows"][windows[0]]:
        cells = []
        for window in windows:
            found = result["windows"][window]
            own, base = found[name]["resident"], found["master"]["resident"]
            share = f" ({100 * (own / base - 1):+.0f} %)".replace("-", "−")
            cells.append(f"{own / 1e9:.2f} GB" + (share if name != "master" else ""))
        rows.append(({"master": "float32 masters", "bf16": "plain bf16"}.get(name, name), *cells))
    head = [window.replace("x", " × ").replace("1024", "1,024") for window in windows]
    return table(("windows × tokens", *head), rows) + "\n\n" + machine(result)


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


def same_path() -> str:
    """Steps over expansions by the path of PyTorch's, over that, on two classes of processors."""
    result, narrow = load("same-path"), load("same-path-avx2")
    kinds = ("plus", "compact")
    rows = [
        (what, *(f"{x['ratios'][what][kind]:.1f}" for x in (result, narrow) for kind in kinds))
        for what in result["ratios"]
    ]
    head = ("", *(f"{kind}, {name}" for name in ("AVX-512", "AVX2") for kind in kinds))
    return table(head, rows) + "\n\n" + _of_columns("same-path", "cpu_capability")


def overhead() -> str:
    """What parameters that are expansions add to the functions of models."""
    result = load("overhead")
    rows = []
    for name in ("linear", "linear with bias", "layer_norm", "embedding", "slice and addition"):
        found = [result["microseconds"][x] for x in (name, f"{name}, no gradients")]
        rows.append((name, *(f"{x['expansions'] / x['bf16']:.2f}" for x in found)))
    for name, found in result["seconds"].items():
        rows.append((f"GPT-2, {name}", f"{found['expansions'] / found['bf16']:.2f}", "–"))
    head = ("expansions over plain bf16", "with gradients", "without")
    return table(head, rows) + "\n\n" + machine(result)


def roofline() -> str:
    """By what kernels are bound on processors that were not there."""
    result = load("roofline")
    left_out = ("EPYC 7763 (Zen 3)", "Xeon Platinum 8380 (Ice Lake)")
    names = [p["name"] for p in result["processors"] if p["name"] not in left_out]
    rows = []
    for name, found in result["kernels"].items():
        if name in ("product of bf16x2", "float32 to bf16x2", "SGD light", "AdamW full"):
            continue  # like their neighbours
        ratios = [found["processors"][p] for p in names]
        cells = [f"{x['computing'] / x['memory']:.2f}" for x in ratios]
        moved = found["read"] + found["written"]
        rows.append((name, f"{moved:.4g}", *[f"**{c}**" if float(c) > 1 else c for c in cells]))
    return table(("", "bytes", *(n.replace(" (", "<br>(") for n in names)), rows)


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


def sums() -> str:
    """Time of exact sums over that of torch.sum, by one thread."""
    result = load("sums")
    names = {
        "torch.sum": "`torch.sum`, ms",
        "mcf.exact.sum": "**`mcf.exact.sum`**",
        "mcf.exact.norm": "**`mcf.exact.norm`**",
        "torch.linalg.vector_norm": "`vector_norm`",
        "torch.sum, float64": "`torch.sum`, in float64",
        "math.fsum, of a list": "`math.fsum`",
    }
    rows = []
    for found in result["sums"]:
        if found["threads"] > 1 or found["size"] in (10**4, 10**6, 10**8):
            continue
        spread = ", all exponents" if found["terms"] == "wide" else ""
        times = [found["contenders"].get(name) for name in names]
        figures = [f"{1e3 * times[0]['seconds']:.3f}", *map(ratio, times[1:])]
        power = _SUPERSCRIPTS[len(str(found["size"])) - 1]
        rows.append((f"{found['type']}, 10{power}{spread}", *figures))
    return f"{table(('terms', *names.values()), rows)}\n\n{machine(result, 'One thread. ')}"


def products() -> str:
    """Time of matrix products over that of float64, by one thread."""
    result = load("products")
    names = {
        "fp64x2": "**`fp64x2`**",
        "fp32x3": "**`fp32x3`**",
        "xprec": "xprec",
        "numpy-quaddtype": "numpy-quaddtype",
        "mpmath": "mpmath",
    }
    rows = []
    for found in result["products"]:
        times = [found["contenders"].get(name) for name in names]
        size, base = found["size"], found["contenders"]["float64"]
        rows.append((f"{size} x {size}", f"{1e3 * base['seconds']:.3f} ms", *map(ratio, times)))
    return f"{table(('', 'float64', *names.values()), rows)}\n\n{machine(result, 'One thread. ')}"


_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸"
