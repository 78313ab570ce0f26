"""What a process with another torch sees: one in which a name that is patched is not as it was.

As a program it takes names, and prints as JSON what was warned of in a process for each, and what
`without_expansions` finds. The processes are forks of one that has imported torch, which takes
seconds, but not mcftensor.
"""

import contextlib
import functools
import importlib
import json
import os
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from support import without_expansions

for _module in ("torch._dynamo", "torch.distributed.checkpoint.state_dict"):
    importlib.import_module(_module)


ATTRIBUTES_OF_OBJECTS = {
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("_flat_weight_refs", "_load_state_dict_pre_hooks"),
}


def change(name: str) -> None:
    """Rename it, or make it of another kind where torch itself needs it."""
    where, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(where)
    found = getattr(owner, attribute, None)
    if attribute in ATTRIBUTES_OF_OBJECTS:
        renamed = property(fset=lambda self, value: vars(self).update(_renamed=value))
        setattr(owner, attribute, renamed)
        if owner is nn.Module:
            owner._register_load_state_dict_pre_hook = register_by_the_new_name
    elif owner is nn.utils:  # public, and imported by the library itself
        setattr(owner, attribute, functools.partial(clip_by_other_names, found))
    elif owner is torch.special:  # the same, of a function without a signature
        setattr(owner, attribute, functools.partial(found))
    elif attribute == "swap_tensors":
        setattr(owner, attribute, functools.partial(swap_by_other_names, found))
    elif attribute == "_callback_from_stance":
        setattr(owner, attribute, functools.partial(call_by_another_name, found))
    elif attribute == "profile_hook_step":
        owner._renamed = staticmethod(found)
        owner._patch_step_function = hook_by_the_new_name
        delattr(owner, attribute)
    elif attribute == "__setattr__":
        owner.__setattr__ = set_by_other_names
    elif attribute == "__repr__":  # without it there is that of `object`
        owner.__repr__ = show_with_indent
    elif isinstance(found, dict):
        setattr(owner, attribute, types.MappingProxyType(found))
    elif isinstance(found, list):
        setattr(owner, attribute, tuple(found))
    elif attribute in vars(owner):
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, None)


def clip_by_other_names(clip, tensors, *args):
    return clip(tensors, *args)


def swap_by_other_names(swap, a, b):
    return swap(a, b)


def call_by_another_name(function, compiler):
    return function(compiler)


def show_with_indent(module, indent=0):
    return " " * indent + type(module).__name__


def set_by_other_names(self, attribute, x):
    object.__setattr__(self, attribute, x)


def register_by_the_new_name(module, hook, with_module=False):
    handle = RemovableHandle(module._renamed)
    module._renamed[handle.id] = hook
    return handle


def hook_by_the_new_name(self):
    self._zero_grad_profile_name = ""
    cls = type(self)
    if not getattr(cls.step, "hooked", False):
        cls.step = self._renamed(cls.step)
        cls.step.hooked = True


def use(name: str) -> None:
    """Arithmetic, a step, and what changes single objects."""
    import mcftensor as mcf  # noqa: PLC0415

    x = mcf.as_expansion(torch.tensor([0.1, 3.0], dtype=torch.float64), mcf.bf16x2)
    torch.testing.assert_close((x * x + 1).tolist(), [1.01, 10.0], rtol=1e-4, atol=0)
    model = mcf.as_expansion(nn.Linear(3, 2))
    kind = torch.optim.SGD if name.startswith("torch.optim.Adam") else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-4)
    before = model.weight.tolist()
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    if "clip_grad" in name:
        mcf.step_in_backward(model, optimizer).remove()
    if "total_norm" in name:
        mcf.order_free_gradients(model, microbatches=1).remove()
    if "foreach_reduce" in name:
        from mcftensor.patches.distributed import REDUCES  # noqa: PLC0415

        REDUCES.install()
    assert model.weight.tolist() != before
    for _ in range(2):
        mcf.as_plain(mcf.checkpoint.store_as_terms(mcf.as_expansion(nn.Linear(3, 2))))
        mcf.collage(torch.optim.AdamW(model.parameters()), "plus")
        with contextlib.suppress(RuntimeError):  # it has weak references of another name
            mcf.as_expansion(nn.GRU(3, 2))


def warned_of(name: str) -> list[list[str]]:
    change(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(name)
    return [[type(w.message).__name__, str(w.message)] for w in caught]


def in_a_fork(function: Callable[..., Any], *args: Any) -> Any:
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            answer = function(*args)
        except BaseException as error:  # noqa: BLE001
            answer = [[type(error).__name__, str(error)]]
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return json.load(pipe)


if __name__ == "__main__":
    _changed, _waiting = json.loads(sys.argv[1])
    _late = in_a_fork(without_expansions.main, _waiting)
    for _name in _changed:
        importlib.import_module(_name.partition(".")[0])
    json.dump([{x: in_a_fork(warned_of, x) for x in _changed}, _late], sys.stdout)
