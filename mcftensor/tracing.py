"""What torch.compile would take apart before an expansion sees it.

The front end of the compiler writes `addcmul_`, `addcdiv_` and `addcdiv` with a number as `value`,
and `_foreach_lerp_`, as sequences of operations, to match CUDA bit by bit. On plain gradients the
first of these rounds to bf16, and the result differs from the eager one. Here these calls are kept
whole for expansions, and left to the compiler for all else. It also merges equal calls, which must
not happen to draws of random numbers.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from mcftensor.dispatch.arithmetic import register_in_place
from mcftensor.tensor import MCFTensor, at_flatten


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

    for name in ("addcmul_", "addcdiv_"):
        decompose = getattr(TensorVariable, "method_" + name, None)
        if decompose is not None:
            setattr(TensorVariable, "method_" + name, _unless_expansion(name, decompose))
    handlers = TorchInGraphFunctionVariable._get_handlers()
    if torch.addcdiv in handlers:
        handlers[torch.addcdiv] = _unless_of_expansions(handlers[torch.addcdiv])
    if hasattr(polyfills, "foreach_lerp_inplace"):
        polyfills.foreach_lerp_inplace = _lerp_one_by_one(polyfills.foreach_lerp_inplace)
    rand_ops.append(torch.ops.mcftensor.draw_key)
    return True


def _unless_expansion(name: str, decompose: Any) -> Any:
    from torch._dynamo.variables import TorchInGraphFunctionVariable

    @functools.wraps(decompose)
    def method(self: Any, tx: Any, *args: Any, value: Any = None, **kwargs: Any) -> Any:
        if not issubclass(self.class_type, MCFTensor):
            return decompose(self, tx, *args, value=value, **kwargs)
        if value is not None and value.is_tensor():
            operator = getattr(torch.ops.mcftensor, name).default
            call = TorchInGraphFunctionVariable(operator)
            call.call_function(tx, [self, *args, value], {})
            return self
        return None

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


# addcmul_ and addcdiv_ whose value is a tensor, which aten has not: compiled optimizers have their
# step size in one.
_LIBRARY = torch.library.Library("mcftensor", "FRAGMENT")
for _name in ("addcmul_", "addcdiv_"):
    _LIBRARY.define(f"{_name}(Tensor(a!) x, Tensor a, Tensor b, Tensor value) -> ()")
    register_in_place(f"mcftensor::{_name}", _name.rstrip("_"))

at_flatten(keep_calls_whole)
