"""Operations that move, copy, make or place elements: the same operation on each term.

Nothing is rounded, and numbers and plain tensors enter at full precision. The comment next to an
operator names its callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from mcftensor.arithmetic.write_counts import moved
from mcftensor.dispatch.default_handler import compute
from mcftensor.dispatch.operands import (
    check_update,
    common_format,
    common_role,
    computes_plainly,
    expansions,
    leading,
    named_arguments,
    refusal,
    rounding_key,
    selected,
    stored_in,
    template,
)
from mcftensor.dispatch.registry import FAMILIES, implements
from mcftensor.dispatch.storage_formats import plain_numbers
from mcftensor.dispatch.store import count_write, fill, uninterrupted
from mcftensor.dispatch.system import holds_all
from mcftensor.formats import Format, compute_view, movable, unmoved
from mcftensor.kernels import LOCK
from mcftensor.kernels.columns import is_bare
from mcftensor.operators.block_structure import (
    computes_decoded,
    copy_blocks_,
    join_blocks,
    made_in_blocks,
    place_in_blocks,
    set_blocks_,
    share_scales,
)
from mcftensor.operators.view_offsets import starts_of_pieces
from mcftensor.passes.format_conversion import compute_tensor as compute_tensor_of
from mcftensor.tensor import GradientTensor, MCFTensor, Role
from mcftensor.tensor.implicit_rounding import note_moved, note_of_leading, rounding
from mcftensor.tensor.leading_view import ComputeView, compute_views, holding

aten = torch.ops.aten

_VIEW_COPIES = (
    *("alias", "as_strided", "detach", "diagonal", "expand", "narrow", "permute", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold"),
    *("unsqueeze", "view"),
)


def _copies(func: Any, x: MCFTensor, args: Any, kwargs: Any) -> Any:
    """Apply an operation to each component, with results in new memory.

    If the format cannot move its components this way, return the plain numbers.
    """
    if x._format is compute_view:
        return tree_map(partial(holding, x), func(x._read()[1], *args, **kwargs))
    with LOCK:
        results = x._format.move(func, x._read(), x.shape, args, kwargs, own=True)
        if results is not None:
            return _together(x, results, repeat(0), own=True)
    return func(plain_numbers(x), *args, **kwargs)


def _views(func: Any, x: MCFTensor, args: Any, kwargs: Any) -> Any:
    """Apply a view operator to each component, with results that alias the components."""
    if isinstance(x, (GradientTensor, ComputeView)):
        return x.views(func, args, kwargs)
    held = x._held() if x._format.shared else x.components
    results = x._format.move(func, held, x.shape, args, kwargs, own=False)
    if results is None and not x._format.shared:
        return func(plain_numbers(x), *args, **kwargs)
    if results is None and computes_decoded(x):
        return compute_views(func, x, args, kwargs)
    if results is None:
        raise refusal(
            func,
            [x],
            "32 elements of a row share a scale, and a view is of whole rows: a part along the "
            "first dimension, or another shape of its rows. Where an optimizer wants other views, "
            "mcf.collage(optimizer, {name: mcf.bf16i16}) keeps the state in float32",
        )
    x._is_own = False
    starts = repeat(0) if x._writes is None else starts_of_pieces(func, x, args, kwargs)
    return _together(x, results, starts, own=False)


def _together(x: MCFTensor, results: list[Any], starts: Iterable[int], *, own: bool) -> Any:
    """Return tensors of the kind of x, given the results for each component."""
    if isinstance(results[0], Tensor):
        return x._like(results, own=own, start=next(iter(starts)))
    pieces = zip(*results, strict=True)
    made = (x._like(piece, own=own, start=i) for piece, i in zip(pieces, starts, strict=False))
    return type(results[0])(made)


@implements(aten._unsafe_view.default)  # products of stacks of matrices, x.t().reshape
def view(func: Any, x: MCFTensor, *args: Any, **kwargs: Any) -> Any:
    """Return views, by PyTorch's schemas: the terms of the result alias the terms of x."""
    if torch.is_inference_mode_enabled() or x.is_inference():
        with torch._C._InferenceMode(x.is_inference()):  # a view is of the kind of its base
            return _views(func, x, args, kwargs)
    out = _views(func, x, args, kwargs)
    if func is aten.detach.default:
        _keep_hooks(x, out)
    first = out if isinstance(out, Tensor) else next(iter(out), out)
    if isinstance(first, ComputeView):  # PyTorch requires views to have the type of their base
        return out
    return return_and_correct_aliasing(func, (x, *args), kwargs, out)


