"""The default handler: a parameter computes as its leading term, a value on all its terms.

float64 represents every value of formats up to 48 bits with more bits than they promise. One
evaluation and one rounding therefore give the format's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot
from torch.utils._pytree import tree_map

from mcftensor.dispatch import storage_formats
from mcftensor.dispatch.operands import (
    common_format,
    expansions,
    leading,
    leaves,
    mapped,
    plainly,
    refusal,
    value_of,
    with_leading,
)
from mcftensor.dispatch.registry import Handler, implements
from mcftensor.dispatch.rounded_arguments import WidenedArguments, is_recorded
from mcftensor.dispatch.schemas import written_to
from mcftensor.dispatch.store import assign
from mcftensor.dispatch.system import evaluated, system_of
from mcftensor.formats import Format
from mcftensor.kernels.without_float64 import widest
from mcftensor.tensor import MCFTensor
from mcftensor.wings import wing

aten = torch.ops.aten

_OF_TORCH = frozenset({"aten", "prims", "inductor", "quantized", "higher_order"})
"""Namespaces of operators that compute the same in every floating dtype, whatever they write to."""


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on leading terms if all expansions are parameters and none is written to.

    Otherwise it is evaluated on all terms: in float64, or beyond 48 bits, and without float64, by
    a special algorithm.
    """
    if not kwargs and not func._schema.is_mutable:
        plain = with_leading(args)
        if plain is not None:
            return _plainly(func, args, kwargs, plain)
    found = expansions((args, kwargs))
    writes = expansions(written_to(func, args, kwargs))
    if not writes and all(x.acts_as == "parameter" for x in found):
        return _plainly(func, args, kwargs)
    if func.namespace == "mcftensor":
        raise TypeError(f"{func}: takes the terms of expansions, and got an expansion")
    if writes and func.namespace not in _OF_TORCH:
        reason = (
            "an operator of another package writes to it, and knows its leading term alone; for "
            "states of 8 bits use mcf.collage(optimizer, 'compact') over mcf.bf16i8"
        )
        raise refusal(func, found, reason)
    format = common_format(str(func), found)
    match system_of(format, found[0].device):
        case "stored":
            return storage_formats.on_numbers(func, args, kwargs)
        case "terms":
            return wing("wide").by_algorithm(func, format, *args, **kwargs)
        case "float32 terms":
            return wing("wide").in_float32_terms(func, format, found, args, kwargs)
        case "float64":
            return in_machine_type(func, format, found, args, kwargs)


def of_values(handler: Handler) -> Handler:
    """Return a handler that works on the terms of values.

    Parameters alone compute with their leading terms, and storage formats with their numbers.
    """

    def on_values(func: Any, *args: Any, **kwargs: Any) -> Any:
        found = expansions((args, kwargs))
        if all(x.acts_as == "parameter" for x in found):
            return compute(func, *args, **kwargs)
        return handler(func, *args, **kwargs)

    return storage_formats.of_terms(on_values)


def _plainly(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plain: list[Any] | None = None
) -> Any:
    """Run an operation on leading terms; in float32 if PyTorch has no 16-bit version.

    Some decompositions, such as QR, then raise NotImplementedError; others, such as the
    pseudo-inverse, a bare RuntimeError.
    """
    try:
        return func(*(leading(args) if plain is None else plain), **leading(kwargs))
    except RuntimeError as error:
        base = expansions((args, kwargs))[0].dtype
        missing = isinstance(error, NotImplementedError) or func._opname.startswith("linalg_")
        if base.itemsize > 2 or not missing:
            raise explained(error, args, kwargs) from error

        def cast(dtype: torch.dtype, new: torch.dtype) -> Any:
            return lambda x: x.to(new) if isinstance(x, Tensor) and x.dtype == dtype else x

        args, kwargs = mapped(cast(base, torch.float32), leading((args, kwargs)))
        return tree_map(cast(torch.float32, base), func(*args, **kwargs))


