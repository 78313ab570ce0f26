"""State dicts of expansions as state dicts of their terms, which every program can store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mcftensor.arithmetic.write_counts import moved
from mcftensor.checkpoint.checkpoint_error import CheckpointError, some
from mcftensor.formats import Format
from mcftensor.kernels.program import PATTERNS
from mcftensor.tensor.components import (
    any_format_of,
    check_components,
    check_writes,
    local,
    normalized,
    on_local,
    placed_like,
)
from mcftensor.tensor.dtensor import place_of
from mcftensor.tensor.tensor import MCFTensor


def stored_components(x: Any) -> Sequence[Tensor]:
    """Return the components of an MCFTensor, or of a DTensor of one, as stored in files, as
    aliases.
    """
    format = any_format_of(x)
    return x.components if format is None else format.to_file(x.components)


def tail_names(name: str, format: Format) -> list[str]:
    """Return the names of the components after the first.

    A module cannot have a parameter and a submodule of one name, so none has a parameter of these.
    """
    return [f"{name}.{format.name}.{x.name}" for x in format.components[1:]]


def format_said(names: Sequence[str]) -> Format | None:
    """Return the format given by the names of a number's components (see `names_of_terms`)."""
    found = component_in(names[1]) if len(names) > 1 else None
    return found and found[1]


_SUM = "sum"
"""The name of what stands beside tails: the sum of the leading term's bit patterns."""

WRITES = "writes"
"""The name of what else there is of a tensor: how often it was written to, where rounding is
balanced. Of a format without tails it stands there in any case, to say what format it is."""


def _sum_of(leading: Tensor, format: Format) -> Tensor:
    """Return a checksum that detects a changed leading term.

    Any integer tail fits any leading term, so there the checksum weights patterns by position.
    """
    patterns = leading.detach().view(PATTERNS[leading.dtype.itemsize])
    by_place = not all(x.dtype.is_floating_point for x in format.components)
    total = torch.zeros((), dtype=torch.int64, device=leading.device)
    place = 0
    for part in patterns.flatten().split(_PART):
        count = part.numel()
        if by_place:
            total += (part * torch.arange(place, place + count, device=part.device)).sum()
        total += part.sum(dtype=torch.int64)
        place += count
    return total


_PART = 1 << 18


def component_in(name: Any) -> tuple[str, Format] | None:
    """Return the tensor whose component or checksum has this name, and the format in the name; None
    for other names."""
    parts = name.rsplit(".", 2) if isinstance(name, str) else []
    if len(parts) < 3 or not parts[0]:
        return None
    owner, format, component = parts
    is_like_a_term = _LIKE_A_TERM.fullmatch(f"{format}.{component}")
    try:
        known = Format.from_name(format)
    except ValueError as error:
        if is_like_a_term:
            raise CheckpointError(f"{name} is a term of no format ({error})") from error
        return None
    if is_like_a_term or component in (_SUM, WRITES, *[x.name for x in known.components]):
        return owner, known
    return None


# The name of a term, perhaps of an invalid expansion.
_LIKE_A_TERM = re.compile(r"(?:bf16|fp16|fp32|fp64)x\d(?:sr|br)?\.term\d")


