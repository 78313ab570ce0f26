"""The operands of an operation: numbers, plain tensors, values, parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mcftensor.arithmetic.write_counts import count_beside, moved, name_, start, unwritten
from mcftensor.dispatch.resolve import uses_leading
from mcftensor.formats import PLAIN, Format, named
from mcftensor.formats.promotion import longest_format
from mcftensor.kernels.columns import on_device
from mcftensor.kernels.without_float64 import is_long_int, widest
from mcftensor.passes.format_conversion import collapse, key_for, number_terms, recode
from mcftensor.passes.operators import Number
from mcftensor.tensor.components import COMPONENTS, Role, local, placed_like
from mcftensor.tensor.dtensor import place_of
from mcftensor.tensor.implicit_rounding import note_of_leading, updating
from mcftensor.tensor.step_tensors import GradientTensor
from mcftensor.tensor.tensor import MCFTensor


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree of arguments. It is faster than a pytree, for every operation."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return [tree]
    found: list[Any] = []
    for x in tree:
        if isinstance(x, (tuple, list, dict)):
            found += leaves(x)
        else:
            found.append(x)
    return found


def is_float(x: Any) -> bool:
    """Return whether an argument is a floating tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of arguments with a function applied to each leaf."""
    if type(tree) in (tuple, list):
        return type(tree)([mapped(function, x) for x in tree])
    if type(tree) is dict:
        return {name: mapped(function, x) for name, x in tree.items()}
    return function(tree)


def expansions(tree: Any) -> list[MCFTensor]:
    """Return every expansion in a tree of arguments."""
    return [x for x in leaves(tree) if isinstance(x, MCFTensor)]


def named_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator by their names."""
    return {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs


def leading(tree: Any) -> Any:
    """Return the arguments with every expansion replaced by its leading component."""
    return mapped(lambda x: x.compute_tensor if isinstance(x, MCFTensor) else x, tree)


def on_leading(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operation on the leading components of parameters.

    Note its result, which a copy over a parameter would round.
    """
    result = func(*leading(args), **leading(kwargs))
    if type(result) is Tensor:
        for x in args:
            if isinstance(x, MCFTensor) and x.shape == result.shape:
                note_of_leading(result, x)
    return result


def check_update(func: Any, target: Any, source: Any) -> None:
    """Warn or raise before a plain tensor is written over an expansion as its update."""
    if (
        isinstance(target, MCFTensor)
        and (target._role == "parameter" or not target._format.shared)
        and not isinstance(source, MCFTensor)
        and isinstance(source, Tensor)
    ):
        updating(func, target, source)


def with_leading(args: Iterable[Any]) -> list[Any] | None:
    """Return arguments with leading components in place of parameters.

    Return None if there is a value, or a list with an expansion in it.
    """
    plain = []
    for x in args:
        if isinstance(x, MCFTensor):
            if x.acts_as != "parameter":
                return None
            x = x.compute_tensor
        elif isinstance(x, (list, tuple, dict)) and expansions(x):
            return None
        plain.append(x)
    return plain


def computes_plainly(operands: Sequence[Any]) -> bool:
    """Return whether an operation uses leading components, as `resolve.uses_leading` says."""
    ours = expansions(operands)
    for x in ours:
        if x.acts_as == "value":
            return False
    plain = [x for x in operands if isinstance(x, Tensor) and not isinstance(x, MCFTensor)]
    return uses_leading([x.dim() > 0 for x in ours], [x.dim() > 0 for x in plain])


def are_lifted(operands: Any) -> bool:
    """Return whether every expansion is a gradient tensor, which has no tails.

    PyTorch's own operations write such operands into plain tensors.
    """
    return all(isinstance(x, GradientTensor) for x in expansions(operands))


def common_role(operands: Sequence[Any]) -> Role:
    """Return the role of a result: parameter if every expansion is a parameter."""
    parameters = all(x.acts_as == "parameter" for x in expansions(operands))
    return "parameter" if parameters else "value"


def common_format(name: str, operands: Sequence[Any]) -> Format:
    """Return the format of a result: one base, most terms, and the first rounding other than to
    nearest.

    The longest formats only round to nearest. Storage formats count as plain tensors.

    Raises:
        ValueError: expansions of unlike bases.
    """
    return longest_format(name, [x._format for x in expansions(operands)])


def require_dense(operand: Tensor) -> None:
    """Raise ValueError for a tensor that is complex, sparse or quantized."""
    if operand.is_complex() or operand.layout != torch.strided or operand.is_quantized:
        raise ValueError(
            f"an expansion meets a tensor of {operand.dtype}, {operand.layout}, of shape "
            f"{tuple(operand.shape)}; expansions compute with dense real tensors. Convert it, as "
            "by .to_dense(), or compute on mcf.as_plain(x, torch.float64)"
        )


def require_numbers(operands: Iterable[Any]) -> None:
    """Raise ValueError unless all operands are real Python numbers."""
    for x in operands:
        if not isinstance(x, Number):
            raise ValueError(
                f"an expansion meets {x!r}, which is neither a tensor nor a real number; for "
                "complex results, compute on mcf.as_plain(x, torch.float64)"
            )


def plain(operand: Any) -> Tensor:
    """Return a plain operand as a tensor; a number becomes float64, with all its bits."""
    if isinstance(operand, Tensor):
        require_dense(operand)
        return operand
    require_numbers([operand])
    dtype = torch.int64 if is_long_int(operand) else widest()  # as much as its formats represent
    return torch.scalar_tensor(operand, dtype=dtype, device="cpu")


def with_long_ints(columns: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
    """Return columns with ints that float64 does not hold as tensors, which keep all their bits."""
    if not any(type(x) is int and is_long_int(x) for column in columns for x in column):
        return columns
    return [[torch.tensor(x, device="cpu") if is_long_int(x) else x for x in y] for y in columns]


_layout = attrgetter("layout")
_GETTERS = list(map(attrgetter, COMPONENTS))


def component_columns(column: Sequence[Tensor], format: Format) -> list[Sequence[Tensor]]:
    """Return the components of tensors in one format: a column of leading ones, one of second ones,
    etc.

    Plain tensors have one column.
    """
    first = column[0]
    if format.shared:
        return list(zip(*[x._read() for x in column], strict=True))  # type: ignore[attr-defined]
    if isinstance(first, MCFTensor):
        if len(column) == 1:
            return [[x] for x in first._read()]
        return [list(map(get, column)) for get in _GETTERS[: len(format.components)]]
    if not format.dtype.is_floating_point or set(map(_layout, column)) != {torch.strided}:
        for x in column:
            require_dense(x)
    return [column]


def stored_in(
    operand: Any, format: Format, device: torch.device, key: Tensor | None = None
) -> list[Tensor]:
    """Return an operand as components of a format, rounded to nearest unless there is a key.

    They may alias the components of the operand.
    """
    target = format.nearest if key is None else format
    if isinstance(operand, MCFTensor):
        source, found = operand._format, list(operand._read())
        if source.nearest is format.nearest:
            return found
        if format.extends(source):
            missing = len(format.components) - len(source.components)
            found = [x.contiguous() for x in found]  # zeros like an expanded tensor are contiguous
            return found + [torch.zeros_like(found[0])] * missing
    else:
        source, found = entered(operand, device)
    return recode(found, source.name, target.name, key)


def entered(operand: Any, device: torch.device) -> tuple[Format, list[Tensor]]:
    """Return a plain operand or a number as components of a format on a device."""
    if isinstance(operand, Number):
        name, terms = number_terms(operand, device)  # type: ignore[arg-type]
        return named(name), [on_device(x, device) for x in terms]
    x = plain(operand)
    return PLAIN[x.dtype], [on_device(x, device) if x.dim() == 0 else x]


def plainly(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as a plain one, rounded once."""
    if isinstance(x, MCFTensor):
        return x._collapsed(dtype)
    return collapse([x], PLAIN[x.dtype].name, dtype)


def template(x: MCFTensor) -> Tensor:
    """Return a plain tensor with the layout and dtype of x."""
    if x._component0.dtype == x._format.dtype:
        return x._component0
    return torch.empty_like(x._format.template(x._component0), dtype=x._format.dtype)


def value_of(x: Tensor, format: Format, operands: Sequence[MCFTensor] = ()) -> MCFTensor:
    """Return a plain tensor as a value of a format, with the rounding of the format.

    A result continues the write count of its operands.
    """
    return rounded_by(x, format, rounding_key(format, [*operands, x]))


def rounded_by(x: Tensor, format: Format, key: Tensor | None) -> MCFTensor:
    """Return a plain tensor, or one in any format, as a value of a format, rounded with a key."""
    source, stored = (x._format, x._read()) if isinstance(x, MCFTensor) else (PLAIN[x.dtype], [x])
    made = recode(list(stored), source.name, format.name, key)
    return MCFTensor.of(made, format, own=True, writes=after(format, key))


def value_in(
    x: Tensor, format: Format, writes: Tensor | None = None, name: str | None = None
) -> MCFTensor:
    """Return a value, or a DTensor of one; balanced rounding uses a count, the salt of a name, or
    the count of x.
    """
    if writes is None and format.rounding == "balanced":
        own = count_of(x) if name is None else None
        writes = moved(start(local(x).device, name), place_of(x)) if own is None else unwritten(own)
    own = local(x).detach()
    format.require(own)
    made = rounded_by(own, format, key_for(format, own.device, writes))
    return placed_like(x, made)  # type: ignore[return-value]


def as_state(x: Tensor, format: Format, p: Tensor, name: str) -> MCFTensor:
    """Return a state of a parameter as a value with separate sequences of balanced rounding."""
    count = count_of(p)
    if count is None or count_of(x) is not None:
        return value_in(x, format)
    return value_in(x, format, count_beside(count, name).to(x.device))


def count_of(x: Tensor) -> Tensor | None:
    """Return the write count of an expansion, also of a sharded one, or None."""
    x = local(x)
    return x._count if isinstance(x, MCFTensor) else None


def name_counts(module: nn.Module) -> None:
    """Give unwritten tensors of a module the salts of their names, and shards their offsets."""
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        count = count_of(x)
        if count is not None and not count.is_meta:
            name_(count, name, place_of(x))


def rounding_key(format: Format, operands: Iterable[Any]) -> Tensor | None:
    """Return the key for rounding into a format, or None if its rounding needs none.

    Balanced rounding uses the count of the first operand that has one.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    return key_for(format, tensors[0].device, first_count(tensors))


def first_count(tensors: Iterable[Any]) -> Tensor | None:
    """Return the write count of the first tensor that has one, or None."""
    counted = (x for x in tensors if isinstance(x, MCFTensor) and x._writes is not None)
    first = next(counted, None)
    return None if first is None else first._count


def selected(
    components: Sequence[Tensor], format: Format, role: Role, operands: Sequence[Any]
) -> MCFTensor:
    """Return a new tensor of selected elements or unrounded numbers.

    It continues the write count of the first operand that has one.
    """
    count = first_count(operands)
    writes = None if count is None or format.rounding != "balanced" else count.clone()
    return MCFTensor.of(components, format, role, own=True, writes=writes)


def after(format: Format, key: Tensor | None) -> Tensor | None:
    """Return the write count of a new tensor that was rounded with a key."""
    return None if key is None or format.rounding != "balanced" else key + 1


def refusal(func: Any, found: Sequence[MCFTensor], reason: str) -> NotImplementedError:
    """Return the error of an operation that cannot carry the precision."""
    shapes = ", ".join(f"{x.format.name} {tuple(x.shape)}" for x in found)
    return NotImplementedError(
        f"{func}: not available on expansions ({shapes}): {reason}, and terms are never dropped "
        "in silence. Compute on mcf.as_plain(x, torch.float64) and come back with "
        "mcf.as_expansion(result, x.format), or copy_() the result into x"
    )
