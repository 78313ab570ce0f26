"""Into expansions and out of them: tensors and whole modules."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from mcftensor.checkpoint.module_hooks import (
    KEPT,
    forget,
    keep_expansions,
    kept_in,
    store_as_terms,
)
from mcftensor.dispatch.format_as_dtype import cast
from mcftensor.dispatch.operands import value_in
from mcftensor.dispatch.registry import implements
from mcftensor.formats import (
    Format,
    bf16x2,
    bf16x3,
    default_format,
    for_shape,
    is_vector,
    require_format,
)
from mcftensor.formats.defaults import format_of_buffer, format_of_weights, is_average
from mcftensor.kernels.columns import is_bare, is_transformed
from mcftensor.kernels.custom_ops import opaque
from mcftensor.patches.objects import (
    as_held,
    exchange,
    register_load_hook,
    remove_load_hook,
    without_weight_references,
)
from mcftensor.patches.optimizers import CHECKED, STEPS
from mcftensor.tensor import MCFTensor
from mcftensor.tensor.components import Role, any_format_of, format_of, local, on_local
from mcftensor.training.gradient_hooks import GradientHook

M = TypeVar("M", bound=nn.Module)
Overrides = Mapping[str, Format | str | None]

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
    """Convert a tensor to an expansion, or the parameters of a module to expansions, in place.

    A tensor of any shape becomes a *value* of the same shape: an expansion for arithmetic.

    A module keeps its parameter objects, with the attributes that users set on them, so existing
    optimizers still work (an optimizer with states of another base dtype must be created again),
    and weights that are tied as a whole stay tied. Parameters that require gradients become
    expansions in the *parameter* role. Frozen parameters and gradients become plain tensors of the
    base dtype, as after `module.to(dtype)`; frozen expansions stay expansions. Cast the inputs, or
    use autocast. Floating-point buffers keep the precision of float32, in `bf16i16` for bf16 terms.
    Buffers whose names mark them as averages (as in batch norms) act as values, other buffers as
    parameters.

    Plain parameters that have loaded expansions by `load_state_dict`, and have not been written to
    since, become these expansions, with all terms.

    A second call converts parameters that were added or unfrozen since. Models with
    `save_pretrained`, as in transformers, are stored as terms (`store_as_terms`).

    Args:
        obj: a real floating tensor, an expansion in this or another format, or a module.
        format: the format, or its name. If it has scales shared by blocks of a row, vectors get
            `bf16i16`. By default expansions keep their format. Other parameters get `bf16x3` if
            they have at most one dimension longer than 1 (norms, biases) or are large compared
            with their updates, such as an embedding that starts at N(0, 1), and `bf16x2`
            otherwise. In a module with expansions in another format, new parameters follow it.
        overrides: for modules: a dict from patterns (fnmatch) of qualified names of parameters and
            buffers to a format, or None to leave them unchanged. The first match decides.
        lr: for modules without a format: the learning rate whose updates must survive. Two terms
            of a weight w lose updates below 2^-17 w; weights with a root mean square above 2^14
            times the learning rate get three. The default, above 0.75, is for a rate of 5e-5.

    Returns:
        A new MCFTensor that does not require grad, or the module itself.

    Raises:
        TypeError: an integer, complex, sparse, quantized or nested tensor; an invalid format;
            options of modules given with a tensor.
        ValueError: an override that matches nothing; a tensor that is part of an autograd graph;
            a learning rate that is not positive; parameters or buffers that share a part of their
            memory, such as a weight and its transpose.
        RuntimeError: a parameter that cannot be replaced, because weak references to it exist,
            or a graph or view uses it.

    A call that raises leaves the module unchanged.

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
        plan_conversion(obj, found, overrides or {}, lr).carry_out()
        return obj
    if overrides is not None or lr is not None:
        given = "lr says how parameters" if overrides is None else "overrides name parameters"
        raise TypeError(f"as_expansion: {given} of a module are converted; a tensor has none")
    if rules is not None and isinstance(obj, Tensor):
        return rules.convert(obj.detach(), found)
    _require_convertible("the tensor", obj)
    if is_transformed(obj):
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
    """Return an expansion as a plain tensor, rounded once; or convert a module to plain, in place.

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
        for rules in {format.rules for p in obj.parameters() if (format := any_format_of(p))}:
            if rules is not None:
                rules.module_as_plain(obj, dtype)
        return _module_as_plain(obj, dtype)
    if type(obj) is MCFTensor and is_bare():
        return obj._collapsed(dtype or obj._format.dtype)
    if isinstance(obj, Tensor) and isinstance(own := local(obj), MCFTensor):
        base = own.dtype if is_compiling() else own._format.dtype  # graphs have no formats
        return on_local(_as_plain, obj.detach(), dtype or base)
    if isinstance(obj, Tensor):
        return obj.detach().to(dtype or obj.dtype)
    raise TypeError(f"as_plain: got {type(obj).__name__}; give a tensor or a module")


@opaque(lambda x, dtype: torch.empty_like(x, dtype=dtype))
def _as_plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


implements(torch.ops.mcftensor._as_plain.default)(lambda func, x, dtype: x._collapsed(dtype))


def _require_convertible(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"as_expansion: got {type(x).__name__}; give a floating tensor, such as "
            "torch.tensor(x, dtype=torch.float64), or a module"
        )
    x = local(x)
    if isinstance(x, MCFTensor):
        if x.format.rules is None:
            return
        raise TypeError(
            f"as_expansion: {name} of shape {tuple(x.shape)} is in {x.format.name}; an expansion "
            "is not made from directly; take it back first, with mcf.as_plain(x, torch.float32) of "
            "a tensor or of a whole model"
        )
    if x.is_nested:
        raise TypeError(f"as_expansion: {name} is a nested tensor; convert its parts one by one")
    if not x.is_floating_point() or x.layout != torch.strided or x.dtype.itemsize < 2:
        repair = "torch.view_as_real(x)" if x.is_complex() else "x.to(torch.float64)"
        raise TypeError(
            f"as_expansion: {name} of shape {tuple(x.shape)} is of {x.dtype}, {x.layout}; "
            "expansions are made from dense tensors of bfloat16, float16, float32 or float64: "
            f"give {'x.to_dense()' if x.layout != torch.strided else repair}, or leave it out with "
            "overrides={name: None}"
        )


# ------------------------------------------------------------------------------------- modules


@dataclass
class Held:
    """A parameter or buffer of a module, and its conversion."""

    x: Tensor
    names: list[str]
    format: Format | None
    """Its own, or that of the expansion that it was loaded from."""
    loaded: MCFTensor | None
    wanted: Format | None = None
    """None for a plain tensor."""
    role: Role = "value"

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        """Whether it is no buffer."""
        return isinstance(self.x, nn.Parameter)


def _held_by(where: str, module: nn.Module) -> list[Held]:
    """Return every parameter and buffer of a module that can be converted, with all its names."""
    _require_unsharded(where, module)
    loaded = kept_in(module) if KEPT else {}
    found: dict[int, Held] = {}
    for name, x in itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        if is_lazy(x):
            raise TypeError(f"{name} has no shape yet; run the module once before it is converted")
        if id(x) not in found:
            whole = loaded.get(id(x))
            found[id(x)] = Held(x, [], format_of(x if whole is None else whole), whole)
        found[id(x)].names.append(name)
    return list(found.values())


def _require_unsharded(where: str, module: nn.Module) -> None:
    """Raise RuntimeError if `fully_shard` has been applied to a module or a part of it.

    `fully_shard` keeps views of the parameters, which a conversion would leave outdated.
    """
    for name, part in module.named_modules():
        if any(base.__name__ == "FSDPModule" for base in type(part).__mro__):
            raise RuntimeError(
                f"{where}: {name or 'the module'} ({type(part).__name__}) is sharded by "
                "fully_shard, which has views of its parameters. Convert the module before it is "
                "sharded; x.full_tensor() returns a sharded expansion as a whole"
            )


@dataclass
class ModuleConversion:
    """The planned conversion of a module."""

    module: nn.Module
    changed: list[Held]
    base: torch.dtype
    meant: list[str]
    """Names of what overrides leave as it is."""

    def carry_out(self, seen: Callable[[Held, Tensor], None] | None = None) -> None:
        """Convert all tensors, and call `seen` with each old tensor and its conversion."""
        module = self.module
        _carry_out("as_expansion", module, self.changed, self.base, seen)
        _left.pop(module, None)
        for part in module.modules():
            if any(map(format_of, (part._parameters | part._buffers).values())):
                register_load_hook(part, keep_expansions)
            for name, p in part._parameters.items():
                if isinstance(p, MCFTensor):
                    p._holder = weakref.ref(part), name, id(p)
            if hasattr(part, "save_pretrained"):  # sentence-transformers saves parts by themselves
                store_as_terms(part)
        _converted[module] = self.meant + _converted.get(module, [])


def plan_conversion(
    module: nn.Module, format: Format | None, overrides: Overrides, lr: float | None = None
) -> ModuleConversion:
    """Say what `as_expansion` is to do to a module, and change nothing."""
    found = _held_by("as_expansion", module)
    checked = _checked(overrides, [name for held in found for name in held.names])
    choose = _Choice(format, found, lr)
    changed, meant = [], []
    for held in found:
        matches = [p for p in checked if any(fnmatchcase(name, p) for name in held.names)]
        is_number = held.x.is_floating_point() or held.x.is_complex()
        wanted = checked[matches[0]] if matches else None
        if matches and wanted is None:
            meant.append(held.name)
        elif (is_number or held.name in matches) and choose.changes(held, wanted):
            changed.append(held)
    return ModuleConversion(module, changed, choose.base, meant)


def _module_as_plain(module: M, dtype: torch.dtype | None) -> M:
    changed = [held for held in _held_by("as_plain", module) if format_of(held.x)]
    _carry_out("as_plain", module, changed, dtype, None)
    if changed:
        _left[module] = [held.name for held in changed]
    _converted.pop(module, None)
    for part in module.modules():
        remove_load_hook(part, keep_expansions)
    return module


def left_expansions() -> dict[int, str]:
    """Return the names of parameters that `as_plain` made of expansions in a module, by id."""
    found: dict[int, str] = {}
    for module, names in list(_left.items()):
        own = dict(module.named_parameters())
        found |= {id(own[name]): name for name in names if name in own}
    return found


def converted_modules() -> list[nn.Module]:
    """Return the modules that `as_expansion` was called with and that still exist."""
    return list(_converted)


def left_plain(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module that overrides leave unchanged."""
    own = dict(module.named_parameters())
    return [own[name] for name in _converted[module] if name in own]


