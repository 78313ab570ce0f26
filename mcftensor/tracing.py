"""What torch.compile would take apart before an expansion sees it.

The front end of the compiler writes `add_` with a number as `alpha`, `addcmul_`, `addcdiv_` and
`addcdiv` with one as `value`, and `_foreach_lerp_`, as sequences of operations; which of them
depends on the release. On plain gradients the first of these rounds to bf16, and the result differs
from the eager one. Here these calls are kept whole for expansions, and left to the compiler for all
else. It also merges equal calls, which must not happen to draws of random numbers, and takes a
gradient to have the terms of its parameter.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.arithmetic import register_in_place
from mcftensor.tensor.tensor import MCFTensor, at_flatten


def keep_calls_whole() -> bool:
    """Teach the compiler's front end, if it is in use by now, and say whether it is.

    Releases that do not take these calls apart need nothing.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo import polyfills
    from torch._dynamo.variables import TorchInGraphFunctionVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._functorch.compile_utils import rand_ops
    from torch._subclasses.meta_utils import MetaConverter

    TensorVariable.call_method = _whole_over_expansions(  # type: ignore[method-assign]
        TensorVariable.call_method
    )
    handlers = TorchInGraphFunctionVariable._get_handlers()
    if torch.addcdiv in handlers:
        handlers[torch.addcdiv] = _unless_of_expansions(handlers[torch.addcdiv])
    if hasattr(polyfills, "foreach_lerp_inplace"):
        polyfills.foreach_lerp_inplace = _lerp_one_by_one(polyfills.foreach_lerp_inplace)
    rand_ops.append(torch.ops.mcftensor.draw_key)
    MetaConverter.meta_tensor = _in_contexts_that_fit(  # type: ignore[method-assign]
        MetaConverter.meta_tensor
    )
    return True


def _whole_over_expansions(call_method: Any) -> Any:
    from torch._dynamo.variables import TorchInGraphFunctionVariable

    @functools.wraps(call_method)
    def method(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        keyword, of_number, of_tensor = _WITH_A_NUMBER.get(name, ("", None, None))
        if keyword not in kwargs or not issubclass(self.class_type, MCFTensor):
            return call_method(self, tx, name, args, kwargs)
        operator: Any = of_tensor if kwargs[keyword].is_tensor() else of_number
        TorchInGraphFunctionVariable(operator).call_function(tx, [self, *args], kwargs)
        return self

    return method


def _unless_of_expansions(decompose: Any) -> Any:
    @functools.wraps(decompose)
    def handler(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if any(x.is_tensor() and issubclass(x.class_type, MCFTensor) for x in args):
            return None
        return decompose(self, tx, *args, **kwargs)

    return handler


def _lerp_one_by_one(decompose: Any) -> Any:
    def foreach_lerp_inplace(self: list[Tensor], end: list[Tensor], weight: Any) -> None:
        if any(isinstance(x, MCFTensor) for x in self):
            for x, y in zip(self, end, strict=True):
                if isinstance(weight, Tensor):
                    torch.ops.aten.lerp_.Tensor(x, y, weight)
                else:
                    torch.ops.aten.lerp_.Scalar(x, y, weight)
        else:
            decompose(self, end, weight)

    return foreach_lerp_inplace


def _in_contexts_that_fit(convert: Any) -> Any:
    @functools.wraps(convert)
    def meta_tensor(
        self: Any, t: Any, shape_env: Any, callback: Any, source: Any, symbolic_context: Any
    ) -> Any:
        context = symbolic_context if _fits(symbolic_context, t) else None
        return convert(self, t, shape_env, callback, source, context)

    return meta_tensor


def _fits(context: Any, t: Any) -> bool:
    """Whether what is known of a tensor's sizes is of a tensor of these parts."""
    contexts, parts = getattr(context, "inner_contexts", {}), t.attrs or {}
    return contexts.keys() == parts.keys() and all(_fits(contexts[x], parts[x]) for x in parts)


# By name: the keyword of the number, the operator, and one that takes a tensor in place of the
# number, which aten has not. Compiled optimizers have their step size in one.
_WITH_A_NUMBER: dict[str, tuple[str, Any, Any]] = {}
_LIBRARY = torch.library.Library("mcftensor", "FRAGMENT")
for _operator, _operands, _keyword in (
    (torch.ops.aten.add_.Tensor, "Tensor other", "alpha"),
    (torch.ops.aten.addcmul_.default, "Tensor tensor1, Tensor tensor2", "value"),
    (torch.ops.aten.addcdiv_.default, "Tensor tensor1, Tensor tensor2", "value"),
):
    _name = _operator.overloadpacket.__name__
    _LIBRARY.define(f"{_name}(Tensor(a!) self, {_operands}, Tensor {_keyword}) -> ()")
    register_in_place(f"mcftensor::{_name}", _name.rstrip("_"))
    _of_tensor = getattr(torch.ops.mcftensor, _name).default
    _WITH_A_NUMBER[_name] = (_keyword, _operator, _of_tensor)

at_flatten(keep_calls_whole)
