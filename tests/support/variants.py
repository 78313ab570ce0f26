"""What of PyTorch's operator database writes into a tensor, held against its functional form.

In place and with `out=`, all terms are written and have the same bits, or none is and the call
raises what PyTorch raises or NotImplementedError.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import mcftensor as mcf
from common.operators import DRAWN, OPERATORS, UNITS, as_wide, attempt, exactly, inputs
from mcftensor.kernels.without_float64 import has_float64

IN_PLACE = [name for name, op in OPERATORS.items() if op.get_inplace() is not None]
WITH_OUT = [name for name, op in OPERATORS.items() if op.supports_out]

SEED = 42
"""That of the database, whose operators in place for random numbers set it themselves."""

# LAPACK's result on one and the same float64 matrix depends on where it lies in memory.
NOT_REPRODUCIBLE = {"linalg.lstsq"}


@dataclass
class Outcome:
    """How many calls wrote, how many raised, and how many wrote into plain tensors."""

    computed: int = 0
    raised: int = 0
    plain: int = 0


def in_place(name: str, format: mcf.Format, limit: int | None = None) -> Outcome:
    """Run samples of an operator in place, on values and on parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _in_place(OPERATORS[name], format, limit)


def with_out(name: str, format: mcf.Format, limit: int | None = None) -> Outcome:
    """Run samples of an operator with `out=`, into expansions and into plain tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _with_out(OPERATORS[name], name, format, limit)


def _in_place(op: Any, format: mcf.Format, limit: int | None) -> Outcome:
    outcome = Outcome()
    method = op.get_inplace()
    for args, kwargs in inputs(op, format, limit):
        if not isinstance(args[0], mcf.MCFTensor):
            continue
        wide, narrow = (tree_map(as_wide, args), kwargs), _cast((args, kwargs), format.base)
        plain = wide[0][0]
        theirs = [attempt(lambda: method(*wide[0], **wide[1]), SEED)]  # noqa: B023
        expected = attempt(lambda: op(args[0].clone(), *args[1:], **kwargs), SEED)  # noqa: B023
        for role in ("value", "parameter"):
            target = _in_role(args[0].clone(), role)
            before = _bits(target)
            result = attempt(
                lambda: method(target, *_in_role(args[1:], role), **_in_role(kwargs, role)),  # noqa: B023
                SEED,
            )
            if isinstance(result, Exception):
                theirs.append(attempt(lambda: method(*narrow[0], **narrow[1]), SEED))  # noqa: B023
                _assert_refused(result, theirs)
                assert _alike(_bits(target), before), "half written"
                outcome.raised += 1
                continue
            assert not isinstance(theirs[0], Exception), "computes where PyTorch raises"
            assert not isinstance(expected, Exception), "computes what the functional form refuses"
            assert result is target
            assert (target.format, target.role, target.shape) == (format, role, plain.shape)
            written = target.new_empty(plain.shape).copy_(expected)
            assert _alike(_bits(target), _bits(written)), "other bits than the functional form"
            outcome.computed += 1
    return outcome


def _with_out(op: Any, name: str, format: mcf.Format, limit: int | None) -> Outcome:
    outcome = Outcome()
    for args, kwargs in inputs(op, format, limit):
        wide, narrow = tree_map(as_wide, (args, kwargs)), _cast((args, kwargs), format.base)
        reference = attempt(lambda: op(*wide[0], **wide[1]), SEED)  # noqa: B023
        expected = attempt(lambda: op(*args, **kwargs), SEED)  # noqa: B023
        exact = tree_leaves(exactly(name, wide[0], reference))
        found = tree_leaves(expected)
        if name in DRAWN and not has_float64():  # other numbers than those of float64
            exact = [as_wide(x) for x in found]
        if isinstance(expected, Exception) or not all(map(_is_dense, exact)):
            continue
        for role in ("value", "parameter"):
            if role == "parameter" and not any(isinstance(x, mcf.MCFTensor) for x in found):
                continue  # leading terms make plain results
            outs = [_blank(x, format) for x in found]
            befores = [_bits(out) for out in outs]
            result = _call(op, _in_role((args, kwargs), role), outs, reference)
            if isinstance(result, Exception):
                _assert_refused(result, [_plain_call(op, x, reference) for x in (wide, narrow)])
                for out, before in zip(outs, befores, strict=True):
                    assert _alike(_bits(out), before) or not isinstance(out, mcf.MCFTensor)
                outcome.raised += 1
                continue
            assert all(x is out for x, out in zip(tree_leaves(result), outs, strict=True))
            for out, x, y in zip(outs, found, exact, strict=True):
                if op.name in NOT_REPRODUCIBLE:
                    _assert_rounded(as_wide(out), x, y, format)
                else:
                    assert _alike(_bits(out), _bits(x)), "other bits than the functional form"
            outcome.computed += 1
        for dtype in (torch.float32, format.base):
            outs = [_plain_blank(x, dtype) for x in found]
            result = _call(op, (args, kwargs), outs, reference)
            if isinstance(result, Exception):
                _assert_refused(result, [_plain_call(op, x, reference) for x in (wide, narrow)])
                continue
            for out, x, y in zip(outs, found, exact, strict=True):
                _assert_rounded(out, x, y, format)
            outcome.plain += 1
    return outcome


def _call(op: Any, arguments: Any, outs: Sequence[Tensor], like: Any) -> Any:
    out = outs[0] if isinstance(like, Tensor) else tuple(outs)
    return attempt(lambda: op(*arguments[0], **arguments[1], out=out), SEED)


def _plain_call(op: Any, arguments: Any, reference: Any) -> Any:
    """What PyTorch says to the same call on plain tensors, into outs of their dtype or another."""
    dtypes = [x.dtype for x in tree_leaves(arguments) if _is_dense(x) and x.is_floating_point()]
    outs = [
        torch.empty(x.shape, dtype=dtypes[0] if x.dtype == torch.float64 else x.dtype)
        for x in tree_leaves(reference)
    ]
    result = _call(op, arguments, outs, reference)
    if isinstance(result, Exception):
        return result
    return _call(op, arguments, [out.to(torch.float32) for out in outs], reference)


def _assert_refused(error: Exception, theirs: Sequence[Any]) -> None:
    """The error of an operation that is not available, or one of PyTorch's own."""
    known = {NotImplementedError, *(type(e) for e in theirs if isinstance(e, Exception))}
    assert type(error) in known, repr(error)


