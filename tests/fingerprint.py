"""A fingerprint of the library: digests of the bits that every operation gives.

`python tests/fingerprint.py` compares this tree with `fingerprint.json` and lists the results that
differ; `--write` writes the file anew. Only what has the same bits everywhere is in it: no sums over
many elements, no functions of a maths library. Inputs come from integers of PCG64, so that they are
the same in every release of torch. One NaN is as good as another.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import math
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import mcftensor as mcf

FILE = Path(__file__).with_suffix(".json")

BASES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LONGER = tuple(itertools.starmap(mcf.Format, zip(BASES, (4, 3, 4, 3), strict=True)))
STOCHASTIC = tuple(
    mcf.Format(f.base, f.terms, rounding="stochastic")
    for f in (mcf.bf16x2, mcf.bf16x3, mcf.fp16x2, mcf.fp32x2)
)
FORMATS = (*mcf.FORMATS, *LONGER, *STOCHASTIC)
DTYPES = (*BASES, torch.int32, torch.int64)


# ------------------------------------------------------------------------------------- digests


def digest(result: Any) -> str:
    """A digest of all bits, shapes, dtypes and formats in a tree of results."""
    state = hashlib.blake2b(digest_size=5)
    for leaf in tree_leaves(result):
        if not isinstance(leaf, Tensor):
            state.update(repr(leaf).encode())
            continue
        terms, name = (leaf,), "plain"
        if isinstance(leaf, mcf.MCFTensor):
            terms, name = leaf.components, leaf.format.name
        for term in terms:
            state.update(f"{name} {term.dtype} {tuple(term.shape)}".encode())
            state.update(_bits(term.detach()))
    return state.hexdigest()


def _bits(x: Tensor) -> bytes:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    patterns = x.contiguous().view(kinds[x.dtype.itemsize])
    if x.is_floating_point():
        patterns = patterns.masked_fill(x.isnan(), -1)
    return patterns.numpy().tobytes()


# -------------------------------------------------------------------------------------- inputs


def _precision(dtype: torch.dtype) -> tuple[int, int, int]:
    """Significand bits, and the exponents of the smallest and largest normal numbers."""
    info = torch.finfo(dtype)
    smallest, largest = (math.frexp(x)[1] - 1 for x in (info.tiny, info.max))
    return 2 - math.frexp(info.eps)[1], smallest, largest


def _scaled(significands: np.ndarray, exponents: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Integers of p bits as floats of these exponents, cut off among the subnormals."""
    p, smallest, _ = _precision(dtype)
    excess = np.clip(smallest - exponents, 0, p)
    return np.ldexp((significands >> excess).astype(np.float64), exponents + excess - p + 1)


def _significands(random: np.random.Generator, p: int, n: int) -> np.ndarray:
    """Half of any bits, and half that are ties of some shorter format or one ulp beside them."""
    bits = random.integers(1 << (p - 1), 1 << p, n)
    kept = random.integers(0, p, n)
    beside = (bits >> kept << kept) + (1 << kept >> 1) + random.integers(-1, 2, n)
    chosen = np.where(random.integers(0, 2, n), beside, bits)
    return np.clip(chosen, 1 << (p - 1), (1 << p) - 1)


def _leading(random: np.random.Generator, dtype: torch.dtype, n: int, wide: bool) -> np.ndarray:
    """Most near 1; if wide, also numbers of all exponents and special values."""
    p, smallest, largest = _precision(dtype)
    signs = random.choice([-1.0, 1.0], n)
    near = random.integers(-6, 6, n)
    anywhere = random.integers(smallest - p, largest + 1, n)
    kinds = random.integers(0, 8, n) if wide else np.zeros(n, dtype=int)
    exponents = np.where(kinds == 6, anywhere, near)
    x = _scaled(_significands(random, p, n), exponents, dtype)
    info = torch.finfo(dtype)
    special = [0.0, 1.0, math.inf, math.nan, info.max, info.tiny, math.ldexp(info.tiny, 1 - p)]
    return signs * np.where(kinds == 7, random.choice(special, n), x)


