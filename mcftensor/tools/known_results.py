"""Computations with known bits: operations, conversions and optimizer steps.

`digests.json` has the digests of their results on a CPU, with float64 and without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from mcftensor.arithmetic import eft
from mcftensor.arithmetic.base_types import BASES
from mcftensor.formats import FORMATS, ExpansionFormat, Format, bf16x2, named
from mcftensor.kernels.program import PATTERNS
from mcftensor.kernels.without_float64 import has_float64, widest, without_float64
from mcftensor.passes.expressions import Expression, Operand, carry_out
from mcftensor.passes.format_conversion import decode_columns, encode_columns
from mcftensor.tensor.tensor import MCFTensor
from mcftensor.tools.hard_inputs import any_bits, full_bits, hard_terms, hashes
from mcftensor.training.collage import collage
from mcftensor.training.format_change import components_of

FILE = Path(__file__).with_name("digests.json")

Work = Callable[[torch.device], Iterable[Tensor]]
"""A computation whose result does not depend on the device."""

LENGTH = 4099
SHAPE = (33, 96)
"""The shape of tensors in block formats."""

_KEY = 2**61 + 12345
_OPERATIONS = {"add": 2, "mul": 2, "div": 2, "sqrt": 1, "fma": 3}
# The formats tested among those whose kernels take seconds to compile.
_LONG = {"fp32x3": ("add",), "fp64x2": ("add", "mul")}
_TRANSFORMATIONS = {"two_sum": 2, "fast_two_sum": 2, "two_prod": 2, "split": 1, "fma": 3, "sqrt": 1}
_ROUNDED = {
    "stochastic": ("bf16x2sr", "fp32x2sr", "bf16i8sr", "bf16sr"),
    "balanced": ("bf16x2br", "bf16i8", "bf16br", "mxfp8", "ue5m3", "e4m3i8", "e4m3i16"),
}
_STORED = ("bf16i16", "bf16i8rn")
_FUSED: dict[str, Callable[..., Optimizer]] = {
    "AdamW": partial(AdamW, weight_decay=0.1, fused=True),
    "Adam": partial(Adam, amsgrad=True, maximize=True, fused=True),
    "SGD": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "Adagrad": partial(Adagrad, weight_decay=0.1, fused=True),
}
# A format of weights, and the mode of `collage`.
_MODES = (
    *(("bf16x2", mode) for mode in ("light", "plus", "full")),
    *((name, "full") for name in ("bf16x3", "fp16x2", "fp32x2", "bf16x2br", "bf16i16")),
    *((name, "compact") for name in ("bf16i8", "e4m3i8")),
)
_UNFUSED: dict[str, Callable[..., Optimizer]] = {
    "AdamW for-loop": partial(AdamW, foreach=False),
    "AdamW foreach": partial(AdamW, foreach=True),
    "SGD foreach": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
}


def is_of_float64(name: str) -> bool:
    """Whether a computation is of float64, by its name."""
    return "float64" in name or "fp64" in name


def known_work(*, in_float64: bool = True) -> dict[str, dict[str, Work]]:
    """Return groups of computations by name; without float64, those that are not of it."""
    steps: dict[str, Work] = {
        f"{name}, {weights}, {mode}": partial(_stepped, make, weights, mode)
        for weights, mode in _MODES
        for name, make in _FUSED.items()
        if name == "AdamW" or (weights, mode) == ("bf16x2", "full")
    }
    unfused: dict[str, Work] = {
        f"{name}, {weights}": partial(_stepped, make, weights, "full")
        for weights in ("bf16x2", "bf16x3", "fp32x2")
        for name, make in _UNFUSED.items()
        if weights == "bf16x2" or name == "AdamW for-loop"
    }
    stochastic: dict[str, Work] = {
        f"rounding to {name}": partial(_encoded, named(name), torch.float32)
        for name in _ROUNDED["stochastic"]
    }
    stochastic["lerp in bf16x2sr"] = partial(_operated, "lerp", bf16x2.with_rounding("stochastic"))
    converted = (*FORMATS, *map(named, _STORED))
    conversions: dict[str, Work] = {
        f"{str(dtype).removeprefix('torch.')} to {format.name}": partial(_encoded, format, dtype)
        for format in converted
        for dtype in (torch.float32, torch.float64)
    }
    conversions |= {f"{format.name} to float32": partial(_decoded, format) for format in converted}
    every: dict[str, dict[str, Work]] = {
        "transformations of any bits": {
            f"{name} in {str(base).removeprefix('torch.')}": partial(_transformed, name, base)
            for base in BASES
            for name in _TRANSFORMATIONS
        },
        "subnormal numbers": {
            f"{name} in {str(base).removeprefix('torch.')}": partial(work, base)
            for base in BASES
            for name, work in (("sums", _small_sums), ("products", _small_products))
        },
        "quotients and roots": {
            "quotients in float32": partial(_plain, torch.div, torch.float32, 2),
            "quotients in float64": partial(_plain, torch.div, torch.float64, 2),
            "roots in float64": partial(_plain, torch.sqrt, torch.float64, 1),
        },
        "operations": {
            f"{name} in {format.name}": partial(_operated, name, format)
            for format in FORMATS
            for name in _OPERATIONS
            if format.name not in _LONG or name in _LONG[format.name]
        },
        "stochastic rounding": stochastic,
        "balanced rounding": {
            f"rounding to {name}": partial(_encoded, named(name), torch.float32)
            for name in _ROUNDED["balanced"]
        },
        "conversions": conversions,
        "fused steps": steps,
        "foreach and for-loop steps": unfused,
    }
    return {
        group: {name: x for name, x in works.items() if in_float64 or not is_of_float64(name)}
        for group, works in every.items()
    }


def bits_digest(results: Iterable[Tensor]) -> str:
    """Return a digest of the bits of tensors; all NaNs are equal."""
    state = hashlib.blake2b(digest_size=6)
    for x in results:
        bits = x.detach().contiguous().cpu()
        patterns = bits.view(PATTERNS[bits.dtype.itemsize])
        if bits.is_floating_point():
            patterns = patterns.masked_fill(bits.isnan(), -1)
        state.update(f"{bits.dtype} {tuple(bits.shape)}".encode() + patterns.numpy().tobytes())
    return state.hexdigest()


_FILED = {True: "with float64", False: "without float64"}


def recorded_digests(*, in_float64: bool = True) -> dict[str, dict[str, str]]:
    """Return the digests of a CPU with float64 or without it, by groups and names."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found[_FILED[in_float64]]