def _keep_hooks(x: MCFTensor, new: MCFTensor) -> None:
    """Copy the hooks of x, which `module.to(device)` replaces by a parameter made of the new
    tensor.
    """
    if x._hooks:
        new._hooks = x._hooks


FAMILIES["view"] = view


@implements(
    aten.clone.default,  # deepcopy, LBFGS, contiguous
    aten.diag_embed.default,  # torch.diag_embed
    aten.flip.default,  # x.flip, x.fliplr
    aten.roll.default,  # x.roll
    aten.repeat.default,  # x.repeat, x.tile
    aten.rot90.default,  # x.rot90
    aten.tril.default,  # x.tril, torch.linalg
    aten.triu.default,  # x.triu
    aten.index.Tensor,  # x[indices], x[mask]
    aten._unsafe_index.Tensor,  # compiled F.interpolate
    aten.index_select.default,  # x.index_select
    aten.gather.default,  # x.gather, x.take_along_dim
    aten.take.default,  # x.take
    aten.masked_select.default,  # x.masked_select, torch.combinations
    # torch.t_copy and its like, x.diag, torch.func.functionalize
    *(getattr(aten, f"{name}_copy") for name in _VIEW_COPIES),
    aten.slice_backward.default,  # gradients of x[1:]
    aten.select_backward.default,  # gradients of x[0]
    aten.diagonal_backward.default,  # gradients of x.diagonal
    aten._pin_memory.default,  # x.pin_memory, data loaders, offloading
)
def move_elements(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy or select elements."""
    if not isinstance(x, MCFTensor) or any(isinstance(a, MCFTensor) for a in args):  # as indices
        return compute(func, x, *args, **kwargs)
    return _copies(func, x, args, kwargs)


@implements(
    aten.unsafe_split.Tensor,  # torch.unsafe_chunk
    aten.unsafe_split_with_sizes.default,  # torch.unsafe_split_with_sizes
    aten.channel_shuffle.default,  # F.channel_shuffle
    aten.native_channel_shuffle.default,  # the same
    aten.max_unpool2d.default,  # F.max_unpool1d, F.max_unpool2d
    aten.max_unpool3d.default,  # F.max_unpool3d
    aten.im2col.default,  # F.unfold
    aten.pixel_shuffle.default,  # F.pixel_shuffle
    aten.pixel_unshuffle.default,  # F.pixel_unshuffle
    # F.pad with a mode
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    # F.interpolate with mode="nearest" and "nearest-exact"
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
)
def layer(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Move elements in a layer: all terms of a value, the leading term of a parameter."""
    is_value = isinstance(x, MCFTensor) and x.acts_as == "value"
    return (move_elements if is_value else compute)(func, x, *args, **kwargs)


@implements(aten.embedding.default)  # F.embedding
def embedding(func: Any, x: Any, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return an embedding. A table that is decoded at each use decodes only the requested rows."""
    if isinstance(x, MCFTensor) and computes_decoded(x) and indices.numel() < x.shape[0]:
        rows = [part.index_select(0, indices.flatten()) for part in x._read()]
        return compute_tensor_of(rows, x._format).view(*indices.shape, *x.shape[1:])
    return layer(func, x, indices, *args, **kwargs)


@implements(
    aten.squeeze_,  # x.squeeze_
    aten.unsqueeze_,  # x.unsqueeze_
    aten.t_,  # x.t_
    aten.transpose_.default,  # x.transpose_, x.swapaxes_
    aten.as_strided_.default,  # x.as_strided_
)
def view_(func: Any, x: MCFTensor, *args: Any, **kwargs: Any) -> MCFTensor:
    """Change the shape of the same tensor object."""
    if share_scales([x]):
        raise refusal(func, [x], "32 elements of a row share a scale")
    calls = [partial(func._op, t, *args, **kwargs) for t in (*x.components, x)]
    if not is_bare(x.components):  # compilers trace dispatched operators
        uninterrupted(calls[:-1])
        calls = calls[-1:]
    with no_dispatch():
        uninterrupted(calls)
    return x


@implements(
    aten.cat.default,  # parameters_to_vector, DDP, class tokens
    aten.stack.default,  # the same
    aten.block_diag.default,  # torch.block_diag
    aten._chunk_cat.default,  # gradients in fully_shard
)
def join(func: Any, tensors: Sequence[Tensor], *args: Any) -> Any:
    """Return expansions of one base as one; a plain tensor enters as a value."""
    if computes_plainly(tensors):
        joined = func(leading(tensors), *args)
        note_of_leading(joined, expansions(tensors)[0])
        note_moved(joined, expansions(tensors)[0])
        return joined
    if share_scales(tensors):
        return join_blocks(func, tensors, *args)
    format = common_format(func.overloadpacket.__name__, tensors)
    format = format.of_states if format is compute_view else format
    columns = zip(*(stored_in(x, format, x.device) for x in tensors), strict=True)
    joined = [func(list(c), *args) for c in columns]
    return selected(joined, format, common_role(tensors), tensors)


# ---------------------------------------------------------------------------------- factories


def _within_graph(x: MCFTensor) -> bool:
    """Return whether a backward formula is the caller, and not an optimizer.

    An optimizer has the parameter itself, or is within its step. Compilers give the parameter a
    grad_fn, under no_grad too.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    in_forward = torch.is_grad_enabled() and x.grad_fn is not None
    return x.acts_as == "parameter" and (in_forward or (in_backward and not x._is_param))


def _asks_other(x: MCFTensor, kwargs: dict[str, Any]) -> bool:
    """Return whether another dtype is requested; otherwise remove the dtype from the keywords."""
    if kwargs.get("dtype") not in (None, x.dtype):
        return True
    kwargs.pop("dtype", None)
    return False


@implements(aten.zeros_like.default, aten.empty_like.default)  # states of optimizers
def like(func: Any, x: MCFTensor, **kwargs: Any) -> Any:
    """Return a value of the same format.

    The result is plain if another dtype is requested. It is also plain for a parameter within a
    graph, since backward formulas create it, and gradients of parameters are plain.

    An empty tensor like a part or copy of a parameter is a parameter: `distribute_tensor` and
    `Module.to_empty` create the memory of the parameter with it.
    """
    if _asks_other(x, kwargs) or _within_graph(x):
        return func(template(x), **kwargs)
    format, is_empty = _of_states(x), func is aten.empty_like.default
    if format is not x._format and not (is_empty and x._format is not compute_view):
        plain = template(x)
        made = [func(plain, **{**kwargs, "dtype": y.dtype}) for y in format.components]
        return MCFTensor.of(made, format, own=True)
    if share_scales([x]):
        return made_in_blocks(func, x, x.shape, (), kwargs)
    holds = func is aten.empty_like.default and not x._is_param
    made = [func(t, **kwargs) for t in x._read()]
    return x._made_beside(made, x.role if holds else "value")


@implements(
    aten.new_zeros.default,  # x.new_zeros, spectral norm
    aten.new_empty.default,  # x.new_empty, padding by mode="circular"
    aten.new_empty_strided.default,  # x.new_empty_strided, FSDP
)
def new(func: Any, x: MCFTensor, *args: Any, **kwargs: Any) -> Any:
    """Return a tensor as `like` does, of another shape; the role stays."""
    if _asks_other(x, kwargs):
        return func(template(x), *args, **kwargs)
    if isinstance(x, ComputeView):
        x = x._source
    if share_scales([x]):
        return made_in_blocks(func, x, torch.Size(args[0]), args[1:], kwargs)
    return x._like([func(t, *args, **kwargs) for t in x._read()], own=True)


@implements(aten._new_zeros_with_same_feature_meta.default)  # nested forward derivatives
def new_tangent(func: Any, x: Tensor, base: Tensor, **kwargs: Any) -> Any:
    """Return zeros of the kind of a tangent, in the layout of its primal."""
    base = leading(base)
    if not isinstance(x, MCFTensor):
        return func(x, base, **kwargs)
    if x.format.shared:
        return x.new_zeros(func(template(x), base, **kwargs).shape)
    return x._like([func(t, base, **kwargs) for t in x._read()], own=True)


def _of_states(x: MCFTensor) -> Format:
    """Return the format of a new tensor like x."""
    return x._format.of_states if x._role == "parameter" else x._format


def _filled(
    make: Callable[[Tensor], Tensor], x: MCFTensor, role: Role, value: Any = 1.0
) -> MCFTensor:
    numbers = stored_in(value, x.format, x.device)
    made = [make(t).copy_(n) for t, n in zip(x._read(), numbers, strict=True)]
    return x._made_beside(made, role)


@implements(aten.ones_like.default, aten.full_like.default)  # states of optimizers
def filled_like(func: Any, x: MCFTensor, *value: Any, **kwargs: Any) -> Any:
    """Return a value filled with a number at full precision.

    A backward pass from a parameter starts from plain ones, like all gradients of parameters.
    """
    if _asks_other(x, kwargs) or _within_graph(x):
        return func(template(x), *value, **kwargs)
    if _of_states(x) is not x._format:
        return torch.zeros_like(x, **kwargs).fill_(*value or (1.0,))
    if share_scales([x]):
        return torch.empty_like(x, **kwargs).fill_(*value or (1.0,))
    return _filled(lambda t: torch.empty_like(t, **kwargs), x, "value", *value)


@implements(aten.new_ones.default, aten.new_full.default)  # x.new_ones, x.new_full
def new_filled(func: Any, x: MCFTensor, size: Any, *value: Any, **kwargs: Any) -> Any:
    """Return a tensor as `filled_like` does, of another shape; the role stays."""
    if _asks_other(x, kwargs):
        return func(template(x), size, *value, **kwargs)
    if share_scales([x]):
        return x.new_empty(size, **kwargs).fill_(*value or (1.0,))
    return _filled(lambda t: t.new_empty(size, **kwargs), x, x.role, *value)


# ------------------------------------------------------------------------------- copies, writes


@implements(aten.view.dtype)  # x.view(torch.int16), FSDP
def view_bits(func: Any, x: MCFTensor, dtype: torch.dtype) -> Any:
    """Raise TypeError: the bits of an expansion are in several tensors."""
    raise TypeError(
        f"view: an expansion in {x.format.name} has no bits to be seen as {dtype}; view those of a "
        "term, x.components[0].view(dtype), or convert the values, mcf.as_plain(x, dtype). Where "
        "fully_shard asks, it gathers parameters of several dtypes: apply it to them separately, "
        "or give it a MixedPrecisionPolicy with a param_dtype"
    )


@implements(aten.view_as_complex.default)  # torch.view_as_complex beyond 48 bits
def view_as_complex(func: Any, x: MCFTensor) -> Any:
    """Raise NotImplementedError: there are no complex expansions."""
    raise refusal(func, [x], "its result is complex")


@implements(aten._to_copy.default)  # .to, .float(), autocast, load_state_dict of optimizers
def to_copy(func: Any, x: MCFTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Copy to a device as an expansion, or convert to another dtype with one rounding."""
    if dtype not in (None, x.dtype):
        assert dtype is not None
        if dtype.is_complex:
            raise NotImplementedError(
                f"to: an expansion in {x.format.name} cannot become {dtype}; convert it to a real "
                "dtype first, .to(torch.float64)"
            )
        plain = _rounded(x, dtype)
        return func(plain, dtype=dtype, **kwargs) if kwargs else plain
    if share_scales([x]):
        return _copies(func, x, (), kwargs)
    with LOCK:
        copied = x._like([func(t, **kwargs) for t in x._read()], own=True)
    _keep_hooks(x, copied)
    return copied


def _rounded(x: MCFTensor, dtype: torch.dtype) -> Tensor:
    """Return numbers as a plain tensor: rounded once, or, as integers, without their fractions."""
    if dtype.is_floating_point:
        return x._collapsed(dtype)
    if not dtype.is_complex and not holds_all(x):
        return _as_integers(x, dtype)
    return x._collapsed(torch.float64).to(dtype)


def _as_integers(x: MCFTensor, dtype: torch.dtype) -> Tensor:
    """Return numbers without their fractions, as the sum of terms that are integers."""
    if x._format.arithmetic == "numbers":
        return x._collapsed(x._format.result.dtype).to(dtype)
    if dtype == torch.bool:
        return x._component0 != 0
    whole = cast(MCFTensor, torch.trunc(x))
    return torch.stack([term.to(torch.int64) for term in whole._read()]).sum(0).to(dtype)


@implements(aten.copy_.default)  # load_state_dict, EMA, AOTAutograd's write-back
def copy_(func: Any, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """Copy in place: the terms between equal formats, otherwise with one rounding."""
    if not isinstance(target, MCFTensor):
        rounding(func, [source], target)
        func(target, _rounded(source, target.dtype), non_blocking)
        return target
    if source.is_complex():
        raise TypeError(f"copy_: {source.dtype} into an expansion in {target.format.name}")
    check_update(func, target, source)
    if target._format.shared:
        with LOCK:
            copy_blocks_(target, source)
        return target
    is_alike = isinstance(source, MCFTensor) and source.format is target.format
    key = None if is_alike else rounding_key(target.format, [target])
    fill(target, stored_in(source, target.format, target.device, key), non_blocking)
    if not is_alike:
        count_write([target])
    elif target._writes is not None:  # it continues the count of the source
        target._writes.copy_(moved(source._count, -target._first))
    return target


@implements(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)  # zero_grad, states
def fill_(func: Any, target: Tensor, value: Any = 0.0) -> Tensor:
    """Set every element to one number, at full precision."""
    if not isinstance(target, MCFTensor):
        return target.copy_(value.expand(target.shape))
    if target._format.shared:
        set_blocks_(target, value)
        return target
    numbers = stored_in(value, target.format, target.device)
    fill(target, [x.expand(target.shape) for x in numbers])
    return target


@implements(
    aten.masked_fill.Scalar,  # x.masked_fill(mask, 0.0)
    aten.masked_fill.Tensor,  # x.masked_fill(mask, tensor)
    aten.masked_fill_.Scalar,  # x.masked_fill_(mask, 0.0)
    aten.masked_fill_.Tensor,  # x.masked_fill_(mask, tensor)
)
def masked_fill(func: Any, x: Any, mask: Tensor, value: Any) -> Any:
    """Set the elements under a mask to one number, at full precision."""
    if func.overloadpacket is aten.masked_fill_ and _goes_to_plain(x, value):
        rounding(func, [value], x)
        return func(x, mask, value._collapsed(x.dtype))
    if not isinstance(x, MCFTensor) or isinstance(mask, MCFTensor):
        return compute(func, x, mask, value)
    if share_scales([x]):
        return place_in_blocks(func, (x, mask, value), {})
    filled = [
        torch.where(mask, number, t)
        for t, number in zip(x._read(), stored_in(value, x.format, x.device), strict=True)
    ]
    if func.overloadpacket is aten.masked_fill:
        return x._like(filled, own=True)
    fill(x, filled)
    return x


def _goes_to_plain(target: Any, source: Any) -> bool:
    """Return whether elements of an expansion are written into a plain floating tensor."""
    is_plain = not isinstance(target, MCFTensor) and target.is_floating_point()
    return is_plain and isinstance(source, MCFTensor)


# The names of the arguments whose elements are written into `self`.
_SOURCES = ("src", "source", "values", "value")


# Operators that read the places that others write, and raise for invalid places before the write.
_READS = {
    aten.index_put_: aten.index.Tensor,
    aten.put_: aten.take.default,
    aten.scatter_: aten.gather.default,
    aten.index_copy_: aten.index_select.default,
    aten.index_fill_: aten.index_select.default,
}


def _require_places(func: Any, term: Tensor, named: dict[str, Any]) -> None:
    """Raise the error of an invalid place on a CPU before anything is written.

    On other devices such an error ends the program.
    """
    read = _READS.get(func.overloadpacket)
    if read is None or term.device.type != "cpu" or not is_bare([term]):
        return
    places = {name: x for name, x in named.items() if name != "accumulate"}
    if any(x is not None and x.dtype != torch.bool for x in places.get("indices", [term])):
        read(term, **places)  # masks have no invalid places


def _fills_mask(source: Any, indices: Sequence[Tensor | None]) -> bool:
    """Return whether a CPU number is written to the places of one mask.

    PyTorch then fills the mask without counting its places, and the number stays on the CPU.
    """
    masks = [x for x in indices if x is not None]
    if len(masks) != 1 or masks[0].dtype != torch.bool:
        return False
    return isinstance(source, Tensor) and source.dim() == 0 and source.device.type == "cpu"


def _elements(source: Any, format: Format, device: torch.device) -> Sequence[Any]:
    """Return the elements for each term; for a number Python floats, which are not traced."""
    if isinstance(source, torch.Tensor):
        return list(map(movable, stored_in(source, format, device)))
    with no_dispatch():
        stored = stored_in(source, format, torch.device("cpu"))
        return [movable(term).item() for term in stored]


@implements(
    aten.index_put,  # x.index_put, vmap of x[i] = value
    aten.index_put_,  # x[i] = value, x[mask] = value
    aten.put,  # x.put
    aten.put_,  # x.put_
    aten.scatter.src,  # x.scatter(0, i, tensor)
    aten.scatter.value,  # x.scatter(0, i, 1.0)
    aten.scatter_.src,  # x.scatter_(0, i, tensor)
    aten.scatter_.value,  # x.scatter_(0, i, 1.0)
    aten.masked_scatter,  # x.masked_scatter
    aten.masked_scatter_,  # x.masked_scatter_
    aten.index_copy,  # x.index_copy
    aten.index_copy_,  # x.index_copy_
    aten.index_fill,  # x.index_fill
    aten.index_fill_,  # x.index_fill_
    aten.select_scatter,  # torch.select_scatter, functionalized x[0] = value
    aten.slice_scatter,  # torch.slice_scatter, functionalized x[1:] = value
    aten.diagonal_scatter,  # torch.diagonal_scatter
    aten.as_strided_scatter,  # torch.as_strided_scatter
    aten.constant_pad_nd,  # F.pad
)
def place(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Write elements into places of a tensor. Into a plain tensor they are rounded, as by copy_."""
    if not isinstance(args[0], MCFTensor) and func._schema.name.endswith("_"):
        named = named_arguments(func, args, kwargs)
        name = next((name for name in _SOURCES if name in named), "value")
        source = named.pop(name, 0)
        is_sum = named.get("accumulate") or expansions(named)
        if not is_sum and _goes_to_plain(args[0], source):
            rounding(func, [source], args[0])
            return func(**named, **{name: _rounded(source, args[0].dtype)})
    if share_scales([*args, *kwargs.values()]):
        return place_in_blocks(func, args, kwargs)
    named = named_arguments(func, args, kwargs)
    x = named.pop("self")
    name = next((name for name in _SOURCES if name in named), "value")
    source = named.pop(name, 0)
    in_place = func._schema.name.endswith("_")
    if not in_place and computes_plainly((x, source)):
        moved = func(*leading(args), **leading(kwargs))
        note_moved(moved, expansions((x, source))[0])
        return moved
    if expansions(named) or named.get("accumulate") or (in_place and not isinstance(x, MCFTensor)):
        return compute(func, *args, **kwargs)
    if in_place:
        check_update(func, x, source)
    format = x.format if in_place else common_format(func.overloadpacket.__name__, (x, source))
    stored = x.components if in_place else stored_in(x, format, x.device)
    device = source.device if _fills_mask(source, named.get("indices", ())) else x.device
    terms, numbers = list(map(movable, stored)), _elements(source, format, device)
    by_copy = func is aten.masked_scatter_.default  # it may raise after writing some elements
    write = aten.masked_scatter.default if by_copy else func
    calls = [
        partial(write._op, term, **named, **{name: number})
        for term, number in zip(terms, numbers, strict=True)
    ]
    if in_place:
        _require_places(func, terms[0], named)
    results = list(map(unmoved, uninterrupted(calls), format.components))
    if by_copy:
        fill(x, results)
    return x if in_place else selected(results, format, common_role((x, source)), (x, source))


@implements(aten.record_stream.default)  # FSDP, offloading
def record_stream(func: Any, x: MCFTensor, stream: Any) -> None:
    """Record a stream for the memory of every term."""
    for term in x.components:
        func(term, stream)


@implements(aten._local_scalar_dense.default)  # .item(), float(x)
def item(func: Any, x: MCFTensor) -> Any:
    """Return the collapsed value as a Python float."""
    return x._on_host().item()


@implements(aten.set_.source_Tensor)  # plain.set_(x)
def set_(func: Any, target: Tensor, source: Any) -> Any:
    """Raise TypeError: an expansion has no storage that a plain tensor could share."""
    raise TypeError(
        f"set_: a plain tensor cannot take the storage of an expansion in {source.format.name}, "
        "which has none; assign values with copy_(), or use mcf.as_plain(x, dtype)"
    )


@implements(aten.is_set_to.default)  # x.is_set_to
def is_set_to(func: Any, x: Tensor, other: Tensor) -> bool:
    """Return whether two expansions have the same memory and layout."""
    if not isinstance(x, MCFTensor) or not isinstance(other, MCFTensor):
        return False
    return x._format is other._format and bool(func(x._lying(), other._lying()))


@implements(aten._cudnn_rnn_flatten_weight.default)  # RNN.flatten_parameters, on GPUs
def flatten_weights(func: Any, weights: Sequence[Tensor], *args: Any) -> Tensor:
    """Return an empty tensor. Layers join the leading terms at each call instead."""
    return torch.empty(0, dtype=weights[0].dtype, device=weights[0].device)
