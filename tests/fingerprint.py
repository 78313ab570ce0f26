"""A fingerprint of the library: digests of the bits that every operation gives.

`python tests/fingerprint.py` compares this tree with `fingerprint.json` and lists the results that
differ; `--write` writes the file anew, or the groups that are named. Only what has the same bits
everywhere is in it: no sums of many elements, and no functions of a maths library. One NaN is as
good as another.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import operator
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import mcftensor as mcf
from fingerprint_inputs import number, plain, terms

FILE = Path(__file__).with_suffix(".json")

BASES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LONGER = tuple(mcf.Format.from_name(n) for n in ("bf16x4", "fp16x3", "fp32x4", "fp64x3"))
STOCHASTIC = tuple(
    mcf.Format(f.base, f.terms, rounding="stochastic")
    for f in (mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2)
)
FORMATS = (*mcf.formats.FORMATS, *LONGER, *STOCHASTIC)
STORED = (
    *(mcf.bf16i16, mcf.bf16i8, mcf.bf16i8.nearest, mcf.bf16i8.with_rounding("stochastic")),
    mcf.Format(torch.bfloat16, 1, rounding="balanced"),
)
IN_BLOCKS = tuple(
    f.with_rounding(rounding)
    for f in (mcf.mxfp8, mcf.ue5m3, mcf.q4, mcf.ue4, mcf.e4m3i8, mcf.e4m3i16)
    for rounding in ("balanced", "nearest", "stochastic")
)
BALANCED = tuple(f.with_rounding("balanced") for f in (mcf.bf16x2, mcf.fp32x2))

Results = Iterator[tuple[str, Any]]


# ------------------------------------------------------------------------------------- digests


def digest(result: Any) -> str:
    """A digest of all bits, shapes, dtypes and formats in a tree of results."""
    state = hashlib.blake2b(digest_size=4)
    for leaf in tree_leaves(result):
        if not isinstance(leaf, Tensor):
            state.update(repr(leaf).encode())
            continue
        is_expansion = isinstance(leaf, mcf.MCFTensor)
        state.update(leaf.format.name.encode() if is_expansion else b"plain")
        if is_expansion and leaf.writes is not None:
            state.update(repr(leaf._writes.item()).encode())  # and the salt
        for term in leaf.components if is_expansion else [leaf]:
            state.update(f"{term.dtype} {tuple(term.shape)}".encode())
            state.update(_bits(term.detach()))
    return state.hexdigest()


def _bits(x: Tensor) -> bytes:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    patterns = x.contiguous().view(kinds[x.dtype.itemsize])
    if x.is_floating_point():
        patterns = patterns.masked_fill(x.isnan(), -1)
    return patterns.numpy().tobytes()


# ---------------------------------------------------------------------------------- expressions

# Of x and everything that it may meet.
BINARY = """\
x + y, y + x
x - y, y - x
x * y, y * x
x / y, y / x
x.clone().add_(y), x.clone().sub_(y), x.clone().mul_(y), x.clone().div_(y)
x == y, x != y, x < y, x <= y, x > y, x >= y
torch.where(mask, x, y), torch.where(mask, y, x)""".splitlines()

ELEMENTWISE = """\
x.add(y, alpha=0.3), x.sub(y, alpha=-3), torch.rsub(x, y, alpha=0.3)
x.add_(plain, alpha=-1e-3), y.sub_(z, alpha=0.1)
1 - x, 0.1 / x
x.sqrt(), x.abs().sqrt_(), x.abs() ** 0.5
x.square(), x**2, x**3, x.square_()
x.reciprocal(), x**-1, x.reciprocal_()
x.addcmul(y, z), x.addcmul(y, plain, value=0.001), x.addcmul(plain, plain, value=-3)
x.addcmul_(plain, plain, value=1 - 0.999), y.addcmul_(y, z, value=0.1)
x.addcdiv(y, z), x.addcdiv(plain, z, value=-0.01), x.addcdiv(y, plain, value=0.3)
x.addcdiv_(y, z, value=-0.01), y.addcdiv_(plain, y)
x.lerp(y, 0.1), x.lerp(plain, 0.999), x.lerp(y, z)
x.lerp_(plain, 0.1), y.lerp_(z, 0.7)
mcf.fma(x, y, z), mcf.fma(x, 0.1, 3), mcf.fma(plain, x, y), mcf.fma(0.1, plain, x)
torch.add(x, y, out=z), torch.mul(x, y, out=plain), torch.div(x, y, out=y)
x.add_(x), y.mul_(y), z.add_(z.flip(0))
x[1:].add_(x[:-1]), x
x[::2, 1::3] * y[::2, 1::3], x.t()[::2].mul_(0.999), x
x + y[:1].expand_as(x), y[:, :1] * x
x.abs(), -x, x.neg_(), y.abs_(), x.signbit(), x.sign()
torch.maximum(x, y), torch.minimum(x, plain), torch.maximum(y, x)
x.clamp(-0.1, 0.7), x.clamp(min=y), x.clamp_(max=1.1), y.clamp_min(0.3)
torch.nextafter(x, y), torch.nextafter(x, -x)
x.isnan(), x.isinf(), x.isfinite(), torch.equal(x, x.clone()), torch.equal(x, y)
x.floor(), x.ceil(), x.round(), x.trunc()
x.relu(), x.relu_()
torch.where(mask, x, 1.2), torch.where(mask, 0.1, x)
x.masked_fill(mask, 0.1), x.masked_fill_(mask, -1 / 3)
x.fill_(0.1), y.zero_(), z.fill_(torch.tensor(1 / 3))""".splitlines()

ORDER = """\
x.sort(dim=1, stable=True), x.sort(dim=0, stable=True, descending=True)
x.topk(5, dim=1).values, x.kthvalue(3, dim=1).values
x.max(), x.min(), x.amax(dim=1), x.amin(dim=0), x.aminmax()
x.median(), x.nanmedian(dim=1).values
x.cummax(dim=1).values, x.cummin(dim=0).values
torch.cat([finite, finite.flip(0)]).unique()""".splitlines()

STRUCTURE = """\
torch.cat([x, y]), torch.cat([x, plain], 1), torch.stack([x, y])
x.t(), x[3], x[:, 2:9:2], x.view(-1), x.chunk(3), x[None], x.unbind(1)
x.clone(), x.flip(0), x.roll(3), x.repeat(2, 1), x.tril(), x.detach(), x.contiguous()
x[indices], x[mask], x.index_select(0, indices), x.gather(1, mask.long())
operator.setitem(x, mask, 0.1), operator.setitem(y, indices, z[indices]), x, y
x.index_put((indices,), y[indices]), x.index_put_((indices,), plain[indices], accumulate=True)
x.index_copy(0, indices, y[indices])
torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 0.1)
x.new_zeros(3), x.new_full((3,), 1 / 3), x.new_ones(2, 2), x.new_tensor([0.1])
F.pad(x, (1, 2)), F.pad(x, (1, 2), value=0.1), F.pad(x[None], (1, 2), mode="reflect")
x[1, 1].item(), y.flatten()[3:7].tolist(), torch.from_numpy(x.numpy())""".splitlines()

PARAMETER = """\
p * 0.999, p + 1, p - p, p.detach().lerp(p.detach(), 0.1)
p * plain, plain - p, torch.cat([p, plain])
p * x, torch.where(mask, p, x)
p.clone(), p.detach() + 1, torch.zeros_like(p), p[1:3]
torch.autograd.grad((p * plain).sum(), p)
mcf.as_plain(p), mcf.as_plain(p, torch.float64), p.to(torch.float64)""".splitlines()

# Of what follows, nothing is recorded for autograd, so that results may wait until they are read.
DEFERRED = """\
y / (x.square().sqrt() / 0.3 + 1e-8) - 1
x.addcdiv_(y, z.abs().sqrt().add_(1), value=-0.01)
x.mul(0.9).add_(y, alpha=0.1).copy_(z), x.lerp(y, 0.1).lerp_(z, 0.1)
p.mul_(0.999).add_(plain, alpha=-0.01), p.lerp_(x, 0.1), p.copy_(z)
torch._foreach_add(xs, ys), torch._foreach_add(xs, gs, alpha=0.1), torch._foreach_sub(xs, 0.1)
torch._foreach_mul(xs, ys), torch._foreach_mul(xs, torch.tensor(0.9)), torch._foreach_neg(xs)
torch._foreach_div(xs, ys), torch._foreach_div(xs, [0.1, 3.0, 7.0]), torch._foreach_abs(xs)
torch._foreach_sqrt(xs), torch._foreach_maximum(xs, ys), torch._foreach_minimum(xs, 0.1)
torch._foreach_lerp(xs, ys, 0.1), torch._foreach_lerp(xs, gs, 0.9)
torch._foreach_addcmul(xs, gs, ys, 0.1), torch._foreach_addcdiv(xs, ys, gs, [0.1, -1e-3, 3.0])
torch._foreach_mul_(xs, 0.999), torch._foreach_add_(xs, gs, alpha=-0.1), xs
torch._foreach_lerp_(xs, ys, 0.1), torch._foreach_addcmul_(xs, gs, gs, 1 - 0.999), xs
torch._foreach_sqrt_(ys), torch._foreach_addcdiv_(xs, gs, ys, -0.01), xs, ys
torch._foreach_copy_(xs, gs), torch._foreach_zero_(ys), xs, ys""".splitlines()

# Of terms a, b and c.
ON_TERMS = """\
expansion.add(a, b, format=format), expansion.add(a, (c[0].double(),), format=format)
expansion.grow(a, c[0], format=format)
expansion.mul(a, b, format=format), expansion.mul(a, b[:1], format=format)
expansion.fma(a, b, c, format=format), expansion.fma(a, b[:1], c[:1], format=format)
expansion.div(a, b, format=format)
expansion.sqrt(a, format=format)
expansion.expand(c[0].double() * 1.1, format)
[expansion.collapse(a, dtype) for dtype in BASES]""".splitlines()

# Of plain tensors a, b and c.
TRANSFORMATIONS = """\
eft.two_sum(a, b)
eft.fast_two_sum(torch.where(a.abs() < b.abs(), b, a), torch.where(a.abs() < b.abs(), a, b))
eft.split(a)
eft.two_prod(a, b)
eft.fma(a, b, c), eft.fma(a, b, -(a * b))
eft.sqrt(a.abs())
expansion.renormalize((c, a, b)), expansion.renormalize((c, a, b), 2)""".splitlines()

# Of as many elements as make compiled code worth its while, where there is a compiler.
LARGE = {
    "bf16x2": ("x + y", "x * y", "x / y", "x.sqrt()", "x.lerp(y, 0.1)", "x.addcdiv(y, z)"),
    "bf16x3": ("x.addcmul(y, z)", "x.lerp(y, 0.1)"),
    "fp16x2": ("x * y", "x / y", "x / (y.square().sqrt() / 0.3 + 1e-8)"),
    "fp32x2": ("x + y", "x * y", "x.sqrt()"),
    "fp32x3": ("x + y",),
    "fp64x2": ("x + y", "x * y"),
    "bf16x4": ("x + y",),
    "bf16x2sr": ("x + y", "x.lerp(y, 0.1)"),
    "fp32x2sr": ("x + y",),
}

SHAPE, SHAPES, LARGE_SHAPE = (24, 16), ((7,), (40, 33), ()), (1 << 20,)
MODULES = {"torch": torch, "mcf": mcf, "F": F, "operator": operator, "BASES": BASES}
MODULES |= {"expansion": mcf.expansion, "eft": mcf.eft}


def attempt(name: str, function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """A function's result, or the type of the exception that says it is not to be had."""
    torch.manual_seed(1)
    try:
        return name, function(*args)
    except (NotImplementedError, TypeError, ValueError) as error:
        return name, type(error).__name__