def _checked(overrides: Overrides, names: list[str]) -> dict[str, Format | None]:
    """Return the overrides with their formats; raise ValueError if a pattern matches nothing."""
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
    """The formats in a module: given, existing, or the defaults."""

    def __init__(self, format: Format | None, found: list[Held], lr: float | None) -> None:
        self.format, self.lr = format, lr
        formats = {held.name: held.format for held in found if held.format}
        own = [
            (is_vector(x.x.shape), formats[x.name])
            for x in found
            if x.name in formats and x.is_parameter
        ]
        self.present = {} if {f for _, f in own} <= {bf16x2, bf16x3} else dict(reversed(own))
        self.base = (format or next(iter([f for _, f in own] + [*formats.values()]), bf16x2)).dtype

    def changes(self, held: Held, wanted: Format | None) -> bool:
        """Return the conversion of a tensor, or False for none. An override may name its format."""
        x = held.x
        if wanted is not None:
            _require_convertible(held.name, x)
            held.wanted = wanted
            return format_of(x) != wanted
        if not held.is_parameter and not is_average(held.name):
            held.role = "parameter"
        of_buffer = None if held.is_parameter else format_of_buffer(x, self.base)
        if held.format and self.format is None:
            held.wanted = held.format
        elif of_buffer is not None or (x.is_complex() and not held.is_parameter):
            held.wanted = of_buffer
        elif held.format or (held.is_parameter and x.requires_grad):
            _require_convertible(f"parameter {held.name}", x)
            held.wanted = self._of_weights(x)
        if held.wanted is None:
            return not x.is_complex() and (x.dtype != self.base or format_of(x) is not None)
        return format_of(x) != held.wanted

    def _of_weights(self, x: Tensor) -> Format:
        if self.format is not None:
            return for_shape(self.format, x.shape)
        if self.present:
            known = self.present.get(is_vector(x.shape)) or next(iter(self.present.values()))
            return for_shape(known, x.shape)
        return format_of_weights(x, self.lr)


