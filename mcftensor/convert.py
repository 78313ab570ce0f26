"""Into expansions and out of them: tensors and whole modules."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from mcftensor.arithmetic.write_counts import count_beside, moved, name_, start, unwritten
from mcftensor.checkpoint.loaded_expansions import forget, kept_in
from mcftensor.checkpoint.modules_as_terms import store_as_terms
from mcftensor.checkpoint.state_dicts import ties
from mcftensor.dispatch.format_as_dtype import cast
from mcftensor.dispatch.operands import is_wrapped, rounded_by
from mcftensor.dispatch.registry import implements
from mcftensor.formats import (
    Format,
    bf16i16,
    bf16x2,
    bf16x3,
    default_format,
    is_vector,
    require_format,
)
from mcftensor.formats.defaults import format_of_buffer, format_of_weights, is_average
from mcftensor.kernels.custom_ops import opaque
from mcftensor.passes.format_conversion import key_for
from mcftensor.patches.objects import (
    exchange,
    register_load_hook,
    remove_load_hook,
    without_weight_references,
)
from mcftensor.scaling.rule_table import rule
from mcftensor.scaling.scaled_models import unscaled
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import Role
from mcftensor.tensor.dtensor import format_of, local, on_local, place_of, require_unsharded
from mcftensor.training.conversion_count import note_conversion
from mcftensor.training.gradient_hooks import GradientHook

M = TypeVar("M", bound=nn.Module)
Overrides = Mapping[str, Format | str | None]
Plans = dict[str, tuple[Tensor, Format | None, Role]]
"""Of tensors, by name: their format, or None of what is to be plain, and their role."""
Whole = Mapping[int, MCFTensor]
"""The expansions that plain tensors were loaded from, by the identities of these."""

_converted: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
"""Modules with expansions, and the names of what overrides leave as it is."""

_left: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
"""Modules that `as_plain` was called with, and the names of parameters that were expansions."""


@overload
def as_expansion(
    obj: M,
    format: Format | str | None = ...,
    *,
    overrides: Overrides = ...,
    lr: float | None = ...,
) -> M: ...
@overload
def as_expansion(obj: Tensor, format: Format | str | None = ...) -> MCFTensor: ...
def as_expansion(
    obj: M | Tensor,
    format: Format | str | None = None,
    *,
    overrides: Overrides | None = None,
    lr: float | None = None,
) -> M | MCFTensor:
    """A tensor as an expansion, or a module whose parameters become expansions, in place.

    A tensor of any shape gives a *value* of the same shape: an expansion for arithmetic.

    A module keeps its parameter objects, so that an optimizer built before still works (one that
    has states of another base by then must be made anew), and weights that are tied stay tied.
    Parameters that require gradients become expansions in the *parameter* role. As after
    `module.to(dtype)`, all else follows: frozen parameters and gradients become plain tensors of
    the base dtype; frozen expansions stay expansions. Cast the inputs, or use autocast. Floating
    buffers hold what float32 would, in `bf16i16` beside terms of bf16: those whose names say that
    they are averages (of batch norms, say) act as the numbers that they are, others compute as
    parameters do.

    Plain parameters that have loaded expansions by `load_state_dict`, and have not been written to
    since, become these expansions, with all terms.

    Another call converts what is new: parameters that were added or no longer are frozen. A model
    of transformers, and what else has `save_pretrained`, is stored as terms (`store_as_terms`).

    Args:
        obj: a real floating tensor, an expansion in this or another format, or a module.
        format: the format of all, or its name, but that vectors are in `bf16i16` where blocks of a
            row share scales. By default expansions stay as they are, and others get `bf16x3` if
            they have at most one dimension longer than 1 (norms, biases) or are large against
            their updates, such as an embedding that starts at N(0, 1), else `bf16x2`. In a module
            that has expansions in other formats, what is new follows these.
        overrides: for modules: patterns (fnmatch) of qualified names of parameters and buffers, and
            what they get instead: a format makes it an expansion, None leaves it as it is. The
            first pattern that matches decides.
        lr: for modules without a format: the learning rate whose updates are to survive. Two terms
            of a weight w lose updates below 2^-17 w; weights whose root mean square is above 2^14
            times the learning rate get three. By default that is above 0.75, for a rate of 5e-5.

    Returns:
        A new MCFTensor that does not require grad, or the module itself.

    Raises:
        TypeError: a tensor that is integer, complex, sparse, quantized or nested; something that
            is no format; options of modules given with a tensor.
        ValueError: an override that matches nothing; a tensor that is part of an autograd graph;
            a learning rate that is not positive.
        RuntimeError: a parameter that cannot be exchanged, because weak references to it exist,
            or a graph or view holds it.

    A call that raises leaves the module as it was.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> mcf.as_expansion(torch.tensor([1.0, 0.001]), mcf.bf16x2)
        MCFTensor([1.0000e+00, 1.0000e-03], format=bf16x2)
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2))
        >>> model.weight.format, model.bias.format
        (mcf.bf16x2, mcf.bf16x3)
        >>> model = mcf.as_expansion(torch.nn.Linear(3, 2), overrides={"bias": None})
        >>> model.bias.dtype
        torch.float32
    """
    found = None
    if format is not None:
        found = require_format(format, "as_expansion", with_rules=True)
    rules = None if found is None else found.rules
    if lr is not None and not isinstance(lr, Real | Tensor):
        raise TypeError(f"as_expansion: lr is {lr!r}, a {type(lr).__name__}; give a number")
    if lr is not None and not lr > 0:
        raise ValueError(f"as_expansion: lr is {lr!r}; give the learning rate, above 0")
    if isinstance(obj, nn.Module):
        if rules is not None:
            return rules.convert_module(obj, found, overrides)
        return _module_as_expansion(obj, found, overrides or {}, lr)
    if overrides is not None or lr is not None:
        given = "lr says how parameters" if overrides is None else "overrides name parameters"
        raise TypeError(f"as_expansion: {given} of a module are converted; a tensor has none")
    if rules is not None and isinstance(obj, Tensor):
        return rules.convert(obj.detach(), found)
    _require_convertible("as_expansion", "the tensor", obj)
    if is_wrapped(obj):
        return cast(obj, found or default_format(obj.shape))  # type: ignore[return-value]
    if obj.grad_fn is not None:
        raise ValueError(
            f"as_expansion: the tensor of shape {tuple(obj.shape)} is part of an autograd graph, "
            "which ends here; call .detach() on it first"
        )
    return value_in(obj, found or format_of(obj) or default_format(obj.shape))


@overload
def as_plain(obj: M, dtype: torch.dtype | None = ...) -> M: ...
@overload
def as_plain(obj: Tensor, dtype: torch.dtype | None = ...) -> Tensor: ...
def as_plain(obj: M | Tensor, dtype: torch.dtype | None = None) -> M | Tensor:
    """An expansion as a plain tensor, rounded once; or a module without expansions, in place.

    A module keeps its parameter objects. Parameters, buffers and their gradients that were
    expansions become plain tensors of `dtype`; the others stay as they are. What plain parameters
    were loaded from is no longer kept for `as_expansion`.

    Args:
        obj: an expansion, a plain tensor (converted as by `.to(dtype)`), or a module.
        dtype: a floating dtype; by default the base of each expansion.

    Returns:
        A plain tensor of the same shape that does not require grad, or the module itself.

    Raises:
        TypeError: `dtype` is not a real floating dtype, or `obj` neither tensor nor module.
        RuntimeError: a parameter that cannot be exchanged, because weak references to it exist,
            or a graph or view holds it.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> x = mcf.as_expansion(torch.tensor(0.999, dtype=torch.float64), mcf.bf16x2)
        >>> mcf.as_plain(x), mcf.as_plain(x, torch.float32)
        (tensor(1., dtype=torch.bfloat16), tensor(0.9990))
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"as_plain: {dtype!r} is no floating dtype; give torch.float32, say")
    if isinstance(obj, nn.Module):
        return unscaled(_module_as_plain(obj, dtype), dtype)
    if isinstance(obj, Tensor) and isinstance(own := local(obj), MCFTensor):
        base = own.dtype if is_compiling() else own._format.dtype  # graphs have no formats
        return on_local(_as_plain, obj.detach(), dtype or base)
    if isinstance(obj, Tensor):
        return obj.detach().to(dtype or obj.dtype)
    raise TypeError(f"as_plain: got {type(obj).__name__}; give a tensor or a module")