def evaluated(expression: str, names: dict[str, Any]) -> tuple[str, Any]:
    return attempt(expression, lambda: eval(f"({expression})", MODULES | names))


def operands(format: mcf.Format) -> dict[str, Any]:
    """What expressions are about, made anew for each."""
    x, y, z = (number(format, *SHAPE, seed=s) for s in "xyz")
    for a, b in zip(x.components, y.components, strict=True):
        b[::5] = 0 - a[::5]  # what cancels, but for the last terms
    y.components[-1][::5] = 0
    return {
        "x": x,
        "y": y,
        "z": z,
        "p": nn.Parameter(number(format, *SHAPE, seed="p")),
        "finite": number(format, *SHAPE, wide=False),
        "plain": plain(format.dtype, *SHAPE),
        "mask": plain(format.dtype, *SHAPE, seed="mask") > 0,
        "indices": torch.arange(0, SHAPE[0], 3),
        "xs": [number(format, *shape, seed=f"x{shape}") for shape in SHAPES],
        "ys": [number(format, *shape, seed=f"y{shape}") for shape in SHAPES],
        "gs": [plain(format.dtype, *shape, seed=f"g{shape}") for shape in SHAPES],
    }


def partners(format: mcf.Format) -> dict[str, Callable[[], Any]]:
    """What x meets in binary operations, made anew for each."""
    other = mcf.Format(format.base, 5 - min(format.terms, 3))
    return {
        "expansion": lambda: operands(format)["y"],
        "transposed": lambda: number(format, *SHAPE[::-1], seed="t").t(),
        "row": lambda: number(format, SHAPE[1], seed="row"),
        "0-d expansion": lambda: number(format, seed="0-d", wide=False),
        "other": lambda: number(other, *SHAPE, seed="other"),
        "base": lambda: plain(format.dtype, *SHAPE),
        "float32": lambda: plain(torch.float32, *SHAPE),
        "float64": lambda: plain(torch.float64, *SHAPE),
        "0-d": lambda: plain(torch.float64, seed="0-d", wide=False),
        "int64": lambda: plain(torch.int64, *SHAPE),
        "number": lambda: 0.1,
        "integer": lambda: -3,
    }


