"""Storage formats: PyTorch's own operations compute with decoded numbers and return plain tensors.

Operations that move elements keep the format. Operations that write to such a tensor decode it,
compute, and encode the result with one rounding, with the bits of the same operation on plain
tensors. On a CPU, large tensors are processed in chunks, so that memory is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mcftensor.arithmetic.base_types import NARROW
from mcftensor.dispatch.operands import (
    are_lifted,
    computes_plainly,
    expansions,
    leading,
    leaves,
    mapped,
    on_leading,
    refusal,
    rounding_key,
    stored_in,
)
from mcftensor.dispatch.registry import Handler
from mcftensor.dispatch.schemas import written_to
from mcftensor.dispatch.store import count_write, overwrite, require_castable
from mcftensor.formats import PLAIN, Format
from mcftensor.kernels.block_scales import BLOCK_SIZE
from mcftensor.kernels.columns import Column, is_bare, places_of
from mcftensor.passes.decoded_traces import most_together
from mcftensor.passes.format_conversion import decode_columns, encode_columns, part_of, recode
from mcftensor.tensor.implicit_rounding import asking, rounding
from mcftensor.tensor.step_tensors import GradientTensor
from mcftensor.tensor.tensor import MCFTensor

# The smallest product of factors that is deferred: it is a normal float32.
LEAST = 2.0**-120


def of_terms(handler: Handler) -> Handler:
    """Return a handler that works on terms, and passes storage formats to `on_numbers`."""

    def on_terms(func: Any, *args: Any, **kwargs: Any) -> Any:
        if are_among((args, kwargs)):
            return on_numbers(func, args, kwargs)
        return handler(func, *args, **kwargs)

    return on_terms


def are_among(operands: Any) -> bool:
    """Return whether an operand is in a storage format."""
    return any(x.arithmetic == "numbers" for x in _formats(operands))


def _formats(operands: Any) -> set[Format]:
    return {x._format for x in expansions(operands)}


def are_numbers(operands: Any) -> bool:
    """Return whether an operation computes with decoded numbers.

    It does if all expansions are in storage formats, or if some of them share scales, which the
    kernels of terms cannot read.
    """
    formats = _formats(operands)
    return bool(formats) and (
        all(x.arithmetic == "numbers" for x in formats) or any(format.shared for format in formats)
    )


def on_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on decoded numbers as plain tensors, and encode the tensors that it writes.

    A result of parameters alone is a parameter and stores all bits. An operation that writes to a
    parameter computes with its decoded number.
    """
    if kwargs.get("dtype") in {format.dtype for format in _formats((args, kwargs))}:
        kwargs = {name: x for name, x in kwargs.items() if name != "dtype"}  # that of the input
    operands = [x for x in (*args, *kwargs.values()) if getattr(x, "dtype", None) != torch.bool]
    if computes_plainly(operands) and not expansions(written_to(func, args, kwargs)):
        return on_leading(func, args, kwargs)
    return _in_role(_on_numbers(func, args, kwargs), (args, kwargs))


def _in_role(result: Any, operands: Any) -> Any:
    """Return results of parameters as parameters, in a format that stores all their bits."""
    found = expansions(operands)
    format = found[0]._format.of_gradients
    if format is None or any(x.acts_as == "value" for x in found):
        return result

    def held(x: Any) -> Any:
        is_new = isinstance(x, Tensor) and not isinstance(x, MCFTensor)
        if not is_new or x.dtype != format.result.dtype:
            return x
        return MCFTensor.of(stored_in(x, format, x.device), format, "parameter", own=True)

    return tree_map(held, result)


def _on_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets = written_to(func, args, kwargs)
    written = {id(x): x for x in targets if _is_decoded(x)}
    if written and are_lifted((args, kwargs)) and not expansions(list(written.values())):
        return func(*leading(args), **leading(kwargs))
    say_what_is_rounded(func, targets, (args, kwargs))
    if _is_noted(func, args, kwargs):
        return args[0]
    if _goes_in_blocks(func, args, kwargs):
        return asking(lambda: _in_chunks(func, args, kwargs, list(written.values())))
    (args, kwargs), copies = decoded((args, kwargs), targets)
    result = asking(lambda: func(*args, **kwargs))
    originals = {}
    for i, x in written.items():
        require_castable(copies[i].dtype, x)
        if isinstance(x, MCFTensor) and copies[i].shape != x.shape:
            shapes = f"{tuple(copies[i].shape)}, and where it goes of {tuple(x.shape)}"
            raise refusal(func, [x], f"its result is of shape {shapes}")
        store_numbers([x], [copies[i]])
        originals[id(copies[i])] = x
    return tree_map(lambda x: originals.get(id(x), x), result) if originals else result


