"""What deltas cost: the time to take and apply them, and the bytes of deltas and of incremental
checkpoints.

Run: `python benchmarks/delta_cost.py > benchmarks/results/delta_cost.json`
"""

import functools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import mcftensor as mcf

ELEMENTS = 1 << 20
FORMATS = [mcf.bf16x2, mcf.bf16i16, mcf.bf16i8, mcf.fp16i16]
RATES = [1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4]
STEPS = 10
INCREMENTS = [
    ("bf16x2", mcf.bf16x2, None),
    ("bf16i8", mcf.bf16i8, None),
    ("bf16i8, compact", mcf.bf16i8, "compact"),
]


def stepping(format, lr):
    """A weight of size 0.02, as of a matrix of 2,500 columns, with gradients of noise."""
    torch.manual_seed(0)
    weight = torch.randn(ELEMENTS) * 0.02
    p = torch.nn.Parameter(
        weight.bfloat16() if format is None else mcf.as_expansion(weight, format)
    )
    return p, torch.optim.AdamW([p], lr=lr, fused=True, weight_decay=0.01)


def seconds(function, results=None):
    """CPU time of this thread in a call, whose result is appended to a list."""
    before = time.thread_time()
    result = function()
    taken = time.thread_time() - before
    if results is not None:
        results.append(result)
    return taken


def cost(format):
    """Medians of the time of a step, of `take` and of its use."""
    p, optimizer = stepping(format, 1e-5)
    server = {"weight": p.detach().components[0].clone()}
    deltas = mcf.deltas(optimizer, names=[("weight", p)])
    times = {"step": [], "take": [], "apply": []}
    for i in range(10 * STEPS):
        p.grad = torch.randn(ELEMENTS).to(p.dtype)
        found = {"step": seconds(optimizer.step)}
        found["take"] = seconds(deltas.take, chain := [])
        found["apply"] = seconds(functools.partial(mcf.apply_deltas, server, chain))
        if i >= 4:  # kernels are compiled, and memory is there
            for name, x in found.items():
                times[name].append(x)
    medians = {name: statistics.median(x) for name, x in times.items()}
    return {
        "milliseconds": {name: round(1e3 * x, 3) for name, x in medians.items()},
        "take": round(medians["take"] / medians["step"], 4),
        "apply": round(medians["apply"] / medians["step"], 4),
    }


def size(format, lr):
    """Of the deltas of late steps, the share of elements and of bytes, beside EDQ."""
    p, optimizer = stepping(format, lr)
    deltas, edq = mcf.deltas(optimizer), mcf.EDQ(optimizer, every=1)
    shares, sizes, ratios = [], [], []
    for i in range(STEPS):
        p.grad = torch.randn(ELEMENTS).to(p.dtype)
        optimizer.step()
        delta = deltas.take()
        if i >= STEPS // 2:
            shares.append(delta.changed / delta.elements)
            sizes.append(delta.nbytes / (2 * delta.elements))
            ratios.append(edq.last["ratio"])
    return {
        "changed": round(statistics.mean(shares), 5),
        "bytes": round(statistics.mean(sizes), 5),
        "edq": round(statistics.mean(ratios), 4),
    }


def increment(format, mode, lr):
    """Of a file of what changed in ten steps, its bytes and CPU time over those of a whole one."""
    p, optimizer = stepping(format, lr)
    if mode is not None:
        mcf.collage(optimizer, mode)

    def run():
        for _ in range(STEPS):
            p.grad = torch.randn(ELEMENTS).to(p.dtype)
            optimizer.step()

    def save(path, since=None, *, states=True):
        own = {k: x for k, x in optimizer.state[p].items() if x.dim()} if states else {}
        taken = seconds(lambda: mcf.save_file({"weight": p, **own}, path, since=since))
        return path.stat().st_size, taken

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(f"{folder}/{i}.safetensors") for i in range(4)]
        run()
        weight, whole = save(paths[0], states=False), save(paths[1])
        run()
        part, parts = save(paths[2], paths[0], states=False), save(paths[3], paths[1])
    return {
        "weights": round(part[0] / weight[0], 4),
        "with states": round(parts[0] / whole[0], 4),
        "time": round(parts[1] / whole[1], 3),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {
        "elements": ELEMENTS,
        "cost": {x.name: cost(x) for x in FORMATS},
        "size": {
            "bf16" if x is None else x.name: {str(lr): size(x, lr) for lr in RATES}
            for x in (None, mcf.bf16x2, mcf.bf16i8)
        },
        "increments": {
            name: {str(lr): increment(x, mode, lr) for lr in RATES} for name, x, mode in INCREMENTS
        },
    }
    print(json.dumps(found, indent=2))