def binary(format: mcf.Format) -> Results:
    for expression, (partner, make) in product(BINARY, partners(format).items()):
        name, result = evaluated(expression, operands(format) | {"y": make()})
        yield f"{partner}: {name}", result


def expressions(format: mcf.Format, lines: list[str], recorded: bool = True) -> Results:
    with torch.set_grad_enabled(recorded):
        for expression in lines:
            yield evaluated(expression, operands(format))


def on_terms(format: mcf.Format) -> Results:
    a, b, c = (terms(format, 400, seed=s) for s in "abc")
    for expression in ON_TERMS:
        yield evaluated(expression, {"a": a, "b": b, "c": c, "format": format})
    for other in FORMATS:
        yield attempt(f"convert/{other.name}", mcf.expansion.convert, a, other)


def transformations(dtype: torch.dtype) -> Results:
    a, b, c = (plain(dtype, 2000, seed=s, wide=False) for s in "abc")
    for expression in TRANSFORMATIONS:
        yield evaluated(expression, {"a": a, "b": b, "c": c})


def large(format: mcf.Format) -> Results:
    names = {s: number(format, *LARGE_SHAPE, seed=s) for s in "xyz"}
    with torch.no_grad():
        yield from (evaluated(expression, names) for expression in LARGE[format.name])


