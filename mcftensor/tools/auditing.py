"""Weights that silently froze between two checkpoints of one training run."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mcftensor.checkpoint.checkpoint_error import CheckpointError, extra, some
from mcftensor.checkpoint.open_checkpoint import Checkpoint
from mcftensor.checkpoint.open_checkpoint import tensors as tensors_of
from mcftensor.tensor import text_tables
from mcftensor.tensor.components import check_components, stored_format_of
from mcftensor.tensor.tensor import MCFTensor

if TYPE_CHECKING:
    from rich.table import Table

Verdict = Literal["frozen", "mostly frozen", "moving"]

_BLOCK = 1 << 17
"""Elements that are compared at a time: few enough for temporary copies to stay in the cache."""

_LEFT_OUT = {"not_floating": "integer or boolean", "empty": "empty", "ignored": "ignored"}
_STYLES: dict[Verdict, str] = {"frozen": "red", "mostly frozen": "yellow", "moving": ""}


@dataclass(frozen=True)
class TensorAudit:
    """The change of one tensor between two checkpoints.

    Shares are of its elements, from 0 to 1. An expansion is one element, with all its terms.

    Args:
        name: its name in the state dict.
        shape: its shape.
        dtype: its dtype, such as `"bfloat16"`, or the name of its format, such as `"bf16x2"`.
        unchanged: share that is equal in both checkpoints; NaN counts as equal to NaN.
        zeros: share that is exactly 0 in both.
        ones: share that is exactly 1 in both, as untouched norm weights are.
        verdict: `"frozen"` if every element is unchanged, `"mostly frozen"` if the share reaches
            the threshold, else `"moving"`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    unchanged: float
    zeros: float
    ones: float
    verdict: Verdict

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def cells(self) -> tuple[str, ...]:
        """Return a row of a table."""
        return (
            self.name,
            "x".join(map(str, self.shape)) or "scalar",
            self.dtype.replace("bfloat", "bf").replace("float", "fp"),
            _percent(self.unchanged),
            _percent(self.zeros),
            _percent(self.ones),
            self.verdict,
        )


