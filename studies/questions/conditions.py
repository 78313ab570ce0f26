"""The conditions: what breaks, and what cures it. Each is a handful of trainings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler

import mcftensor as mcf
from mcftensor import Format
from pretraining.model import GPT, loss
from pretraining.witness import whole
from questions.watched import SHAPE, Backward, Exact, Way, gradients

Keep = Callable[[nn.Module], nn.Module]


def kept(format: Format | None = None, vectors: Format | None = None) -> Keep:
    """Converts a model, its vectors perhaps to another format."""

    def keep(model: nn.Module) -> nn.Module:
        names = [name for name, p in model.named_parameters() if p.dim() <= 1]
        return mcf.as_expansion(model, format, overrides=dict.fromkeys(names, vectors or format))

    return keep


def as_it_is(model: nn.Module) -> nn.Module:
    """Plain bf16."""
    return model.to(torch.bfloat16)


FLOAT32 = {"exp_avg": mcf.bf16i16, "exp_avg_sq": mcf.bf16i16}
OF_FLOAT16 = {"exp_avg": mcf.fp16i16, "exp_avg_sq": mcf.fp16i16}


# --------------------------------------------------------------------------------- what underflows


def moments() -> list[Way]:
    """Squares of gradients below 6e-8 are zero in float16, and so is a second moment."""
    return [
        Way("`fp16x2`, `full`", kept(mcf.fp16x2), "full", steps=100),
        Way("`fp16x2`, `compact`", kept(mcf.fp16x2), "compact", steps=100),
        Way("`fp16i16`, `full`", kept(mcf.fp16i16), "full", steps=100),
    ]


def tails() -> list[Way]:
    """The tail of a float16 pair ends at 2^-24, whatever the weight."""
    pair, tail = kept(mcf.fp16x2), kept(mcf.fp16i16)
    return [
        Way("`fp16x2`, lr 1e-7", pair, OF_FLOAT16, lr=1e-7, steps=100),
        Way("`fp16x2`, lr 2e-8", pair, OF_FLOAT16, lr=2e-8, steps=100),
        Way("`fp16i16`, lr 1e-7", tail, "full", lr=1e-7, steps=100),
        Way("`fp16i16`, lr 2e-8", tail, "full", lr=2e-8, steps=100),
    ]


# ------------------------------------------------------------------------------- what is too small


def spike(model: nn.Module, batch: Tensor, step: int) -> Exact:
    """Gradients a hundred times as large, once."""
    (loss(model, batch) * (100 if step == SPIKE else 1)).backward()
    return gradients(model)


SPIKE = 20


def beta2() -> list[Way]:
    """A second moment that should decay by less than its format resolves stays where it is."""
    base = Way("", kept(mcf.bf16x2), backward=spike, steps=400)
    slow = (0.9, 1 - 1e-6)
    return [
        replace(base, name="`light`, beta2 0.999", mode="light"),
        replace(base, name="`plus`, beta2 0.999", mode="plus"),
        replace(base, name="`plus`, beta2 0.999999", mode="plus", betas=slow),
        replace(
            base,
            name="second moments in `bf16i16`, beta2 0.999999",
            mode={"exp_avg": None, "exp_avg_sq": mcf.bf16i16},
            betas=slow,
        ),
    ]


class Large(nn.LayerNorm):
    """A norm whose gain is 1e4, of which the output is divided."""

    scale = 1e4

    def __init__(self, width: int) -> None:
        super().__init__(width)
        nn.init.normal_(self.weight, self.scale, self.scale / 100)

    def forward(self, x: Tensor) -> Tensor:
        """As the norm does, with a gain of 1."""
        return super().forward(x) / self.scale


class Offset(nn.LayerNorm):
    """The same with the gain as 1e4 and an offset, which alone is learned."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """As the norm does, with a gain of 1."""
        normal = nn.functional.layer_norm(x, self.normalized_shape)
        return normal + normal * (self.weight / Large.scale) + self.bias / Large.scale


def with_norm(norm: type[nn.Module]) -> Callable[[], nn.Module]:
    """The model with another norm before its head."""

    def make() -> nn.Module:
        model = GPT(SHAPE)
        model.norm = norm(SHAPE.width)  # type: ignore[assignment]
        return model

    return make


def large() -> list[Way]:
    """A weight of 1e4 and an update of 1e-6 are 34 bits apart."""
    gain = ("norm.weight", ...)
    base = Way("", as_it_is, lr=1e-6, model=with_norm(Large), part=gain, steps=100)
    return [
        replace(base, name="`bf16x2`", keep=kept(mcf.bf16x2), mode="plus"),
        replace(base, name="`bf16x3`", keep=kept(mcf.bf16x3), mode="plus"),
        replace(base, name="`bf16i16`, which is float32", keep=kept(mcf.bf16i16), mode="full"),
        replace(
            base,
            name="1e4 and an offset in `bf16x3`",
            keep=kept(mcf.bf16x3),
            mode="plus",
            model=with_norm(Offset),
        ),
    ]


# ------------------------------------------------------------------- what the meter does not see


def clipped(model: nn.Module, batch: Tensor, scale: float, *, first: bool) -> Exact:
    """Gradients of a scaled loss, clipped to a norm of 1 before or after the scale is removed."""
    (loss(model, batch) * scale).backward()
    exact = {name: x / scale for name, x in gradients(model).items()}
    norm = math.sqrt(sum(float((x * x).sum()) for x in exact.values()))
    if first:
        clip_grad_norm_(model.parameters(), scale)
    for p in model.parameters():
        assert p.grad is not None
        p.grad.div_(scale)
    if not first:
        clip_grad_norm_(model.parameters(), 1.0)
    return {name: x * min(1.0, 1 / norm) for name, x in exact.items()}


def clipping() -> list[Way]:
    """The norm of scaled float16 gradients is infinite, and clipping divides by it."""
    base = Way("", kept(mcf.fp16i16), "full")

    def of(scale: float, *, first: bool) -> Backward:
        return lambda model, batch, step: clipped(model, batch, scale, first=first)

    return [
        replace(base, name="clipped first, loss times 2¹⁵", backward=of(2.0**15, first=True)),
        replace(base, name="clipped first, loss times 2¹⁴", backward=of(2.0**14, first=True)),
        replace(base, name="unscaled first, loss times 2¹⁵", backward=of(2.0**15, first=False)),
    ]


def rate() -> list[Way]:
    """A learning rate in a tensor of bf16 does not follow a schedule."""

    def narrow() -> Tensor:
        return torch.tensor(1e-3, dtype=torch.bfloat16)

    def decayed(optimizer: Optimizer) -> LRScheduler:
        return ExponentialLR(optimizer, GAMMA)

    def right(step: int) -> float:
        return 1e-3 * GAMMA**step

    base = Way("", kept(mcf.bf16x2), "plus", schedule=decayed, right_rate=right, steps=400)
    return [
        replace(base, name="a tensor of bf16", lr=narrow),
        replace(base, name="a number"),
    ]


GAMMA = 0.999
PARTS = 256


def in_parts(model: nn.Module, batch: Tensor, step: int) -> Exact:
    """The sum of the gradients of each window of a batch, as `backward` adds them up."""
    named = dict(model.named_parameters())
    exact = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
    for window in batch:
        value = loss(model, window[None])
        parts = torch.autograd.grad(value, list(named.values()), retain_graph=True)
        for total, part in zip(exact.values(), parts, strict=True):
            total += whole(part)
        value.backward()
    return exact


def sums() -> list[Way]:
    """A sum of 256 gradients in bf16 loses the small ones, before the step."""

    def accumulating(model: nn.Module) -> nn.Module:
        mcf.accumulate_gradients(keep(model))
        return model

    keep = kept(mcf.bf16x2)
    base = Way("", keep, "plus", backward=in_parts, batch_size=PARTS, steps=4)
    return [
        replace(base, name="256 microbatches, added up in bf16"),
        replace(base, name="`mcf.accumulate_gradients`", keep=accumulating),
    ]


def end() -> list[Way]:
    """The verdict is a median: the end of a schedule, where plain bf16 freezes, is not in it."""

    def cosine(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / END))

    base = Way("", as_it_is, lr=1e-2, schedule=cosine, steps=END)
    return [
        replace(base, name="plain bf16"),
        replace(base, name="`bf16x2`, `plus`", keep=kept(mcf.bf16x2), mode="plus"),
    ]


END = 200


# ------------------------------------------------------------------------ what meets its neighbours


def outlying(model: nn.Module, batch: Tensor, step: int, *, limit: float | None) -> Exact:
    """Gradients, one of which is 1e9 once; clipped perhaps."""
    loss(model, batch).backward()
    if step == SPIKE:
        grad = model.get_parameter(OUTLIER[0]).grad
        assert grad is not None
        grad[0, 0] = 1e9
    exact = gradients(model)
    if limit is not None:
        clip_grad_norm_(model.parameters(), limit)
        norm = math.sqrt(sum(float((x * x).sum()) for x in exact.values()))
        exact = {name: x * min(1.0, limit / norm) for name, x in exact.items()}
    return exact


OUTLIER = ("blocks.0.up.weight", (0, slice(1, 32)))


def outlier() -> list[Way]:
    """The neighbours of a gradient of 1e9 share its scale."""

    def raw(model: nn.Module, batch: Tensor, step: int) -> Exact:
        return outlying(model, batch, step, limit=None)

    def limited(model: nn.Module, batch: Tensor, step: int) -> Exact:
        return outlying(model, batch, step, limit=1.0)

    base = Way("", kept(mcf.bf16i8, mcf.bf16i16), "compact", part=OUTLIER)
    return [
        replace(base, name="`compact`", backward=raw),
        replace(base, name="states in `bf16i16`", mode=FLOAT32, backward=raw),
        replace(base, name="`compact`, clipped to a norm of 1", backward=limited),
    ]


STRIDE = 34


def now_and_then(model: nn.Module, batch: Tensor, step: int, *, stride: int) -> Exact:
    """A gradient in one step of so many, and zeros in the others."""
    if step % stride == 0:
        loss(model, batch).backward()
    else:
        for p in model.parameters():
            p.grad = torch.zeros(p.shape, dtype=p.dtype)
    return gradients(model)


def strides() -> list[Way]:
    """Balanced rounding counts writes: updates in step with the count meet one threshold."""

    def every(stride: int) -> Backward:
        return lambda model, batch, step: now_and_then(model, batch, step, stride=stride)

    balanced = Format(torch.bfloat16, 1, rounding="balanced")
    stochastic = Format(torch.bfloat16, 1, rounding="stochastic")
    base = Way("", kept(balanced), FLOAT32, lr=1e-4, betas=(0.0, 0.999), steps=20 * STRIDE)
    return [
        replace(base, name="balanced, every 34th step", backward=every(STRIDE)),
        replace(
            base, name="stochastic, every 34th step", keep=kept(stochastic), backward=every(STRIDE)
        ),
        replace(base, name="balanced, every 30th step", backward=every(30), steps=20 * 30),
        replace(
            base, name="`bf16i8`, every 34th step", keep=kept(mcf.bf16i8), backward=every(STRIDE)
        ),
    ]


CONDITIONS: dict[str, Callable[[], list[Way]]] = {
    "moments": moments,
    "tails": tails,
    "beta2": beta2,
    "large": large,
    "clipping": clipping,
    "sums": sums,
    "rate": rate,
    "end": end,
    "outlier": outlier,
    "strides": strides,
}