def _next(
    random: np.random.Generator, x: np.ndarray, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Terms to stand after others: any, far ones, ties and what is one ulp inside of ties; and
    whether others may follow."""
    p, _, _ = _precision(dtype)
    n = len(x)
    finite = np.where(np.isfinite(x), x, 0)
    fractions, exponents = np.frexp(finite)
    exponents = exponents.astype(np.int64) - 1
    kinds = random.integers(0, 8, n)
    is_even = np.ldexp(fractions, p) % 2 == 0
    is_tie = (kinds == 5) & is_even & (np.abs(fractions) != 0.5)
    is_close = (kinds >= 4) & (kinds <= 5) & ~is_tie
    signs = random.choice([-1.0, 1.0], n)
    signs = np.where(is_close & (np.abs(fractions) == 0.5), np.sign(finite), signs)
    gaps = random.integers(0, 4, n) + np.where(kinds == 6, random.integers(0, 30, n), 0)
    significands = np.where(is_close, (1 << p) - 1, _significands(random, p, n))
    significands = np.where(is_tie, 1 << (p - 1), significands)
    below = np.where(is_tie, 0, np.where(is_close, -1, -2 - gaps))
    result = signs * _scaled(significands, exponents - p + below, dtype)
    result = np.where((finite == 0) | (kinds == 7) | (result == 0), 0.0, result)
    return result, (result != 0) & ~is_tie


@cache
def _terms(dtype: torch.dtype, count: int, n: int, seed: str, wide: bool) -> tuple[Tensor, ...]:
    random = np.random.Generator(np.random.PCG64(zlib.crc32(seed.encode())))
    terms = [_leading(random, dtype, n, wide)]
    may_follow = np.full(n, True)
    for _ in range(count - 1):
        following, more = _next(random, terms[-1], dtype)
        terms.append(np.where(may_follow, following, 0.0))
        may_follow &= more
    return tuple(torch.from_numpy(t).to(dtype) for t in terms)


def plain(dtype: torch.dtype, *shape: int, seed: str = "plain", wide: bool = True) -> Tensor:
    """Numbers of a dtype."""
    if not dtype.is_floating_point:
        return (plain(torch.float64, *shape, seed=seed, wide=False) * 1e6).to(dtype)
    return _terms(dtype, 1, math.prod(shape), seed, wide)[0].clone().view(shape)


def terms(
    format: mcf.Format, *shape: int, seed: str = "x", wide: bool = True
) -> tuple[Tensor, ...]:
    """Normalized terms of a format."""
    found = _terms(format.base, format.terms, math.prod(shape), seed, wide)
    return tuple(t.clone().view(shape) for t in found)


def number(format: mcf.Format, *shape: int, seed: str = "x", wide: bool = True) -> mcf.MCFTensor:
    """An expansion."""
    return mcf.MCFTensor(terms(format, *shape, seed=seed, wide=wide), format)


class Operands:
    """What the operations of one case get, made anew for each."""

    shape = (24, 16)

    def __init__(self, format: mcf.Format, *shape: int) -> None:
        self.format = format
        self.shape = shape or self.shape
        self.x, self.y, self.z = (number(format, *self.shape, seed=s) for s in "xyz")
        for a, b in zip(self.x.components[:-1], self.y.components, strict=False):
            b.view(-1)[::5] = 0 - a.view(-1)[::5]  # what cancels, but for the last terms
        self.y.components[-1].view(-1)[::5] = 0
        self.plain = plain(format.base, *self.shape)
        self.mask = self.plain > 0
        self.indices = torch.arange(0, self.shape[0], 3)

    def others(self) -> dict[str, Any]:
        """What x meets in binary operations."""
        last = self.shape[-1]
        mate = mcf.Format(self.format.base, 2 if self.format.terms == 3 else 3)
        return {
            "expansion": self.y,
            "transposed": number(self.format, last, self.shape[0], seed="t").t(),
            "row": number(self.format, last, seed="row"),
            "0-d expansion": number(self.format, seed="0-d", wide=False),
            "longer or shorter": number(mate, *self.shape, seed="mate"),
            "base": self.plain,
            "float32": plain(torch.float32, *self.shape),
            "float64": plain(torch.float64, *self.shape),
            "0-d": plain(torch.float64, seed="0-d", wide=False),
            "int64": plain(torch.int64, *self.shape),
            "number": 0.1,
            "integer": -3,
        }


# --------------------------------------------------------------------------------- the operations

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: (x + y, y + x),
    "sub": lambda x, y: (x - y, y - x),
    "mul": lambda x, y: (x * y, y * x),
    "div": lambda x, y: (x / y, y / x),
    "in place": lambda x, y: [getattr(x.clone(), n)(y) for n in ("add_", "sub_", "mul_", "div_")],
    "compare": lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y),
    "where": lambda x, y: (torch.where(x > 0, x, y), torch.where(x > 0, y, x)),
}

ELEMENTWISE: dict[str, Callable[[Operands], Any]] = {
    "alpha": lambda i: (i.x.add(i.y, alpha=0.3), i.x.sub(i.y, alpha=-3), torch.rsub(i.x, i.y, alpha=0.3)),
    "alpha in place": lambda i: i.x.add_(i.plain, alpha=-1e-3),
    "rsub": lambda i: (1 - i.x, 0.1 / i.x),
    "sqrt": lambda i: (i.x.sqrt(), i.x.abs().sqrt_()),
    "square": lambda i: (i.x.square(), i.x**2, i.x**3, i.x.square_()),
    "reciprocal": lambda i: (i.x.reciprocal(), i.x**-1, i.x.reciprocal_()),
    "root": lambda i: i.x.abs() ** 0.5,
    "addcmul": lambda i: (i.x.addcmul(i.y, i.z), i.x.addcmul(i.y, i.plain, value=0.001)),
    "addcmul in place": lambda i: i.x.addcmul_(i.plain, i.plain, value=1 - 0.999),
    "addcdiv": lambda i: (i.x.addcdiv(i.y, i.z), i.x.addcdiv(i.plain, i.z, value=-0.01)),
    "addcdiv in place": lambda i: i.x.addcdiv_(i.y, i.z, value=-0.01),
    "lerp": lambda i: (i.x.lerp(i.y, 0.1), i.x.lerp(i.plain, 0.999), i.x.lerp(i.y, i.z)),
    "lerp in place": lambda i: (i.x.lerp_(i.plain, 0.1), i.y.lerp_(i.z, 0.7)),
    "fma": lambda i: (mcf.fma(i.x, i.y, i.z), mcf.fma(i.x, 0.1, 3), mcf.fma(i.plain, i.x, i.y)),
    "out": lambda i: (
        torch.add(i.x, i.y, out=i.z),
        torch.mul(i.x, i.y, out=i.plain),
        torch.div(i.x, i.y, out=i.y),
    ),
    "deferred": lambda i: unrecorded(lambda: i.y / (i.x.square().sqrt() / 0.3 + 1e-8) - 1),
    "deferred in place": lambda i: unrecorded(lambda: i.x.addcdiv_(i.y, i.z.abs().sqrt().add_(1))),
    "aliased": lambda i: (i.x.add_(i.x), i.y.mul_(i.y), i.z.t().add_(1)),
    "overlapping": lambda i: (i.x[1:].add_(i.x[:-1]), i.x),
    "strided": lambda i: (i.x[::2, 1::3] * i.y[::2, 1::3], i.x.t()[::2].mul_(0.999), i.x),
    "expanded": lambda i: i.x + number(i.format, 1, i.shape[1], seed="one").expand(i.shape),
    "signs": lambda i: (i.x.abs(), -i.x, i.x.neg_(), i.y.abs_(), i.x.signbit(), i.x.sign()),
    "maximum": lambda i: (torch.maximum(i.x, i.y), torch.minimum(i.x, i.plain)),
    "clamp": lambda i: (i.x.clamp(-0.1, 0.7), i.x.clamp(min=i.y), i.x.clamp_(max=1.1)),
    "nextafter": lambda i: (torch.nextafter(i.x, i.y), torch.nextafter(i.x, -i.x)),
    "classes": lambda i: (i.x.isnan(), i.x.isinf(), i.x.isfinite()),
    "integral": lambda i: [getattr(i.x, n)() for n in ("floor", "ceil", "round", "trunc")],
    "relu": lambda i: (i.x.relu(), torch.equal(i.x, i.x.clone())),
    "where numbers": lambda i: (torch.where(i.mask, i.x, 1.2), torch.where(i.mask, 0.1, i.x)),
    "masked_fill": lambda i: (i.x.masked_fill(i.mask, 0.1), i.x.masked_fill_(i.mask, -1 / 3)),
    "fill": lambda i: (i.x.fill_(0.1), i.y.zero_(), i.z.fill_(torch.tensor(1 / 3))),
}  # fmt: skip

ORDER: dict[str, Callable[[Operands], Any]] = {
    "sort": lambda i: i.x.sort(dim=1, stable=True),
    "descending": lambda i: i.x.sort(dim=0, stable=True, descending=True),
    "topk": lambda i: i.x.topk(5, dim=1).values,
    "kthvalue": lambda i: i.x.kthvalue(3, dim=1).values,
    "extremes": lambda i: (i.x.max(), i.x.min(), i.x.amax(dim=1), i.x.amin(dim=0), i.x.aminmax()),
    "median": lambda i: (i.x.median(), i.x.nanmedian(dim=1).values),
    "cummax": lambda i: (i.x.cummax(dim=1).values, i.x.cummin(dim=0).values),
    "unique": lambda i: number(i.format, 64, wide=False).repeat(2).unique(),
}

STRUCTURE: dict[str, Callable[[Operands], Any]] = {
    "cat": lambda i: (torch.cat([i.x, i.y]), torch.cat([i.x, i.plain], 1), torch.stack([i.x, i.y])),
    "views": lambda i: (i.x.t(), i.x[3], i.x[:, 2:9:2], i.x.view(-1), i.x.chunk(3), i.x[None]),
    "copies": lambda i: (i.x.clone(), i.x.flip(0), i.x.roll(3), i.x.repeat(2, 1), i.x.tril()),
    "index": lambda i: (i.x[i.indices], i.x[i.mask], i.x.index_select(0, i.indices)),
    "setitem": lambda i: (set_item(i.x, i.mask, 0.1), set_item(i.y, i.indices, i.z[i.indices])),
    "index_put": lambda i: (
        i.x.index_put((i.indices,), i.y[i.indices]),
        i.x.index_put_((i.indices,), i.plain[i.indices], accumulate=True),
    ),
    "scatter": lambda i: i.x.index_copy(0, i.indices, i.y[i.indices]),
    "likes": lambda i: [
        torch.zeros_like(i.x),
        torch.ones_like(i.x),
        torch.full_like(i.x, 0.1),
        i.x.new_zeros(3),
        i.x.new_full((3,), 1 / 3),
        i.x.new_ones(2, 2),
    ],
    "pad": lambda i: (nn.functional.pad(i.x, (1, 2)), nn.functional.pad(i.x, (1, 2), value=0.1)),
    "reflect": lambda i: nn.functional.pad(i.x[None], (1, 2), mode="reflect"),
    "gather": lambda i: i.x.gather(1, i.mask.long()),
    "items": lambda i: (i.x[1, 1].item(), i.y.flatten()[3:7].tolist(), repr(i.x[2, :2])),
    "numpy": lambda i: torch.from_numpy(i.x.numpy()),
}


def set_item(x: Tensor, key: Any, value: Any) -> Tensor:
    x[key] = value
    return x


def unrecorded(function: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return function()


PARAMETERS: dict[str, Callable[[Operands, nn.Parameter], Any]] = {
    "numbers": lambda i, p: (p * 0.999, p + 1, p - p, p.detach().lerp(p.detach(), 0.1)),
    "plain": lambda i, p: (p * i.plain, i.plain - p, torch.cat([p, i.plain])),
    "values": lambda i, p: (p * i.x, torch.where(i.mask, p, i.x)),
    "in place": lambda i, p: unrecorded(lambda: p.mul_(0.999).add_(i.plain, alpha=-0.01)),
    "copies": lambda i, p: (p.clone(), p.detach() + 1, torch.zeros_like(p), p[1:3]),
    "gradients": lambda i, p: torch.autograd.grad((p * i.plain).sum(), p),
    "back": lambda i, p: (mcf.as_plain(p), mcf.as_plain(p, torch.float64), p.float()),
}

FOREACH: dict[str, Callable[[list[Any], list[Any], list[Any]], Any]] = {
    "add": lambda x, y, g: (torch._foreach_add(x, y), torch._foreach_add(x, g, alpha=0.1)),
    "sub": lambda x, y, g: (torch._foreach_sub(x, y), torch._foreach_sub(x, 0.1)),
    "mul": lambda x, y, g: (torch._foreach_mul(x, y), torch._foreach_mul(x, torch.tensor(0.9))),
    "div": lambda x, y, g: (torch._foreach_div(x, y), torch._foreach_div(x, [0.1, 3.0, 7.0])),
    "roots": lambda x, y, g: (torch._foreach_sqrt(x), torch._foreach_neg(x), torch._foreach_abs(x)),
    "maximum": lambda x, y, g: (torch._foreach_maximum(x, y), torch._foreach_minimum(x, 0.1)),
    "lerp": lambda x, y, g: (torch._foreach_lerp(x, y, 0.1), torch._foreach_lerp(x, g, 0.9)),
    "addcmul": lambda x, y, g: torch._foreach_addcmul(x, g, y, 0.1),
    "addcdiv": lambda x, y, g: torch._foreach_addcdiv(x, y, g, [0.1, -1e-3, 3.0]),
    "in place": lambda x, y, g: [
        (torch._foreach_mul_(x, 0.999), torch._foreach_add_(x, g, alpha=-0.1)),
        (torch._foreach_lerp_(x, y, 0.1), torch._foreach_addcmul_(x, g, g, 1 - 0.999)),
        (torch._foreach_sqrt_(y), torch._foreach_addcdiv_(x, g, y, -0.01), x, y),
    ],
    "copy": lambda x, y, g: (torch._foreach_copy_(x, g), torch._foreach_zero_(y), x, y),
}

# Of the functions on terms, what each is given: x, y, z, and a format.
ON_TERMS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, z, f: mcf.expansion.add(x, y, format=f),
    "grow": lambda x, y, z, f: mcf.expansion.grow(x, z[0], format=f),
    "mul": lambda x, y, z, f: mcf.expansion.mul(x, y, format=f),
    "fma": lambda x, y, z, f: mcf.expansion.fma(x, y, z, format=f),
    "div": lambda x, y, z, f: mcf.expansion.div(x, y, format=f),
    "sqrt": lambda x, y, z, f: mcf.expansion.sqrt(x, format=f),
    "mixed": lambda x, y, z, f: mcf.expansion.fma(x, y[:1], (z[0].double(),), format=f),
    "expand": lambda x, y, z, f: mcf.expansion.expand(plain(torch.float64, *x[0].shape), f),
    "collapse": lambda x, y, z, f: [mcf.expansion.collapse(x, dtype) for dtype in BASES],
}

TRANSFORMATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "two_sum": lambda a, b, c: mcf.eft.two_sum(a, b),
    "fast_two_sum": lambda a, b, c: mcf.eft.fast_two_sum(
        torch.where(a.abs() < b.abs(), b, a), torch.where(a.abs() < b.abs(), a, b)
    ),
    "split": lambda a, b, c: mcf.eft.split(a),
    "two_prod": lambda a, b, c: mcf.eft.two_prod(a, b),
    "fma": lambda a, b, c: (mcf.eft.fma(a, b, c), mcf.eft.fma(a, b, -(a * b))),
    "sqrt": lambda a, b, c: mcf.eft.sqrt(a.abs()),
    "renormalize": lambda a, b, c: [mcf.expansion.renormalize((c, a, b), n) for n in (2, 3)],
}


# ---------------------------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class Mix:
    """What parameters, states and gradients are."""

    format: mcf.Format
    mode: Any = None
    gradient: mcf.Format | torch.dtype | None = None  # the parameter's dtype


STATES = {
    "exp_avg": mcf.bf16x3,
    "exp_avg_sq": None,
    "momentum_buffer": mcf.bf16x3,
    "sum": mcf.bf16x3,
}
MIXES = {
    **{f"none/{f.name}": Mix(f) for f in FORMATS},
    **{f"{m}/bf16x2": Mix(mcf.bf16x2, m) for m in ("light", "plus", "full")},
    **{f"{m}/fp32x2": Mix(mcf.fp32x2, m) for m in ("light", "plus")},
    "dict/bf16x2": Mix(mcf.bf16x2, STATES),
    "plus/bf16x3": Mix(mcf.bf16x3, "plus"),
    "plus/bf16x2sr": Mix(STOCHASTIC[0], "plus"),
    "plus/bf16x2/bf16x2 gradients": Mix(mcf.bf16x2, "plus", mcf.bf16x2),
    "full/bf16x3/bf16x2 gradients": Mix(mcf.bf16x3, "full", mcf.bf16x2),
    "full/bf16x2/float32 gradients": Mix(mcf.bf16x2, "full", torch.float32),
    "none/fp32x2/bfloat16 gradients": Mix(mcf.fp32x2, None, torch.bfloat16),
}  # fmt: skip

ADAM = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "eps": 1e-6},
    "amsgrad": {"amsgrad": True, "maximize": True, "weight_decay": 0.01},
    "tensor lr": {"lr": torch.tensor(0.01)},
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, dict[str, Any]]]] = {
    "sgd": (
        torch.optim.SGD,
        {
            "plain": {"weight_decay": 0.1},
            "dampening": {"momentum": 0.9, "dampening": 0.5, "maximize": True},
            "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            "tensor lr": {"lr": torch.tensor(0.01), "momentum": 0.9},
        },
    ),
    "adam": (torch.optim.Adam, ADAM),
    "adamw": (torch.optim.AdamW, ADAM),
    "adagrad": (
        torch.optim.Adagrad,
        {
            "plain": {"initial_accumulator_value": 0.1},
            "decay": {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True},
        },
    ),
}
PATHS = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SHAPES = ((7,), (5, 13), ())


def stepped(
    cls: type[torch.optim.Optimizer],
    options: dict[str, Any],
    mix: Mix,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    scaled: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Weights and states after each of three steps."""
    torch.manual_seed(1)
    params = [
        nn.Parameter(number(mix.format, *shape, seed=f"p{i}", wide=False))
        for i, shape in enumerate(shapes)
    ]
    optimizer = cls(params, **{"lr": 0.01, **options})
    if mix.mode is not None:
        known = {"adagrad": ["sum"], "sgd": ["momentum_buffer"]}
        names = known.get(cls.__name__.lower(), ["exp_avg", "exp_avg_sq"])
        mode = mix.mode if isinstance(mix.mode, str) else {n: mix.mode[n] for n in names}
        mcf.collage(optimizer, mode)
    for k in (1, 2, 3):
        for i, p in enumerate(params):
            kind = mix.gradient or mix.format.base
            make = number if isinstance(kind, mcf.Format) else plain
            if isinstance(kind, torch.dtype):
                p.grad_dtype = kind
            p.grad = make(kind, *p.shape, seed=f"g{i}{k}", wide=False)
        if scaled:
            optimizer.grad_scale = torch.tensor(128.0)
            optimizer.found_inf = torch.tensor(float(k == 2))
        optimizer.step()
        if k != 2 or scaled:
            yield f"step{k}/weight", params
            for name in sorted(optimizer.state[params[0]]):
                yield f"step{k}/{name}", [optimizer.state[p][name] for p in params]


def optimizer_results(name: str, path: str, mix: Mix) -> Iterator[tuple[str, Any]]:
    cls, variants = OPTIMIZERS[name]
    for variant, options in variants.items():
        if variant == "tensor lr" and path == "foreach":
            continue  # torch refuses it
        for step, result in stepped(cls, {**options, **PATHS[path]}, mix):
            yield f"{variant}/{step}", result
    if path == "fused":
        options = list(variants.values())[1]
        for step, result in stepped(cls, {**options, **PATHS[path]}, mix, scaled=True):
            yield f"scaled/{step}", result


# -------------------------------------------------------------------------------------- groups

Results = Iterator[tuple[str, Any]]


def binary(format: mcf.Format) -> Results:
    for (name, function), other in itertools.product(BINARY.items(), Operands(format).others()):
        operands = Operands(format)
        yield f"{name}/{other}", lambda: function(operands.x, operands.others()[other])


def table(format: mcf.Format, functions: dict[str, Callable[..., Any]], *shape: int) -> Results:
    for name, function in functions.items():
        yield name, lambda: function(Operands(format, *shape))


def parameters(format: mcf.Format) -> Results:
    for name, function in PARAMETERS.items():
        p = nn.Parameter(number(format, *Operands.shape, seed="p"))
        yield name, lambda: function(Operands(format), p)


def lists(format: mcf.Format) -> Results:
    for name, function in FOREACH.items():
        x, y = ([number(format, *s, seed=f"{n}{s}") for s in SHAPES] for n in "xy")
        g = [plain(format.base, *s, seed=f"g{s}") for s in SHAPES]
        yield name, lambda: unrecorded(lambda: function(x, y, g))


def conversions(format: mcf.Format) -> Results:
    x = number(format, 40, 16)
    for dtype in DTYPES:
        of_dtype = plain(dtype, 40, 16)
        yield f"from {dtype}", lambda: mcf.as_expansion(of_dtype, format)
        yield f"copy from {dtype}", lambda: torch.empty_like(x).copy_(of_dtype)
        yield f"to {dtype}", lambda: x.to(dtype)
        yield f"copy to {dtype}", lambda: torch.empty_like(of_dtype).copy_(x)
        if dtype.is_floating_point:
            yield f"as plain {dtype}", lambda: mcf.as_plain(x, dtype)
    for other in FORMATS:
        yield f"to {other.name}", lambda: mcf.as_expansion(x, other)
        yield f"copy to {other.name}", lambda: number(other, 40, 16, seed="y").copy_(x)
    exact = ["0.1", "1/3", "-1e-5", "12345678901234567890123", 2**-30 + 1.0, "-0.0", "inf"]
    yield "exact", lambda: mcf.from_exact(exact, format)
    yield "fraction", lambda: mcf.to_fraction(number(format, 40, wide=False))


def on_terms(format: mcf.Format) -> Results:
    x, y, z = (terms(format, 400, seed=s) for s in "xyz")
    for name, function in ON_TERMS.items():
        yield name, lambda: function(x, y, z, format)
    for other in FORMATS:
        yield f"convert/{other.name}", lambda: mcf.expansion.convert(x, other)


def transformations(dtype: torch.dtype) -> Results:
    a, b, c = (plain(dtype, 2000, seed=s, wide=False) for s in "abc")
    for name, function in TRANSFORMATIONS.items():
        yield name, lambda: function(a, b, c)


def checkpoints(format: mcf.Format) -> Results:
    class Model(nn.Module):
        def __init__(self, seed: str) -> None:
            super().__init__()
            self.weight = nn.Parameter(number(format, 5, 3, seed=seed, wide=False))
            self.register_buffer("mean", number(format, 3, seed=seed))

    state = Model("x").state_dict()
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    yield "torch", lambda: torch.load(memory, weights_only=True)
    yield "terms", lambda: dict(sorted(mcf.as_terms(state).items()))
    yield "from terms", lambda: mcf.from_terms(mcf.as_terms(state))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        mcf.save_file(Model("x"), path)
        yield "file", lambda: mcf.load_file(path)
        into = Model("y")
        yield "file into", lambda: (mcf.load_file(path, into), into.state_dict())[1]


def accumulation(format: mcf.Format | None, base: torch.dtype) -> Results:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(number(mcf.Format(base, 2), 9, 4, wide=False))
            self.plain = nn.Parameter(plain(base, 9, 4, wide=False))

    model = Scale()
    mcf.accumulate_gradients(model, format)
    for k in range(5):
        x = plain(base, 9, 4, seed=f"{k}", wide=False)
        (model.weight * x + model.plain * x).sum().backward()
    yield "gradients", lambda: (model.weight.grad, model.plain.grad)


def modules() -> Results:
    def model() -> nn.Module:
        result = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))
        for i, p in enumerate(result.parameters()):
            p.data = plain(torch.float32, *p.shape, seed=f"{i}", wide=False)
        return result

    overrides = {"0.weight": mcf.bf16x3, "1.*": None}
    yield "default", lambda: mcf.as_expansion(model()).state_dict()
    yield "overrides", lambda: mcf.as_expansion(model(), overrides=overrides).state_dict()
    for format in mcf.FORMATS:
        yield format.name, lambda: mcf.as_expansion(model(), format).state_dict()
        yield (
            f"back/{format.name}",
            lambda: mcf.as_plain(mcf.as_expansion(model(), format), torch.float32).state_dict(),
        )