def explained(error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RuntimeError:
    """Return an error of PyTorch, with the operands and the repair if their dtypes differ."""
    return unlike_dtypes(f"{error}", (args, kwargs)) or error if "type" in str(error) else error


def unlike_dtypes(problem: str, operands: Any) -> RuntimeError | None:
    """Return the error of parameters and a floating tensor of another dtype, or None."""
    found = expansions(operands)[0]
    other = f". Or run the model under torch.autocast({found.device.type!r}, dtype={found.dtype})"
    if torch._C._is_any_autocast_enabled():
        other = ". This operation is not one that autocast casts for"
    for x in leaves(operands):
        is_plain = isinstance(x, Tensor) and not isinstance(x, MCFTensor)
        if is_plain and x.is_floating_point() and x.dtype != found.dtype:
            return RuntimeError(
                f"{problem}. Here parameters in {found._format.name}, of shape "
                f"{tuple(found.shape)}, compute in {found.dtype} and meet a tensor of {x.dtype}, "
                f"of shape {tuple(x.shape)}. If that is an input of the model or a constant, cast "
                f"it, x.to({found.dtype}); if it comes from a layer that was added later, call "
                f"mcf.as_expansion(model) once more{other}"
            )
    return None


def in_machine_type(
    func: Any,
    format: Format,
    found: list[MCFTensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operation on copies in the widest machine type; its floating results become values.

    Tensors that it writes to, expansions or plain, get their results by one rounding. A result that
    is the copy of a target becomes the target. An operation writes to integers directly.

    Raises:
        NotImplementedError: a result is complex or sparse, or has another shape than its target.
    """
    wide = widest(found[0].device)
    numbers = WidenedArguments(func, args, kwargs, is_recorded(found), wide)
    asked: list[torch.dtype] = []

    def widen(x: Any) -> Any:
        if isinstance(x, torch.dtype) and x.is_floating_point:
            asked.append(x)
            return wide
        if not isinstance(x, Tensor) or not (isinstance(x, MCFTensor) or x.is_floating_point()):
            return x
        if x.layout != torch.strided:
            raise refusal(func, found, f"it meets a tensor of {x.layout}")
        return numbers.enter(x)

    targets, copies = written_to(func, args, kwargs), numbers.of
    result = evaluated(func, mapped(widen, args), mapped(widen, kwargs), wide)
    corrected = numbers.corrected(result)
    if any(id(x) in copies for x in targets) and corrected is not result:
        corrected = tree_map(lambda x, y: x.copy_(plainly(y, wide)), result, corrected)
    written = list({id(x): x for x in targets if id(x) in copies}.values())
    assign(func, written, [copies[id(x)] for x in written], found)
    originals = {id(copies[id(x)]): x for x in written}

    def of_target_or_narrow(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in originals:
            return originals[id(x)]
        if x.is_complex():
            raise refusal(func, found, "its result is complex")
        if x.layout != torch.strided:
            raise refusal(func, found, f"its result is {x.layout}")
        if not x.is_floating_point():
            return x
        return plainly(x, asked[-1]) if other_asked else value_of(x, format, found)

    other_asked = bool(asked) and asked[-1] != format.dtype
    return tree_map(of_target_or_narrow, corrected)


@implements(
    aten.isnan.default,  # x.isnan
    aten.isinf.default,  # x.isinf
    aten.isposinf.default,  # x.isposinf
    aten.isneginf.default,  # x.isneginf
    aten.signbit.default,  # x.signbit, torch.copysign beyond 48 bits
    aten.is_pinned,  # x.is_pinned, x.pin_memory
    aten.is_same_size,  # torch.autograd.grad
    "fsdp::all_gather_copy_in",  # fully_shard, which gathers for compute
)
def of_leading_term(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation whose result depends on the leading term only."""
    return func(*leading(args), **leading(kwargs))


@implements(
    aten.any,  # x.any
    aten.all,  # x.all
    aten.nonzero.default,  # x.nonzero, x.argwhere
    aten.nonzero_static.default,  # torch.nonzero_static
    aten.count_nonzero,  # x.count_nonzero
    aten.logical_not.default,  # x.logical_not
    aten.logical_and.default,  # x.logical_and
    aten.logical_or.default,  # x.logical_or
    aten.logical_xor.default,  # x.logical_xor
    aten._assert_async,  # torch.distributions, in compiled code
)
def of_zeros(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation whose result depends only on which numbers are zero."""

    def is_true(x: Any) -> Any:
        return x != 0 if isinstance(x, MCFTensor) else x

    return func(*mapped(is_true, args), **mapped(is_true, kwargs))


@implements(aten._has_same_storage_numel.default)  # torch.func.jvp
def has_same_storage_numel(func: Any, x: Tensor, base: Tensor) -> Any:
    """Compare the storage of leading terms, for tangents that are no inputs of a graph.

    A graph would record the terms of its inputs as constants, and this raises.
    """
    mode = get_proxy_mode()
    if mode is not None and any(has_proxy_slot(y, mode.tracer) for y in expansions((x, base))):
        raise refusal(
            func,
            expansions((x, base)),
            "make_fx, by which torch.func.linearize goes, would take the tangents for constants; "
            "torch.func.jvp has no such graph",
        )
    return func(*leading((x, base)))


@implements(
    aten._nested_tensor_from_tensor_list.default,  # torch.nested.nested_tensor
    aten._nested_view_from_jagged.default,  # the same with layout=torch.jagged
)
def nest(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Nest the leading terms of parameters. Values raise, since they would lose other terms."""
    found = expansions((args, kwargs))
    if all(x.acts_as == "parameter" for x in found):
        return func(*leading(args), **leading(kwargs))
    raise refusal(func, found, "nested tensors are of plain tensors")