def made_digests(device: torch.device) -> dict[str, dict[str, str]]:
    """Compute the digests of a device, in float64 if it has that, by groups and names."""
    return {
        group: {name: bits_digest(work(device)) for name, work in works.items()}
        for group, works in known_work(in_float64=has_float64(device)).items()
    }


def write_digests() -> None:
    """Write the file anew, by this CPU."""
    made = {_FILED[True]: made_digests(torch.device("cpu"))}
    with without_float64():
        made[_FILED[False]] = made_digests(torch.device("cpu"))
    FILE.write_text(json.dumps(made, indent=0) + "\n")


# ----------------------------------------------------------------------------------------- work


def _transformed(name: str, base: torch.dtype, device: torch.device) -> Iterable[Tensor]:
    numbers = [any_bits(base, f"{name} {i}", LENGTH) for i in range(_TRANSFORMATIONS[name])]
    if name == "fast_two_sum":
        a, b = numbers
        numbers = [torch.where(a.abs() < b.abs(), b, a), torch.where(a.abs() < b.abs(), a, b)]
    result = getattr(eft, name)(*[x.to(device) for x in numbers])
    return [result] if isinstance(result, Tensor) else result


def _small_sums(base: torch.dtype, device: torch.device) -> Iterable[Tensor]:
    x, y = (_subnormal(base, name).to(device) for name in "xy")
    return [x + y, x - y, torch.where(x > 0, x, y)]


def _small_products(base: torch.dtype, device: torch.device) -> Iterable[Tensor]:
    x, factors = _subnormal(base, "x").to(device), full_bits(base, "factors", LENGTH).to(device)
    return [x * factors, x / factors, x * 0.75]


def _subnormal(base: torch.dtype, name: str) -> Tensor:
    return full_bits(base, name, LENGTH) * (torch.finfo(base).tiny / 2)


def _plain(
    function: Callable[..., Tensor], base: torch.dtype, count: int, device: torch.device
) -> Iterable[Tensor]:
    numbers = [any_bits(base, f"plain {i}", 1 << 16).to(device) for i in range(count)]
    return [function(*numbers)]