# ------------------------------------------------------------------- conversions, files, modules


def conversions(format: mcf.Format) -> Results:
    x = number(format, *SHAPE)
    for dtype in (*BASES, torch.int32, torch.int64):
        given = plain(dtype, *SHAPE)
        yield attempt(f"from {dtype}", torch.empty_like(x).copy_, given)
        if dtype.is_floating_point:  # of what overflows, processors make different integers
            yield attempt(f"to {dtype}", lambda: (x.to(dtype), mcf.as_plain(x, dtype)))  # noqa: B023
            yield attempt(f"into {dtype}", given.clone().copy_, x)
            yield attempt(f"as_expansion {dtype}", mcf.as_expansion, given, format)
    for other in FORMATS:
        yield attempt(f"to {other.name}", mcf.as_expansion, x, other)
        yield attempt(f"copy to {other.name}", number(other, *SHAPE, seed="y").copy_, x)
    exact = ["0.1", "1/3", "-1e-5", "12345678901234567890123", 2**-30 + 1.0, "-0.0", "inf"]
    yield attempt("exact", mcf.exact.from_exact, exact, format)
    yield attempt("fraction", mcf.exact.to_fraction, number(format, 40, wide=False))


class Model(nn.Module):
    """A parameter and a buffer in a format, and a plain parameter."""

    def __init__(self, format: mcf.Format, seed: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(number(format, 5, 3, seed=seed, wide=False))
        self.plain = nn.Parameter(plain(format.dtype, 5, 3, seed=seed, wide=False))
        self.register_buffer("mean", number(format, 3, seed=seed))


def checkpoints(format: mcf.Format) -> Results:
    model, into, memory = Model(format, "x"), Model(format, "y"), io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    yield "torch", torch.load(memory, weights_only=True)
    tensors = mcf.checkpoint.as_terms(model.state_dict())
    yield "terms", (list(tensors), tensors)
    yield "from terms", mcf.checkpoint.from_terms(tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        mcf.save_file(model, path)
        yield "file", mcf.load_file(path)
        mcf.load_file(path, into)
        yield "file into", into.state_dict()


def accumulation(format: mcf.Format) -> Results:
    model = Model(format, "x")
    mcf.accumulate_gradients(model, format)
    for k in range(5):
        x = plain(format.dtype, 5, 3, seed=f"{k}", wide=False)
        (model.weight * x + model.plain * x).sum().backward()
    yield "gradients", (model.weight.grad, model.plain.grad)


def modules(format: mcf.Format | None) -> Results:
    for overrides in ({}, {"0.weight": mcf.bf16x3, "1.*": None}):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))
        for name, p in model.named_parameters():
            p.data = plain(torch.float32, *p.shape, seed=name, wide=False)
        mcf.as_expansion(model, format, overrides=overrides)
        yield f"{len(overrides)} overrides", model.state_dict()
        yield f"{len(overrides)} overrides, back", mcf.as_plain(model, torch.float32).state_dict()