@opaque(lambda x, dtype: torch.empty_like(x, dtype=dtype))
def _as_plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


@rule(torch.ops.mcftensor._as_plain.default)
def _decode(x: MCFTensor, dtype: torch.dtype) -> Tensor:
    return x._collapsed(dtype)


@implements(torch.ops.mcftensor._as_plain.default)
def _collapse(func: object, x: MCFTensor, dtype: torch.dtype) -> Tensor:
    return x._collapsed(dtype)


def as_state(x: Tensor, format: Format, p: Tensor, name: str) -> MCFTensor:
    """A state of a parameter as a value, whose balanced rounding goes by sequences of its own."""
    count = _count(p)
    if count is None or _count(x) is not None:
        return value_in(x, format)
    return value_in(x, format, count_beside(count, name).to(x.device))


def _count(x: Tensor) -> Tensor | None:
    x = local(x)
    return x._count if isinstance(x, MCFTensor) else None


def _named(name: str, x: Tensor) -> Tensor:
    """The count of a tensor of a module that has not been written to."""
    return moved(start(local(x).device, name), place_of(x))


def value_in(x: Tensor, format: Format, writes: Tensor | None = None) -> MCFTensor:
    """A value, or a DTensor of one; balanced rounding goes by a count, or by the salt of x."""
    if writes is None:
        own = _count(x)
        place = moved(start(local(x).device), place_of(x))
        writes = place if own is None else unwritten(own)

    def convert(x: Tensor) -> MCFTensor:
        format.require(x)
        return rounded_by(x.detach(), format, key_for(format, x.device, writes))

    return on_local(convert, x)  # type: ignore[return-value]