def _assert_rounded(out: Tensor, x: Any, y: Tensor, format: mcf.Format) -> None:
    """A plain result within the format's error and one rounding; others are as they are."""
    if not isinstance(x, mcf.MCFTensor):
        assert out.is_complex() or _alike(_bits(out), _bits(x))
        return
    assert torch.equal(torch.isnan(out), torch.isnan(y))
    counts = torch.isfinite(y) & (y.abs() < 2.0**format.max_exponent)
    relative = UNITS * format.u**format.terms + torch.finfo(out.dtype).eps / 2
    bound = y.abs().clamp_min(format.full_precision_min) * relative
    assert ((out.double() - y).abs() <= bound)[counts].all()


def _is_dense(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided


def _blank(x: Tensor, format: mcf.Format) -> Tensor:
    if isinstance(x, mcf.MCFTensor):
        return torch.full_like(x, torch.nan)
    return torch.empty_like(x)


def _plain_blank(x: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(x, mcf.MCFTensor):
        return torch.full(x.shape, torch.nan, dtype=dtype)
    return torch.empty_like(x)


def _in_role(tree: Any, role: Any) -> Any:
    return tree_map(
        lambda x: (
            mcf.MCFTensor(x.components, x.format, role) if isinstance(x, mcf.MCFTensor) else x
        ),
        tree,
    )


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: mcf.as_plain(x, dtype) if isinstance(x, mcf.MCFTensor) else x, tree)


def _bits(x: Tensor) -> list[Tensor]:
    """The bytes of all terms; flat, as functions in Python may reshape before they raise."""
    terms = x.components if isinstance(x, mcf.MCFTensor) else [x]
    return [term.flatten().clone().view(torch.uint8) for term in terms]


def _alike(x: Sequence[Tensor], y: Sequence[Tensor]) -> bool:
    return len(x) == len(y) and all(map(torch.equal, x, y))
