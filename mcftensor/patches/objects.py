"""Changes to single tensors and modules: hooks, and weak references to weights."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from mcftensor.patches.table import by_name, patch, rows
from mcftensor.tensor.components import Role, any_format_of, format_of, local
from mcftensor.tensor.pickling import attributes_of_users
from mcftensor.tensor.step_context import in_step
from mcftensor.tensor.step_tensors import PendingTensor, TapedTensor, resolved
from mcftensor.tensor.tensor import MCFTensor

_TENSOR_HOOKS = rows(
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    why="A parameter keeps its hooks when it becomes an expansion, and `swap_tensors` removes "
    "them.",
    loss="converted parameters lose hooks of this kind; register them afterwards.",
    when="mcf.as_expansion(module)",
    kind=object,
)
(_LOAD_HOOKS,) = rows(
    "torch.nn.Module._load_state_dict_pre_hooks",
    why="`store_as_terms` converts terms to expansions before other hooks see them, and "
    "`as_plain` removes the hook of `as_expansion`.",
    loss="load_state_dict hooks registered before store_as_terms get terms in place of "
    "expansions, and a hook of as_expansion stays after as_plain.",
    when="mcf.as_expansion(module)",
    kind=OrderedDict,
)
(_WEIGHT_REFERENCES,) = rows(
    "torch.nn.RNNBase._flat_weight_refs",
    why="Recurrent layers hold weak references to their weights, which prevent an in-place "
    "conversion to expansions.",
    loss="recurrent layers may refuse the conversion to expansions.",
    when="mcf.as_expansion(module)",
    kind=list,
)


HOSTS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Handles of models whose weights and gradients are on the host: told of steps, of the parameters
that they have stepped, and of gradients to clear."""


@by_name
def _on_the_host_too(zero: Callable[[], None], given: dict[str, Any]) -> None:
    zero()
    for handle in list(HOSTS):
        handle.zero_gradients_of(given["self"], given.get("set_to_none", True))


ZEROES = rows(
    "torch.nn.Module.zero_grad",
    why="Programs that call `model.zero_grad()` mean the gradients of all its parameters, and "
    "those of a model with weights on the host are there.",
    loss="model.zero_grad() leaves gradients on the host; call optimizer.zero_grad().",
    when="mcf.host.weights(model)",
    change=_on_the_host_too,
    takes=("set_to_none",),
)


def exchange(x: Tensor, new: Tensor) -> None:
    """Give the tensor object x the contents of new; its hooks and users' attributes stay."""
    kept = {each.attribute: each.found_in(x) for each in _TENSOR_HOOKS}
    attributes = attributes_of_users(x)
    torch.utils.swap_tensors(x, new)
    x.__dict__.update(attributes)
    for name, hooks in kept.items():
        if hooks is not None:
            setattr(x, name, hooks)


def as_held(is_parameter: bool, x: Tensor, role: Role, requires_grad: bool) -> Tensor:
    """Return a new tensor as a module holds it: a parameter, or in a role."""
    own = local(x)
    if not is_parameter:
        x.requires_grad_(requires_grad)
    elif isinstance(x, MCFTensor):  # what nn.Parameter comes to
        x.requires_grad_(requires_grad)
        x._is_param = True
    else:
        x = nn.Parameter(x, requires_grad=requires_grad)
        own = local(x)
    if isinstance(own, MCFTensor):
        own._role = "parameter" if is_parameter else role
    return x


@patch(
    "torch.utils.swap_tensors",
    why="Within a step the tape holds weak references to its tensors, and `swap_tensors` refuses "
    "tensors with weak references.",
    loss="swap_tensors may refuse tensors that a step has just written; read them before.",
    takes=("t1", "t2"),
)
@by_name
def _off_the_tape(swap: Callable[[], None], given: dict[str, Any]) -> None:
    for x in given.values():
        if isinstance(x, TapedTensor):
            x.materialize()
        elif isinstance(x, PendingTensor):
            resolved(x)
    swap()


@patch(
    "torch.Tensor.data",
    why="`plain.data = expansion` would leave a plain tensor without memory, and the next "
    "operation on it would crash the process. PyTorch dispatches on the assigned-to tensor only.",
    loss="`plain.data = expansion` crashes the process at the next operation.",
    kind=GetSetDescriptorType,
)
def _refusing_what_has_no_memory(data: Any) -> property:
    def assign(self: Tensor, value: Any) -> None:
        value = resolved(value)
        if isinstance(value, MCFTensor) and not isinstance(self, MCFTensor):
            kind, shape = type(value).__name__, tuple(value.shape)
            raise TypeError(
                f"data: a plain tensor of shape {tuple(self.shape)} cannot take the data of a "
                f"{kind} of shape {shape}, which has no storage of its own. To assign values, use "
                "copy_(); to tie a weight, assign the parameter itself"
            )
        data.__set__(self, value)

    return property(data.__get__, assign, doc=data.__doc__)


@patch(
    "torch.to_dlpack",
    "torch.utils.dlpack.to_dlpack",
    why="`to_dlpack` reads a tensor's memory in C++, and an expansion keeps its memory in its "
    "components. The process would end with a segmentation fault.",
    loss="torch.to_dlpack of an expansion crashes the process.",
)
def _by_its_protocol(to_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to_dlpack)
    def refusing(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, MCFTensor):
            return tensor.__dlpack__()  # which raises
        return to_dlpack(resolved(tensor), *args, **kwargs)

    return refusing


def register_load_hook(
    module: nn.Module, hook: Callable[..., None], *, first: bool = False
) -> None:
    """Call `register_load_state_dict_pre_hook` once; a first hook runs before existing ones."""
    if not _keys_of(module, hook):
        handle = module.register_load_state_dict_pre_hook(hook)
        if first and (hooks := _LOAD_HOOKS.found_in(module)) is not None:
            hooks.move_to_end(handle.id, last=False)