def say_what_is_rounded(func: Any, written: Iterable[Any], operands: Any) -> None:
    """Warn or raise before numbers of expansions are rounded into plain tensors."""
    for x in written:
        if not isinstance(x, MCFTensor):
            rounding(func, expansions(operands), x)


def _is_noted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a multiplication by a number in place was deferred as a factor."""
    if func.overloadpacket is not torch.ops.aten.mul_ or kwargs or torch.compiler.is_compiling():
        return False
    return _note(*args)


def _note(x: Tensor, number: Any) -> bool:
    if not isinstance(x, MCFTensor) or not isinstance(number, (int, float)):
        return False
    factor = x._factor
    if (
        factor is None
        or x._role == "parameter"  # a shard may be a part, and parts defer no factors
        or not 0 < number <= 1
        or factor.value * number < LEAST
        or x.is_part
        or not is_bare(_components(x))
    ):
        return False
    factor.value *= number
    return True


def _is_decoded(x: Any) -> bool:
    """Return whether a tensor is computed in a wider type than it is stored in.

    Together with expansions, plain 16-bit tensors and gradient tensors are decoded, too, and
    written with one rounding.
    """
    if isinstance(x, MCFTensor):
        return x._format.arithmetic == "numbers" or isinstance(x, GradientTensor)
    return isinstance(x, Tensor) and x.dtype in NARROW and x.layout == torch.strided


def decoded(tree: Any, written: Sequence[Tensor] = ()) -> tuple[Any, dict[int, Tensor]]:
    """Return the arguments with decoded numbers in place of stored tensors, and the numbers by
    tensor id.

    If a number is float64, plain float32 tensors that are only read become float64, too.
    """
    found = {id(x): x for x in leaves(tree) if _is_decoded(x)}
    numbers = dict(zip(found, numbers_of([*found.values()]), strict=True))
    if any(x.dtype == torch.float64 for x in numbers.values()):
        read = {id(x): x for x in leaves(tree) if isinstance(x, Tensor) and x.dim()}
        for i in read.keys() - set(map(id, written)):
            x = numbers.get(i, read[i])
            if x.dtype == torch.float32:
                numbers[i] = x.double()
    if not numbers:
        return tree, numbers
    return mapped(lambda x: numbers.get(id(x), x), tree), numbers


def plain_numbers(x: MCFTensor) -> Tensor:
    """Return the decoded numbers as a plain tensor."""
    (numbers,) = numbers_of([x])
    return numbers


def numbers_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the decoded numbers of tensors; tensors of one format are decoded together."""
    if not is_bare(*map(_components, tensors)):
        return [
            x._collapsed(_dtype_of(x)) if isinstance(x, MCFTensor) else x.to(_dtype_of(x))
            for x in tensors
        ]
    made = [
        torch.empty_like(_format_of(x).template(_components(x)[0]), dtype=_dtype_of(x))
        for x in tensors
    ]
    for rows in _alike(tensors):
        decode_columns(*_stored([tensors[i] for i in rows]), [made[i] for i in rows])
    for x, numbers in zip(tensors, made, strict=True):
        if _factor_of(x) != 1:
            numbers.mul_(_factor_of(x))
    return made


