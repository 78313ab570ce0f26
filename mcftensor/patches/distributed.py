"""Modules and state dicts on more than one process, where torch does not ask tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcftensor.dispatch.operands import name_counts
from mcftensor.operators.collectives import REDUCTION, carried, require_one_format
from mcftensor.patches.optimizers import parameters_of
from mcftensor.patches.table import by_name, calls, patch, rows
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.addresses import without_addresses
from mcftensor.tensor.components import format_of, local
from mcftensor.tensor.pickling import attributes_of_users


@patch(
    "torch.nn.Module._apply",
    why="`module.to(dtype)` replaces DTensors of expansions by plain DTensors and calls "
    "neither their dispatch nor a hook. `to_empty` does the same, and balanced rounding needs "
    "the parameter names afterwards.",
    loss="module.to(dtype) does not raise for sharded expansions, but drops all terms except "
    "the leading ones; call mcf.as_plain(module) before sharding.",
    takes=("fn",),
)
@by_name
def _keeping_expansions(apply: Callable[[], nn.Module], given: dict[str, Any]) -> nn.Module:
    if getattr(given["fn"], "func", None) is _converted:  # called for an enclosing module
        return apply()
    given["fn"] = functools.partial(_converted, given["fn"])
    module: nn.Module = given["self"]
    had_no_memory = any(x.is_meta for x in module.parameters())
    marked = [(x, attributes_of_users(x)) for x in module.parameters() if format_of(x)]
    result = apply()
    for x, attributes in marked:  # PyTorch exchanges all that an expansion has
        x.__dict__.update(attributes)
    if had_no_memory:
        name_counts(module)
    return result


def _converted(convert: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Convert a tensor for `Module.to`; DTensors of expansions must stay DTensors of expansions.

    Module replaces tensors by the result without asking them; expansions themselves refuse.
    """
    new = convert(x)
    format = format_of(x)
    if format is not None and local(x) is not x and format_of(new) is None:
        raise TypeError(
            f"to: a sharded expansion in {format.name} of shape {tuple(x.shape)} cannot become "
            f"{new.dtype} with its module. Convert with mcf.as_plain(module, dtype) before it "
            "is sharded; a MixedPrecisionPolicy(param_dtype=...) computes in another dtype"
        )
    return new


def _by_terms(broadcast: Callable[..., None]) -> Callable[..., None]:
    """Replace expansions by terms: tensors of one dtype are sent together, and
    DistributedDataParallel passes plain buffers together with parameters of several formats."""

    def in_terms(argument: Any) -> Any:
        if not isinstance(argument, (list, tuple)):
            return argument
        return [t for x in argument for t in _parts(x)]

    @functools.wraps(broadcast)
    def broadcast_terms(*args: Any, **kwargs: Any) -> None:
        named = {name: in_terms(argument) for name, argument in kwargs.items()}
        broadcast(*map(in_terms, args), **named)

    return broadcast_terms


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of a tensor that all ranks must have alike."""
    if not isinstance(x, MCFTensor) or x.format.rules is not None:  # which refuse
        return (x,)
    components = tuple(map(carried, x.components))
    return components if x._writes is None else (*components, x._writes)


def _of_one_kind(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def checked(*args: Any, **kwargs: Any) -> Any:
        require_one_format(f"torch.distributed.{collective.__name__}", (args, kwargs))
        return collective(*args, **kwargs)

    return checked


def _naming_its_reduction(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction is an argument, or an attribute of one."""

    @functools.wraps(all_reduce)
    def named(*args: Any, **kwargs: Any) -> Any:
        found = [getattr(x, "reduceOp", x) for x in (*args[2:], *kwargs.values())]
        kinds = [x for x in found if isinstance(x, (dist.ReduceOp, dist.ReduceOp.RedOpType))]
        kind: Any = kinds[0] if kinds else dist.ReduceOp.SUM
        outer = REDUCTION.set(int(getattr(kind, "op", kind)))
        try:
            return all_reduce(*args, **kwargs)
        finally:
            REDUCTION.reset(outer)

    return named


@patch(
    "torchtitan.components.optimizer.optimizer.init_optim_state",
    why="torchtitan runs the same step before it saves or loads states.",
    loss="with balanced rounding, runs resumed by torchtitan continue with other counts.",
    when="import torchtitan.components.optimizer.optimizer",
    releases="0.3",
    takes=("optim",),
)
@patch(
    "torch.distributed.checkpoint.state_dict._init_optim_state",
    why="Before an optimizer without states loads some, PyTorch runs a step that changes "
    "nothing, and balanced rounding counts that step.",
    loss="with balanced rounding, runs resumed by torch.distributed.checkpoint.state_dict "
    "continue with other counts; get a state dict of the optimizer before you set one.",
    when="import torch.distributed.checkpoint.state_dict",
    takes=("optim",),
)
@by_name
def _uncounted(initialize: Callable[[], None], given: dict[str, Any]) -> None:
    own = [local(p) for p in parameters_of(given["optim"])]
    counts = [x._writes for x in own if isinstance(x, MCFTensor) and x._writes is not None]
    before = [count.clone() for count in counts]
    initialize()
    for count, was in zip(counts, before, strict=True):
        count.copy_(was)