def as_terms(state_dict: Mapping[Any, Any], *, sums: bool = False) -> dict[Any, Any]:
    """Return a state dict with every expansion replaced by plain tensors, one for each term.

    The leading term has the name of the expansion, so other programs find a tensor of the base
    dtype there, rounded to nearest. The names of the other terms contain the format: `weight`,
    `weight.bf16x3.term1`, `weight.bf16x3.term2`. The data of a scaled tensor is stored as
    integers, because it has no meaning without the exponent. All terms share memory with the
    expansion: a write to them, such as by `torch.distributed.checkpoint.load`, changes it; the
    terms are then normalized, or refused as by `from_terms`. Sharded expansions give sharded terms
    (DTensors).

    Use it for programs that store only plain tensors, and `from_terms` to convert back.
    `save_file`, `torch.save` and `torch.distributed.checkpoint` store expansions without it.

    Args:
        state_dict: as from `module.state_dict()`; it may contain other state dicts, as an
            optimizer's does.
        sums: whether to add a number, `weight.bf16x3.sum`, the sum of the leading term's bit
            patterns. With it `from_terms` detects that another program, which merges or prunes
            models, has changed the leading term and not the others. Sharded terms have no sum,
            since all ranks would have to compute it together; terms without memory (meta) have no
            sum either.

    Raises:
        CheckpointError: the name of a term is taken, or an entry with such a name is no term;
            an expansion in a list, or under a key that is no string.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2, bias=False))
        >>> terms = mcf.checkpoint.as_terms(model.state_dict())
        >>> list(terms)
        ['weight', 'weight.bf16x2.term1']
        >>> mcf.checkpoint.from_terms(terms)["weight"].format
        mcf.bf16x2
    """
    terms: dict[Any, Any] = {}
    for name, x in state_dict.items():
        if isinstance(x, Mapping):
            terms[name] = as_terms(x, sums=sums)
            continue
        if not isinstance(x, Tensor) and any(map(any_format_of, tree_leaves(x))):
            raise CheckpointError(
                f"as_terms: {name!r} is a {type(x).__name__} that holds expansions, whose terms "
                "need names; torch.save and torch.distributed.checkpoint take it as it is"
            )
        format = any_format_of(x)
        if format is None:
            terms[name] = x
            continue
        if is_sharded(x):
            terms[name], *tails = (
                on_local(lambda part, i: stored_components(part)[i].detach(), x.detach(), i)
                for i in range(len(format.components))
            )
        else:
            terms[name], *tails = (y.detach() for y in stored_components(x.detach()))
        beside_it = dict(zip(tail_names(name, format), tails, strict=True))
        if sums and tails and not is_sharded(x) and not x.is_meta:
            beside_it[f"{name}.{format.name}.{_SUM}"] = _sum_of(terms[name], format)
        if format.rounding == "balanced" or not tails:
            beside_it[f"{name}.{format.name}.{WRITES}"] = _count_of(x)
        for beside, tail in beside_it.items():
            if not isinstance(name, str):
                raise CheckpointError(f"as_terms: an expansion is under {name!r}, which is no name")
            if beside in state_dict:
                raise CheckpointError(
                    f"as_terms: {name} is an expansion in {format.name}, and the name of a "
                    f"term of it, {beside}, is taken; rename one of the two"
                )
            terms[beside] = tail
    names_of_terms(terms)  # raises where from_terms would
    return terms


def from_terms(
    terms: Mapping[Any, Any], *, tails: bool = True, verify: bool = True
) -> dict[Any, Any]:
    """Return the state dict that `as_terms` converted; expansions share memory with their terms.

    Other programs may have changed terms. Terms that form a number but are not normalized, as on
    ties, are normalized, in new memory.

    Args:
        terms: leading terms by name, and their companion entries.
        tails: whether terms after the leading one are loaded; if not, they are zeros. This is right
            if another program has changed only the leading terms, on purpose.
        verify: whether terms have to belong together; if not, their sum is the number. This is
            right if another program has changed all terms alike, as by a mean of models.

    Raises:
        CheckpointError: terms that are missing, differ in shape or dtype, or are not finite while
            the leading term is; terms that do not belong together, because a term is more than
            half an ulp of the previous one, or because the leading terms differ from their stored
            sum.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> hi, lo = torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([2e-3, 0.0]).bfloat16()
        >>> mcf.checkpoint.from_terms({"x": hi, "x.bf16x2.term1": lo, "y": hi})["x"]
        MCFTensor([1.0020, 2.0000], format=bf16x2)
    """
    return {
        name: joined(terms, names, tails, verify) for name, names in names_of_terms(terms).items()
    }