@torch.no_grad()
def _carry_out(
    where: str,
    module: nn.Module,
    changed: list[Held],
    dtype: torch.dtype | None,
    seen: Callable[[Held, Tensor], None] | None,
) -> None:
    """Exchange the contents of tensors, plain ones for such of a dtype, or of their base, and those
    that were loaded from expansions for these."""
    with without_weight_references(module):
        _detach_recomputed(module)
        for held in changed:
            _require_free(where, held)
            _require_storable(where, held)
        _require_apart(where, module, changed)
        first: dict[Any, Tensor] = {}  # of those in one memory, as by `p.data = q.data`
        for held in changed:
            x, memory = held.x, _memory_of(held.x)
            if memory in first:
                new = first[memory].detach()
            elif held.wanted is None:
                new = as_plain(x, dtype)
            else:
                new = value_in(x, held.wanted, name=held.name)
                if held.loaded is not None:
                    new.copy_(held.loaded)
            if seen is not None:
                seen(held, new)
            with torch._C.DisableTorchFunctionSubclass():
                _exchange(x, new, held.role)
            if memory is not None:
                first.setdefault(memory, x)
    if KEPT:
        forget(module)
    if changed or where == "as_expansion":
        STEPS.clear()
        CHECKED.clear()


def _detach_recomputed(module: nn.Module) -> None:
    """Release the graphs of weights that a hook computes anew before each forward pass.

    `torch.nn.utils.weight_norm` and `prune` store such a weight as an attribute of the module.
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
            if not isinstance(name, str):
                continue
            x = vars(part).get(name)
            if isinstance(x, Tensor) and x.grad_fn is not None:
                vars(part)[name] = x.detach()


def _require_free(where: str, held: Held) -> None:
    x = held.x
    if held.wanted is not None and _keeps_object(x, held.wanted.dtype):
        return
    if weakref.getweakrefs(x):
        raise RuntimeError(
            f"{where}: {held.name} of shape {tuple(x.shape)} has weak references to it, which "
            "an exchange of its contents would mislead (averaged copies of a model keep "
            "such). Convert before they are made, or delete them"
        )
    uses: Callable[[], int] = x._use_count  # type: ignore[attr-defined]
    is_free = uses() == 1
    if uses() == 2 and x.is_leaf and x.requires_grad:  # by the node that sums its gradient
        node = torch.autograd.graph.get_gradient_edge(x).node  # held here, it cannot be made anew
        is_free = node is not None and uses() == 2
    if not is_free:
        raise RuntimeError(
            f"{where}: {held.name} of shape {tuple(x.shape)} is in use by an autograd graph or "
            "a view; run backward, or delete the outputs and losses that hold it, first; and "
            "convert before DistributedDataParallel wraps the model"
        )


def _require_storable(where: str, held: Held) -> None:
    if held.wanted is None:
        return
    try:
        held.wanted.require(local(held.x if held.loaded is None else held.loaded))
    except ValueError as error:
        raise ValueError(f"{where}: {held.name}: {error}") from None


def _require_apart(where: str, module: nn.Module, changed: list[Held]) -> None:
    """Raise ValueError if a tensor to be changed shares a part of its memory with another one.

    The conversion gives each its own memory, and would end such a tie in silence.
    """
    ours = {id(held.x) for held in changed}
    lying: dict[Any, list[tuple[str, Tensor]]] = {}
    for name, x in itertools.chain(module.named_parameters(), module.named_buffers()):
        if _memory_of(x) is not None:
            part = x._read()[0] if isinstance(x, MCFTensor) else x
            if address := part.untyped_storage().data_ptr():
                lying.setdefault(address, []).append((name, x))
    for beside in lying.values():
        for (name, x), (other, y) in itertools.combinations(beside, 2):
            is_tied = x is y or _memory_of(x) == _memory_of(y)  # as a whole, which stays
            if not is_tied and (id(x) in ours or id(y) in ours) and _overlap(x, y):
                raise ValueError(
                    f"{where}: {name} of shape {tuple(x.shape)} and {other} of shape "
                    f"{tuple(y.shape)} share a part of their memory, a tie that would end here. "
                    "Tie whole parameters, module.weight = other.weight, and transpose or select "
                    "where they are used; or leave both as they are, by overrides={name: None}; or "
                    f"end the tie yourself: {other} = its .clone()"
                )


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one storage have elements in one place."""
    first, second = (z._read()[0] if isinstance(z, MCFTensor) else z for z in (x, y))
    if first.dtype != second.dtype:
        return True
    size = first.untyped_storage().nbytes() // first.element_size()
    places = torch.zeros(size, dtype=torch.bool, device="cpu")
    places.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(places.as_strided(second.shape, second.stride(), second.storage_offset()).any())


