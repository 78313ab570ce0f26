"""Functions that torch.compile would otherwise decompose, before an expansion sees them, or merge.

The front end of the compiler writes `add_` with a number as `alpha`, `addcmul_`, `addcdiv_` and
`addcdiv` with one as `value`, and `_foreach_lerp_`, as sequences of operations; which of them
depends on the release. On plain gradients the first of these rounds to bf16, and the result differs
from the eager one. Here these calls are kept whole for expansions and scaled tensors, and left to
the compiler for all else. It also takes a gradient to have the terms of its parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mcftensor.operators.elementwise import register_in_place
from mcftensor.passes.operators import OPERATORS
from mcftensor.patches.table import by_name, patch
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.step_context import current_step
from mcftensor.tensor.step_tensors import resolved

COMPILER = "import torch._dynamo"


@patch(
    "torch._dynamo.variables.tensor.TensorVariable.call_method",
    why="Compilers decompose `add_`, `addcmul_` and `addcdiv_` with a scalar into several "
    "operations.",
    loss="compiled add_(alpha=...), addcmul_ and addcdiv_ may round differently from eager ones.",
    when=COMPILER,
    takes=("self", "tx", "name", "args", "kwargs"),
)
@by_name
def _whole_over_expansions(call_method: Callable[[], Any], given: dict[str, Any]) -> Any:
    from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable

    keyword, of_number, of_tensor = _WITH_A_NUMBER.get(given["name"], ("", None, None))
    if keyword not in given["kwargs"] or not _is_ours(given["self"]):
        return call_method()
    by_tensor = isinstance(given["kwargs"][keyword], TensorVariable)
    if by_tensor and _has_rules(given["self"]):
        return call_method()
    operator: Any = of_tensor if by_tensor else of_number
    operands = [given["self"], *given["args"]]
    TorchInGraphFunctionVariable(operator).call_function(given["tx"], operands, given["kwargs"])
    return given["self"]


@patch(
    "torch._dynamo.variables.TorchInGraphFunctionVariable._get_handlers",
    why="Compilers decompose `addcdiv` with a scalar into several operations.",
    loss="compiled addcdiv may round differently from eager addcdiv.",
    when=COMPILER,
)
def _sparing_expansions(get_handlers: Callable[..., Any]) -> Callable[..., Any]:
    @functools.lru_cache(maxsize=1)
    def handlers(*args: Any, **kwargs: Any) -> Any:
        found = get_handlers(*args, **kwargs)
        decompose = found.get(torch.addcdiv)
        if decompose is None:
            return found

        def unless_of_expansions(*args: Any, **kwargs: Any) -> Any:
            return None if any(map(_is_ours, args)) else decompose(*args, **kwargs)

        return {**found, torch.addcdiv: unless_of_expansions}

    return handlers


@patch(
    "torch._dynamo.polyfills.foreach_lerp_inplace",
    why="Compilers decompose `_foreach_lerp_` into several operations.",
    releases="2.9 to 2.14",
    loss="compiled _foreach_lerp_ may round differently from eager _foreach_lerp_.",
    when=COMPILER,
)
def _lerp_one_by_one(decompose: Callable[..., Any]) -> Callable[..., Any]:
    def foreach_lerp_inplace(*args: Any) -> Any:  # the compiler traces it
        if not any(isinstance(x, MCFTensor) for x in args[0]):
            return decompose(*args)
        starts, ends, weight = args
        for x, y in zip(starts, ends, strict=True):
            torch.ops.aten.lerp_(x, y, weight)
        return starts

    return foreach_lerp_inplace


@patch(
    "torch._subclasses.meta_utils.MetaConverter.meta_tensor",
    why="Compilers assume that a gradient has the terms of its parameter.",
    loss="models may fail to compile while gradients and parameters have different terms; set the "
    "gradients to None before.",
    when=COMPILER,
    takes=("t", "symbolic_context"),
)
@by_name
def _in_contexts_that_fit(convert: Callable[[], Any], given: dict[str, Any]) -> Any:
    if not _fits(given.get("symbolic_context"), given["t"]):
        given["symbolic_context"] = None
    return convert()


# Guards look at the types of tensors before anything is compiled.
@patch(
    "torch._dynamo.eval_frame._callback_from_stance",
    why="Within a step, deferred tensors and gradients have types of their own. A compiled "
    "function would be recompiled for them at each call.",
    loss="functions compiled within a step are recompiled more often, or raise; read their "
    "arguments before.",
    when=COMPILER,
    takes=("callback",),
)
def _after_the_tape(callback_from_stance: Callable[..., Any]) -> Callable[..., Any]:
    def entered(callback: Any) -> Any:
        step = current_step()
        if step is not None and callback not in (None, False):
            step.materialize_all()
        return callback_from_stance(callback)

    return entered


@patch(
    "torch._dynamo.variables.builder.VariableBuilder.__call__",
    why="The same, between two parts of a compiled function.",
    loss="functions compiled within a step may raise; read their arguments before.",
    when=COMPILER,
    takes=("self", "value"),
)
@by_name
def _of_what_is_there(build: Callable[[], Any], given: dict[str, Any]) -> Any:
    given["value"] = resolved(given["value"])
    return build()


def _fits(context: Any, t: Any) -> bool:
    """Return whether the known sizes of a tensor have as many parts as t."""
    contexts, parts = getattr(context, "inner_contexts", {}), t.attrs or {}
    return contexts.keys() == parts.keys() and all(_fits(contexts[x], parts[x]) for x in parts)


def _is_ours(x: Any) -> bool:
    """Whether this stands for an MCFTensor, in the compiler."""
    from torch._dynamo.variables import TensorVariable

    return isinstance(x, TensorVariable) and issubclass(x.class_type, MCFTensor)


def _has_rules(x: Any) -> bool:
    """Return whether a variable stands for an MCFTensor in a format with rules."""
    return bool(x.as_proxy().node.meta["example_value"]._has_rules)


# By name: the keyword of the number, the operator, and an operator that takes a tensor in place of
# the number, which aten lacks. The step size of compiled optimizers is such a tensor.
_WITH_A_NUMBER: dict[str, tuple[str, Any, Any]] = {}
_LIBRARY = torch.library.Library("mcftensor", "FRAGMENT")
for _operator in (
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.addcmul_.default,
    torch.ops.aten.addcdiv_.default,
):
    _name = _operator.overloadpacket.__name__
    _row = OPERATORS[_name.rstrip("_")]
    _keyword = _row.keyword or ""
    _operands = [f"Tensor {x.name}" for x in _operator._schema.arguments[1 : _row.operands]]
    _LIBRARY.define(f"{_name}(Tensor(a!) self, {', '.join(_operands)}, Tensor {_keyword}) -> ()")
    register_in_place(f"mcftensor::{_name}", _row.name)
    _of_tensor = getattr(torch.ops.mcftensor, _name).default
    _WITH_A_NUMBER[_name] = (_keyword, _operator, _of_tensor)


@patch(
    "torch._functorch.compile_utils.rand_ops",
    why="Compilers merge equal calls, except calls of operators listed as random.",
    loss="stochastic roundings of one compiled graph may share their random numbers.",
    when=COMPILER,
    kind=list,
)
def _with_draws(operators: list[Any]) -> list[Any]:
    operators.append(torch.ops.mcftensor.draw_key)
    return operators