def _operated(name: str, format: ExpansionFormat, device: torch.device) -> Iterable[Tensor]:
    count = _OPERATIONS.get(name, 3)
    operands = [
        Operand(format, [[t.to(device)] for t in hard_terms(format, f"{name} {i}", LENGTH)])
        for i in range(count)
    ]
    made = format.empty_like(operands[0].components[0][0])  # type: ignore[arg-type]
    carry_out(Expression(name, format), operands, [[x] for x in made], _keys(format, device))
    return made


def _keys(format: Format, device: torch.device) -> list[Tensor]:
    return [torch.tensor(_KEY, device=device)] if format.takes_key else []


def _encoded(format: Format, dtype: torch.dtype, device: torch.device) -> Iterable[Tensor]:
    is_in_blocks = bool(format.shared)
    numbers = (
        full_bits(dtype, "in blocks", *SHAPE).abs()
        if is_in_blocks
        else any_bits(dtype, "any", LENGTH)
    )
    x = numbers.to(device)
    made = format.empty_like(x)
    encode_columns(format, [x], [[y] for y in made], _keys(format, device))
    return made


def _decoded(format: Format, device: torch.device) -> Iterable[Tensor]:
    components = [x.to(device) for x in _encoded(format, widest(), torch.device("cpu"))]
    numbers = torch.empty_like(format.template(components[0]), dtype=torch.float32)
    decode_columns(format, [[x] for x in components], [numbers])
    return [numbers]


def _stepped(
    make: Callable[..., Optimizer], weights: str, mode: str, device: torch.device
) -> Iterable[Tensor]:
    """Return the components of weights and states after three steps."""
    params = [_parameter(named(weights), i, device) for i in range(3)]
    optimizer = collage(make(params), mode)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = full_bits(p.dtype, f"gradient {step} {i}", *p.shape).to(device)
        optimizer.step()
    states = [optimizer.state[p] for p in params]
    found = [*params, *(s[key] for s in states for key in sorted(s) if key != "step")]
    return [y for x in found if isinstance(x, Tensor) for y in components_of(x)]


def _parameter(format: Format, seed: int, device: torch.device) -> nn.Parameter:
    x = full_bits(torch.float32, f"weights {seed}", SHAPE[0] + seed, SHAPE[1])
    made = format.empty_like(x)
    host = torch.device("cpu")
    encode_columns(format, [x], [[y] for y in made], _keys(format, host))
    components = [y.to(device) for y in made]
    writes = torch.tensor(seed << 32, device=device) if format.rounding == "balanced" else None
    return nn.Parameter(MCFTensor.of(components, format, writes=writes))


# ----------------------------------------------------------------------------- a backward pass

_WIDTH, _WORDS, _LENGTH, _BATCH = 96, 101, 33, 3


def leaf_digest(device: torch.device) -> str:
    """Return the digest of the gradients of one microbatch of a small network, in bfloat16.

    Its operations are torch's, whose bits differ between processors, releases and numbers of
    threads. Machines that compute the leaves of one step must agree.
    """
    return bits_digest(_gradients(device))


def _gradients(device: torch.device) -> tuple[Tensor, ...]:
    """Gradients of an attention and a GELU layer, with norms, an embedding and a cross entropy."""
    shapes = {
        "embedding": (_WORDS, _WIDTH),
        "queries, keys, values": (3 * _WIDTH, _WIDTH),
        "up": (4 * _WIDTH, _WIDTH),
        "down": (_WIDTH, 4 * _WIDTH),
        "gain": (_WIDTH,),
        "offset": (_WIDTH,),
    }
    weights = [
        (full_bits(torch.bfloat16, name, *shape) / 64).to(device).requires_grad_()
        for name, shape in shapes.items()
    ]
    words = ((hashes("words", _BATCH, _LENGTH) >> 8) % _WORDS).to(device)
    with torch.enable_grad():
        loss = _loss(weights, words)
        return torch.autograd.grad(loss, weights)


def _loss(weights: list[Tensor], words: Tensor) -> Tensor:
    embedding, projection, up, down, gain, offset = weights
    x = functional.embedding(words[:, :-1], embedding)
    normed = functional.layer_norm(x, (_WIDTH,), gain, offset)
    queries, keys, values = functional.linear(normed, projection).chunk(3, -1)
    shares = (queries @ keys.transpose(-1, -2) / _WIDTH**0.5).softmax(-1)
    x = x + shares @ values
    normed = functional.layer_norm(x, (_WIDTH,), gain, offset)
    x = x + functional.linear(functional.gelu(functional.linear(normed, up)), down)
    logits = functional.linear(x, embedding).float()
    return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