def store_numbers(targets: Sequence[Tensor], numbers: Column) -> None:
    """Round plain tensors into targets of the same shapes."""
    if not is_bare(*map(_components, targets), numbers):
        for x, number in zip(targets, numbers, strict=True):
            if isinstance(x, MCFTensor) and x._format.shared:
                made = recode([number], PLAIN[number.dtype].name, x._format.name, _key(x))
                overwrite(x._held(), made)
                count_write([x])
            else:
                x.copy_(number)
        return
    for x in targets:
        if isinstance(x, GradientTensor):
            x.grow_tails()
        _apply_factor(x)
    keys = [_key(x) for x in targets]
    for rows in _alike(targets):
        own = [targets[i] for i in rows]
        taken = [key for i in rows if (key := keys[i]) is not None]
        format, components = _stored(own)
        encode_columns(format, [numbers[i] for i in rows], components, taken)
    _finish(targets)


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return groups of rows of equal format."""
    return list(places_of(map(_format_of, tensors)).values())


def _stored(tensors: Sequence[Tensor]) -> tuple[Format, list[Column]]:
    """Return the format of tensors of one format, and columns of their components."""
    return _format_of(tensors[0]), list(zip(*map(_components, tensors), strict=True))


def _format_of(x: Tensor) -> Format:
    """Return the format in which a tensor is read; a gradient tensor is plain."""
    if not isinstance(x, MCFTensor):
        return PLAIN[x.dtype]
    return PLAIN[x._format.dtype] if isinstance(x, GradientTensor) else x._format


def _components(x: Tensor) -> Sequence[Tensor]:
    if not isinstance(x, MCFTensor):
        return (x,)
    return (x._component0,) if isinstance(x, GradientTensor) else x._held()


def _factor_of(x: Any) -> float:
    """Return the deferred factor of a tensor, or 1."""
    return x._factor.value if isinstance(x, MCFTensor) and x._factor is not None else 1.0


def _apply_factor(x: Tensor) -> None:
    """Apply the deferred factor of the whole tensor before a part of it is written."""
    if isinstance(x, MCFTensor) and x._factor is not None and x.is_part:
        x._factor.apply()


def _finish(written: Sequence[Tensor]) -> None:
    """Reset the deferred factors of written tensors, and count the write."""
    for x in written:
        if isinstance(x, MCFTensor) and x._factor is not None:
            x._factor.value = 1.0
    count_write(written)


def _dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype of the decoded numbers."""
    if isinstance(x, MCFTensor) and x._format.arithmetic == "numbers":
        return x._format.result.dtype
    return torch.float32


def _key(x: Tensor) -> Tensor | None:
    return rounding_key(x._format, [x]) if isinstance(x, MCFTensor) else None


# ---------------------------------------------------------------------------------- in chunks


def _goes_in_blocks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator is elementwise on large contiguous tensors on a CPU."""
    if torch.Tag.pointwise not in func.tags or "out" in kwargs:
        return False
    if [str(x.type) for x in func._schema.returns] != ["Tensor"]:  # equal and frexp return others
        return False
    tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= most_together(first.device):
        return False
    large = [x for x in tensors if x.dim()]
    others = [[x] for x in tensors if x is not first]
    if func._schema.is_mutable and not are_apart([[first], *others]):
        return False
    return (
        all(
            x.layout == torch.strided and x.shape == first.shape and x.is_contiguous()
            for x in large
        )
        and all(map(_has_whole_parts, tensors))
        and is_bare(*map(_components, tensors))
    )


def are_apart(columns: Sequence[Sequence[Any]]) -> bool:
    """Return whether the rows are independent.

    No tensor of the first column may share memory with another one of it, or with tensors of other
    rows.
    """
    targets = columns[0]
    read = [
        x
        for column in columns[1:]
        for i, x in enumerate(column)
        if isinstance(x, Tensor) and (len(column) != len(targets) or x is not targets[i])
    ]
    written, others = ([y for x in each for y in _components(x)] for each in (targets, read))
    if not is_bare(written, others):
        return True  # tensors of a compiler have no addresses
    spans = [(*_span(x), True) for x in written] + [(*_span(x), False) for x in others]
    reach = reach_of_targets = 0
    for start, stop, is_target in sorted(spans):
        if start < (reach if is_target else reach_of_targets):
            return False
        reach = max(reach, stop)
        reach_of_targets = max(reach_of_targets, stop) if is_target else reach_of_targets
    return True


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first and last address of a plain tensor."""
    start, count = x.data_ptr(), x.numel()
    if count and not x.is_contiguous():
        steps = zip(x.shape, x.stride(), strict=True)
        count = 1 + sum([(length - 1) * stride for length, stride in steps])
    return start, start + count * x.element_size() * bool(start)


def _has_whole_parts(x: Tensor) -> bool:
    """Return whether chunks of a tensor consist of whole blocks."""
    shared = _format_of(x).shared
    return all(_components(x)[i].numel() * BLOCK_SIZE == x.numel() for i in shared)