def collectives() -> Results:
    """On two processes; each gives its own digests."""
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(_on_rank, range(2), [str(Path(folder, "store"))] * 2))
    for rank, results in enumerate(found):
        for name, result in results.items():
            yield f"rank{rank}/{name}", lambda: result


def _on_rank(rank: int, store: str) -> dict[str, str]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    results = {}
    for format in FORMATS:
        own = number(format, 6, 5, seed=f"{rank}", wide=False)
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            torch.manual_seed(1)
            x = own.clone()
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            results[f"{op}/{format.name}"] = digest(x)
        copy = own.clone()
        dist.broadcast(copy, 1)
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own)
        joined = own.new_empty(12, 5)
        gather(joined, own)
        results[f"moves/{format.name}"] = digest([copy, both, joined])
    dist.destroy_process_group()
    return results


# Elements after which C++ is compiled where there is a compiler.
LARGE = (1 << 20,)
IN_CPP = {
    "bf16x2": ("add", "mul", "div", "sqrt", "addcdiv", "lerp", "chain"),
    "bf16x3": ("addcmul", "lerp"),
    "fp16x2": ("mul", "div"),
    "fp32x2": ("add", "mul", "sqrt"),
    "fp32x3": ("add",),
    "fp64x2": ("add", "mul"),
    "bf16x4": ("add",),
    "bf16x2sr": ("add", "lerp"),
    "fp32x2sr": ("add",),
}
LARGE_STEPS = {
    "adamw/fused/plus/bf16x2": (torch.optim.AdamW, {"fused": True}, Mix(mcf.bf16x2, "plus")),
    "adamw/for-loop/none/bf16x2": (torch.optim.AdamW, {"foreach": False}, Mix(mcf.bf16x2)),
    "sgd/fused/none/bf16x3": (
        torch.optim.SGD,
        {"fused": True, "momentum": 0.9, "nesterov": True},
        Mix(mcf.bf16x3),
    ),
    "adagrad/fused/none/bf16x2sr": (torch.optim.Adagrad, {"fused": True}, Mix(STOCHASTIC[0])),
    "adam/fused/light/fp32x2": (torch.optim.Adam, {"fused": True}, Mix(mcf.fp32x2, "light")),
}