@dataclass(frozen=True)
class Audit:
    """The result of `audit`.

    Args:
        tensors: every tensor that was compared, the most frozen first.
        threshold: the share of unchanged elements from which a tensor is mostly frozen.
        not_floating: number of tensors left out as integer or boolean.
        empty: number of tensors left out because they have no elements.
        ignored: number of tensors left out by a pattern.
    """

    tensors: list[TensorAudit]
    threshold: float
    not_floating: int
    empty: int
    ignored: int

    @property
    def suspicious(self) -> list[TensorAudit]:
        """The tensors that are frozen or mostly frozen."""
        return [t for t in self.tensors if t.verdict != "moving"]

    @property
    def elements(self) -> int:
        """Number of elements of all tensors that were compared."""
        return sum(t.numel for t in self.tensors)

    @property
    def unchanged(self) -> float:
        """Share of all these elements that is equal in both checkpoints."""
        return math.fsum(t.unchanged * t.numel for t in self.tensors) / self.elements

    def summary(self) -> str:
        """Return the audit in one line."""
        verdicts = [t.verdict for t in self.tensors]
        left_out = {words: getattr(self, name) for name, words in _LEFT_OUT.items()}
        named = ", ".join(f"{count} {words}" for words, count in left_out.items() if count)
        return (
            f"{len(self.tensors)} tensors: {verdicts.count('frozen')} frozen, "
            f"{verdicts.count('mostly frozen')} mostly frozen; "
            f"{_percent(self.unchanged)} of {self.elements:,} elements unchanged"
            + (f"; left out: {named}" if named else "")
        )

    def table(self, *, moving: bool = False) -> Table:
        """Return the suspicious tensors as a table for `rich.print`.

        Args:
            moving: whether tensors that move are listed too.

        Raises:
            ImportError: rich is not installed.
        """
        tables, text = extra("rich.table", "audit"), extra("rich.text", "audit")
        table: Table = tables.Table(
            box=extra("rich.box", "audit").SIMPLE_HEAD, pad_edge=False, collapse_padding=True
        )
        # Names are what the reader copies: they may be folded, but never cut.
        table.add_column("tensor", overflow="fold", min_width=16)
        table.add_column("shape", overflow="fold", justify="right")
        table.add_column("dtype", no_wrap=True)
        for heading in ("unchanged", "at 0", "at 1"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("verdict")
        for t in self.tensors if moving else self.suspicious:
            name, *figures, verdict = t.cells()
            table.add_row(text.Text(name), *figures, text.Text(verdict, style=_STYLES[t.verdict]))
        return table

    def _repr_html_(self) -> str:
        heads = ("tensor", "shape", "dtype", "unchanged", "at 0", "at 1", "verdict")
        return text_tables.as_html([heads, *(t.cells() for t in self.tensors)], [self.summary()])

    def to_dict(self) -> dict[str, Any]:
        """Return everything in plain lists, dicts, strings and numbers."""
        verdicts = [t.verdict for t in self.tensors]
        return {
            "threshold": self.threshold,
            "compared": len(self.tensors),
            "frozen": verdicts.count("frozen"),
            "mostly_frozen": verdicts.count("mostly frozen"),
            "elements": self.elements,
            "unchanged": self.unchanged,
            "left_out": {name: getattr(self, name) for name in _LEFT_OUT},
            "tensors": [asdict(t) | {"shape": list(t.shape)} for t in self.tensors],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def audit(
    before: Checkpoint,
    after: Checkpoint,
    *,
    threshold: float = 0.5,
    ignore: Iterable[str] = (),
) -> Audit:
    """Find weights that silently froze between two checkpoints of one training run.

    An update smaller than 2^-9 of a bf16 weight rounds away, in every step anew, while the loss
    still falls. Such tensors are told by the share of their elements that is equal in both
    checkpoints.

    A checkpoint is a state dict, or the path of

    - a file of `torch.save`, which is loaded with `weights_only=True`; a state dict that it
      nests under a usual key, such as `"state_dict"` or `"model"`, is found;
    - a safetensors file, or the index of a sharded checkpoint in the folder of its shards;
    - a folder with one of these under its usual name of Hugging Face.

    Files are mapped, and compared in small blocks: checkpoints may be larger than memory, as long
    as each single file is not. Files that torch wrote before 1.6 are read as a whole.

    The audit sees that a tensor did not move, not why. Tensors that are constant or frozen on
    purpose look frozen too (leave them out: `ignore=["*.inv_freq"]`). Rows of an embedding whose
    tokens never occurred are rightly unchanged. Checkpoints a few steps apart show far more
    unchanged elements than checkpoints with a good part of the training between them.

    Args:
        before: the earlier checkpoint. A state dict in memory must be a copy, because the tensors
            of `module.state_dict()` change with the module.
        after: the later one, with the same tensors.
        threshold: the share of unchanged elements from which a tensor is mostly frozen.
        ignore: patterns (fnmatch) of names of tensors to leave out.

    Returns:
        An Audit, with a verdict on every floating or complex tensor. Integer, boolean and empty
        tensors are left out and counted.

    Raises:
        CheckpointError: a checkpoint that cannot be read or holds no state dict; names, shapes,
            dtypes or formats that differ; a pattern that matches nothing; no tensor to compare;
            one state dict in memory given twice. The message is one line.
        ValueError: a threshold that is not above 0 and at most 1.
        TypeError: a checkpoint that is neither path nor mapping.
        ImportError: a safetensors file, and no package to read it.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> norm = torch.nn.LayerNorm(4, dtype=torch.bfloat16)
        >>> before = {name: x.clone() for name, x in norm.state_dict().items()}
        >>> for p in norm.parameters():
        ...     _ = p.data.sub_(1e-4)  # an update that 1.0 cannot take
        >>> found = mcf.meters.audit(before, norm.state_dict())
        >>> [(t.name, t.verdict, t.unchanged, t.ones) for t in found.tensors]
        [('weight', 'frozen', 1.0, 1.0), ('bias', 'moving', 0.0, 0.0)]
        >>> print(found.summary())
        2 tensors: 1 frozen, 0 mostly frozen; 50% of 8 elements unchanged
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"audit: threshold {threshold!r}; give a share above 0 and at most 1")
    old, new = tensors_of(before, "before"), tensors_of(after, "after")
    names, ignored = _common_names(old, new, [ignore] if isinstance(ignore, str) else list(ignore))
    tensors, not_floating, empty, shared = [], 0, 0, True
    for name in names:
        x, y = old[name], new[name]
        _require_comparable(name, x, y)
        if not (x.is_floating_point() or x.is_complex()):
            not_floating += 1
        elif not x.numel():
            empty += 1
        else:
            tensors.append(_compare(name, x, y, threshold))
            shared &= _leading(x).data_ptr() == _leading(y).data_ptr()
    if not tensors:
        raise CheckpointError(
            "nothing to compare: of the tensors in both checkpoints, "
            f"{not_floating} are integer or boolean, {empty} empty and {ignored} ignored"
        )
    if shared:
        raise CheckpointError(
            "before and after are the same memory: module.state_dict() holds the weights "
            "themselves; clone them, or save them, before training goes on"
        )
    tensors.sort(key=lambda t: (-t.unchanged, _natural(t.name)))
    return Audit(tensors, threshold, not_floating, empty, ignored)


# -------------------------------------------------------------------------------------- compare


def _common_names(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], patterns: list[str]
) -> tuple[list[str], int]:
    """Return the names to compare, in the order of `old`, and the number that the patterns leave
    out.
    """
    union = list(dict.fromkeys([*old, *new]))
    ignored = set()
    for pattern in patterns:
        matching = [name for name in union if fnmatchcase(name, pattern)]
        if not matching:
            raise CheckpointError(
                f"the pattern {pattern!r} to ignore matches none of the names: {some(union)}"
            )
        ignored.update(matching)
    lone = {
        "before": [name for name in old if name not in new and name not in ignored],
        "after": [name for name in new if name not in old and name not in ignored],
    }
    if any(lone.values()):
        listed = "; ".join(
            f"{len(found)} only in {side}: {some(found)}" for side, found in lone.items() if found
        )
        raise CheckpointError(
            f"the checkpoints hold tensors of different names ({listed}); what belongs in one only "
            "can be ignored"
        )
    return [name for name in old if name not in ignored], len(ignored)


def _require_comparable(name: str, x: Tensor, y: Tensor) -> None:
    for t in (x, y):
        plain = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided
        if not (plain or isinstance(t, MCFTensor)) or t.is_nested or t.is_meta:
            kind = "meta tensor" if t.is_meta else f"{type(t).__name__} of {t.layout}"
            raise CheckpointError(
                f"{name} is a {kind}; only dense tensors and expansions can be compared: convert "
                "it, or ignore it"
            )
        if isinstance(t, MCFTensor):
            try:  # Unpickling sets attributes, and checks none of them.
                check_components(t.components, t.format)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise CheckpointError(f"{name} is a damaged expansion ({error})") from error
    dtypes = stored_format_of(x).name, stored_format_of(y).name
    for what, a, b in (("shape", tuple(x.shape), tuple(y.shape)), ("dtype", *dtypes)):
        if a != b:
            raise CheckpointError(f"{name} has {what} {a} in before and {b} in after")


def _compare(name: str, x: Tensor, y: Tensor, threshold: float) -> TensorAudit:
    counts, dtype = np.zeros(3, dtype=np.int64), stored_format_of(x).name
    try:
        for a, b in _blocks(_floats(x), _floats(y)):
            counts += _count([_array(t) for t in a], [_array(t) for t in b])
    except NotImplementedError:
        raise CheckpointError(
            f"{name} is of {dtype}, which cannot be compared; ignore it"
        ) from None
    unchanged, zeros, ones = (int(count) / x.numel() for count in counts)
    verdict: Verdict = "moving"
    if unchanged == 1:
        verdict = "frozen"
    elif unchanged >= threshold:
        verdict = "mostly frozen"
    return TensorAudit(name, tuple(x.shape), dtype, unchanged, zeros, ones, verdict)


def _leading(x: Tensor) -> Tensor:
    return x.components[0] if isinstance(x, MCFTensor) else x


def _floats(x: Tensor) -> tuple[Tensor, ...]:
    """Return the floats whose sum the tensor is."""
    return tuple(x.format.decode(x.components)) if isinstance(x, MCFTensor) else (x.detach(),)


def _blocks(
    x: tuple[Tensor, ...], y: tuple[Tensor, ...]
) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Yield views of at most `_BLOCK` elements, made by halving, which needs no copy for any
    strides.
    """
    if x[0].numel() <= _BLOCK:
        yield x, y
        return
    longest = max(range(x[0].dim()), key=x[0].size)
    for half in zip(*(t.tensor_split(2, longest) for t in (*x, *y)), strict=True):
        yield from _blocks(half[: len(x)], half[len(x) :])


def _array(x: Tensor) -> np.ndarray:
    """Return a NumPy array, which compares several times as fast as torch, and has no floats below
    float16.
    """
    if x.is_complex():
        x = x.to(torch.promote_types(x.dtype, torch.complex64))
    elif x.dtype.itemsize < 4:
        x = x.to(torch.float32)
    return x.numpy(force=True)


def _count(x: list[np.ndarray], y: list[np.ndarray]) -> list[int]:
    """Count the elements that are equal, 0 in both, and 1 in both."""
    same = functools.reduce(np.logical_and, [a == b for a, b in zip(x, y, strict=True)])
    leading, *tails = x
    whole = functools.reduce(np.logical_and, [tail == 0 for tail in tails], same)
    masks = [same, whole & (leading == 0), whole & (leading == 1)]
    if not same.all():
        # An expansion is NaN if its leading term is, with any tails.
        masks[0] = same | (np.isnan(leading) & np.isnan(y[0]))
    return [int(np.count_nonzero(mask)) for mask in masks]


def _percent(share: float) -> str:
    """Return a share as text; only exactly 0 and 1 read 0% and 100%."""
    if 0 < share < 1:
        return f"{min(max(round(100 * share, 2), 0.01), 99.99):g}%"
    return f"{share:.0%}"


def _natural(name: str) -> list[str | int]:
    """Return a key that sorts layer 9 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]