def _in_chunks(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]
) -> Any:
    for x in written:
        if isinstance(x, GradientTensor):
            x.grow_tails()
        _apply_factor(x)
    found = {id(x): x for x in leaves((args, kwargs)) if _is_decoded(x)}
    size, count = most_together(args[0].device), args[0].numel()
    numbers = {
        i: torch.empty(size, dtype=_dtype_of(x), device="cpu") if x.dim() else numbers_of([x])[0]
        for i, x in found.items()
    }
    keys = [[] if (key := _key(x)) is None else [key] for x in written]
    result = None
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        for i, x in found.items():
            if x.dim():
                format, components, scratch = _part_of(x, numbers[i], part)
                decode_columns(format, components, [scratch])
                if _factor_of(x) != 1:
                    scratch.mul_(_factor_of(x))
        piece = func(
            *mapped(partial(_cut, numbers, part), args),
            **mapped(partial(_cut, numbers, part), kwargs),
        )
        for x, own in zip(written, keys, strict=True):
            format, components, scratch = _part_of(x, numbers[id(x)], part)
            encode_columns(format, [scratch], components, own, start=start)
        if not written:
            if result is None:
                result = piece.new_empty(count)
            result[part] = piece
    _finish(written)
    return args[0] if result is None else result.view(args[0].shape)


def _part_of(x: Tensor, numbers: Tensor, part: slice) -> tuple[Format, list[Column], Tensor]:
    """Return the format and components of a part of a tensor, and its scratch, one block a row."""
    format, length = _format_of(x), part.stop - part.start
    own = part_of(format, _components(x), part.start, length)
    scratch = numbers[:length].view(-1, BLOCK_SIZE) if format.shared else numbers[:length]
    return format, [[y] for y in own], scratch


def _cut(numbers: dict[int, Tensor], part: slice, x: Any) -> Any:
    """Return the part of an argument that belongs to a chunk."""
    if not isinstance(x, Tensor):
        return x
    scratch = numbers.get(id(x))
    if not x.dim():
        return x if scratch is None else scratch
    return x.view(-1)[part] if scratch is None else scratch[: part.stop - part.start]


# ----------------------------------------------------------------------------------- in lists


def foreach_on_numbers(
    func: Any,
    rows: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    single: Callable[[int], Any],
) -> Iterator[tuple[int, Any]]:
    """Run an operator on rows of lists, and yield row numbers and results.

    Large tensors on a CPU are processed one by one.
    """
    if func.overloadpacket is torch.ops.aten._foreach_mul_ and not kwargs:
        numbers = args[1] if isinstance(args[1], Sequence) else [args[1]] * len(args[0])
        noted = {i for i in rows if _note(args[0][i], numbers[i])}
        yield from ((i, args[0][i]) for i in noted)
        rows = [i for i in rows if i not in noted]
        if not rows:
            return
    limit = most_together(args[0][rows[0]].device)
    chunk: list[int] = []
    room: float = limit
    for i in (*rows, None):
        size = math.inf if i is None else args[0][i].numel()
        if chunk and size > room:
            yield from zip(chunk, _chunk_on_numbers(func, chunk, args, kwargs), strict=True)
            chunk, room = [], limit
        if i is None:
            return
        if size > limit:
            yield i, single(i)
        else:
            chunk.append(i)
            room -= size


def _chunk_on_numbers(
    func: Any, rows: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Any]:
    def chosen(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim():  # a number for each row
            return x[list(rows)]
        return [x[i] for i in rows] if isinstance(x, Sequence) else x

    given = tuple(map(chosen, args))
    (own, named), copies = decoded((given, {name: chosen(x) for name, x in kwargs.items()}))
    targets = given[0]
    if func._schema.is_mutable:
        say_what_is_rounded(func, targets, (given, kwargs))
    results = asking(lambda: func(*own, **named))
    if func._schema.is_mutable:
        written = [x for x in targets if id(x) in copies]
        store_numbers(written, [copies[id(x)] for x in written])
        return targets
    rows_of = zip(*(x for x in (*given, *kwargs.values()) if type(x) is list), strict=True)
    return [_in_role(x, row) for x, row in zip(results, rows_of, strict=True)]