def in_cpp(name: str) -> Results:
    format = mcf.Format.from_name(name)
    x, y, z = (number(format, *LARGE, seed=s) for s in "xyz")
    arguments = {"sqrt": (x,), "addcdiv": (x, y, z), "addcmul": (x, y, z), "lerp": (x, y, 0.1)}
    for operation in IN_CPP[name]:
        if operation == "chain":
            yield operation, lambda: unrecorded(lambda: x / (y.square().sqrt() / 0.3 + 1e-8))
        else:
            operands = arguments.get(operation, (x, y))
            yield operation, lambda: getattr(torch, operation)(*operands)


def large_steps(name: str) -> Results:
    cls, options, mix = LARGE_STEPS[name]
    return stepped(cls, options, mix, (LARGE, (3,)))


@dataclass(frozen=True)
class Group:
    """Results that belong together, as functions or as they are."""

    results: Callable[[], Results]
    slow: bool = False

    def digests(self) -> dict[str, str]:
        """A digest for each result; what raises is known by the type of the exception."""
        found: dict[str, str] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="mcftensor runs without compiled code")
            for name, result in self.results():
                torch.manual_seed(1)
                try:
                    found[name] = digest(result() if callable(result) else result)
                except (NotImplementedError, TypeError, ValueError, RuntimeError) as error:
                    found[name] = type(error).__name__
        return found