# -------------------------------------------------------------------------------------- storage

# Of x, which is stored, and of others in the same format, or plain. Where torch computes with
# float32, each is one rounding: of what is more, it makes what suits a processor.
IN_PLACE = """\
x.add_(y)
x.mul_(0.1)
x.div_(y)
x.sub_(plain)
x.clamp_(-0.3, 0.3)
x.copy_(wide)
x.fill_(0.1)
x.zero_().add_(0.1)
x[1:].mul_(0.3)
x.t().mul_(0.3)
x.__setitem__(2, 0.7)
torch._foreach_add_(xs, ys)
torch._foreach_mul_(xs, 0.1)
x + y, x * 0.1, y - plain
x.clone(), x[::2], x.t(), torch.cat([x, y]), torch.zeros_like(x).add_(0.1)
torch.maximum(x, y), x.abs(), -x""".splitlines()


def storage(format: mcf.Format) -> Results:
    """Writes in place, twice each, with what they leave of all operands."""
    for expression in IN_PLACE:
        names: dict[str, Any] = {s: number(format, *SHAPE, seed=s) for s in "xy"}
        for s in "xy":
            names[f"{s}s"] = [number(format, *shape, seed=f"{s}{shape}") for shape in SHAPES]
        names["plain"] = plain(format.dtype, *SHAPE)
        names["wide"] = plain(torch.float64, *SHAPE)
        yield evaluated(expression, names)
        name, again = evaluated(expression, names)
        yield f"{name}, again", (again, names["x"], names["xs"])


def codec(format: mcf.Format) -> Results:
    """Conversions from any bits, and back."""
    for dtype in BASES:
        given = plain(dtype, 3001)
        yield attempt(f"from {dtype}", mcf.as_expansion, given, format)
        yield attempt(f"copy of {dtype}", number(format, 3001).copy_, given)
        yield attempt(f"to {dtype}", mcf.as_plain, number(format, 3001), dtype)
    for other in (*STORED, *BALANCED, mcf.bf16x3):
        yield attempt(f"to {other.name}", mcf.as_expansion, number(format, *SHAPE), other)