def _require_convertible(where: str, name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{where}: got {type(x).__name__}; give a floating tensor, such as "
            "torch.tensor(x, dtype=torch.float64), or a module"
        )
    x = local(x)
    if isinstance(x, MCFTensor):
        if x.format.rules is None:
            return
        raise TypeError(
            f"{where}: {name} of shape {tuple(x.shape)} is in {x.format.name}; an expansion is "
            "not made from directly; take it back first, with mcf.as_plain(x, torch.float32) of a "
            "tensor or of a whole model"
        )
    if x.is_nested:
        raise TypeError(f"{where}: {name} is a nested tensor; convert its parts one by one")
    if not x.is_floating_point() or x.layout != torch.strided or x.dtype.itemsize < 2:
        raise TypeError(
            f"{where}: {name} of shape {tuple(x.shape)} is of {x.dtype}, {x.layout}; expansions "
            "are made from dense tensors of bfloat16, float16, float32 or float64: convert it "
            "with .to(torch.float64) or .to_dense(), or leave it out with overrides={name: None}"
        )


# ------------------------------------------------------------------------------------- modules


def _module_as_expansion(
    module: M, format: Format | None, overrides: Overrides, lr: float | None
) -> M:
    require_unsharded("as_expansion", module)
    found = _tensors(module)
    overrides = _checked(overrides, [name for _, aliases, _ in found for name in aliases])
    loaded = kept_in(module)
    formats = {id(x): format_of(loaded.get(id(x), x)) for _, _, x in found}
    choose = _Choice(format, [(x, formats[id(x)]) for _, _, x in found], lr)
    plans: Plans = {}
    meant: list[str] = []
    for name, aliases, x in found:
        matching = [p for p in overrides if any(fnmatchcase(alias, p) for alias in aliases)]
        integer = not (x.is_floating_point() or x.is_complex())
        if matching and overrides[matching[0]] is None:
            meant.append(name)
            continue
        if integer and name not in matching:
            continue
        own = formats[id(x)]
        role: Role = "value"
        if not isinstance(x, nn.Parameter) and not matching:
            role = "value" if is_average(name) else "parameter"
        if matching:
            _require_convertible("as_expansion", name, x)
            wanted = overrides[matching[0]]
        elif own and format is None:
            wanted = own
        elif not isinstance(x, nn.Parameter) and (x.is_complex() or choose.of_buffer(x)):
            wanted = None if x.is_complex() else choose.of_buffer(x)
        elif own or (isinstance(x, nn.Parameter) and x.requires_grad):
            _require_convertible("as_expansion", f"parameter {name}", x)
            wanted = choose.of_weights(x)
        else:
            wanted = None
        if wanted is None and (x.is_complex() or (x.dtype == choose.base and not format_of(x))):
            continue
        if wanted is None or format_of(x) != wanted:
            plans[name] = x, wanted, role
    _carry_out("as_expansion", module, plans, choose.base, loaded)
    forget(module)
    _left.pop(module, None)
    note_conversion()
    for part in module.modules():
        if any(format_of(x) for x in _own_tensors(part).values()):
            register_load_hook(part, _keep_expansions)
        for name, p in part._parameters.items():
            if isinstance(p, MCFTensor):
                p._holder = weakref.ref(part), name, id(p)
    _store_pretrained(module)
    _converted[module] = meant + _converted.get(module, [])
    return module


