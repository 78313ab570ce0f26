"""What the operands of an operation mean: numbers, plain tensors, values, parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mcftensor import expansion
from mcftensor.formats import MAX_TERMS, Format
from mcftensor.tensor import TERM_NAMES, MCFTensor, Role

Number = (int, float, torch.SymInt, torch.SymFloat)


def expansions(tree: Any) -> list[MCFTensor]:
    """Every expansion in a tree of arguments."""
    if isinstance(tree, MCFTensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    found = []
    for x in tree:
        if isinstance(x, MCFTensor):
            found.append(x)
        elif isinstance(x, (tuple, list, dict)):
            found += expansions(x)
    return found


def leading(tree: Any) -> Any:
    """The arguments with every expansion replaced by its leading term."""
    if isinstance(tree, MCFTensor):
        return tree._term0
    if type(tree) in (tuple, list):  # every operation comes this way, and a pytree is slow
        return type(tree)(leading(x) for x in tree)
    if type(tree) is dict:
        return {name: leading(x) for name, x in tree.items()}
    return tree


def leading_terms(args: Iterable[Any]) -> list[Any] | None:
    """Arguments with leading terms in the place of parameters; None if there is a value, or a list
    with an expansion in it."""
    plain = []
    for x in args:
        if isinstance(x, MCFTensor):
            if x._role != "parameter":
                return None
            x = x._term0
        elif isinstance(x, (list, tuple, dict)) and expansions(x):
            return None
        plain.append(x)
    return plain


def computes_plainly(operands: Iterable[Any]) -> bool:
    """Whether an operation uses leading terms: parameters only, and some plain tensor among them.

    A plain tensor without dimensions counts as a number beside an expansion that has some.
    """
    operands = list(operands)
    found = expansions(operands)
    if any(x.role == "value" for x in found):
        return False
    dimensions = max((x.dim() for x in found), default=0)
    return any(
        isinstance(x, Tensor) and not isinstance(x, MCFTensor) and (x.dim() > 0 or dimensions == 0)
        for x in operands
    )


def common_role(operands: Iterable[Any]) -> Role:
    """The role of a result: parameter where every expansion is one."""
    parameters = all(x.role == "parameter" for x in expansions(list(operands)))
    return "parameter" if parameters else "value"


def require_one_base(name: str, formats: Sequence[Format]) -> None:
    """Raise ValueError for formats of unlike bases."""
    if len(formats) > 1 and len({f.base for f in formats}) > 1:
        # Not a TypeError: Python's operators would hide its message.
        raise ValueError(
            f"{name}: expansions in {' and '.join(sorted({f.name for f in formats}))}, whose terms "
            "are of unlike types. Convert one: copy_() it into an expansion of the other, or "
            "mcf.as_expansion(x, format); states of an optimizer stay as they were when its "
            "parameters are converted, so make the optimizer anew"
        )


def common_format(name: str, operands: Iterable[Any]) -> Format:
    """The format of a result: of one base, most terms, and stochastic rounding if one has it.

    The longest formats have none.

    Raises:
        ValueError: expansions of unlike bases.
    """
    return longest_format(name, [x.format for x in expansions(list(operands))])


def longest_format(name: str, formats: Sequence[Format]) -> Format:
    """The same of the formats themselves, of which there is one at least."""
    require_one_base(name, formats)
    if all(f == formats[0] for f in formats):
        return formats[0]
    terms = max(f.terms for f in formats)
    stochastic = terms < MAX_TERMS and any(f.rounding == "stochastic" for f in formats)
    return Format(formats[0].base, terms, "stochastic" if stochastic else "nearest")


def require_dense(operand: Tensor) -> None:
    """Raise ValueError for a tensor that is not of dense real numbers."""
    if operand.is_complex() or operand.layout != torch.strided or operand.is_quantized:
        raise ValueError(
            f"an expansion meets a tensor of {operand.dtype}, {operand.layout}; expansions "
            "compute with dense real tensors: convert it first"
        )


_dtype, _layout = attrgetter("dtype"), attrgetter("layout")


def terms(operand: Any) -> list[Tensor]:
    """An operand as plain tensors to read; a number enters as float64, with all its bits."""
    if isinstance(operand, MCFTensor):
        return list(operand._read())
    if isinstance(operand, Tensor):
        require_dense(operand)
        return [operand]
    if isinstance(operand, Number):
        return [torch.scalar_tensor(operand, dtype=torch.float64)]  # type: ignore[arg-type]
    raise ValueError(f"an expansion meets {operand!r}, which is neither a tensor nor a real number")


def term_columns(operands: Sequence[Tensor], format: Format | None) -> list[list[Tensor]]:
    """The terms of operands that are all in a format, or all plain: the leading terms of all, then
    their second ones, and so on."""
    if format is None:
        dtypes, layouts = set(map(_dtype, operands)), set(map(_layout, operands))
        if layouts != {torch.strided} or not all(x.is_floating_point for x in dtypes):
            for x in operands:
                require_dense(x)
        return [list(operands)]
    return [list(map(attrgetter(name), operands)) for name in TERM_NAMES[: format.terms]]


def converted(operand: Any, format: Format, device: torch.device) -> list[Tensor]:
    """An operand as the terms of a format, with one rounding of its kind."""
    if isinstance(operand, MCFTensor):
        found = list(operand.components)
        if operand.format.base == format.base and len(found) <= format.terms:
            return found + [torch.zeros_like(found[0])] * (format.terms - len(found))
    else:
        found = terms(operand)
        if found[0].dim() == 0:
            found = [found[0].to(device)]
    return list(expansion.convert(found, format))


def terms_in(operand: Any, format: Format, device: torch.device) -> list[Tensor]:
    """An operand as the terms of a format, to nearest whatever the format's rounding."""
    return converted(operand, format.nearest, device)


def require_castable(dtype: torch.dtype, target: Tensor) -> None:
    """Raise RuntimeError, as PyTorch does, where floats are written into integers, say."""
    if not torch.can_cast(dtype, target.dtype):
        raise RuntimeError(
            f"result type {dtype} can't be cast to the desired output type {target.dtype}"
        )


def store(target: Tensor, result: Sequence[Tensor]) -> None:
    """Write the terms of a result into an expansion of the same format, or collapse into a plain
    tensor."""
    require_castable(result[0].dtype, target)
    if isinstance(target, MCFTensor):
        for term, new in zip(target.components, result, strict=True):
            term.copy_(new)
    else:
        target.copy_(expansion.collapse(result, target.dtype))