# Of rows x and y, and the parameter p.
ROWS = """\
x.mul_(0.9), x.mul_(0.9).add_(plain, alpha=0.01), x
x.lerp_(plain, 0.1), x.addcmul_(plain, plain, value=1 - 0.999), x.copy_(y), x.copy_(plain), x
x.mul_(torch.tensor(0.999)).mul_(0.9), x.zero_(), x
x[3:9], x[indices], x.view(24, 7, 10), x.chunk(3), x.clone(), torch.cat([x, y]), torch.zeros_like(x)
torch._foreach_mul_([x, y], 0.999), torch._foreach_add_([x, y], [plain, plain], alpha=0.1), x, y
F.embedding(indices, p), F.embedding(indices[:3], p), p.t()[3], p * plain.bfloat16()
mcf.as_plain(x), mcf.as_plain(x, torch.float64), x.dequantize(), x + y""".splitlines()


def in_blocks(format: mcf.Format) -> Results:
    """Elements that share scales: from any bits, back, and what steps do to them."""
    sign = torch.abs if format.name.startswith("ue") else torch.positive
    for dtype in BASES:
        yield attempt(f"from {dtype}", mcf.as_expansion, sign(plain(dtype, 24, 70)), format)
    for expression in ROWS:
        rows = {s: sign(plain(torch.float32, 24, 70, seed=s, wide=False)) for s in "xyp"}
        names = {s: mcf.as_expansion(x, format) for s, x in rows.items()}
        if format.computes_as is not None:
            names["p"] = nn.Parameter(names["p"])
        names["plain"] = sign(plain(torch.float32, 24, 70, wide=False))
        names["indices"] = torch.arange(0, 24, 3)
        with torch.no_grad():
            yield evaluated(expression, names)


# ---------------------------------------------------------------------------------- collectives


def collectives() -> Results:
    """Digests of each of two processes."""
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, spawn) as pool:
        ranks = list(pool.map(_on_rank, range(2), [str(Path(folder, "store"))] * 2))
    for rank, results in enumerate(ranks):
        yield from ((f"rank{rank}/{name}", result) for name, result in results)


def _on_rank(rank: int, store: str) -> list[tuple[str, str]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = [(name, digest(result)) for f in FORMATS for name, result in _moved(f, rank)]
    dist.destroy_process_group()
    return results


def _moved(format: mcf.Format, rank: int) -> Results:
    own = number(format, 6, 5, seed=f"{rank}", wide=False)
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        torch.manual_seed(1)
        x = own.clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        yield f"{op}/{format.name}", x
    copy, both = own.clone(), [torch.empty_like(own), torch.empty_like(own)]
    dist.broadcast(copy, 1)
    dist.all_gather(both, own)
    yield f"moves/{format.name}", (copy, both)


# ----------------------------------------------------------------------------------- optimizers


class Mix(NamedTuple):
    """What parameters, states and gradients are."""

    format: mcf.Format
    mode: str | dict[str, mcf.Format | None] | None = None
    gradient: mcf.Format | torch.dtype | None = None  # None: the parameter's dtype


MIXES = {
    **{f"none/{f.name}": Mix(f) for f in FORMATS},
    **{f"{mode}/bf16x2": Mix(mcf.bf16x2, mode) for mode in ("light", "plus", "full")},
    **{f"{mode}/fp32x2": Mix(mcf.fp32x2, mode) for mode in ("light", "plus")},
    "dict/bf16x2": Mix(mcf.bf16x2, {"first": mcf.bf16x3, "second": None}),
    "plus/bf16x3": Mix(mcf.bf16x3, "plus"),
    "plus/bf16x2sr": Mix(STOCHASTIC[0], "plus"),
    "plus/bf16x2/bf16x2 gradients": Mix(mcf.bf16x2, "plus", mcf.bf16x2),
    "full/bf16x3/bf16x2 gradients": Mix(mcf.bf16x3, "full", mcf.bf16x2),
    "full/bf16x2/float32 gradients": Mix(mcf.bf16x2, "full", torch.float32),
    "none/fp32x2/bfloat16 gradients": Mix(mcf.fp32x2, None, torch.bfloat16),
    **{f"none/{f.name}": Mix(f) for f in (*STORED, *BALANCED)},
}

MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}
ADAM = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "eps": 1e-6},
    "amsgrad": {"amsgrad": True, "maximize": True, "weight_decay": 0.01},
    "tensor lr": {"lr": torch.tensor(0.01)},
}
SGD = {
    "plain": {"weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.5, "maximize": True},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "tensor lr": {"momentum": 0.9, "lr": torch.tensor(0.01)},
}
ADAGRAD = {
    "plain": {"initial_accumulator_value": 0.1},
    "decay": {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True},
}
# A class, the names of its states, and its options.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, str], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, MOMENTS, ADAM),
    "adamw": (torch.optim.AdamW, MOMENTS, ADAM),
    "sgd": (torch.optim.SGD, {"first": "momentum_buffer"}, SGD),
    "adagrad": (torch.optim.Adagrad, {"second": "sum"}, ADAGRAD),
}
PATHS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class RefusedByTorch(Exception):
    """A gradient of another dtype than its parameter, which releases before 2.10 refuse."""