def left_expansions() -> dict[int, str]:
    """Parameters that `as_plain` made of expansions in a module, by identity: their names."""
    found: dict[int, str] = {}
    for module, names in list(_left.items()):
        own = dict(module.named_parameters())
        found |= {id(own[name]): name for name in names if name in own}
    return found


def converted_modules() -> list[nn.Module]:
    """The modules that `as_expansion` was called with, as far as they live."""
    return list(_converted)


def left_plain(module: nn.Module) -> list[Tensor]:
    """The parameters of one that overrides leave as they are."""
    own = dict(module.named_parameters())
    return [own[name] for name in _converted[module] if name in own]


def _checked(overrides: Overrides, names: list[str]) -> dict[str, Format | None]:
    """Overrides whose patterns match something, and their formats."""
    checked = {}
    for pattern, wanted in overrides.items():
        where = f"as_expansion: overrides[{pattern!r}]"
        checked[pattern] = None if wanted is None else require_format(wanted, where)
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"as_expansion: the pattern {pattern!r} in overrides matches none of the "
                f"parameters and buffers: {', '.join(names) or 'the module has none'}"
            )
    return checked


class _Choice:
    """The formats in a module: one that is given, or those that are there, or the defaults."""

    def __init__(
        self,
        format: Format | None,
        tensors: Sequence[tuple[Tensor, Format | None]],
        lr: float | None,
    ) -> None:
        self.format, self.lr = format, lr
        own = [(is_vector(x.shape), f) for x, f in tensors if f and isinstance(x, nn.Parameter)]
        self.present = {} if {f for _, f in own} <= {bf16x2, bf16x3} else dict(reversed(own))
        formats = [f for _, f in tensors if f]
        self.base = (format or next(iter([f for _, f in own] + formats), bf16x2)).dtype

    def of_weights(self, x: Tensor) -> Format:
        """Of a parameter that is trained."""
        if self.format is not None:
            return for_shape(self.format, x.shape)
        if self.present:
            known = self.present.get(is_vector(x.shape)) or next(iter(self.present.values()))
            return for_shape(known, x.shape)
        return format_of_weights(x, self.lr)

    def of_buffer(self, x: Tensor) -> Format | None:
        """Of a floating buffer."""
        return format_of_buffer(x, self.base)


def for_shape(format: Format, shape: torch.Size) -> Format:
    """The format of a parameter where one is given for all: vectors have no rows with scales."""
    return bf16i16 if format.shared and is_vector(shape) else format


def _store_pretrained(module: nn.Module) -> None:
    """Have models that are saved by `save_pretrained`, in safetensors files, stored as terms."""
    if hasattr(module, "save_pretrained"):
        store_as_terms(module)
        return
    for part in module.children():
        _store_pretrained(part)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _keep_expansions(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    *unused: Any,
) -> None:
    """With `assign=True`, torch puts the tensors of a checkpoint in place of the parameters; and
    what was on the meta device has no salt yet."""
    for name, x in _own_tensors(module).items():
        count = _count(x)
        if count is not None and not count.is_meta:
            name_(count, prefix + name, place_of(x))
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, x in _own_tensors(module).items():
        new = state_dict.get(prefix + name)
        format = format_of(x)
        if format and isinstance(new, Tensor) and new.shape == x.shape:
            if format_of(new) != format:
                new = value_in(new, format, _named(prefix + name, new))
            if isinstance(x, nn.Parameter):
                new = _parameter(new, x.requires_grad)
            elif isinstance(part := local(x), MCFTensor):
                new = _in_role(new.detach(), part.role)
            state_dict[prefix + name] = new