@patch(
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager.stage",
    why="`dcp.async_save` takes a tensor with an address for a tensor with a storage, and "
    "copies the storage.",
    loss="dcp.async_save fails with expansions; give it mcf.checkpoint.as_terms(state_dict).",
    when="import torch.distributed.checkpoint._state_dict_stager",
)
@patch(
    "torch.distributed._state_dict_utils._iterate_state_dict",
    why="The caching stagers of `dcp.async_save` make a plain tensor of every tensor with an "
    "address.",
    loss="stagers that cache state dicts round expansions; give them "
    "mcf.checkpoint.as_terms(state_dict).",
    when="import torch.distributed._state_dict_utils",
)
@by_name
def _by_attributes(copy: Callable[[], Any], given: dict[str, Any]) -> Any:
    return without_addresses(copy)


@patch(
    "torch.distributed.checkpoint.filesystem._SerialCpuLoader.values",
    why="Before torch 2.11, writers of distributed checkpoints ask a tensor for its typed storage, "
    "to copy those that are views of a larger one.",
    loss="before torch 2.11, dcp.save raises for whole expansions; give it "
    "mcf.checkpoint.as_terms(state_dict).",
    releases="2.9 to 2.14",
    when="import torch.distributed.checkpoint.filesystem",
    takes=("self",),
)
def _copying_expansions(values: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(values)
    def copied(self: Any) -> Iterator[Any]:
        for item in self.items:
            x = self.resolve_fun(item[1])
            if isinstance(x, MCFTensor):
                yield x.detach().cpu().clone(), item[1]
            else:
                one = copy.copy(self)
                one.items, one.resolve_fun = [item], lambda _, x=x: x
                yield from values(one)

    return copied


_aten = torch.ops.aten
_LERPS = (_aten.lerp, _aten.lerp_, _aten._foreach_lerp, _aten._foreach_lerp_)


@patch(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    why="DTensor checks that both operands of `lerp_` have one dtype before it dispatches. A "
    "first moment in blocks reports float32, its gradient bfloat16.",
    loss="Adam's for-loop and foreach paths fail over shards with first moments in mxfp8; give "
    "fused=True.",
    when="import torch.distributed.tensor._sharding_prop",
    takes=("op_schema",),
)
@by_name
def _of_one_dtype(propagate: Callable[[], Any], given: dict[str, Any]) -> Any:
    schema = given["op_schema"]
    if schema.op.overloadpacket in _LERPS:
        given["op_schema"] = dataclasses.replace(
            schema, args_schema=_as_the_first(schema.args_schema)
        )
    return propagate()


def _as_the_first(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give all descriptions of DTensors, or lists of these, the dtypes of the first one. The
    operation itself refuses plain tensors of different dtypes."""

    def like(own: Any, x: Any) -> Any:
        if not hasattr(x, "tensor_meta"):
            return x
        x = copy.copy(x)
        x.tensor_meta = x.tensor_meta._replace(dtype=own.tensor_meta.dtype)
        return x

    first, *rest = args
    if hasattr(first, "tensor_meta"):
        return (first, *(like(first, x) for x in rest))
    others = (type(x)(map(like, first, x)) if isinstance(x, (list, tuple)) else x for x in rest)
    return (first, *others)


@by_name
def _as_arranged(reduce: Callable[[], Any], given: dict[str, Any]) -> Any:
    calls.around_reduction(given)
    return reduce()


(REDUCES,) = rows(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce",
    why="`fully_shard` divides gradients by the number of processes and adds the gradients of "
    "replicas in the order of its all-reduce. It offers no hook for either.",
    loss="mcf.order_free_gradients raises in backward under fully_shard.",
    when="mcf.order_free_gradients(model, microbatches=...)",
    takes=(
        *("reduce_scatter_group", "reduce_scatter_comm", "all_reduce_group"),
        *("gradient_divide_factor", "force_sum_reduction_for_comms", "all_reduce_grads"),
    ),
    change=_as_arranged,
)

if dist.is_available():
    rows(
        "torch.distributed._broadcast_coalesced",
        why="DistributedDataParallel concatenates and broadcasts tensors at construction, in C++ "
        "that does not know expansions.",
        loss="DistributedDataParallel raises for expansions, or concatenates their terms wrongly.",
        change=_by_terms,
    )
    rows(
        "torch.distributed.ProcessGroup.allgather",
        "torch.distributed.ProcessGroup.gather",
        "torch.distributed.ProcessGroup.reduce_scatter",
        "torch.distributed.ProcessGroup.scatter",
        why="PyTorch does not look for tensors of a class in lists of lists. Beside a plain "
        "tensor, the expansions there are read as memory that they do not have.",
        loss="a collective of a plain tensor with a list of expansions crashes the process.",
        change=_of_one_kind,
    )
    rows(
        "torch.distributed.ProcessGroup.allreduce",
        why="Before torch 2.10, dispatch is given the reduction as an object without its name.",
        loss="before torch 2.10, all_reduce of expansions raises LookupError.",
        releases="2.9 to 2.14",
        change=_naming_its_reduction,
    )