def steps(name: str, path: str, mix: Mix) -> Results:
    """Weights and states with all options."""
    for option, values in OPTIMIZERS[name][2].items():
        if (option, path) != ("tensor lr", "foreach"):  # which torch refuses
            yield from stepped(name, path, mix, option, values)
    if path == "fused":
        yield from stepped(name, path, mix, "scaled", {"weight_decay": 0.1}, scaled=True)


def stepped(
    name: str,
    path: str,
    mix: Mix,
    option: str,
    values: dict[str, Any],
    shapes: Iterable[tuple[int, ...]] = SHAPES,
    scaled: bool = False,
) -> Results:
    """Weights and states after three steps; if scaled, the second of them is left out."""
    torch.manual_seed(1)
    cls, states, _ = OPTIMIZERS[name]
    weights = [number(mix.format, *shape, seed=f"p{shape}", wide=False) for shape in shapes]
    params = [nn.Parameter(x) for x in weights]
    optimizer = cls(params, **{"lr": 0.01} | values | PATHS[path])
    if isinstance(mix.mode, str):
        mcf.collage(optimizer, mix.mode)
    elif mix.mode is not None:
        mcf.collage(optimizer, {states[k]: f for k, f in mix.mode.items() if k in states})
    gradient = mix.gradient or mix.format.dtype
    for k in (1, 2, 3):
        for p in params:
            if isinstance(gradient, torch.dtype) and gradient != p.dtype:
                if not hasattr(p, "grad_dtype"):
                    raise RefusedByTorch(f"gradients in {gradient}")
                p.grad_dtype = gradient
            make = plain if isinstance(gradient, torch.dtype) else number
            p.grad = make(gradient, *p.shape, seed=f"g{k}{tuple(p.shape)}", wide=False)
        if scaled:
            optimizer.grad_scale = torch.tensor(128.0)
            optimizer.found_inf = torch.tensor(float(k == 2))
        optimizer.step()
    yield f"{option}/step3/weight", params
    for state in optimizer.state[params[0]].keys() - {"step"}:
        yield f"{option}/step3/{state}", [optimizer.state[p][state] for p in params]


LARGE_STEPS = {
    "adamw/fused/plus/bf16x2": Mix(mcf.bf16x2, "plus"),
    "adamw/for-loop/none/bf16x2": Mix(mcf.bf16x2),
    "sgd/fused/none/bf16x3": Mix(mcf.bf16x3),
    "adagrad/fused/none/bf16x2sr": Mix(STOCHASTIC[0]),
    "adam/fused/light/fp32x2": Mix(mcf.fp32x2, "light"),
}


def large_steps(group: str) -> Results:
    name, path, *_ = group.split("/")
    option, values = list(OPTIMIZERS[name][2].items())[-2]
    return stepped(name, path, LARGE_STEPS[group], option, values, (LARGE_SHAPE, (3,)))


# --------------------------------------------------------------------------------------- groups