def _module_as_plain(module: M, dtype: torch.dtype | None) -> M:
    require_unsharded("as_plain", module)
    plans: Plans = {name: (x, None, "value") for name, _, x in _tensors(module) if format_of(x)}
    _carry_out("as_plain", module, plans, dtype, {})
    forget(module)
    if plans:
        _left[module] = list(plans)
        note_conversion()
    _converted.pop(module, None)
    for part in module.modules():
        remove_load_hook(part, _keep_expansions)
    return module


def _tensors(module: nn.Module) -> list[tuple[str, list[str], Tensor]]:
    """Every parameter and buffer: its first name, all its names, and itself."""
    found: dict[int, tuple[str, list[str], Tensor]] = {}
    for name, x in itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        if is_lazy(x):
            raise TypeError(f"{name} has no shape yet; run the module once before it is converted")
        found.setdefault(id(x), (name, [], x))[1].append(name)
    return list(found.values())


@torch.no_grad()
def _carry_out(
    where: str, module: nn.Module, plans: Plans, dtype: torch.dtype | None, loaded: Whole
) -> None:
    """Exchange the contents of all tensors, plain ones for such of a dtype, or of none, and those
    that were loaded from expansions for these."""
    with without_weight_references(module):
        for name, (x, _, _) in plans.items():
            if weakref.getweakrefs(x):
                raise RuntimeError(
                    f"{where}: {name} of shape {tuple(x.shape)} has weak references to it, which "
                    "an exchange of its contents would mislead (averaged copies of a model keep "
                    "such). Convert before they are made, or delete them"
                )
            if not _is_free(x):
                raise RuntimeError(
                    f"{where}: {name} of shape {tuple(x.shape)} is in use by an autograd graph or "
                    "a view; run backward, or delete the outputs and losses that hold it, first"
                )
        tied = _tied(plans)
        for name, (x, wanted, role) in plans.items():
            if name in tied:
                _exchange(x, _in_role(plans[tied[name]][0].detach(), role))
            elif wanted is None:
                _exchange(x, as_plain(x, dtype))
            else:
                new = value_in(x, wanted, _named(name, x))
                if id(x) in loaded:
                    new.copy_(loaded[id(x)])
                _exchange(x, _in_role(new, role))


def _tied(plans: Plans) -> dict[str, str]:
    """For each tensor in the memory of an earlier one, as by `p.data = q.data`, its name."""
    own = {name: x for name, (x, _, _) in plans.items() if local(x) is x}
    return ties({name: x for name, x in own.items() if _has_memory(x)})


def _has_memory(x: Tensor) -> bool:
    part = x._read()[0] if isinstance(x, MCFTensor) else x
    return type(part) in (Tensor, nn.Parameter) and part.layout == torch.strided


def _is_free(x: Tensor) -> bool:
    """Whether nothing but its Python object, and the node that sums its gradient, holds x."""
    uses: Callable[[], int] = x._use_count  # type: ignore[attr-defined]
    if uses() == 2 and x.is_leaf and x.requires_grad:
        node = torch.autograd.graph.get_gradient_edge(x).node  # held here, it cannot be made anew
        return node is not None and uses() == 2
    return uses() == 1


def _parameter(x: Tensor, requires_grad: bool) -> nn.Parameter:
    p = nn.Parameter(x, requires_grad=requires_grad)
    _in_role(p, "parameter")  # of which that of a DTensor has not been told
    return p


def _in_role(x: Tensor, role: Role) -> Tensor:
    part = local(x)
    if isinstance(part, MCFTensor):
        part._role = role
    return x


def _exchange(x: Tensor, new: Tensor) -> None:
    """Give the tensor object x the contents of new, and its gradient the dtype; hooks stay."""
    grad = x.grad
    if isinstance(x, nn.Parameter):
        new = _parameter(new, x.requires_grad)
    else:
        new.requires_grad_(x.requires_grad)
    exchange(x, new)
    if grad is not None:
        x.grad = grad.to(x.dtype)
    for hook in (getattr(x, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(x, MCFTensor) and isinstance(hook, GradientHook):
            x._hooks = (*(known for known in x._hooks if known is not hook), hook)
