"""Blocks of a format with shared scales that hold numbers too large for it, and who says so."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.optim import Optimizer

from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.formats import Format
from mcftensor.kernels.block_scales import BLOCK_SIZE, block_max
from mcftensor.patches.optimizers import named_parameters_of
from mcftensor.patches.table import calls
from mcftensor.tensor.dtensor import local
from mcftensor.tensor.tensor import MCFTensor
from mcftensor.training.step_warnings import callers_level


class SaturationWarning(UserWarning):
    """A number in a block of elements with one scale is too large for the format, or is not finite.

    Of its neighbours in the block second moments are raised, and first moments and weights become
    zero, until the number is small again; an infinite second moment stays for good.

    Raised once for each tensor: when an optimizer gives its state dict, which reads all numbers
    anyway, and by `mcf.EDQ` on measured steps. Other steps read no numbers.
    """


# Elements that are decoded together.
_PART = 1 << 20


def saturated_blocks(x: Tensor) -> Tensor | None:
    """Count the blocks with a number that is not finite, or is the largest of the format.

    Args:
        x: a tensor, whose blocks on this rank are counted.

    Returns:
        The count as an int64 without dimensions on the device of x, which nobody has waited for;
        None where elements share no scales.
    """
    x = local(x.detach())
    if not isinstance(x, MCFTensor) or not x.format.shared or is_fake(x) or x.is_meta:
        return None
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    limit = _largest(x.format)
    rows = max(1, _PART // max(1, x.numel() // max(1, x.shape[0])))
    for part in zip(*(y.split(rows) for y in x._read()), strict=True):
        (numbers,) = x.format.decode(part)
        total += block_max((~(numbers.abs() < limit)).to(torch.int32)).sum()
    return total


@functools.lru_cache(maxsize=64)
def _largest(format: Format) -> float:
    """The number at which a format saturates."""
    most = torch.full((1, BLOCK_SIZE), torch.finfo(torch.float32).max, device="cpu")
    return float(format.decode(format.nearest.encode(Sum([most]), None))[0].amax())


_warned: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()


def warn_of(optimizer: Optimizer, found: Mapping[str, tuple[int, Tensor]]) -> None:
    """Warn of tensors of an optimizer with saturated blocks, each by its name and count."""
    known = _warned.setdefault(optimizer, set())
    new = {name: x for name, x in found.items() if x[0] and name not in known}
    if not new:
        return
    known.update(new)
    parts = [
        f"{name} of shape {tuple(x.shape)} in {local(x).format.name}: {count} "  # type: ignore[attr-defined]
        f"block{'s' * (count > 1)}"
        for name, (count, x) in list(new.items())[:5]
    ]
    parts += [f"and {len(new) - 5} more"] * (len(new) > 5)
    warnings.warn(
        f"{type(optimizer).__name__}: numbers are too large for their format, or not finite: "
        f"{'; '.join(parts)}. Neighbours in a block of 32 hardly move while this lasts. Clip "
        "gradients, look for the step whose gradient was that large, and drop the states of these "
        "parameters, or keep them in mcf.bf16i16: mcf.collage(optimizer, {'exp_avg_sq': "
        "mcf.bf16i16})",
        SaturationWarning,
        stacklevel=callers_level(),
    )


def _check_when_saved(optimizer: Optimizer) -> None:
    """Look at all states and parameters of an optimizer that gives its state dict."""
    if torch.compiler.is_compiling():
        return
    tensors: dict[str, Tensor] = {}
    for name, _, p in named_parameters_of(optimizer):
        own = optimizer.state.get(p)
        states: Mapping[Any, Any] = own if isinstance(own, dict) else {}
        tensors |= {name: p, **{f"{key} of {name}": x for key, x in states.items()}}
    tensors = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    counts = {name: saturated_blocks(x) for name, x in tensors.items()}
    found = {name: (int(n), tensors[name]) for name, n in counts.items() if n is not None}
    warn_of(optimizer, found)


calls.when_saved = _check_when_saved