def remove_load_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Remove the hook, also from copies of a module, whose hooks have no handle."""
    for key in _keys_of(module, hook):
        del _LOAD_HOOKS.found_in(module)[key]


def has_load_hook(module: nn.Module, hook: Callable[..., None]) -> bool:
    """Whether a module has a hook on loading."""
    return bool(_keys_of(module, hook))


def _keys_of(module: nn.Module, hook: Callable[..., None]) -> list[Any]:
    hooks = _LOAD_HOOKS.found_in(module) or {}
    return [key for key, found in hooks.items() if getattr(found, "hook", None) is hook]


@contextlib.contextmanager
def without_weight_references(module: nn.Module) -> Iterator[None]:
    """Return a context in which recurrent layers have no weak references to their weights."""
    weights: dict[nn.RNNBase, list[nn.Parameter | None]] = {}
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase) and _WEIGHT_REFERENCES.found_in(layer) is not None:
            weights[layer] = [r() if r else None for r in layer._flat_weight_refs]
            layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer, own in weights.items():
            layer._flat_weight_refs = [weakref.ref(p) if p is not None else None for p in own]
            layer.flatten_parameters()


@patch(
    "torch.nn.utils.parametrize.remove_parametrizations",
    why="The weight that remains is computed from the leading terms of the parameters that it had, "
    "as in a forward pass.",
    loss="remove_parametrizations leaves a plain weight, rounded; convert the module again.",
    takes=("module", "tensor_name", "leave_parametrized"),
)
@by_name
def _leaving_all_terms(remove: Callable[[], nn.Module], given: dict[str, Any]) -> nn.Module:
    module, name = given["module"], given["tensor_name"]
    parts = getattr(module, "parametrizations", {})
    held = [*parts[name].parameters()] if name in parts else []
    formats = {x.shape: format for x in held if (format := format_of(x)) is not None}
    if not formats or not given.get("leave_parametrized", True):
        return remove()
    with torch.no_grad():  # within a step parameters are values
        whole = in_step(lambda step: resolved(getattr(module, name)))
    remove()
    left = getattr(module, name)
    if format_of(left) is not None:
        with torch.no_grad():
            left.copy_(whole)
    elif name in module._parameters:
        kept = whole.to(
            format_of(whole) or formats.get(whole.shape) or next(iter(formats.values()))
        )
        module._parameters[name] = nn.Parameter(kept, left.requires_grad)
    return module


@patch(
    "torch.nn.Module.__repr__",
    why="`print(model)` shows the formats of a module's parameters and buffers. PyTorch's "
    "`extra_repr` belongs to each class of module.",
    loss="print(model) does not show formats; see print(mcf.meters.summary(model)).",
    takes=("self",),
)
@by_name
def _showing_formats(text_of: Callable[[], str], given: dict[str, Any]) -> str:
    text = text_of()
    # A class may call this before `__init__`, without the two attributes.
    held = [vars(given["self"]).get(kind, {}).items() for kind in ("_parameters", "_buffers")]
    found = [(name, any_format_of(x)) for name, x in itertools.chain(*held)]
    formats = ", ".join(f"{name}: {format.name}" for name, format in found if format)
    if not formats or not text.endswith(")"):
        return text
    head, line, rest = text.partition("\n")
    if line:  # children, or several lines of the class, with two spaces each
        return f"{head}\n  {formats}\n{rest}"
    return f"{text[:-1]}{'' if text.endswith('()') else ', '}{formats})"


_SCRIPTS = itertools.product(
    ("ScriptFunction", "ScriptModule", "RecursiveScriptModule"), ("save", "save_to_buffer")
)


@patch(
    *(f"torch.jit.{kind}.{name}" for kind, name in _SCRIPTS),
    why="TorchScript writes the memory of each tensor, and an expansion keeps its memory in "
    "its components. The process would end with a segmentation fault.",
    loss="torch.jit.save of a traced model with expansions crashes the process.",
)
def _refusing_expansions(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, x in _stored_by_script(self):
            format = format_of(x) or getattr(x, "format", None)  # a scaled one
            if format is not None:
                raise NotImplementedError(
                    f"torch.jit.save: {name} is an expansion in {format.name}, and TorchScript "
                    "stores plain tensors; trace and save mcf.as_plain(copy.deepcopy(model)), or "
                    "store the model with mcf.save_file"
                )
        return save(self, *args, **kwargs)

    return checked


def _stored_by_script(script: Any) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters, buffers and constants of a module or function of TorchScript.

    Constants are the tensors that a function closes over, and the parameters of a frozen module.
    """
    if isinstance(script, nn.Module):
        yield from itertools.chain(script.named_parameters(), script.named_buffers())
        own: Any = script._c
        graphs = [own._get_method(name).inlined_graph for name in own._method_names()]
    else:
        graphs = [script.inlined_graph]
    for graph in graphs:
        for node in graph.findAllNodes("prim::Constant", True):
            if "value" in node.attributeNames() and node.kindOf("value") == "t":
                yield f"the constant {node.output().debugName()}", node.t("value")


@patch(
    "torch.utils.data._utils.collate.default_collate_fn_map",
    why="The workers of data loaders would stack expansions into plain tensors in shared memory.",
    loss="data loaders with workers cannot collate expansions; give them a collate_fn.",
    kind=dict,
)
def _stacking_expansions(functions: dict[Any, Callable[..., Any]]) -> dict[Any, Any]:
    functions[MCFTensor] = lambda batch, **unused: torch.stack(list(batch))
    return functions