def joined(
    terms: Mapping[Any, Any], names: Sequence[Any], tails: bool, verify: bool, known: bool = False
) -> Any:
    """Return the number whose terms have these names, as `from_terms` does.

    Terms that are known to be unchanged are not checked.
    """
    name, x = names[0], terms[names[0]]
    format = format_said(names)
    if format is None:
        return from_terms(x, tails=tails, verify=verify) if isinstance(x, Mapping) else x
    whole = {name: x} | {n: terms[n] for n in names[1:]}
    told = whole.pop(f"{name}.{format.name}.{_SUM}", None)
    writes = whole.pop(f"{name}.{format.name}.{WRITES}", None)
    writes = writes if format.rounding == "balanced" else None
    parts, misfits = _components(name, list(whole.values()), writes, format, tails, known)
    if verify and tails and not known:
        _require_unchanged(name, format, parts, misfits, told)
    if writes is not None:
        writes = moved(writes.to(parts[0].device), place_of(x))
    return placed_like(x, MCFTensor.of(parts, format, writes=writes))


def _count_of(x: Tensor) -> Tensor:
    """Return the count of the whole tensor for a shard."""
    own: Any = local(x)
    if own._writes is None:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    count: Tensor = moved(own._count, -place_of(x))
    if count is not own._writes:
        PARTS[count] = own
    return count


# For write counts that are separate tensors: the tensor that each belongs to.
PARTS: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()


def _components(
    name: str, terms: Sequence[Any], writes: Any, format: Format, tails: bool, known: bool
) -> tuple[Sequence[Tensor], int]:
    """Return the corrected terms on this rank, and the number of elements whose terms misfit."""
    parts = [local(term) for term in terms]
    try:
        check_writes(writes, format)
        parts = list(format.from_file(parts))
        check_components(parts, format)
        if not tails:  # codes are nothing without their scales
            pairs = zip(parts, format.components, strict=True)
            kept = [x if y.is_shared else torch.zeros_like(x) for x, y in pairs]
            return [parts[0], *kept[1:]], 0
        return (parts, 0) if known else normalized(parts, format)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the terms of {name} make no expansion ({error})") from error


def _require_unchanged(
    name: str, format: Format, parts: Sequence[Tensor], misfits: int, told: Tensor | None
) -> None:
    if misfits:
        found = f"{misfits} of {parts[0].numel()} elements have terms that do not fit together"
    elif told is not None and not told.is_meta and _sum_of(parts[0], format) != told:
        found = "the sum beside them is not that of its leading term"
    else:
        return
    raise CheckpointError(
        f"the terms of {name} in {format.name} were changed by a program that does not know them: "
        f"{found}. If it changed the leading term alone, pass tails=False, which takes that one; "
        "if it changed all of them alike, verify=False"
    )


def names_of_terms(names: Iterable[Any]) -> dict[Any, list[Any]]:
    """Return the names of the terms for each name of a leading term, its own first."""
    groups: dict[Any, list[Any]] = {}
    tails: dict[str, dict[str, Format]] = {}
    for name in names:
        found = component_in(name)
        if found is None:
            groups[name] = [name]
        else:
            tails.setdefault(found[0], {})[name] = found[1]
    for name, its_tails in tails.items():
        format = next(iter(its_tails.values()))
        expected = tail_names(name, format)
        others = [n for n in its_tails if n.rsplit(".", 1)[1] in (_SUM, WRITES)]
        present = [n for n in its_tails if n not in others]
        if expected and not present:
            continue  # somebody has left the terms out
        if name not in groups or set(present) != set(expected):
            raise CheckpointError(
                f"{some(present)} would be terms of {name}; an expansion in {format.name} "
                f"consists of {', '.join([name, *expected])}"
            )
        groups[name] += [*expected, *others]
    return groups


def ties(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Map each name of a tied tensor to the first name of that tensor."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, x in state_dict.items():
        if isinstance(x, Tensor) and not is_lazy(x) and not x.is_meta and x.numel():
            terms = stored_components(x) if any_format_of(x) else (x,)
            memory = tuple((t.data_ptr(), t.device, t.dtype, t.shape, t.stride()) for t in terms)
            earlier = first.setdefault(memory, name)
            if earlier != name:
                found[name] = earlier
    return found


def is_sharded(x: Any) -> bool:
    """Whether it is a DTensor."""
    return local(x) is not x


def has_terms(state_dict: Mapping[Any, Any]) -> bool:
    """Whether a state dict has terms of expansions among its keys."""
    return any(
        has_terms(x) if isinstance(x, Mapping) else component_in(name) is not None
        for name, x in state_dict.items()
    )