def groups() -> dict[str, Group]:
    """Every group by its name."""
    every: dict[str, Group] = {}

    def put(name: str, function: Callable[..., Results], *args: Any, slow: bool = False) -> None:
        every[name] = Group(lambda: function(*args), slow)

    for f in FORMATS:
        put(f"binary/{f.name}", binary, f)
        put(f"elementwise/{f.name}", table, f, ELEMENTWISE)
        put(f"order/{f.name}", table, f, ORDER)
        put(f"structure/{f.name}", table, f, STRUCTURE)
        put(f"parameters/{f.name}", parameters, f)
        put(f"foreach/{f.name}", lists, f)
        put(f"conversions/{f.name}", conversions, f)
        put(f"expansion/{f.name}", on_terms, f)
        put(f"checkpoints/{f.name}", checkpoints, f)
    for dtype in BASES:
        put(f"eft/{dtype}", transformations, dtype)
        put(f"accumulation/{dtype}", accumulation, None, dtype)
    put("accumulation/bf16x3", accumulation, mcf.bf16x3, torch.bfloat16)
    put("modules", modules)
    put("collectives", collectives)
    for name in IN_CPP:
        put(f"large/{name}", in_cpp, name, slow=name not in ("bf16x2", "fp32x2", "bf16x2sr"))
    for name in LARGE_STEPS:
        put(f"large/{name}", large_steps, name, slow=not name.startswith(("adamw", "sgd")))
    for name, path, (how, mix) in itertools.product(OPTIMIZERS, PATHS, MIXES.items()):
        slow = mix.format in (*LONGER, mcf.fp32x3, mcf.fp64x2)
        put(f"{name}/{path}/{how}", optimizer_results, name, path, mix, slow=slow)
    return every


def recorded() -> dict[str, dict[str, str]]:
    """The digests in the file, by group."""
    return json.loads(FILE.read_text())


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The names of results that differ, or that only one of the two has."""
    names = found.keys() | expected.keys()
    return sorted(name for name in names if found.get(name) != expected.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare this tree with a fingerprint.")
    parser.add_argument("--write", action="store_true", help="write the file anew")
    parser.add_argument("--fast", action="store_true", help="leave out the slow groups")
    parser.add_argument("--file", type=Path, default=FILE, help="another file")
    parser.add_argument("names", nargs="*", help="groups whose names begin so (default: all)")
    args = parser.parse_args()
    chosen = {
        name: group
        for name, group in groups().items()
        if name.startswith(tuple(args.names or [""])) and not (args.fast and group.slow)
    }
    if args.write:
        found = {name: group.digests() for name, group in sorted(chosen.items())}
        args.file.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        return 0
    expected = json.loads(args.file.read_text())
    count = 0
    for name, group in chosen.items():
        for result in differences(group.digests(), expected.get(name, {})):
            print(f"{name}/{result}")
            count += 1
    print(f"{count} results differ")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