class Group(NamedTuple):
    """Results that belong together."""

    results: Callable[[], Results]
    slow: bool = False

    def digests(self) -> dict[str, str]:
        """A digest for each result."""
        torch.manual_seed(1)
        with mcf.when_rounded("ignore"):  # operators by out= are among what is digested
            return {name: digest(result) for name, result in self.results()}


OF_FORMAT: dict[str, Callable[[mcf.Format], Results]] = {
    "binary": binary,
    "elementwise": partial(expressions, lines=ELEMENTWISE),
    "order": partial(expressions, lines=ORDER),
    "structure": partial(expressions, lines=STRUCTURE),
    "parameter": partial(expressions, lines=PARAMETER),
    "deferred": partial(expressions, lines=DEFERRED, recorded=False),
    "expansion": on_terms,
    "conversions": conversions,
    "checkpoints": checkpoints,
    "accumulation": accumulation,
    "modules": modules,
}
OF_STORED: dict[str, Callable[[mcf.Format], Results]] = {
    "storage": storage,
    "codec": codec,
    "checkpoints": checkpoints,
    "modules": modules,
}
LONG = {*LONGER, *STOCHASTIC[1:], mcf.fp32x3, mcf.fp64x2, *STORED[2:], BALANCED[1]}
"""Formats whose steps are slow."""


def groups() -> dict[str, Group]:
    """Every group by its name."""
    every = {
        f"{name}/{f.name}": Group(partial(results, f))
        for (name, results), f in product(OF_FORMAT.items(), FORMATS)
    }
    every |= {
        f"{name}/{f.name}": Group(partial(results, f))
        for (name, results), f in product(OF_STORED.items(), (*STORED, *BALANCED))
    }
    every |= {f"blocks/{f.name}": Group(partial(in_blocks, f)) for f in IN_BLOCKS}
    every |= {f"eft/{dtype}": Group(partial(transformations, dtype)) for dtype in BASES}
    every |= {"modules/default": Group(partial(modules, None)), "collectives": Group(collectives)}
    for name in LARGE:
        is_slow = name not in ("bf16x2", "fp32x2", "bf16x2sr")
        every[f"large/{name}"] = Group(partial(large, mcf.Format.from_name(name)), is_slow)
    for name in LARGE_STEPS:
        is_slow = not name.startswith(("adamw", "sgd"))
        every[f"large/{name}"] = Group(partial(large_steps, name), is_slow)
    for name, path, (how, mix) in product(OPTIMIZERS, PATHS, MIXES.items()):
        if how == "light/fp32x2" and path != "fused" and name != "sgd":
            continue  # torch takes the root of a plain float32, which processors round unlike
        if mix.format in STORED and path != "fused":
            continue  # torch computes with float32
        results = partial(steps, name, path, mix)
        every[f"{name}/{path}/{how}"] = Group(results, mix.format in LONG)
    return every


def recorded() -> dict[str, dict[str, str]]:
    """The digests in the file, by group."""
    return json.loads(FILE.read_text())


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The names of results that differ, or that only one of the two has."""
    names = found.keys() | expected.keys()
    return sorted(name for name in names if found.get(name) != expected.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare this tree with its fingerprint.")
    parser.add_argument("--write", action="store_true", help="write the fingerprint anew")
    parser.add_argument("--fast", action="store_true", help="leave out what is slow")
    parser.add_argument("groups", nargs="*", default=[""], help="beginnings of names of groups")
    args = parser.parse_args()
    if args.write:
        named = {n: group for n, group in groups().items() if n.startswith(tuple(args.groups))}
        kept = {name: x for name, x in recorded().items() if name in groups().keys() - named.keys()}
        found = kept | {name: group.digests() for name, group in named.items()}
        FILE.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        return 0
    expected, differing = recorded(), 0
    for name, group in groups().items():
        if name.startswith(tuple(args.groups)) and not (args.fast and group.slow):
            try:
                found = group.digests()
            except RefusedByTorch:
                print(f"{name}: refused by torch {torch.__version__}", flush=True)
                continue
            for result in differences(found, expected.get(name, {})):
                print(f"{name}: {result}", flush=True)
                differing += 1
    print(f"{differing} results differ")
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main())