def _memory_of(x: Tensor) -> Any:
    """Return the address and layout of a tensor of this process."""
    parts = x._read() if isinstance(x, MCFTensor) else (x,)
    if x.is_meta or not x.numel() or local(x) is not x:
        return None
    if type(parts[0]) not in (Tensor, nn.Parameter) or parts[0].layout != torch.strided:
        return None
    return tuple((t.data_ptr(), t.device, t.dtype, t.shape, t.stride()) for t in parts)


def _keeps_object(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether an expansion can take other components and stay the same object.

    Graphs, weak references and DistributedDataParallel then remain valid.
    """
    return (
        type(x) is MCFTensor
        and x.dtype == dtype
        and not x._has_rules
        and not x.storage_offset()
        and torch.empty_like(x, device="meta").stride() == x.stride()
    )


def _exchange(x: Tensor, new: Tensor, role: Role) -> None:
    """Give the tensor object x the contents of new, and its gradient the dtype; hooks stay."""
    grad = x.grad
    new = as_held(isinstance(x, nn.Parameter), new, role, x.requires_grad)
    if (
        isinstance(new, MCFTensor)
        and _keeps_object(x, new.format.dtype)
        and new.stride() == x.stride()
    ):
        x.hold_as(new)  # type: ignore[attr-defined]
    else:
        exchange(x, new)
    if grad is not None:
        x.grad = grad.to(x.dtype)
    for hook in (getattr(x, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(x, MCFTensor) and isinstance(hook, GradientHook):
            x._hooks = (*(known for known in x._hooks if known is not hook), hook)
